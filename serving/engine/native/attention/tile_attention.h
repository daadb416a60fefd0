// Attention of query heads over the keys and values of one KV head in bfloat16, by tiles (tiles.h).
//
//   keys     [S, D]                              a tile: 16 tokens, 32 dimensions
//   values   blocks of 32 tokens, [D, 32] each   a tile: 16 dimensions, the block's tokens
//
// Queries are columns, sixteen per tile: scores [tokens, queries] = keys x queries, out [D, queries] = values x
// weights, so that keys and values are read from the slot as they are stored, and softmaxes of sixteen queries are
// computed at once.
//
// As in attention.h, a query processes its keys in blocks of TILE_BLOCK_TOKENS at fixed positions, the blocks of a
// segment are folded into one running softmax, and segments are merged in order; columns are independent. So a token's
// result is bitwise the same in any batch, in any chunks and on any number of threads. Queries and weights are rounded
// to bfloat16, sums are float32.
#pragma once

#include "attention/attention.h"
#include "isa/tiles.h"

namespace mlflow_llm {

constexpr int TILE_BLOCK_TOKENS = 64;  // tokens whose weights are computed together
constexpr int VALUE_BLOCK_TOKENS = 32;  // tokens of a block of values
constexpr int MAX_TILE_QUERIES = 32;  // queries that share a read of keys and values
constexpr int COLUMN_TILES = MAX_TILE_QUERIES / LANES;

static_assert(SEGMENT_TOKENS % TILE_BLOCK_TOKENS == 0 && SHARED_BLOCK_TOKENS % TILE_BLOCK_TOKENS == 0 &&
              TILE_BLOCK_TOKENS % VALUE_BLOCK_TOKENS == 0 && VALUE_BLOCK_TOKENS == TILE_BYTES / 2);

inline bool can_attend_tiled(int dim) { return can_attend(dim) && dim % 32 == 0; }

// Running softmaxes of sixteen queries, in powers of two. `values` is [dim][queries].
struct alignas(64) TiledPartial {
    float max[LANES], sum[LANES], values[MAX_HEAD_DIM][LANES];
};

inline void clear(TiledPartial& p, int dim) {
    std::fill_n(p.max, LANES, -INFINITY), std::fill_n(p.sum, LANES, 0.0f);
    std::memset(p.values, 0, size_t(dim) * sizeof p.values[0]);
}

// Return the value to subtract from scores with maximum `max`: 0 if no token has been seen.
inline __m512 base_of(__m512 max) {
    const __mmask16 none = _mm512_cmp_ps_mask(max, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ);
    return _mm512_mask_mov_ps(max, none, _mm512_setzero_ps());
}

inline void merge(TiledPartial& into, const TiledPartial& next, int dim) {
    const __m512 mine = _mm512_load_ps(into.max), theirs = _mm512_load_ps(next.max);
    const __m512 max = _mm512_max_ps(mine, theirs), base = base_of(max);
    const __m512 a = power_of_two(_mm512_sub_ps(mine, base)), b = power_of_two(_mm512_sub_ps(theirs, base));
    const auto both = [&](float* to, const float* from) {
        _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_load_ps(to), a, _mm512_mul_ps(_mm512_load_ps(from), b)));
    };
    both(into.sum, next.sum);
    for (int d = 0; d < dim; d++) both(into.values[d], next.values[d]);
    _mm512_store_ps(into.max, max);
}

// Copy one query's column of `from` to column `to` of `into`.
inline void copy_column(const TiledPartial& from, int column, int dim, TiledPartial& into, int to) {
    into.max[to] = from.max[column], into.sum[to] = from.sum[column];
    for (int d = 0; d < dim; d++) into.values[d][to] = from.values[d][column];
}

// Write the results of the first `count` queries to out[query] [dim].
inline void finish(const TiledPartial& p, int dim, int count, float* const* out) {
    alignas(64) float scaled[LANES][LANES], rows[LANES][LANES];
    const __m512 by = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(p.sum));
    for (int d = 0; d < dim; d += LANES) {
        for (int i = 0; i < LANES; i++) _mm512_store_ps(scaled[i], _mm512_mul_ps(_mm512_load_ps(p.values[d + i]), by));
        transpose(scaled[0], LANES, rows[0], LANES);
        for (int c = 0; c < count; c++) _mm512_storeu_ps(out[c] + d, _mm512_load_ps(rows[c]));
    }
}

// Store the key and value of token `at`, [dim] each, in a KV head of a slot.
inline void store_bf16(const float* key, const float* value, int dim, int at, uint16_t* keys, uint16_t* values) {
    uint16_t rounded[MAX_HEAD_DIM];
    to_bf16(key, dim, keys + size_t(at) * dim);
    to_bf16(value, dim, rounded);
    uint16_t* block = values + size_t(at / VALUE_BLOCK_TOKENS) * VALUE_BLOCK_TOKENS * dim + at % VALUE_BLOCK_TOKENS;
    for (int d = 0; d < dim; d++) block[d * VALUE_BLOCK_TOKENS] = rounded[d];
}

