// Attention of query heads over the keys and values of one KV head that are kept in bfloat16, by tiles (tiles.h).
//
//   keys     [S, D]                     a tile: 16 tokens, 32 dimensions
//   values   blocks of 32 tokens, [D, 32] each      a tile: 16 dimensions, the block's tokens
//
// Queries stand in columns, sixteen to a tile: scores [tokens, queries] = keys x queries, out [D, queries] = values x
// weights, so that both are read from the slot as they lie there, and a softmax is sixteen queries' at a time.
//
// As in attention.h, a query meets its keys in blocks of TILED_BLOCK tokens at fixed places, the blocks of a SEGMENT fold
// into one running softmax, and segments are merged in order; a column depends on no other. So a token's result is
// bitwise the same in any batch, in any chunks, on any number of threads. Queries and weights are rounded to bfloat16,
// sums are float32.
#pragma once

#include "attention.h"
#include "tiles.h"

namespace mlt {

constexpr int TILED_BLOCK = 64;   // tokens whose weights are taken together
constexpr int VALUE_BLOCK = 32;   // tokens of values that stand together
constexpr int TILED_COLUMNS = 32; // queries that share what is read of keys and values
constexpr int COLUMN_TILES = TILED_COLUMNS / LANES;

static_assert(SEGMENT % TILED_BLOCK == 0 && SHARED_BLOCK % TILED_BLOCK == 0 && TILED_BLOCK % VALUE_BLOCK == 0 && VALUE_BLOCK == TILE_BYTES / 2);

inline bool can_attend_tiled(int dim) { return can_attend(dim) && dim % 32 == 0; }

// Softmaxes of sixteen queries under way, in powers of two. `values` [dim][queries].
struct alignas(64) TiledPartial {
    float most[LANES], sum[LANES], values[MAX_HEAD][LANES];
};

inline void clear(TiledPartial& p, int dim) {
    std::fill_n(p.most, LANES, -INFINITY), std::fill_n(p.sum, LANES, 0.0f);
    std::memset(p.values, 0, size_t(dim) * sizeof p.values[0]);
}

// What is subtracted from scores whose largest is `most`: nothing where no token has been seen.
inline __m512 base_of(__m512 most) {
    const __mmask16 none = _mm512_cmp_ps_mask(most, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ);
    return _mm512_mask_mov_ps(most, none, _mm512_setzero_ps());
}

inline void merge(TiledPartial& into, const TiledPartial& next, int dim) {
    const __m512 mine = _mm512_load_ps(into.most), theirs = _mm512_load_ps(next.most);
    const __m512 most = _mm512_max_ps(mine, theirs), base = base_of(most);
    const __m512 a = power_of_two(_mm512_sub_ps(mine, base)), b = power_of_two(_mm512_sub_ps(theirs, base));
    const auto both = [&](float* to, const float* from) {
        _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_load_ps(to), a, _mm512_mul_ps(_mm512_load_ps(from), b)));
    };
    both(into.sum, next.sum);
    for (int d = 0; d < dim; d++) both(into.values[d], next.values[d]);
    _mm512_store_ps(into.most, most);
}

// One query's of `from` becomes column `to` of `into`.
inline void take_column(const TiledPartial& from, int column, int dim, TiledPartial& into, int to) {
    into.most[to] = from.most[column], into.sum[to] = from.sum[column];
    for (int d = 0; d < dim; d++) into.values[d][to] = from.values[d][column];
}

// The results of the first `count` queries, to out[query] [dim].
inline void finish(const TiledPartial& p, int dim, int count, float* const* out) {
    alignas(64) float scaled[LANES][LANES], rows[LANES][LANES];
    const __m512 by = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(p.sum));
    for (int d = 0; d < dim; d += LANES) {
        for (int i = 0; i < LANES; i++) _mm512_store_ps(scaled[i], _mm512_mul_ps(_mm512_load_ps(p.values[d + i]), by));
        transpose(scaled[0], LANES, rows[0], LANES);
        for (int c = 0; c < count; c++) _mm512_storeu_ps(out[c] + d, _mm512_load_ps(rows[c]));
    }
}

