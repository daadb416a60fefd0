// Attention of query heads over the keys and values of one KV head in int8, with a scale per token.
//
//   a block    INT8_BLOCK_TOKENS tokens: their bytes, followed by a float scale for each
//   keys       [D / 4][INT8_BLOCK_TOKENS][4]   four dimensions of a token; offset by BYTE_OFFSET
//   values     [INT8_BLOCK_TOKENS / 4][D][4]   four tokens of a dimension; signed
//
// Queries and softmax weights are quantised to 14-bit integers (levels), stored as two bytes of seven bits: n = 128
// high + low. A sum of products is then an integer below 2^31, the same in any order and by any instruction: vectors
// serve few queries and tiles many, with bitwise the same results. This adds a hundredth of the rounding error of keys
// and values.
//
// As in attention.h, the blocks of a segment are folded into one running softmax, and segments are merged in order.
#pragma once

#include <numeric>

#include "attention/attention.h"
#include "linear/dispatch.h"
#include "isa/tiles.h"
#include "isa/words.h"

namespace mlflow_llm {

constexpr int INT8_BLOCK_TOKENS = 64;
constexpr int INT8_BLOCK_VECTORS = INT8_BLOCK_TOKENS / LANES;
constexpr int MAX_LEVEL = 127 * 128;
constexpr int MAX_INT8_QUERIES = 32;  // queries that share a read of keys and values
constexpr int MIN_TILE_QUERIES = 9;  // from so many queries tiles pay
constexpr size_t CACHE_LINE_BYTES = 64;
enum Part { HIGH, LOW, NUM_PARTS };

static_assert(SEGMENT_TOKENS % INT8_BLOCK_TOKENS == 0 && SHARED_BLOCK_TOKENS % INT8_BLOCK_TOKENS == 0 &&
              INT8_BLOCK_TOKENS == TILE_BYTES && MAX_INT8_QUERIES % TILE_ROWS == 0);

// Return the bytes per token in a KV head's keys, or values.
constexpr size_t int8_token_bytes(int dim) { return dim + sizeof(float); }

struct Int8Block {
    uint8_t* bytes;
    float* scales;  // [INT8_BLOCK_TOKENS]

    Int8Block(const uint8_t* head, int dim, int token)
        : bytes(const_cast<uint8_t*>(head) +
                size_t(token / INT8_BLOCK_TOKENS) * INT8_BLOCK_TOKENS * int8_token_bytes(dim)),
          scales((float*)(bytes + INT8_BLOCK_TOKENS * dim)) {}
};

// Quantise the key and value of token `at`, [dim] each, into a KV head of a slot.
inline void store_int8(const float* key, const float* value, int dim, int at, uint8_t* keys, uint8_t* values) {
    uint8_t bytes[MAX_HEAD_DIM];
    const int t = at % INT8_BLOCK_TOKENS;
    const Int8Block to_keys(keys, dim, at), to_values(values, dim, at);
    to_keys.scales[t] = quantize_row(key, dim, bytes);
    for (int d = 0; d < dim; d += 4) std::memcpy(to_keys.bytes + d * INT8_BLOCK_TOKENS + t * 4, bytes + d, 4);
    to_values.scales[t] = quantize_row(value, dim, bytes);
    uint8_t* to = to_values.bytes + t / 4 * dim * 4 + t % 4;
    for (int d = 0; d < dim; d++) to[d * 4] = bytes[d] ^ BYTE_OFFSET;  // removes an offset of 128
}

// Store the lowest bytes of four vectors in a single store, so that a load of all of them does not wait for four
// stores.
inline void store_bytes(const __m512i (&x)[4], int8_t* to) {
#ifdef MLFLOW_LLM_AVX512
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes = _mm512_packs_epi16(_mm512_packs_epi32(x[0], x[1]), _mm512_packs_epi32(x[2], x[3]));
    _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, bytes));