// Queries as columns of tiles: pairs of dimensions [D / 2][column][2]. Their scores are exponents of two.
struct TiledQueries {
    int count, lo[MAX_TILE_QUERIES], hi[MAX_TILE_QUERIES];  // tokens seen, [lo, hi)
    float cap;  // cap of these scores, see attention.h; 0: none
    alignas(64) uint16_t pairs[COLUMN_TILES][MAX_HEAD_DIM / 2][2 * LANES];

    int tiles() const { return (count + LANES - 1) / LANES; }

    // Set column `column` to q [dim], which includes the scaling; pack() follows once for all columns.
    void set(int column, const float* q, int dim, int from, int to) {
        alignas(64) float scaled[MAX_HEAD_DIM];
        for (int d = 0; d < dim; d += LANES)
            _mm512_store_ps(scaled + d, _mm512_mul_ps(_mm512_loadu_ps(q + d), _mm512_set1_ps(LOG2E)));
        to_bf16(scaled, dim, rounded[column]);
        lo[column] = from, hi[column] = to;
    }

    void pack(int number, int dim, float score_cap) {
        count = number, cap = score_cap * LOG2E;
        for (int c = count; c < tiles() * LANES; c++) lo[c] = hi[c] = 0, std::memset(rounded[c], 0, dim * 2);
        for (int tile = 0; tile < tiles(); tile++)
            for (int d = 0; d < dim / 2; d += LANES)
                transpose((const float*)rounded[tile * LANES] + d, MAX_HEAD_DIM / 2, (float*)pairs[tile][d], LANES);
    }

  private:
    alignas(64) uint16_t rounded[MAX_TILE_QUERIES][MAX_HEAD_DIM];
};

// Turn the scores [TILE_BLOCK_TOKENS][queries] of one tile's queries into softmax weights, as pairs of tokens
// [TILE_BLOCK_TOKENS / 2][query][2] in bfloat16; return the rescaling factors. `edge`: some query does not see all
// tokens of the block.
inline __m512 update_softmax(float (*scores)[LANES], int first, bool edge, const int* lo, const int* hi,
                             TiledPartial& state, uint16_t (*weights)[2 * LANES]) {
    const __m512 before = _mm512_load_ps(state.max);
    __m512 max = before;
    if (edge) {
        const __m512i from = _mm512_loadu_si512(lo), to = _mm512_loadu_si512(hi);
        for (int t = 0; t < TILE_BLOCK_TOKENS; t++) {
            const __m512i at = _mm512_set1_epi32(first + t);
            const __mmask16 seen = _mm512_cmple_epi32_mask(from, at) & _mm512_cmplt_epi32_mask(at, to);
            const __m512 score = _mm512_mask_blend_ps(seen, _mm512_set1_ps(-INFINITY), _mm512_load_ps(scores[t]));
            _mm512_store_ps(scores[t], score);
            max = _mm512_max_ps(max, score);
        }
    } else {
        for (int t = 0; t < TILE_BLOCK_TOKENS; t++) max = _mm512_max_ps(max, _mm512_load_ps(scores[t]));
    }
    const __m512 base = base_of(max);
    __m512 total[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int t = 0; t < TILE_BLOCK_TOKENS; t += 2) {
        __m512i pair[2];
        for (int i = 0; i < 2; i++) {
            const __m512 w = power_of_two(_mm512_sub_ps(_mm512_load_ps(scores[t + i]), base));
            total[i] = _mm512_add_ps(total[i], w);
            pair[i] = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(w));
        }
        _mm512_store_si512(weights[t / 2], _mm512_or_si512(pair[0], _mm512_slli_epi32(pair[1], 16)));
    }
    const __m512 rescale = power_of_two(_mm512_sub_ps(before, base));
    _mm512_store_ps(state.sum, _mm512_fmadd_ps(_mm512_load_ps(state.sum), rescale, _mm512_add_ps(total[0], total[1])));
    _mm512_store_ps(state.max, max);
    return rescale;
}

