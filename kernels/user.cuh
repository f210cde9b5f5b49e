// Generated: see generate and user.in.

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

// Lanes: the form of a type's elements in memory (an unsigned integer of their size), the type they are computed in,
// and the conversions between them.
//
// The results are those of the crate's folds on the processor, bit for bit. 16- and 8-bit floats are computed in f32
// and rounded once. A computed NaN is the type's positive quiet NaN. 8-bit floats are converted by integer arithmetic.
#ifndef KERNELS_LANES
#define KERNELS_LANES

// The largest divisor for which the divisions without a division instruction are proven.
enum : u32 { QUICK_DIVISOR = 1u << 22 };

// 1 / n, for dividing by n.
struct FloatDivisor {
    float n, reciprocal;
    INLINE_MEMBER explicit FloatDivisor(u32 divisor) : n((float)divisor), reciprocal(1.0f / (float)divisor) {}
    static INLINE_MEMBER bool is_quick(u32 divisor) { return divisor <= QUICK_DIVISOR; }
};

// Returns the correctly rounded quotient below the least normal number, where products with the reciprocal lose bits.
// `near` is within one step of it, and `rest` is the exact remainder. The better neighbour leaves at most half a step.
INLINE float nearest_tiny(float near, float rest, float n) {
    float twice = fabsf(rest) + fabsf(rest);
    float step = n * float_of(1);
    u32 bits = bits_of(near);
    bool moves = twice > step || (twice == step && (bits & 1));
    u32 direction = (bits_of(rest) ^ bits) >> 31 ? 0xffffffffu : 1u;
    return float_of(moves ? bits + direction : bits);
}

// Returns value / n, correctly rounded, for an integer n of at most QUICK_DIVISOR. The product with the reciprocal is
// off by less than two in the last place, and the remainder is exact. So one Newton step rounds as a division would
// (Markstein). Infinities, NaN and zeros have no remainder to correct with. `Tiny`: whether a quotient below the least
// normal f32 matters.
template <bool Tiny> INLINE float divide_carefully(float value, const FloatDivisor &by) {
    float near = value * by.reciprocal;
    float rest = fmaf(-near, by.n, value);
    float better = fmaf(rest, by.reciprocal, near);
    float quotient = fabsf(rest) > 0.0f ? better : near;
    if (Tiny && (bits_of(near) & 0x7fffffffu) - 1 < 0x007fffffu) {
        quotient = nearest_tiny(near, rest, by.n);
    }
    return quotient;
}

// The same in fewer instructions, except for rare values: if it returns true, the quotient must be computed carefully.
// The remainder has the opposite sign, so that zeros keep their sign. The reciprocal inverts it back, because a
// compiler may turn the negative of a fused multiply-add into another multiply-add, which loses the sign.
template <bool Tiny> INLINE bool divide_quickly(float value, const FloatDivisor &by, float &quotient) {
    float near = value * by.reciprocal;
    float excess = fmaf(near, by.n, -value);
    quotient = fmaf(excess, -by.reciprocal, near);
    bool rare = !(fabsf(near) < float_of(0x7f800000u));
    return Tiny ? rare || bits_of(near) * 2 - 2 < 0x00fffffeu : rare;
}

struct DoubleDivisor {
    double n;
    INLINE_MEMBER explicit DoubleDivisor(u32 divisor) : n((double)divisor) {}
    static INLINE_MEMBER bool is_quick(u32) { return true; }
};

