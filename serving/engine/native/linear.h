// Linears: weights packed once, and y = x W^T + b for any number of rows.
//
//   packed   panel 0 | panel 1 | ...            a panel: PANEL output columns, all of K
//   panel    k group 0: 16 columns, 16 columns | k group 1: ...
//            a group is 1 float, 2 bfloat16 or 4 int8 of one column: the content of a 32-bit lane
//
// Every output is summed over k in the same order for any number of rows, so a row's result is bitwise the same alone
// and in any batch. int8 rows have a scale each; where vpdpbusd multiplies unsigned by signed bytes they are offset by
// 128, and 128 times the column's sum is subtracted again, exactly. ROTATED is INT8 with weights and activations
// multiplied by a Hadamard matrix before rounding: (W H) (H x) is W x up to a factor, and outliers of activations are
// spread over many dimensions (Ashkboos et al. 2024, "QuaRot").
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <sys/mman.h>
#include <type_traits>
#include <utility>
#include <vector>

#include "hadamard.h"
#include "simd.h"
#include "threads.h"
#include "tiles.h"
#include "words.h"

namespace mlflow_llm {

constexpr int PANEL = 32;
#ifdef MLFLOW_LLM_AVX512
constexpr bool NARROW_VECTORS = false;
#else
constexpr bool NARROW_VECTORS = true;  // a vector is several registers (narrow_vectors.h)
#endif
#ifdef MLFLOW_LLM_AVX512
constexpr int BYTE_OFFSET = 128;
constexpr bool HAS_OPTIONAL_BYTE_PRODUCTS = false;
inline bool cpu_has_byte_products() { return true; }
constexpr int VECTOR_TILE_ROWS = 12;  // 24 accumulators, 2 weights and a broadcast in 32 registers
constexpr int FULL_PANEL_ROWS = VECTOR_TILE_ROWS;  // rows up to which both halves of a panel are multiplied at once
#elif defined(MLFLOW_LLM_SVE)
constexpr int VECTOR_TILE_ROWS = 6;  // 24 accumulators, 4 weights and a broadcast in 32 registers
constexpr int FULL_PANEL_ROWS = VECTOR_TILE_ROWS;
#else
constexpr int VECTOR_TILE_ROWS = 6;  // by half a panel: 12 accumulators in 16 registers (AVX2), 24 in 32 (NEON)
constexpr int FULL_PANEL_ROWS = 3;  // by a full panel
#endif
#ifdef __aarch64__
constexpr bool MULTIPLIES_ROW_PAIRS = true;  // two rows at once, on CPUs with i8mm (row_pairs.h)
#else
constexpr bool MULTIPLIES_ROW_PAIRS = false;
#endif
constexpr int PREFETCH_BYTES = 1024;  // the hardware prefetcher does not predict reading every second cache line
// with fewer rows memory bandwidth alone decides, and prefetching the next panel does not pay
constexpr int MIN_PREFETCH_ROWS = 5;
constexpr int PANELS_PER_TASK = 4;  // the least that a thread takes at a time
constexpr int L2_BLOCK_BYTES = 256 << 10;  // activations processed at a time, which stay in the L2 cache
constexpr int MIN_FUSED_GATE_ROWS = 64;  // from so many rows multiply_gated() pays without tiles too
constexpr int MAX_INT8_LEVEL = 127;
constexpr int INT4_GROUP = 32;  // k's that share a scale in 4-bit weights (int4.h)
constexpr size_t INT4_GROUP_BYTES = PANEL * (INT4_GROUP / 2 + 3);

enum class Kind : int { F32 = 0, INT8 = 1, BF16 = 2, INT4 = 3, ROTATED = 4, ROTATED_INT4 = 5 };

// Whether the byte dot-product instruction is used that some CPUs of this library lack (AVX-VNNI, i8mm).
inline std::atomic<bool>& use_byte_products() {
    static std::atomic<bool> use{HAS_OPTIONAL_BYTE_PRODUCTS && cpu_has_byte_products()};
    return use;
}

// Return whether activations of int8 linears are 16-bit words. Tiles, also emulated ones, take bytes.
inline bool uses_words() { return HAS_WORDS && !use_byte_products() && tile_use() == TileUse::NONE; }

// Return whether weights are int8 and multiplied by int8 activations.
constexpr bool is_int8(Kind kind) { return kind == Kind::INT8 || kind == Kind::ROTATED; }

// Return whether weights have 4 bits and are multiplied by int8 activations (int4.h).
constexpr bool is_int4(Kind kind) { return kind == Kind::INT4 || kind == Kind::ROTATED_INT4; }

// Return whether both factors are multiplied by a Hadamard matrix before rounding.
constexpr bool is_rotated(Kind kind) { return kind == Kind::ROTATED || kind == Kind::ROTATED_INT4; }

inline void* allocate(size_t bytes) {
    const size_t huge = size_t(2) << 20;
    const size_t unit = bytes >= huge ? huge : 64;
    void* memory = std::aligned_alloc(unit, (bytes + unit - 1) / unit * unit);
    if (!memory) throw std::bad_alloc();
    if (unit == huge) madvise(memory, bytes, MADV_HUGEPAGE);  // streaming weights would miss the TLB otherwise
    return memory;
}

// Allocator for vectors that start at a cache line: loads and stores that straddle two lines take twice as long.
template <class T>
struct AlignedAllocator {
    using value_type = T;
    AlignedAllocator() = default;
    template <class U>
    AlignedAllocator(const AlignedAllocator<U>&) {}
    T* allocate(size_t count) { return (T*)mlflow_llm::allocate(count * sizeof(T)); }
    void deallocate(T* memory, size_t) { std::free(memory); }
    friend bool operator==(const AlignedAllocator&, const AlignedAllocator&) { return true; }
    friend bool operator!=(const AlignedAllocator&, const AlignedAllocator&) { return false; }
};

using AlignedFloats = std::vector<float, AlignedAllocator<float>>;

enum class Epilogue { WRITE, ADD, GELU };  // y = .., y += .., y = gelu(..)

struct Linear {
    Kind kind;
    int K, N, panels;
    void* packed = nullptr;
    float* scale = nullptr;  // int8: by output column, panels * PANEL
    int32_t* offset = nullptr;  // int8: 128 times the column's sum
    float* bias = nullptr;  // or null
    float* input = nullptr;  // 4 bits: a factor for each k
    bool owned = true;  // false: the memory belongs to someone else and outlives this

