// Weights of a linear, packed once, and y = x W^T + b over any number of rows.
//
//   packed   panel 0 | panel 1 | ...            a panel: PANEL output columns, all of K
//   panel    k group 0: 16 columns, 16 columns | k group 1: ...
//            a group is 1 float, 2 bfloat16 or 4 int8 of one column: what one 32-bit lane holds
//
// Every output is summed over k in the same order whatever the number of rows, so a row's result is bitwise the same
// alone and in any batch. int8 rows carry a scale each; they are offset by 128 where vpdpbusd takes unsigned times
// signed bytes, and 128 times the column's sum is taken off again, exactly. ROTATED is INT8 of weights and activations that
// both have been multiplied by a Hadamard matrix before they are rounded: (W H) (H x) is W x but for a factor, and what one
// activation has more than the others is spread over many (Ashkboos et al. 2024, "QuaRot").
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

namespace mlt {

constexpr int PANEL = 32;
#ifdef MLT_AVX512
constexpr bool NARROW = false;
#else
constexpr bool NARROW = true;  // a vector is several registers (narrow_vectors.h)
#endif
#ifdef MLT_AVX512
constexpr int BYTE_OFFSET = 128;
constexpr bool CHOOSES_BYTE_PRODUCTS = false;
inline bool has_byte_products() { return true; }
constexpr int TILE = 12;  // rows at a time: 24 accumulators, 2 weights and a broadcast of 32 registers
constexpr int WHOLE = TILE;  // rows that take both halves of a panel at once
#elif defined(MLT_SVE)
constexpr int TILE = 6;  // 24 accumulators, 4 weights and a broadcast of 32 registers
constexpr int WHOLE = TILE;
#else
constexpr int TILE = 6;   // by half a panel: 12 accumulators of 16 registers (AVX2), 24 of 32 (NEON)
constexpr int WHOLE = 3;  // by a whole one
#endif
#ifdef __aarch64__
constexpr bool PAIRS_OF_ROWS = true;  // multiplied together, where the processor can (row_pairs.h)
#else
constexpr bool PAIRS_OF_ROWS = false;
#endif
constexpr int FETCH_AHEAD = 1024;  // bytes: what takes every second line of weights is not foreseen by the processor
constexpr int FETCHED_FROM = 5;    // rows from which the next panel is fetched meanwhile: with fewer, memory is all that counts
constexpr int PANELS = 4; // at least, that a thread takes at a time
constexpr int NEAR = 256 << 10;  // bytes of activations taken at a time
constexpr int GATED_FROM = 64;  // rows from which gate and up go through the activation at once by vectors too (multiply_gated)
constexpr int LEVELS = 127;
constexpr int INT4_GROUP = 32;  // k's that share a scale, of weights of four bits (int4.h)
constexpr size_t INT4_GROUP_BYTES = PANEL * (INT4_GROUP / 2 + 3);

enum class Kind : int { F32 = 0, INT8 = 1, BF16 = 2, INT4 = 3, ROTATED = 4, ROTATED_INT4 = 5 };

// Whether bytes are multiplied by the instruction for it, where not all processors of this library have it.
inline std::atomic<bool>& byte_products() {
    static std::atomic<bool> use{CHOOSES_BYTE_PRODUCTS && has_byte_products()};
    return use;
}

// Whether what meets bytes is 16-bit numbers. Tiles, which are emulated in tests, take bytes.
inline bool by_words() { return HAS_WORDS && !byte_products() && tile_use() == TileUse::NONE; }

// Whether weights are bytes, by bytes.
constexpr bool of_bytes(Kind kind) { return kind == Kind::INT8 || kind == Kind::ROTATED; }

// Whether weights are of four bits, by bytes (int4.h).
constexpr bool of_nibbles(Kind kind) { return kind == Kind::INT4 || kind == Kind::ROTATED_INT4; }

// Whether both factors are multiplied by a Hadamard matrix before they are rounded.
constexpr bool is_rotated(Kind kind) { return kind == Kind::ROTATED || kind == Kind::ROTATED_INT4; }

inline void* allocate(size_t bytes) {
    const size_t huge = size_t(2) << 20;
    const size_t unit = bytes >= huge ? huge : 64;
    void* memory = std::aligned_alloc(unit, (bytes + unit - 1) / unit * unit);
    if (!memory) throw std::bad_alloc();
    if (unit == huge) madvise(memory, bytes, MADV_HUGEPAGE);  // streaming weights misses the TLB otherwise
    return memory;
}

// Of vectors that begin with a cache line: what lies across two takes twice as long to be read or written.
template <class T>
struct Aligned {
    using value_type = T;
    Aligned() = default;
    template <class U>
    Aligned(const Aligned<U>&) {}
    T* allocate(size_t count) { return (T*)mlt::allocate(count * sizeof(T)); }
    void deallocate(T* memory, size_t) { std::free(memory); }
    friend bool operator==(const Aligned&, const Aligned&) { return true; }
    friend bool operator!=(const Aligned&, const Aligned&) { return false; }
};

using AlignedFloats = std::vector<float, Aligned<float>>;

enum class Finish { WRITE, ADD, GELU };  // y = .., y += .., y = gelu(..)

struct Linear {
    Kind kind;
    int K, N, panels;
    void* packed = nullptr;
    float* scale = nullptr;    // of bytes: by output column, panels * PANEL
    int32_t* offset = nullptr; // of bytes: 128 times the column's sum
    float* bias = nullptr;     // or null
    float* input = nullptr;    // of four bits: by k
    bool owned = true;         // else it lies in memory of another, which is longer there

