// Attention of one head over one text: a query meets every key, or those within a window to both sides; no cache.
//
// Scores and the mix of values are small products of one form, rows of `a` by 16 or 32 columns of `b`. A query's sums
// run over dimensions and over keys in order, however many queries are taken at a time: keys outside its window weigh 0.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "simd.h"

namespace mlt {

#ifdef MLT_AVX512
constexpr int PRODUCT_SUMS = 24;  // vectors under way, beside 2 of b and a broadcast of 32 registers
#else
constexpr int PRODUCT_SUMS = 6;  // of two registers of AVX2's 16, or of four of NEON's 32
#endif
constexpr int QUERIES = 12;  // at a time
constexpr int KEYS = 2 * LANES;

// y [rows, V vectors] = a [rows, K] b [K, V vectors]; a row, or a k, is that many floats after the one before it. In folds, in a
// function of its own, as tile() of linear.h is.
template <int V, size_t... M>
__attribute__((noinline)) inline void product(std::index_sequence<M...>, const float* a, int a_row, const float* b, int b_row,
                                              int K, float* y, int y_row) {
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

template <int V, int M = PRODUCT_SUMS / V>
inline void product_of(int rows, const float* a, int a_row, const float* b, int b_row, int K, float* y, int y_row) {
    for (; rows > M; rows -= M, a += M * a_row, y += M * y_row)
        product<V>(std::make_index_sequence<M>(), a, a_row, b, b_row, K, y, y_row);
    if constexpr (M > 1)
        if (rows < M) return product_of<V, M - 1>(rows, a, a_row, b, b_row, K, y, y_row);
    product<V>(std::make_index_sequence<M>(), a, a_row, b, b_row, K, y, y_row);
}

// exp(x - the largest) of n values in place; returns 1 / their sum.
inline float soften(float* x, int n) {
    const int whole = n / LANES * LANES;
    const __mmask16 rest = (1u << (n - whole)) - 1;
    const __m512 last = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), rest, x + whole);
    __m512 most = last, sum;
    for (int i = 0; i < whole; i += LANES) most = _mm512_max_ps(most, _mm512_loadu_ps(x + i));
    most = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    sum = exp16(_mm512_sub_ps(last, most));
    _mm512_mask_storeu_ps(x + whole, rest, sum);
    for (int i = 0; i < whole; i += LANES) {
        const __m512 e = exp16(_mm512_sub_ps(_mm512_loadu_ps(x + i), most));
        _mm512_storeu_ps(x + i, e);
        sum = _mm512_add_ps(sum, e);
    }
    return 1.0f / _mm512_reduce_add_ps(sum);
}

// What a query sees of a text, and how.
struct Sight {
    int window = 0;               // keys nearer than this, to both sides; 0: all
    const float* bias = nullptr;  // bias[j - i] is added to the score of key j for query i; or null
};

// One thread's room for the keys, values and weights of a head.
class HeadAttention {
  public:
    // Queries, keys and values of L tokens, a token `row` floats after the one before it, D of each; `out` likewise.
    void attend(const float* q, const float* k, const float* v, int row, int L, int D, float scaling, const Sight& sight,
                float* out, int out_row) {
        gather(k, v, row, L, D, scaling);
        const int wide = round_up(L, KEYS), tiles = (L + QUERIES - 1) / QUERIES;
        for (int i = 0; i < tiles; i++) {
            const int first = int(int64_t(L) * i / tiles), n = int(int64_t(L) * (i + 1) / tiles) - first;
            const float* query = q + size_t(first) * row;
            float *y = out + size_t(first) * out_row, by[QUERIES];
            const int from = sight.window ? std::max(0, first + 1 - sight.window) / KEYS * KEYS : 0;
            const int end = sight.window ? std::min(L, first + n - 1 + sight.window) : L, seen = end - from;
            for (int t = from; t < end; t += KEYS) {
                const float* panel = &keys[size_t(t) * D];
                if (end - t > LANES) product_of<2>(n, query, row, panel, KEYS, D, &weights[t - from], wide);
                else product_of<1>(n, query, row, panel, KEYS, D, &weights[t - from], wide);
            }
            for (int m = 0; m < n; m++) {
                float* weight = &weights[size_t(m) * wide];
                if (sight.bias) add(sight.bias + from - (first + m), weight, seen);
                if (sight.window) blind(weight, first + m, sight.window, from, end);
                by[m] = soften(weight, seen);
            }
            const float* value = &values[size_t(from) * D];
            for (int d = 0; d < D; d += 2 * LANES) {
                if (D - d > LANES) product_of<2>(n, weights.data(), wide, value + d, D, seen, y + d, out_row);
                else product_of<1>(n, weights.data(), wide, value + d, D, seen, y + d, out_row);
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

    // Scores of keys [from, end) that are not nearer than the window.
    static void blind(float* score, int query, int window, int from, int end) {
        const int first = query + 1 - window, last = query + window;
        for (int t = from; t < std::min(first, end); t++) score[t - from] = -INFINITY;
        for (int t = std::max(last, from); t < end; t++) score[t - from] = -INFINITY;
    }

    // Keys, scaled, to [token / KEYS][D][KEYS], a vector holds a dimension of as many keys. Values side by side.
    void gather(const float* k, const float* v, int row, int L, int D, float scaling) {
        const size_t wide = round_up(L, KEYS);
        const auto grow = [](std::vector<float>& room, size_t size) {
            if (room.size() < size) room.resize(size);
        };
        // each by itself: the next model of this process may have narrower heads and longer texts
        grow(keys, wide * D), grow(values, wide * D), grow(weights, wide * QUERIES);
        for (int t = 0; t < L; t++, k += row, v += row) {
            float* key = &keys[size_t(t / KEYS) * KEYS * D + t % KEYS];
            for (int d = 0; d < D; d++) key[d * KEYS] = k[d] * scaling;
            std::memcpy(&values[size_t(t) * D], v, D * sizeof(float));
        }
    }
};

}  // namespace mlt
