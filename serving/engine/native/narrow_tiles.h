// Weights of float32 and bfloat16 by rows of activations, where a vector is several registers. tile() of linear.h would do:
// but gcc 12 puts sums of such vectors into memory, which costs more than half of the speed. Here each is a register of its
// own from the beginning, in folds. Numbers are those of tile(), bit for bit.
#pragma once

#include "linear.h"

namespace mlt {

// By sixteen columns. Of bfloat16 weights and activations are two registers each.
template <Kind KIND>
constexpr int NARROW_ROWS = KIND == Kind::BF16 && WIDTH == 8 ? 4 : 6;
// Rows that take a whole panel at once, as it comes from memory.
template <Kind KIND>
constexpr int WHOLE_ROWS = PARTS > 2 ? 0 : KIND == Kind::BF16 ? 2 : 3;

// A register of weights, or the same 32 bits of a row in all lanes, as it is multiplied.
template <Kind KIND>
struct Factor;

template <>
struct Factor<Kind::F32> {
    Floats all;
    MLT_INLINE explicit Factor(Ints bits) : all(Floats(bits)) {}
    MLT_INLINE Floats times(const Factor& w, Floats sum) const { return fused(all, w.all, sum); }
};

template <>
struct Factor<Kind::BF16> {
    Floats lower, upper;
    MLT_INLINE explicit Factor(Ints bits) : lower(Floats(bits << 16)), upper(Floats(bits & int32_t(0xffff0000))) {}
    MLT_INLINE Floats times(const Factor& w, Floats sum) const { return fused(upper, w.upper, fused(lower, w.lower, sum)); }
};

template <class Factor>
MLT_INLINE void add_products(Factor x, Factor w0, Factor w1, Floats& s0, Floats& s1) {
    s0 = x.times(w0, s0), s1 = x.times(w1, s1);
}

template <class Factor>
MLT_INLINE void add_products(Factor x, Factor w0, Factor w1, Factor w2, Factor w3, Floats& s0, Floats& s1, Floats& s2,
                             Floats& s3) {
    add_products(x, w0, w1, s0, s1), add_products(x, w2, w3, s2, s3);
}

// Sums of as many rows as there are indexes by the columns of two or four registers; `x` steps by `stride` 32-bit lanes a
// row. `fetches`: the panel is not near yet.
template <Kind KIND, int REGISTERS, size_t... M>
__attribute__((noinline)) void narrow_sums(std::index_sequence<M...>, const char* weights, const int32_t* x, int stride,
                                           int steps, float* sums, bool fetches) {
    using Factor = mlt::Factor<KIND>;
    Floats s0[] = {(void(M), Floats{})...}, s1[] = {(void(M), Floats{})...};
    Floats s2[] = {(void(M), Floats{})...}, s3[] = {(void(M), Floats{})...};
    for (const int32_t* const end = x + steps; x < end; x++, weights += PANEL * 4) {
        if (fetches) __builtin_prefetch(weights + FETCH_AHEAD), __builtin_prefetch(weights + FETCH_AHEAD + 64);
        const Factor w0(load_part<Ints>(weights)), w1(load_part<Ints>(weights + sizeof(Ints)));
        if constexpr (REGISTERS == 2) {
            (add_products(Factor(all(x[M * stride])), w0, w1, s0[M], s1[M]), ...);
        } else {
            const Factor w2(load_part<Ints>(weights + 2 * sizeof(Ints))), w3(load_part<Ints>(weights + 3 * sizeof(Ints)));
            (add_products(Factor(all(x[M * stride])), w0, w1, w2, w3, s0[M], s1[M], s2[M], s3[M]), ...);
        }
    }
    constexpr int ROW = REGISTERS * WIDTH;
    ((std::memcpy(sums + M * ROW, &s0[M], sizeof(Floats)), std::memcpy(sums + M * ROW + WIDTH, &s1[M], sizeof(Floats))), ...);
    if constexpr (REGISTERS == 4)
        ((std::memcpy(sums + M * ROW + 2 * WIDTH, &s2[M], sizeof(Floats)),
          std::memcpy(sums + M * ROW + 3 * WIDTH, &s3[M], sizeof(Floats))),
         ...);
}

template <Kind KIND, int M = NARROW_ROWS<KIND>>
inline void narrow_tile(int rows, const Linear& w, int panel, const int32_t* x, int stride, float* y, bool add, bool fetches) {
    if constexpr (M > 1)
        if (rows < M) return narrow_tile<KIND, M - 1>(rows, w, panel, x, stride, y, add, fetches);
    constexpr int COLUMNS = M <= WHOLE_ROWS<KIND> ? PANEL : LANES;
    alignas(64) float sums[M][COLUMNS];
    const char* weights = (const char*)w.packed + panel * w.panel_bytes();
    for (int from = panel * PANEL; from < std::min((panel + 1) * PANEL, w.N); from += COLUMNS, weights += COLUMNS * 4) {
        narrow_sums<KIND, COLUMNS / WIDTH>(std::make_index_sequence<M>(), weights, x, stride, stride, sums[0], fetches);
        fetches = false;
        for (int m = 0; m < M; m++)
            for (int n = from; n < std::min(from + COLUMNS, w.N); n += LANES)
                put_value(w, _mm512_load_ps(sums[m] + n - from), n, y + size_t(m) * w.N, add);
    }
}

template <Kind KIND>
inline void multiply_floats(const Linear& w, Rows x, int T, float* y, Finish finish, int first, int last) {
    const int stride = w.K / w.lane();
    each_tile<NARROW_ROWS<KIND>>(T, size_t(stride) * 4, first, last, [&](int panel, int a, int count, bool begins) {
        const int32_t* rows = (const int32_t*)x.values + size_t(a) * stride;
        float* out = y + size_t(a) * w.N;
        narrow_tile<KIND>(count, w, panel, rows, stride, out, finish == Finish::ADD, begins);
        if (finish == Finish::GELU) gelu_tile(out, count, panel, w.N);
    });
}

}  // namespace mlt
