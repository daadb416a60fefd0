// Attention of query heads over the keys and values of one KV head that are kept in int8, with a scale of each token's.
//
//   a block    KEPT_BLOCK tokens: their bytes, then a float of each
//   keys       [D / 4][KEPT_BLOCK][4]   four dimensions of a token; offset by BYTE_OFFSET
//   values     [KEPT_BLOCK / 4][D][4]   four tokens of a dimension; signed
//
// What they meet is made whole too: a query, and a query's weights of a block, are FINEST levels, in two bytes of seven
// bits: n = 128 high + low. A sum of products is then a whole number below 2^31, the same in any order and by any
// instruction: vectors serve few queries and tiles many, and no bit tells which it was. What this adds to the rounding of
// keys and values is a hundredth of it.
//
// As in attention.h the blocks of a SEGMENT fold into one running softmax, and segments are merged in order.
#pragma once

#include <numeric>

#include "attention.h"
#include "linear.h"
#include "tiles.h"
#include "words.h"

namespace mlt {

constexpr int KEPT_BLOCK = 64;
constexpr int KEPT_VECTORS = KEPT_BLOCK / LANES;
constexpr int FINEST = 127 * 128;
constexpr int BYTE_QUERIES = 32;  // that share what is read of keys and values
constexpr int TILED_FROM = 9;     // queries from which tiles pay
constexpr size_t CACHE_LINE = 64;
enum Part { HIGH, LOW, BOTH };

static_assert(SEGMENT % KEPT_BLOCK == 0 && SHARED_BLOCK % KEPT_BLOCK == 0 && KEPT_BLOCK == TILE_BYTES && BYTE_QUERIES % TILE_ROWS == 0);

// From one token's to the next in a KV head's keys, or values.
constexpr size_t kept_bytes(int dim) { return dim + sizeof(float); }

struct KeptBlock {
    uint8_t* bytes;
    float* scales;  // [KEPT_BLOCK]

    KeptBlock(const uint8_t* head, int dim, int token)
        : bytes(const_cast<uint8_t*>(head) + size_t(token / KEPT_BLOCK) * KEPT_BLOCK * kept_bytes(dim)),
          scales((float*)(bytes + KEPT_BLOCK * dim)) {}
};

// The key and value of token `at`, [dim] each, to their places in a KV head's of a slot.
inline void keep_int8(const float* key, const float* value, int dim, int at, uint8_t* keys, uint8_t* values) {
    uint8_t bytes[MAX_HEAD];
    const int t = at % KEPT_BLOCK;
    const KeptBlock to_keys(keys, dim, at), to_values(values, dim, at);
    to_keys.scales[t] = quantize_row(key, dim, bytes);
    for (int d = 0; d < dim; d += 4) std::memcpy(to_keys.bytes + d * KEPT_BLOCK + t * 4, bytes + d, 4);
    to_values.scales[t] = quantize_row(value, dim, bytes);
    uint8_t* to = to_values.bytes + t / 4 * dim * 4 + t % 4;
    for (int d = 0; d < dim; d++) to[d * 4] = bytes[d] ^ BYTE_OFFSET;  // an offset of 128 is this bit
}

// The lowest bytes of four vectors side by side, in one store: what reads them at once would wait for four.
inline void store_bytes(const __m512i (&x)[4], int8_t* to) {
#ifdef MLT_AVX512
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes = _mm512_packs_epi16(_mm512_packs_epi32(x[0], x[1]), _mm512_packs_epi32(x[2], x[3]));
    _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, bytes));
#else
    for (int i = 0; i < 4; i++) _mm_storeu_si128((__m128i*)(to + i * LANES), _mm512_cvtepi32_epi8(x[i]));
#endif
}

