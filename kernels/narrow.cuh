// Conversion from f64 to narrower types, rounded once.
#ifndef KERNELS_NARROW
#define KERNELS_NARROW
#include "base.cuh"

// Returns an f32 that any narrower format rounds as it would round `value` itself: truncated, with the last bit set if
// something was cut off (rounding to odd).
INLINE float narrow_to_odd(double value) {
    float nearest = (float)value;
    double back = (double)nearest;
    u32 bits = bits_of(nearest);
    if (back == value || value != value || (bits & 1)) {
        return nearest;
    }
    // One of the two neighbours of `value` is odd. The nearest is not, so it is the one on the other side.
    return float_of((back > value) == (value > 0.0) ? bits - 1 : bits + 1);
}

#endif
