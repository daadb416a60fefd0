// Attention of query heads over the keys and values of one KV head in a slot.
//
// A query meets its keys in blocks of BLOCK tokens at fixed places (0, BLOCK, ...), the blocks of a SEGMENT fold into
// one running softmax, and segments are merged in order. Neither depends on the batch, on how a prompt was cut into
// chunks or on the number of threads: a token's result is bitwise the same however it came to be computed.
#pragma once

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace mlt {

constexpr int BLOCK = 32;     // keys and values of a block of 64-wide heads are half of a 32 KiB cache
constexpr int SEGMENT = 512;  // tokens; what one thread takes of a long context
constexpr int MAX_HEAD = 256;

// A softmax under way: the largest score, the sum of the weights, the weighted sum of the values.
struct Partial {
    float most, sum;
    alignas(64) float values[MAX_HEAD];
};

inline void clear(Partial& p, int dim) {
    p.most = -INFINITY, p.sum = 0.0f;
    std::fill(p.values, p.values + dim, 0.0f);
}

inline void merge(Partial& into, const Partial& next, int dim) {
    if (next.sum == 0.0f) return;
    const float most = std::max(into.most, next.most);
    const float a = into.sum == 0.0f ? 0.0f : std::exp(into.most - most), b = std::exp(next.most - most);
    for (int d = 0; d < dim; d += LANES) {
        const __m512 scaled = _mm512_mul_ps(_mm512_load_ps(next.values + d), _mm512_set1_ps(b));
        _mm512_store_ps(into.values + d,
                        _mm512_fmadd_ps(_mm512_load_ps(into.values + d), _mm512_set1_ps(a), scaled));
    }
    into.sum = into.sum * a + next.sum * b;
    into.most = most;
}

inline void finish(const Partial& state, int dim, float* out) {
    const __m512 by = _mm512_set1_ps(1.0f / state.sum);
    for (int d = 0; d < dim; d += LANES) _mm512_storeu_ps(out + d, _mm512_mul_ps(_mm512_load_ps(state.values + d), by));
}

// One query over tokens [from, to) of the block whose first key is `k`, first value `v`; `q` carries the scaling.
// The block's memory is there in full: a slot is a whole number of blocks long.
template <int V>
inline void attend_block(const float* q, const float* k, const float* v, int from, int to, Partial& state) {
    constexpr int D = V * LANES;
    alignas(64) float weight[BLOCK];
    __m512 query[V], most = _mm512_set1_ps(-INFINITY);
    for (int d = 0; d < V; d++) query[d] = _mm512_loadu_ps(q + d * LANES);
    for (int t = 0; t < BLOCK; t += LANES) {
        __m512 partial[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            const float* key = k + (t + i) * D;
            partial[i] = _mm512_mul_ps(query[0], _mm512_loadu_ps(key));
            for (int d = 1; d < V; d++)
                partial[i] = _mm512_fmadd_ps(query[d], _mm512_loadu_ps(key + d * LANES), partial[i]);
        }
        const uint32_t inside = (to >= BLOCK ? ~0u : (1u << to) - 1) & ~((1u << from) - 1);
        const __m512 score =
            _mm512_mask_blend_ps(__mmask16(inside >> t), _mm512_set1_ps(-INFINITY), sum_each(partial));
        _mm512_store_ps(weight + t, score);
        most = _mm512_max_ps(most, score);
    }
    const float largest = std::max(state.most, _mm512_reduce_max_ps(most));
    __m512 total = _mm512_setzero_ps();
    for (int t = 0; t < BLOCK; t += LANES) {
        const __m512 w = exp16(_mm512_sub_ps(_mm512_load_ps(weight + t), _mm512_set1_ps(largest)));
        _mm512_store_ps(weight + t, w);
        total = _mm512_add_ps(total, w);
    }
    const float fade = state.sum == 0.0f ? 0.0f : std::exp(state.most - largest);
    __m512 values[V];
    for (int d = 0; d < V; d++)
        values[d] = _mm512_mul_ps(_mm512_load_ps(state.values + d * LANES), _mm512_set1_ps(fade));
    for (int t = from; t < to; t++) {
        const __m512 w = _mm512_set1_ps(weight[t]);
        for (int d = 0; d < V; d++) values[d] = _mm512_fmadd_ps(w, _mm512_loadu_ps(v + t * D + d * LANES), values[d]);
    }
    for (int d = 0; d < V; d++) _mm512_store_ps(state.values + d * LANES, values[d]);
    state.sum = state.sum * fade + _mm512_reduce_add_ps(total);
    state.most = largest;
}

// Queries `q[i]` that see tokens [lo[i], hi[i]) of one KV head; only what lies in segment `segment` is read.
struct Queries {
    int count;
    const float* const* q;
    const int *lo, *hi;
};

template <int V>
inline void attend_segment(const Queries& queries, const float* k, const float* v, int segment, Partial* states) {
    constexpr int D = V * LANES;
    int first = INT32_MAX, last = 0;
    for (int i = 0; i < queries.count; i++) {
        clear(states[i], D);
        first = std::min(first, queries.lo[i]), last = std::max(last, queries.hi[i]);
    }
    first = std::max(first, segment * SEGMENT) / BLOCK * BLOCK;
    last = std::min(last, (segment + 1) * SEGMENT);
    for (int at = first; at < last; at += BLOCK)
        for (int i = 0; i < queries.count; i++) {
            const int from = std::max(queries.lo[i] - at, 0), to = std::min(queries.hi[i] - at, BLOCK);
            if (from < to) attend_block<V>(queries.q[i], k + size_t(at) * D, v + size_t(at) * D, from, to, states[i]);
        }
}

inline void attend_segment(int dim, const Queries& q, const float* k, const float* v, int segment, Partial* states) {
    switch (dim / LANES) {
        case 1: return attend_segment<1>(q, k, v, segment, states);
        case 2: return attend_segment<2>(q, k, v, segment, states);
        case 3: return attend_segment<3>(q, k, v, segment, states);
        case 4: return attend_segment<4>(q, k, v, segment, states);
        case 5: return attend_segment<5>(q, k, v, segment, states);
        case 6: return attend_segment<6>(q, k, v, segment, states);
        case 8: return attend_segment<8>(q, k, v, segment, states);
        case 16: return attend_segment<16>(q, k, v, segment, states);
    }
}

inline bool can_attend(int dim) {
    const int v = dim / LANES;
    return dim % LANES == 0 && dim <= MAX_HEAD && ((v >= 1 && v <= 6) || v == 8 || v == 16);
}

}  // namespace mlt