    int lane() const { return kind == Kind::F32 ? 1 : kind == Kind::BF16 ? 2 : 4; }
    size_t panel_bytes() const { return of_nibbles(kind) ? K / INT4_GROUP * INT4_GROUP_BYTES : size_t(K) / lane() * PANEL * 4; }
    size_t row_bytes() const;  // of a row of activations, prepared
    ~Linear() {
        if (owned) std::free(packed), std::free(scale), std::free(offset), std::free(bias), std::free(input);
    }
};

// How a linear is multiplied, by any number of rows: a product of bfloat16 rounds otherwise by tiles, and a processor that
// goes back and forth within a step pays for it (5 % of one with a single row).
inline TileUse tiles_for(const Linear& w) {
    const bool whole = w.K / w.lane() * 4 % TILE_BYTES == 0;
    const bool can = of_bytes(w.kind) || (w.kind == Kind::BF16 && multiplies_bf16());
    return whole && can ? tile_use().load(std::memory_order_relaxed) : TileUse::NONE;
}

// Whether rows of bfloat16 are floats, rounded so (narrow_tiles.h).
inline bool by_floats(const Linear& w) { return NARROW && w.kind == Kind::BF16 && tiles_for(w) == TileUse::NONE; }

inline size_t Linear::row_bytes() const {
    if (of_nibbles(kind)) return K + sizeof(float) * (K / INT4_GROUP);
    if (by_floats(*this)) return K * sizeof(float);
    return of_bytes(kind) && by_words() ? K * sizeof(int16_t) : size_t(K) / lane() * 4;
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

// Where weight (n, k) lies, counted in elements of the kind.
inline size_t place(const Linear& w, int n, int k) {
    const int lane = w.lane();
    return size_t(n / PANEL) * (size_t(w.K) * PANEL) + (size_t(k / lane) * PANEL + n % PANEL) * lane + k % lane;
}

// Some panels of a linear as one of their own, in its memory.
inline Linear panels_of(const Linear& all, int first, int count) {
    const int n = first * PANEL, N = std::min(count * PANEL, all.N - n);
    Linear some{all.kind, all.K, N, count, (char*)all.packed + first * all.panel_bytes()};
    if (all.scale) some.scale = all.scale + n;
    if (all.offset) some.offset = all.offset + n;
    if (all.bias) some.bias = all.bias + n;
    some.input = all.input;
    some.owned = false;
    return some;
}

// One of `count` linears that lie in `all` one below the other; each is of whole panels.
inline Linear part(const Linear& all, int number, int count) {
    const int panels = all.N / count / PANEL;
    return panels_of(all, number * panels, panels);
}

// NaN where a value is not finite: then so is every product of the row, and the request fails instead of going astray.
inline float row_scale(const float* x, int K) {
    __m512 most = _mm512_setzero_ps();
    __mmask16 strange = 0;
    for (int k = 0; k < K; k += LANES) {
        const __m512 size = _mm512_abs_ps(_mm512_loadu_ps(x + k));
        strange |= _mm512_cmp_ps_mask(size, _mm512_set1_ps(INFINITY), _CMP_NLT_UQ);
        most = _mm512_max_ps(most, size);
    }
    if (strange) return NAN;
    return std::max(_mm512_reduce_max_ps(most) * (1.0f / LEVELS), 1e-12f);
}

// One row of activations as unsigned bytes; returns its scale.
inline float quantize_row(const float* x, int K, uint8_t* q) {
    const float scale = row_scale(x, K);
    const __m512i offset = _mm512_set1_epi32(BYTE_OFFSET);
    const __m512 by = _mm512_set1_ps(1.0f / scale);  // a division a value would take longer than a tile's products
    for (int k = 0; k < K; k += LANES) {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + k), by));
        _mm_storeu_si128((__m128i*)(q + k), _mm512_cvtepi32_epi8(_mm512_add_epi32(whole, offset)));
    }
    return scale;
}