// The common part of the floats that are computed in f32. `Tiny`: whether they have numbers below the least normal f32.
template <bool Tiny> struct FloatLane {
    typedef float Wide;
    enum : bool { by_words = false };
    typedef FloatDivisor Divisor;
    static INLINE_MEMBER float divide(float value, const FloatDivisor &by) { return divide_carefully<Tiny>(value, by); }
    static INLINE_MEMBER bool divide_or_tell(float value, const FloatDivisor &by, float &quotient) {
        return divide_quickly<Tiny>(value, by, quotient);
    }
    static INLINE_MEMBER float divide_exactly(float value, const FloatDivisor &by) { return value / by.n; }
    // A number replaces a NaN, so a NaN is the identity of both.
    static INLINE_MEMBER float highest() { return float_of(0x7fc00000u); }
    static INLINE_MEMBER float lowest() { return float_of(0x7fc00000u); }
    // Equal numbers have equal bits, except the zeros: their OR is -0, which counts as the lesser, and their AND is +0.
    static INLINE_MEMBER float lesser(float a, float b) {
        float either = a == b ? float_of(bits_of(a) | bits_of(b)) : a < b ? a : b;
        return b != b ? a : either;
    }
    static INLINE_MEMBER float greater(float a, float b) {
        float either = a == b ? float_of(bits_of(a) & bits_of(b)) : a > b ? a : b;
        return b != b ? a : either;
    }
};

struct LaneF32 : FloatLane<true> {
    typedef u32 Stored;
    static INLINE_MEMBER float widen(u32 stored) { return float_of(stored); }
    static INLINE_MEMBER u32 round(float number) { return bits_of(number); }
    static INLINE_MEMBER u32 narrow(float wide) { return wide != wide ? 0x7fc00000u : round(wide); }
};

struct LaneF64 {
    enum : bool { by_words = false };
    typedef u64 Stored;
    typedef double Wide;
    typedef DoubleDivisor Divisor;
    static INLINE_MEMBER double widen(u64 stored) { return double_of(stored); }
    static INLINE_MEMBER u64 narrow(double wide) { return wide != wide ? 0x7ff8000000000000ull : bits_of(wide); }
    static INLINE_MEMBER double divide(double value, const DoubleDivisor &by) { return value / by.n; }
    static INLINE_MEMBER double divide_exactly(double value, const DoubleDivisor &by) { return value / by.n; }
};

struct LaneF16 : FloatLane<false> {
    typedef u16 Stored;
    static INLINE_MEMBER float widen(u16 stored) { return half_to_float(stored); }
    static INLINE_MEMBER u16 round(float number) { return float_to_half(number); }
    static INLINE_MEMBER u16 narrow(float wide) { return wide != wide ? (u16)0x7e00 : round(wide); }
};

struct LaneBF16 : FloatLane<true> {
    typedef u16 Stored;
    static INLINE_MEMBER float widen(u16 stored) { return float_of((u32)stored << 16); }
    static INLINE_MEMBER u16 round(float number) { return float_to_brain(number); }
    static INLINE_MEMBER u16 narrow(float wide) { return wide != wide ? (u16)0x7fc0 : round(wide); }
};

// Rounds the f32 magnitude `bits` to a float of E exponent and M mantissa bits: to nearest, ties to even. For a
// magnitude above the largest number it returns a pattern above that number's, which the caller clamps.
template <int E, int M> INLINE u32 round_magnitude(u32 bits) {
    const u32 bias = (1u << (E - 1)) - 1;
    const u32 rebias = (127 - bias) << 23;
    const u32 least = rebias + (1u << 23);
    u32 normal = (bits - rebias + ((1u << (22 - M)) - 1) + (bits >> (23 - M) & 1)) >> (23 - M);
    // The last place of this power of two is the format's least subnormal, so the addition rounds.
    const u32 magic = (127 + 24 - bias - M) << 23;
    u32 subnormal = bits_of(float_of(bits) + float_of(magic)) - magic;
    return bits < least ? subnormal : normal;
}

// Moves a byte's lower seven bits to the exponent and mantissa of an f16: the value up to a power of two.
INLINE float small_magnitude(u32 magnitude, int shift) {
    return half_to_float((u16)(magnitude << shift));
}

struct LaneF8E4M3 : FloatLane<false> {
    typedef u8 Stored;
    static INLINE_MEMBER float widen(u8 stored) {
        u32 magnitude = stored & 0x7fu;
        u32 bits = bits_of(small_magnitude(magnitude, 7) * 256.0f);
        return float_of((magnitude == 0x7f ? 0x7fc00000u : bits) | (u32)(stored & 0x80u) << 24);
    }
    // There are no infinities: what does not fit becomes NaN, and a NaN has the largest magnitude.
    static INLINE_MEMBER u8 narrow(float wide) {
        u32 rounded = round_magnitude<4, 3>(bits_of(wide) & 0x7fffffffu);
        return (u8)(rounded >= 0x7f ? 0x7fu : rounded | (bits_of(wide) >> 31) << 7);
    }
};

