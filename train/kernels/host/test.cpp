// Runs every kernel for training as plain C++ and compares its bits with the reference.
#include "../../../kernels/host/shim.h"

#include "../train.cu"

#include "../../../kernels/host/checks.h"
#include "reference.h"

typedef void AccumulateKernel(void *, const void *, unsigned long long);
typedef void WeighKernel(void *, unsigned long long, double);
typedef void ConvertKernel(const void *, void *, unsigned long long, double);
typedef void SquaresKernel(const void *, unsigned long long, void *);

// Puts random elements into memory and returns their patterns.
static std::vector<uint64_t> put_elements(const Memory &memory, uint64_t count, const Type &type) {
    std::vector<uint64_t> elements(count);
    for (uint64_t i = 0; i < count; i++) {
        write_element(memory.data + i * type.bytes, type.bytes, elements[i] = random_element(type));
    }
    return elements;
}

static void check_accumulate(const char *name, AccumulateKernel *kernel) {
    const Type &type = type_named(name);
    for (uint64_t count : {0, 1, 7, 8, 9, 1000, 70001}) {
        for (int variant = 0; variant < 3; variant++) {
            // Both aligned, both at the same odd offset, and at different offsets.
            Memory into(count * type.bytes, variant == 0 ? 0 : 3 * type.bytes),
                from(count * type.bytes, variant == 0 ? 0 : (variant == 1 ? 3 : 2) * type.bytes);
            std::vector<uint64_t> before = put_elements(into, count, type), added = put_elements(from, count, type);
            launch(2, 128, [&] { kernel(into.data, from.data, count); });
            for (uint64_t i = 0; i < count; i++) {
                uint64_t got = read_element(into.data + i * type.bytes, type.bytes);
                uint64_t expected = fold_reference(type, "sum", {before[i], added[i]}, 1);
                expect(got == expected, std::string("accumulate ") + name, i, got, expected);
            }
        }
    }
}

// For an element that is 1, the third is closer to a tie of f16 and of bf16 than an f32 can represent.
static const double WEIGHTS[] = {1.0, 0.3, 1.0 + 0x1p-8 + 0x1p-11 + 1e-12, -0.125, 1e-40, 1e300, INFINITY};

static void check_weigh(const char *name, WeighKernel *kernel) {
    const Type &type = type_named(name);
    for (uint64_t count : {0, 1, 7, 8, 9, 1000, 70001}) {
        for (uint64_t shift : {0, 1, 5}) {
            for (double factor : WEIGHTS) {
                Memory data(count * type.bytes, shift * type.bytes);
                std::vector<uint64_t> before = put_elements(data, count, type);
                launch(2, 128, [&] { kernel(data.data, count, factor); });
                for (uint64_t i = 0; i < count; i++) {
                    uint64_t got = read_element(data.data + i * type.bytes, type.bytes);
                    uint64_t expected = weigh_reference(type, before[i], factor);
                    expect(got == expected, std::string("weigh ") + name + " by " + std::to_string(factor), i, got, expected);
                }
            }
        }
    }
}

struct ConvertEntry {
    const char *from;
    const char *to;
    ConvertKernel *kernel;
};

#define C(from, to) {#from, #to, convert_##from##_##to}
#define C4(from) C(from, f32), C(from, f64), C(from, f16), C(from, bf16)
static const ConvertEntry CONVERSIONS[] = {C4(f32), C4(f64), C4(f16), C4(bf16)};

static void check_convert(const ConvertEntry &entry) {
    const Type &from = type_named(entry.from), &to = type_named(entry.to);
    for (uint64_t count : {0, 1, 7, 8, 9, 1000, 70001}) {
        for (int variant = 0; variant < 3; variant++) {
            for (double weight : WEIGHTS) {
                Memory source(count * from.bytes, variant == 1 ? 3 * from.bytes : 0),
                    destination(count * to.bytes, variant == 0 ? 0 : variant * to.bytes);
                std::vector<uint64_t> before = put_elements(source, count, from);
                launch(2, 128, [&] { entry.kernel(source.data, destination.data, count, weight); });
                for (uint64_t i = 0; i < count; i++) {
                    uint64_t got = read_element(destination.data + i * to.bytes, to.bytes);
                    uint64_t expected = convert_reference(from, to, before[i], weight);
                    std::string what = std::string("convert ") + entry.from + " " + entry.to + " by " + std::to_string(weight);
                    expect(got == expected, what, i, got, expected);
                }
            }
        }
    }
}