// Sixteen values times `by` as whole numbers, FINEST at most.
inline __m512i levels_of(__m512 x, __m512 by) { return _mm512_cvtps_epi32(_mm512_mul_ps(x, by)); }
inline __m512i high_of(__m512i level) { return _mm512_srai_epi32(level, 7); }
inline __m512i low_of(__m512i level) { return _mm512_and_si512(level, _mm512_set1_epi32(127)); }

// 128 high + low, less `offset`, as a float.
inline __m512 whole_sum(__m512i high, __m512i low, int32_t offset) {
    const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high, 7), low);
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, _mm512_set1_epi32(offset)));
}

// The block whose turn comes after, or null. It is not where the processor would look for it: keys and values take turns,
// and a page ends with nearly every block.
struct NextBlock {
    const uint8_t *keys = nullptr, *values = nullptr;
};

// Into the second cache, as many cache lines from `next` on, which moves past them. A few between products: the processor
// waits where many are asked for at once.
template <int LINES>
inline void fetch_lines(const uint8_t*& next) {
    if (!next) return;
    for (int i = 0; i < LINES; i++) __builtin_prefetch(next + i * CACHE_LINE, 0, 2);
    next += LINES * CACHE_LINE;
}

// Queries that see tokens [lo, hi) of one KV head each.
struct ByteQueries {
    int count, lo[BYTE_QUERIES], hi[BYTE_QUERIES];
    float cap;   // as in attention.h
    bool words;  // each is a row of words.h rather than two of bytes
    float unit[BYTE_QUERIES];
    int32_t offset[BYTE_QUERIES];  // what the offset of the keys' bytes gives
    union {
        alignas(64) int8_t parts[BOTH][BYTE_QUERIES][MAX_HEAD];
        alignas(64) int16_t rows[BYTE_QUERIES][MAX_HEAD];
    };

    // Query i is q [dim], which carries the scaling.
    void set(int i, const float* q, int dim, int from, int to) {
        lo[i] = from, hi[i] = to;
        unit[i] = row_scale(q, dim) * (float(LEVELS) / FINEST);  // NaN where a value is
        const __m512 by = _mm512_set1_ps(1.0f / unit[i]);
        __m512i sum = _mm512_setzero_si512();
        for (int d = 0; d < dim; d += LANES) {
            const __m512i level = levels_of(_mm512_loadu_ps(q + d), by);
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

// What becomes of one block, by query.
struct ByteBlock {
    int from[BYTE_QUERIES], to[BYTE_QUERIES];  // tokens that it sees; from >= to: none
    float fade[BYTE_QUERIES];                       // of the values so far
    float unit[BYTE_QUERIES];                       // of the weights
    uint64_t strange;  // tokens that have a key or value that is no number: then neither is what sees them
    alignas(64) int32_t scores[BOTH][BYTE_QUERIES][KEPT_BLOCK];  // of words HIGH alone, as they are
    alignas(64) float weighed[LANES][KEPT_BLOCK];  // of sixteen that are in work
    union {
        alignas(64) int8_t weights[BOTH][BYTE_QUERIES][KEPT_BLOCK];
        alignas(64) int16_t rows[BYTE_QUERIES][KEPT_BLOCK];  // the same, of words
    };
};

// Query i's sums so far of `vectors` vectors of dimensions from d on, with those of a block; `low` null: `high` is all of it.
inline void fold(const ByteBlock& block, int i, const int32_t* high, const int32_t* low, int vectors, int d,
                 Partial& state) {
    if (block.from[i] >= block.to[i]) return;
    const __m512 fade = _mm512_set1_ps(block.fade[i]), unit = _mm512_set1_ps(block.unit[i]);
    for (int c = 0; c < vectors * LANES; c += LANES) {
        float* to = state.values + d + c;
        const __m512i all = _mm512_load_si512(high + c);
        const __m512 sum = low ? whole_sum(all, _mm512_load_si512(low + c), 0) : _mm512_cvtepi32_ps(all);
        _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_load_ps(to), fade, _mm512_mul_ps(sum, unit)));
    }
}

// Products by vectors. Sums are numbered by a pack, two of a query (its parts), and stay in registers (see tile()).
template <bool FAST>  // see multiply_add
struct VectorBytes {
    template <size_t... S>
    __attribute__((noinline)) static void score(std::index_sequence<S...>, const ByteQueries& queries, int i, int dim,
                                                const uint8_t* keys, ByteBlock& block, const uint8_t* next) {
        static_assert(KEPT_VECTORS == 4);
        const int8_t* const q[] = {queries.parts[S % BOTH][i + S / BOTH]...};
        __m512i sum0[] = {(void(S), _mm512_setzero_si512())...}, sum1[] = {(void(S), _mm512_setzero_si512())...};
        __m512i sum2[] = {(void(S), _mm512_setzero_si512())...}, sum3[] = {(void(S), _mm512_setzero_si512())...};
        for (int d = 0; d < dim; d += 4, keys += KEPT_BLOCK * 4) {
            const __m512i key0 = _mm512_load_si512(keys), key1 = _mm512_load_si512(keys + 64);
            const __m512i key2 = _mm512_load_si512(keys + 128), key3 = _mm512_load_si512(keys + 192);
            fetch_lines<KEPT_VECTORS>(next);
            __m512i x;
            ((x = four_bytes(q[S] + d), multiply_add<Kind::INT8, FAST>(sum0[S], key0, x),
              multiply_add<Kind::INT8, FAST>(sum1[S], key1, x), multiply_add<Kind::INT8, FAST>(sum2[S], key2, x),
              multiply_add<Kind::INT8, FAST>(sum3[S], key3, x)),
             ...);
        }
        (
            [&] {
                int32_t* to = block.scores[S % BOTH][i + S / BOTH];
                _mm512_store_si512(to, sum0[S]), _mm512_store_si512(to + LANES, sum1[S]);
                _mm512_store_si512(to + 2 * LANES, sum2[S]), _mm512_store_si512(to + 3 * LANES, sum3[S]);
            }(),
            ...);
    }

