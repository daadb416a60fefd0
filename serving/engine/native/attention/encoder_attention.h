// Attention of one head over one text, without a cache: a query sees all keys, or those within a window to both sides.
//
// Scores and the weighted sums of values are small matrix products of one form, rows of `a` by 16 or 32 columns of `b`.
// A query's sums run over dimensions and keys in order, independent of how many queries are processed at a time; keys
// outside its window have weight 0.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "isa/simd.h"

namespace mlflow_llm {

#ifdef MLFLOW_LLM_AVX512
constexpr int MAX_PRODUCT_SUMS = 24;  // vectors of sums, beside 2 of b and a broadcast in 32 registers
#else
constexpr int MAX_PRODUCT_SUMS = 6;  // two registers each of AVX2's 16, or four of NEON's 32
#endif
constexpr int QUERY_BLOCK = 12;  // queries processed at a time
constexpr int KEY_BLOCK = 2 * LANES;

// Compute y [rows, V vectors] = a [rows, K] b [K, V vectors]; `a_row`, `b_row` and `y_row` are row strides in floats.
// In folds and in a function of its own, as tile() in linear.h is.
template <int V, size_t... M>
__attribute__((noinline)) inline void product(std::index_sequence<M...>, const float* a, int a_row, const float* b,
                                              int b_row, int K, float* y, int y_row) {
    __m512 left[] = {(void(M), _mm512_setzero_ps())...}, right[] = {(void(M), _mm512_setzero_ps())...};
    for (int k = 0; k < K; k++, b += b_row) {
        const __m512 b0 = _mm512_loadu_ps(b), b1 = _mm512_loadu_ps(b + (V - 1) * LANES);
        __m512 x;
        ((x = _mm512_set1_ps(a[M * a_row + k]), left[M] = _mm512_fmadd_ps(x, b0, left[M]),
          V == 2 ? void(right[M] = _mm512_fmadd_ps(x, b1, right[M])) : void()),
         ...);
    }
    (_mm512_storeu_ps(y + M * y_row, left[M]), ...);
    if constexpr (V == 2) (_mm512_storeu_ps(y + M * y_row + LANES, right[M]), ...);
}

template <int V, int M = MAX_PRODUCT_SUMS / V>
inline void dispatch_product(int rows, const float* a, int a_row, const float* b, int b_row, int K, float* y,
                             int y_row) {
    for (; rows > M; rows -= M, a += M * a_row, y += M * y_row)
        product<V>(std::make_index_sequence<M>(), a, a_row, b, b_row, K, y, y_row);
    if constexpr (M > 1)
        if (rows < M) return dispatch_product<V, M - 1>(rows, a, a_row, b, b_row, K, y, y_row);
    product<V>(std::make_index_sequence<M>(), a, a_row, b, b_row, K, y, y_row);
}

// Replace n values by exp(x - max); return 1 / their sum.
inline float exp_and_inverse_sum(float* x, int n) {
    const int whole = n / LANES * LANES;
    const __mmask16 rest = (1u << (n - whole)) - 1;
    const __m512 last = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), rest, x + whole);
    __m512 max = last, sum;
    for (int i = 0; i < whole; i += LANES) max = _mm512_max_ps(max, _mm512_loadu_ps(x + i));
    max = _mm512_set1_ps(_mm512_reduce_max_ps(max));
    sum = exp16(_mm512_sub_ps(last, max));
    _mm512_mask_storeu_ps(x + whole, rest, sum);
    for (int i = 0; i < whole; i += LANES) {
        const __m512 e = exp16(_mm512_sub_ps(_mm512_loadu_ps(x + i), max));
        _mm512_storeu_ps(x + i, e);
        sum = _mm512_add_ps(sum, e);
    }
    return 1.0f / _mm512_reduce_add_ps(sum);
}

// Which keys of a text a query sees, and the bias of its scores.
struct AttentionMask {
    int window = 0;  // keys nearer than this are seen, to both sides; 0: all
    const float* bias = nullptr;  // bias[j - i] is added to the score of key j for query i; or null
};