#else
    for (int i = 0; i < 4; i++) _mm_storeu_si128((__m128i*)(to + i * LANES), _mm512_cvtepi32_epi8(x[i]));
#endif
}

// Convert sixteen values times `by` to levels, at most MAX_LEVEL.
inline __m512i to_levels(__m512 x, __m512 by) { return _mm512_cvtps_epi32(_mm512_mul_ps(x, by)); }
inline __m512i high_of(__m512i level) { return _mm512_srai_epi32(level, 7); }
inline __m512i low_of(__m512i level) { return _mm512_and_si512(level, _mm512_set1_epi32(127)); }

// Return 128 high + low - offset as a float.
inline __m512 whole_sum(__m512i high, __m512i low, int32_t offset) {
    const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high, 7), low);
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, _mm512_set1_epi32(offset)));
}

// The block to be read next, or null. The hardware prefetcher does not predict it: keys and values alternate, and
// nearly every block ends a page.
struct NextBlock {
    const uint8_t *keys = nullptr, *values = nullptr;
};

// Prefetch LINES cache lines from `next` on into L2 and advance `next`. Spread between products, since the CPU stalls
// if many are requested at once.
template <int LINES>
inline void fetch_lines(const uint8_t*& next) {
    if (!next) return;
    for (int i = 0; i < LINES; i++) __builtin_prefetch(next + i * CACHE_LINE_BYTES, 0, 2);
    next += LINES * CACHE_LINE_BYTES;
}

// Queries of one KV head, quantised to levels; query i sees tokens [lo[i], hi[i]).
struct LevelQueries {
    int count, lo[MAX_INT8_QUERIES], hi[MAX_INT8_QUERIES];
    float cap;  // as in attention.h
    bool words;  // each query is a row of words (words.h) rather than two of bytes
    float unit[MAX_INT8_QUERIES];
    int32_t offset[MAX_INT8_QUERIES];  // contribution of the keys' byte offset
    union {
        alignas(64) int8_t parts[NUM_PARTS][MAX_INT8_QUERIES][MAX_HEAD_DIM];
        alignas(64) int16_t rows[MAX_INT8_QUERIES][MAX_HEAD_DIM];
    };

    // Set query i to q [dim], which includes the scaling.
    void set(int i, const float* q, int dim, int from, int to) {
        lo[i] = from, hi[i] = to;
        unit[i] = row_scale(q, dim) * (float(MAX_INT8_LEVEL) / MAX_LEVEL);  // NaN if a value is not finite
        const __m512 by = _mm512_set1_ps(1.0f / unit[i]);
        __m512i sum = _mm512_setzero_si512();
        for (int d = 0; d < dim; d += LANES) {
            const __m512i level = to_levels(_mm512_loadu_ps(q + d), by);
            sum = _mm512_add_epi32(sum, level);
            if (words) {
                store_words(rows[i] + d, level);
                continue;
            }
            _mm_storeu_si128((__m128i*)(parts[HIGH][i] + d), _mm512_cvtepi32_epi8(high_of(level)));
            _mm_storeu_si128((__m128i*)(parts[LOW][i] + d), _mm512_cvtepi32_epi8(low_of(level)));
        }
        alignas(64) int32_t lanes[LANES];
        _mm512_store_si512(lanes, sum);
        offset[i] = BYTE_OFFSET * std::accumulate(lanes, lanes + LANES, 0);
    }
};

// Per-query scratch space of one block.
struct BlockScratch {
    int from[MAX_INT8_QUERIES], to[MAX_INT8_QUERIES];  // tokens that the query sees; none if from >= to
    float rescale[MAX_INT8_QUERIES];  // of the values so far
    float unit[MAX_INT8_QUERIES];  // scale of the weights
    // tokens with a key or value that is not finite, which makes the results of all queries that see them NaN
    uint64_t non_finite;
    // for words only HIGH, the complete sums
    alignas(64) int32_t scores[NUM_PARTS][MAX_INT8_QUERIES][INT8_BLOCK_TOKENS];
    alignas(64) float weighted[LANES][INT8_BLOCK_TOKENS];  // of the sixteen queries in progress
    union {
        alignas(64) int8_t weights[NUM_PARTS][MAX_INT8_QUERIES][INT8_BLOCK_TOKENS];
        alignas(64) int16_t rows[MAX_INT8_QUERIES][INT8_BLOCK_TOKENS];  // for words
    };
};