// The key and value of token `at`, [dim] each, to their places in a KV head's of a slot.
inline void keep_bf16(const float* key, const float* value, int dim, int at, uint16_t* keys, uint16_t* values) {
    uint16_t rounded[MAX_HEAD];
    to_bf16(key, dim, keys + size_t(at) * dim);
    to_bf16(value, dim, rounded);
    uint16_t* block = values + size_t(at / VALUE_BLOCK) * VALUE_BLOCK * dim + at % VALUE_BLOCK;
    for (int d = 0; d < dim; d++) block[d * VALUE_BLOCK] = rounded[d];
}

// Queries as the columns of tiles: pairs of dimensions [D / 2][column][2]. Their scores are in powers of two.
struct TiledQueries {
    int count, lo[TILED_COLUMNS], hi[TILED_COLUMNS];  // tokens seen, [lo, hi)
    float cap;  // of scores as they are here, see attention.h; 0: none
    alignas(64) uint16_t pairs[COLUMN_TILES][MAX_HEAD / 2][2 * LANES];

    int tiles() const { return (count + LANES - 1) / LANES; }

    // Column `column` is q [dim], which carries the scaling; then pack() once for all.
    void set(int column, const float* q, int dim, int from, int to) {
        alignas(64) float scaled[MAX_HEAD];
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
                transpose((const float*)rounded[tile * LANES] + d, MAX_HEAD / 2, (float*)pairs[tile][d], LANES);
    }

  private:
    alignas(64) uint16_t rounded[TILED_COLUMNS][MAX_HEAD];
};

// Scores [TILED_BLOCK][queries] of one tile's queries become weights, as pairs of tokens [TILED_BLOCK / 2][query][2] in
// bfloat16; returns what the values so far fade by. `edge`: some query does not see all of the block's tokens.
inline __m512 weigh(float (*scores)[LANES], int first, bool edge, const int* lo, const int* hi, TiledPartial& state,
                    uint16_t (*weights)[2 * LANES]) {
    const __m512 before = _mm512_load_ps(state.most);
    __m512 most = before;
    if (edge) {
        const __m512i from = _mm512_loadu_si512(lo), to = _mm512_loadu_si512(hi);
        for (int t = 0; t < TILED_BLOCK; t++) {
            const __m512i at = _mm512_set1_epi32(first + t);
            const __mmask16 seen = _mm512_cmple_epi32_mask(from, at) & _mm512_cmplt_epi32_mask(at, to);
            const __m512 score = _mm512_mask_blend_ps(seen, _mm512_set1_ps(-INFINITY), _mm512_load_ps(scores[t]));
            _mm512_store_ps(scores[t], score);
            most = _mm512_max_ps(most, score);
        }
    } else {
        for (int t = 0; t < TILED_BLOCK; t++) most = _mm512_max_ps(most, _mm512_load_ps(scores[t]));
    }
    const __m512 base = base_of(most);
    __m512 total[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int t = 0; t < TILED_BLOCK; t += 2) {
        __m512i pair[2];
        for (int i = 0; i < 2; i++) {
            const __m512 w = power_of_two(_mm512_sub_ps(_mm512_load_ps(scores[t + i]), base));
            total[i] = _mm512_add_ps(total[i], w);
            pair[i] = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(w));
        }
        _mm512_store_si512(weights[t / 2], _mm512_or_si512(pair[0], _mm512_slli_epi32(pair[1], 16)));
    }
    const __m512 fade = power_of_two(_mm512_sub_ps(before, base));
    _mm512_store_ps(state.sum, _mm512_fmadd_ps(_mm512_load_ps(state.sum), fade, _mm512_add_ps(total[0], total[1])));
    _mm512_store_ps(state.most, most);
    return fade;
}