// Attention of one head, with a thread's scratch space for its keys, values and weights.
class HeadAttention {
  public:
    // Attend L queries to L keys and values of D dimensions; `row` and `out_row` are row strides in floats.
    void attend(const float* q, const float* k, const float* v, int row, int L, int D, float scaling,
                const AttentionMask& mask, float* out, int out_row) {
        pack(k, v, row, L, D, scaling);
        const int padded = round_up(L, KEY_BLOCK), tiles = (L + QUERY_BLOCK - 1) / QUERY_BLOCK;
        for (int i = 0; i < tiles; i++) {
            const int first = int(int64_t(L) * i / tiles), n = int(int64_t(L) * (i + 1) / tiles) - first;
            const float* query = q + size_t(first) * row;
            float *y = out + size_t(first) * out_row, by[QUERY_BLOCK];
            const int from = mask.window ? std::max(0, first + 1 - mask.window) / KEY_BLOCK * KEY_BLOCK : 0;
            const int end = mask.window ? std::min(L, first + n - 1 + mask.window) : L, seen = end - from;
            for (int t = from; t < end; t += KEY_BLOCK) {
                const float* panel = &keys[size_t(t) * D];
                if (end - t > LANES)
                    dispatch_product<2>(n, query, row, panel, KEY_BLOCK, D, &weights[t - from], padded);
                else dispatch_product<1>(n, query, row, panel, KEY_BLOCK, D, &weights[t - from], padded);
            }
            for (int m = 0; m < n; m++) {
                float* weight = &weights[size_t(m) * padded];
                if (mask.bias) add(mask.bias + from - (first + m), weight, seen);
                if (mask.window) mask_outside_window(weight, first + m, mask.window, from, end);
                by[m] = exp_and_inverse_sum(weight, seen);
            }
            const float* value = &values[size_t(from) * D];
            for (int d = 0; d < D; d += 2 * LANES) {
                if (D - d > LANES) dispatch_product<2>(n, weights.data(), padded, value + d, D, seen, y + d, out_row);
                else dispatch_product<1>(n, weights.data(), padded, value + d, D, seen, y + d, out_row);
            }
            for (int m = 0; m < n; m++)
                for (int d = 0; d < D; d += LANES) {
                    float* at = y + size_t(m) * out_row + d;
                    _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), _mm512_set1_ps(by[m])));
                }
        }
    }

  private:
    std::vector<float> keys, values, weights;

    static void add(const float* bias, float* score, int n) {
        for (int t = 0; t < n; t++) score[t] += bias[t];
    }

    // Mask the scores of keys of [from, end) that are outside the window.
    static void mask_outside_window(float* score, int query, int window, int from, int end) {
        const int first = query + 1 - window, last = query + window;
        for (int t = from; t < std::min(first, end); t++) score[t - from] = -INFINITY;
        for (int t = std::max(last, from); t < end; t++) score[t - from] = -INFINITY;
    }

    // Copy scaled keys to [token / KEY_BLOCK][D][KEY_BLOCK], so that a vector holds one dimension of several keys, and
    // values side by side.
    void pack(const float* k, const float* v, int row, int L, int D, float scaling) {
        const size_t padded = round_up(L, KEY_BLOCK);
        const auto grow = [](std::vector<float>& buffer, size_t size) {
            if (buffer.size() < size) buffer.resize(size);
        };
        // Grown separately: the next model of this process may have narrower heads and longer texts.
        grow(keys, padded * D), grow(values, padded * D), grow(weights, padded * QUERY_BLOCK);
        for (int t = 0; t < L; t++, k += row, v += row) {
            float* key = &keys[size_t(t / KEY_BLOCK) * KEY_BLOCK * D + t % KEY_BLOCK];
            for (int d = 0; d < D; d++) key[d * KEY_BLOCK] = k[d] * scaling;
            std::memcpy(&values[size_t(t) * D], v, D * sizeof(float));
        }
    }
};

}  // namespace mlflow_llm