    int lane() const { return kind == Kind::F32 ? 1 : kind == Kind::BF16 ? 2 : 4; }
    size_t panel_bytes() const {
        return is_int4(kind) ? K / INT4_GROUP * INT4_GROUP_BYTES : size_t(K) / lane() * PANEL * 4;
    }
    size_t row_bytes() const;  // of one prepared row of activations
    ~Linear() {
        if (owned) std::free(packed), std::free(scale), std::free(offset), std::free(bias), std::free(input);
    }
};

// Return how a linear is multiplied, for any number of rows: tiles round products of bfloat16 differently, and
// switching within a step costs 5 % of a step with a single row.
inline TileUse tiles_for(const Linear& w) {
    const bool whole = w.K / w.lane() * 4 % TILE_BYTES == 0;
    const bool can = is_int8(w.kind) || (w.kind == Kind::BF16 && multiplies_bf16());
    return whole && can ? tile_use().load(std::memory_order_relaxed) : TileUse::NONE;
}

// Return whether bfloat16 rows are stored as floats, rounded to bfloat16 (narrow_tiles.h).
inline bool uses_float_rows(const Linear& w) {
    return NARROW_VECTORS && w.kind == Kind::BF16 && tiles_for(w) == TileUse::NONE;
}

inline size_t Linear::row_bytes() const {
    if (is_int4(kind)) return K + sizeof(float) * (K / INT4_GROUP);
    if (uses_float_rows(*this)) return K * sizeof(float);
    return is_int8(kind) && uses_words() ? K * sizeof(int16_t) : size_t(K) / lane() * 4;
}

inline uint16_t to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float from_bf16(uint16_t half) {
    const uint32_t bits = uint32_t(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Return the position of weight (n, k) in the packed memory, in elements.
inline size_t element_index(const Linear& w, int n, int k) {
    const int lane = w.lane();
    return size_t(n / PANEL) * (size_t(w.K) * PANEL) + (size_t(k / lane) * PANEL + n % PANEL) * lane + k % lane;
}

// Return `count` panels of a linear as a linear of its own, in the same memory.
inline Linear panel_range(const Linear& all, int first, int count) {
    const int n = first * PANEL, N = std::min(count * PANEL, all.N - n);
    Linear some{all.kind, all.K, N, count, (char*)all.packed + first * all.panel_bytes()};
    if (all.scale) some.scale = all.scale + n;
    if (all.offset) some.offset = all.offset + n;
    if (all.bias) some.bias = all.bias + n;
    some.input = all.input;
    some.owned = false;
    return some;
}

// Return one of `count` linears that are stacked in `all`; each consists of whole panels.
inline Linear stacked_part(const Linear& all, int number, int count) {
    const int panels = all.N / count / PANEL;
    return panel_range(all, number * panels, panels);
}

// Return the scale of a row quantised to int8; NaN if a value is not finite, so that all products are NaN and the
// request fails instead of continuing with garbage.
inline float row_scale(const float* x, int K) {
    __m512 max = _mm512_setzero_ps();
    __mmask16 non_finite = 0;
    for (int k = 0; k < K; k += LANES) {
        const __m512 size = _mm512_abs_ps(_mm512_loadu_ps(x + k));
        non_finite |= _mm512_cmp_ps_mask(size, _mm512_set1_ps(INFINITY), _CMP_NLT_UQ);
        max = _mm512_max_ps(max, size);
    }
    if (non_finite) return NAN;
    return std::max(_mm512_reduce_max_ps(max) * (1.0f / MAX_INT8_LEVEL), 1e-12f);
}

// Quantise a row of activations to bytes, offset by BYTE_OFFSET; return its scale.
inline float quantize_row(const float* x, int K, uint8_t* q) {
    const float scale = row_scale(x, K);
    const __m512i offset = _mm512_set1_epi32(BYTE_OFFSET);
    const __m512 by = _mm512_set1_ps(1.0f / scale);  // a division per value would take longer than a tile's products
    for (int k = 0; k < K; k += LANES) {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + k), by));
        _mm_storeu_si128((__m128i*)(q + k), _mm512_cvtepi32_epi8(_mm512_add_epi32(whole, offset)));
    }
    return scale;
}

