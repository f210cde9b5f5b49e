// Runs every kernel as plain C++ and compares its bits with the reference.
#include "shim.h"

#include "../bits.cu"
#include "../average.cu"
#include "../sum.cu"
#include "../premul.cu"
#include "../check.cu"

// Written by the script `test`: user kernels whose expressions do what a built-in fold does.
#include "users.h"

#include "checks.h"

typedef void FoldKernel(const void *, unsigned long long, const void *, unsigned, unsigned, void *, unsigned long long, unsigned);

struct FoldEntry {
    const char *op;
    const char *type;
    FoldKernel *kernel;
};

#define U(op, type) {#op, #type, user_##op##_##type}
#define E(op, type) {#op, #type, fold_##op##_##type}
#define E4(type) E(sum, type), E(prod, type), E(min, type), E(max, type)
static const FoldEntry FOLDS[] = {
    E(and, b8),     E(or, b8),      E(xor, b8),     E(avg, f32),  E(avg, f64),   E(avg, f16), E(avg, bf16), E(avg, f8e4m3),
    E(avg, f8e5m2), E(avg, i8),     E(avg, u8),     E(avg, i16),  E(avg, u16),   E(avg, i32), E(avg, u32),  E(avg, i64),
    E(avg, u64),    E4(i16),        E4(u16),        E4(f8e4m3),   E4(f8e5m2),    E(sum, f32), E(prod, f32), E(sum, f64),
    E(prod, f64),   E(sum, f16),    E(prod, f16),   E(sum, bf16), E(prod, bf16), U(sum, f32), U(sum, f64),  U(sum, f16),
    U(sum, bf16),   U(sum, f8e4m3), U(sum, f8e5m2), U(sum, i8),   U(sum, u8),    U(sum, i16), U(sum, u16),  U(sum, i32),
    U(sum, u32),    U(sum, i64),    U(sum, u64),    U(max, i16),  U(prod, bf16), U(or, bool),
};

struct FoldCase {
    uint64_t count;
    unsigned ranks, own_index, divisor, grid, block;
    bool in_place;
    // In elements, past a multiple of 64 bytes.
    uint64_t inputs_shift, own_shift, output_shift, gap;

    std::string text(const FoldEntry &entry) const {
        char line[256];
        std::snprintf(line, sizeof line, "%s %s count %llu ranks %u own %d divisor %u %ux%u %s shifts %llu %llu %llu gap %llu",
                      entry.op, entry.type, (unsigned long long)count, ranks, (int)own_index, divisor, grid, block,
                      in_place ? "in place" : "apart", (unsigned long long)inputs_shift, (unsigned long long)own_shift,
                      (unsigned long long)output_shift, (unsigned long long)gap);
        return line;
    }
};

static void check_fold(const FoldEntry &entry, const FoldCase &c) {
    const Type &type = type_named(entry.type);
    const int size = type.bytes;
    uint64_t stride = (c.count + c.gap) * size;
    bool has_own = c.own_index < c.ranks;
    Memory inputs(stride * (c.ranks - 1) + c.count * size, c.inputs_shift * size), own(c.count * size, c.own_shift * size);
    Memory apart(c.count * size, c.output_shift * size);
    std::memset(inputs.data, 0xee, stride * (c.ranks - 1) + c.count * size);
    std::vector<std::vector<uint64_t>> columns(c.count, std::vector<uint64_t>(c.ranks));
    for (unsigned r = 0; r < c.ranks; r++) {
        for (uint64_t i = 0; i < c.count; i++) {
            columns[i][r] = random_element(type);
            write_element((r == c.own_index ? own.data : inputs.data + r * stride) + i * size, size, columns[i][r]);
        }
    }
    char *output = c.in_place && has_own ? own.data : apart.data;
    launch(c.grid, c.block, [&] {
        entry.kernel(inputs.data, stride, has_own ? own.data : nullptr, c.own_index, c.ranks, output, c.count, c.divisor);
    });
    std::string what = c.text(entry);
    for (uint64_t i = 0; i < c.count; i++) {
        uint64_t expected = fold_reference(type, entry.op, columns[i], c.divisor), got = read_element(output + i * size, size);
        expect(got == expected, what, i, got, expected);
    }
}