static void expect_sum(double got, double expected, const std::string &what, uint64_t index) {
    bool same = std::isnan(expected) ? std::isnan(got) : bits_of(got) == bits_of(expected);
    expect(same, what, index, bits_of(got), bits_of(expected));
}

// Aligned and unaligned elements give the same bits, which are close to the sum in a wider type.
static void check_squares(const char *name, SquaresKernel *kernel) {
    const Type &type = type_named(name);
    const unsigned grid = 2, block = 24;
    for (uint64_t count : {0, 1, 7, 8, 9, 1000, 70001}) {
        for (uint64_t shift : {0, 5}) {
            Memory data(count * type.bytes, shift * type.bytes), partials(grid * 8, 0), total(8, 0);
            std::vector<uint64_t> elements = put_elements(data, count, type);
            long double near = 0.5;
            for (uint64_t i = 0; i < count; i++) {
                // Most runs have only numbers whose squares do not overflow.
                bool huge = !(std::fabs(decode(type, elements[i])) < 1e100);
                if (huge && shift != 5) {
                    write_element(data.data + i * type.bytes, type.bytes, elements[i] = encode(type, 1.0 / 3));
                }
                near += (long double)decode(type, elements[i]) * decode(type, elements[i]);
            }
            double before = 0.5;
            std::memcpy(total.data, &before, 8);
            launch_together(grid, block, [&] { kernel(data.data, count, partials.data); });
            launch_together(1, 24, [&] { add_partials(partials.data, grid, total.data); });
            std::string what = std::string("squares ") + name + " of " + std::to_string(count) + " past " + std::to_string(shift);
            std::vector<double> expected = squares_reference(type, elements, grid, block);
            for (unsigned b = 0; b < grid; b++) {
                expect_sum(((const double *)partials.data)[b], expected[b], what, b);
            }
            double got = *(const double *)total.data;
            expect_sum(got, total_reference(0.5, expected, 24), what, grid);
            bool is_near = std::fabs((double)(got - near)) <= (double)near * (count + 1) * 0x1p-53;
            expect(shift == 5 || is_near, what + ", nearly", 0, bits_of(got), bits_of((double)near));
        }
    }
}

// More partial sums than threads.
static void check_add_partials() {
    std::vector<double> partials(1000);
    for (double &partial : partials) {
        partial = (double)(random_bits() >> 40) / 3;
    }
    double total = 7;
    launch_together(1, 96, [&] { add_partials(partials.data(), partials.size(), &total); });
    expect_sum(total, total_reference(7, partials, 96), "partial sums", 0);
}

int main(int argc, char **argv) {
    seed = argc > 1 ? std::strtoull(argv[1], nullptr, 0) : 1;
    std::printf("seed %llu\n", (unsigned long long)seed);
    check_accumulate("f32", accumulate_f32), check_accumulate("f64", accumulate_f64), check_accumulate("f16", accumulate_f16),
        check_accumulate("bf16", accumulate_bf16);
    check_weigh("f32", weigh_f32), check_weigh("f64", weigh_f64), check_weigh("f16", weigh_f16), check_weigh("bf16", weigh_bf16);
    for (const ConvertEntry &entry : CONVERSIONS) {
        check_convert(entry);
    }
    check_squares("f32", squares_f32), check_squares("f64", squares_f64), check_squares("f16", squares_f16),
        check_squares("bf16", squares_bf16);
    check_add_partials();
    std::printf(failures ? "%llu differences\n" : "all kernels agree with the reference\n", (unsigned long long)failures);
    return failures != 0;
}
