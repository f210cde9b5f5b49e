// Folds: n inputs, one output, one pass, in rank order.
#ifndef KERNELS_FOLD
#define KERNELS_FOLD
#include "chunks.cuh"

// Below sm_80, neither four loads nor a second way to divide fits in 32 registers beside the sums. The memory of these
// devices does not need so many loads either.
#if !defined(HOST_SHIM) && __CUDA_ARCH__ < 800
#define ROOM_FOR_MORE false
#else
#define ROOM_FOR_MORE true
#endif

// Operations on two values. The identity leaves every other value unchanged: for a sum of floats it is -0.
template <class L> struct Sum {
    typedef typename L::Wide W;
    enum : bool { divides = false, is_quick = false };
    static INLINE_MEMBER W identity() { return (W)-0.0f; }
    static INLINE_MEMBER W combine(W a, W b) { return a + b; }
    static INLINE_MEMBER W finish(W value, const typename L::Divisor &) { return value; }
    static INLINE_MEMBER W finish_exactly(W value, const typename L::Divisor &) { return value; }
};

template <class L> struct Product : Sum<L> {
    typedef typename L::Wide W;
    static INLINE_MEMBER W identity() { return (W)1; }
    static INLINE_MEMBER W combine(W a, W b) { return a * b; }
};

template <class L> struct Least : Sum<L> {
    typedef typename L::Wide W;
    static INLINE_MEMBER W identity() { return L::highest(); }
    static INLINE_MEMBER W combine(W a, W b) { return L::lesser(a, b); }
};

template <class L> struct Greatest : Sum<L> {
    typedef typename L::Wide W;
    static INLINE_MEMBER W identity() { return L::lowest(); }
    static INLINE_MEMBER W combine(W a, W b) { return L::greater(a, b); }
};

template <class L> struct And : Sum<L> {
    static INLINE_MEMBER u32 identity() { return 0xffffffffu; }
    static INLINE_MEMBER u32 combine(u32 a, u32 b) { return a & b; }
};

template <class L> struct Or : Sum<L> {
    static INLINE_MEMBER u32 identity() { return 0; }
    static INLINE_MEMBER u32 combine(u32 a, u32 b) { return a | b; }
};

template <class L> struct Xor : Or<L> {
    static INLINE_MEMBER u32 combine(u32 a, u32 b) { return a ^ b; }
};

// The sum, then the division. Small divisors have a faster way that is as exact.
template <class L> struct Mean : Sum<L> {
    typedef typename L::Wide W;
    enum : bool { divides = true };
    static INLINE_MEMBER W finish(W value, const typename L::Divisor &by) { return L::divide(value, by); }
    static INLINE_MEMBER W finish_exactly(W value, const typename L::Divisor &by) { return L::divide_exactly(value, by); }
};

// For lanes that can detect rare values.
template <class L> struct QuickMean : Mean<L> {
    enum : bool { is_quick = ROOM_FOR_MORE };
};

// Where the inputs begin: `stride` bytes apart, except the one that is elsewhere.
struct Inputs {
    const char *base;
    u64 stride;
    const char *own;
    u32 own_index, ranks;

    INLINE_MEMBER const char *at(u32 rank) const { return rank == own_index ? own : base + rank * stride; }

    // Whether all have the same remainder by `width` as `output`.
    INLINE_MEMBER bool agree_with(const void *output, u32 width) const {
        bool has_own = own_index < ranks;
        u32 others = ranks - (has_own ? 1 : 0);
        return (!has_own || agree(own, output, width)) && (others == 0 || agree(at(own_index == 0 ? 1 : 0), output, width)) &&
               (others < 2 || (stride & (width - 1)) == 0);
    }
};

// Folds one chunk into the sums.
template <class L, class Op, int Width> INLINE void fold_chunk(typename L::Wide *sums, const Chunk<Width> &chunk) {
#pragma unroll
    for (int k = 0; k < Places<L, Width>::count; k++) {
        sums[k] = Op::combine(sums[k], Places<L, Width>::get(chunk, k));
    }
}

// Folds four inputs from `rank` on. All loads start before the first is waited for.
template <class L, class Op, int Width> INLINE void fold_four(typename L::Wide *sums, const Inputs &inputs, u32 rank, u64 offset) {
    Chunk<Width> chunks[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        load(chunks[i], inputs.at(rank + i) + offset);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        fold_chunk<L, Op, Width>(sums, chunks[i]);
    }
}

// Computes the sums over all inputs at `offset`: four inputs at a time if `Fours`. For the rest, the next input is
// loaded while one is folded. At least two loads are in flight, and the code stays small.
template <class L, class Op, int Width, bool Fours> INLINE void fold_all(typename L::Wide *sums, const Inputs &inputs, u64 offset) {
#pragma unroll
    for (int k = 0; k < Places<L, Width>::count; k++) {
        sums[k] = Op::identity();
    }
    u32 rank = 0;
    if constexpr (Fours && ROOM_FOR_MORE) {
#pragma unroll 1
        for (; inputs.ranks - rank >= 4; rank += 4) {
            fold_four<L, Op, Width>(sums, inputs, rank, offset);
        }
        if (rank == inputs.ranks) {
            return;
        }
    }
    Chunk<Width> chunk, next;
    load(chunk, inputs.at(rank) + offset);
#pragma unroll 1
    for (rank++; rank < inputs.ranks; rank++) {
        load(next, inputs.at(rank) + offset);
        fold_chunk<L, Op, Width>(sums, chunk);
        chunk = next;
    }
    fold_chunk<L, Op, Width>(sums, chunk);
}

