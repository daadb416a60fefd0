// Multiplication of a row by a Hadamard matrix, for heads of attention and for both factors of a linear
// (Kind::ROTATED).
//
// Attention scores do not change, (H q) (H k) = n q k, and neither do products of linears. But an outlier dimension is
// spread over all dimensions: with one scale per int8 key, a dimension a hundred times larger than the others (as the
// key biases of Qwen 2.5 cause) would leave them no levels. Ashkboos et al. 2024, "QuaRot", 4.2. The matrix is
// Sylvester's, so it is its own inverse up to a factor.
#pragma once

#include <cmath>

#include "isa/simd.h"

namespace mlflow_llm {

// Return how many values are mixed with each other: the largest power of two that divides the width, a multiple of
// LANES.
inline int hadamard_order(int dim) { return dim & -dim; }

template <int STRIDE>
struct Signs {
    alignas(64) float values[LANES] = {};
    constexpr Signs() {
        for (int i = 0; i < LANES; i++) values[i] = i & STRIDE ? -1.0f : 1.0f;
    }
};

// Return the lane at distance STRIDE plus x, or minus x where bit STRIDE of the lane number is set.
template <int STRIDE>
inline __m512 butterfly(__m512 x) {
    static constexpr Signs<STRIDE> signs;
    return _mm512_fmadd_ps(x, _mm512_load_ps(signs.values), xor_lanes<STRIDE>(x));
}

// Return the factor that makes the matrix orthonormal: the same float as in quantization.py.
inline float hadamard_scale(int dim) { return float(1.0 / std::sqrt(double(hadamard_order(dim)))); }

// Replace vectors that are STRIDE apart, among the first COUNT, by their sums and differences.
template <int STRIDE, int COUNT>
inline void vector_butterflies(__m512 (&x)[COUNT]) {
    for (int i = 0; i < COUNT; i++) {
        if (i & STRIDE) continue;
        const __m512 a = x[i], b = x[i + STRIDE];
        x[i] = _mm512_add_ps(a, b), x[i + STRIDE] = _mm512_sub_ps(a, b);
    }
}

// Mix COUNT vectors of `from`, times `by`, into `to`.
template <int COUNT>
inline void mix_block(const float* from, float* to, __m512 by) {
    __m512 x[COUNT];
    for (int i = 0; i < COUNT; i++) {
        const __m512 some = _mm512_mul_ps(_mm512_loadu_ps(from + i * LANES), by);
        x[i] = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(some))));
    }
    if constexpr (COUNT > 1) vector_butterflies<1>(x);
    if constexpr (COUNT > 2) vector_butterflies<2>(x);
    for (int i = 0; i < COUNT; i++) _mm512_storeu_ps(to + i * LANES, x[i]);
}

// Write the transform of `from`, times `by`, to `to`; both [dim], possibly the same. The order of sums is the same for
// all instruction sets and in quantization.py: neighbours first.
inline void hadamard(const float* from, float* to, int dim, float by) {
    constexpr int BLOCK_WIDTH = 4 * LANES;
    const int order = hadamard_order(dim), block_width = order < BLOCK_WIDTH ? order : BLOCK_WIDTH;
    const __m512 each = _mm512_set1_ps(by);
    for (int d = 0; d < dim; d += block_width) {
        if (block_width == BLOCK_WIDTH) mix_block<4>(from + d, to + d, each);
        else if (block_width == 2 * LANES) mix_block<2>(from + d, to + d, each);
        else mix_block<1>(from + d, to + d, each);
    }
    int stride = block_width;
    for (; stride * 2 < order; stride *= 4)  // two strides at a time
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

}  // namespace mlflow_llm
