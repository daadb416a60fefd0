// Byte products of row pairs by ARM's i8mm: two rows of eight k's by eight k's of two columns. A panel has four k's of
// a column next to those of the next column; zipping two groups yields columns of eight. Integer sums are exact, so a
// row's results are bitwise those of sdot, whatever row it is paired with.
#pragma once

#include "linear/panel_tiles.h"

namespace mlflow_llm {

// Multiply ROWS rows by half a panel. The last of an odd number of rows is paired with itself.
template <Kind KIND, int ROWS, size_t... PAIR>
inline void pair_tile(std::index_sequence<PAIR...>, const Linear& w, int panel, int half, const int32_t* x, int stride,
                      const float* x_scale, float* y, bool add) {
    const int n = panel * PANEL + half * LANES;
    if (n >= w.N) return;
    constexpr auto other = [](size_t pair) { return std::min(int(2 * pair + 1), ROWS - 1); };
    // One array for the lower and one for the upper half of each register of weights; only NEON, with four registers,
    // uses the last four.
    Ints s0[] = {(void(PAIR), Ints{})...}, s1[] = {(void(PAIR), Ints{})...}, s2[] = {(void(PAIR), Ints{})...};
    Ints s3[] = {(void(PAIR), Ints{})...}, s4[] = {(void(PAIR), Ints{})...}, s5[] = {(void(PAIR), Ints{})...};
    Ints s6[] = {(void(PAIR), Ints{})...}, s7[] = {(void(PAIR), Ints{})...};
    const int32_t* const x_end = x + w.K / 4;
    const char* weights = (const char*)w.packed + panel * w.panel_bytes() + half * 64;
    for (const int32_t* at = x; at < x_end; at += 2, weights += 256) {
        if (!half) __builtin_prefetch(weights + PREFETCH_BYTES), __builtin_prefetch(weights + PREFETCH_BYTES + 128);
        const Ints rows[] = {pack_row_pair(at + 2 * PAIR * stride, at + other(PAIR) * stride)...};
        const auto multiply = [&](auto& low, auto& high, int part) __attribute__((always_inline)) {
            const char* from = weights + part * sizeof(Ints);
            const Ints a = load_part<Ints>(from), b = load_part<Ints>(from + 128);
            (add_pair_products(low[PAIR], rows[PAIR], zip_low(a, b)), ...);
            (add_pair_products(high[PAIR], rows[PAIR], zip_high(a, b)), ...);
        };
        multiply(s0, s1, 0), multiply(s2, s3, 1);
        if constexpr (PARTS == 4) multiply(s4, s5, 2), multiply(s6, s7, 3);
    }
    const auto sum_of = [&](int pair, bool second) __attribute__((always_inline)) {
        const Ints first = unzip_halves(s0[pair], s1[pair], second), next = unzip_halves(s2[pair], s3[pair], second);
        if constexpr (PARTS == 2) return __m512i{{first, next}};
        else
            return __m512i{
                {first, next, unzip_halves(s4[pair], s5[pair], second), unzip_halves(s6[pair], s7[pair], second)}};
    };
    const auto store_row = [&](int pair, bool second) __attribute__((always_inline)) {
        const int m = 2 * pair + second;
        const __m512i sum = sum_of(pair, second);
        store_sum<KIND>(w, sum, n, x_scale + m, y + size_t(m) * w.N, add);
    };
    ((store_row(PAIR, false), int(2 * PAIR + 1) < ROWS ? store_row(PAIR, true) : void()), ...);
}

}  // namespace mlflow_llm
