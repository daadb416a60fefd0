// Vectors of sixteen lanes on CPUs with narrower registers: two of AVX2 or SVE, four of NEON. The kernels are written
// in AVX-512 intrinsics; this header defines those that they use under the same names, in this namespace, so that one
// source serves all CPUs.
//
// Every operation matches AVX-512 lane by lane, reductions included, in the same order. The exceptions are the payload
// of a NaN and where the compiler contracts a product and a sum (it does not here, see setup.py).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __x86_64__
#include "isa/avx2.h"
#elif defined(MLFLOW_LLM_SVE)
#include "isa/sve.h"
#else
#include "isa/neon.h"
#endif

namespace mlflow_llm {

#ifndef __x86_64__
enum Comparison { _CMP_EQ_OQ, _CMP_NLT_UQ, _CMP_GE_OQ, _CMP_GT_OQ };
enum Hint { _MM_HINT_T0 };
inline void _mm_prefetch(const char* at, Hint) { __builtin_prefetch(at); }
#endif

constexpr int PARTS = 16 / WIDTH;  // registers of a vector
static_assert(PARTS == 2 || PARTS == 4);

struct __m512 { Floats part[PARTS]; };
struct __m512i { Ints part[PARTS]; };
struct __m512d { Doubles part[PARTS]; };
struct __m256 { Floats part[PARTS / 2]; };
struct __m256i { Shorts part[PARTS]; };  // sixteen values of 16 bits
struct __m128i { int8_t part[16]; };
using __mmask16 = uint16_t;
using __mmask32 = uint32_t;

#define MLFLOW_LLM_INLINE inline __attribute__((always_inline))

// Calls instead of a loop: gcc allocates registers before it unrolls, and would keep the array in memory.
template <class Vector, class Make>
MLFLOW_LLM_INLINE Vector map_parts(const Make& make) {
    if constexpr (PARTS == 2) return {{make(0), make(1)}};
    else return {{make(0), make(1), make(2), make(3)}};
}

template <class Part>
MLFLOW_LLM_INLINE Part load_part(const void* from) {
    Part part;
    std::memcpy(&part, from, sizeof part);
    return part;
}

MLFLOW_LLM_INLINE Floats broadcast(float x) { return Floats{} + x; }
MLFLOW_LLM_INLINE Ints broadcast(int32_t x) { return Ints{} + x; }

// -- loads and stores -------------------------------------------------------------------------------------------------

MLFLOW_LLM_INLINE __m512 _mm512_loadu_ps(const float* from) {
    return map_parts<__m512>([&](int i) { return load_part<Floats>(from + i * WIDTH); });
}
MLFLOW_LLM_INLINE __m512 _mm512_load_ps(const void* from) { return _mm512_loadu_ps((const float*)from); }
MLFLOW_LLM_INLINE __m512i _mm512_loadu_si512(const void* from) {
    return map_parts<__m512i>([&](int i) { return load_part<Ints>((const int32_t*)from + i * WIDTH); });
}
MLFLOW_LLM_INLINE __m512i _mm512_load_si512(const void* from) { return _mm512_loadu_si512(from); }
MLFLOW_LLM_INLINE __m256i _mm256_loadu_si256(const __m256i* from) {
    return map_parts<__m256i>([&](int i) { return load_part<Shorts>((const uint16_t*)from + i * WIDTH); });
}
MLFLOW_LLM_INLINE __m128i _mm_loadu_si128(const __m128i* from) { return load_part<__m128i>(from); }
MLFLOW_LLM_INLINE void _mm512_storeu_ps(float* to, __m512 x) {
    for (int i = 0; i < PARTS; i++) std::memcpy(to + i * WIDTH, &x.part[i], sizeof x.part[i]);
}
MLFLOW_LLM_INLINE void _mm512_store_ps(float* to, __m512 x) { _mm512_storeu_ps(to, x); }
MLFLOW_LLM_INLINE void _mm512_store_si512(void* to, __m512i x) { std::memcpy(to, &x, sizeof x); }
MLFLOW_LLM_INLINE void _mm256_storeu_si256(__m256i* to, __m256i x) { std::memcpy((void*)to, &x, sizeof x); }
MLFLOW_LLM_INLINE void _mm_storeu_si128(__m128i* to, __m128i x) { std::memcpy((void*)to, &x, sizeof x); }

// -- masks ------------------------------------------------------------------------------------------------------------

// Return all bits set in the lanes of `mask`.
MLFLOW_LLM_INLINE Ints lane_mask(__mmask16 mask, int part) {
    return (broadcast(int32_t(mask) >> (part * WIDTH)) & lane_bits()) != 0;
}
template <class Compare>
MLFLOW_LLM_INLINE __mmask16 compare_lanes(const Compare& compare) {
    int mask = 0;
    for (int i = 0; i < PARTS; i++) mask |= mask_of(Ints(compare(i))) << (i * WIDTH);
    return __mmask16(mask);
}

MLFLOW_LLM_INLINE __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int how) {
    switch (how) {
        case _CMP_GE_OQ: return compare_lanes([&](int i) { return a.part[i] >= b.part[i]; });
        case _CMP_GT_OQ: return compare_lanes([&](int i) { return a.part[i] > b.part[i]; });
        case _CMP_EQ_OQ: return compare_lanes([&](int i) { return a.part[i] == b.part[i]; });
        case _CMP_NLT_UQ: return compare_lanes([&](int i) { return ~(a.part[i] < b.part[i]); });
    }
    __builtin_unreachable();
}
MLFLOW_LLM_INLINE __mmask16 _mm512_mask_cmp_ps_mask(__mmask16 in, __m512 a, __m512 b, int how) {
    return in & _mm512_cmp_ps_mask(a, b, how);
}
MLFLOW_LLM_INLINE __mmask16 _mm512_cmple_epi32_mask(__m512i a, __m512i b) {
    return compare_lanes([&](int i) { return a.part[i] <= b.part[i]; });
}
MLFLOW_LLM_INLINE __mmask16 _mm512_cmplt_epi32_mask(__m512i a, __m512i b) {
    return compare_lanes([&](int i) { return a.part[i] < b.part[i]; });
}
MLFLOW_LLM_INLINE __m512 _mm512_mask_blend_ps(__mmask16 mask, __m512 no, __m512 yes) {
    return map_parts<__m512>([&](int i) { return lane_mask(mask, i) ? yes.part[i] : no.part[i]; });
}
MLFLOW_LLM_INLINE __m512 _mm512_mask_mov_ps(__m512 no, __mmask16 mask, __m512 yes) {
    return _mm512_mask_blend_ps(mask, no, yes);
}