// Quantise a row of activations to 16-bit words; return its scale.
inline float quantize_row_words(const float* x, int K, int16_t* q) {
    const float scale = row_scale(x, K);
    const __m512 by = _mm512_set1_ps(1.0f / scale);
    for (int k = 0; k < K; k += LANES)
        store_words(q + k, _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + k), by)));
    return scale;
}

// Allocate the parts of a linear, filled with zeros, and copy the bias.
inline void allocate_parts(Linear& w, const float* bias) {
    w.panels = round_up(w.N, PANEL) / PANEL;
    w.packed = allocate(w.panels * w.panel_bytes());
    std::memset(w.packed, 0, w.panels * w.panel_bytes());
    if (bias) {
        w.bias = (float*)allocate(sizeof(float) * w.panels * PANEL);
        std::memset(w.bias, 0, sizeof(float) * w.panels * PANEL);
        std::memcpy(w.bias, bias, sizeof(float) * w.N);
    }
    if (is_int8(w.kind)) {
        w.scale = (float*)allocate(sizeof(float) * w.panels * PANEL);
        w.offset = (int32_t*)allocate(sizeof(int32_t) * w.panels * PANEL);
        std::memset(w.scale, 0, sizeof(float) * w.panels * PANEL);
        std::memset(w.offset, 0, sizeof(int32_t) * w.panels * PANEL);
    }
}

// Pack row n of int8 weights, given by q(k).
template <class Values>
inline void pack_row(Linear& w, int n, float scale, const Values& q) {
    int32_t sum = 0;
    for (int k = 0; k < w.K; k++) {
        const int8_t value = q(k);
        ((int8_t*)w.packed)[element_index(w, n, k)] = value;
        sum += value;
    }
    w.scale[n] = scale;
    w.offset[n] = 128 * sum;
}

