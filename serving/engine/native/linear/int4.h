// 4-bit weights in groups: w[n, k] = scale (q - zero) input[k], with a scale and a zero point per column and group of
// INT4_GROUP k's, and a factor per k that is applied to activations before they are rounded to int8.
//
//   panel    group 0 | group 1 | ...            PANEL output columns, all of K
//   group    4 eights of k's | PANEL scales in float16 | PANEL zero points in bytes
//   eight    16 columns, 16 columns         a column's 32 bits: byte i has k i in its low half, k i + 4 in its high half
//   row      K activations in int8 | K / INT4_GROUP sums of them in float
//
// The products of a group are summed exactly, in integers, and groups in order in float32: a row's result is bitwise
// the same alone and in any batch, as in linear.h.
#pragma once

#include "linear/panel_tiles.h"

namespace mlflow_llm {

// Rows of a tile: 24 sums in 32 registers, or 12 in 16. With AVX2's FAST products a sixth row would be spilled.
template <bool FAST>
constexpr int INT4_TILE_ROWS = FAST ? 5 : 6;

inline uint8_t* int4_group(const Linear& w, int n, int k) {
    return (uint8_t*)w.packed + n / PANEL * w.panel_bytes() + size_t(k / INT4_GROUP) * INT4_GROUP_BYTES;
}

inline uint8_t* int4_element(const Linear& w, int n, int k) {
    return int4_group(w, n, k) + k % INT4_GROUP / 8 * (PANEL * 4) + n % PANEL * 4 + k % 4;
}

// Return the scales (zero points) of sixteen columns from n on, which follow the values of a group.
inline __m512 int4_scales(const uint8_t* group, int n) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(group + INT4_GROUP / 2 * PANEL + n * 2)));
}

inline __m512 int4_zeros(const uint8_t* group, int n) {
    const auto zeros = (const __m128i*)(group + INT4_GROUP / 2 * PANEL + PANEL * 2 + n);
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(zeros)));
}

// Pack `values` [N, K], one per byte; `scale` in float16 and `zero` are [N, K / INT4_GROUP], `input` [K].
inline void pack_int4(Linear& w, const uint8_t* values, const uint16_t* scale, const uint8_t* zero, const float* input,
                      const float* bias) {
    allocate_parts(w, bias);
    set_input(w, input);
    const int groups = w.K / INT4_GROUP;
    parallel_for(w.N, [&](int n) {
        for (int k = 0; k < w.K; k++) *int4_element(w, n, k) |= values[size_t(n) * w.K + k] << (k % 8 < 4 ? 0 : 4);
        for (int g = 0; g < groups; g++) {
            uint8_t* after = int4_group(w, n, g * INT4_GROUP) + INT4_GROUP / 2 * PANEL;
            std::memcpy(after + n % PANEL * 2, scale + size_t(n) * groups + g, 2);
            after[PANEL * 2 + n % PANEL] = zero[size_t(n) * groups + g];
        }
    });
}

inline void unpack_int4(const Linear& w, float* dense) {
    parallel_for(w.N, [&](int n) {
        alignas(64) float scales[LANES], zeros[LANES];
        for (int k = 0; k < w.K; k++) {
            if (k % INT4_GROUP == 0) {
                const uint8_t* group = int4_group(w, n, k);
                _mm512_store_ps(scales, int4_scales(group, n % PANEL / LANES * LANES));
                _mm512_store_ps(zeros, int4_zeros(group, n % PANEL / LANES * LANES));
            }
            const float q = float(*int4_element(w, n, k) >> (k % 8 < 4 ? 0 : 4) & 15);
            dense[size_t(n) * w.K + k] = (q - zeros[n % LANES]) * scales[n % LANES] * w.input[k];
        }
        if (is_rotated(w.kind)) hadamard(dense + size_t(n) * w.K, w.K, hadamard_scale(w.K));
    });
}

