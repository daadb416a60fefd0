// The registers of AVX2 with FMA, for narrow_vectors.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "isa/avx_vnni.h"

namespace mlflow_llm {

constexpr int WIDTH = 8;  // floats in a register
typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef uint32_t UInts __attribute__((vector_size(32)));
typedef double Doubles __attribute__((vector_size(32)));
typedef uint16_t Shorts __attribute__((vector_size(16)));  // one per float

inline Ints lane_bits() { return Ints{1, 2, 4, 8, 16, 32, 64, 128}; }
inline int mask_of(Ints lanes) { return _mm256_movemask_ps(::__m256(lanes)); }
inline Floats masked_load(const float* from, Ints lanes) { return _mm256_maskload_ps(from, ::__m256i(lanes)); }
inline void masked_store(float* to, Ints lanes, Floats x) { _mm256_maskstore_ps(to, ::__m256i(lanes), x); }

inline Floats fmadd(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
// In assembly: gcc 12 would overwrite a factor with the sum, and then run out of registers.
inline __attribute__((always_inline)) void add_product(Floats& sum, Floats a, Floats b) {
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
}
inline Floats rounded(Floats a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Ints nearest(Floats a) { return Ints(_mm256_cvtps_epi32(a)); }
inline Floats half_to_float(Shorts a) { return _mm256_cvtph_ps(::__m128i(a)); }  // F16C
inline Ints widen_bytes(const uint8_t* a) { return Ints(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const ::__m128i*)a))); }

inline Floats interleave_low(Floats a, Floats b) { return _mm256_unpacklo_ps(a, b); }
inline Floats interleave_high(Floats a, Floats b) { return _mm256_unpackhi_ps(a, b); }
inline Doubles interleave_low(Doubles a, Doubles b) { return _mm256_unpacklo_pd(a, b); }
inline Doubles interleave_high(Doubles a, Doubles b) { return _mm256_unpackhi_pd(a, b); }
inline Floats quarters(const Floats (&a)[2], const Floats (&b)[2], int part, bool odd) {
    const Floats* from = part ? b : a;
    return odd ? _mm256_permute2f128_ps(from[0], from[1], 0x31) : _mm256_permute2f128_ps(from[0], from[1], 0x20);
}

// Store the lowest byte of each lane.
inline void narrow_to_bytes(const Ints (&a)[2], int8_t* to) {
    const ::__m256i low = _mm256_set1_epi32(0xff);
    const ::__m256i pairs =
        _mm256_packs_epi32(_mm256_and_si256(::__m256i(a[0]), low), _mm256_and_si256(::__m256i(a[1]), low));
    const ::__m256i inner = _mm256_permute4x64_epi64(pairs, 0xd8);
    _mm_storeu_si128((::__m128i*)to,
                     _mm_packus_epi16(_mm256_castsi256_si128(inner), _mm256_extracti128_si256(inner, 1)));
}

constexpr bool HAS_16_REGISTERS = true;  // rather than 32
constexpr bool HAS_OPTIONAL_BYTE_PRODUCTS = true;
constexpr int BYTE_OFFSET = 128;  // activations are unsigned bytes

// vpmaddubsw would saturate, so without AVX-VNNI bytes are widened to 16 bits first, even and odd ones separately.
template <bool FAST>
inline Ints byte_products(Ints sum, Ints x, Ints w) {
    if constexpr (FAST) {
#if __GNUC__ >= 11  // its assembler knows AVX-VNNI
        asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(x), "x"(w));
        return sum;
#endif
    }
    const ::__m256i bytes = ::__m256i(w), row = ::__m256i(x);
    const ::__m256i even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), odd = _mm256_srai_epi16(bytes, 8);
    const ::__m256i row_even = _mm256_and_si256(row, _mm256_set1_epi16(0xff)), row_odd = _mm256_srli_epi16(row, 8);
    const Ints evens = Ints(_mm256_madd_epi16(row_even, even)), odds = Ints(_mm256_madd_epi16(row_odd, odd));
    return sum + (evens + odds);
}

// Multiply unsigned bytes of at most 15 by signed bytes of at most 127: 32 products sum up to a 16-bit half of a lane
// without overflow; FAST uses a dot-product instruction. In assembly for the reason given in words.h.
template <bool FAST>
inline __attribute__((always_inline)) void add_nibble_products(Ints& sum, Ints w, Ints x) {
    if constexpr (FAST) {
        sum = byte_products<true>(sum, w, x);
    } else {
        Ints products;
        asm("vpmaddubsw %2, %3, %1\n\tvpaddw %1, %0, %0" : "+x"(sum), "=&x"(products) : "x"(x), "x"(w));
    }
}
template <bool FAST>
inline Floats sums_to_float(Ints sum) {
    return _mm256_cvtepi32_ps(FAST ? ::__m256i(sum) : _mm256_madd_epi16(::__m256i(sum), _mm256_set1_epi16(1)));
}

}  // namespace mlflow_llm