// Lanes outside the mask are not accessed in memory.
MLFLOW_LLM_INLINE __m512 _mm512_mask_loadu_ps(__m512 no, __mmask16 mask, const float* from) {
    if (mask == 0xffff) return _mm512_loadu_ps(from);
    return map_parts<__m512>([&](int i) {
        const Ints in = lane_mask(mask, i);
        return in ? masked_load(from + i * WIDTH, in) : no.part[i];
    });
}
MLFLOW_LLM_INLINE void _mm512_mask_storeu_ps(float* to, __mmask16 mask, __m512 x) {
    if (mask == 0xffff) return _mm512_storeu_ps(to, x);
    for (int i = 0; i < PARTS; i++) masked_store(to + i * WIDTH, lane_mask(mask, i), x.part[i]);
}
MLFLOW_LLM_INLINE __m512i _mm512_maskz_loadu_epi16(__mmask32 mask, const void* from) {
    alignas(64) uint16_t lanes[32];
    for (int i = 0; i < 32; i++) lanes[i] = mask >> i & 1 ? ((const uint16_t*)from)[i] : 0;
    return _mm512_load_si512(lanes);
}

// -- float32 ----------------------------------------------------------------------------------------------------------

MLFLOW_LLM_INLINE __m512 _mm512_set1_ps(float x) {
    return map_parts<__m512>([&](int) { return broadcast(x); });
}
MLFLOW_LLM_INLINE __m512 _mm512_setzero_ps() { return _mm512_set1_ps(0.0f); }
MLFLOW_LLM_INLINE __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const float* from) {
    return _mm512_mask_loadu_ps(_mm512_setzero_ps(), mask, from);
}
MLFLOW_LLM_INLINE __m512 _mm512_add_ps(__m512 a, __m512 b) {
    return map_parts<__m512>([&](int i) { return a.part[i] + b.part[i]; });
}
MLFLOW_LLM_INLINE __m512 _mm512_sub_ps(__m512 a, __m512 b) {
    return map_parts<__m512>([&](int i) { return a.part[i] - b.part[i]; });
}
MLFLOW_LLM_INLINE __m512 _mm512_mul_ps(__m512 a, __m512 b) {
    return map_parts<__m512>([&](int i) { return a.part[i] * b.part[i]; });
}
MLFLOW_LLM_INLINE __m512 _mm512_div_ps(__m512 a, __m512 b) {
    return map_parts<__m512>([&](int i) { return a.part[i] / b.part[i]; });
}
MLFLOW_LLM_INLINE __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
    return map_parts<__m512>([&](int i) { return fmadd(a.part[i], b.part[i], c.part[i]); });
}
MLFLOW_LLM_INLINE __m512 _mm512_fmsub_ps(__m512 a, __m512 b, __m512 c) {
    return map_parts<__m512>([&](int i) { return fmadd(a.part[i], b.part[i], -c.part[i]); });
}
MLFLOW_LLM_INLINE __m512 _mm512_fnmadd_ps(__m512 a, __m512 b, __m512 c) {
    return map_parts<__m512>([&](int i) { return fmadd(-a.part[i], b.part[i], c.part[i]); });
}
MLFLOW_LLM_INLINE __m512 _mm512_max_ps(__m512 a, __m512 b) {  // returns b if a is NaN
    return map_parts<__m512>([&](int i) { return a.part[i] > b.part[i] ? a.part[i] : b.part[i]; });
}
MLFLOW_LLM_INLINE __m512 _mm512_min_ps(__m512 a, __m512 b) {
    return map_parts<__m512>([&](int i) { return a.part[i] < b.part[i] ? a.part[i] : b.part[i]; });
}
MLFLOW_LLM_INLINE __m512 _mm512_abs_ps(__m512 a) {
    return map_parts<__m512>([&](int i) { return Floats(Ints(a.part[i]) & 0x7fffffff); });
}
MLFLOW_LLM_INLINE __m512 _mm512_roundscale_ps(__m512 a, int) {  // always to the nearest integer, ties to even
    return map_parts<__m512>([&](int i) { return rounded(a.part[i]); });
}
MLFLOW_LLM_INLINE __m512 _mm512_mask_add_ps(__m512 no, __mmask16 mask, __m512 a, __m512 b) {
    return _mm512_mask_blend_ps(mask, no, _mm512_add_ps(a, b));
}

