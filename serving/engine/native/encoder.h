// The layers of a BERT-like encoder over whole sequences side by side, without padding.
//
//   hidden ─ q,k,v ─ attend ─ o ─(+)─ norm ─ up ─ gelu ─ down ─(+)─ norm ─ ...
#pragma once

#include <omp.h>

#include <cmath>
#include <vector>

#include "linear.h"

namespace mlt {

constexpr int ENCODER_ROWS = 16;  // queries that one item of attention takes

struct EncoderLayer {
    const Linear *qkv, *o, *up, *down;
    const float *norm1, *bias1, *norm2, *bias2;  // [H]
};

struct EncoderShape {
    int32_t hidden, heads, head_dim, intermediate, layers;
    float eps, scaling;
};

// 0.5 x (1 + erf(x / sqrt 2)); erf by Abramowitz and Stegun 7.1.26, off by at most 1.5e-7.
inline __m512 gelu(__m512 x) {
    const __m512 z = _mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(0.70710678f));
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(z, _mm512_set1_ps(0.3275911f), one));
    __m512 p = _mm512_set1_ps(1.061405429f);
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-1.453152027f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(1.421413741f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-0.284496736f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(0.254829592f));
    const __m512 fall = exp16(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(z, z)));
    const __m512 tail = _mm512_mul_ps(_mm512_mul_ps(p, t), fall);
    const __m512 half = _mm512_mul_ps(x, _mm512_set1_ps(0.5f));
    const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    // 1 + erf is 2 - tail above zero and tail below
    return _mm512_mul_ps(half, _mm512_mask_mov_ps(_mm512_sub_ps(_mm512_set1_ps(2.0f), tail), negative, tail));
}

inline void layer_norm(float* x, const float* weight, const float* bias, int n, float eps) {
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
        _mm512_storeu_ps(x + i, _mm512_fmadd_ps(value, _mm512_loadu_ps(weight + i), _mm512_loadu_ps(bias + i)));
    }
}

class Encoder {
  public:
    EncoderShape shape;
    std::vector<EncoderLayer> layers;

    // `hidden` [T, H], of sequences of these lengths one after the other, in place.
    void run(const int32_t* lengths, int count, float* hidden) {
        plan(lengths, count);
#pragma omp parallel
        for (const EncoderLayer& each : layers) layer(each, hidden, omp_get_thread_num(), omp_get_num_threads());
    }

  private:
    struct Item { int first, length, row, count, head; };  // queries [row, row + count) of keys [first, first + length)

    int T = 0, padded = 0;  // tokens; places of keys: every sequence begins at a multiple of LANES
    std::vector<int> places;  // by token
    std::vector<Item> items;
    std::vector<float> qkv, keys, values, attended, wide;
    Prepared rows_for;

    void plan(const int32_t* lengths, int count) {
        T = padded = 0;
        items.clear(), places.clear();
        for (int s = 0; s < count; padded += round_up(lengths[s], LANES), T += lengths[s++]) {
            for (int i = 0; i < lengths[s]; i++) places.push_back(padded + i);
            for (int head = 0; head < shape.heads; head++)
                for (int a = 0; a < lengths[s]; a += ENCODER_ROWS)
                    items.push_back({padded, lengths[s], T + a, std::min(ENCODER_ROWS, lengths[s] - a), head});
        }
        const size_t width = size_t(shape.heads) * shape.head_dim;
        const auto room = [](std::vector<float>& buffer, size_t size) {
            if (buffer.size() < size) buffer.resize(size);
        };
        room(qkv, T * width * 3), room(attended, T * width), room(wide, size_t(T) * shape.intermediate);
        room(keys, padded * width), room(values, padded * width);
        rows_for.room(T, std::max({shape.hidden, int(width), shape.intermediate}));
    }

    void layer(const EncoderLayer& layer, float* hidden, int thread, int threads) {
        const int H = shape.hidden, I = shape.intermediate;
#pragma omp for schedule(static)
        for (int t = 0; t < T; t++) rows_for.fill(*layer.qkv, hidden, t);
        multiply(*layer.qkv, rows_for.of(*layer.qkv, hidden), T, qkv.data(), false, thread, threads);
#pragma omp barrier
#pragma omp for schedule(static)
        for (int t = 0; t < T; t++) spread(t);
#pragma omp for schedule(dynamic, 4)
        for (size_t i = 0; i < items.size(); i++) attend(items[i]);
#pragma omp for schedule(static)
        for (int t = 0; t < T; t++) rows_for.fill(*layer.o, attended.data(), t);
        multiply(*layer.o, rows_for.of(*layer.o, attended.data()), T, hidden, true, thread, threads);
#pragma omp barrier
#pragma omp for schedule(static)
        for (int t = 0; t < T; t++) {
            layer_norm(hidden + size_t(t) * H, layer.norm1, layer.bias1, H, shape.eps);
            rows_for.fill(*layer.up, hidden, t);
        }
        multiply(*layer.up, rows_for.of(*layer.up, hidden), T, wide.data(), false, thread, threads);
#pragma omp barrier
#pragma omp for schedule(static)
        for (int t = 0; t < T; t++) {
            float* x = &wide[size_t(t) * I];
            for (int i = 0; i < I; i += LANES) _mm512_storeu_ps(x + i, gelu(_mm512_loadu_ps(x + i)));
            rows_for.fill(*layer.down, wide.data(), t);
        }
        multiply(*layer.down, rows_for.of(*layer.down, wide.data()), T, hidden, true, thread, threads);
#pragma omp barrier
#pragma omp for schedule(static)
        for (int t = 0; t < T; t++) layer_norm(hidden + size_t(t) * H, layer.norm2, layer.bias2, H, shape.eps);
    }