static void check_folds() {
    const uint64_t counts[] = {0, 1, 7, 8, 9, 1000, 70001};
    const unsigned ranks[] = {1, 2, 3, 4, 5, 8, 13};
    const unsigned divisors[] = {1, 3, 1000, 65537, 4194305, 0xffffffffu};
    for (const FoldEntry &entry : FOLDS) {
        for (uint64_t count : counts) {
            for (unsigned n : ranks) {
                if (count > 10000 && n != 3) {
                    continue;
                }
                for (int variant = 0; variant < (count > 10000 ? 2 : 6); variant++) {
                    uint64_t dice = random_bits();
                    FoldCase c = {};
                    c.count = count, c.ranks = n, c.grid = 1 + dice % 3, c.block = dice >> 8 & 1 ? 96 : 512;
                    c.own_index = variant % 3 == 0 ? 0xffffffffu : variant == 1 ? n - 1 : (unsigned)(dice >> 16) % n;
                    c.in_place = variant != 2;
                    c.divisor = variant < 4 ? n : divisors[(dice >> 24) % 6];
                    // Two variants are aligned, two have the same odd offset, two have random offsets.
                    uint64_t shift = variant < 2 ? 0 : 1 + (dice >> 32) % 15;
                    c.inputs_shift = c.own_shift = c.output_shift = shift;
                    c.gap = (64 - count % 64) % 64;
                    if (variant >= 4) {
                        c.own_shift = (dice >> 40) % 16, c.output_shift = (dice >> 44) % 16, c.gap = (dice >> 48) % 5;
                    }
                    check_fold(entry, c);
                }
            }
        }
    }
}

typedef void ScaleKernel(void *, unsigned long long, unsigned);
typedef void PremulKernel(const void *, void *, unsigned long long, double);

static void check_scale(const char *name, ScaleKernel *kernel) {
    const Type &type = type_named(name);
    for (uint64_t count : {0, 1, 7, 8, 9, 1000, 70001}) {
        for (uint64_t shift : {0, 1, 5}) {
            for (unsigned divisor : {1u, 2u, 3u, 6u, 1000u, 4194304u, 4194305u, 0xffffffffu}) {
                Memory data(count * type.bytes, shift * type.bytes);
                std::vector<uint64_t> before(count);
                for (uint64_t i = 0; i < count; i++) {
                    write_element(data.data + i * type.bytes, type.bytes, before[i] = random_element(type));
                }
                launch(2, 128, [&] { kernel(data.data, count, divisor); });
                for (uint64_t i = 0; i < count; i++) {
                    uint64_t got = read_element(data.data + i * type.bytes, type.bytes);
                    uint64_t expected = fold_reference(type, "avg", {before[i]}, divisor);
                    expect(got == expected, std::string("scale ") + name + " by " + std::to_string(divisor), i, got, expected);
                }
            }
        }
    }
}

static void check_premul(const char *name, PremulKernel *kernel) {
    const Type &type = type_named(name);
    // The scalars with 1e-12 are closer to a tie of a narrow type than an f32 can represent.
    const double scalars[] = {0.3, -2.0, 0.0, 1.0625 + 1e-12, 1.125 - 1e-12, 1e30, 1e300, -1e-300, INFINITY, NAN, 3e-8};
    for (uint64_t count : {0, 1, 7, 8, 9, 1000, 70001}) {
        for (int variant = 0; variant < 4; variant++) {
            for (double scalar : scalars) {
                if (count > 10000 && scalar != scalars[0]) {
                    continue;
                }
                Memory source(count * type.bytes, variant % 2 * 3 * type.bytes),
                    apart(count * type.bytes, (variant == 3 ? 2 : variant % 2 * 3) * type.bytes);
                std::vector<uint64_t> before(count);
                for (uint64_t i = 0; i < count; i++) {
                    write_element(source.data + i * type.bytes, type.bytes, before[i] = random_element(type));
                }
                char *output = variant == 2 ? source.data : apart.data;
                launch(2, 128, [&] { kernel(source.data, output, count, scalar); });
                for (uint64_t i = 0; i < count; i++) {
                    uint64_t got = read_element(output + i * type.bytes, type.bytes),
                             expected = premul_reference(type, before[i], scalar);
                    expect(got == expected, std::string("premul ") + name + " by " + std::to_string(scalar), i, got, expected);
                }
            }
        }
    }
}

// Truth values stay unchanged, every other byte becomes 1, and no byte around them is written.
static void check_truth() {
    for (uint64_t count : {0, 1, 7, 15, 16, 17, 31, 32, 33, 1000, 70001}) {
        for (uint64_t shift : {0, 1, 5, 15, 16}) {
            Memory data(count, shift);
            std::vector<unsigned char> before(count);
            for (uint64_t i = 0; i < count; i++) {
                before[i] = (unsigned char)(random_bits() % 3 == 0 ? random_bits() : random_bits() % 2);
                data.data[i] = (char)before[i];
            }
            launch(2, 96, [&] { truth_b8(data.data, count); });
            for (uint64_t i = 0; i < count; i++) {
                unsigned char got = data.data[i];
                expect(got == (before[i] != 0), "truths of " + std::to_string(count), i, got, before[i]);
            }
        }
    }
}

