// What gradients in buckets need besides the collective: sums in place, weights, sums of squares, and conversions
// between float types.
#include "fold.cuh"
#include "narrow.cuh"

// into[i] = into[i] + from[i], each sum rounded once. The two do not overlap.
#define ACCUMULATE(name, lane, blocks)                                                                                             \
    KERNEL(blocks) accumulate_##name(void *into, const void *from, unsigned long long count) {                                     \
        Inputs both = {(const char *)from, 0, (const char *)into, 0, 2};                                                           \
        fold<lane, Sum<lane>, 16, false>(both, (char *)into, count, 1);                                                            \
    }

ACCUMULATE(f32, LaneF32, 4)
ACCUMULATE(f64, LaneF64, 2)
ACCUMULATE(f16, LaneF16, 4)
ACCUMULATE(bf16, LaneBF16, 4)

// Returns the nearest element.
template <class L> INLINE typename L::Stored nearest(double value) {
    if constexpr (sizeof(typename L::Stored) == 4) {
        return L::narrow((float)value);
    } else if constexpr (sizeof(typename L::Stored) == 8) {
        return L::narrow(value);
    } else {
        return L::narrow(narrow_to_odd(value));
    }
}

template <class L, int Width> INLINE void weigh_some(char *at, double factor) {
    typedef Places<L, Width> P;
    Chunk<Width> chunk, product = {};
    load(chunk, at);
#pragma unroll
    for (int k = 0; k < P::count; k++) {
        P::put(product, k, nearest<L>((double)P::get(chunk, k) * factor));
    }
    store(at, product);
}

template <class L> INLINE void weigh(char *data, u64 count, double factor) {
    const int size = sizeof(typename L::Stored);
    Split split(true, data, count * size, 16);
#pragma unroll 1
    for (u64 i = split.begin + grid_start() * 16; i < split.end; i += grid_step() * 16) {
        weigh_some<L, 16>(data + i, factor);
    }
    u64 edges = count * size - split.body();
#pragma unroll 1
    for (u64 i = grid_start() * size; i < edges; i += grid_step() * size) {
        weigh_some<L, size>(data + split.edge(i), factor);
    }
}

// data[i] = data[i] * factor. The product is in f64 and rounded to the type once. The factor is not rounded first.
#define WEIGH(name, lane)                                                                                                          \
    KERNEL(2) weigh_##name(void *data, unsigned long long count, double factor) {                                                  \
        weigh<lane>((char *)data, count, factor);                                                                                  \
    }

WEIGH(f32, LaneF32)
WEIGH(f64, LaneF64)
WEIGH(f16, LaneF16)
WEIGH(bf16, LaneBF16)

// Adds one square. Squares of types narrower than f64 are exact, so the single rounding of fma changes nothing there.
template <class L> INLINE double with_square(double sum, typename L::Wide value) {
    double wide = (double)value;
    if constexpr (sizeof(wide) == sizeof(value)) {
        return sum + wide * wide;
    } else {
        return fma(wide, wide, sum);
    }
}

template <class L, int Width> INLINE double with_squares(double sum, const Chunk<Width> &chunk) {
#pragma unroll
    for (int k = 0; k < Places<L, Width>::count; k++) {
        sum = with_square<L>(sum, Places<L, Width>::get(chunk, k));
    }
    return sum;
}

// Adds the squares of `count` elements, one after another.
template <class L> INLINE double with_single_squares(double sum, const char *at, u32 count) {
    const int size = sizeof(typename L::Stored);
#pragma unroll 1
    for (u32 k = 0; k < count; k++) {
        Chunk<size> element;
        load(element, at + k * size);
        sum = with_squares<L, size>(sum, element);
    }
    return sum;
}

// Returns this thread's share. Elements go in groups of 16 bytes. Which thread adds which group, and in which order,
// depends only on the numbers of elements and threads. Their address only decides how they are loaded.
template <class L> INLINE double own_squares(const char *data, u64 count) {
    const u32 many = 16 / sizeof(typename L::Stored);
    const u64 groups = count / many, step = grid_step();
    const bool wide = agree(data, 0, 16);
    double sum = 0;
    u64 i = grid_start();
#pragma unroll 1
    for (; wide && i + step < groups; i += 2 * step) {
        Chunk<16> first, second;
        load(first, data + i * 16);
        load(second, data + (i + step) * 16);
        sum = with_squares<L, 16>(with_squares<L, 16>(sum, first), second);
    }
#pragma unroll 1
    for (; i < groups; i += step) {
        sum = with_single_squares<L>(sum, data + i * 16, many);
    }
    if (grid_start() == 0) {
        sum = with_single_squares<L>(sum, data + groups * 16, (u32)(count % many));
    }
    return sum;
}