    // The values of C vectors of dimensions, by weights of two parts a query.
    template <int C, size_t... S>
    __attribute__((noinline)) static void weighed(std::index_sequence<S...>, const uint8_t* values, int dim,
                                                  const int8_t* high, const int8_t* low, int32_t (*sums)[4 * LANES],
                                                  const uint8_t* next) {
        const int8_t* const weights[] = {(S % BOTH == HIGH ? high : low) + S / BOTH * KEPT_BLOCK...};
        __m512i sum0[] = {(void(S), _mm512_setzero_si512())...}, sum1[] = {(void(S), _mm512_setzero_si512())...};
        __m512i sum2[] = {(void(S), _mm512_setzero_si512())...}, sum3[] = {(void(S), _mm512_setzero_si512())...};
        for (int t = 0; t < KEPT_BLOCK; t += 4, values += dim * 4) {
            const __m512i value0 = _mm512_load_si512(values);
            const __m512i value1 = C > 1 ? _mm512_load_si512(values + 64) : value0;
            const __m512i value2 = C > 2 ? _mm512_load_si512(values + 128) : value0;
            const __m512i value3 = C > 3 ? _mm512_load_si512(values + 192) : value0;
            fetch_lines<C>(next);
            __m512i w;
            ((w = four_bytes(weights[S] + t), multiply_add<Kind::INT8, FAST>(sum0[S], w, value0),
              C > 1 ? multiply_add<Kind::INT8, FAST>(sum1[S], w, value1) : void(),
              C > 2 ? multiply_add<Kind::INT8, FAST>(sum2[S], w, value2) : void(),
              C > 3 ? multiply_add<Kind::INT8, FAST>(sum3[S], w, value3) : void()),
             ...);
        }
        ((_mm512_store_si512(sums[S], sum0[S]), _mm512_store_si512(sums[S] + LANES, sum1[S]),
          _mm512_store_si512(sums[S] + 2 * LANES, sum2[S]), _mm512_store_si512(sums[S] + 3 * LANES, sum3[S])),
         ...);
    }