MLFLOW_LLM_INLINE Floats power_of_two(Ints exponent) { return Floats((exponent + 127) << 23); }

// Return a 2^n for integral n, in two steps, since 2^n may overflow where a 2^n does not.
MLFLOW_LLM_INLINE __m512 _mm512_maskz_scalef_ps(__mmask16 mask, __m512 a, __m512 n) {
    return map_parts<__m512>([&](int i) {
        const Ints whole = nearest(n.part[i]), first = whole >> 1, second = whole - first;
        return Floats(lane_mask(mask, i) & Ints(a.part[i] * power_of_two(first) * power_of_two(second)));
    });
}

// -- over lanes -------------------------------------------------------------------------------------------------------

MLFLOW_LLM_INLINE __m256 _mm512_extractf32x8_ps(__m512 x, int upper) {
    __m256 half;
    for (int i = 0; i < PARTS / 2; i++) half.part[i] = x.part[upper * PARTS / 2 + i];
    return half;
}
MLFLOW_LLM_INLINE __m256 _mm512_castps512_ps256(__m512 x) { return _mm512_extractf32x8_ps(x, 0); }
MLFLOW_LLM_INLINE float _mm512_reduce_add_ps(__m512 x) {
    alignas(64) float lanes[16];
    _mm512_store_ps(lanes, x);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}