// The softmaxes of `queries` over what they see of segment `segment`, into one state a tile of them. What no query sees
// is read, and counts for nothing.
template <class Tiles>
void attend_tiled(Tiles& tiles, int dim, const TiledQueries& queries, const KeptHead<const uint16_t>& kept, int segment,
                  TiledPartial* states) {
    alignas(64) float scores[COLUMN_TILES][TILED_BLOCK][LANES];
    alignas(64) uint16_t weights[COLUMN_TILES][TILED_BLOCK / 2][2 * LANES];
    alignas(64) float out[COLUMN_TILES][LANES][LANES];
    alignas(64) uint16_t seen_values[MAX_HEAD * TILED_BLOCK];
    const int wide = queries.tiles();
    int first = INT32_MAX, last = 0, all_from = 0, all_to = INT32_MAX;
    for (int i = 0; i < queries.count; i++) {
        first = std::min(first, queries.lo[i]), last = std::max(last, queries.hi[i]);
        all_from = std::max(all_from, queries.lo[i]), all_to = std::min(all_to, queries.hi[i]);
    }
    for (int c = 0; c < wide; c++) clear(states[c], dim);
    const int end = std::min(last, (segment + 1) * SEGMENT);
    for (int block = std::max(first, segment * SEGMENT) / TILED_BLOCK * TILED_BLOCK; block < end; block += TILED_BLOCK) {
        const uint16_t *keys = kept.keys(block), *block_values = kept.values(block);
        const int here = std::min(last - block, TILED_BLOCK);  // tokens of the block that some query sees
        for (int t = 0; t < TILED_BLOCK; t += TILE_ROWS) {
            if (t >= here) {  // never written, perhaps not even there
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
            for (int c = 0; c < wide; c++) cap_each(scores[c][0], TILED_BLOCK * LANES, queries.cap);
        const bool edge = block < all_from || block + TILED_BLOCK > all_to;
        __m512 fades[COLUMN_TILES];
        for (int c = 0; c < wide; c++)
            fades[c] = weigh(scores[c], block, edge, queries.lo + c * LANES, queries.hi + c * LANES, states[c],
                             weights[c]);
        if (here < TILED_BLOCK) {  // a weight of zero times what is no number would be none
            for (int part = 0; part < TILED_BLOCK / VALUE_BLOCK; part++) {
                const int count = std::min(std::max(here - part * VALUE_BLOCK, 0), VALUE_BLOCK);
                const __mmask32 seen = count == VALUE_BLOCK ? ~0u : (1u << count) - 1;
                for (int d = 0; d < dim; d++) {
                    const size_t at = (size_t(part) * dim + d) * VALUE_BLOCK;
                    _mm512_store_si512(seen_values + at, _mm512_maskz_loadu_epi16(seen, block_values + at));
                }
            }
            block_values = seen_values;
        }
        for (int d = 0; d < dim; d += TILE_ROWS) {
            tiles.template zero<0>();
            if (wide > 1) tiles.template zero<1>();
            for (int part = 0; part < TILED_BLOCK / VALUE_BLOCK; part++) {
                tiles.template load<4>(block_values + (size_t(part) * dim + d) * VALUE_BLOCK, TILE_BYTES);
                tiles.template load<5>(weights[0][part * VALUE_BLOCK / 2], TILE_BYTES);
                tiles.template multiply_bf16<0, 4, 5>();
                if (wide > 1) {
                    tiles.template load<6>(weights[1][part * VALUE_BLOCK / 2], TILE_BYTES);
                    tiles.template multiply_bf16<1, 4, 6>();
                }
            }
            tiles.template store<0>(out[0], TILE_BYTES);
            if (wide > 1) tiles.template store<1>(out[1], TILE_BYTES);
            for (int c = 0; c < wide; c++)
                for (int i = 0; i < TILE_ROWS; i++) {
                    float* to = states[c].values[d + i];
                    _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_load_ps(to), fades[c], _mm512_load_ps(out[c][i])));
                }
        }
    }
}

inline void attend_tiled(int dim, const TiledQueries& queries, const KeptHead<const uint16_t>& kept, int segment,
                         TiledPartial* states) {
    if (tile_use() == TileUse::EMULATED) {
        static thread_local EmulatedTiles tiles;
        return attend_tiled(tiles, dim, queries, kept, segment, states);
    }
    HardwareTiles tiles;
    attend_tiled(tiles, dim, queries, kept, segment, states);
}

}  // namespace mlt
