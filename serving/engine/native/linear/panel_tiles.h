// Products of rows and panels: by vectors, and by tiles where the CPU has them. dispatch.h chooses.
#pragma once

#include "linear/layout.h"

namespace mlflow_llm {

// Return the same four bytes in every lane.
inline __m512i broadcast_bytes(const void* from) {
    int32_t bytes;
    std::memcpy(&bytes, from, 4);
    return _mm512_set1_epi32(bytes);
}

template <Kind KIND>
using Sum = std::conditional_t<is_int8(KIND), __m512i, __m512>;

template <Kind KIND>
inline Sum<KIND> zero() {
    if constexpr (is_int8(KIND)) return _mm512_setzero_si512();
    else return _mm512_setzero_ps();
}

// Multiply and add a vector. FAST: use the byte dot-product instruction that some CPUs of this library lack. Inlined by
// force: in a unit of this size gcc would otherwise call it for every product, with its sums in memory.
template <Kind KIND, bool FAST = false>
__attribute__((always_inline)) inline void multiply_add(Sum<KIND>& sum, __m512i x, __m512i w) {
#ifdef MLFLOW_LLM_AVX512
    // The instruction adds in place; as an intrinsic, gcc 12 copies the register before and after it.
    if constexpr (is_int8(KIND)) asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
    else if constexpr (KIND == Kind::BF16) asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
    else sum = _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(w), sum);
#else
    static_assert(is_int8(KIND));  // narrow_tiles.h multiplies floats
    add_byte_products<FAST>(sum, x, w);
#endif
}

// Store the value of 16 columns from n on to y, with the bias added; `add` adds to what is there.
inline void store_value(const Linear& w, __m512 value, int n, float* y, bool add) {
    const __mmask16 mask = w.N - n >= LANES ? 0xffff : (1u << (w.N - n)) - 1;
    if (w.bias) value = _mm512_add_ps(value, _mm512_load_ps(w.bias + n));
    if (add) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, y + n));
    _mm512_mask_storeu_ps(y + n, mask, value);
}

// Store the sums of 16 columns from n on, scaled. OFFSET: the bytes of activations are offset.
template <Kind KIND, bool OFFSET = BYTE_OFFSET != 0>
inline void store_sum(const Linear& w, Sum<KIND> sum, int n, const float* x_scale, float* y, bool add) {
    __m512 value;
    if constexpr (is_int8(KIND)) {
        if (OFFSET) sum = _mm512_sub_epi32(sum, _mm512_load_si512(w.offset + n));
        value = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(*x_scale));
        value = _mm512_mul_ps(value, _mm512_load_ps(w.scale + n));
    } else {
        value = sum;
    }
    store_value(w, value, n, y, add);
}

// Multiply sizeof...(M) rows by one panel. `stride` is the row stride of x in 32-bit lanes; y [.., N] is written or
// added to. `next`, if not null, is the panel to prefetch. Folds instead of loops, without lambdas and in a function of
// its own, so that every accumulator has a constant index and stays in a register
// (tests/serving/engine/test_registers.py).
template <Kind KIND, bool FAST, size_t... M>
__attribute__((noinline)) inline void tile(std::index_sequence<M...>, const Linear& w, int panel, const int32_t* x,
                                           int stride, const float* x_scale, float* y, bool add, const char* next) {
    Sum<KIND> left[] = {(void(M), zero<KIND>())...}, right[] = {(void(M), zero<KIND>())...};
    const int32_t* const x_end = x + w.K / w.lane();
    const char* weights = (const char*)w.packed + panel * w.panel_bytes();
    for (const int32_t* at = x; at < x_end; at++, weights += 128) {
        const __m512i w0 = _mm512_load_si512(weights), w1 = _mm512_load_si512(weights + 64);
        if (next) __builtin_prefetch(next, 0, 2), __builtin_prefetch(next + 64, 0, 2), next += 128;
        __m512i b;
        ((b = _mm512_set1_epi32(at[M * stride]), multiply_add<KIND, FAST>(left[M], b, w0),
          multiply_add<KIND, FAST>(right[M], b, w1)),
         ...);
    }
    const int n = panel * PANEL;
    (store_sum<KIND>(w, left[M], n, x_scale + M, y + M * w.N, add), ...);
    if (n + LANES < w.N) (store_sum<KIND>(w, right[M], n + LANES, x_scale + M, y + M * w.N, add), ...);
}