MLFLOW_LLM_INLINE float _mm512_reduce_max_ps(__m512 x) {
    alignas(64) float lanes[16];
    _mm512_store_ps(lanes, x);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
}
MLFLOW_LLM_INLINE __m512 _mm512_unpacklo_ps(__m512 a, __m512 b) {
    return map_parts<__m512>([&](int i) { return interleave_low(a.part[i], b.part[i]); });
}
MLFLOW_LLM_INLINE __m512 _mm512_unpackhi_ps(__m512 a, __m512 b) {
    return map_parts<__m512>([&](int i) { return interleave_high(a.part[i], b.part[i]); });
}
MLFLOW_LLM_INLINE __m512d _mm512_castps_pd(__m512 x) {
    return map_parts<__m512d>([&](int i) { return Doubles(x.part[i]); });
}
MLFLOW_LLM_INLINE __m512 _mm512_castpd_ps(__m512d x) {
    return map_parts<__m512>([&](int i) { return Floats(x.part[i]); });
}
MLFLOW_LLM_INLINE __m512d _mm512_unpacklo_pd(__m512d a, __m512d b) {
    return map_parts<__m512d>([&](int i) { return interleave_low(a.part[i], b.part[i]); });
}
MLFLOW_LLM_INLINE __m512d _mm512_unpackhi_pd(__m512d a, __m512d b) {
    return map_parts<__m512d>([&](int i) { return interleave_high(a.part[i], b.part[i]); });
}
// Select quarters 0 and 2 (or 1 and 3) of a and of b.
MLFLOW_LLM_INLINE __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int which) {
    return map_parts<__m512>([&](int i) { return quarters(a.part, b.part, i, which == 0xdd); });
}

// The counterpart of xor_lanes() in simd.h.
template <int STRIDE>
MLFLOW_LLM_INLINE __m512 xor_lanes(__m512 x) {
    if constexpr (STRIDE >= WIDTH) return map_parts<__m512>([&](int i) { return x.part[i ^ STRIDE / WIDTH]; });
    else
        return map_parts<__m512>([&](int i) {
            const Floats a = x.part[i];
            if constexpr (WIDTH == 4) return Floats{a[STRIDE], a[1 ^ STRIDE], a[2 ^ STRIDE], a[3 ^ STRIDE]};
            else return Floats{a[STRIDE], a[1 ^ STRIDE], a[2 ^ STRIDE], a[3 ^ STRIDE],
                               a[4 ^ STRIDE], a[5 ^ STRIDE], a[6 ^ STRIDE], a[7 ^ STRIDE]};
        });
}

// -- float64 ----------------------------------------------------------------------------------------------------------