    // Keys go to [head][place / LANES][D][LANES], so that a vector holds one dimension of as many keys; values to
    // [head][place][D].
    void spread(int t) {
        const int D = shape.head_dim, W = shape.heads * D, place = places[t];
        float* q = &qkv[size_t(t) * 3 * W];
        for (int i = 0; i < W; i++) q[i] *= shape.scaling;
        for (int h = 0; h < shape.heads; h++) {
            float* key = &keys[(size_t(h) * padded + place / LANES * LANES) * D + place % LANES];
            for (int d = 0; d < D; d++) key[d * LANES] = q[W + h * D + d];
            std::memcpy(&values[(size_t(h) * padded + place) * D], q + 2 * W + h * D, D * sizeof(float));
        }
    }

    void attend(const Item& item) {
        int i = 0;
        for (; i + 4 <= item.count; i += 4) attend_some<4>(item, i);
        for (; i < item.count; i++) attend_some<1>(item, i);
    }

    // N queries over all keys of their sequence. A query's sums run in the same order whatever N is.
    template <int N>
    void attend_some(const Item& item, int at) {
        thread_local std::vector<float> room;
        const int D = shape.head_dim, W = shape.heads * D, L = item.length, wide_row = round_up(L, LANES);
        if (room.size() < size_t(N) * wide_row) room.resize(size_t(N) * wide_row);
        float* weights = room.data();
        const float* q = &qkv[size_t(item.row + at) * 3 * W + item.head * D];
        const float* k = &keys[(size_t(item.head) * padded + item.first) * D];
        const float* v = &values[(size_t(item.head) * padded + item.first) * D];
        __m512 most[N], sum[N];
        for (int n = 0; n < N; n++) most[n] = _mm512_set1_ps(-INFINITY), sum[n] = _mm512_setzero_ps();
        for (int t = 0; t < L; t += LANES) {
            __m512 score[N];
            for (int n = 0; n < N; n++) score[n] = _mm512_setzero_ps();
            for (int d = 0; d < D; d++) {
                const __m512 key = _mm512_loadu_ps(k + (size_t(t) * D + d * LANES));
                for (int n = 0; n < N; n++)
                    score[n] = _mm512_fmadd_ps(_mm512_set1_ps(q[size_t(n) * 3 * W + d]), key, score[n]);
            }
            const __mmask16 inside = L - t >= LANES ? 0xffff : (1u << (L - t)) - 1;
            for (int n = 0; n < N; n++) {
                score[n] = _mm512_mask_blend_ps(inside, _mm512_set1_ps(-INFINITY), score[n]);
                most[n] = _mm512_max_ps(most[n], score[n]);
                _mm512_storeu_ps(weights + n * wide_row + t, score[n]);
            }
        }
        for (int n = 0; n < N; n++) {
            const __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps(most[n]));
            for (int t = 0; t < L; t += LANES) {
                const __m512 w = exp16(_mm512_sub_ps(_mm512_loadu_ps(weights + n * wide_row + t), largest));
                sum[n] = _mm512_add_ps(sum[n], w);
                _mm512_storeu_ps(weights + n * wide_row + t, w);
            }
        }
        for (int d = 0; d < D; d += 2 * LANES) mix<N>(weights, wide_row, v + d, L, D, d, sum, item, at);
    }

    // Two vectors of the values' dimensions, from `d` on (one at the end of an odd number).
    template <int N>
    void mix(const float* weights, int wide_row, const float* v, int L, int D, int d, const __m512* sum,
             const Item& item, int at) {
        const bool two = d + LANES < D;
        __m512 left[N], right[N];
        for (int n = 0; n < N; n++) left[n] = right[n] = _mm512_setzero_ps();
        for (int t = 0; t < L; t++, v += D) {
            const __m512 a = _mm512_loadu_ps(v), b = two ? _mm512_loadu_ps(v + LANES) : a;
            for (int n = 0; n < N; n++) {
                const __m512 w = _mm512_set1_ps(weights[n * wide_row + t]);
                left[n] = _mm512_fmadd_ps(w, a, left[n]), right[n] = _mm512_fmadd_ps(w, b, right[n]);
            }
        }
        for (int n = 0; n < N; n++) {
            const __m512 by = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(sum[n]));
            float* out = &attended[(size_t(item.row + at + n) * shape.heads + item.head) * D + d];
            _mm512_storeu_ps(out, _mm512_mul_ps(left[n], by));
            if (two) _mm512_storeu_ps(out + LANES, _mm512_mul_ps(right[n], by));
        }
    }
};

}  // namespace mlt
