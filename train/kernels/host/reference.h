// The reference for the kernels. It shares nothing with them.
#pragma once
#include "../../../kernels/host/reference.h"

// One element times a factor that is not rounded first.
inline uint64_t weigh_reference(const Type &type, uint64_t bits, double factor) {
    return encode(type, decode(type, bits) * factor);
}

// One element as another type: as f32, times the weight in f64, as f32, as the other type.
inline uint64_t convert_reference(const Type &from, const Type &to, uint64_t bits, double weight) {
    return encode(to, (float)((double)(float)decode(from, bits) * weight));
}

// Adds halves to halves, as a block of threads does.
inline double sum_of_halves(std::vector<double> sums) {
    for (size_t half = 256; half != 0; half /= 2) {
        for (size_t t = 0; t < half && t + half < sums.size(); t++) {
            sums[t] += sums[t + half];
        }
    }
    return sums[0];
}

// The sums of squares of every block: groups of 16 bytes go to the threads in turn, the rest to the first one.
inline std::vector<double> squares_reference(const Type &type, const std::vector<uint64_t> &elements, size_t grid, size_t block) {
    size_t many = 16 / type.bytes, whole = elements.size() / many * many;
    std::vector<std::vector<double>> threads(grid, std::vector<double>(block));
    for (size_t i = 0; i < elements.size(); i++) {
        size_t thread = i < whole ? i / many % (grid * block) : 0;
        double value = decode(type, elements[i]);
        threads[thread / block][thread % block] += value * value;
    }
    std::vector<double> partials;
    for (const std::vector<double> &sums : threads) {
        partials.push_back(sum_of_halves(sums));
    }
    return partials;
}

// The previous total, plus all partial sums.
inline double total_reference(double total, const std::vector<double> &partials, unsigned block) {
    std::vector<double> sums(block);
    for (size_t i = 0; i < partials.size(); i++) {
        sums[i % block] += partials[i];
    }
    return total + sum_of_halves(sums);
}