// Return the Hadamard-rotated row; valid until the next call on this thread.
inline const float* hadamard_row(const float* row, int K) {
    static thread_local AlignedFloats own;
    if (own.size() < size_t(K)) own.resize(K);
    hadamard(row, own.data(), K, hadamard_scale(K));
    return own.data();
}

inline void pack(Linear& w, const float* dense, const float* bias) {
    allocate_parts(w, bias);
    parallel_for(w.N, [&](int n) {
        const float* row = dense + size_t(n) * w.K;
        if (is_rotated(w.kind)) row = hadamard_row(row, w.K);
        if (w.kind == Kind::F32) {
            for (int k = 0; k < w.K; k++) ((float*)w.packed)[element_index(w, n, k)] = row[k];
        } else if (w.kind == Kind::BF16) {
            for (int k = 0; k < w.K; k++) ((uint16_t*)w.packed)[element_index(w, n, k)] = to_bf16(row[k]);
        } else {
            const float scale = row_scale(row, w.K), inverse = 1.0f / scale;
            pack_row(w, n, scale, [&](int k) { return (int8_t)__builtin_rintf(row[k] * inverse); });
        }
    });
}

// Pack weights [N, K] that are int8 already, with a scale per row.
inline void pack_int8(Linear& w, const int8_t* values, const float* scale, const float* bias) {
    allocate_parts(w, bias);
    parallel_for(w.N, [&](int n) {
        const int8_t* row = values + size_t(n) * w.K;
        pack_row(w, n, scale[n], [&](int k) { return row[k]; });
    });
}

inline void pack_int4(Linear&, const uint8_t*, const uint16_t*, const uint8_t*, const float*, const float*);
inline void unpack_int4(const Linear& w, float* dense);
inline float quantize_row_int4(const Linear& w, const float* x, uint8_t* row);

inline void unpack(const Linear& w, float* dense) {
    if (is_int4(w.kind)) return unpack_int4(w, dense);
    parallel_for(w.N, [&](int n) {
        for (int k = 0; k < w.K; k++) {
            const size_t at = element_index(w, n, k);
            dense[size_t(n) * w.K + k] = w.kind == Kind::F32    ? ((float*)w.packed)[at]
                                         : w.kind == Kind::BF16 ? from_bf16(((uint16_t*)w.packed)[at])
                                                                : ((int8_t*)w.packed)[at] * w.scale[n];
        }
        if (is_rotated(w.kind)) hadamard(dense + size_t(n) * w.K, w.K, hadamard_scale(w.K));
    });
}

// Prepared rows of activations. `values` is [T, K] of float, bfloat16 or int8, as the kind of the linear requires.
struct Rows {
    const void* values;
    const float* scale;  // for int8 only
};

// Per-step scratch buffer for prepared rows, used by one linear after the other; each thread fills single rows.
class RowBuffer {
  public:
    void reserve(int T, int max_width) {
        // tiles always read full tiles
        const size_t padded = size_t(round_up(T, 2 * TILE_ROWS)) * max_width * (NARROW_VECTORS ? 4 : 2);
        if (bytes.size() < padded) bytes.resize(padded);
        if (scales.size() < size_t(T)) scales.resize(T);
    }
    void fill(const Linear& w, const float* x, int t) {
        const float* row = x + size_t(t) * w.K;
        if (is_rotated(w.kind)) row = hadamard_row(row, w.K);
        if (is_int8(w.kind) && uses_words()) {
            scales[t] = quantize_row_words(row, w.K, (int16_t*)(bytes.data() + size_t(t) * w.row_bytes()));
            return;
        }
        if (is_int8(w.kind)) scales[t] = quantize_row(row, w.K, bytes.data() + size_t(t) * w.K);
        if (uses_float_rows(w)) return round_to_bf16(row, w.K, (float*)bytes.data() + size_t(t) * w.K);
        if (w.kind == Kind::BF16) to_bf16(row, w.K, (uint16_t*)bytes.data() + size_t(t) * w.K);
        if (is_int4(w.kind)) scales[t] = quantize_row_int4(w, row, bytes.data() + size_t(t) * w.row_bytes());
    }
    // Return the prepared rows from `first` on.
    Rows rows(const Linear& w, const float* x, int first = 0) const {
        if (w.kind == Kind::F32) return {x + size_t(first) * w.K, nullptr};
        return {bytes.data() + size_t(first) * w.row_bytes(), scales.data() + first};
    }
    // Copy row `from` of `others` to row t.
    void copy_row(const Linear& w, const RowBuffer& others, int from, int t) {
        if (w.kind == Kind::F32) return;
        std::memcpy(&bytes[size_t(t) * w.row_bytes()], &others.bytes[size_t(from) * w.row_bytes()], w.row_bytes());
        scales[t] = others.scales[from];
    }

