// A row's numbers times a Hadamard matrix: each becomes a sum of all of them, of either sign. Of a head of attention, and
// of both factors of a linear (Kind::ROTATED).
//
// Scores do not change, (H q) (H k) = n q k, and neither do products. But what one dimension has is spread over all of
// them: with one scale for a key in int8, a dimension that is a hundred times the others (biases of keys do that, in
// Qwen 2.5) would leave the others no levels. Ashkboos et al. 2024, "QuaRot", 4.2; the matrix is Sylvester's, so it is its
// own inverse but for a factor.
#pragma once

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

// In place, `by` times as large. x [dim].
inline void hadamard(float* x, int dim, float by) {
    const int order = hadamard_order(dim);
    for (int d = 0; d < dim; d += LANES) {
        __m512 some = _mm512_mul_ps(_mm512_loadu_ps(x + d), _mm512_set1_ps(by));
        some = butterfly<2>(butterfly<1>(some));
        _mm512_storeu_ps(x + d, butterfly<8>(butterfly<4>(some)));
    }
    for (int stride = LANES; stride < order; stride *= 2)
        for (int d = 0; d < dim; d += LANES) {
            if (d & stride) continue;
            const __m512 a = _mm512_loadu_ps(x + d), b = _mm512_loadu_ps(x + d + stride);
            _mm512_storeu_ps(x + d, _mm512_add_ps(a, b));
            _mm512_storeu_ps(x + d + stride, _mm512_sub_ps(a, b));
        }
}

}  // namespace mlt