// The same in words.
inline float quantize_row_words(const float* x, int K, int16_t* q) {
    const float scale = row_scale(x, K);
    const __m512 by = _mm512_set1_ps(1.0f / scale);
    for (int k = 0; k < K; k += LANES) store_words(q + k, _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + k), by)));
    return scale;
}

// Room for all of it, zeros.
inline void make_room(Linear& w, const float* bias) {
    w.panels = round_up(w.N, PANEL) / PANEL;
    w.packed = allocate(w.panels * w.panel_bytes());
    std::memset(w.packed, 0, w.panels * w.panel_bytes());
    if (bias) {
        w.bias = (float*)allocate(sizeof(float) * w.panels * PANEL);
        std::memset(w.bias, 0, sizeof(float) * w.panels * PANEL);
        std::memcpy(w.bias, bias, sizeof(float) * w.N);
    }
    if (of_bytes(w.kind)) {
        w.scale = (float*)allocate(sizeof(float) * w.panels * PANEL);
        w.offset = (int32_t*)allocate(sizeof(int32_t) * w.panels * PANEL);
        std::memset(w.scale, 0, sizeof(float) * w.panels * PANEL);
        std::memset(w.offset, 0, sizeof(int32_t) * w.panels * PANEL);
    }
}

// Row n of int8 weights; q(k) gives them.
template <class Values>
inline void pack_row(Linear& w, int n, float scale, const Values& q) {
    int32_t sum = 0;
    for (int k = 0; k < w.K; k++) {
        const int8_t value = q(k);
        ((int8_t*)w.packed)[place(w, n, k)] = value;
        sum += value;
    }
    w.scale[n] = scale;
    w.offset[n] = 128 * sum;
}

// A row times the orthonormal Hadamard matrix, until the thread asks for another.
inline const float* rotated(const float* row, int K) {
    static thread_local AlignedFloats own;
    if (own.size() < size_t(K)) own.resize(K);
    hadamard(row, own.data(), K, hadamard_scale(K));
    return own.data();
}

inline void pack(Linear& w, const float* dense, const float* bias) {
    make_room(w, bias);
    parallel_for(w.N, [&](int n) {
        const float* row = dense + size_t(n) * w.K;
        if (is_rotated(w.kind)) row = rotated(row, w.K);
        if (w.kind == Kind::F32) {
            for (int k = 0; k < w.K; k++) ((float*)w.packed)[place(w, n, k)] = row[k];
        } else if (w.kind == Kind::BF16) {
            for (int k = 0; k < w.K; k++) ((uint16_t*)w.packed)[place(w, n, k)] = to_bf16(row[k]);
        } else {
            const float scale = row_scale(row, w.K), inverse = 1.0f / scale;
            pack_row(w, n, scale, [&](int k) { return (int8_t)__builtin_rintf(row[k] * inverse); });
        }
    });
}

// Of weights [N, K] that are int8 already, with a scale for each row.
inline void pack_int8(Linear& w, const int8_t* values, const float* scale, const float* bias) {
    make_room(w, bias);
    parallel_for(w.N, [&](int n) {
        const int8_t* row = values + size_t(n) * w.K;
        pack_row(w, n, scale[n], [&](int k) { return row[k]; });
    });
}

inline void pack_int4(Linear&, const uint8_t*, const uint16_t*, const uint8_t*, const float*, const float*);
inline void unpack_int4(const Linear& w, float* dense);
inline float quantize_row_int4(const Linear& w, const float* x, uint8_t* row);

inline void unpack(const Linear& w, float* dense) {
    if (of_nibbles(w.kind)) return unpack_int4(w, dense);
    parallel_for(w.N, [&](int n) {
        for (int k = 0; k < w.K; k++) {
            const size_t at = place(w, n, k);
            dense[size_t(n) * w.K + k] = w.kind == Kind::F32    ? ((float*)w.packed)[at]
                                         : w.kind == Kind::BF16 ? from_bf16(((uint16_t*)w.packed)[at])
                                                                : ((int8_t*)w.packed)[at] * w.scale[n];
        }
        if (is_rotated(w.kind)) hadamard(dense + size_t(n) * w.K, w.K, hadamard_scale(w.K));
    });
}