// Rescale query i's sums of `vectors` vectors of dimensions from d on and add those of a block; if `low` is null,
// `high` is the complete sum.
inline void fold(const BlockScratch& block, int i, const int32_t* high, const int32_t* low, int vectors, int d,
                 Partial& state) {
    if (block.from[i] >= block.to[i]) return;
    const __m512 rescale = _mm512_set1_ps(block.rescale[i]), unit = _mm512_set1_ps(block.unit[i]);
    for (int c = 0; c < vectors * LANES; c += LANES) {
        float* to = state.values + d + c;
        const __m512i all = _mm512_load_si512(high + c);
        const __m512 sum = low ? whole_sum(all, _mm512_load_si512(low + c), 0) : _mm512_cvtepi32_ps(all);
        _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_load_ps(to), rescale, _mm512_mul_ps(sum, unit)));
    }
}

// Products by vectors. Sums are numbered by a parameter pack, two per query (its parts), and stay in registers (see
// tile()).
template <bool FAST>  // see multiply_add()
struct VectorProducts {
    template <size_t... S>
    __attribute__((noinline)) static void score(std::index_sequence<S...>, const LevelQueries& queries, int i, int dim,
                                                const uint8_t* keys, BlockScratch& block, const uint8_t* next) {
        static_assert(INT8_BLOCK_VECTORS == 4);
        const int8_t* const q[] = {queries.parts[S % NUM_PARTS][i + S / NUM_PARTS]...};
        __m512i sum0[] = {(void(S), _mm512_setzero_si512())...}, sum1[] = {(void(S), _mm512_setzero_si512())...};
        __m512i sum2[] = {(void(S), _mm512_setzero_si512())...}, sum3[] = {(void(S), _mm512_setzero_si512())...};
        for (int d = 0; d < dim; d += 4, keys += INT8_BLOCK_TOKENS * 4) {
            const __m512i key0 = _mm512_load_si512(keys), key1 = _mm512_load_si512(keys + 64);
            const __m512i key2 = _mm512_load_si512(keys + 128), key3 = _mm512_load_si512(keys + 192);
            fetch_lines<INT8_BLOCK_VECTORS>(next);
            __m512i x;
            ((x = broadcast_bytes(q[S] + d), multiply_add<Kind::INT8, FAST>(sum0[S], key0, x),
              multiply_add<Kind::INT8, FAST>(sum1[S], key1, x), multiply_add<Kind::INT8, FAST>(sum2[S], key2, x),
              multiply_add<Kind::INT8, FAST>(sum3[S], key3, x)),
             ...);
        }
        (
            [&] {
                int32_t* to = block.scores[S % NUM_PARTS][i + S / NUM_PARTS];
                _mm512_store_si512(to, sum0[S]), _mm512_store_si512(to + LANES, sum1[S]);
                _mm512_store_si512(to + 2 * LANES, sum2[S]), _mm512_store_si512(to + 3 * LANES, sum3[S]);
            }(),
            ...);
    }

