// Registers of ARM's NEON with dot products, as narrow_vectors.h needs them; and products of i8mm, for row_pairs.h.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "i8mm.h"

namespace mlt {

constexpr int WIDTH = 4;  // floats in a register
typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));
typedef double Doubles __attribute__((vector_size(16)));
typedef uint16_t Shorts __attribute__((vector_size(8)));  // as many as there are floats

inline Ints lane_bits() { return Ints{1, 2, 4, 8}; }
inline int mask_of(Ints lanes) { return vaddvq_s32(int32x4_t(lanes & lane_bits())); }
inline Floats load_some(const float* from, Ints lanes) {
    Floats x{};
    for (int i = 0; i < WIDTH; i++)
        if (lanes[i]) x[i] = from[i];
    return x;
}
inline void store_some(float* to, Ints lanes, Floats x) {
    for (int i = 0; i < WIDTH; i++)
        if (lanes[i]) to[i] = x[i];
}

inline Floats fused(Floats a, Floats b, Floats c) {
    return Floats(vfmaq_f32(float32x4_t(c), float32x4_t(a), float32x4_t(b)));
}
inline void add_product(Floats& sum, Floats a, Floats b) { sum = fused(a, b, sum); }
inline Floats rounded(Floats a) { return Floats(vrndnq_f32(float32x4_t(a))); }
inline Ints nearest(Floats a) { return Ints(vcvtnq_s32_f32(float32x4_t(a))); }
inline Ints from_bytes(const uint8_t* a) {
    typedef uint8_t Bytes __attribute__((vector_size(WIDTH)));
    Bytes bytes;
    std::memcpy(&bytes, a, sizeof bytes);
    return __builtin_convertvector(bytes, Ints);
}
inline Floats from_halves(Shorts a) { return Floats(vcvt_f32_f16(float16x4_t(a))); }

inline Floats low_of_pairs(Floats a, Floats b) { return Floats(vzip1q_f32(float32x4_t(a), float32x4_t(b))); }
inline Floats high_of_pairs(Floats a, Floats b) { return Floats(vzip2q_f32(float32x4_t(a), float32x4_t(b))); }
inline Doubles low_of_pairs(Doubles a, Doubles b) { return Doubles(vzip1q_f64(float64x2_t(a), float64x2_t(b))); }
inline Doubles high_of_pairs(Doubles a, Doubles b) { return Doubles(vzip2q_f64(float64x2_t(a), float64x2_t(b))); }
inline Floats quarters(const Floats (&a)[4], const Floats (&b)[4], int part, bool odd) {
    return (part < 2 ? a : b)[part % 2 * 2 + odd];
}

// The lowest byte of each lane.
inline void low_bytes(const Ints (&a)[4], int8_t* to) {
    const auto half = [&](int i) {
        return vcombine_s16(vmovn_s32(int32x4_t(a[i])), vmovn_s32(int32x4_t(a[i + 1])));
    };
    vst1q_s8(to, vcombine_s8(vmovn_s16(half(0)), vmovn_s16(half(2))));
}

constexpr bool FEW_REGISTERS = false;
constexpr bool CHOOSES_BYTE_PRODUCTS = true;
constexpr int BYTE_OFFSET = 0;  // bytes of activations are signed, as sdot takes them

// One row's go by sdot wherever they are; only rows two by two have an instruction that not all processors have.
template <bool FAST>
inline Ints byte_products(Ints sum, Ints x, Ints w) {
    return Ints(vdotq_s32(int32x4_t(sum), int8x16_t(x), int8x16_t(w)));
}

template <bool>
inline void add_nibble_products(Ints& sum, Ints w, Ints x) { sum = byte_products<false>(sum, x, w); }
template <bool>
inline Floats whole_sums(Ints sum) { return __builtin_convertvector(sum, Floats); }

// sum [2][2] += x [2 rows][8] by w [2 columns][8].
inline __attribute__((always_inline)) void add_pair_products(Ints& sum, Ints x, Ints w) {
#if __GNUC__ >= 10
    asm(".arch_extension i8mm\n\tsmmla %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(x), "w"(w));
#endif
}

// Eight bytes of one row, eight of another.
inline Ints joined_halves(const int32_t* a, const int32_t* b) { return Ints(vcombine_s32(vld1_s32(a), vld1_s32(b))); }
inline Ints low_lanes_zipped(Ints a, Ints b) { return Ints(vzip1q_s32(int32x4_t(a), int32x4_t(b))); }
inline Ints high_lanes_zipped(Ints a, Ints b) { return Ints(vzip2q_s32(int32x4_t(a), int32x4_t(b))); }
inline Ints halves_of(Ints a, Ints b, bool upper) {
    const int64x2_t x = int64x2_t(a), y = int64x2_t(b);
    return Ints(upper ? vzip2q_s64(x, y) : vzip1q_s64(x, y));
}

}  // namespace mlt