MLFLOW_LLM_INLINE __m512d _mm512_setzero_pd() {
    const Doubles zero{};
    return map_parts<__m512d>([&](int) { return zero; });
}
MLFLOW_LLM_INLINE __m512d _mm512_add_pd(__m512d a, __m512d b) {
    return map_parts<__m512d>([&](int i) { return a.part[i] + b.part[i]; });
}
MLFLOW_LLM_INLINE __m512d _mm512_cvtps_pd(__m256 x) {
    alignas(32) float lanes[8];
    std::memcpy(lanes, &x, sizeof lanes);
    return map_parts<__m512d>([&](int i) {
        Doubles wide;
        for (int j = 0; j < WIDTH / 2; j++) wide[j] = lanes[i * (WIDTH / 2) + j];
        return wide;
    });
}
MLFLOW_LLM_INLINE double _mm512_reduce_add_pd(__m512d x) {
    double lanes[8];
    std::memcpy(lanes, &x, sizeof lanes);
    for (int half = 4; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

// -- whole numbers, and bfloat16 --------------------------------------------------------------------------------------

MLFLOW_LLM_INLINE __m512i _mm512_set1_epi32(int x) {
    return map_parts<__m512i>([&](int) { return broadcast(int32_t(x)); });
}
MLFLOW_LLM_INLINE __m512i _mm512_setzero_si512() { return _mm512_set1_epi32(0); }
MLFLOW_LLM_INLINE __m512i _mm512_add_epi32(__m512i a, __m512i b) {
    return map_parts<__m512i>([&](int i) { return a.part[i] + b.part[i]; });
}
MLFLOW_LLM_INLINE __m512i _mm512_sub_epi32(__m512i a, __m512i b) {
    return map_parts<__m512i>([&](int i) { return a.part[i] - b.part[i]; });
}
MLFLOW_LLM_INLINE __m512i _mm512_or_si512(__m512i a, __m512i b) {
    return map_parts<__m512i>([&](int i) { return a.part[i] | b.part[i]; });
}
MLFLOW_LLM_INLINE __m512i _mm512_and_si512(__m512i a, __m512i b) {
    return map_parts<__m512i>([&](int i) { return a.part[i] & b.part[i]; });
}
MLFLOW_LLM_INLINE __m512i _mm512_srai_epi32(__m512i a, int bits) {
    return map_parts<__m512i>([&](int i) { return a.part[i] >> bits; });
}
MLFLOW_LLM_INLINE __m512i _mm512_slli_epi32(__m512i a, int bits) {
    return map_parts<__m512i>([&](int i) { return a.part[i] << bits; });
}
MLFLOW_LLM_INLINE __m512 _mm512_castsi512_ps(__m512i a) {
    return map_parts<__m512>([&](int i) { return Floats(a.part[i]); });
}
MLFLOW_LLM_INLINE __m512i _mm512_cvtps_epi32(__m512 a) {
    return map_parts<__m512i>([&](int i) { return nearest(a.part[i]); });
}
MLFLOW_LLM_INLINE __m512 _mm512_cvtepi32_ps(__m512i a) {
    return map_parts<__m512>([&](int i) { return __builtin_convertvector(a.part[i], Floats); });
}
MLFLOW_LLM_INLINE __m512 _mm512_cvtph_ps(__m256i a) {
    return map_parts<__m512>([&](int i) { return half_to_float(a.part[i]); });
}
MLFLOW_LLM_INLINE int32_t _mm512_reduce_add_epi32(__m512i a) {
    int32_t sum = 0;
    for (int i = 0; i < 16; i++) sum += a.part[i / WIDTH][i % WIDTH];
    return sum;
}
MLFLOW_LLM_INLINE __m512 _mm512_cvtepu32_ps(__m512i a) {
    return map_parts<__m512>([&](int i) { return __builtin_convertvector(UInts(a.part[i]), Floats); });
}
MLFLOW_LLM_INLINE __m128i _mm512_cvtepi32_epi8(__m512i a) {
    __m128i bytes;
    narrow_to_bytes(a.part, bytes.part);
    return bytes;
}
MLFLOW_LLM_INLINE __m512i _mm512_cvtepu16_epi32(__m256i a) {
    return map_parts<__m512i>([&](int i) { return __builtin_convertvector(a.part[i], Ints); });
}
MLFLOW_LLM_INLINE __m512i _mm512_cvtepu8_epi32(__m128i a) {
    return map_parts<__m512i>([&](int i) { return widen_bytes((const uint8_t*)a.part + i * WIDTH); });
}
MLFLOW_LLM_INLINE __m512i _mm512_cvtepi8_epi32(__m128i a) {
    typedef int8_t Bytes __attribute__((vector_size(WIDTH)));
    return map_parts<__m512i>(
        [&](int i) { return __builtin_convertvector(load_part<Bytes>(a.part + i * WIDTH), Ints); });
}
MLFLOW_LLM_INLINE __m256i _mm512_cvtneps_pbh(__m512 a) {
    return map_parts<__m256i>([&](int i) {
        const UInts bits = UInts(a.part[i]), near = bits + 0x7fff + (bits >> 16 & 1);
        const UInts rounded_bits = a.part[i] == a.part[i] ? near : bits | 0x400000;  // a NaN stays a NaN
        return __builtin_convertvector(rounded_bits >> 16, Shorts);
    });
}

// -- products of packed weights (linear.h) ----------------------------------------------------------------------------

// Add to each lane the product of four bytes of x (see BYTE_OFFSET) by four of w. FAST uses a dot-product instruction.
template <bool FAST>
MLFLOW_LLM_INLINE void add_byte_products(__m512i& sum, __m512i x, __m512i w) {
    sum = map_parts<__m512i>([&](int i) { return byte_products<FAST>(sum.part[i], x.part[i], w.part[i]); });
}

// Return the lower (upper) four bits of each byte.
template <bool UPPER>
MLFLOW_LLM_INLINE Ints nibbles(Ints x) {
    return (UPPER ? Ints(UInts(x) >> 4) : x) & 0x0f0f0f0f;
}

}  // namespace mlflow_llm