    // Multiply C vectors of values by the weights of several queries, two parts each.
    template <int C, size_t... S>
    __attribute__((noinline)) static void weighted_values(std::index_sequence<S...>, const uint8_t* values, int dim,
                                                   const int8_t* high, const int8_t* low, int32_t (*sums)[4 * LANES],
                                                   const uint8_t* next) {
        const int8_t* const weights[] = {(S % NUM_PARTS == HIGH ? high : low) + S / NUM_PARTS * INT8_BLOCK_TOKENS...};
        __m512i sum0[] = {(void(S), _mm512_setzero_si512())...}, sum1[] = {(void(S), _mm512_setzero_si512())...};
        __m512i sum2[] = {(void(S), _mm512_setzero_si512())...}, sum3[] = {(void(S), _mm512_setzero_si512())...};
        for (int t = 0; t < INT8_BLOCK_TOKENS; t += 4, values += dim * 4) {
            const __m512i value0 = _mm512_load_si512(values);
            const __m512i value1 = C > 1 ? _mm512_load_si512(values + 64) : value0;
            const __m512i value2 = C > 2 ? _mm512_load_si512(values + 128) : value0;
            const __m512i value3 = C > 3 ? _mm512_load_si512(values + 192) : value0;
            fetch_lines<C>(next);
            __m512i w;
            ((w = broadcast_bytes(weights[S] + t), multiply_add<Kind::INT8, FAST>(sum0[S], w, value0),
              C > 1 ? multiply_add<Kind::INT8, FAST>(sum1[S], w, value1) : void(),
              C > 2 ? multiply_add<Kind::INT8, FAST>(sum2[S], w, value2) : void(),
              C > 3 ? multiply_add<Kind::INT8, FAST>(sum3[S], w, value3) : void()),
             ...);
        }
        ((_mm512_store_si512(sums[S], sum0[S]), _mm512_store_si512(sums[S] + LANES, sum1[S]),
          _mm512_store_si512(sums[S] + 2 * LANES, sum2[S]), _mm512_store_si512(sums[S] + 3 * LANES, sum3[S])),
         ...);
    }

    // Fold C vectors of values from dimension d on into the states of several queries.
    template <int C, size_t... S>
    static void accumulate_values(std::index_sequence<S...> all, int i, int dim, int d, const uint8_t* values,
                                  const BlockScratch& block, Partial* states, const uint8_t* next) {
        alignas(64) int32_t sums[sizeof...(S)][4 * LANES];
        weighted_values<C>(all, values + d * 4, dim, block.weights[HIGH][i], block.weights[LOW][i], sums,
                           next ? next + d * INT8_BLOCK_TOKENS : nullptr);
        for (int m = 0; m < int(sizeof...(S)) / NUM_PARTS; m++)
            fold(block, i + m, sums[NUM_PARTS * m + HIGH], sums[NUM_PARTS * m + LOW], C, d, states[i + m]);
    }

    // Fold up to 4 vectors of values from dimension d on.
    template <class Queries, int C = 4>
    static void dispatch_vectors(Queries all, int i, int dim, int d, const uint8_t* values, const BlockScratch& block,
                                 Partial* states, const uint8_t* next) {
        if constexpr (C > 1)
            if (dim - d < C * LANES)
                return dispatch_vectors<Queries, C - 1>(all, i, dim, d, values, block, states, next);
        accumulate_values<C>(all, i, dim, d, values, block, states, next);
    }

    template <class Work, int M = QUERIES_PER_PASS>
    static void dispatch_queries(int count, int i, const Work& work) {
        if constexpr (M > 1)
            if (count - i < M) return dispatch_queries<Work, M - 1>(count, i, work);
        work(std::make_index_sequence<M * NUM_PARTS>());
    }

    void score(const LevelQueries& queries, int dim, const uint8_t* keys, BlockScratch& block, const uint8_t* next) {
        for (int i = 0; i < queries.count; i += QUERIES_PER_PASS, next = nullptr)
            dispatch_queries(queries.count, i, [&](auto m) { score(m, queries, i, dim, keys, block, next); });
    }
    void accumulate_values(int count, int dim, const uint8_t* values, const BlockScratch& block, Partial* states,
                           const uint8_t* next) {
        for (int i = 0; i < count; i += QUERIES_PER_PASS, next = nullptr)
            dispatch_queries(count, i, [&](auto m) {
                for (int d = 0; d < dim; d += 4 * LANES) dispatch_vectors(m, i, dim, d, values, block, states, next);
            });
    }
};