struct LaneF8E5M2 : FloatLane<false> {
    typedef u8 Stored;
    static INLINE_MEMBER float widen(u8 stored) { return half_to_float((u16)((u32)stored << 8)); }
    static INLINE_MEMBER u8 narrow(float wide) {
        u32 rounded = round_magnitude<5, 2>(bits_of(wide) & 0x7fffffffu);
        u32 clamped = rounded > 0x7c ? 0x7cu : rounded;
        return (u8)(wide != wide ? 0x7eu : clamped | (bits_of(wide) >> 31) << 7);
    }
};

// Divides magnitudes of up to 16 bits: the product with 2^32 / n, rounded up, has the quotient in its upper half. For
// n = 1, 2^32 does not fit and becomes 0, so the dividend itself is added.
struct ShortDivisor {
    u32 reciprocal, whole;
    INLINE_MEMBER explicit ShortDivisor(u32 n) : reciprocal(0xffffffffu / n + 1), whole(n == 1 ? 0xffffffffu : 0) {}
    static INLINE_MEMBER bool is_quick(u32) { return true; }
    INLINE_MEMBER u32 divide(u32 magnitude) const { return __umulhi(magnitude, reciprocal) + (magnitude & whole); }
};

struct WordDivisor {
    u32 n;
    INLINE_MEMBER explicit WordDivisor(u32 divisor) : n(divisor) {}
    static INLINE_MEMBER bool is_quick(u32) { return true; }
    INLINE_MEMBER u32 divide(u32 magnitude) const { return magnitude / n; }
};

struct LongDivisor {
    u32 n;
    INLINE_MEMBER explicit LongDivisor(u32 divisor) : n(divisor) {}
    static INLINE_MEMBER bool is_quick(u32) { return true; }
    // Most world sizes are powers of two, and a device has no division instruction.
    INLINE_MEMBER u64 divide(u64 magnitude) const { return (n & (n - 1)) == 0 ? magnitude >> (31 - __clz((int)n)) : magnitude / n; }
};

// An integer, computed in an unsigned register, where arithmetic wraps. Upper bits are arbitrary until `narrow`.
template <class S, class Signed, class W, class D, bool IsSigned> struct IntegerLane {
    typedef S Stored;
    typedef W Wide;
    enum : bool { by_words = false };
    typedef D Divisor;
    static INLINE_MEMBER W widen(S stored) { return IsSigned ? (W)(Signed)stored : (W)stored; }
    static INLINE_MEMBER S narrow(W wide) { return (S)wide; }
    // Minima and maxima never leave the type, so the upper bits of their operands are right.
    static INLINE_MEMBER W highest() { return IsSigned ? widen((S)((S) ~(S)0 >> 1)) : (W)(S) ~(S)0; }
    static INLINE_MEMBER W lowest() { return IsSigned ? ~highest() : 0; }
    static INLINE_MEMBER bool less(W a, W b) {
        const W top = IsSigned ? (W)1 << (sizeof(W) * 8 - 1) : 0;
        return (a ^ top) < (b ^ top);
    }
    static INLINE_MEMBER W lesser(W a, W b) { return less(b, a) ? b : a; }
    static INLINE_MEMBER W greater(W a, W b) { return less(a, b) ? b : a; }
    // Truncates toward zero. Wraps only for the least number divided by 1, to itself.
    static INLINE_MEMBER W divide(W value, const D &by) {
        W settled = widen(narrow(value));
        W sign = IsSigned ? (W)0 - (settled >> (sizeof(W) * 8 - 1)) : 0;
        return (by.divide((settled ^ sign) - sign) ^ sign) - sign;
    }
    static INLINE_MEMBER W divide_exactly(W value, const D &by) { return divide(value, by); }
};

