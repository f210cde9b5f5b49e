// Memory access by chunks: moving them, their place in a buffer, and the elements in them.
#ifndef KERNELS_CHUNKS
#define KERNELS_CHUNKS
#include "lanes.cuh"

// What one access moves. A width below a word uses its low bytes, with zeros above.
template <int Width> struct Chunk {
    enum : int { words = Width < 4 ? 1 : Width / 4 };
    u32 word[words];
};

#ifndef HOST_SHIM
// Inputs are read once, so not kept in the L1 cache. The read-only path is not used: the output may be an input.
INLINE void load(Chunk<16> &chunk, const char *at) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(chunk.word[0]), "=r"(chunk.word[1]), "=r"(chunk.word[2]), "=r"(chunk.word[3])
                 : "l"(at)
                 : "memory");
}

INLINE void load(Chunk<8> &chunk, const char *at) {
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(chunk.word[0]), "=r"(chunk.word[1])
                 : "l"(at)
                 : "memory");
}

INLINE void store(char *at, const Chunk<16> &chunk) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(at), "r"(chunk.word[0]), "r"(chunk.word[1]), "r"(chunk.word[2]), "r"(chunk.word[3])
                 : "memory");
}

INLINE void store(char *at, const Chunk<8> &chunk) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" : : "l"(at), "r"(chunk.word[0]), "r"(chunk.word[1]) : "memory");
}

INLINE void load(Chunk<4> &chunk, const char *at) {
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(chunk.word[0]) : "l"(at) : "memory");
}
INLINE void load(Chunk<2> &chunk, const char *at) {
    u16 value;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(value) : "l"(at) : "memory");
    chunk.word[0] = value;
}
INLINE void load(Chunk<1> &chunk, const char *at) {
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(chunk.word[0]) : "l"(at) : "memory");
}

INLINE void store(char *at, const Chunk<4> &chunk) {
    asm volatile("st.global.u32 [%0], %1;" : : "l"(at), "r"(chunk.word[0]) : "memory");
}
INLINE void store(char *at, const Chunk<2> &chunk) {
    asm volatile("st.global.u16 [%0], %1;" : : "l"(at), "h"((u16)chunk.word[0]) : "memory");
}
INLINE void store(char *at, const Chunk<1> &chunk) {
    asm volatile("st.global.u8 [%0], %1;" : : "l"(at), "r"(chunk.word[0]) : "memory");
}
#endif

// Whether both addresses have the same remainder by `width`, a power of two.
INLINE bool agree(const void *a, const void *b, u32 width) {
    return (((u32)(u64)a ^ (u32)(u64)b) & (width - 1)) == 0;
}

// The split of a buffer, in bytes from its start: a body of whole chunks, each at a multiple of `width`, and the edges
// around it. If the addresses do not agree, there is no body, and everything is edge.
struct Split {
    u32 begin;
    u64 end;

    INLINE_MEMBER Split(bool agree, const void *at, u64 bytes, u32 width) {
        u32 head = (0 - (u32)(u64)at) & (width - 1);
        bool any = agree && bytes >= head + width;
        begin = any ? head : 0;
        end = any ? head + (bytes - head) / width * width : 0;
    }

    INLINE_MEMBER u64 body() const { return end - begin; }

    // The offset of byte `i` of the edges.
    INLINE_MEMBER u64 edge(u64 i) const { return i < begin ? i : i + body(); }
};

// Bytes, or words of them, for operations on bits of any type.
struct LaneBits {
    typedef u8 Stored;
    typedef u32 Wide;
    enum : bool { by_words = true };
    static INLINE_MEMBER u32 narrow(u32 wide) { return wide; }
    struct Divisor {
        INLINE_MEMBER explicit Divisor(u32) {}
        static INLINE_MEMBER bool is_quick(u32) { return true; }
    };
};

// The `count` elements of a lane in a chunk, read and written by index. A chunk must be zero before it is filled.
template <class L, int Width> struct Places {
    typedef typename L::Stored Stored;
    typedef typename L::Wide Wide;
    enum : int { count = Width / (int)sizeof(Stored) };

    static INLINE_MEMBER Wide get(const Chunk<Width> &chunk, int k) {
        if constexpr (sizeof(Stored) == 8) {
            return L::widen((Stored)chunk.word[2 * k] | (Stored)chunk.word[2 * k + 1] << 32);
        } else {
            const int per_word = 4 / (int)sizeof(Stored), bits = 8 * (int)sizeof(Stored);
            return L::widen((Stored)(chunk.word[k / per_word] >> (k % per_word * bits)));
        }
    }

    static INLINE_MEMBER void put(Chunk<Width> &chunk, int k, Stored stored) {
        if constexpr (sizeof(Stored) == 8) {
            chunk.word[2 * k] = (u32)stored;
            chunk.word[2 * k + 1] = (u32)(stored >> 32);
        } else {
            const int per_word = 4 / (int)sizeof(Stored), bits = 8 * (int)sizeof(Stored);
            chunk.word[k / per_word] |= (u32)stored << (k % per_word * bits);
        }
    }
};

template <int Width> struct Places<LaneBits, Width> {
    enum : int { count = Chunk<Width>::words };
    static INLINE_MEMBER u32 get(const Chunk<Width> &chunk, int k) { return chunk.word[k]; }
    static INLINE_MEMBER void put(Chunk<Width> &chunk, int k, u32 stored) { chunk.word[k] = stored; }
};

#endif
