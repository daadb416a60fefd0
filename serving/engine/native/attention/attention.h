// Attention of query heads over the keys and values of one KV head in a slot.
//
// A query processes its keys in blocks of BLOCK_TOKENS at fixed positions (0, BLOCK_TOKENS, ...), the blocks of a
// segment are folded into one running softmax, and segments are merged in order. This does not depend on the batch, the
// chunks of a prompt or the number of threads, so a token's result is always bitwise the same.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "isa/simd.h"

namespace mlflow_llm {

constexpr int BLOCK_TOKENS = 32;  // keys and values of a block of 64-wide heads take half of a 32 KiB cache
constexpr int SEGMENT_TOKENS = 512;  // the part of a long context that one thread processes
constexpr int MAX_HEAD_DIM = 256;
constexpr int QUERIES_PER_PASS = 3;  // queries processed at a time
#ifdef MLFLOW_LLM_AVX512
constexpr int MAX_VALUE_SUMS = 18;  // sums of values at a time: in 32 registers, with 3 weights and a value
#else
constexpr int MAX_VALUE_SUMS = 6;  // two registers each of AVX2's 16, or four of NEON's 32
#endif
constexpr int MIN_TRANSPOSE_QUERIES = 5;  // from so many queries transposing a block of keys pays

constexpr int SHARED_BLOCK_TOKENS = 64;  // slots are shared in whole blocks of this size

static_assert(SHARED_BLOCK_TOKENS % BLOCK_TOKENS == 0 && SEGMENT_TOKENS % SHARED_BLOCK_TOKENS == 0);

// The tokens before `stop`, and not before the previous part's, that a sequence reads from another sequence's slot.
struct SharedPart { int32_t slot, stop; };

// The keys and values of one KV head of a sequence: in its own slot, and the shared ones at the same place in other
// slots.
template <class T>
struct CachedHead {
    T* first;  // its key of token 0 in the first slot
    // strides in elements: between tokens, from keys to values, between slots
    size_t token, values_after, slot_elements;
    int slot;
    const SharedPart* parts;
    int num_parts;