// Rows of activations in the form the kind multiplies. `values` is [T, K] of float, bfloat16 or offset bytes.
struct Rows {
    const void* values;
    const float* scale;  // of bytes alone
};

// Room for such rows, shared by the linears of a step one after the other; threads fill a row each.
class Prepared {
  public:
    void room(int T, int widest) {
        const size_t padded = size_t(round_up(T, 2 * TILE_ROWS)) * widest * (NARROW ? 4 : 2);  // tiles read whole, if not all is used
        if (bytes.size() < padded) bytes.resize(padded);
        if (scales.size() < size_t(T)) scales.resize(T);
    }
    void fill(const Linear& w, const float* x, int t) {
        const float* row = x + size_t(t) * w.K;
        if (is_rotated(w.kind)) row = rotated(row, w.K);
        if (of_bytes(w.kind) && by_words()) {
            scales[t] = quantize_row_words(row, w.K, (int16_t*)(bytes.data() + size_t(t) * w.row_bytes()));
            return;
        }
        if (of_bytes(w.kind)) scales[t] = quantize_row(row, w.K, bytes.data() + size_t(t) * w.K);
        if (by_floats(w)) return round_to_bf16(row, w.K, (float*)bytes.data() + size_t(t) * w.K);
        if (w.kind == Kind::BF16) to_bf16(row, w.K, (uint16_t*)bytes.data() + size_t(t) * w.K);
        if (of_nibbles(w.kind)) scales[t] = quantize_row_int4(w, row, bytes.data() + size_t(t) * w.row_bytes());
    }
    // Rows from `first` on.
    Rows of(const Linear& w, const float* x, int first = 0) const {
        if (w.kind == Kind::F32) return {x + size_t(first) * w.K, nullptr};
        return {bytes.data() + size_t(first) * w.row_bytes(), scales.data() + first};
    }
    // Row t is what row `from` of others is.
    void copy(const Linear& w, const Prepared& others, int from, int t) {
        if (w.kind == Kind::F32) return;
        std::memcpy(&bytes[size_t(t) * w.row_bytes()], &others.bytes[size_t(from) * w.row_bytes()], w.row_bytes());
        scales[t] = others.scales[from];
    }

  private:
    std::vector<uint8_t, Aligned<uint8_t>> bytes;
    std::vector<float> scales;
};

// The same four bytes in every lane.
inline __m512i four_bytes(const void* from) {
    int32_t bytes;
    std::memcpy(&bytes, from, 4);
    return _mm512_set1_epi32(bytes);
}

template <Kind KIND>
using Sum = std::conditional_t<of_bytes(KIND), __m512i, __m512>;

template <Kind KIND>
inline Sum<KIND> zero() {
    if constexpr (of_bytes(KIND)) return _mm512_setzero_si512();
    else return _mm512_setzero_ps();
}

// FAST: by the instruction for products of bytes, where a processor of this library may lack it. In a unit of this size gcc
// would call it for every product, its sums in memory.
template <Kind KIND, bool FAST = false>
__attribute__((always_inline)) inline void multiply_add(Sum<KIND>& sum, __m512i x, __m512i w) {
#ifdef MLT_AVX512
    // The instruction adds in place; gcc 12 copies the register before and after where it is an intrinsic.
    if constexpr (of_bytes(KIND)) asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
    else if constexpr (KIND == Kind::BF16) asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
    else sum = _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(w), sum);
#else
    static_assert(of_bytes(KIND));  // floats: narrow_tiles.h
    add_byte_products<FAST>(sum, x, w);
#endif
}

// The value of 16 columns from n on as it goes to y.
inline void put_value(const Linear& w, __m512 value, int n, float* y, bool add) {
    const __mmask16 mask = w.N - n >= LANES ? 0xffff : (1u << (w.N - n)) - 1;
    if (w.bias) value = _mm512_add_ps(value, _mm512_load_ps(w.bias + n));
    if (add) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, y + n));
    _mm512_mask_storeu_ps(y + n, mask, value);
}