typedef IntegerLane<u8, signed char, u32, ShortDivisor, true> LaneI8;
typedef IntegerLane<u8, signed char, u32, ShortDivisor, false> LaneU8;
typedef IntegerLane<u16, short, u32, ShortDivisor, true> LaneI16;
typedef IntegerLane<u16, short, u32, ShortDivisor, false> LaneU16;
typedef IntegerLane<u32, int, u32, WordDivisor, true> LaneI32;
typedef IntegerLane<u32, int, u32, WordDivisor, false> LaneU32;
typedef IntegerLane<u64, long long, u64, LongDivisor, true> LaneI64;
typedef IntegerLane<u64, long long, u64, LongDivisor, false> LaneU64;

#endif

// A user's reduction: an expression over `a`, the result so far, and `b`, the element of the next rank.
//
// Before compilation, two placeholders between at signs are replaced: ELEMENT by the crate's name of the element type,
// and EXPRESSION, which occurs once, by the expression. Both operands are floats for the 16- and 8-bit floats, and of
// the element's own type for all others. The result is converted to the operands' type after every step. The expression
// is enclosed in two parentheses, on its own lines, so only an expression compiles: no statements, empty text or open
// comment. The code that inserts an expression refuses one that closes a parenthesis which it did not open.

#ifndef KERNELS_USER
#define KERNELS_USER

template <class S, class V> struct UserInteger {
    typedef S Stored;
    typedef V Value;
    static INLINE_MEMBER V widen(S stored) { return (V)stored; }
    static INLINE_MEMBER S narrow(V value) { return (S)value; }
};

template <class L> struct UserFloat {
    typedef typename L::Stored Stored;
    typedef typename L::Wide Value;
    static INLINE_MEMBER Value widen(Stored stored) { return L::widen(stored); }
    static INLINE_MEMBER Stored narrow(Value value) { return L::narrow(value); }
};

struct UserBool {
    typedef u8 Stored;
    typedef bool Value;
    static INLINE_MEMBER bool widen(u8 stored) { return stored != 0; }
    static INLINE_MEMBER u8 narrow(bool value) { return value ? 1 : 0; }
};

typedef UserFloat<LaneF32> user_f32;
typedef UserFloat<LaneF64> user_f64;
typedef UserFloat<LaneF16> user_f16;
typedef UserFloat<LaneBF16> user_bf16;
typedef UserFloat<LaneF8E4M3> user_f8e4m3;
typedef UserFloat<LaneF8E5M2> user_f8e5m2;
typedef UserInteger<u8, signed char> user_i8;
typedef UserInteger<u16, short> user_i16;
typedef UserInteger<u32, int> user_i32;
typedef UserInteger<u64, long long> user_i64;
typedef UserInteger<u8, unsigned char> user_u8;
typedef UserInteger<u16, unsigned short> user_u16;
typedef UserInteger<u32, unsigned int> user_u32;
typedef UserInteger<u64, unsigned long long> user_u64;
typedef UserBool user_bool;

#endif

INLINE user_@ELEMENT@::Value combine_@ELEMENT@(user_@ELEMENT@::Value a, user_@ELEMENT@::Value b) {
    return static_cast<user_@ELEMENT@::Value>((
@EXPRESSION@
    ));
}

// Folds as all folds do: element by element, in rank order. A single input is copied.
KERNEL(2)
fold_user(const void *inputs, unsigned long long stride_bytes, const void *own, unsigned int own_index, unsigned int ranks, void *output,
          unsigned long long count, unsigned int) {
    typedef user_@ELEMENT@::Stored Stored;
    for (u64 i = grid_start(); i < count; i += grid_step()) {
        const char *base = (const char *)inputs;
        Stored first = ((const Stored *)(own_index == 0 ? own : base))[i];
        user_@ELEMENT@::Value sum = user_@ELEMENT@::widen(first);
        for (u32 rank = 1; rank < ranks; rank++) {
            const void *input = rank == own_index ? own : base + rank * stride_bytes;
            sum = combine_@ELEMENT@(sum, user_@ELEMENT@::widen(((const Stored *)input)[i]));
        }
        ((Stored *)output)[i] = ranks == 1 ? first : user_@ELEMENT@::narrow(sum);
    }
}
