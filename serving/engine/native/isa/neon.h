// The registers of NEON with dot products, for narrow_vectors.h, and the i8mm products of row_pairs.h.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "isa/i8mm.h"

namespace mlflow_llm {

constexpr int WIDTH = 4;  // floats in a register
typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
typedef uint32_t UInts __attribute__((vector_size(16)));
typedef double Doubles __attribute__((vector_size(16)));
typedef uint16_t Shorts __attribute__((vector_size(8)));  // one per float

inline Ints lane_bits() { return Ints{1, 2, 4, 8}; }
inline int mask_of(Ints lanes) { return vaddvq_s32(int32x4_t(lanes & lane_bits())); }
inline Floats masked_load(const float* from, Ints lanes) {
    Floats x{};
    for (int i = 0; i < WIDTH; i++)
        if (lanes[i]) x[i] = from[i];
    return x;
}
inline void masked_store(float* to, Ints lanes, Floats x) {
    for (int i = 0; i < WIDTH; i++)
        if (lanes[i]) to[i] = x[i];
}

inline Floats fmadd(Floats a, Floats b, Floats c) {
    return Floats(vfmaq_f32(float32x4_t(c), float32x4_t(a), float32x4_t(b)));
}
inline void add_product(Floats& sum, Floats a, Floats b) { sum = fmadd(a, b, sum); }
inline Floats rounded(Floats a) { return Floats(vrndnq_f32(float32x4_t(a))); }
inline Ints nearest(Floats a) { return Ints(vcvtnq_s32_f32(float32x4_t(a))); }
inline Ints widen_bytes(const uint8_t* a) {
    typedef uint8_t Bytes __attribute__((vector_size(WIDTH)));
    Bytes bytes;
    std::memcpy(&bytes, a, sizeof bytes);
    return __builtin_convertvector(bytes, Ints);
}
inline Floats half_to_float(Shorts a) { return Floats(vcvt_f32_f16(float16x4_t(a))); }

inline Floats interleave_low(Floats a, Floats b) { return Floats(vzip1q_f32(float32x4_t(a), float32x4_t(b))); }
inline Floats interleave_high(Floats a, Floats b) { return Floats(vzip2q_f32(float32x4_t(a), float32x4_t(b))); }
inline Doubles interleave_low(Doubles a, Doubles b) { return Doubles(vzip1q_f64(float64x2_t(a), float64x2_t(b))); }
inline Doubles interleave_high(Doubles a, Doubles b) { return Doubles(vzip2q_f64(float64x2_t(a), float64x2_t(b))); }
inline Floats quarters(const Floats (&a)[4], const Floats (&b)[4], int part, bool odd) {
    return (part < 2 ? a : b)[part % 2 * 2 + odd];
}

// Store the lowest byte of each lane.
inline void narrow_to_bytes(const Ints (&a)[4], int8_t* to) {
    const auto half = [&](int i) {
        return vcombine_s16(vmovn_s32(int32x4_t(a[i])), vmovn_s32(int32x4_t(a[i + 1])));
    };
    vst1q_s8(to, vcombine_s8(vmovn_s16(half(0)), vmovn_s16(half(2))));
}

constexpr bool HAS_16_REGISTERS = false;
constexpr bool HAS_OPTIONAL_BYTE_PRODUCTS = true;
constexpr int BYTE_OFFSET = 0;  // activations are signed bytes, as sdot takes them

// Single rows always use sdot; only products of row pairs have an instruction that some CPUs lack.
template <bool FAST>
inline Ints byte_products(Ints sum, Ints x, Ints w) {
    return Ints(vdotq_s32(int32x4_t(sum), int8x16_t(x), int8x16_t(w)));
}

template <bool>
inline void add_nibble_products(Ints& sum, Ints w, Ints x) { sum = byte_products<false>(sum, x, w); }
template <bool>
inline Floats sums_to_float(Ints sum) { return __builtin_convertvector(sum, Floats); }

// Compute sum [2][2] += x [2 rows][8] times w [2 columns][8].
inline __attribute__((always_inline)) void add_pair_products(Ints& sum, Ints x, Ints w) {
#if __GNUC__ >= 10
    asm(".arch_extension i8mm\n\tsmmla %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(x), "w"(w));
#endif
}

// Return eight bytes of row a and eight of row b.
inline Ints pack_row_pair(const int32_t* a, const int32_t* b) { return Ints(vcombine_s32(vld1_s32(a), vld1_s32(b))); }
inline Ints zip_low(Ints a, Ints b) { return Ints(vzip1q_s32(int32x4_t(a), int32x4_t(b))); }
inline Ints zip_high(Ints a, Ints b) { return Ints(vzip2q_s32(int32x4_t(a), int32x4_t(b))); }
inline Ints unzip_halves(Ints a, Ints b, bool upper) {
    const int64x2_t x = int64x2_t(a), y = int64x2_t(b);
    return Ints(upper ? vzip2q_s64(x, y) : vzip1q_s64(x, y));
}

}  // namespace mlflow_llm