// Returns the sum over a block, valid in its first thread. Halves are added to halves.
INLINE double sum_of_block(double own) {
    __shared__ double sums[512];
    sums[threadIdx.x] = own;
    __syncthreads();
    for (u32 half = 256; half != 0; half /= 2) {
        if (threadIdx.x < half && threadIdx.x + half < blockDim.x) {
            sums[threadIdx.x] += sums[threadIdx.x + half];
        }
        __syncthreads();
    }
    return sums[0];
}

// partials[b] = the sum of the squares that block b adds up, in f64.
#define SQUARES(name, lane)                                                                                                        \
    KERNEL(4) squares_##name(const void *data, unsigned long long count, void *partials) {                                         \
        double sum = sum_of_block(own_squares<lane>((const char *)data, count));                                                   \
        if (threadIdx.x == 0) {                                                                                                    \
            ((double *)partials)[blockIdx.x] = sum;                                                                                \
        }                                                                                                                          \
    }

SQUARES(f32, LaneF32)
SQUARES(f64, LaneF64)
SQUARES(f16, LaneF16)
SQUARES(bf16, LaneBF16)

// *total = *total + all partials, in one block.
KERNEL(4) add_partials(const void *partials, unsigned long long count, void *total) {
    double own = 0;
#pragma unroll 1
    for (u64 i = threadIdx.x; i < count; i += blockDim.x) {
        own += ((const double *)partials)[i];
    }
    double sum = sum_of_block(own);
    if (threadIdx.x == 0) {
        *(double *)total += sum;
    }
}

// Takes elements as f32, multiplies them by the weight in f64, and rounds to f32 and then to the other type.
template <class From, class To, int Elements> INLINE void convert_some(const char *from, char *to, double weight) {
    typedef Places<From, Elements * (int)sizeof(typename From::Stored)> In;
    typedef Places<To, Elements * (int)sizeof(typename To::Stored)> Out;
    Chunk<Elements * (int)sizeof(typename From::Stored)> source;
    Chunk<Elements * (int)sizeof(typename To::Stored)> destination = {};
    load(source, from);
#pragma unroll
    for (int k = 0; k < Elements; k++) {
        float value = (float)((double)(float)In::get(source, k) * weight);
        Out::put(destination, k, To::narrow((typename To::Wide)value));
    }
    store(to, destination);
}

template <class From, class To> INLINE void convert(const char *from, char *to, u64 count, double weight) {
    const int in = sizeof(typename From::Stored), out = sizeof(typename To::Stored), many = 16 / (in > out ? in : out);
    const u64 groups = agree(from, 0, 16) && agree(to, 0, 16) ? count / many : 0;
#pragma unroll 1
    for (u64 i = grid_start(); i < groups; i += grid_step()) {
        convert_some<From, To, many>(from + i * many * in, to + i * many * out, weight);
    }
#pragma unroll 1
    for (u64 i = groups * many + grid_start(); i < count; i += grid_step()) {
        convert_some<From, To, 1>(from + i * in, to + i * out, weight);
    }
}

// destination[i] = source[i] * weight, through f32. The two do not overlap.
#define CONVERT(from, from_lane, to, to_lane)                                                                                      \
    KERNEL(2)                                                                                                                      \
    convert_##from##_##to(const void *source, void *destination, unsigned long long count, double weight) {                        \
        convert<from_lane, to_lane>((const char *)source, (char *)destination, count, weight);                                     \
    }

#define CONVERT_FROM(from, from_lane)                                                                                              \
    CONVERT(from, from_lane, f32, LaneF32)                                                                                         \
    CONVERT(from, from_lane, f64, LaneF64)                                                                                         \
    CONVERT(from, from_lane, f16, LaneF16)                                                                                         \
    CONVERT(from, from_lane, bf16, LaneBF16)

CONVERT_FROM(f32, LaneF32)
CONVERT_FROM(f64, LaneF64)
CONVERT_FROM(f16, LaneF16)
CONVERT_FROM(bf16, LaneBF16)