  private:
    std::vector<uint8_t, AlignedAllocator<uint8_t>> bytes;
    std::vector<float> scales;
};

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

template <Kind KIND>
inline void multiply_words(const Linear& w, Rows x, int T, float* y, Epilogue epilogue, int first, int last);
template <Kind KIND>
inline void multiply_floats(const Linear& w, Rows x, int T, float* y, Epilogue epilogue, int first, int last);

template <Kind KIND>
inline void multiply_narrow(const Linear& w, Rows x, int T, float* y, Epilogue epilogue, int first, int last) {
    if constexpr (HAS_WORDS && is_int8(KIND))
        if (uses_words()) return multiply_words<KIND>(w, x, T, y, epilogue, first, last);
    const TileUse use = tiles_for(w);
    if constexpr (HAS_OPTIONAL_BYTE_PRODUCTS && is_int8(KIND))
        if (use == TileUse::NONE && use_byte_products())
            return multiply_panels<KIND, true>(w, x, T, y, epilogue, first, last);
    if constexpr (NARROW_VECTORS && KIND == Kind::BF16)
        if (use == TileUse::NONE) return multiply_floats<KIND>(w, x, T, y, epilogue, first, last);
    if (use == TileUse::HARDWARE) multiply_tiles<KIND, HardwareTiles>(w, x, T, y, epilogue, first, last);
    else if (use == TileUse::EMULATED) multiply_tiles<KIND, EmulatedTiles>(w, x, T, y, epilogue, first, last);
    else if constexpr (!NARROW_VECTORS || is_int8(KIND)) multiply_panels<KIND>(w, x, T, y, epilogue, first, last);
}

inline void multiply_int4(const Linear& w, Rows x, int T, float* y, Epilogue epilogue, int first, int last);

template <Kind KIND>
inline void multiply_float32(const Linear& w, Rows x, int T, float* y, Epilogue epilogue, int first, int last) {
    if constexpr (NARROW_VECTORS) multiply_floats<KIND>(w, x, T, y, epilogue, first, last);
    else multiply_panels<KIND>(w, x, T, y, epilogue, first, last);
}

// Compute the columns of panels [first, last) of y [T, N] = x W^T + b.
inline void multiply_range(const Linear& w, Rows x, int T, float* y, Epilogue epilogue, int first, int last) {
    if (w.kind == Kind::F32) multiply_float32<Kind::F32>(w, x, T, y, epilogue, first, last);
    else if (is_int4(w.kind)) multiply_int4(w, x, T, y, epilogue, first, last);
    else if (is_int8(w.kind)) multiply_narrow<Kind::INT8>(w, x, T, y, epilogue, first, last);
    else multiply_narrow<Kind::BF16>(w, x, T, y, epilogue, first, last);
}

// Return whether multiply_gated() supports w, two stacked linears, and pays. With few rows it matters most that weights
// are streamed without a pause, from one end to the other.
inline bool can_multiply_gated(const Linear& w, int rows) {
    return w.N % (2 * PANEL) == 0 && (rows >= MIN_FUSED_GATE_ROWS || tiles_for(w) != TileUse::NONE);
}

