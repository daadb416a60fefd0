// Products of float32 and bfloat16 weights where a vector is several registers. tile() of linear.h would be correct,
// but gcc 12 spills sums of such vectors, which costs more than half of the speed. Here each sum is a register from the
// beginning, in fold expressions. Results are bitwise those of tile(). Rows are floats, for bfloat16 rounded to it.
#pragma once

#include "linear/panel_tiles.h"

namespace mlflow_llm {

constexpr int FLOAT_TILE_ROWS = 6;  // by 16 columns
// Rows up to which a full panel is multiplied at once, in the order in which it comes from memory.
template <Kind KIND>
constexpr int FULL_PANEL_FLOAT_ROWS = PARTS > 2 ? 0 : KIND == Kind::BF16 ? 2 : 3;

// Return a register of weights as floats: for bfloat16 those in the upper or the lower halves of the lanes.
template <Kind KIND, bool UPPER>
MLFLOW_LLM_INLINE Floats factors(const char* weights) {
    const Ints bits = load_part<Ints>(weights);
    if constexpr (KIND == Kind::F32) return Floats(bits);
    else return Floats(UPPER ? bits & int32_t(0xffff0000) : bits << 16);
}

// Add the products of several rows' value at `x` by two registers of weights.
template <Kind KIND, bool UPPER, size_t... M>
MLFLOW_LLM_INLINE void add_products(std::index_sequence<M...>, const char* weights, const int32_t* x, int stride,
                                    Floats (&s0)[sizeof...(M)], Floats (&s1)[sizeof...(M)]) {
    const Floats w0 = factors<KIND, UPPER>(weights), w1 = factors<KIND, UPPER>(weights + sizeof(Floats));
    Floats each;
    ((each = Floats(broadcast(x[M * stride])), add_product(s0[M], each, w0), add_product(s1[M], each, w1)), ...);
}

// The same for few rows by four registers: the rows' values stay in registers, the weights come one by one.
template <Kind KIND, bool UPPER, size_t... M>
MLFLOW_LLM_INLINE void add_products(std::index_sequence<M...>, const char* weights, const int32_t* x, int stride,
                                    Floats (&s0)[sizeof...(M)], Floats (&s1)[sizeof...(M)], Floats (&s2)[sizeof...(M)],
                                    Floats (&s3)[sizeof...(M)]) {
    const Floats each[] = {Floats(broadcast(x[M * stride]))...};
    Floats w = factors<KIND, UPPER>(weights);
    (add_product(s0[M], each[M], w), ...);
    w = factors<KIND, UPPER>(weights + sizeof(Floats));
    (add_product(s1[M], each[M], w), ...);
    w = factors<KIND, UPPER>(weights + 2 * sizeof(Floats));
    (add_product(s2[M], each[M], w), ...);
    w = factors<KIND, UPPER>(weights + 3 * sizeof(Floats));
    (add_product(s3[M], each[M], w), ...);
}

// Compute the sums of sizeof...(M) rows by the columns of two or four registers; `stride` is the row stride of `x` in
// floats. `fetches`: prefetch the panel, which is not in cache yet.
template <Kind KIND, int REGISTERS, size_t... M>
__attribute__((noinline)) void narrow_sums(std::index_sequence<M...> rows, const char* weights, const int32_t* x,
                                           int stride, float* sums, bool fetches) {
    Floats s0[] = {(void(M), Floats{})...}, s1[] = {(void(M), Floats{})...};
    Floats s2[] = {(void(M), Floats{})...}, s3[] = {(void(M), Floats{})...};
    for (const int32_t* const end = x + stride; x < end; x++, weights += PANEL * 4) {
        if (fetches) __builtin_prefetch(weights + PREFETCH_BYTES), __builtin_prefetch(weights + PREFETCH_BYTES + 64);
        if constexpr (REGISTERS == 2) add_products<KIND, false>(rows, weights, x, stride, s0, s1);
        else add_products<KIND, false>(rows, weights, x, stride, s0, s1, s2, s3);
        if constexpr (KIND == Kind::F32) continue;
        x++;
        if constexpr (REGISTERS == 2) add_products<KIND, true>(rows, weights, x, stride, s0, s1);
        else add_products<KIND, true>(rows, weights, x, stride, s0, s1, s2, s3);
    }
    constexpr int ROW = REGISTERS * WIDTH;
    ((std::memcpy(sums + M * ROW, &s0[M], sizeof(Floats)), std::memcpy(sums + M * ROW + WIDTH, &s1[M], sizeof(Floats))),
     ...);
    if constexpr (REGISTERS == 4)
        ((std::memcpy(sums + M * ROW + 2 * WIDTH, &s2[M], sizeof(Floats)),
          std::memcpy(sums + M * ROW + 3 * WIDTH, &s3[M], sizeof(Floats))),
         ...);
}

template <Kind KIND, int M = FLOAT_TILE_ROWS>
inline void narrow_tile(int rows, const Linear& w, int panel, const int32_t* x, float* y, bool add, bool fetches) {
    if constexpr (M > 1)
        if (rows < M) return narrow_tile<KIND, M - 1>(rows, w, panel, x, y, add, fetches);
    constexpr int COLUMNS = M <= FULL_PANEL_FLOAT_ROWS<KIND> ? PANEL : LANES;
    alignas(64) float sums[M][COLUMNS];
    const char* weights = (const char*)w.packed + panel * w.panel_bytes();
    for (int from = panel * PANEL; from < std::min((panel + 1) * PANEL, w.N); from += COLUMNS, weights += COLUMNS * 4) {
        narrow_sums<KIND, COLUMNS / WIDTH>(std::make_index_sequence<M>(), weights, x, w.K, sums[0], fetches);
        fetches = false;
        for (int m = 0; m < M; m++)
            for (int n = from; n < std::min(from + COLUMNS, w.N); n += LANES)
                store_value(w, _mm512_load_ps(sums[m] + n - from), n, y + size_t(m) * w.N, add);
    }
}

template <Kind KIND>
inline void multiply_floats(const Linear& w, Rows x, int T, float* y, Epilogue epilogue, int first, int last) {
    for_each_tile<FLOAT_TILE_ROWS>(T, w.K * sizeof(float), first, last, [&](int panel, int a, int count, bool begins) {
        const int32_t* rows = (const int32_t*)x.values + size_t(a) * w.K;
        float* out = y + size_t(a) * w.N;
        narrow_tile<KIND>(count, w, panel, rows, out, epilogue == Epilogue::ADD, begins);
        if (epilogue == Epilogue::GELU) gelu_tile(out, count, panel, w.N);
    });
}

}  // namespace mlflow_llm