    T* own_keys() const { return first + slot * slot_elements; }
    T* own_values() const { return own_keys() + values_after; }
    int slot_of(int at) const {
        for (int i = 0; i < num_parts; i++)
            if (at < parts[i].stop) return parts[i].slot;
        return slot;
    }
    // Return the keys from token `at` on, contiguous up to the end of its shared block.
    T* keys(int at) const { return first + slot_of(at) * slot_elements + at * token; }
    T* values(int at) const { return keys(at) + values_after; }
};

// A running softmax: the maximum score, the sum of the weights, the weighted sum of the values.
struct Partial {
    float max, sum;
    alignas(64) float values[MAX_HEAD_DIM];
};

inline void clear(Partial& p, int dim) {
    p.max = -INFINITY, p.sum = 0.0f;
    std::fill(p.values, p.values + dim, 0.0f);
}

inline void merge(Partial& into, const Partial& next, int dim) {
    if (next.sum == 0.0f) return;
    const float max = std::max(into.max, next.max);
    const float a = into.sum == 0.0f ? 0.0f : std::exp(into.max - max), b = std::exp(next.max - max);
    for (int d = 0; d < dim; d += LANES) {
        const __m512 scaled = _mm512_mul_ps(_mm512_load_ps(next.values + d), _mm512_set1_ps(b));
        _mm512_store_ps(into.values + d,
                        _mm512_fmadd_ps(_mm512_load_ps(into.values + d), _mm512_set1_ps(a), scaled));
    }
    into.sum = into.sum * a + next.sum * b;
    into.max = max;
}

inline void finish(const Partial& state, int dim, float* out) {
    const __m512 by = _mm512_set1_ps(1.0f / state.sum);
    for (int d = 0; d < dim; d += LANES) _mm512_storeu_ps(out + d, _mm512_mul_ps(_mm512_load_ps(state.values + d), by));
}

// A score is always summed over dimensions in the same order: lane l of sixteen adds dimensions l, l + 16, .., then
// come lanes (0 + 2) + (1 + 3) of each quarter, then quarters (0 + 1) + (2 + 3), as in sum_each().

// Compute the scores of one query with the keys of a block. `q` includes the scaling.
template <int V>
inline void score_one(const float* q, const float* k, float* scores) {
    __m512 query[V];
    for (int d = 0; d < V; d++) query[d] = _mm512_loadu_ps(q + d * LANES);
    for (int t = 0; t < BLOCK_TOKENS; t += LANES) {
        __m512 partial[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            const float* key = k + (t + i) * V * LANES;
            partial[i] = _mm512_mul_ps(query[0], _mm512_loadu_ps(key));
            for (int d = 1; d < V; d++)
                partial[i] = _mm512_fmadd_ps(query[d], _mm512_loadu_ps(key + d * LANES), partial[i]);
        }
        _mm512_store_ps(scores + t, sum_each(partial));
    }
}

// Compute for each query the sums of lanes `at` and `at` + 2 of a quarter, for sixteen tokens of a block's transposed
// keys `kt` [V * LANES, BLOCK_TOKENS].
template <int V, size_t... M>
__attribute__((always_inline)) inline void score_lanes(std::index_sequence<M...>,
                                                       const float* const (&query)[sizeof...(M)], const float* kt,
                                                       int at, __m512 (&sums)[sizeof...(M)]) {
    __m512 first[] = {(void(M), _mm512_setzero_ps())...}, third[] = {(void(M), _mm512_setzero_ps())...};
    for (int d = at; d < V * LANES; d += LANES) {
        const __m512 k0 = _mm512_load_ps(kt + d * BLOCK_TOKENS), k2 = _mm512_load_ps(kt + (d + 2) * BLOCK_TOKENS);
        ((first[M] = _mm512_fmadd_ps(_mm512_set1_ps(query[M][d]), k0, first[M]),
          third[M] = _mm512_fmadd_ps(_mm512_set1_ps(query[M][d + 2]), k2, third[M])),
         ...);
    }
    ((sums[M] = _mm512_add_ps(first[M], third[M])), ...);
}

// Compute the scores of sizeof...(M) queries with a block's transposed keys. Few sums at a time, in folds, so that all
// stay in registers (tests/serving/engine/test_registers.py).
template <int V, size_t... M>
__attribute__((noinline)) inline void score(std::index_sequence<M...> all, const float* const* q, const float* kt,
                                            float (*scores)[BLOCK_TOKENS]) {
    const float* const query[] = {q[M]...};
    alignas(64) float quarters[4][sizeof...(M)][LANES];
    for (int t = 0; t < BLOCK_TOKENS; t += LANES, kt += LANES) {
        for (int part = 0; part < 4; part++) {
            __m512 even[sizeof...(M)], odd[sizeof...(M)];
            score_lanes<V>(all, query, kt, 4 * part, even);
            (_mm512_store_ps(quarters[part][M], even[M]), ...);
            score_lanes<V>(all, query, kt, 4 * part + 1, odd);
            (_mm512_store_ps(quarters[part][M], _mm512_add_ps(_mm512_load_ps(quarters[part][M]), odd[M])), ...);
        }
        const auto sum = [&](size_t m, int part) {
            return _mm512_add_ps(_mm512_load_ps(quarters[part][m]), _mm512_load_ps(quarters[part + 1][m]));
        };
        (_mm512_store_ps(scores[M] + t, _mm512_add_ps(sum(M, 0), sum(M, 2))), ...);
    }
}

template <int V, int M = QUERIES_PER_PASS>
inline void dispatch_score(int count, const float* const* q, const float* kt, float (*scores)[BLOCK_TOKENS]) {
    if constexpr (M > 1)
        if (count < M) return dispatch_score<V, M - 1>(count, q, kt, scores);
    score<V>(std::make_index_sequence<M>(), q, kt, scores);
}

// Turn a query's scores of tokens [from, to) of a block into softmax weights; return the rescaling factor of the
// running softmax.
inline float update_softmax(float* scores, int from, int to, Partial& state) {
    const uint32_t inside = (to >= BLOCK_TOKENS ? ~0u : (1u << to) - 1) & ~((1u << from) - 1);
    __m512 score[BLOCK_TOKENS / LANES], max = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
    for (int i = 0; i < BLOCK_TOKENS / LANES; i++) {
        const __mmask16 seen = __mmask16(inside >> i * LANES);
        score[i] = _mm512_mask_blend_ps(seen, _mm512_set1_ps(-INFINITY), _mm512_load_ps(scores + i * LANES));
        max = _mm512_max_ps(max, score[i]);
    }
    const float largest = std::max(state.max, _mm512_reduce_max_ps(max));
    for (int i = 0; i < BLOCK_TOKENS / LANES; i++) {
        const __m512 w = exp16(_mm512_sub_ps(score[i], _mm512_set1_ps(largest)));
        _mm512_store_ps(scores + i * LANES, w);
        total = _mm512_add_ps(total, w);
    }
    const float rescale = state.sum == 0.0f ? 0.0f : std::exp(state.max - largest);
    state.sum = state.sum * rescale + _mm512_reduce_add_ps(total);
    state.max = largest;
    return rescale;
}

// Add vectors of the values of tokens [from, to), from dimension d on, weighted for COUNT queries, token by token in
// order. Sums are numbered by a parameter pack, COUNT per vector, in folds as in score().
template <int COUNT, size_t... S>
__attribute__((noinline)) inline void accumulate_values(std::index_sequence<S...>, const float (*weights)[BLOCK_TOKENS],
                                                        const float* rescales, const float* v, int dim, int d, int from,
                                                        int to, Partial* const* states) {
    float* const place[] = {states[S % COUNT]->values + d + S / COUNT * LANES...};
    __m512 sum[] = {_mm512_mul_ps(_mm512_load_ps(place[S]), _mm512_set1_ps(rescales[S % COUNT]))...};
    v += size_t(from) * dim + d;
    for (int t = from; t < to; t++, v += dim) {
        __m512 w[COUNT], value;
        ((S < COUNT ? void(w[S % COUNT] = _mm512_set1_ps(weights[S % COUNT][t])) : void()), ...);
        ((S % COUNT == 0 ? void(value = _mm512_loadu_ps(v + S / COUNT * LANES)) : void(),
          sum[S] = _mm512_fmadd_ps(w[S % COUNT], value, sum[S])),
         ...);
    }
    (_mm512_store_ps(place[S], sum[S]), ...);
}

template <int V, int M = QUERIES_PER_PASS>
inline void dispatch_accumulate(int count, const float (*weights)[BLOCK_TOKENS], const float* rescales, const float* v,
                                int from, int to, Partial* const* states) {
    if constexpr (M > 1)
        if (count < M) return dispatch_accumulate<V, M - 1>(count, weights, rescales, v, from, to, states);
    constexpr int C = std::min(V, MAX_VALUE_SUMS / M), D = V * LANES;
    int d = 0;
    for (; d + C * LANES <= D; d += C * LANES)
        accumulate_values<M>(std::make_index_sequence<M * C>(), weights, rescales, v, D, d, from, to, states);
    if constexpr (V % C != 0)
        accumulate_values<M>(std::make_index_sequence<M * (V % C)>(), weights, rescales, v, D, d, from, to, states);
}

// Queries of one block; query i sees the block's tokens [from[i], to[i]).
struct BlockQueries {
    float cap = 0.0f;
    int count = 0, from[QUERIES_PER_PASS], to[QUERIES_PER_PASS];
    const float* q[QUERIES_PER_PASS];
    Partial* state[QUERIES_PER_PASS];
};

// Fold one block into the queries' softmaxes. `kt` is the block's transposed keys, or null if transposing does not pay.
template <int V>
inline void attend_block(const BlockQueries& at, const float* keys, const float* kt, const float* values) {
    alignas(64) float weights[QUERIES_PER_PASS][BLOCK_TOKENS];
    float rescales[QUERIES_PER_PASS];
    if (kt) dispatch_score<V>(at.count, at.q, kt, weights);
    else
        for (int i = 0; i < at.count; i++) score_one<V>(at.q[i], keys, weights[i]);
    if (at.cap != 0.0f)
        for (int i = 0; i < at.count; i++) cap_each(weights[i], BLOCK_TOKENS, at.cap);
    bool same_range = true;
    for (int i = 0; i < at.count; i++) {
        rescales[i] = update_softmax(weights[i], at.from[i], at.to[i], *at.state[i]);
        same_range &= at.from[i] == at.from[0] && at.to[i] == at.to[0];
    }
    // Queries with the same range are accumulated together. Tokens that a query does not see are not read for it, since
    // they may be NaN.
    const int step = same_range ? QUERIES_PER_PASS : 1;
    for (int i = 0; i < at.count; i += step)
        dispatch_accumulate<V>(std::min(step, at.count - i), weights + i, rescales + i, values, at.from[i], at.to[i],
                               at.state + i);
}

// Queries of one KV head; `q[i]` sees tokens [lo[i], hi[i]).
struct Queries {
    int count;
    const float* const* q;
    const int *lo, *hi;
    float cap = 0.0f;  // scores become cap tanh(score / cap); 0: no cap
};

// Compute the softmax of each query over its tokens of segment `segment` into `states`; nothing else is read.
template <int V>
inline void attend_segment(const Queries& queries, const CachedHead<const float>& cached, int segment, Partial* states) {
    constexpr int D = V * LANES;
    alignas(64) float kt[D * BLOCK_TOKENS];
    const bool transposed = queries.count >= MIN_TRANSPOSE_QUERIES;
    int first = INT32_MAX, last = 0;
    for (int i = 0; i < queries.count; i++) {
        clear(states[i], D);
        first = std::min(first, queries.lo[i]), last = std::max(last, queries.hi[i]);
    }
    first = std::max(first, segment * SEGMENT_TOKENS) / BLOCK_TOKENS * BLOCK_TOKENS;
    last = std::min(last, (segment + 1) * SEGMENT_TOKENS);
    for (int block = first; block < last; block += BLOCK_TOKENS) {
        const float *keys = cached.keys(block), *values = cached.values(block);
        if (transposed)
            for (int t = 0; t < BLOCK_TOKENS; t += LANES)
                for (int d = 0; d < D; d += LANES)
                    transpose(keys + t * D + d, D, kt + d * BLOCK_TOKENS + t, BLOCK_TOKENS);
        BlockQueries seeing;
        seeing.cap = queries.cap;
        for (int i = 0; i < queries.count; i++) {
            const int from = std::max(queries.lo[i] - block, 0), to = std::min(queries.hi[i] - block, BLOCK_TOKENS);
            if (from < to) {
                const int n = seeing.count++;
                seeing.from[n] = from, seeing.to[n] = to, seeing.q[n] = queries.q[i], seeing.state[n] = &states[i];
            }
            if (seeing.count == QUERIES_PER_PASS || (seeing.count && i + 1 == queries.count)) {
                attend_block<V>(seeing, keys, transposed ? kt : nullptr, values);
                seeing.count = 0;
            }
        }
    }
}

inline void attend_segment(int dim, const Queries& q, const CachedHead<const float>& cached, int segment,
                           Partial* states) {
    switch (dim / LANES) {
        case 1: return attend_segment<1>(q, cached, segment, states);
        case 2: return attend_segment<2>(q, cached, segment, states);
        case 3: return attend_segment<3>(q, cached, segment, states);
        case 4: return attend_segment<4>(q, cached, segment, states);
        case 5: return attend_segment<5>(q, cached, segment, states);
        case 6: return attend_segment<6>(q, cached, segment, states);
        case 8: return attend_segment<8>(q, cached, segment, states);
        case 16: return attend_segment<16>(q, cached, segment, states);
    }
}

inline bool can_attend(int dim) {
    const int v = dim / LANES;
    return dim % LANES == 0 && dim <= MAX_HEAD_DIM && ((v >= 1 && v <= 6) || v == 8 || v == 16);
}

}  // namespace mlflow_llm
