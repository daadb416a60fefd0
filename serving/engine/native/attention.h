// Attention of query heads over the keys and values of one KV head in a slot.
//
// A query meets its keys in blocks of BLOCK tokens at fixed places (0, BLOCK, ...), the blocks of a SEGMENT fold into
// one running softmax, and segments are merged in order. Neither depends on the batch, on how a prompt was cut into
// chunks or on the number of threads: a token's result is bitwise the same however it came to be computed.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "simd.h"

namespace mlt {

constexpr int BLOCK = 32;     // keys and values of a block of 64-wide heads are half of a 32 KiB cache
constexpr int SEGMENT = 512;  // tokens; what one thread takes of a long context
constexpr int MAX_HEAD = 256;
constexpr int TOGETHER = 3;   // queries that are taken at a time
#ifdef MLT_AVX512
constexpr int MIXED = 18;  // sums of values at a time: of 32 registers, beside 3 weights and a value
#else
constexpr int MIXED = 6;  // of two registers of AVX2's 16, or of four of NEON's 32
#endif
constexpr int TRANSPOSED = 5; // queries from which transposing a block's keys pays

constexpr int SHARED_BLOCK = 64;  // tokens: what is read in another's slot is whole blocks of these

static_assert(SHARED_BLOCK % BLOCK == 0 && SEGMENT % SHARED_BLOCK == 0);

// Tokens before `stop`, and behind those of the part before, that a sequence reads in the slot of another.
struct SharedPart { int32_t slot, stop; };

// Where keys and values of one KV head of a sequence are: in its slot, and what it shares at the same place in others'.
template <class T>
struct KeptHead {
    T* first;  // its keys of token 0 in the first of all slots
    size_t token, values_after, slot_elements;  // numbers: of a token, from keys to values, from slot to slot
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
    // From `at` on to the end of its shared block.
    T* keys(int at) const { return first + slot_of(at) * slot_elements + at * token; }
    T* values(int at) const { return keys(at) + values_after; }
};

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

// A score is a sum over dimensions in one order, however it is computed: lane l of sixteen adds dimensions l, l + 16, ..,
// then lanes (0 + 2) + (1 + 3) of each quarter are added, then quarters (0 + 1) + (2 + 3), as sum_each() does.

// The scores of one query with the keys of a block. `q` carries the scaling.
template <int V>
inline void score_one(const float* q, const float* k, float* scores) {
    __m512 query[V];
    for (int d = 0; d < V; d++) query[d] = _mm512_loadu_ps(q + d * LANES);
    for (int t = 0; t < BLOCK; t += LANES) {
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

// Of each query the sum of lanes `at` and at + 2 of a quarter, for sixteen tokens of a block's transpose `kt` [V * LANES, BLOCK].
template <int V, size_t... M>
__attribute__((always_inline)) inline void score_lanes(std::index_sequence<M...>, const float* const (&query)[sizeof...(M)],
                                                       const float* kt, int at, __m512 (&sums)[sizeof...(M)]) {
    __m512 first[] = {(void(M), _mm512_setzero_ps())...}, third[] = {(void(M), _mm512_setzero_ps())...};
    for (int d = at; d < V * LANES; d += LANES) {
        const __m512 k0 = _mm512_load_ps(kt + d * BLOCK), k2 = _mm512_load_ps(kt + (d + 2) * BLOCK);
        ((first[M] = _mm512_fmadd_ps(_mm512_set1_ps(query[M][d]), k0, first[M]),
          third[M] = _mm512_fmadd_ps(_mm512_set1_ps(query[M][d + 2]), k2, third[M])),
         ...);
    }
    ((sums[M] = _mm512_add_ps(first[M], third[M])), ...);
}

// The same of as many queries as there are indexes, by the block's transpose. Few sums at a time, in folds: all stay in
// registers (tests/serving/engine/test_registers.py).
template <int V, size_t... M>
__attribute__((noinline)) inline void score(std::index_sequence<M...> all, const float* const* q, const float* kt,
                                            float (*scores)[BLOCK]) {
    const float* const query[] = {q[M]...};
    alignas(64) float quarters[4][sizeof...(M)][LANES];
    for (int t = 0; t < BLOCK; t += LANES, kt += LANES) {
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

template <int V, int M = TOGETHER>
inline void score_of(int count, const float* const* q, const float* kt, float (*scores)[BLOCK]) {
    if constexpr (M > 1)
        if (count < M) return score_of<V, M - 1>(count, q, kt, scores);
    score<V>(std::make_index_sequence<M>(), q, kt, scores);
}

// A query's scores of tokens [from, to) of a block become weights in its softmax; returns what its values fade by.
inline float weigh(float* scores, int from, int to, Partial& state) {
    const uint32_t inside = (to >= BLOCK ? ~0u : (1u << to) - 1) & ~((1u << from) - 1);
    __m512 score[BLOCK / LANES], most = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
    for (int i = 0; i < BLOCK / LANES; i++) {
        const __mmask16 seen = __mmask16(inside >> i * LANES);
        score[i] = _mm512_mask_blend_ps(seen, _mm512_set1_ps(-INFINITY), _mm512_load_ps(scores + i * LANES));
        most = _mm512_max_ps(most, score[i]);
    }
    const float largest = std::max(state.most, _mm512_reduce_max_ps(most));
    for (int i = 0; i < BLOCK / LANES; i++) {
        const __m512 w = exp16(_mm512_sub_ps(score[i], _mm512_set1_ps(largest)));
        _mm512_store_ps(scores + i * LANES, w);
        total = _mm512_add_ps(total, w);
    }
    const float fade = state.sum == 0.0f ? 0.0f : std::exp(state.most - largest);
    state.sum = state.sum * fade + _mm512_reduce_add_ps(total);
    state.most = largest;
    return fade;
}

// Vectors of the values, from dimension d on, of tokens [from, to) by the weights of COUNT queries, token by token in order.
// Sums are numbered by a pack, COUNT of a vector, in folds as in score().
template <int COUNT, size_t... S>
__attribute__((noinline)) inline void mix(std::index_sequence<S...>, const float (*weights)[BLOCK], const float* fades,
                                          const float* v, int dim, int d, int from, int to, Partial* const* states) {
    float* const place[] = {states[S % COUNT]->values + d + S / COUNT * LANES...};
    __m512 sum[] = {_mm512_mul_ps(_mm512_load_ps(place[S]), _mm512_set1_ps(fades[S % COUNT]))...};
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

template <int V, int M = TOGETHER>
inline void mix_of(int count, const float (*weights)[BLOCK], const float* fades, const float* v, int from, int to,
                   Partial* const* states) {
    if constexpr (M > 1)
        if (count < M) return mix_of<V, M - 1>(count, weights, fades, v, from, to, states);
    constexpr int C = std::min(V, MIXED / M), D = V * LANES;
    int d = 0;
    for (; d + C * LANES <= D; d += C * LANES)
        mix<M>(std::make_index_sequence<M * C>(), weights, fades, v, D, d, from, to, states);
    if constexpr (V % C != 0) mix<M>(std::make_index_sequence<M * (V % C)>(), weights, fades, v, D, d, from, to, states);
}

// Queries that see some tokens of one block, [from[i], to[i]) of it.
struct BlockQueries {
    float cap = 0.0f;
    int count = 0, from[TOGETHER], to[TOGETHER];
    const float* q[TOGETHER];
    Partial* state[TOGETHER];
};

// Folds one block into the queries' softmaxes. `kt` is the block's keys transposed, or null where that does not pay.
template <int V>
inline void attend_block(const BlockQueries& at, const float* keys, const float* kt, const float* values) {
    alignas(64) float weights[TOGETHER][BLOCK];
    float fades[TOGETHER];
    if (kt) score_of<V>(at.count, at.q, kt, weights);
    else
        for (int i = 0; i < at.count; i++) score_one<V>(at.q[i], keys, weights[i]);
    if (at.cap != 0.0f)
        for (int i = 0; i < at.count; i++) cap_each(weights[i], BLOCK, at.cap);
    bool alike = true;
    for (int i = 0; i < at.count; i++) {
        fades[i] = weigh(weights[i], at.from[i], at.to[i], *at.state[i]);
        alike &= at.from[i] == at.from[0] && at.to[i] == at.to[0];
    }
    // Queries that see the same tokens are mixed together; no token that a query does not see is read for it, since it
    // may be no number.
    const int step = alike ? TOGETHER : 1;
    for (int i = 0; i < at.count; i += step)
        mix_of<V>(std::min(step, at.count - i), weights + i, fades + i, values, at.from[i], at.to[i], at.state + i);
}

// Queries `q[i]` that see tokens [lo[i], hi[i]) of one KV head.
struct Queries {
    int count;
    const float* const* q;
    const int *lo, *hi;
    float cap = 0.0f;  // scores become cap tanh(score / cap); 0: they stay
};

// The softmax of each query over what it sees of segment `segment`, into `states`; nothing else is read.
template <int V>
inline void attend_segment(const Queries& queries, const KeptHead<const float>& kept, int segment, Partial* states) {
    constexpr int D = V * LANES;
    alignas(64) float kt[D * BLOCK];
    const bool transposed = queries.count >= TRANSPOSED;
    int first = INT32_MAX, last = 0;
    for (int i = 0; i < queries.count; i++) {
        clear(states[i], D);
        first = std::min(first, queries.lo[i]), last = std::max(last, queries.hi[i]);
    }
    first = std::max(first, segment * SEGMENT) / BLOCK * BLOCK;
    last = std::min(last, (segment + 1) * SEGMENT);
    for (int block = first; block < last; block += BLOCK) {
        const float *keys = kept.keys(block), *values = kept.values(block);
        if (transposed)
            for (int t = 0; t < BLOCK; t += LANES)
                for (int d = 0; d < D; d += LANES) transpose(keys + t * D + d, D, kt + d * BLOCK + t, BLOCK);
        BlockQueries seeing;
        seeing.cap = queries.cap;
        for (int i = 0; i < queries.count; i++) {
            const int from = std::max(queries.lo[i] - block, 0), to = std::min(queries.hi[i] - block, BLOCK);
            if (from < to) {
                const int n = seeing.count++;
                seeing.from[n] = from, seeing.to[n] = to, seeing.q[n] = queries.q[i], seeing.state[n] = &states[i];
            }
            if (seeing.count == TOGETHER || (seeing.count && i + 1 == queries.count)) {
                attend_block<V>(seeing, keys, transposed ? kt : nullptr, values);
                seeing.count = 0;
            }
        }
    }
}

inline void attend_segment(int dim, const Queries& q, const KeptHead<const float>& kept, int segment, Partial* states) {
    switch (dim / LANES) {
        case 1: return attend_segment<1>(q, kept, segment, states);
        case 2: return attend_segment<2>(q, kept, segment, states);
        case 3: return attend_segment<3>(q, kept, segment, states);
        case 4: return attend_segment<4>(q, kept, segment, states);
        case 5: return attend_segment<5>(q, kept, segment, states);
        case 6: return attend_segment<6>(q, kept, segment, states);
        case 8: return attend_segment<8>(q, kept, segment, states);
        case 16: return attend_segment<16>(q, kept, segment, states);
    }
}

inline bool can_attend(int dim) {
    const int v = dim / LANES;
    return dim % LANES == 0 && dim <= MAX_HEAD && ((v >= 1 && v <= 6) || v == 8 || v == 16);
}

}  // namespace mlt
