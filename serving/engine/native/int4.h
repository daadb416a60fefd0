// Weights of four bits in groups: w[n, k] = scale (q - zero) input[k], with a scale and a zero point for each column and
// INT4_GROUP k's, and one factor for each k that is applied to activations before they are rounded to int8.
//
//   panel    group 0 | group 1 | ...            PANEL output columns, all of K
//   group    4 eights of k's | PANEL scales in float16 | PANEL zero points in bytes
//   eight    16 columns, 16 columns             a column's 32 bits: byte i has k i in its low half, k i + 4 in its high half
//   row      K activations in int8 | K / INT4_GROUP sums of them in float
//
// The products of a group are summed exactly, in integers, groups in their order in float32: a row's result is bitwise
// the same alone and in any batch, as in linear.h.
#pragma once

#include <stdexcept>

#include "linear.h"

namespace mlt {

#ifdef MLT_AVX512

constexpr int INT4_TILE = 6;  // rows at a time: 24 accumulators, 4 weights, an activation and a mask of 32 registers

inline uint8_t* int4_group(const Linear& w, int n, int k) {
    return (uint8_t*)w.packed + n / PANEL * w.panel_bytes() + size_t(k / INT4_GROUP) * INT4_GROUP_BYTES;
}

inline uint8_t* int4_place(const Linear& w, int n, int k) {
    return int4_group(w, n, k) + k % INT4_GROUP / 8 * (PANEL * 4) + n % PANEL * 4 + k % 4;
}

inline float from_half(uint16_t half) { return _mm512_cvtss_f32(_mm512_cvtph_ps(_mm256_set1_epi16(int16_t(half)))); }

// Of `values` [N, K], each in a byte; `scale` in float16 and `zero` [N, K / INT4_GROUP]; `input` [K].
inline void pack_int4(Linear& w, const uint8_t* values, const uint16_t* scale, const uint8_t* zero, const float* input,
                      const float* bias) {
    make_room(w, bias);
    w.input = (float*)allocate(sizeof(float) * w.K);
    std::memcpy(w.input, input, sizeof(float) * w.K);
    const int groups = w.K / INT4_GROUP;
    parallel_for(w.N, [&](int n) {
        for (int k = 0; k < w.K; k++) *int4_place(w, n, k) |= values[size_t(n) * w.K + k] << (k % 8 < 4 ? 0 : 4);
        for (int g = 0; g < groups; g++) {
            uint8_t* after = int4_group(w, n, g * INT4_GROUP) + INT4_GROUP / 2 * PANEL;
            std::memcpy(after + n % PANEL * 2, scale + size_t(n) * groups + g, 2);
            after[PANEL * 2 + n % PANEL] = zero[size_t(n) * groups + g];
        }
    });
}

inline void unpack_int4(const Linear& w, float* dense) {
    parallel_for(w.N, [&](int n) {
        for (int k = 0; k < w.K; k++) {
            const uint8_t* after = int4_group(w, n, k) + INT4_GROUP / 2 * PANEL;
            uint16_t scale;
            std::memcpy(&scale, after + n % PANEL * 2, 2);
            const int q = *int4_place(w, n, k) >> (k % 8 < 4 ? 0 : 4) & 15;
            dense[size_t(n) * w.K + k] = float(q - after[PANEL * 2 + n % PANEL]) * from_half(scale) * w.input[k];
        }
    });
}

// One row of activations; returns its scale, NaN where a value is not finite (linear.h).
inline float quantize_row_int4(const Linear& w, const float* x, uint8_t* row) {
    __m512 most = _mm512_setzero_ps();
    __mmask16 strange = 0;
    for (int k = 0; k < w.K; k += LANES) {
        const __m512 size = _mm512_abs_ps(_mm512_mul_ps(_mm512_loadu_ps(x + k), _mm512_loadu_ps(w.input + k)));
        strange |= _mm512_cmp_ps_mask(size, _mm512_set1_ps(INFINITY), _CMP_NLT_UQ);
        most = _mm512_max_ps(most, size);
    }
    const float scale = strange ? NAN : std::max(_mm512_reduce_max_ps(most) * (1.0f / LEVELS), 1e-12f);
    const __m512 by = _mm512_set1_ps(1.0f / scale);
    float* sums = (float*)(row + w.K);
    for (int k = 0; k < w.K; k += INT4_GROUP) {
        __m512i sum = _mm512_setzero_si512();
        for (int i = k; i < k + INT4_GROUP; i += LANES) {
            const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_loadu_ps(w.input + i));
            const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(scaled, by));
            _mm_storeu_si128((__m128i*)(row + i), _mm512_cvtepi32_epi8(whole));
            sum = _mm512_add_epi32(sum, whole);
        }
        sums[k / INT4_GROUP] = float(_mm512_reduce_add_epi32(sum));
    }
    return scale;
}

// The sum of 16 columns from n on, as it goes to y.
inline void put_int4(const Linear& w, __m512 sum, int n, float x_scale, float* y, bool add) {
    const __mmask16 mask = w.N - n >= LANES ? 0xffff : (1u << (w.N - n)) - 1;
    __m512 value = _mm512_mul_ps(sum, _mm512_set1_ps(x_scale));
    if (w.bias) value = _mm512_add_ps(value, _mm512_load_ps(w.bias + n));
    if (add) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, y + n));
    _mm512_mask_storeu_ps(y + n, mask, value);
}

