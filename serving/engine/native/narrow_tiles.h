// Weights of float32 and bfloat16 by rows of activations, where a vector is several registers. tile() of linear.h would do:
// but gcc 12 puts sums of such vectors into memory, which costs more than half of the speed. Here each is a register of its
// own from the beginning, in folds. Numbers are those of tile(), bit for bit. Rows are floats, of bfloat16 rounded so.
#pragma once

#include "linear.h"

namespace mlt {

constexpr int NARROW_ROWS = 6;  // by sixteen columns
// By a whole panel at once, as it comes from memory.
template <Kind KIND>
constexpr int WHOLE_ROWS = PARTS > 2 ? 0 : KIND == Kind::BF16 ? 2 : 3;

// A register of weights as they are multiplied: of bfloat16 those in the upper or the lower halves of the lanes.
template <Kind KIND, bool UPPER>
MLT_INLINE Floats factors(const char* weights) {
    const Ints bits = load_part<Ints>(weights);
    if constexpr (KIND == Kind::F32) return Floats(bits);
    else return Floats(UPPER ? bits & int32_t(0xffff0000) : bits << 16);
}

// Some rows' value at `x` by two registers of weights.
template <Kind KIND, bool UPPER, size_t... M>
MLT_INLINE void add_products(std::index_sequence<M...>, const char* weights, const int32_t* x, int stride,
                             Floats (&s0)[sizeof...(M)], Floats (&s1)[sizeof...(M)]) {
    const Floats w0 = factors<KIND, UPPER>(weights), w1 = factors<KIND, UPPER>(weights + sizeof(Floats));
    Floats each;
    ((each = Floats(all(x[M * stride])), add_product(s0[M], each, w0), add_product(s1[M], each, w1)), ...);
}

// The same of few rows by four: their values stay, and the weights come one after the other.
template <Kind KIND, bool UPPER, size_t... M>
MLT_INLINE void add_products(std::index_sequence<M...>, const char* weights, const int32_t* x, int stride,
                             Floats (&s0)[sizeof...(M)], Floats (&s1)[sizeof...(M)], Floats (&s2)[sizeof...(M)],
                             Floats (&s3)[sizeof...(M)]) {
    const Floats each[] = {Floats(all(x[M * stride]))...};
    Floats w = factors<KIND, UPPER>(weights);
    (add_product(s0[M], each[M], w), ...);
    w = factors<KIND, UPPER>(weights + sizeof(Floats));
    (add_product(s1[M], each[M], w), ...);
    w = factors<KIND, UPPER>(weights + 2 * sizeof(Floats));
    (add_product(s2[M], each[M], w), ...);
    w = factors<KIND, UPPER>(weights + 3 * sizeof(Floats));
    (add_product(s3[M], each[M], w), ...);
}

// Sums of as many rows as there are indexes by the columns of two or four registers; `x` steps by `stride` floats a row.
// `fetches`: the panel is not near yet.
template <Kind KIND, int REGISTERS, size_t... M>
__attribute__((noinline)) void narrow_sums(std::index_sequence<M...> rows, const char* weights, const int32_t* x, int stride,
                                           float* sums, bool fetches) {
    Floats s0[] = {(void(M), Floats{})...}, s1[] = {(void(M), Floats{})...};
    Floats s2[] = {(void(M), Floats{})...}, s3[] = {(void(M), Floats{})...};
    for (const int32_t* const end = x + stride; x < end; x++, weights += PANEL * 4) {
        if (fetches) __builtin_prefetch(weights + FETCH_AHEAD), __builtin_prefetch(weights + FETCH_AHEAD + 64);
        if constexpr (REGISTERS == 2) add_products<KIND, false>(rows, weights, x, stride, s0, s1);
        else add_products<KIND, false>(rows, weights, x, stride, s0, s1, s2, s3);
        if constexpr (KIND == Kind::F32) continue;
        x++;
        if constexpr (REGISTERS == 2) add_products<KIND, true>(rows, weights, x, stride, s0, s1);
        else add_products<KIND, true>(rows, weights, x, stride, s0, s1, s2, s3);
    }
    constexpr int ROW = REGISTERS * WIDTH;
    ((std::memcpy(sums + M * ROW, &s0[M], sizeof(Floats)), std::memcpy(sums + M * ROW + WIDTH, &s1[M], sizeof(Floats))), ...);
    if constexpr (REGISTERS == 4)
        ((std::memcpy(sums + M * ROW + 2 * WIDTH, &s2[M], sizeof(Floats)),
          std::memcpy(sums + M * ROW + 3 * WIDTH, &s3[M], sizeof(Floats))),
         ...);
}

template <Kind KIND, int M = NARROW_ROWS>
inline void narrow_tile(int rows, const Linear& w, int panel, const int32_t* x, float* y, bool add, bool fetches) {
    if constexpr (M > 1)
        if (rows < M) return narrow_tile<KIND, M - 1>(rows, w, panel, x, y, add, fetches);
    constexpr int COLUMNS = M <= WHOLE_ROWS<KIND> ? PANEL : LANES;
    alignas(64) float sums[M][COLUMNS];
    const char* weights = (const char*)w.packed + panel * w.panel_bytes();
    for (int from = panel * PANEL; from < std::min((panel + 1) * PANEL, w.N); from += COLUMNS, weights += COLUMNS * 4) {
        narrow_sums<KIND, COLUMNS / WIDTH>(std::make_index_sequence<M>(), weights, x, w.K, sums[0], fetches);
        fetches = false;
        for (int m = 0; m < M; m++)
            for (int n = from; n < std::min(from + COLUMNS, w.N); n += LANES)
                put_value(w, _mm512_load_ps(sums[m] + n - from), n, y + size_t(m) * w.N, add);
    }
}

template <Kind KIND>
inline void multiply_floats(const Linear& w, Rows x, int T, float* y, Finish finish, int first, int last) {
    each_tile<NARROW_ROWS>(T, w.K * sizeof(float), first, last, [&](int panel, int a, int count, bool begins) {
        const int32_t* rows = (const int32_t*)x.values + size_t(a) * w.K;
        float* out = y + size_t(a) * w.N;
        narrow_tile<KIND>(count, w, panel, rows, out, finish == Finish::ADD, begins);
        if (finish == Finish::GELU) gelu_tile(out, count, panel, w.N);
    });
}

}  // namespace mlt