// Products by words (words.h): sums are 32-bit integers below 2^31.
struct WordProducts;

#ifdef MLFLOW_LLM_AVX2

struct WordProducts {
    static constexpr int COLUMNS = 2 * LANES;

    void score(const LevelQueries& queries, int dim, const uint8_t* keys, BlockScratch& block, const uint8_t* next) {
        for (int i = 0; i < queries.count; i += WORD_ROWS, next = nullptr)
            for (int t = 0; t < INT8_BLOCK_TOKENS; t += COLUMNS) {
                const int some = std::min(queries.count - i, WORD_ROWS);
                dispatch_word_sums<false>(some, (const char*)keys + t * 4, INT8_BLOCK_TOKENS * 4, queries.rows[i],
                                          MAX_HEAD_DIM, dim, block.scores[HIGH][i] + t, INT8_BLOCK_TOKENS,
                                          (const char*)next);
                if (next) next += dim * COLUMNS;
            }
    }
    void accumulate_values(int count, int dim, const uint8_t* values, const BlockScratch& block, Partial* states,
                           const uint8_t* next) {
        alignas(64) int32_t sums[WORD_ROWS][COLUMNS];
        for (int i = 0; i < count; i += WORD_ROWS, next = nullptr)
            for (int d = 0; d < dim; d += COLUMNS) {
                const int some = std::min(count - i, WORD_ROWS), columns = std::min(dim - d, COLUMNS);
                dispatch_word_sums<true>(some, (const char*)values + d * 4, dim * 4, block.rows[i], INT8_BLOCK_TOKENS,
                                         INT8_BLOCK_TOKENS, sums[0], COLUMNS, (const char*)next);
                if (next) next += INT8_BLOCK_TOKENS * COLUMNS;
                for (int m = 0; m < some; m++) fold(block, i + m, sums[m], nullptr, columns / LANES, d, states[i + m]);
            }
    }
};

#endif

// Products by tiles, for heads whose width is a multiple of a tile's row. Tiles 0 to 3 are sums, of both parts and two
// column tiles; 4 and 5 queries, or weights; 6 and 7 keys, or values.
template <class Tiles>
struct TileProducts {
    Tiles tiles;

    void score(const LevelQueries& queries, int dim, const uint8_t* keys, BlockScratch& block, const uint8_t* next) {
        constexpr int ROW = INT8_BLOCK_TOKENS * 4;
        fetch(next, dim);
        for (int i = 0; i < queries.count; i += TILE_ROWS)
            for (int t = 0; t < INT8_BLOCK_TOKENS; t += 2 * LANES) {
                clear();
                for (int d = 0; d < dim; d += TILE_BYTES) {
                    load(queries.parts[HIGH][i] + d, queries.parts[LOW][i] + d, MAX_HEAD_DIM);
                    tiles.template load<6>(keys + d * INT8_BLOCK_TOKENS + t * 4, ROW);
                    tiles.template load<7>(keys + d * INT8_BLOCK_TOKENS + (t + LANES) * 4, ROW);
                    tiles.template multiply_signed<0, 4, 6>(), tiles.template multiply_signed<1, 4, 7>();
                    tiles.template multiply_signed<2, 5, 6>(), tiles.template multiply_signed<3, 5, 7>();
                }
                store(block.scores[HIGH][i] + t, block.scores[LOW][i] + t, ROW);
            }
    }

