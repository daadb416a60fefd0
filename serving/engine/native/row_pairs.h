// Rows of bytes two by two, as ARM's i8mm multiplies them: two rows of eight k's by eight k's of two columns. A panel has
// four k's of a column beside those of the next one; two groups of it, zipped, are columns of eight. Sums of integers are
// exact, so a row's are those of sdot, bit for bit, whatever row it is paired with.
#pragma once

#include "linear.h"

namespace mlt {

// Rows of an odd number are paired with themselves at the end.
template <Kind KIND, int ROWS, size_t... PAIR>
inline void pair_tile(std::index_sequence<PAIR...>, const Linear& w, int panel, int half, const int32_t* x, int stride,
                      const float* x_scale, float* y, bool add) {
    const int n = panel * PANEL + half * LANES;
    if (n >= w.N) return;
    constexpr auto other = [](size_t pair) { return std::min(int(2 * pair + 1), ROWS - 1); };
    Ints s0[] = {(void(PAIR), Ints{})...}, s1[] = {(void(PAIR), Ints{})...}, s2[] = {(void(PAIR), Ints{})...};
    Ints s3[] = {(void(PAIR), Ints{})...}, s4[] = {(void(PAIR), Ints{})...}, s5[] = {(void(PAIR), Ints{})...};
    Ints s6[] = {(void(PAIR), Ints{})...}, s7[] = {(void(PAIR), Ints{})...};  // of two columns each
    const int32_t* const x_end = x + w.K / 4;
    const char* weights = (const char*)w.packed + panel * w.panel_bytes() + half * 64;
    for (const int32_t* at = x; at < x_end; at += 2, weights += 256) {
        if (!half) __builtin_prefetch(weights + FETCH_AHEAD), __builtin_prefetch(weights + FETCH_AHEAD + 128);
        const Ints rows[] = {joined_halves(at + 2 * PAIR * stride, at + other(PAIR) * stride)...};
        const Ints a0 = load_part<Ints>(weights), b0 = load_part<Ints>(weights + 128);
        const Ints a1 = load_part<Ints>(weights + 16), b1 = load_part<Ints>(weights + 144);
        const Ints a2 = load_part<Ints>(weights + 32), b2 = load_part<Ints>(weights + 160);
        const Ints a3 = load_part<Ints>(weights + 48), b3 = load_part<Ints>(weights + 176);
        (add_pair_products(s0[PAIR], rows[PAIR], low_lanes_zipped(a0, b0)), ...);
        (add_pair_products(s1[PAIR], rows[PAIR], high_lanes_zipped(a0, b0)), ...);
        (add_pair_products(s2[PAIR], rows[PAIR], low_lanes_zipped(a1, b1)), ...);
        (add_pair_products(s3[PAIR], rows[PAIR], high_lanes_zipped(a1, b1)), ...);
        (add_pair_products(s4[PAIR], rows[PAIR], low_lanes_zipped(a2, b2)), ...);
        (add_pair_products(s5[PAIR], rows[PAIR], high_lanes_zipped(a2, b2)), ...);
        (add_pair_products(s6[PAIR], rows[PAIR], low_lanes_zipped(a3, b3)), ...);
        (add_pair_products(s7[PAIR], rows[PAIR], high_lanes_zipped(a3, b3)), ...);
    }
    const auto sum_of = [&](int pair, bool second) __attribute__((always_inline)) {
        return __m512i{{halves_of(s0[pair], s1[pair], second), halves_of(s2[pair], s3[pair], second),
                        halves_of(s4[pair], s5[pair], second), halves_of(s6[pair], s7[pair], second)}};
    };
    const auto finish = [&](int pair, bool second) __attribute__((always_inline)) {
        const int m = 2 * pair + second;
        const __m512i sum = sum_of(pair, second);
        put<KIND>(w, sum, sum, n, x_scale + m, y + size_t(m) * w.N, add);
    };
    if constexpr (rows_of(KIND) == 2)
        (put<KIND>(w, sum_of(PAIR, false), sum_of(PAIR, true), n, x_scale + PAIR, y + PAIR * w.N, add), ...);
    else ((finish(PAIR, false), int(2 * PAIR + 1) < ROWS ? finish(PAIR, true) : void()), ...);
}

}  // namespace mlt