// The same of a row's sum. OFFSET: the bytes of activations have it.
template <Kind KIND, bool OFFSET = BYTE_OFFSET != 0>
inline void put(const Linear& w, Sum<KIND> sum, int n, const float* x_scale, float* y, bool add) {
    __m512 value;
    if constexpr (of_bytes(KIND)) {
        if (OFFSET) sum = _mm512_sub_epi32(sum, _mm512_load_si512(w.offset + n));
        value = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(*x_scale));
        value = _mm512_mul_ps(value, _mm512_load_ps(w.scale + n));
    } else {
        value = sum;
    }
    put_value(w, value, n, y, add);
}

// As many rows as there are indexes, by one panel. `x` steps by `stride` 32-bit lanes a row; `y` [.., N] is written, or
// added to. `next`, or null: the panel that is to be near after this one. Folds rather than loops, without lambdas, in a
// function of its own: every accumulator then has a constant index and stays in a register
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
    (put<KIND>(w, left[M], n, x_scale + M, y + M * w.N, add), ...);
    if (n + LANES < w.N) (put<KIND>(w, right[M], n + LANES, x_scale + M, y + M * w.N, add), ...);
}

// The same by one half of the panel.
template <Kind KIND, bool FAST, size_t... M>
__attribute__((noinline)) inline void half_tile(std::index_sequence<M...>, const Linear& w, int panel, int half,
                                                const int32_t* x, int stride, const float* x_scale, float* y, bool add) {
    const int n = panel * PANEL + half * LANES;
    if (n >= w.N) return;
    Sum<KIND> sums[] = {(void(M), zero<KIND>())...};
    const int32_t* const x_end = x + w.K / w.lane();
    const char* weights = (const char*)w.packed + panel * w.panel_bytes() + half * 64;
    for (const int32_t* at = x; at < x_end; at++, weights += 128) {
        const __m512i each = _mm512_load_si512(weights);
        if (!half) __builtin_prefetch(weights + FETCH_AHEAD), __builtin_prefetch(weights + FETCH_AHEAD + 64);
        (multiply_add<KIND, FAST>(sums[M], _mm512_set1_epi32(at[M * stride]), each), ...);
    }
    (put<KIND>(w, sums[M], n, x_scale + M, y + M * w.N, add), ...);
}

template <Kind KIND, int ROWS, size_t... PAIR>
inline void pair_tile(std::index_sequence<PAIR...>, const Linear& w, int panel, int half, const int32_t* x, int stride,
                      const float* x_scale, float* y, bool add);

template <Kind KIND, bool FAST, int M = TILE>
inline void tile_of(int rows, const Linear& w, int panel, const int32_t* x, int stride, const float* s, float* y,
                    bool add, const char* next) {
    if constexpr (M > 1)
        if (rows < M) return tile_of<KIND, FAST, M - 1>(rows, w, panel, x, stride, s, y, add, next);
    constexpr std::make_index_sequence<M> each;
    if constexpr (PAIRS_OF_ROWS && FAST && of_bytes(KIND) && M > 1) {
        constexpr std::make_index_sequence<(M + 1) / 2> pairs;
        for (int half = 0; half < 2; half++) pair_tile<KIND, M>(pairs, w, panel, half, x, stride, s, y, add);
    } else if constexpr (M <= WHOLE) {
        tile<KIND, FAST>(each, w, panel, x, stride, s, y, add, next);
    } else {
        half_tile<KIND, FAST>(each, w, panel, 0, x, stride, s, y, add);
        half_tile<KIND, FAST>(each, w, panel, 1, x, stride, s, y, add);
    }
}

// What a tile just wrote and is still near; N is a multiple of LANES.
inline void gelu_tile(float* y, int rows, int panel, int N) {
    const int end = std::min((panel + 1) * PANEL, N);
    for (int m = 0; m < rows; m++, y += N)
        for (int n = panel * PANEL; n < end; n += LANES) _mm512_storeu_ps(y + n, gelu(_mm512_loadu_ps(y + n)));
}

// How many rows of activations, of `row` bytes each, stay in the second cache while panels pass: of whole tiles.
template <int ROWS>
inline int near_rows(size_t row) {
    return std::max(1, int(NEAR / (row * ROWS))) * ROWS;
}

