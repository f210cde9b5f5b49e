// What a measurement needs besides the collective: to fill buffers with a pattern, and to count elements that differ.
#include "chunks.cuh"

// Fills in chunks of `Width` bytes, none of which wraps around in the pattern. The first one reads at `position`.
template <int Width> INLINE void fill(char *to, u64 chunks, const char *pattern, u64 pattern_bytes, u64 position) {
    u64 step = grid_step() * Width % pattern_bytes;
    u64 at = (position + grid_start() % pattern_bytes * Width) % pattern_bytes;
#pragma unroll 1
    for (u64 i = grid_start(); i < chunks; i += grid_step()) {
        Chunk<Width> chunk;
        load(chunk, pattern + at);
        store(to + i * Width, chunk);
        at += step;
        at -= at >= pattern_bytes ? pattern_bytes : 0;
    }
}

// destination[i] = pattern[(i + phase) % pattern_bytes]. `pattern_bytes` is a positive multiple of 16.
// Fast if the pattern begins at a multiple of 16, and the destination is as far past one as the phase.
KERNEL(2)
fill_pattern(void *destination, unsigned long long bytes, const void *pattern, unsigned long long pattern_bytes,
             unsigned long long phase) {
    char *to = (char *)destination;
    const char *from = (const char *)pattern;
    u64 position = phase % pattern_bytes;
    u64 head = (16 - ((u64)to & 15)) & 15;
    bool fast = agree(from, 0, 16) && agree(to, (const void *)position, 16) && pattern_bytes % 16 == 0 && bytes >= head;
    u64 body = fast ? (bytes - head) / 16 : 0;
    u64 before = fast ? head : bytes;
    if (fast) {
        u64 done = head + body * 16;
        fill<16>(to + head, body, from, pattern_bytes, (position + head) % pattern_bytes);
        fill<1>(to + done, bytes - done, from, pattern_bytes, (position + done % pattern_bytes) % pattern_bytes);
    }
    fill<1>(to, before, from, pattern_bytes, position);
}

// Whether elements of `size` bytes differ. Compares words if the size and both addresses allow it, otherwise bytes.
INLINE bool differs(const char *a, const char *b, u32 size, bool by_words) {
    u32 difference = 0;
    if (by_words) {
        for (u32 i = 0; i < size; i += 4) {
            difference |= *(const u32 *)(a + i) ^ *(const u32 *)(b + i);
        }
    } else {
        for (u32 i = 0; i < size; i++) {
            difference |= (u32)(u8)(a[i] ^ b[i]);
        }
    }
    return difference != 0;
}

// Adds to *wrong the number of the `count` elements that differ from pattern[(i + phase) % pattern_elements].
// The pattern has at least one element.
KERNEL(2)
check_pattern(const void *buffer, unsigned long long count, unsigned int element_bytes, const void *pattern,
              unsigned long long pattern_elements, unsigned long long phase, unsigned long long *wrong) {
    __shared__ u64 counts[512];
    const char *got = (const char *)buffer, *expected = (const char *)pattern;
    bool by_words = element_bytes % 4 == 0 && agree(got, 0, 4) && agree(expected, 0, 4);
    u64 step = grid_step() % pattern_elements;
    u64 at = (grid_start() % pattern_elements + phase % pattern_elements) % pattern_elements;
    u64 mine = 0;
#pragma unroll 1
    for (u64 i = grid_start(); i < count; i += grid_step()) {
        mine += differs(got + i * element_bytes, expected + at * element_bytes, element_bytes, by_words) ? 1 : 0;
        at += step;
        at -= at >= pattern_elements ? pattern_elements : 0;
    }
    counts[threadIdx.x] = mine;
    __syncthreads();
    if (threadIdx.x == 0) {
        u64 total = 0;
        for (u32 i = 0; i < blockDim.x; i++) {
            total += counts[i];
        }
        if (total != 0) {
            atomicAdd(wrong, total);
        }
    }
}