// Converts sums to elements. If a mean has a quick division, it is tried on the whole chunk. If any value was rare, the
// whole chunk is divided again carefully.
template <class L, class Op, int Width>
INLINE void finish_all(Chunk<Width> &chunk, const typename L::Wide *sums, const typename L::Divisor &by) {
    typedef Places<L, Width> P;
    if constexpr (Op::is_quick) {
        bool rare = false;
        chunk = {};
#pragma unroll
        for (int k = 0; k < P::count; k++) {
            typename L::Wide quotient;
            rare |= L::divide_or_tell(sums[k], by, quotient);
            P::put(chunk, k, L::round(quotient));
        }
        if (!rare) {
            return;
        }
    }
    chunk = {};
#pragma unroll
    for (int k = 0; k < P::count; k++) {
        P::put(chunk, k, L::narrow(Op::finish(sums[k], by)));
    }
}

// Folds the chunks between the edges.
template <class L, class Op, int Width, bool Fours>
INLINE void fold_body(const Inputs &inputs, char *output, const Split &split, const typename L::Divisor &by) {
    typedef Places<L, Width> P;
#pragma unroll 1
    for (u64 offset = split.begin + grid_start() * Width; offset < split.end; offset += grid_step() * Width) {
        typename L::Wide sums[P::count];
        fold_all<L, Op, Width, Fours>(sums, inputs, offset);
        Chunk<Width> chunk;
        finish_all<L, Op, Width>(chunk, sums, by);
        store(output + offset, chunk);
    }
}

// Folds the elements before and after the body, or all of them if there is no body.
template <class L, class Op>
INLINE void fold_edges(const Inputs &inputs, char *output, const Split &split, u64 count, const typename L::Divisor &by) {
    const int size = sizeof(typename L::Stored);
    typedef Places<L, size> P;
    u64 edges = count * size - split.body();
#pragma unroll 1
    for (u64 i = grid_start() * size; i < edges; i += grid_step() * size) {
        u64 offset = split.edge(i);
        typename L::Wide sum;
        fold_all<L, Op, size, false>(&sum, inputs, offset);
        Chunk<size> chunk = {};
        P::put(chunk, 0, L::narrow(Op::finish_exactly(sum, by)));
        store(output + offset, chunk);
    }
}

// Copies a single input that needs no operation, with all its bits, NaNs included.
template <int Size> INLINE void copy(const char *from, char *to, u64 count) {
#pragma unroll 1
    for (u64 i = grid_start(); i < count; i += grid_step()) {
        Chunk<Size> chunk;
        load(chunk, from + i * Size);
        store(to + i * Size, chunk);
    }
}

// Folds in chunks of `Width` bytes if the addresses allow it, or of 4 bytes for some types if they allow no more.
// `Fours` loads four inputs at once.
template <class L, class Op, int Width, bool Fours> INLINE void fold(const Inputs &inputs, char *output, u64 count, u32 divisor) {
    const int size = sizeof(typename L::Stored);
    if (inputs.ranks == 0) {
        return;
    }
    if (inputs.ranks == 1 && !Op::divides) {
        copy<size>(inputs.at(0), output, count);
        return;
    }
    divisor = divisor == 0 ? 1 : divisor;
    typename L::Divisor by(divisor);
    bool quick = !Op::divides || L::Divisor::is_quick(divisor);
    bool wide = quick && inputs.agree_with(output, Width);
    Split split(wide, output, count * size, Width);
    if constexpr (L::by_words) {
        if (!wide) {
            split = Split(inputs.agree_with(output, 4), output, count * size, 4);
            fold_body<L, Op, 4, false>(inputs, output, split, by);
        }
    }
    if (wide) {
        fold_body<L, Op, Width, Fours>(inputs, output, split, by);
    }
    fold_edges<L, Op>(inputs, output, split, count, by);
}

// The signature of all folds. Input r begins at `inputs + r * stride_bytes`, except that of rank `own_index`, which
// begins at `own`. `output` may be `own`, and overlaps nothing else.
#define FOLD(name, lane, op, width, fours, blocks)                                                                                 \
    KERNEL(blocks)                                                                                                                 \
    fold_##name(const void *inputs, unsigned long long stride_bytes, const void *own, unsigned int own_index, unsigned int ranks,  \
                void *output, unsigned long long count, unsigned int divisor) {                                                    \
        Inputs from = {(const char *)inputs, stride_bytes, (const char *)own, own_index, ranks};                                   \
        fold<lane, op<lane>, width, fours>(from, (char *)output, count, divisor);                                                  \
    }

#endif
