// Bitwise folds of bytes, whatever the type of the elements: `count` is in bytes.
#include "fold.cuh"

FOLD(and_b8, LaneBits, And, 16, true, 4)
FOLD(or_b8, LaneBits, Or, 16, true, 4)
FOLD(xor_b8, LaneBits, Xor, 16, true, 4)

// Returns 1 in each byte that is not 0.
INLINE u32 truths(u32 word) {
    return (((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word) >> 7 & 0x01010101u;
}

// Converts bytes to truth values, chunk by chunk. Chunks that hold only truth values are not written.
template <int Width> INLINE void make_truths(char *at, u64 chunks) {
#pragma unroll 1
    for (u64 i = grid_start(); i < chunks; i += grid_step()) {
        Chunk<Width> chunk;
        load(chunk, at + i * Width);
        u32 others = 0;
        for (int k = 0; k < Chunk<Width>::words; k++) {
            u32 truth = truths(chunk.word[k]);
            others |= truth ^ chunk.word[k];
            chunk.word[k] = truth;
        }
        if (others != 0) {
            store(at + i * Width, chunk);
        }
    }
}

// Sets every byte that is neither 0 nor 1 to 1, so that booleans from elsewhere become valid.
KERNEL(4)
truth_b8(void *data, unsigned long long count) {
    char *at = (char *)data;
    Split split(true, at, count, 16);
    make_truths<16>(at + split.begin, split.body() / 16);
    make_truths<1>(at, split.begin);
    make_truths<1>(at + split.end, count - split.end);
}