    // All products of INT8_BLOCK_TOKENS dimensions are computed before the first is folded: each has a long latency,
    // and many run in parallel. The weights have been computed, so the space of the scores holds the sums.
    void accumulate_values(int count, int dim, const uint8_t* values, BlockScratch& block, Partial* states,
                           const uint8_t* next) {
        constexpr int ROW = INT8_BLOCK_TOKENS * 4;
        fetch(next, dim);
        for (int c = 0; c < dim; c += INT8_BLOCK_TOKENS) {
            const int some = std::min(dim - c, INT8_BLOCK_TOKENS);
            for (int i = 0; i < count; i += TILE_ROWS) {
                load(block.weights[HIGH][i], block.weights[LOW][i], INT8_BLOCK_TOKENS);
                for (int d = 0; d < some; d += 2 * LANES) {
                    clear();
                    tiles.template load<6>(values + (c + d) * 4, dim * 4);
                    tiles.template load<7>(values + (c + d + LANES) * 4, dim * 4);
                    tiles.template multiply<0, 4, 6>(), tiles.template multiply<1, 4, 7>();
                    tiles.template multiply<2, 5, 6>(), tiles.template multiply<3, 5, 7>();
                    store(block.scores[HIGH][i] + d, block.scores[LOW][i] + d, ROW);
                }
            }
            for (int i = 0; i < count; i++)
                fold(block, i, block.scores[HIGH][i], block.scores[LOW][i], some / LANES, c, states[i]);
        }
    }

  private:
    static void fetch(const uint8_t* block, int dim) {
        if (!block) return;
        for (int at = 0; at < INT8_BLOCK_TOKENS * dim; at += CACHE_LINE_BYTES) __builtin_prefetch(block + at);
    }
    void clear() {
        tiles.template zero<0>(), tiles.template zero<1>();
        tiles.template zero<2>(), tiles.template zero<3>();
    }
    void load(const int8_t* high, const int8_t* low, size_t row) {
        tiles.template load<4>(high, row), tiles.template load<5>(low, row);
    }
    void store(int32_t* high, int32_t* low, size_t row) {
        tiles.template store<0>(high, row), tiles.template store<1>(high + LANES, row);
        tiles.template store<2>(low, row), tiles.template store<3>(low + LANES, row);
    }
};

