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
// spread over many dimensions (Ashkboos et al. 2024, "QuaRot"). It may have a factor per k, by which activations are
// multiplied, and weights divided, before the rotation (weights/input_factors.py).
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

#include "model/hadamard.h"
#include "isa/simd.h"
#include "threads.h"
#include "isa/tiles.h"
#include "isa/words.h"

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
    float* input = nullptr;  // a factor of activations for each k: 4 bits (after a rotation), ROTATED (before it) or null
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

// Write x times y to `out`, each [K].
inline void multiply_elements(const float* x, const float* y, float* out, int K) {
    for (int k = 0; k < K; k += LANES)
        _mm512_storeu_ps(out + k, _mm512_mul_ps(_mm512_loadu_ps(x + k), _mm512_loadu_ps(y + k)));
}

// Return the Hadamard-rotated row, times `input` before if that is not null; valid until the next call on this thread.
inline const float* hadamard_row(const float* row, int K, const float* input = nullptr) {
    static thread_local AlignedFloats own;
    if (own.size() < size_t(K)) own.resize(K);
    if (input) multiply_elements(row, input, own.data(), K);
    hadamard(input ? own.data() : row, own.data(), K, hadamard_scale(K));
    return own.data();
}

// Give a linear the factors `input` [K] of its activations, by which its weights are divided.
inline void set_input(Linear& w, const float* input) {
    w.input = (float*)allocate(sizeof(float) * w.K);
    std::memcpy(w.input, input, sizeof(float) * w.K);
}

// Pack weights [N, K]; `input` is null, or of a ROTATED linear [K].
inline void pack(Linear& w, const float* dense, const float* bias, const float* input = nullptr) {
    allocate_parts(w, bias);
    AlignedFloats inverse;
    if (input) {
        set_input(w, input);
        inverse.resize(w.K);
        for (int k = 0; k < w.K; k++) inverse[k] = 1.0f / input[k];
    }
    parallel_for(w.N, [&](int n) {
        const float* row = dense + size_t(n) * w.K;
        if (is_rotated(w.kind)) row = hadamard_row(row, w.K, input ? inverse.data() : nullptr);
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

// Pack weights [N, K] that are int8 already, with a scale per row and, unless `input` is null, divided by it before.
inline void pack_int8(Linear& w, const int8_t* values, const float* scale, const float* input, const float* bias) {
    allocate_parts(w, bias);
    if (input) set_input(w, input);
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
        float* row = dense + size_t(n) * w.K;
        if (is_rotated(w.kind)) hadamard(row, w.K, hadamard_scale(w.K));
        if (w.input) multiply_elements(row, w.input, row, w.K);
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
        if (is_rotated(w.kind)) row = hadamard_row(row, w.K, is_int8(w.kind) ? w.input : nullptr);
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

}  // namespace mlflow_llm
