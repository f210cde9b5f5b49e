// The basis of all kernels: fixed-width types, bit casts, conversions, and the position of a thread in its grid.
//
// No CUDA header is needed, so the run-time compiler alone can build this. The host build (host/shim.h) defines
// HOST_SHIM and replaces what the device compiler provides.
#ifndef KERNELS_BASE
#define KERNELS_BASE

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8, "fixed widths");

// Blocks of at most 512 threads, at least `blocks` of them on a multiprocessor. 4 blocks mean at most 32 registers, and
// fill a multiprocessor of 2048 threads.
#define KERNEL(blocks) extern "C" __global__ void __launch_bounds__(512, blocks)

#ifndef HOST_SHIM
#define INLINE [[maybe_unused]] static __device__ __forceinline__
#define INLINE_MEMBER __device__ __forceinline__

INLINE u32 bits_of(float value) {
    return __float_as_uint(value);
}
INLINE float float_of(u32 bits) {
    return __uint_as_float(bits);
}
INLINE u64 bits_of(double value) {
    return (u64)__double_as_longlong(value);
}
INLINE double double_of(u64 bits) {
    return __longlong_as_double((long long)bits);
}

INLINE float half_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// Rounds to nearest, ties to even. A NaN stays a NaN.
INLINE u16 float_to_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

// Rounds to the upper half of an f32: to nearest, ties to even. A NaN may become anything.
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

// The thread's number in the grid, and the number of threads: start and step of a loop over all elements.
INLINE u64 grid_start() {
    return (u64)blockIdx.x * blockDim.x + threadIdx.x;
}
INLINE u64 grid_step() {
    return (u64)gridDim.x * blockDim.x;
}

#endif
