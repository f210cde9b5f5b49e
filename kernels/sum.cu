// Sums, products, minima and maxima in rank order: for types that the transport does not support, and for results that
// must be the same in any layout.
#include "fold.cuh"

#define ALL_FOUR(name, lane, width)                                                                                                \
    FOLD(sum_##name, lane, Sum, width, false, 2)                                                                                   \
    FOLD(prod_##name, lane, Product, width, false, 2)                                                                              \
    FOLD(min_##name, lane, Least, width, false, 2)                                                                                 \
    FOLD(max_##name, lane, Greatest, width, false, 2)

ALL_FOUR(i16, LaneI16, 16)
ALL_FOUR(u16, LaneU16, 16)
ALL_FOUR(f8e4m3, LaneF8E4M3, 8)
ALL_FOUR(f8e5m2, LaneF8E5M2, 8)

#define SUM_AND_PRODUCT(name, lane, fours, blocks)                                                                                 \
    FOLD(sum_##name, lane, Sum, 16, fours, blocks)                                                                                 \
    FOLD(prod_##name, lane, Product, 16, fours, blocks)

SUM_AND_PRODUCT(f32, LaneF32, true, 4)
SUM_AND_PRODUCT(f64, LaneF64, false, 2)
SUM_AND_PRODUCT(f16, LaneF16, true, 4)
SUM_AND_PRODUCT(bf16, LaneBF16, true, 4)
