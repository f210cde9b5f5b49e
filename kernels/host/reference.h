// The reference for the kernels: one element at a time, from the definitions of the types and operations. It shares
// nothing with the kernels.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

enum class Kind { Signed, Unsigned, Float };

// The definition of a type. `exponent` is the number of exponent bits. `has_infinity` is false only for e4m3.
struct Type {
    std::string name;
    Kind kind;
    int bytes;
    int exponent = 0;
    bool has_infinity = true;

    int mantissa() const { return bytes * 8 - 1 - exponent; }
    int bias() const { return (1 << (exponent - 1)) - 1; }
    uint64_t mask() const { return bytes == 8 ? ~0ull : (1ull << bytes * 8) - 1; }
    uint64_t sign() const { return 1ull << (bytes * 8 - 1); }
    uint64_t infinity() const { return ((1ull << exponent) - 1) << mantissa(); }
    uint64_t quiet_nan() const { return has_infinity ? infinity() | 1ull << (mantissa() - 1) : sign() - 1; }
};

inline const std::vector<Type> &types() {
    static const std::vector<Type> all = {
        {"f32", Kind::Float, 4, 8},
        {"f64", Kind::Float, 8, 11},
        {"f16", Kind::Float, 2, 5},
        {"bf16", Kind::Float, 2, 8},
        {"f8e4m3", Kind::Float, 1, 4, false},
        {"f8e5m2", Kind::Float, 1, 5},
        {"i8", Kind::Signed, 1},
        {"u8", Kind::Unsigned, 1},
        {"i16", Kind::Signed, 2},
        {"u16", Kind::Unsigned, 2},
        {"i32", Kind::Signed, 4},
        {"u32", Kind::Unsigned, 4},
        {"i64", Kind::Signed, 8},
        {"u64", Kind::Unsigned, 8},
        {"b8", Kind::Unsigned, 1},
        {"bool", Kind::Unsigned, 1},
    };
    return all;
}

inline const Type &type_named(const std::string &name) {
    for (const Type &type : types()) {
        if (type.name == name) {
            return type;
        }
    }
    throw std::string("no type ") + name;
}

// The value of a float's pattern. All of these formats fit in a double.
inline double decode(const Type &type, uint64_t bits) {
    uint64_t magnitude = bits & (type.sign() - 1);
    double sign = bits & type.sign() ? -1.0 : 1.0;
    if (type.has_infinity ? magnitude > type.infinity() : magnitude == type.sign() - 1) {
        return NAN;
    }
    if (type.has_infinity && magnitude == type.infinity()) {
        return sign * INFINITY;
    }
    int exponent = (int)(magnitude >> type.mantissa());
    double fraction = (double)(magnitude & ((1ull << type.mantissa()) - 1));
    double whole = exponent == 0 ? fraction : fraction + std::ldexp(1.0, type.mantissa());
    return sign * std::ldexp(whole, (exponent == 0 ? 1 : exponent) - type.bias() - type.mantissa());
}

// The pattern nearest to a value, ties to even; NaN is the positive quiet one.
inline uint64_t encode(const Type &type, double value) {
    if (std::isnan(value)) {
        return type.quiet_nan();
    }
    uint64_t sign = std::signbit(value) ? type.sign() : 0;
    double magnitude = std::fabs(value);
    if (type.bytes == 8) {
        uint64_t bits;
        std::memcpy(&bits, &value, 8);
        return bits;
    }
    int exponent = magnitude == 0 || std::isinf(magnitude) ? 1 - type.bias() : std::max(std::ilogb(magnitude), 1 - type.bias());
    double steps = std::nearbyint(std::ldexp(magnitude, type.mantissa() - exponent));
    uint64_t largest = type.has_infinity ? type.infinity() - 1 : type.sign() - 2;
    if (std::isinf(magnitude) || std::ldexp(steps, exponent - type.mantissa()) > decode(type, largest)) {
        return type.has_infinity ? sign | type.infinity() : type.quiet_nan();
    }
    // Steps of a normal number count from 2^mantissa, which is where exponent 1 begins.
    return sign | (((uint64_t)(exponent + type.bias() - 1) << type.mantissa()) + (uint64_t)steps);
}

template <class F> F combine_floats(const std::string &op, F a, F b) {
    if (op == "sum" || op == "avg") {
        return a + b;
    }
    if (op == "prod") {
        return a * b;
    }
    if (std::isnan(a) || std::isnan(b)) {
        return std::isnan(b) ? a : b;
    }
    bool a_is_less = a < b || (a == b && std::signbit(a));
    return (op == "min") == a_is_less ? a : b;
}

template <class F>
uint64_t fold_floats(const Type &type, const std::string &op, const std::vector<uint64_t> &inputs, uint32_t divisor) {
    F value = (F)decode(type, inputs[0]);
    for (size_t i = 1; i < inputs.size(); i++) {
        value = combine_floats<F>(op, value, (F)decode(type, inputs[i]));
    }
    return encode(type, op == "avg" ? value / (F)divisor : value);
}

inline __int128 as_number(const Type &type, uint64_t bits) {
    bool negative = type.kind == Kind::Signed && (bits & type.sign());
    return negative ? (__int128)bits - (__int128)type.mask() - 1 : (__int128)bits;
}

inline uint64_t combine_integers(const Type &type, const std::string &op, uint64_t a, uint64_t b) {
    if (op == "sum" || op == "avg") {
        return (a + b) & type.mask();
    }
    if (op == "prod") {
        return (a * b) & type.mask();
    }
    if (op == "min" || op == "max") {
        return (op == "min") == (as_number(type, a) < as_number(type, b)) ? a : b;
    }
    return op == "and" ? a & b : op == "or" ? a | b : a ^ b;
}

// One element of a fold, from the inputs' patterns in rank order.
inline uint64_t fold_reference(const Type &type, const std::string &op, const std::vector<uint64_t> &inputs, uint32_t divisor) {
    if (inputs.size() == 1 && op != "avg") {
        return inputs[0];
    }
    if (type.kind == Kind::Float) {
        return type.bytes == 8 ? fold_floats<double>(type, op, inputs, divisor) : fold_floats<float>(type, op, inputs, divisor);
    }
    if (type.name == "bool") {
        return std::any_of(inputs.begin(), inputs.end(), [](uint64_t bits) { return bits != 0; });
    }
    uint64_t value = inputs[0];
    for (size_t i = 1; i < inputs.size(); i++) {
        value = combine_integers(type, op, value, inputs[i]);
    }
    return op == "avg" ? (uint64_t)(as_number(type, value) / (__int128)divisor) & type.mask() : value;
}

// One element times a scalar that is rounded to the type first.
inline uint64_t premul_reference(const Type &type, uint64_t bits, double scalar) {
    if (type.bytes == 8) {
        return encode(type, decode(type, bits) * scalar);
    }
    float rounded = (float)decode(type, encode(type, scalar));
    return encode(type, (float)decode(type, bits) * rounded);
}