// Turn a block's scores into softmax weights and, with the scales of the values, into levels, for at most sixteen of
// the queries that see some of the block. Each phase handles all queries before the next starts: the phases of one
// query are a chain of dependent instructions, and those of several queries run in parallel.
template <bool WORDS>
inline void update_softmaxes(const LevelQueries& queries, const float* key_scales, const float* value_scales,
                             const int* seeing, const uint64_t* inside, int count, BlockScratch& block,
                             Partial* states) {
    const auto add = [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); };
    const auto larger = [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); };
    __m512 each[LANES], max_weighted[LANES];
    alignas(64) float previous_max[LANES], sums[LANES], lanes[LANES];
    for (int m = count; m < LANES; m++)
        each[m] = max_weighted[m] = _mm512_setzero_ps(), previous_max[m] = sums[m] = 0.0f;
    const float log = queries.cap != 0.0f ? 1.0f : LOG2E;
    for (int m = 0; m < count; m++) {
        const int i = seeing[m];
        previous_max[m] = states[i].max, sums[m] = states[i].sum;
        const __m512 unit = _mm512_set1_ps(queries.unit[i] * log), none = _mm512_set1_ps(-INFINITY);
        each[m] = none;
#pragma GCC unroll 4
        for (int t = 0; t < INT8_BLOCK_TOKENS; t += LANES) {
            const __m512i high = _mm512_load_si512(block.scores[HIGH][i] + t);
            const __m512i low = WORDS ? high : _mm512_load_si512(block.scores[LOW][i] + t);
            const __m512 whole = WORDS
                                     ? _mm512_cvtepi32_ps(_mm512_sub_epi32(high, _mm512_set1_epi32(queries.offset[i])))
                                     : whole_sum(high, low, queries.offset[i]);
            const __m512 score_by_key = _mm512_mul_ps(whole, _mm512_load_ps(key_scales + t));
            __m512 score = _mm512_mul_ps(score_by_key, unit);
            if (queries.cap != 0.0f)
                score = _mm512_mul_ps(capped(score, queries.cap, 2.0f / queries.cap), _mm512_set1_ps(LOG2E));
            score = _mm512_mask_blend_ps(__mmask16(inside[m] >> t), none, score);
            _mm512_store_ps(block.weighted[m] + t, score);
            each[m] = _mm512_max_ps(each[m], score);
        }
    }
    const __m512 max_before = _mm512_load_ps(previous_max), max = larger(max_before, reduce_some(each, count, larger));
    _mm512_store_ps(lanes, max);
    for (int m = 0; m < count; m++) {
        float* scores = block.weighted[m];
        const __m512 from = _mm512_set1_ps(lanes[m]);
        each[m] = max_weighted[m] = _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int t = 0; t < INT8_BLOCK_TOKENS; t += LANES) {
            const __m512 w = power_of_two(_mm512_sub_ps(_mm512_load_ps(scores + t), from));
            each[m] = _mm512_add_ps(each[m], w);
            // The scale of a token that is not seen may be NaN.
            const __m512 weighted =
                _mm512_mul_ps(w, _mm512_maskz_loadu_ps(__mmask16(inside[m] >> t), value_scales + t));
            _mm512_store_ps(scores + t, weighted);
            max_weighted[m] = _mm512_max_ps(max_weighted[m], weighted);
        }
    }
    // Before the first block `sums` is zero and the rescaling factor is 0.
    const __m512 rescale = power_of_two(_mm512_sub_ps(max_before, max));
    const __m512 total = _mm512_fmadd_ps(_mm512_load_ps(sums), rescale, reduce_some(each, count, add));
    const __m512 max_weight = _mm512_max_ps(reduce_some(max_weighted, count, larger), _mm512_set1_ps(1e-30f));
    const __m512 unit = _mm512_mul_ps(max_weight, _mm512_set1_ps(1.0f / MAX_LEVEL));
    alignas(64) float rescales[LANES], units[LANES], reciprocals[LANES];
    _mm512_store_ps(rescales, rescale), _mm512_store_ps(sums, total), _mm512_store_ps(units, unit);
    _mm512_store_ps(reciprocals, _mm512_div_ps(_mm512_set1_ps(1.0f), unit));
    for (int m = 0; m < count; m++) {
        const int i = seeing[m];
        block.rescale[i] = rescales[m], block.unit[i] = block.non_finite & inside[m] ? NAN : units[m];
        states[i].sum = sums[m], states[i].max = lanes[m];
        const __m512 by = _mm512_set1_ps(reciprocals[m]);
        __m512i highs[INT8_BLOCK_VECTORS], lows[INT8_BLOCK_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < INT8_BLOCK_VECTORS; v++) {
            const __m512i level = to_levels(_mm512_load_ps(block.weighted[m] + v * LANES), by);
            if (WORDS) store_words(block.rows[i] + v * LANES, level);
            else highs[v] = high_of(level), lows[v] = low_of(level);
        }
        if (WORDS) continue;
        store_bytes(highs, block.weights[HIGH][i]), store_bytes(lows, block.weights[LOW][i]);
    }
}

// Not inlined, to be compiled once: the compiler might contract a product and a sum in one copy and not in another.
template <bool WORDS>
__attribute__((noinline)) inline void update_softmax(const LevelQueries& queries, const float* key_scales,
                                                     const float* value_scales, BlockScratch& block, Partial* states) {
    uint64_t inside[MAX_INT8_QUERIES];
    int seeing[MAX_INT8_QUERIES], n = 0;
    for (int i = 0; i < queries.count; i++) {
        const int from = block.from[i], to = block.to[i];
        if (from >= to) continue;
        inside[n] = (to >= INT8_BLOCK_TOKENS ? ~uint64_t(0) : (uint64_t(1) << to) - 1) & ~((uint64_t(1) << from) - 1);
        seeing[n++] = i;
    }
    for (int m = 0; m < n; m += LANES)
        update_softmaxes<WORDS>(queries, key_scales, value_scales, seeing + m, inside + m, std::min(n - m, LANES),
                                block, states);
}