// Multiply sizeof...(M) rows by one half of a panel.
template <Kind KIND, bool FAST, size_t... M>
__attribute__((noinline)) inline void half_tile(std::index_sequence<M...>, const Linear& w, int panel, int half,
                                                const int32_t* x, int stride, const float* x_scale, float* y,
                                                bool add) {
    const int n = panel * PANEL + half * LANES;
    if (n >= w.N) return;
    Sum<KIND> sums[] = {(void(M), zero<KIND>())...};
    const int32_t* const x_end = x + w.K / w.lane();
    const char* weights = (const char*)w.packed + panel * w.panel_bytes() + half * 64;
    for (const int32_t* at = x; at < x_end; at++, weights += 128) {
        const __m512i each = _mm512_load_si512(weights);
        if (!half) __builtin_prefetch(weights + PREFETCH_BYTES), __builtin_prefetch(weights + PREFETCH_BYTES + 64);
        (multiply_add<KIND, FAST>(sums[M], _mm512_set1_epi32(at[M * stride]), each), ...);
    }
    (store_sum<KIND>(w, sums[M], n, x_scale + M, y + M * w.N, add), ...);
}

template <Kind KIND, int ROWS, size_t... PAIR>
inline void pair_tile(std::index_sequence<PAIR...>, const Linear& w, int panel, int half, const int32_t* x, int stride,
                      const float* x_scale, float* y, bool add);

template <Kind KIND, bool FAST, int M = VECTOR_TILE_ROWS>
inline void dispatch_tile(int rows, const Linear& w, int panel, const int32_t* x, int stride, const float* s, float* y,
                          bool add, const char* next) {
    if constexpr (M > 1)
        if (rows < M) return dispatch_tile<KIND, FAST, M - 1>(rows, w, panel, x, stride, s, y, add, next);
    constexpr std::make_index_sequence<M> each;
    if constexpr (MULTIPLIES_ROW_PAIRS && FAST && is_int8(KIND) && M > 1) {
        constexpr std::make_index_sequence<(M + 1) / 2> pairs;
        for (int half = 0; half < 2; half++) pair_tile<KIND, M>(pairs, w, panel, half, x, stride, s, y, add);
    } else if constexpr (M <= FULL_PANEL_ROWS) {
        tile<KIND, FAST>(each, w, panel, x, stride, s, y, add, next);
    } else {
        half_tile<KIND, FAST>(each, w, panel, 0, x, stride, s, y, add);
        half_tile<KIND, FAST>(each, w, panel, 1, x, stride, s, y, add);
    }
}

// Apply gelu to a tile's outputs while they are in L1; N is a multiple of LANES.
inline void gelu_tile(float* y, int rows, int panel, int N) {
    const int end = std::min((panel + 1) * PANEL, N);
    for (int m = 0; m < rows; m++, y += N)
        for (int n = panel * PANEL; n < end; n += LANES) _mm512_storeu_ps(y + n, gelu(_mm512_loadu_ps(y + n)));
}

// Return how many rows of activations, of `row` bytes each, stay in L2 while panels stream by; a multiple of ROWS.
template <int ROWS>
inline int rows_in_l2(size_t row) {
    return std::max(1, int(L2_BLOCK_BYTES / (row * ROWS))) * ROWS;
}

// Call multiply(panel, a, count, first) for each panel and each tile of rows [a, a + count), of at most ROWS; `first`
// is true for the first of the tiles that use a panel consecutively. Tiles are of even size: 32 rows are 11, 11 and 10
// rather than 12, 12 and 8.
template <int ROWS, class Multiply>
inline void for_each_tile(int T, size_t row, int first, int last, const Multiply& multiply) {
    const int tiles = (T + ROWS - 1) / ROWS, block_rows = rows_in_l2<ROWS>(row) / ROWS;
    for (int from = 0; from < tiles; from += block_rows)
        for (int panel = first; panel < last; panel++)
            for (int i = from; i < std::min(from + block_rows, tiles); i++) {
                const int a = int(int64_t(T) * i / tiles), b = int(int64_t(T) * (i + 1) / tiles);
                multiply(panel, a, b - a, i == from);
            }
}