// Quantise a row of activations; return its scale, NaN if a value is not finite (see row_scale()).
inline float quantize_row_int4(const Linear& w, const float* x, uint8_t* row) {
    __m512 max = _mm512_setzero_ps();
    __mmask16 non_finite = 0;
    for (int k = 0; k < w.K; k += LANES) {
        const __m512 size = _mm512_abs_ps(_mm512_mul_ps(_mm512_loadu_ps(x + k), _mm512_loadu_ps(w.input + k)));
        non_finite |= _mm512_cmp_ps_mask(size, _mm512_set1_ps(INFINITY), _CMP_NLT_UQ);
        max = _mm512_max_ps(max, size);
    }
    const float scale = non_finite ? NAN : std::max(_mm512_reduce_max_ps(max) * (1.0f / MAX_INT8_LEVEL), 1e-12f);
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

// Store the sums of 16 columns from n on, scaled.
inline void store_int4(const Linear& w, __m512 sum, int n, float x_scale, float* y, bool add) {
    store_value(w, _mm512_mul_ps(sum, _mm512_set1_ps(x_scale)), n, y, add);
}

#ifdef MLFLOW_LLM_AVX512

// Multiply sizeof...(M) rows by one panel; see tile() in linear.h. `row` is the size of a row in bytes.
template <bool FAST, size_t... M>
__attribute__((noinline)) inline void int4_tile(std::index_sequence<M...>, const Linear& w, int panel, const uint8_t* x,
                                                size_t row, const float* x_scale, float* y, bool add, bool) {
    __m512 left[] = {(void(M), _mm512_setzero_ps())...}, right[] = {(void(M), _mm512_setzero_ps())...};
    const __m512i low = _mm512_set1_epi8(15);
    const uint8_t* weights = (const uint8_t*)w.packed + panel * w.panel_bytes();
    for (int k = 0; k < w.K; k += INT4_GROUP, weights += INT4_GROUP_BYTES) {
        __m512i a[] = {(void(M), _mm512_setzero_si512())...}, b[] = {(void(M), _mm512_setzero_si512())...};
        for (int i = 0; i < INT4_GROUP; i += 8) {
            __m512i v0 = _mm512_loadu_si512(weights + i * 16), v1 = _mm512_loadu_si512(weights + i * 16 + 64);
            asm("" : "+v"(v0), "+v"(v1));  // loaded once: gcc would load them for both halves, across cache lines
            const __m512i w0 = _mm512_and_si512(v0, low), w1 = _mm512_and_si512(v1, low);
            const __m512i w2 = _mm512_and_si512(_mm512_srli_epi16(v0, 4), low);
            const __m512i w3 = _mm512_and_si512(_mm512_srli_epi16(v1, 4), low);
            const uint8_t* at = x + k + i;
            __m512i each;
            ((each = broadcast_bytes(at + M * row), multiply_add<Kind::INT8>(a[M], w0, each),
              multiply_add<Kind::INT8>(b[M], w1, each), each = broadcast_bytes(at + M * row + 4),
              multiply_add<Kind::INT8>(a[M], w2, each), multiply_add<Kind::INT8>(b[M], w3, each)),
             ...);
        }
        const __m512 s0 = int4_scales(weights, 0), s1 = int4_scales(weights, LANES);
        const __m512 z0 = int4_zeros(weights, 0), z1 = int4_zeros(weights, LANES);
        const uint8_t* sums = x + w.K + k / INT4_GROUP * sizeof(float);
        __m512 sum;
        ((sum = _mm512_set1_ps(*(const float*)(sums + M * row)),
          left[M] = _mm512_fmadd_ps(s0, _mm512_fnmadd_ps(z0, sum, _mm512_cvtepi32_ps(a[M])), left[M]),
          right[M] = _mm512_fmadd_ps(s1, _mm512_fnmadd_ps(z1, sum, _mm512_cvtepi32_ps(b[M])), right[M])),
         ...);
    }
    const int n = panel * PANEL;
    (store_int4(w, left[M], n, x_scale[M], y + M * w.N, add), ...);
    if (n + LANES < w.N) (store_int4(w, right[M], n + LANES, x_scale[M], y + M * w.N, add), ...);
}

#else

// Add the products of several rows by the lower or the upper halves of two registers of weights.
template <bool FAST, bool UPPER, size_t... M>
MLFLOW_LLM_INLINE void add_nibbles(std::index_sequence<M...>, Ints (&s0)[sizeof...(M)], Ints (&s1)[sizeof...(M)],
                                   const uint8_t* weights, const uint8_t* x, size_t row) {
    const Ints w0 = nibbles<UPPER>(load_part<Ints>(weights)),
               w1 = nibbles<UPPER>(load_part<Ints>(weights + sizeof(Ints)));
    Ints each;
    ((each = broadcast(load_part<int32_t>(x + M * row + UPPER * 4)), add_nibble_products<FAST>(s0[M], w0, each),
      add_nibble_products<FAST>(s1[M], w1, each)),
     ...);
}

// Scale a group's integer sums of two registers of columns from `n` on and add them to `sums`; `row_sum` is for the
// zero points.
template <bool FAST, size_t... M>
MLFLOW_LLM_INLINE void add_group(std::index_sequence<M...>, const Ints (&s0)[sizeof...(M)],
                                 const Ints (&s1)[sizeof...(M)], const uint8_t* group, int n, const uint8_t* row_sum,
                                 size_t row, float* sums, int columns) {
    const uint8_t* after = group + INT4_GROUP / 2 * PANEL;
    const Floats scale0 = half_to_float(load_part<Shorts>(after + n * 2)),
                 scale1 = half_to_float(load_part<Shorts>(after + (n + WIDTH) * 2));
    const Floats zero0 = __builtin_convertvector(widen_bytes(after + PANEL * 2 + n), Floats);
    const Floats zero1 = __builtin_convertvector(widen_bytes(after + PANEL * 2 + n + WIDTH), Floats);
    Floats each, sum;
    ((each = Floats(broadcast(load_part<int32_t>(row_sum + M * row))),
      sum = fmadd(-zero0, each, sums_to_float<FAST>(s0[M])),
      sum = fmadd(scale0, sum, load_part<Floats>(sums + M * columns)),
      std::memcpy(sums + M * columns, &sum, sizeof sum), sum = fmadd(-zero1, each, sums_to_float<FAST>(s1[M])),
      sum = fmadd(scale1, sum, load_part<Floats>(sums + M * columns + WIDTH)),
      std::memcpy(sums + M * columns + WIDTH, &sum, sizeof sum)),
     ...);
}

// Add to `sums` the products of several rows by the columns of two or four registers from `n` on. Sums within a group
// stay in registers; the totals go through memory, once per four eights of k's. `fetches`: prefetch the panel, which is
// not in cache yet.
template <bool FAST, int REGISTERS, size_t... M>
__attribute__((noinline)) void int4_sums(std::index_sequence<M...> rows, const uint8_t* group, int n, const uint8_t* x,
                                         size_t row, int K, float* sums, bool fetches) {
    constexpr int COLUMNS = REGISTERS * WIDTH, PAIR = 2 * sizeof(Ints);
    const uint8_t* const end = x + K;
    for (const uint8_t* row_sum = end; x < end; group += INT4_GROUP_BYTES, row_sum += sizeof(float)) {
        Ints s0[] = {(void(M), Ints{})...}, s1[] = {(void(M), Ints{})...};
        Ints s2[] = {(void(M), Ints{})...}, s3[] = {(void(M), Ints{})...};
        const uint8_t* weights = group + n * 4;
#pragma GCC unroll 1  // unrolled together with the code behind the loop, some sums would be spilled
        for (const uint8_t* const next = x + INT4_GROUP; x < next; x += 8, weights += PANEL * 4) {
            if (fetches)
                __builtin_prefetch(weights + PREFETCH_BYTES), __builtin_prefetch(weights + PREFETCH_BYTES + 64);
            add_nibbles<FAST, false>(rows, s0, s1, weights, x, row),
                add_nibbles<FAST, true>(rows, s0, s1, weights, x, row);
            if constexpr (REGISTERS == 4) {
                add_nibbles<FAST, false>(rows, s2, s3, weights + PAIR, x, row);
                add_nibbles<FAST, true>(rows, s2, s3, weights + PAIR, x, row);
            }
        }
        asm("" : "+r"(sums));  // gcc would keep a second copy of the pointer, on the stack
        add_group<FAST>(rows, s0, s1, group, n, row_sum, row, sums, COLUMNS);
        if constexpr (REGISTERS == 4)
            add_group<FAST>(rows, s2, s3, group, n + 2 * WIDTH, row_sum, row, sums + 2 * WIDTH, COLUMNS);
    }
}

// Return how many registers of columns are processed at a time, so that the sums of `rows` rows fit.
constexpr int int4_registers(int rows) { return HAS_16_REGISTERS && rows > 2 ? 2 : 4; }

template <bool FAST, size_t... M>
inline void int4_tile(std::index_sequence<M...> rows, const Linear& w, int panel, const uint8_t* x, size_t row,
                      const float* x_scale, float* y, bool add, bool fetches) {
    constexpr int REGISTERS = int4_registers(sizeof...(M)), COLUMNS = REGISTERS * WIDTH;
    const uint8_t* group = (const uint8_t*)w.packed + panel * w.panel_bytes();
    for (int from = 0; from < PANEL && panel * PANEL + from < w.N; from += COLUMNS) {
        alignas(64) float sums[sizeof...(M)][COLUMNS] = {};
        int4_sums<FAST, REGISTERS>(rows, group, from, x, row, w.K, sums[0], fetches && from == 0);
        for (int n = 0; n < COLUMNS && panel * PANEL + from + n < w.N; n += LANES)
            (store_int4(w, _mm512_load_ps(sums[M] + n), panel * PANEL + from + n, x_scale[M], y + M * w.N, add), ...);
    }
}

#endif

// FAST is as in multiply_add().
template <bool FAST, int M = INT4_TILE_ROWS<FAST>>
inline void dispatch_int4_tile(int rows, const Linear& w, int panel, const uint8_t* x, size_t row, const float* x_scale,
                               float* y, bool add, bool fetches) {
    if constexpr (M > 1)
        if (rows < M) return dispatch_int4_tile<FAST, M - 1>(rows, w, panel, x, row, x_scale, y, add, fetches);
    int4_tile<FAST>(std::make_index_sequence<M>(), w, panel, x, row, x_scale, y, add, fetches);
}

template <bool FAST>
inline void multiply_int4(const Linear& w, Rows x, int T, float* y, Epilogue epilogue, int first, int last) {
    const size_t row = w.row_bytes();
    for_each_tile<INT4_TILE_ROWS<FAST>>(T, row, first, last, [&](int panel, int a, int count, bool begins) {
        const uint8_t* rows = (const uint8_t*)x.values + a * row;
        float* out = y + size_t(a) * w.N;
        dispatch_int4_tile<FAST>(count, w, panel, rows, row, x.scale + a, out, epilogue == Epilogue::ADD, begins);
        if (epilogue == Epilogue::GELU) gelu_tile(out, count, panel, w.N);
    });
}

inline void multiply_int4(const Linear& w, Rows x, int T, float* y, Epilogue epilogue, int first, int last) {
    if constexpr (HAS_WORDS)  // otherwise both are the same
        if (use_byte_products()) return multiply_int4<true>(w, x, T, y, epilogue, first, last);
    multiply_int4<false>(w, x, T, y, epilogue, first, last);
}

}  // namespace mlflow_llm