    // The values of C vectors of dimensions from d on.
    template <int C, size_t... S>
    static void mix(std::index_sequence<S...> all, int i, int dim, int d, const uint8_t* values, const ByteBlock& block,
                    Partial* states, const uint8_t* next) {
        alignas(64) int32_t sums[sizeof...(S)][4 * LANES];
        weighed<C>(all, values + d * 4, dim, block.weights[HIGH][i], block.weights[LOW][i], sums,
                   next ? next + d * KEPT_BLOCK : nullptr);
        for (int m = 0; m < int(sizeof...(S)) / BOTH; m++)
            fold(block, i + m, sums[BOTH * m + HIGH], sums[BOTH * m + LOW], C, d, states[i + m]);
    }

    // Up to 4 vectors of values from dimension d on.
    template <class Queries, int C = 4>
    static void mix_wide(Queries together, int i, int dim, int d, const uint8_t* values, const ByteBlock& block,
                         Partial* states, const uint8_t* next) {
        if constexpr (C > 1)
            if (dim - d < C * LANES) return mix_wide<Queries, C - 1>(together, i, dim, d, values, block, states, next);
        mix<C>(together, i, dim, d, values, block, states, next);
    }

    template <class Work, int M = TOGETHER>
    static void together(int count, int i, const Work& work) {
        if constexpr (M > 1)
            if (count - i < M) return together<Work, M - 1>(count, i, work);
        work(std::make_index_sequence<M * BOTH>());
    }

    void score(const ByteQueries& queries, int dim, const uint8_t* keys, ByteBlock& block, const uint8_t* next) {
        for (int i = 0; i < queries.count; i += TOGETHER, next = nullptr)
            together(queries.count, i, [&](auto m) { score(m, queries, i, dim, keys, block, next); });
    }
    void mix(int count, int dim, const uint8_t* values, const ByteBlock& block, Partial* states, const uint8_t* next) {
        for (int i = 0; i < count; i += TOGETHER, next = nullptr)
            together(count, i, [&](auto m) {
                for (int d = 0; d < dim; d += 4 * LANES) mix_wide(m, i, dim, d, values, block, states, next);
            });
    }
};

// Products by words (words.h): a sum is one of 32 bits, below 2^31.
struct WordBytes;

#ifdef MLT_AVX2

struct WordBytes {
    static constexpr int COLUMNS = 2 * LANES;

    void score(const ByteQueries& queries, int dim, const uint8_t* keys, ByteBlock& block, const uint8_t* next) {
        for (int i = 0; i < queries.count; i += WORD_ROWS, next = nullptr)
            for (int t = 0; t < KEPT_BLOCK; t += COLUMNS) {
                const int some = std::min(queries.count - i, WORD_ROWS);
                word_sums_of<false>(some, (const char*)keys + t * 4, KEPT_BLOCK * 4, queries.rows[i], MAX_HEAD, dim,
                                    block.scores[HIGH][i] + t, KEPT_BLOCK, (const char*)next);
                if (next) next += dim * COLUMNS;
            }
    }
    void mix(int count, int dim, const uint8_t* values, const ByteBlock& block, Partial* states, const uint8_t* next) {
        alignas(64) int32_t sums[WORD_ROWS][COLUMNS];
        for (int i = 0; i < count; i += WORD_ROWS, next = nullptr)
            for (int d = 0; d < dim; d += COLUMNS) {
                const int some = std::min(count - i, WORD_ROWS), columns = std::min(dim - d, COLUMNS);
                word_sums_of<true>(some, (const char*)values + d * 4, dim * 4, block.rows[i], KEPT_BLOCK, KEPT_BLOCK, sums[0],
                                   COLUMNS, (const char*)next);
                if (next) next += KEPT_BLOCK * COLUMNS;
                for (int m = 0; m < some; m++) fold(block, i + m, sums[m], nullptr, columns / LANES, d, states[i + m]);
            }
    }
};

#endif

// Products by tiles: of heads whose width is a multiple of a tile's row. 0 to 3 are sums, of both parts and two columns
// of tiles; 4 and 5 queries, or weights; 6 and 7 keys, or values.
template <class Tiles>
struct TiledBytes {
    Tiles tiles;

