// Means: the sum in rank order, then one division. Also the division alone, of an existing sum.
#include "fold.cuh"

FOLD(avg_f32, LaneF32, QuickMean, 16, true, 4)
FOLD(avg_f64, LaneF64, Mean, 16, false, 2)
FOLD(avg_f16, LaneF16, QuickMean, 16, true, 4)
FOLD(avg_bf16, LaneBF16, QuickMean, 16, true, 4)
FOLD(avg_f8e4m3, LaneF8E4M3, Mean, 8, false, 2)
FOLD(avg_f8e5m2, LaneF8E5M2, Mean, 8, false, 2)
FOLD(avg_i8, LaneI8, Mean, 16, false, 2)
FOLD(avg_u8, LaneU8, Mean, 16, false, 2)
FOLD(avg_i16, LaneI16, Mean, 16, false, 2)
FOLD(avg_u16, LaneU16, Mean, 16, false, 2)
FOLD(avg_i32, LaneI32, Mean, 16, false, 2)
FOLD(avg_u32, LaneU32, Mean, 16, false, 2)
FOLD(avg_i64, LaneI64, Mean, 16, false, 2)
FOLD(avg_u64, LaneU64, Mean, 16, false, 2)

// data[i] = data[i] / divisor: the mean of one input, in place.
#define SCALE(name, lane, op)                                                                                                      \
    KERNEL(2) scale_##name(void *data, unsigned long long count, unsigned int divisor) {                                           \
        Inputs from = {(const char *)data, 0, (const char *)data, 0, 1};                                                           \
        fold<lane, op<lane>, 16, false>(from, (char *)data, count, divisor);                                                       \
    }

SCALE(f32, LaneF32, QuickMean)
SCALE(f64, LaneF64, Mean)
SCALE(f16, LaneF16, QuickMean)
SCALE(bf16, LaneBF16, QuickMean)
