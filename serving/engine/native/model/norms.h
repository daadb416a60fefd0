// Norms of a row of n values, where n is a multiple of LANES and `out` may be `x`; and the rotary embedding of a head.
#pragma once

#include <cmath>
#include <cstring>

#include "isa/simd.h"

namespace mlflow_llm {

inline void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
    const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(dot(x, x, n) / n + eps));
    for (int i = 0; i < n; i += LANES) {
        const __m512 value = _mm512_mul_ps(_mm512_loadu_ps(x + i), scale);
        _mm512_storeu_ps(out + i, _mm512_mul_ps(value, _mm512_loadu_ps(weight + i)));
    }
}

inline void layer_norm(const float* x, const float* weight, const float* bias, int n, float eps, float* out) {
    __m512 sum = _mm512_setzero_ps(), square = _mm512_setzero_ps();
    for (int i = 0; i < n; i += LANES) sum = _mm512_add_ps(sum, _mm512_loadu_ps(x + i));
    const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / n);
    for (int i = 0; i < n; i += LANES) {
        const __m512 off = _mm512_sub_ps(_mm512_loadu_ps(x + i), mean);
        square = _mm512_fmadd_ps(off, off, square);
    }
    const __m512 by = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(square) / n + eps));
    for (int i = 0; i < n; i += LANES) {
        const __m512 value = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(x + i), mean), by);
        _mm512_storeu_ps(out + i, _mm512_fmadd_ps(value, _mm512_loadu_ps(weight + i), _mm512_loadu_ps(bias + i)));
    }
}

// A LayerNorm if there is a bias, an RMSNorm without one, the identity without a weight.
struct Norm {
    const float *weight, *bias;  // [n]

    void operator()(const float* x, int n, float eps, float* out) const {
        if (bias) layer_norm(x, weight, bias, n, eps, out);
        else if (weight) rms_norm(x, weight, n, eps, out);
        else if (out != x) std::memcpy(out, x, n * sizeof(float));
    }
};

// Rotate the pairs (x[i], x[i + half]) of a head, each by its angle.
inline void rotate(float* x, const float* cos, const float* sin, int half) {
    for (int i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i] + a * sin[i];
    }
}

}  // namespace mlflow_llm
