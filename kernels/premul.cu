// Multiplies a rank's elements by a scalar, before a sum.
#include "chunks.cuh"
#include "narrow.cuh"

// The scalar, rounded to the element's type.
template <class L> INLINE float rounded_scalar(double scalar) {
    return L::widen(L::narrow(narrow_to_odd(scalar)));
}
template <> __device__ __forceinline__ float rounded_scalar<LaneF32>(double scalar) {
    return (float)scalar;
}

template <class L, int Width> INLINE void multiply(const char *from, char *to, typename L::Wide scalar) {
    typedef Places<L, Width> P;
    Chunk<Width> chunk, product = {};
    load(chunk, from);
#pragma unroll
    for (int k = 0; k < P::count; k++) {
        P::put(product, k, L::narrow(P::get(chunk, k) * scalar));
    }
    store(to, product);
}

template <class L, int Width> INLINE void premultiply(const char *from, char *to, u64 count, typename L::Wide scalar) {
    const int size = sizeof(typename L::Stored);
    Split split(agree(from, to, Width), to, count * size, Width);
#pragma unroll 1
    for (u64 i = split.begin + grid_start() * Width; i < split.end; i += grid_step() * Width) {
        multiply<L, Width>(from + i, to + i, scalar);
    }
    u64 edges = count * size - split.body();
#pragma unroll 1
    for (u64 i = grid_start() * size; i < edges; i += grid_step() * size) {
        u64 offset = split.edge(i);
        multiply<L, size>(from + offset, to + offset, scalar);
    }
}

// destination[i] = source[i] * scalar. The scalar is rounded to the type first, each product once. Source and
// destination may be the same memory.
#define PREMUL(name, lane, width, rounded)                                                                                         \
    KERNEL(2) premul_##name(const void *source, void *destination, unsigned long long count, double scalar) {                      \
        premultiply<lane, width>((const char *)source, (char *)destination, count, rounded);                                       \
    }

PREMUL(f32, LaneF32, 16, rounded_scalar<LaneF32>(scalar))
PREMUL(f64, LaneF64, 16, scalar)
PREMUL(f16, LaneF16, 16, rounded_scalar<LaneF16>(scalar))
PREMUL(bf16, LaneBF16, 16, rounded_scalar<LaneBF16>(scalar))
PREMUL(f8e4m3, LaneF8E4M3, 8, rounded_scalar<LaneF8E4M3>(scalar))
PREMUL(f8e5m2, LaneF8E5M2, 8, rounded_scalar<LaneF8E5M2>(scalar))
