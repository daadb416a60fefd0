// The registers of SVE at a vector length of 256 bits, for narrow_vectors.h, and the i8mm products of row_pairs.h. GNU
// vectors are used, and SVE's own types of that length where an instruction has no operator; the compiler converts
// between them. Compiled with -msve-vector-bits=256 and wrong at any other length (see native.cpp).
#pragma once

#include <arm_sve.h>

#include <cstdint>
#include <cstring>

#include "isa/i8mm.h"

namespace mlflow_llm {

constexpr int WIDTH = 8;  // floats in a register
typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef uint32_t UInts __attribute__((vector_size(32)));
typedef double Doubles __attribute__((vector_size(32)));
typedef uint16_t Shorts __attribute__((vector_size(16)));  // one per float

typedef svfloat32_t SveFloats __attribute__((arm_sve_vector_bits(256)));
typedef svfloat64_t SveDoubles __attribute__((arm_sve_vector_bits(256)));
typedef svint32_t SveInts __attribute__((arm_sve_vector_bits(256)));
typedef svint64_t SveLongs __attribute__((arm_sve_vector_bits(256)));
typedef svint16_t SveShorts __attribute__((arm_sve_vector_bits(256)));
typedef svint8_t SveBytes __attribute__((arm_sve_vector_bits(256)));

// Return this thread's actual vector length; svcntb() is a constant of the compilation.
inline int vector_bytes() {
    int64_t bytes;
    asm volatile("rdvl %0, #1" : "=r"(bytes));
    return int(bytes);
}

inline Ints lane_bits() { return Ints{1, 2, 4, 8, 16, 32, 64, 128}; }
inline int mask_of(Ints lanes) { return svorv_s32(svptrue_b32(), SveInts(lanes & lane_bits())); }
inline svbool_t active(Ints lanes) { return svcmpne_n_s32(svptrue_b32(), SveInts(lanes), 0); }
inline Floats masked_load(const float* from, Ints lanes) { return Floats(SveFloats(svld1_f32(active(lanes), from))); }
inline void masked_store(float* to, Ints lanes, Floats x) { svst1_f32(active(lanes), to, SveFloats(x)); }

inline Floats fmadd(Floats a, Floats b, Floats c) {
    return Floats(SveFloats(svmla_f32_x(svptrue_b32(), SveFloats(c), SveFloats(a), SveFloats(b))));
}
inline void add_product(Floats& sum, Floats a, Floats b) { sum = fmadd(a, b, sum); }
inline Floats rounded(Floats a) { return Floats(SveFloats(svrintn_f32_x(svptrue_b32(), SveFloats(a)))); }
inline Ints nearest(Floats a) { return Ints(SveInts(svcvt_s32_f32_x(svptrue_b32(), SveFloats(rounded(a))))); }
inline Ints widen_bytes(const uint8_t* a) {
    typedef uint8_t Bytes __attribute__((vector_size(WIDTH)));
    Bytes bytes;
    std::memcpy(&bytes, a, sizeof bytes);
    return __builtin_convertvector(bytes, Ints);
}
inline Floats half_to_float(Shorts a) {
    const SveInts wide = SveInts(__builtin_convertvector(a, Ints));
    return Floats(SveFloats(svcvt_f32_f16_x(svptrue_b32(), svreinterpret_f16_s32(wide))));
}

inline Doubles even_of_pairs(Doubles a, Doubles b) {
    return Doubles(SveDoubles(svtrn1_f64(SveDoubles(a), SveDoubles(b))));
}
inline Doubles odd_of_pairs(Doubles a, Doubles b) {
    return Doubles(SveDoubles(svtrn2_f64(SveDoubles(a), SveDoubles(b))));
}
// The even lanes of a and b next to each other, and the odd ones; trn then selects those of the lower half of each
// quarter.
inline Doubles even_lanes(Floats a, Floats b) { return Doubles(SveFloats(svtrn1_f32(SveFloats(a), SveFloats(b)))); }
inline Doubles odd_lanes(Floats a, Floats b) { return Doubles(SveFloats(svtrn2_f32(SveFloats(a), SveFloats(b)))); }
inline Floats interleave_low(Floats a, Floats b) { return Floats(even_of_pairs(even_lanes(a, b), odd_lanes(a, b))); }
inline Floats interleave_high(Floats a, Floats b) { return Floats(odd_of_pairs(even_lanes(a, b), odd_lanes(a, b))); }
inline Doubles interleave_low(Doubles a, Doubles b) { return even_of_pairs(a, b); }
inline Doubles interleave_high(Doubles a, Doubles b) { return odd_of_pairs(a, b); }
inline Floats quarters(const Floats (&a)[2], const Floats (&b)[2], int part, bool odd) {
    const Floats* from = part ? b : a;
    const SveFloats first = SveFloats(from[0]), second = SveFloats(from[1]);
    const svbool_t lower = svptrue_pat_b32(SV_VL4);
    if (odd) return Floats(SveFloats(svsel_f32(lower, svext_f32(first, first, 4), second)));
    return Floats(SveFloats(svsplice_f32(lower, first, second)));
}

// Store the lowest byte of each lane.
inline void narrow_to_bytes(const Ints (&a)[2], int8_t* to) {
    const SveShorts pairs = svuzp1_s16(svreinterpret_s16_s32(SveInts(a[0])), svreinterpret_s16_s32(SveInts(a[1])));
    const SveBytes bytes = svreinterpret_s8_s16(pairs);
    svst1_s8(svptrue_pat_b8(SV_VL16), to, svuzp1_s8(bytes, bytes));
}

constexpr bool HAS_16_REGISTERS = false;
constexpr bool HAS_OPTIONAL_BYTE_PRODUCTS = true;
constexpr int BYTE_OFFSET = 0;  // activations are signed bytes, as sdot takes them

// Single rows always use sdot; only products of row pairs have an instruction that some CPUs lack.
template <bool FAST>
inline Ints byte_products(Ints sum, Ints x, Ints w) {
    return Ints(SveInts(svdot_s32(SveInts(sum), svreinterpret_s8_s32(SveInts(x)), svreinterpret_s8_s32(SveInts(w)))));
}

template <bool>
inline void add_nibble_products(Ints& sum, Ints w, Ints x) { sum = byte_products<false>(sum, x, w); }
template <bool>
inline Floats sums_to_float(Ints sum) { return __builtin_convertvector(sum, Floats); }

// In each half of a register: sum [2][2] += x [2 rows][8] times w [2 columns][8].
inline __attribute__((always_inline)) void add_pair_products(Ints& sum, Ints x, Ints w) {
    asm(".arch_extension i8mm\n\tsmmla %0.s, %1.b, %2.b" : "+w"(sum) : "w"(x), "w"(w));
}

// Return eight bytes of row a and eight of row b, in each half.
inline Ints pack_row_pair(const int32_t* a, const int32_t* b) {
    int64_t first, second;
    std::memcpy(&first, a, sizeof first), std::memcpy(&second, b, sizeof second);
    return Ints(SveLongs(svzip1_s64(svdup_n_s64(first), svdup_n_s64(second))));
}
inline Ints zip_low(Ints a, Ints b) { return Ints(SveInts(svzip1_s32(SveInts(a), SveInts(b)))); }
inline Ints zip_high(Ints a, Ints b) { return Ints(SveInts(svzip2_s32(SveInts(a), SveInts(b)))); }
// Return the lower (upper) eight bytes of each half of a, then of b.
inline Ints unzip_halves(Ints a, Ints b, bool upper) {
    const svint64_t x = svreinterpret_s64_s32(SveInts(a)), y = svreinterpret_s64_s32(SveInts(b));
    return Ints(SveLongs(upper ? svuzp2_s64(x, y) : svuzp1_s64(x, y)));
}

}  // namespace mlflow_llm