// Calls multiply(panel, a, count, first) for rows [a, a + count), ROWS of them at most, by each panel; `first` of those that
// meet a panel one after the other. Even parts: 32 rows are 11, 11 and 10 rather than 12, 12 and 8.
template <int ROWS, class Multiply>
inline void each_tile(int T, size_t row, int first, int last, const Multiply& multiply) {
    const int tiles = (T + ROWS - 1) / ROWS, near = near_rows<ROWS>(row) / ROWS;
    for (int from = 0; from < tiles; from += near)
        for (int panel = first; panel < last; panel++)
            for (int i = from; i < std::min(from + near, tiles); i++) {
                const int a = int(int64_t(T) * i / tiles), b = int(int64_t(T) * (i + 1) / tiles);
                multiply(panel, a, b - a, i == from);
            }
}

template <Kind KIND, bool FAST = false>
inline void multiply_panels(const Linear& w, Rows x, int T, float* y, Finish finish, int first, int last) {
    const int stride = w.K / w.lane();
    const size_t row = size_t(w.K) * 4;
    const bool at_once = T <= near_rows<TILE>(row);
    each_tile<TILE>(T, row, first, last, [&](int panel, int a, int count, bool begins) {
        const int32_t* rows = (const int32_t*)x.values + size_t(a) * stride;
        const float* scale = x.scale ? x.scale + a : nullptr;
        float* out = y + size_t(a) * w.N;
        const bool fetches = begins && at_once && count >= FETCHED_FROM && panel + 1 < last;
        const char* next = fetches ? (const char*)w.packed + (panel + 1) * w.panel_bytes() : nullptr;
        tile_of<KIND, FAST>(count, w, panel, rows, stride, scale, out, finish == Finish::ADD, next);
        if (finish == Finish::GELU) gelu_tile(out, count, panel, w.N);
    });
}

template <Kind KIND, int C, int A, int B, class Tiles>
inline void multiply_add(Tiles& tiles) {
    if constexpr (of_bytes(KIND)) tiles.template multiply<C, A, B>();
    else tiles.template multiply_bf16<C, A, B>();
}

using TileSums = int32_t[2 * TILE_ROWS][PANEL];  // or float32, of bfloat16

// By tiles, A rows of them (one or two) by one panel's two halves: tiles 0 to 3 are the sums, 4 and 5 activations, 6 and
// 7 weights. `row` is the bytes of a row of activations. `next`, or null: the panel that is to be near after this one.
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
        for (int i = 0; i < STEP; i += 64) __builtin_prefetch(next + i, 0, 2);  // into the second cache
        next += STEP;
    }
    tiles.template store<0>(sums[0], PANEL * 4), tiles.template store<1>(sums[0] + LANES, PANEL * 4);
    if (A == 2) tiles.template store<2>(sums[TILE_ROWS], PANEL * 4), tiles.template store<3>(sums[TILE_ROWS] + LANES, PANEL * 4);
}

// The value as it is, rounded: the compiler joins no product with a sum that follows.
inline __m512 rounded(__m512 value) {
#ifdef MLT_AVX512
    asm("" : "+v"(value));
#endif
    return value;
}

