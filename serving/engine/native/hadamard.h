// A row's numbers times a Hadamard matrix: each becomes a sum of all of them, of either sign. Of a head of attention, and
// of both factors of a linear (Kind::ROTATED).
//
// Scores do not change, (H q) (H k) = n q k, and neither do products. But what one dimension has is spread over all of
// them: with one scale for a key in int8, a dimension that is a hundred times the others (biases of keys do that, in
// Qwen 2.5) would leave the others no levels. Ashkboos et al. 2024, "QuaRot", 4.2; the matrix is Sylvester's, so it is its
// own inverse but for a factor.
#pragma once

#include <cmath>

#include "simd.h"

namespace mlt {

// Numbers that are mixed with each other: the largest power of two that divides the width, a multiple of LANES.
inline int hadamard_order(int dim) { return dim & -dim; }

template <int STRIDE>
struct Signs {
    alignas(64) float of[LANES] = {};
    constexpr Signs() {
        for (int i = 0; i < LANES; i++) of[i] = i & STRIDE ? -1.0f : 1.0f;
    }
};

// What lies STRIDE lanes away, plus x, or minus x where the bit STRIDE of a lane is set.
template <int STRIDE>
inline __m512 butterfly(__m512 x) {
    static constexpr Signs<STRIDE> signs;
    return _mm512_fmadd_ps(x, _mm512_load_ps(signs.of), lanes_across<STRIDE>(x));
}

// What makes the matrix orthonormal: the same float that quantization.py has.
inline float hadamard_scale(int dim) { return float(1.0 / std::sqrt(double(hadamard_order(dim)))); }

// Sums and differences of vectors that are STRIDE vectors apart, among the first COUNT.
template <int STRIDE, int COUNT>
inline void vector_butterflies(__m512 (&x)[COUNT]) {
    for (int i = 0; i < COUNT; i++) {
        if (i & STRIDE) continue;
        const __m512 a = x[i], b = x[i + STRIDE];
        x[i] = _mm512_add_ps(a, b), x[i + STRIDE] = _mm512_sub_ps(a, b);
    }
}

// COUNT vectors from `from`, `by` times as large, mixed with each other, to `to`.
template <int COUNT>
inline void mix_near(const float* from, float* to, __m512 by) {
    __m512 x[COUNT];
    for (int i = 0; i < COUNT; i++) {
        const __m512 some = _mm512_mul_ps(_mm512_loadu_ps(from + i * LANES), by);
        x[i] = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(some))));
    }
    if constexpr (COUNT > 1) vector_butterflies<1>(x);
    if constexpr (COUNT > 2) vector_butterflies<2>(x);
    for (int i = 0; i < COUNT; i++) _mm512_storeu_ps(to + i * LANES, x[i]);
}

// To `to`, `by` times as large; both [dim], and may be the same. The sums have the same order with any instructions, and
// in quantization.py: of neighbours first.
inline void hadamard(const float* from, float* to, int dim, float by) {
    constexpr int NEAR = 4 * LANES;
    const int order = hadamard_order(dim), near = order < NEAR ? order : NEAR;
    const __m512 each = _mm512_set1_ps(by);
    for (int d = 0; d < dim; d += near) {
        if (near == NEAR) mix_near<4>(from + d, to + d, each);
        else if (near == 2 * LANES) mix_near<2>(from + d, to + d, each);
        else mix_near<1>(from + d, to + d, each);
    }
    int stride = near;
    for (; stride * 2 < order; stride *= 4)  // two at a time
        for (int d = 0; d < dim; d += LANES) {
            if (d & (3 * stride)) continue;
            __m512 x[4];
            for (int i = 0; i < 4; i++) x[i] = _mm512_loadu_ps(to + d + i * stride);
            vector_butterflies<1>(x), vector_butterflies<2>(x);
            for (int i = 0; i < 4; i++) _mm512_storeu_ps(to + d + i * stride, x[i]);
        }
    if (stride == order) return;
    for (int d = 0; d < dim; d += LANES) {
        if (d & stride) continue;
        __m512 x[] = {_mm512_loadu_ps(to + d), _mm512_loadu_ps(to + d + stride)};
        vector_butterflies<1>(x);
        _mm512_storeu_ps(to + d, x[0]), _mm512_storeu_ps(to + d + stride, x[1]);
    }
}

inline void hadamard(float* x, int dim, float by) { hadamard(x, x, dim, by); }

}  // namespace mlt