// Return a mask of the tokens of a block whose scales are not finite.
inline uint64_t non_finite_tokens(const float* scales) {
    uint64_t non_finite = 0;
    for (int t = 0; t < INT8_BLOCK_TOKENS; t += LANES) {
        const __m512 size = _mm512_load_ps(scales + t);
        non_finite |= uint64_t(_mm512_cmp_ps_mask(size, _mm512_set1_ps(INFINITY), _CMP_NLT_UQ)) << t;
    }
    return non_finite;
}

// Compute the softmax of each query over its tokens of segment `segment` into `states`. Bytes of tokens that no query
// sees are read, but do not count. `next_call` is the block that the next call will read.
template <class Products>
void attend_int8(Products& products, int dim, const LevelQueries& queries, const CachedHead<const uint8_t>& cached,
                 int segment, NextBlock next_call, Partial* states) {
    BlockScratch block;
    int first = INT32_MAX, last = 0;
    for (int i = 0; i < queries.count; i++) {
        mlflow_llm::clear(states[i], dim);
        first = std::min(first, queries.lo[i]), last = std::max(last, queries.hi[i]);
    }
    first = std::max(first, segment * SEGMENT_TOKENS) / INT8_BLOCK_TOKENS * INT8_BLOCK_TOKENS;
    last = std::min(last, (segment + 1) * SEGMENT_TOKENS);
    for (int at = first; at < last; at += INT8_BLOCK_TOKENS) {
        const Int8Block key(cached.keys(at), dim, 0), value(cached.values(at), dim, 0);
        const int following = at + INT8_BLOCK_TOKENS;
        const NextBlock next = following < last ? NextBlock{cached.keys(following), cached.values(following)} : next_call;
        const uint8_t *key_scales = next.keys, *value_scales = next.values;
        if (next.keys) key_scales += INT8_BLOCK_TOKENS * dim, value_scales += INT8_BLOCK_TOKENS * dim;
        fetch_lines<INT8_BLOCK_VECTORS>(key_scales), fetch_lines<INT8_BLOCK_VECTORS>(value_scales);
        block.non_finite = non_finite_tokens(key.scales) | non_finite_tokens(value.scales);
        products.score(queries, dim, key.bytes, block, next.keys);
        for (int i = 0; i < queries.count; i++)
            block.from[i] = std::max(queries.lo[i] - at, 0),
            block.to[i] = std::min(queries.hi[i] - at, INT8_BLOCK_TOKENS);
        update_softmax<std::is_same_v<Products, WordProducts>>(queries, key.scales, value.scales, block, states);
        products.accumulate_values(queries.count, dim, value.bytes, block, states, next.values);
    }
    for (int i = 0; i < queries.count; i++) states[i].max *= 1.0f / LOG2E;  // merge() uses powers of e
}

inline void attend_int8(int dim, const LevelQueries& queries, const CachedHead<const uint8_t>& cached, int segment,
                        NextBlock next_call, Partial* states) {
    const auto by = [&](auto&& products) { attend_int8(products, dim, queries, cached, segment, next_call, states); };
#ifdef MLFLOW_LLM_AVX2
    if (queries.words) return by(WordProducts());
#endif
    const bool many = queries.count >= MIN_TILE_QUERIES && dim % TILE_BYTES == 0;
    const TileUse use = many ? tile_use().load(std::memory_order_relaxed) : TileUse::NONE;
    if (use == TileUse::HARDWARE) by(TileProducts<HardwareTiles>());
    else if (use == TileUse::EMULATED) by(TileProducts<EmulatedTiles>());
    else if (HAS_OPTIONAL_BYTE_PRODUCTS && use_byte_products()) by(VectorProducts<HAS_OPTIONAL_BYTE_PRODUCTS>());
    else by(VectorProducts<false>());
}

}  // namespace mlflow_llm
