// Replaces the device compiler, so that the kernels run as plain C++ under the sanitizers: built-in variables, built-in
// functions, and memory access that checks its alignment.
#pragma once
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#define HOST_SHIM
#define __global__
#define __launch_bounds__(...)
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define INLINE static inline
#define INLINE_MEMBER inline

struct Index {
    unsigned x;
};
inline thread_local Index threadIdx, blockIdx, blockDim, gridDim;
// Set while the threads of a block run concurrently.
inline std::barrier<> *block_barrier = nullptr;
inline void __syncthreads() {
    block_barrier->arrive_and_wait();
}

inline unsigned __umulhi(unsigned a, unsigned b) {
    return (unsigned)((unsigned long long)a * b >> 32);
}
inline int __clz(int value) {
    return value == 0 ? 32 : __builtin_clz((unsigned)value);
}
inline unsigned long long atomicAdd(unsigned long long *at, unsigned long long more) {
    return std::atomic_ref<unsigned long long>(*at).fetch_add(more);
}

template <class To, class From> inline To cast_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}
inline unsigned bits_of(float value) {
    return cast_bits<unsigned>(value);
}
inline float float_of(unsigned bits) {
    return cast_bits<float>(bits);
}
inline unsigned long long bits_of(double value) {
    return cast_bits<unsigned long long>(value);
}
inline double double_of(unsigned long long bits) {
    return cast_bits<double>(bits);
}
inline float half_to_float(unsigned short bits) {
    return (float)cast_bits<_Float16>(bits);
}
inline unsigned short float_to_half(float value) {
    return cast_bits<unsigned short>((_Float16)value);
}

inline void check_alignment(const void *at, int width) {
    if ((uintptr_t)at % width != 0) {
        std::fprintf(stderr, "access of %d bytes at %p\n", width, at);
        std::abort();
    }
}

template <int Width> struct Chunk;
template <int Width> inline void load(Chunk<Width> &chunk, const char *at) {
    check_alignment(at, Width);
    chunk.word[0] = 0;
    std::memcpy(chunk.word, at, Width);
}
template <int Width> inline void store(char *at, const Chunk<Width> &chunk) {
    check_alignment(at, Width);
    std::memcpy(at, chunk.word, Width);
}

// Runs a kernel one thread after another, which is right for kernels without a barrier.
template <class F> void launch(unsigned grid, unsigned block, F kernel) {
    gridDim.x = grid;
    blockDim.x = block;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++) {
        for (threadIdx.x = 0; threadIdx.x < block; threadIdx.x++) {
            kernel();
        }
    }
}

// Runs a kernel block after block, with the threads of each block running concurrently.
template <class F> void launch_together(unsigned grid, unsigned block, F kernel) {
    for (unsigned b = 0; b < grid; b++) {
        std::barrier<> barrier(block);
        block_barrier = &barrier;
        std::vector<std::thread> threads;
        for (unsigned t = 0; t < block; t++) {
            threads.emplace_back([=, &kernel] {
                gridDim.x = grid, blockDim.x = block, blockIdx.x = b, threadIdx.x = t;
                kernel();
            });
        }
        for (auto &thread : threads) {
            thread.join();
        }
    }
}
