// What every kernel stands on: fixed-width names, bit casts, memory access by chunks, and the place of a thread in its grid.
//
// No CUDA header is needed, so that the run-time compiler alone can build all this. The host build (host.h) defines
// HOST_SHIM and stands in for what the device compiler brings along.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8, "fixed widths");

// 512 threads; as many blocks as let a multiprocessor of 2048 threads fill up. 4 means at most 32 registers.
#define KERNEL(blocks) extern "C" __global__ void __launch_bounds__(512, blocks)

#ifndef HOST_SHIM
#define INLINE static __device__ __forceinline__
#define INLINE_MEMBER __device__ __forceinline__

INLINE u32 bits_of(float value) { return __float_as_uint(value); }
INLINE float float_of(u32 bits) { return __uint_as_float(bits); }
INLINE u64 bits_of(double value) { return (u64)__double_as_longlong(value); }
INLINE double double_of(u64 bits) { return __longlong_as_double((long long)bits); }

INLINE float half_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// Nearest, ties to even. A NaN comes out as a NaN.
INLINE u16 float_to_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

// The upper half of an f32, nearest, ties to even. A NaN comes out as anything.
INLINE u16 float_to_brain(float value) {
#if !defined(HOST_SHIM) && __CUDA_ARCH__ >= 800
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#else
    u32 bits = bits_of(value);
    return (u16)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
#endif
}

// What one access moves. Widths below a word stand in its low bytes, zeros above.
template <int Width> struct Chunk {
    enum : int { words = Width < 4 ? 1 : Width / 4 };
    u32 word[words];
};

#ifndef HOST_SHIM
// Read once, so without a place in the first cache. Not through the read-only path: the output may be one of the inputs.
INLINE void load(Chunk<16> &chunk, const char *at) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(chunk.word[0]), "=r"(chunk.word[1]), "=r"(chunk.word[2]), "=r"(chunk.word[3])
                 : "l"(at)
                 : "memory");
}

INLINE void load(Chunk<8> &chunk, const char *at) {
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(chunk.word[0]), "=r"(chunk.word[1]) : "l"(at) : "memory");
}

INLINE void store(char *at, const Chunk<16> &chunk) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(at), "r"(chunk.word[0]), "r"(chunk.word[1]), "r"(chunk.word[2]), "r"(chunk.word[3])
                 : "memory");
}

INLINE void store(char *at, const Chunk<8> &chunk) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" : : "l"(at), "r"(chunk.word[0]), "r"(chunk.word[1]) : "memory");
}

INLINE void load(Chunk<4> &chunk, const char *at) { asm volatile("ld.global.u32 %0, [%1];" : "=r"(chunk.word[0]) : "l"(at) : "memory"); }
INLINE void load(Chunk<2> &chunk, const char *at) {
    u16 value;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(value) : "l"(at) : "memory");
    chunk.word[0] = value;
}
INLINE void load(Chunk<1> &chunk, const char *at) { asm volatile("ld.global.u8 %0, [%1];" : "=r"(chunk.word[0]) : "l"(at) : "memory"); }

INLINE void store(char *at, const Chunk<4> &chunk) { asm volatile("st.global.u32 [%0], %1;" : : "l"(at), "r"(chunk.word[0]) : "memory"); }
INLINE void store(char *at, const Chunk<2> &chunk) { asm volatile("st.global.u16 [%0], %1;" : : "l"(at), "h"((u16)chunk.word[0]) : "memory"); }
INLINE void store(char *at, const Chunk<1> &chunk) { asm volatile("st.global.u8 [%0], %1;" : : "l"(at), "r"(chunk.word[0]) : "memory"); }
#endif

// The thread's number in the grid, and how many there are: where a loop over all elements starts, and its step.
INLINE u64 grid_start() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
INLINE u64 grid_step() { return (u64)gridDim.x * blockDim.x; }

// How `count` elements of `size` bytes are split: a head up to the first multiple of `width`, a body of whole chunks, a tail.
// Where the addresses do not agree there is no body, and everything is edge.
struct Split {
    u64 head, chunks, edges;

    INLINE_MEMBER Split(bool agree, const void *at, u64 count, u32 size, u32 width) {
        head = (u64)((0 - (u32)(u64)at) & (width - 1)) / size;
        chunks = agree && head < count ? (count - head) * size / width : 0;
        edges = count - chunks * (width / size);
    }

    // The element that edge `i` is.
    INLINE_MEMBER u64 edge(u64 i, u32 per_chunk) const { return i < head ? i : i + chunks * per_chunk; }
};

// Whether both addresses have the same remainder by `width`, a power of two.
INLINE bool agree(const void *a, const void *b, u32 width) { return (((u32)(u64)a ^ (u32)(u64)b) & (width - 1)) == 0; }
