// From f64 to what is narrower, rounded once.
#ifndef KERNELS_NARROW
#define KERNELS_NARROW
#include "base.cuh"

// `value` as an f32 that any narrower format rounds as it would round `value` itself: cut off, and with the last bit set where
// something was cut (rounding to odd).
INLINE float narrow_to_odd(double value) {
    float nearest = (float)value;
    double back = (double)nearest;
    u32 bits = bits_of(nearest);
    if (back == value || value != value || (bits & 1)) {
        return nearest;
    }
    // One of the two neighbours of `value` is odd: not the nearest, so the one on its other side.
    return float_of((back > value) == (value > 0.0) ? bits - 1 : bits + 1);
}

#endif