// Compute the softmaxes of `queries` over their tokens of segment `segment`, one state per tile. Tokens that no query
// sees are read, but do not count.
template <class Tiles>
void attend_tiled(Tiles& tiles, int dim, const TiledQueries& queries, const CachedHead<const uint16_t>& cached,
                  int segment, TiledPartial* states) {
    alignas(64) float scores[COLUMN_TILES][TILE_BLOCK_TOKENS][LANES];
    alignas(64) uint16_t weights[COLUMN_TILES][TILE_BLOCK_TOKENS / 2][2 * LANES];
    alignas(64) float out[COLUMN_TILES][LANES][LANES];
    alignas(64) uint16_t seen_values[MAX_HEAD_DIM * TILE_BLOCK_TOKENS];
    const int wide = queries.tiles();
    int first = INT32_MAX, last = 0, all_from = 0, all_to = INT32_MAX;
    for (int i = 0; i < queries.count; i++) {
        first = std::min(first, queries.lo[i]), last = std::max(last, queries.hi[i]);
        all_from = std::max(all_from, queries.lo[i]), all_to = std::min(all_to, queries.hi[i]);
    }
    for (int c = 0; c < wide; c++) clear(states[c], dim);
    const int end = std::min(last, (segment + 1) * SEGMENT_TOKENS);
    for (int block = std::max(first, segment * SEGMENT_TOKENS) / TILE_BLOCK_TOKENS * TILE_BLOCK_TOKENS; block < end;
         block += TILE_BLOCK_TOKENS) {
        const uint16_t *keys = cached.keys(block), *block_values = cached.values(block);
        const int here = std::min(last - block, TILE_BLOCK_TOKENS);  // tokens of the block that some query sees
        for (int t = 0; t < TILE_BLOCK_TOKENS; t += TILE_ROWS) {
            if (t >= here) {  // never written, perhaps not even allocated
                for (int c = 0; c < wide; c++) std::memset(scores[c][t], 0, TILE_ROWS * sizeof scores[c][t]);
                continue;
            }
            tiles.template zero<0>();
            if (wide > 1) tiles.template zero<1>();
            for (int d = 0; d < dim; d += 32) {
                tiles.template load<4>(keys + size_t(t) * dim + d, dim * 2);
                tiles.template load<5>(queries.pairs[0][d / 2], TILE_BYTES);
                tiles.template multiply_bf16<0, 4, 5>();
                if (wide > 1) {
                    tiles.template load<6>(queries.pairs[1][d / 2], TILE_BYTES);
                    tiles.template multiply_bf16<1, 4, 6>();
                }
            }
            tiles.template store<0>(scores[0][t], TILE_BYTES);
            if (wide > 1) tiles.template store<1>(scores[1][t], TILE_BYTES);
        }
        if (queries.cap != 0.0f)
            for (int c = 0; c < wide; c++) cap_each(scores[c][0], TILE_BLOCK_TOKENS * LANES, queries.cap);
        const bool edge = block < all_from || block + TILE_BLOCK_TOKENS > all_to;
        __m512 rescales[COLUMN_TILES];
        for (int c = 0; c < wide; c++)
            rescales[c] = update_softmax(scores[c], block, edge, queries.lo + c * LANES, queries.hi + c * LANES,
                                         states[c], weights[c]);
        if (here < TILE_BLOCK_TOKENS) {  // zero times a NaN would be NaN
            for (int part = 0; part < TILE_BLOCK_TOKENS / VALUE_BLOCK_TOKENS; part++) {
                const int count = std::min(std::max(here - part * VALUE_BLOCK_TOKENS, 0), VALUE_BLOCK_TOKENS);
                const __mmask32 seen = count == VALUE_BLOCK_TOKENS ? ~0u : (1u << count) - 1;
                for (int d = 0; d < dim; d++) {
                    const size_t at = (size_t(part) * dim + d) * VALUE_BLOCK_TOKENS;
                    _mm512_store_si512(seen_values + at, _mm512_maskz_loadu_epi16(seen, block_values + at));
                }
            }
            block_values = seen_values;
        }
        for (int d = 0; d < dim; d += TILE_ROWS) {
            tiles.template zero<0>();
            if (wide > 1) tiles.template zero<1>();
            for (int part = 0; part < TILE_BLOCK_TOKENS / VALUE_BLOCK_TOKENS; part++) {
                tiles.template load<4>(block_values + (size_t(part) * dim + d) * VALUE_BLOCK_TOKENS, TILE_BYTES);
                tiles.template load<5>(weights[0][part * VALUE_BLOCK_TOKENS / 2], TILE_BYTES);
                tiles.template multiply_bf16<0, 4, 5>();
                if (wide > 1) {
                    tiles.template load<6>(weights[1][part * VALUE_BLOCK_TOKENS / 2], TILE_BYTES);
                    tiles.template multiply_bf16<1, 4, 6>();
                }
            }
            tiles.template store<0>(out[0], TILE_BYTES);
            if (wide > 1) tiles.template store<1>(out[1], TILE_BYTES);
            for (int c = 0; c < wide; c++)
                for (int i = 0; i < TILE_ROWS; i++) {
                    float* to = states[c].values[d + i];
                    _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_load_ps(to), rescales[c], _mm512_load_ps(out[c][i])));
                }
        }
    }
}

inline void attend_tiled(int dim, const TiledQueries& queries, const CachedHead<const uint16_t>& cached, int segment,
                         TiledPartial* states) {
    if (tile_use() == TileUse::EMULATED) {
        static thread_local EmulatedTiles tiles;
        return attend_tiled(tiles, dim, queries, cached, segment, states);
    }
    HardwareTiles tiles;
    attend_tiled(tiles, dim, queries, cached, segment, states);
}

}  // namespace mlflow_llm