    void score(const ByteQueries& queries, int dim, const uint8_t* keys, ByteBlock& block, const uint8_t* next) {
        constexpr int ROW = KEPT_BLOCK * 4;
        fetch(next, dim);
        for (int i = 0; i < queries.count; i += TILE_ROWS)
            for (int t = 0; t < KEPT_BLOCK; t += 2 * LANES) {
                clear();
                for (int d = 0; d < dim; d += TILE_BYTES) {
                    load(queries.parts[HIGH][i] + d, queries.parts[LOW][i] + d, MAX_HEAD);
                    tiles.template load<6>(keys + d * KEPT_BLOCK + t * 4, ROW);
                    tiles.template load<7>(keys + d * KEPT_BLOCK + (t + LANES) * 4, ROW);
                    tiles.template multiply_signed<0, 4, 6>(), tiles.template multiply_signed<1, 4, 7>();
                    tiles.template multiply_signed<2, 5, 6>(), tiles.template multiply_signed<3, 5, 7>();
                }
                store(block.scores[HIGH][i] + t, block.scores[LOW][i] + t, ROW);
            }
    }

    // All products of KEPT_BLOCK dimensions before the first of them is folded: one takes long, and many go side by side.
    // The scores have become weights: their place takes the sums.
    void mix(int count, int dim, const uint8_t* values, ByteBlock& block, Partial* states, const uint8_t* next) {
        constexpr int ROW = KEPT_BLOCK * 4;
        fetch(next, dim);
        for (int c = 0; c < dim; c += KEPT_BLOCK) {
            const int some = std::min(dim - c, KEPT_BLOCK);
            for (int i = 0; i < count; i += TILE_ROWS) {
                load(block.weights[HIGH][i], block.weights[LOW][i], KEPT_BLOCK);
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
        for (int at = 0; at < KEPT_BLOCK * dim; at += CACHE_LINE) __builtin_prefetch(block + at);
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

// The scores of a block become weights in the queries' softmaxes, and those with the scales of values whole numbers; the
// sixteen queries from `first` on among those that see some of it. Each thing is done for all of them before the next:
// what one takes is a chain of instructions that wait for each other, and those of several run side by side.
template <bool WORDS>
inline void weigh_some(const ByteQueries& queries, const float* key_scales, const float* value_scales, const int* seeing,
                       const uint64_t* inside, int count, ByteBlock& block, Partial* states) {
    const auto add = [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); };
    const auto larger = [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); };
    __m512 each[LANES], each_weighed[LANES];
    alignas(64) float before[LANES], sums[LANES], lanes[LANES];
    for (int m = count; m < LANES; m++) each[m] = each_weighed[m] = _mm512_setzero_ps(), before[m] = sums[m] = 0.0f;
    const float log = queries.cap != 0.0f ? 1.0f : LOG2E;
    for (int m = 0; m < count; m++) {
        const int i = seeing[m];
        before[m] = states[i].most, sums[m] = states[i].sum;
        const __m512 unit = _mm512_set1_ps(queries.unit[i] * log), none = _mm512_set1_ps(-INFINITY);
        each[m] = none;
#pragma GCC unroll 4
        for (int t = 0; t < KEPT_BLOCK; t += LANES) {
            const __m512i high = _mm512_load_si512(block.scores[HIGH][i] + t);
            const __m512i low = WORDS ? high : _mm512_load_si512(block.scores[LOW][i] + t);
            const __m512 whole = WORDS ? _mm512_cvtepi32_ps(_mm512_sub_epi32(high, _mm512_set1_epi32(queries.offset[i])))
                                       : whole_sum(high, low, queries.offset[i]);
            const __m512 score_by_key = _mm512_mul_ps(whole, _mm512_load_ps(key_scales + t));
            __m512 score = _mm512_mul_ps(score_by_key, unit);
            if (queries.cap != 0.0f)
                score = _mm512_mul_ps(capped(score, queries.cap, 2.0f / queries.cap), _mm512_set1_ps(LOG2E));
            score = _mm512_mask_blend_ps(__mmask16(inside[m] >> t), none, score);
            _mm512_store_ps(block.weighed[m] + t, score);
            each[m] = _mm512_max_ps(each[m], score);
        }
    }
    const __m512 most_before = _mm512_load_ps(before), most = larger(most_before, join_some(each, count, larger));
    _mm512_store_ps(lanes, most);
    for (int m = 0; m < count; m++) {
        float* scores = block.weighed[m];
        const __m512 from = _mm512_set1_ps(lanes[m]);
        each[m] = each_weighed[m] = _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int t = 0; t < KEPT_BLOCK; t += LANES) {
            const __m512 w = power_of_two(_mm512_sub_ps(_mm512_load_ps(scores + t), from));
            each[m] = _mm512_add_ps(each[m], w);
            // the scale of a token that is not seen may be no number
            const __m512 weighed = _mm512_mul_ps(w, _mm512_maskz_loadu_ps(__mmask16(inside[m] >> t), value_scales + t));
            _mm512_store_ps(scores + t, weighed);
            each_weighed[m] = _mm512_max_ps(each_weighed[m], weighed);
        }
    }
    // nothing was weighed before the first block: that fades to nothing
    const __m512 fade = power_of_two(_mm512_sub_ps(most_before, most));
    const __m512 total = _mm512_fmadd_ps(_mm512_load_ps(sums), fade, join_some(each, count, add));
    const __m512 heavy = _mm512_max_ps(join_some(each_weighed, count, larger), _mm512_set1_ps(1e-30f));
    const __m512 unit = _mm512_mul_ps(heavy, _mm512_set1_ps(1.0f / FINEST));
    alignas(64) float fades[LANES], units[LANES], reciprocals[LANES];
    _mm512_store_ps(fades, fade), _mm512_store_ps(sums, total), _mm512_store_ps(units, unit);
    _mm512_store_ps(reciprocals, _mm512_div_ps(_mm512_set1_ps(1.0f), unit));
    for (int m = 0; m < count; m++) {
        const int i = seeing[m];
        block.fade[i] = fades[m], block.unit[i] = block.strange & inside[m] ? NAN : units[m];
        states[i].sum = sums[m], states[i].most = lanes[m];
        const __m512 by = _mm512_set1_ps(reciprocals[m]);
        __m512i highs[KEPT_VECTORS], lows[KEPT_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < KEPT_VECTORS; v++) {
            const __m512i level = levels_of(_mm512_load_ps(block.weighed[m] + v * LANES), by);
            if (WORDS) store_words(block.rows[i] + v * LANES, level);
            else highs[v] = high_of(level), lows[v] = low_of(level);
        }
        if (WORDS) continue;
        store_bytes(highs, block.weights[HIGH][i]), store_bytes(lows, block.weights[LOW][i]);
    }
}

// Compiled once: where a product meets a sum the compiler may join them in one place and not in another.
template <bool WORDS>
__attribute__((noinline)) inline void weigh(const ByteQueries& queries, const float* key_scales,
                                            const float* value_scales, ByteBlock& block, Partial* states) {
    uint64_t inside[BYTE_QUERIES];
    int seeing[BYTE_QUERIES], n = 0;
    for (int i = 0; i < queries.count; i++) {
        const int from = block.from[i], to = block.to[i];
        if (from >= to) continue;
        inside[n] = (to >= KEPT_BLOCK ? ~uint64_t(0) : (uint64_t(1) << to) - 1) & ~((uint64_t(1) << from) - 1);
        seeing[n++] = i;
    }
    for (int m = 0; m < n; m += LANES)
        weigh_some<WORDS>(queries, key_scales, value_scales, seeing + m, inside + m, std::min(n - m, LANES), block, states);
}

// Tokens of a block whose scales are no numbers.
inline uint64_t strange_of(const float* scales) {
    uint64_t strange = 0;
    for (int t = 0; t < KEPT_BLOCK; t += LANES) {
        const __m512 size = _mm512_load_ps(scales + t);
        strange |= uint64_t(_mm512_cmp_ps_mask(size, _mm512_set1_ps(INFINITY), _CMP_NLT_UQ)) << t;
    }
    return strange;
}

// The softmax of each query over what it sees of segment `segment`, into `states`. Bytes of what none sees are read, and
// count for nothing. `after` is the block that is read after this call's.
template <class Products>
void attend_int8(Products& products, int dim, const ByteQueries& queries, const KeptHead<const uint8_t>& kept, int segment,
                 NextBlock after, Partial* states) {
    ByteBlock block;
    int first = INT32_MAX, last = 0;
    for (int i = 0; i < queries.count; i++) {
        mlt::clear(states[i], dim);
        first = std::min(first, queries.lo[i]), last = std::max(last, queries.hi[i]);
    }
    first = std::max(first, segment * SEGMENT) / KEPT_BLOCK * KEPT_BLOCK;
    last = std::min(last, (segment + 1) * SEGMENT);
    for (int at = first; at < last; at += KEPT_BLOCK) {
        const KeptBlock key(kept.keys(at), dim, 0), value(kept.values(at), dim, 0);
        const int then = at + KEPT_BLOCK;
        const NextBlock next = then < last ? NextBlock{kept.keys(then), kept.values(then)} : after;
        const uint8_t *key_scales = next.keys, *value_scales = next.values;
        if (next.keys) key_scales += KEPT_BLOCK * dim, value_scales += KEPT_BLOCK * dim;
        fetch_lines<KEPT_VECTORS>(key_scales), fetch_lines<KEPT_VECTORS>(value_scales);
        block.strange = strange_of(key.scales) | strange_of(value.scales);
        products.score(queries, dim, key.bytes, block, next.keys);
        for (int i = 0; i < queries.count; i++)
            block.from[i] = std::max(queries.lo[i] - at, 0), block.to[i] = std::min(queries.hi[i] - at, KEPT_BLOCK);
        weigh<std::is_same_v<Products, WordBytes>>(queries, key.scales, value.scales, block, states);
        products.mix(queries.count, dim, value.bytes, block, states, next.values);
    }
    for (int i = 0; i < queries.count; i++) states[i].most *= 1.0f / LOG2E;  // merge() has powers of e
}

inline void attend_int8(int dim, const ByteQueries& queries, const KeptHead<const uint8_t>& kept, int segment,
                        NextBlock after, Partial* states) {
    const auto by = [&](auto&& products) { attend_int8(products, dim, queries, kept, segment, after, states); };
#ifdef MLT_AVX2
    if (queries.words) return by(WordBytes());
#endif
    const bool many = queries.count >= TILED_FROM && dim % TILE_BYTES == 0;
    const TileUse use = many ? tile_use().load(std::memory_order_relaxed) : TileUse::NONE;
    if (use == TileUse::HARDWARE) by(TiledBytes<HardwareTiles>());
    else if (use == TileUse::EMULATED) by(TiledBytes<EmulatedTiles>());
    else if (CHOOSES_BYTE_PRODUCTS && byte_products()) by(VectorBytes<CHOOSES_BYTE_PRODUCTS>());
    else by(VectorBytes<false>());
}

}  // namespace mlt