static void check_fill() {
    for (uint64_t bytes : {0, 1, 7, 15, 16, 17, 1000, 70001}) {
        for (uint64_t pattern_bytes : {16, 48, 4096}) {
            for (uint64_t phase : {0ull, 5ull, 16ull, 4095ull, 1ull << 40}) {
                for (uint64_t shift : {0, 5, 16}) {
                    Memory to(bytes, shift), pattern(pattern_bytes, phase == 16 ? 3 : 0);
                    for (uint64_t i = 0; i < pattern_bytes; i++) {
                        pattern.data[i] = (char)random_bits();
                    }
                    launch(2, 96, [&] { fill_pattern(to.data, bytes, pattern.data, pattern_bytes, phase); });
                    for (uint64_t i = 0; i < bytes; i++) {
                        unsigned char got = to.data[i], expected = pattern.data[(i + phase) % pattern_bytes];
                        expect(got == expected, "fill of " + std::to_string(bytes) + " phase " + std::to_string(phase), i, got,
                               expected);
                    }
                }
            }
        }
    }
}

static void check_check() {
    for (uint64_t count : {0, 1, 7, 8, 9, 1000, 7001}) {
        for (unsigned size : {1, 2, 4, 8, 12}) {
            for (uint64_t elements : {1, 7, 1024}) {
                uint64_t phase = random_bits() % 3000, planted = 0, wrong = 5;
                Memory buffer(count * size, count % 3), pattern(elements * size, 0);
                for (uint64_t i = 0; i < elements * size; i++) {
                    pattern.data[i] = (char)random_bits();
                }
                for (uint64_t i = 0; i < count; i++) {
                    std::memcpy(buffer.data + i * size, pattern.data + (i + phase) % elements * size, size);
                    if (random_bits() % 10 == 0) {
                        buffer.data[i * size + random_bits() % size] ^= (char)(1 << random_bits() % 8);
                        planted++;
                    }
                }
                launch_together(2, 32, [&] {
                    check_pattern(buffer.data, count, size, pattern.data, elements, phase, (unsigned long long *)&wrong);
                });
                expect(wrong == 5 + planted, "check of " + std::to_string(count) + " of " + std::to_string(size) + " B", 0, wrong,
                       5 + planted);
            }
        }
    }
}

static void check_quotient(float got, float expected, const char *what, uint32_t n, uint32_t bits) {
    bool same = std::isnan(expected) ? std::isnan(got) : bits_of(got) == bits_of(expected);
    expect(same, what + std::to_string(n), bits, bits_of(got), bits_of(expected));
}

// Compares the divisions with the processor's, over patterns that matter and random ones.
static void check_division() {
    for (int i = 0; i < 3000; i++) {
        uint32_t n = i < 600 ? i + 1 : i < 640 ? QUICK_DIVISOR - (i - 600) : 1 + (uint32_t)(random_bits() % QUICK_DIVISOR);
        FloatDivisor by(n);
        for (int k = 0; k < 6000; k++) {
            uint64_t dice = random_bits();
            uint32_t bits = (uint32_t)dice;
            if (k % 3 == 0) {
                // Subnormals, and values whose quotients are subnormal: ties occur here.
                bits = (bits & 0x80000000u) | (uint32_t)((dice >> 32) % ((uint64_t)n * (k % 2 ? 64 : 1u << 22)) & 0x7fffffffu);
            }
            float value = float_of(bits), expected = value / (float)n, quick, coarse;
            check_quotient(divide_carefully<true>(value, by), expected, "careful division by ", n, bits);
            if (!divide_quickly<true>(value, by, quick)) {
                check_quotient(quick, expected, "quick division by ", n, bits);
            }
            // A tiny quotient may be any tiny number here, because all round to the same half.
            if (!divide_quickly<false>(value, by, coarse)) {
                bool same = float_to_half(coarse) == float_to_half(expected);
                expect(same, "coarse division by " + std::to_string(n), bits, bits_of(coarse), bits_of(expected));
            }
        }
    }
}

int main(int argc, char **argv) {
    seed = argc > 1 ? std::strtoull(argv[1], nullptr, 0) : 1;
    std::printf("seed %llu\n", (unsigned long long)seed);
    check_division();
    check_folds();
    check_scale("f32", scale_f32), check_scale("f64", scale_f64), check_scale("f16", scale_f16), check_scale("bf16", scale_bf16);
    check_premul("f32", premul_f32), check_premul("f64", premul_f64), check_premul("f16", premul_f16),
        check_premul("bf16", premul_bf16);
    check_premul("f8e4m3", premul_f8e4m3), check_premul("f8e5m2", premul_f8e5m2);
    check_truth();
    check_fill();
    check_check();
    std::printf(failures ? "%llu differences\n" : "all kernels agree with the reference\n", (unsigned long long)failures);
    return failures != 0;
}