template <Kind KIND, bool FAST = false>
inline void multiply_panels(const Linear& w, Rows x, int T, float* y, Epilogue epilogue, int first, int last) {
    const int stride = w.K / w.lane();
    const size_t row = size_t(w.K) * 4;
    const bool at_once = T <= rows_in_l2<VECTOR_TILE_ROWS>(row);
    for_each_tile<VECTOR_TILE_ROWS>(T, row, first, last, [&](int panel, int a, int count, bool begins) {
        const int32_t* rows = (const int32_t*)x.values + size_t(a) * stride;
        const float* scale = x.scale ? x.scale + a : nullptr;
        float* out = y + size_t(a) * w.N;
        const bool fetches = begins && at_once && count >= MIN_PREFETCH_ROWS && panel + 1 < last;
        const char* next = fetches ? (const char*)w.packed + (panel + 1) * w.panel_bytes() : nullptr;
        dispatch_tile<KIND, FAST>(count, w, panel, rows, stride, scale, out, epilogue == Epilogue::ADD, next);
        if (epilogue == Epilogue::GELU) gelu_tile(out, count, panel, w.N);
    });
}

template <Kind KIND, int C, int A, int B, class Tiles>
inline void multiply_add(Tiles& tiles) {
    if constexpr (is_int8(KIND)) tiles.template multiply<C, A, B>();
    else tiles.template multiply_bf16<C, A, B>();
}

using TileSums = int32_t[2 * TILE_ROWS][PANEL];  // int32, or float32 for bfloat16

// Multiply A row tiles (one or two) by the two halves of a panel. Tiles 0 to 3 are the sums, 4 and 5 activations, 6 and
// 7 weights; `row` is the size of a row of activations in bytes. `next`, if not null, is the panel to prefetch.
template <Kind KIND, int A, class Tiles>
inline void tile_sums(Tiles& tiles, const char* weights, const uint8_t* x, int row, const char* next, TileSums& sums) {
    constexpr int STEP = TILE_ROWS * PANEL * 4;
    tiles.template zero<0>(), tiles.template zero<1>();
    if (A == 2) tiles.template zero<2>(), tiles.template zero<3>();
    for (int k = 0; k < row; k += TILE_BYTES, weights += STEP) {
        tiles.template load<6>(weights, PANEL * 4), tiles.template load<7>(weights + 64, PANEL * 4);
        tiles.template load<4>(x + k, row);
        multiply_add<KIND, 0, 4, 6>(tiles), multiply_add<KIND, 1, 4, 7>(tiles);
        if (A == 2) {
            tiles.template load<5>(x + size_t(TILE_ROWS) * row + k, row);
            multiply_add<KIND, 2, 5, 6>(tiles), multiply_add<KIND, 3, 5, 7>(tiles);
        }
        if (!next) continue;
        for (int i = 0; i < STEP; i += 64) __builtin_prefetch(next + i, 0, 2);  // into L2
        next += STEP;
    }
    tiles.template store<0>(sums[0], PANEL * 4), tiles.template store<1>(sums[0] + LANES, PANEL * 4);
    if (A == 2)
        tiles.template store<2>(sums[TILE_ROWS], PANEL * 4),
            tiles.template store<3>(sums[TILE_ROWS] + LANES, PANEL * 4);
}

// Return the value rounded: keeps the compiler from contracting a product with a following sum.
inline __m512 rounded(__m512 value) {
#ifdef MLFLOW_LLM_AVX512
    asm("" : "+v"(value));
#endif
    return value;
}

// Converts a full panel's sums to floats, bitwise as store_sum() does, with the panel's scales in registers.
template <Kind KIND>
class PanelValues {
  public:
    PanelValues(const Linear& w, int panel) : has_bias(w.bias) {
        for (int i = 0; i < 2; i++) {
            const int n = panel * PANEL + i * LANES;
            if (is_int8(KIND)) offset[i] = _mm512_load_si512(w.offset + n), scale[i] = _mm512_load_ps(w.scale + n);
            if (has_bias) bias[i] = _mm512_load_ps(w.bias + n);
        }
    }
    // Convert one half of a row.
    __m512 operator()(const int32_t* sums, int half, __m512 x_scale) const {
        __m512 value;
        if constexpr (is_int8(KIND)) {
            const __m512i sum = _mm512_sub_epi32(_mm512_load_si512(sums + half * LANES), offset[half]);
            value = rounded(_mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), x_scale), scale[half]));
        } else {
            value = _mm512_load_ps(sums + half * LANES);
        }
        return has_bias ? rounded(_mm512_add_ps(value, bias[half])) : value;
    }

  private:
    __m512i offset[2];
    __m512 scale[2], bias[2];
    bool has_bias;
};