// Compute y [T, N / 2] = act(gate) * up, where gate and up are the upper and the lower half of W times x: bitwise as
// multiply() and the activation give, but without writing gate and up to memory, which takes longer than the products
// by tiles.
template <Kind KIND, class Tiles, class Act>
inline void multiply_gated_tiles(const Linear& w, Rows x, int T, float* y, int first, int last, const Act& act) {
    const int width = w.N / 2, half = w.panels / 2;
    multiply_tiles<KIND, 2, Tiles>(w, x, T, first, last, [&](const TileSums* sums, int panel, int a, int count) {
        const PanelValues<KIND> gate(w, panel), up(w, panel + half);
        float* to = y + size_t(a) * width + panel * PANEL;
        for (int m = 0; m < count; m++, to += width) {
            const __m512 by = _mm512_set1_ps(x.scale ? x.scale[a + m] : 1.0f);
            for (int i = 0; i < 2; i++)
                _mm512_storeu_ps(to + i * LANES, _mm512_mul_ps(act(gate(sums[0][m], i, by)), up(sums[1][m], i, by)));
        }
    });
}

// The same by vectors: one panel of each half at a time, with rows whose outputs stay in cache.
template <class Act>
inline void multiply_gated_vectors(const Linear& w, Rows x, int T, float* y, int first, int last, const Act& act) {
    constexpr int MAX_ROWS = 96;
    const int width = w.N / 2, half = w.panels / 2;
    const int block_rows = std::min(MAX_ROWS, rows_in_l2<VECTOR_TILE_ROWS>(size_t(w.K) * 4)),
              parts = (T + block_rows - 1) / block_rows;
    alignas(64) float gate[MAX_ROWS][PANEL], up[MAX_ROWS][PANEL];
    for (int i = 0; i < parts; i++) {
        const int from = int(int64_t(T) * i / parts), count = int(int64_t(T) * (i + 1) / parts) - from;
        const Rows rows{(const char*)x.values + size_t(from) * w.row_bytes(), x.scale ? x.scale + from : nullptr};
        for (int panel = first; panel < last; panel++) {
            multiply_range(panel_range(w, panel, 1), rows, count, gate[0], Epilogue::WRITE, 0, 1);
            multiply_range(panel_range(w, panel + half, 1), rows, count, up[0], Epilogue::WRITE, 0, 1);
            float* to = y + size_t(from) * width + panel * PANEL;
            for (int m = 0; m < count; m++, to += width)
                for (int n = 0; n < PANEL; n += LANES)
                    _mm512_storeu_ps(to + n,
                                     _mm512_mul_ps(act(_mm512_load_ps(gate[m] + n)), _mm512_load_ps(up[m] + n)));
        }
    }
}

template <class Act>
inline void multiply_gated(Team& team, const Linear& w, Rows x, int T, float* y, const Act& act) {
    const TileUse use = tiles_for(w);
    team.parallel_ranges(w.panels / 2, PANELS_PER_TASK / 2, [&](int first, int last) {
        if (use == TileUse::NONE) return multiply_gated_vectors(w, x, T, y, first, last, act);
        const bool emulated = use == TileUse::EMULATED, bytes = is_int8(w.kind);
        if (bytes && !emulated) multiply_gated_tiles<Kind::INT8, HardwareTiles>(w, x, T, y, first, last, act);
        else if (bytes) multiply_gated_tiles<Kind::INT8, EmulatedTiles>(w, x, T, y, first, last, act);
        else if (!emulated) multiply_gated_tiles<Kind::BF16, HardwareTiles>(w, x, T, y, first, last, act);
        else multiply_gated_tiles<Kind::BF16, EmulatedTiles>(w, x, T, y, first, last, act);
    });
}

// Compute y [T, N] = x W^T + b, split by panels.
inline void multiply(Team& team, const Linear& w, Rows x, int T, float* y, Epilogue epilogue) {
    team.parallel_ranges(w.panels, PANELS_PER_TASK,
                         [&](int first, int last) { multiply_range(w, x, T, y, epilogue, first, last); });
}

}  // namespace mlflow_llm

#include "int4.h"
#ifndef MLFLOW_LLM_AVX512
#include "narrow_tiles.h"
#endif
#ifdef MLFLOW_LLM_AVX2
#include "word_panels.h"
#endif
#ifdef __aarch64__
#include "row_pairs.h"
#endif
