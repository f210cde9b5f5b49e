// Shared by the tests of all families: random elements from a seed, memory with guards, and the count of failures.
#pragma once
#include "reference.h"

#include <cstdio>
#include <cstdlib>

static uint64_t seed, failures;

static uint64_t random_bits() {
    seed += 0x9e3779b97f4a7c15ull;
    uint64_t z = seed;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

// Half of the elements are arbitrary patterns, a quarter special values and their neighbours, a quarter small numbers.
static uint64_t random_element(const Type &type) {
    uint64_t bits = random_bits(), choice = random_bits() % 4;
    if (choice >= 2) {
        return bits & type.mask();
    }
    if (type.kind != Kind::Float) {
        return (choice ? bits % 200 - 100 : type.sign() + bits % 5 - 2) & type.mask();
    }
    if (choice == 1) {
        return encode(type, (double)((int64_t)(bits % 4001) - 2000) / 64);
    }
    const uint64_t bases[] = {0, 1ull << type.mantissa(), type.infinity(), type.quiet_nan()};
    return ((bases[bits % 4] + (bits >> 8) % 9 - 4) & (type.sign() - 1)) | (bits >> 16 & 1 ? type.sign() : 0);
}

static uint64_t read_element(const char *at, int bytes) {
    uint64_t bits = 0;
    std::memcpy(&bits, at, bytes);
    return bits;
}

static void write_element(char *at, int bytes, uint64_t bits) {
    std::memcpy(at, &bits, bytes);
}

// Memory of exactly this size, `offset` bytes past a multiple of 64. The address sanitizer detects the first byte
// beyond.
struct Memory {
    char *block;
    char *data;
    uint64_t offset;
    Memory(uint64_t bytes, uint64_t offset) : offset(offset) {
        void *exact = nullptr;
        if (posix_memalign(&exact, 64, bytes + offset + (bytes + offset == 0)) != 0) {
            std::abort();
        }
        block = (char *)exact;
        data = block + offset;
        std::memset(block, 0xa5, offset);
    }
    Memory(const Memory &) = delete;
    ~Memory() {
        for (uint64_t i = 0; i < offset; i++) {
            if ((unsigned char)block[i] != 0xa5) {
                std::fprintf(stderr, "byte %llu before the start was written\n", (unsigned long long)(offset - i));
                failures++;
            }
        }
        std::free(block);
    }
};

static void expect(bool right, const std::string &what, uint64_t index, uint64_t got, uint64_t expected) {
    if (!right && failures++ < 30) {
        std::fprintf(stderr, "%s: element %llu is %llx, not %llx\n", what.c_str(), (unsigned long long)index,
                     (unsigned long long)got, (unsigned long long)expected);
    }
}