// Store a tile of a panel's sums, `count` rows of activations, to y.
template <Kind KIND>
inline void store_tile(const Linear& w, const TileSums& sums, int panel, int count, const float* x_scale, float* y,
                       Epilogue epilogue) {
    const int n = panel * PANEL;
    const PanelValues<KIND> value(w, panel);
    const __mmask16 left = w.N - n >= LANES ? 0xffff : (1u << (w.N - n)) - 1;
    const __mmask16 right = w.N - n >= PANEL ? 0xffff : w.N - n > LANES ? (1u << (w.N - n - LANES)) - 1 : 0;
    float* to = y + n;
    for (int m = 0; m < count; m++, to += w.N) {
        const __m512 by = _mm512_set1_ps(x_scale ? x_scale[m] : 1.0f);
        const int32_t* sum = sums[m];
        __m512 a = value(sum, 0, by), b = value(sum, 1, by);
        if (epilogue == Epilogue::ADD) {
            a = _mm512_add_ps(a, _mm512_maskz_loadu_ps(left, to));
            b = _mm512_add_ps(b, _mm512_maskz_loadu_ps(right, to + LANES));
        }
        _mm512_mask_storeu_ps(to, left, a), _mm512_mask_storeu_ps(to + LANES, right, b);
    }
    if (epilogue == Epilogue::GELU) gelu_tile(y, count, panel, w.N);
}

// Call store(sums, panel, a, count) for each panel and each tile of rows [a, a + count), while the next sums are being
// computed: reading what a tile stored takes long. Panels are prefetched. Loop order: panels outer for few rows, which
// then share a panel in cache; rows outer for many, since the outputs would be far apart.
template <Kind KIND, int PARTS, class Tiles, class Store>
inline void multiply_tiles(const Linear& w, Rows x, int T, int first, int last, const Store& store) {
    constexpr int BLOCK_ROWS = 2 * TILE_ROWS, FEW_ROWS = 5 * BLOCK_ROWS;
    const int row_bytes = w.K / w.lane() * 4, block_rows = T <= FEW_ROWS ? FEW_ROWS : BLOCK_ROWS;
    const auto weights_of = [&](int panel, int part) {
        return (const char*)w.packed + (panel + part * (w.panels / PARTS)) * w.panel_bytes();
    };
    Tiles tiles;
    alignas(64) TileSums sums[2][PARTS];
    struct { int panel, a, count; } done{0, 0, 0};
    int buffer = 0;
    for (int from = 0; from < T; from += block_rows)
        for (int panel = first; panel < last; panel++)
            for (int a = from; a < std::min(from + block_rows, T); a += BLOCK_ROWS, buffer ^= 1) {
                const int count = std::min(T - a, BLOCK_ROWS);
                const uint8_t* rows = (const uint8_t*)x.values + size_t(a) * row_bytes;
                for (int part = 0; part < PARTS; part++) {
                    const char* next = nullptr;
                    if (a == 0 && part + 1 < PARTS) next = weights_of(panel, part + 1);
                    else if (a == 0 && panel + 1 < last) next = weights_of(panel + 1, 0);
                    TileSums& into = sums[buffer][part];
                    if (count > TILE_ROWS)
                        tile_sums<KIND, 2>(tiles, weights_of(panel, part), rows, row_bytes, next, into);
                    else tile_sums<KIND, 1>(tiles, weights_of(panel, part), rows, row_bytes, next, into);
                }
                if (done.count) store(sums[buffer ^ 1], done.panel, done.a, done.count);
                done = {panel, a, count};
            }
    if (done.count) store(sums[buffer ^ 1], done.panel, done.a, done.count);
}

template <Kind KIND, class Tiles>
inline void multiply_tiles(const Linear& w, Rows x, int T, float* y, Epilogue epilogue, int first, int last) {
    multiply_tiles<KIND, 1, Tiles>(w, x, T, first, last, [&](const TileSums* sums, int panel, int a, int count) {
        store_tile<KIND>(w, *sums, panel, count, x.scale ? x.scale + a : nullptr, y + size_t(a) * w.N, epilogue);
    });
}

}  // namespace mlflow_llm