// As many rows as there are indexes, by one panel; see tile() of linear.h. `row` is the bytes of one.
template <size_t... M>
__attribute__((noinline)) inline void int4_tile(std::index_sequence<M...>, const Linear& w, int panel, const uint8_t* x,
                                                size_t row, const float* x_scale, float* y, bool add) {
    __m512 left[] = {(void(M), _mm512_setzero_ps())...}, right[] = {(void(M), _mm512_setzero_ps())...};
    const __m512i low = _mm512_set1_epi8(15);
    const uint8_t* weights = (const uint8_t*)w.packed + panel * w.panel_bytes();
    for (int k = 0; k < w.K; k += INT4_GROUP, weights += INT4_GROUP_BYTES) {
        __m512i a[] = {(void(M), _mm512_setzero_si512())...}, b[] = {(void(M), _mm512_setzero_si512())...};
        for (int i = 0; i < INT4_GROUP; i += 8) {
            __m512i v0 = _mm512_loadu_si512(weights + i * 16), v1 = _mm512_loadu_si512(weights + i * 16 + 64);
            asm("" : "+v"(v0), "+v"(v1));  // loaded once: gcc would read them for both halves, across cache lines
            const __m512i w0 = _mm512_and_si512(v0, low), w1 = _mm512_and_si512(v1, low);
            const __m512i w2 = _mm512_and_si512(_mm512_srli_epi16(v0, 4), low);
            const __m512i w3 = _mm512_and_si512(_mm512_srli_epi16(v1, 4), low);
            const uint8_t* at = x + k + i;
            __m512i each;
            ((each = four_bytes(at + M * row), multiply_add<Kind::INT8>(a[M], w0, each), multiply_add<Kind::INT8>(b[M], w1, each),
              each = four_bytes(at + M * row + 4), multiply_add<Kind::INT8>(a[M], w2, each),
              multiply_add<Kind::INT8>(b[M], w3, each)),
             ...);
        }
        const uint8_t* after = weights + INT4_GROUP / 2 * PANEL;
        const __m512 s0 = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)after));
        const __m512 s1 = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(after + 32)));
        const __m512 z0 = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(after + 64))));
        const __m512 z1 = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(after + 80))));
        const uint8_t* sums = x + w.K + k / INT4_GROUP * sizeof(float);
        __m512 sum;
        ((sum = _mm512_set1_ps(*(const float*)(sums + M * row)),
          left[M] = _mm512_fmadd_ps(s0, _mm512_fnmadd_ps(z0, sum, _mm512_cvtepi32_ps(a[M])), left[M]),
          right[M] = _mm512_fmadd_ps(s1, _mm512_fnmadd_ps(z1, sum, _mm512_cvtepi32_ps(b[M])), right[M])),
         ...);
    }
    const int n = panel * PANEL;
    (put_int4(w, left[M], n, x_scale[M], y + M * w.N, add), ...);
    if (n + LANES < w.N) (put_int4(w, right[M], n + LANES, x_scale[M], y + M * w.N, add), ...);
}

template <int M = INT4_TILE>
inline void int4_tile_of(int rows, const Linear& w, int panel, const uint8_t* x, size_t row, const float* x_scale, float* y,
                         bool add) {
    if constexpr (M > 1)
        if (rows < M) return int4_tile_of<M - 1>(rows, w, panel, x, row, x_scale, y, add);
    int4_tile(std::make_index_sequence<M>(), w, panel, x, row, x_scale, y, add);
}

inline void multiply_int4(const Linear& w, Rows x, int T, float* y, Finish finish, int first, int last) {
    const size_t row = w.row_bytes();
    const int near = std::max(INT4_TILE, int(NEAR / row) / INT4_TILE * INT4_TILE);
    for (int from = 0; from < T; from += near)  // these rows stay in the second cache while panels pass
        for (int panel = first; panel < last; panel++)
            for (int t = from; t < std::min(from + near, T); t += INT4_TILE) {
                const int count = std::min({INT4_TILE, T - t, from + near - t});
                float* out = y + size_t(t) * w.N;
                const uint8_t* rows = (const uint8_t*)x.values + t * row;
                int4_tile_of(count, w, panel, rows, row, x.scale + t, out, finish == Finish::ADD);
                if (finish == Finish::GELU) gelu_tile(out, count, panel, w.N);
            }
}

#else  // such weights are floats there: stored_weights.py

inline void pack_int4(Linear&, const uint8_t*, const uint16_t*, const uint8_t*, const float*, const float*) {
    throw std::runtime_error("weights of four bits need AVX-512 VNNI");
}
inline void unpack_int4(const Linear&, float*) {}
inline float quantize_row_int4(const Linear&, const float*, uint8_t*) { return 0; }
inline void multiply_int4(const Linear&, Rows, int, float*, Finish, int, int) {}

#endif

}  // namespace mlt