// What a whole panel's sums are as floats, the same as put() has them; what it needs of the weights is at hand.
template <Kind KIND>
class PanelValues {
  public:
    PanelValues(const Linear& w, int panel) : has_bias(w.bias) {
        for (int i = 0; i < 2; i++) {
            const int n = panel * PANEL + i * LANES;
            if (of_bytes(KIND)) offset[i] = _mm512_load_si512(w.offset + n), scale[i] = _mm512_load_ps(w.scale + n);
            if (has_bias) bias[i] = _mm512_load_ps(w.bias + n);
        }
    }
    // Of one half of a row.
    __m512 operator()(const int32_t* sums, int half, __m512 x_scale) const {
        __m512 value;
        if constexpr (of_bytes(KIND)) {
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

// Rows of a panel's sums, `count` of activations, as they go to y.
template <Kind KIND>
inline void put_rows(const Linear& w, const TileSums& sums, int panel, int count, const float* x_scale, float* y, Finish finish) {
    const int n = panel * PANEL;
    const PanelValues<KIND> value(w, panel);
    const __mmask16 left = w.N - n >= LANES ? 0xffff : (1u << (w.N - n)) - 1;
    const __mmask16 right = w.N - n >= PANEL ? 0xffff : w.N - n > LANES ? (1u << (w.N - n - LANES)) - 1 : 0;
    float* to = y + n;
    for (int m = 0; m < count; m++, to += w.N) {
        const __m512 by = _mm512_set1_ps(x_scale ? x_scale[m] : 1.0f);
        const int32_t* sum = sums[m];
        __m512 a = value(sum, 0, by), b = value(sum, 1, by);
        if (finish == Finish::ADD) {
            a = _mm512_add_ps(a, _mm512_maskz_loadu_ps(left, to));
            b = _mm512_add_ps(b, _mm512_maskz_loadu_ps(right, to + LANES));
        }
        _mm512_mask_storeu_ps(to, left, a), _mm512_mask_storeu_ps(to + LANES, right, b);
    }
    if (finish == Finish::GELU) gelu_tile(y, count, panel, w.N);
}

// Calls put(sums, panel, a, count) for rows [a, a + count), of those that are multiplied, by each panel, while the processor
// is at the sums that follow: what a tile stored takes long to be read. Panels are fetched before they are needed, and few rows meet one while it is
// near; where there are many, the floats that come of them would be far from each other, and rows come first.
template <Kind KIND, int PARTS, class Tiles, class Put>
inline void multiply_tiles(const Linear& w, Rows x, int T, int first, int last, const Put& put) {
    constexpr int BLOCK = 2 * TILE_ROWS, FEW = 5 * BLOCK;
    const int row_bytes = w.K / w.lane() * 4, near = T <= FEW ? FEW : BLOCK;
    const auto weights_of = [&](int panel, int part) {
        return (const char*)w.packed + (panel + part * (w.panels / PARTS)) * w.panel_bytes();
    };
    Tiles tiles;
    alignas(64) TileSums sums[2][PARTS];
    struct { int panel, a, count; } done{0, 0, 0};
    int turn = 0;
    for (int from = 0; from < T; from += near)
        for (int panel = first; panel < last; panel++)
            for (int a = from; a < std::min(from + near, T); a += BLOCK, turn ^= 1) {
                const int count = std::min(T - a, BLOCK);
                const uint8_t* rows = (const uint8_t*)x.values + size_t(a) * row_bytes;
                for (int part = 0; part < PARTS; part++) {
                    const char* next = nullptr;
                    if (a == 0 && part + 1 < PARTS) next = weights_of(panel, part + 1);
                    else if (a == 0 && panel + 1 < last) next = weights_of(panel + 1, 0);
                    TileSums& into = sums[turn][part];
                    if (count > TILE_ROWS) tile_sums<KIND, 2>(tiles, weights_of(panel, part), rows, row_bytes, next, into);
                    else tile_sums<KIND, 1>(tiles, weights_of(panel, part), rows, row_bytes, next, into);
                }
                if (done.count) put(sums[turn ^ 1], done.panel, done.a, done.count);
                done = {panel, a, count};
            }
    if (done.count) put(sums[turn ^ 1], done.panel, done.a, done.count);
}

template <Kind KIND, class Tiles>
inline void multiply_tiles(const Linear& w, Rows x, int T, float* y, Finish finish, int first, int last) {
    multiply_tiles<KIND, 1, Tiles>(w, x, T, first, last, [&](const TileSums* sums, int panel, int a, int count) {
        put_rows<KIND>(w, *sums, panel, count, x.scale ? x.scale + a : nullptr, y + size_t(a) * w.N, finish);
    });
}

template <Kind KIND>
inline void multiply_words(const Linear& w, Rows x, int T, float* y, Finish finish, int first, int last);
template <Kind KIND>
inline void multiply_floats(const Linear& w, Rows x, int T, float* y, Finish finish, int first, int last);

template <Kind KIND>
inline void multiply_narrow(const Linear& w, Rows x, int T, float* y, Finish finish, int first, int last) {
    if constexpr (HAS_WORDS && of_bytes(KIND))
        if (by_words()) return multiply_words<KIND>(w, x, T, y, finish, first, last);
    const TileUse use = tiles_for(w);
    if constexpr (CHOOSES_BYTE_PRODUCTS && of_bytes(KIND))
        if (use == TileUse::NONE && byte_products())
            return multiply_panels<KIND, true>(w, x, T, y, finish, first, last);
    if constexpr (NARROW && KIND == Kind::BF16)
        if (use == TileUse::NONE) return multiply_floats<KIND>(w, x, T, y, finish, first, last);
    if (use == TileUse::HARDWARE) multiply_tiles<KIND, HardwareTiles>(w, x, T, y, finish, first, last);
    else if (use == TileUse::EMULATED) multiply_tiles<KIND, EmulatedTiles>(w, x, T, y, finish, first, last);
    else if constexpr (!NARROW || of_bytes(KIND)) multiply_panels<KIND>(w, x, T, y, finish, first, last);
}

inline void multiply_int4(const Linear& w, Rows x, int T, float* y, Finish finish, int first, int last);

template <Kind KIND>
inline void multiply_float32(const Linear& w, Rows x, int T, float* y, Finish finish, int first, int last) {
    if constexpr (NARROW) multiply_floats<KIND>(w, x, T, y, finish, first, last);
    else multiply_panels<KIND>(w, x, T, y, finish, first, last);
}

// The columns of some panels of y [T, N] = x W^T + b.
inline void multiply_range(const Linear& w, Rows x, int T, float* y, Finish finish, int first, int last) {
    if (w.kind == Kind::F32) multiply_float32<Kind::F32>(w, x, T, y, finish, first, last);
    else if (of_nibbles(w.kind)) multiply_int4(w, x, T, y, finish, first, last);
    else if (of_bytes(w.kind)) multiply_narrow<Kind::INT8>(w, x, T, y, finish, first, last);
    else multiply_narrow<Kind::BF16>(w, x, T, y, finish, first, last);
}

// Whether multiply_gated() takes it, two linears one below the other, and is not slower. With few rows what counts is that
// weights come in without a pause, which they do from end to end.
inline bool can_multiply_gated(const Linear& w, int rows) {
    return w.N % (2 * PANEL) == 0 && (rows >= GATED_FROM || tiles_for(w) != TileUse::NONE);
}

// y [T, N / 2] = act(gate) * up, of what the upper and the lower half of W make of x: the same as of multiply(), without
// the way of its floats through memory, which takes longer than the products by tiles.
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

// The same by vectors: a panel of either half at a time, of rows whose floats stay near.
template <class Act>
inline void multiply_gated_vectors(const Linear& w, Rows x, int T, float* y, int first, int last, const Act& act) {
    constexpr int MOST = 96;
    const int width = w.N / 2, half = w.panels / 2;
    const int near = std::min(MOST, near_rows<TILE>(size_t(w.K) * 4)), parts = (T + near - 1) / near;
    alignas(64) float gate[MOST][PANEL], up[MOST][PANEL];
    for (int i = 0; i < parts; i++) {
        const int from = int(int64_t(T) * i / parts), count = int(int64_t(T) * (i + 1) / parts) - from;
        const Rows rows{(const char*)x.values + size_t(from) * w.row_bytes(), x.scale ? x.scale + from : nullptr};
        for (int panel = first; panel < last; panel++) {
            multiply_range(panels_of(w, panel, 1), rows, count, gate[0], Finish::WRITE, 0, 1);
            multiply_range(panels_of(w, panel + half, 1), rows, count, up[0], Finish::WRITE, 0, 1);
            float* to = y + size_t(from) * width + panel * PANEL;
            for (int m = 0; m < count; m++, to += width)
                for (int n = 0; n < PANEL; n += LANES)
                    _mm512_storeu_ps(to + n, _mm512_mul_ps(act(_mm512_load_ps(gate[m] + n)), _mm512_load_ps(up[m] + n)));
        }
    }
}

template <class Act>
inline void multiply_gated(Team& team, const Linear& w, Rows x, int T, float* y, const Act& act) {
    const TileUse use = tiles_for(w);
    team.ranges(w.panels / 2, PANELS / 2, [&](int first, int last) {
        if (use == TileUse::NONE) return multiply_gated_vectors(w, x, T, y, first, last, act);
        const bool emulated = use == TileUse::EMULATED, bytes = of_bytes(w.kind);
        if (bytes && !emulated) multiply_gated_tiles<Kind::INT8, HardwareTiles>(w, x, T, y, first, last, act);
        else if (bytes) multiply_gated_tiles<Kind::INT8, EmulatedTiles>(w, x, T, y, first, last, act);
        else if (!emulated) multiply_gated_tiles<Kind::BF16, HardwareTiles>(w, x, T, y, first, last, act);
        else multiply_gated_tiles<Kind::BF16, EmulatedTiles>(w, x, T, y, first, last, act);
    });
}

// y [T, N] from x W^T + b, shared out by panels.
inline void multiply(Team& team, const Linear& w, Rows x, int T, float* y, Finish finish) {
    team.ranges(w.panels, PANELS, [&](int first, int last) { multiply_range(w, x, T, y, finish, first, last); });
}

}  // namespace mlt

#include "int4.h"
#ifndef MLT_AVX512
#include "narrow_tiles.h"
#endif
#ifdef MLT_AVX2
#include "word_panels.h"
#endif
#ifdef __aarch64__
#include "row_pairs.h"
#endif
