// Vectors of sixteen lanes where registers are narrower: two of AVX2 or SVE, four of NEON. The kernels are written in AVX-512's
// intrinsics; those that they use are here under the same names, in this namespace, so one source serves all processors.
//
// Every operation is lane by lane what AVX-512's is, sums over lanes included, in the same order. Not the same: what
// becomes of the payload of a NaN, and where the compiler joins a product and a sum (it does not here, see setup.py).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __x86_64__
#include "avx2.h"
#elif defined(MLT_SVE)
#include "sve.h"
#else
#include "neon.h"
#endif

namespace mlt {

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
struct __m256i { Shorts part[PARTS]; };  // sixteen of 16 bits
struct __m128i { int8_t part[16]; };
using __mmask16 = uint16_t;
using __mmask32 = uint32_t;

#define MLT_INLINE inline __attribute__((always_inline))

// Calls rather than a loop: gcc looks for what may lie in registers before it unrolls one, and would keep a sum in memory.
template <class Vector, class Make>
MLT_INLINE Vector each_part(const Make& make) {
    if constexpr (PARTS == 2) return {{make(0), make(1)}};
    else return {{make(0), make(1), make(2), make(3)}};
}

template <class Part>
MLT_INLINE Part load_part(const void* from) {
    Part part;
    std::memcpy(&part, from, sizeof part);
    return part;
}

MLT_INLINE Floats all(float x) { return Floats{} + x; }
MLT_INLINE Ints all(int32_t x) { return Ints{} + x; }

// -- loads and stores -------------------------------------------------------------------------------------------------

MLT_INLINE __m512 _mm512_loadu_ps(const float* from) {
    return each_part<__m512>([&](int i) { return load_part<Floats>(from + i * WIDTH); });
}
MLT_INLINE __m512 _mm512_load_ps(const void* from) { return _mm512_loadu_ps((const float*)from); }
MLT_INLINE __m512i _mm512_loadu_si512(const void* from) {
    return each_part<__m512i>([&](int i) { return load_part<Ints>((const int32_t*)from + i * WIDTH); });
}
MLT_INLINE __m512i _mm512_load_si512(const void* from) { return _mm512_loadu_si512(from); }
MLT_INLINE __m256i _mm256_loadu_si256(const __m256i* from) {
    return each_part<__m256i>([&](int i) { return load_part<Shorts>((const uint16_t*)from + i * WIDTH); });
}
MLT_INLINE __m128i _mm_loadu_si128(const __m128i* from) { return load_part<__m128i>(from); }
MLT_INLINE void _mm512_storeu_ps(float* to, __m512 x) {
    for (int i = 0; i < PARTS; i++) std::memcpy(to + i * WIDTH, &x.part[i], sizeof x.part[i]);
}
MLT_INLINE void _mm512_store_ps(float* to, __m512 x) { _mm512_storeu_ps(to, x); }
MLT_INLINE void _mm512_store_si512(void* to, __m512i x) { std::memcpy(to, &x, sizeof x); }
MLT_INLINE void _mm256_storeu_si256(__m256i* to, __m256i x) { std::memcpy((void*)to, &x, sizeof x); }
MLT_INLINE void _mm_storeu_si128(__m128i* to, __m128i x) { std::memcpy((void*)to, &x, sizeof x); }

// -- masks ------------------------------------------------------------------------------------------------------------

// All bits of the lanes that a mask has.
MLT_INLINE Ints lanes_of(__mmask16 mask, int part) {
    return (all(int32_t(mask) >> (part * WIDTH)) & lane_bits()) != 0;
}
template <class Compare>
MLT_INLINE __mmask16 mask_where(const Compare& compare) {
    int mask = 0;
    for (int i = 0; i < PARTS; i++) mask |= mask_of(Ints(compare(i))) << (i * WIDTH);
    return __mmask16(mask);
}

MLT_INLINE __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int how) {
    switch (how) {
        case _CMP_GE_OQ: return mask_where([&](int i) { return a.part[i] >= b.part[i]; });
        case _CMP_GT_OQ: return mask_where([&](int i) { return a.part[i] > b.part[i]; });
        case _CMP_EQ_OQ: return mask_where([&](int i) { return a.part[i] == b.part[i]; });
        case _CMP_NLT_UQ: return mask_where([&](int i) { return ~(a.part[i] < b.part[i]); });
    }
    __builtin_unreachable();
}
MLT_INLINE __mmask16 _mm512_mask_cmp_ps_mask(__mmask16 in, __m512 a, __m512 b, int how) {
    return in & _mm512_cmp_ps_mask(a, b, how);
}
MLT_INLINE __mmask16 _mm512_cmple_epi32_mask(__m512i a, __m512i b) {
    return mask_where([&](int i) { return a.part[i] <= b.part[i]; });
}
MLT_INLINE __mmask16 _mm512_cmplt_epi32_mask(__m512i a, __m512i b) {
    return mask_where([&](int i) { return a.part[i] < b.part[i]; });
}
MLT_INLINE __m512 _mm512_mask_blend_ps(__mmask16 mask, __m512 no, __m512 yes) {
    return each_part<__m512>([&](int i) { return lanes_of(mask, i) ? yes.part[i] : no.part[i]; });
}
MLT_INLINE __m512 _mm512_mask_mov_ps(__m512 no, __mmask16 mask, __m512 yes) { return _mm512_mask_blend_ps(mask, no, yes); }

// Lanes that the mask lacks are not touched in memory.
MLT_INLINE __m512 _mm512_mask_loadu_ps(__m512 no, __mmask16 mask, const float* from) {
    if (mask == 0xffff) return _mm512_loadu_ps(from);
    return each_part<__m512>([&](int i) {
        const Ints in = lanes_of(mask, i);
        return in ? load_some(from + i * WIDTH, in) : no.part[i];
    });
}
MLT_INLINE void _mm512_mask_storeu_ps(float* to, __mmask16 mask, __m512 x) {
    if (mask == 0xffff) return _mm512_storeu_ps(to, x);
    for (int i = 0; i < PARTS; i++) store_some(to + i * WIDTH, lanes_of(mask, i), x.part[i]);
}
MLT_INLINE __m512i _mm512_maskz_loadu_epi16(__mmask32 mask, const void* from) {
    alignas(64) uint16_t lanes[32];
    for (int i = 0; i < 32; i++) lanes[i] = mask >> i & 1 ? ((const uint16_t*)from)[i] : 0;
    return _mm512_load_si512(lanes);
}

// -- float32 ----------------------------------------------------------------------------------------------------------

MLT_INLINE __m512 _mm512_set1_ps(float x) {
    return each_part<__m512>([&](int) { return all(x); });
}
MLT_INLINE __m512 _mm512_setzero_ps() { return _mm512_set1_ps(0.0f); }
MLT_INLINE __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const float* from) {
    return _mm512_mask_loadu_ps(_mm512_setzero_ps(), mask, from);
}
MLT_INLINE __m512 _mm512_add_ps(__m512 a, __m512 b) {
    return each_part<__m512>([&](int i) { return a.part[i] + b.part[i]; });
}
MLT_INLINE __m512 _mm512_sub_ps(__m512 a, __m512 b) {
    return each_part<__m512>([&](int i) { return a.part[i] - b.part[i]; });
}
MLT_INLINE __m512 _mm512_mul_ps(__m512 a, __m512 b) {
    return each_part<__m512>([&](int i) { return a.part[i] * b.part[i]; });
}
MLT_INLINE __m512 _mm512_div_ps(__m512 a, __m512 b) {
    return each_part<__m512>([&](int i) { return a.part[i] / b.part[i]; });
}
MLT_INLINE __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
    return each_part<__m512>([&](int i) { return fused(a.part[i], b.part[i], c.part[i]); });
}
MLT_INLINE __m512 _mm512_fmsub_ps(__m512 a, __m512 b, __m512 c) {
    return each_part<__m512>([&](int i) { return fused(a.part[i], b.part[i], -c.part[i]); });
}
MLT_INLINE __m512 _mm512_fnmadd_ps(__m512 a, __m512 b, __m512 c) {
    return each_part<__m512>([&](int i) { return fused(-a.part[i], b.part[i], c.part[i]); });
}
MLT_INLINE __m512 _mm512_max_ps(__m512 a, __m512 b) {  // of a NaN and b: b
    return each_part<__m512>([&](int i) { return a.part[i] > b.part[i] ? a.part[i] : b.part[i]; });
}
MLT_INLINE __m512 _mm512_min_ps(__m512 a, __m512 b) {
    return each_part<__m512>([&](int i) { return a.part[i] < b.part[i] ? a.part[i] : b.part[i]; });
}
MLT_INLINE __m512 _mm512_abs_ps(__m512 a) {
    return each_part<__m512>([&](int i) { return Floats(Ints(a.part[i]) & 0x7fffffff); });
}
MLT_INLINE __m512 _mm512_roundscale_ps(__m512 a, int) {  // to whole numbers alone, even ones of two as near
    return each_part<__m512>([&](int i) { return rounded(a.part[i]); });
}
MLT_INLINE __m512 _mm512_mask_add_ps(__m512 no, __mmask16 mask, __m512 a, __m512 b) {
    return _mm512_mask_blend_ps(mask, no, _mm512_add_ps(a, b));
}

MLT_INLINE Floats power_of_two(Ints exponent) { return Floats((exponent + 127) << 23); }

// a 2^n of whole n, in two steps: 2^n may be beyond the largest number where a 2^n is not.
MLT_INLINE __m512 _mm512_maskz_scalef_ps(__mmask16 mask, __m512 a, __m512 n) {
    return each_part<__m512>([&](int i) {
        const Ints whole = nearest(n.part[i]), first = whole >> 1, second = whole - first;
        return Floats(lanes_of(mask, i) & Ints(a.part[i] * power_of_two(first) * power_of_two(second)));
    });
}

// -- over lanes -------------------------------------------------------------------------------------------------------

MLT_INLINE __m256 _mm512_extractf32x8_ps(__m512 x, int upper) {
    __m256 half;
    for (int i = 0; i < PARTS / 2; i++) half.part[i] = x.part[upper * PARTS / 2 + i];
    return half;
}
MLT_INLINE __m256 _mm512_castps512_ps256(__m512 x) { return _mm512_extractf32x8_ps(x, 0); }
MLT_INLINE float _mm512_reduce_add_ps(__m512 x) {
    alignas(64) float lanes[16];
    _mm512_store_ps(lanes, x);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}
MLT_INLINE float _mm512_reduce_max_ps(__m512 x) {
    alignas(64) float lanes[16];
    _mm512_store_ps(lanes, x);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
}
MLT_INLINE __m512 _mm512_unpacklo_ps(__m512 a, __m512 b) {
    return each_part<__m512>([&](int i) { return low_of_pairs(a.part[i], b.part[i]); });
}
MLT_INLINE __m512 _mm512_unpackhi_ps(__m512 a, __m512 b) {
    return each_part<__m512>([&](int i) { return high_of_pairs(a.part[i], b.part[i]); });
}
MLT_INLINE __m512d _mm512_castps_pd(__m512 x) {
    return each_part<__m512d>([&](int i) { return Doubles(x.part[i]); });
}
MLT_INLINE __m512 _mm512_castpd_ps(__m512d x) {
    return each_part<__m512>([&](int i) { return Floats(x.part[i]); });
}
MLT_INLINE __m512d _mm512_unpacklo_pd(__m512d a, __m512d b) {
    return each_part<__m512d>([&](int i) { return low_of_pairs(a.part[i], b.part[i]); });
}
MLT_INLINE __m512d _mm512_unpackhi_pd(__m512d a, __m512d b) {
    return each_part<__m512d>([&](int i) { return high_of_pairs(a.part[i], b.part[i]); });
}
// Quarters 0 and 2 (or 1 and 3) of both.
MLT_INLINE __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int which) {
    return each_part<__m512>([&](int i) { return quarters(a.part, b.part, i, which == 0xdd); });
}

// simd.h has what it is for AVX-512.
template <int STRIDE>
MLT_INLINE __m512 lanes_across(__m512 x) {
    if constexpr (STRIDE >= WIDTH) return each_part<__m512>([&](int i) { return x.part[i ^ STRIDE / WIDTH]; });
    else
        return each_part<__m512>([&](int i) {
            const Floats a = x.part[i];
            if constexpr (WIDTH == 4) return Floats{a[STRIDE], a[1 ^ STRIDE], a[2 ^ STRIDE], a[3 ^ STRIDE]};
            else return Floats{a[STRIDE], a[1 ^ STRIDE], a[2 ^ STRIDE], a[3 ^ STRIDE],
                               a[4 ^ STRIDE], a[5 ^ STRIDE], a[6 ^ STRIDE], a[7 ^ STRIDE]};
        });
}

// -- float64 ----------------------------------------------------------------------------------------------------------

MLT_INLINE __m512d _mm512_setzero_pd() {
    const Doubles zero{};
    return each_part<__m512d>([&](int) { return zero; });
}
MLT_INLINE __m512d _mm512_add_pd(__m512d a, __m512d b) {
    return each_part<__m512d>([&](int i) { return a.part[i] + b.part[i]; });
}
MLT_INLINE __m512d _mm512_cvtps_pd(__m256 x) {
    alignas(32) float lanes[8];
    std::memcpy(lanes, &x, sizeof lanes);
    return each_part<__m512d>([&](int i) {
        Doubles wide;
        for (int j = 0; j < WIDTH / 2; j++) wide[j] = lanes[i * (WIDTH / 2) + j];
        return wide;
    });
}
MLT_INLINE double _mm512_reduce_add_pd(__m512d x) {
    double lanes[8];
    std::memcpy(lanes, &x, sizeof lanes);
    for (int half = 4; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

// -- whole numbers, and bfloat16 --------------------------------------------------------------------------------------

MLT_INLINE __m512i _mm512_set1_epi32(int x) {
    return each_part<__m512i>([&](int) { return all(int32_t(x)); });
}
MLT_INLINE __m512i _mm512_setzero_si512() { return _mm512_set1_epi32(0); }
MLT_INLINE __m512i _mm512_add_epi32(__m512i a, __m512i b) {
    return each_part<__m512i>([&](int i) { return a.part[i] + b.part[i]; });
}
MLT_INLINE __m512i _mm512_sub_epi32(__m512i a, __m512i b) {
    return each_part<__m512i>([&](int i) { return a.part[i] - b.part[i]; });
}
MLT_INLINE __m512i _mm512_or_si512(__m512i a, __m512i b) {
    return each_part<__m512i>([&](int i) { return a.part[i] | b.part[i]; });
}
MLT_INLINE __m512i _mm512_and_si512(__m512i a, __m512i b) {
    return each_part<__m512i>([&](int i) { return a.part[i] & b.part[i]; });
}
MLT_INLINE __m512i _mm512_srai_epi32(__m512i a, int bits) {
    return each_part<__m512i>([&](int i) { return a.part[i] >> bits; });
}
MLT_INLINE __m512i _mm512_slli_epi32(__m512i a, int bits) {
    return each_part<__m512i>([&](int i) { return a.part[i] << bits; });
}
MLT_INLINE __m512 _mm512_castsi512_ps(__m512i a) {
    return each_part<__m512>([&](int i) { return Floats(a.part[i]); });
}
MLT_INLINE __m512i _mm512_cvtps_epi32(__m512 a) {
    return each_part<__m512i>([&](int i) { return nearest(a.part[i]); });
}
MLT_INLINE __m512 _mm512_cvtepi32_ps(__m512i a) {
    return each_part<__m512>([&](int i) { return __builtin_convertvector(a.part[i], Floats); });
}
MLT_INLINE __m512 _mm512_cvtph_ps(__m256i a) {
    return each_part<__m512>([&](int i) { return from_halves(a.part[i]); });
}
MLT_INLINE int32_t _mm512_reduce_add_epi32(__m512i a) {
    int32_t sum = 0;
    for (int i = 0; i < 16; i++) sum += a.part[i / WIDTH][i % WIDTH];
    return sum;
}
MLT_INLINE __m512 _mm512_cvtepu32_ps(__m512i a) {
    return each_part<__m512>([&](int i) { return __builtin_convertvector(Words(a.part[i]), Floats); });
}
MLT_INLINE __m128i _mm512_cvtepi32_epi8(__m512i a) {
    __m128i bytes;
    low_bytes(a.part, bytes.part);
    return bytes;
}
MLT_INLINE __m512i _mm512_cvtepu16_epi32(__m256i a) {
    return each_part<__m512i>([&](int i) { return __builtin_convertvector(a.part[i], Ints); });
}
MLT_INLINE __m512i _mm512_cvtepu8_epi32(__m128i a) {
    return each_part<__m512i>([&](int i) { return from_bytes((const uint8_t*)a.part + i * WIDTH); });
}
MLT_INLINE __m512i _mm512_cvtepi8_epi32(__m128i a) {
    typedef int8_t Bytes __attribute__((vector_size(WIDTH)));
    return each_part<__m512i>([&](int i) { return __builtin_convertvector(load_part<Bytes>(a.part + i * WIDTH), Ints); });
}
MLT_INLINE __m256i _mm512_cvtneps_pbh(__m512 a) {
    return each_part<__m256i>([&](int i) {
        const Words bits = Words(a.part[i]), near = bits + 0x7fff + (bits >> 16 & 1);
        const Words kept = a.part[i] == a.part[i] ? near : bits | 0x400000;  // a NaN stays one
        return __builtin_convertvector(kept >> 16, Shorts);
    });
}

// -- products of packed weights (linear.h) ----------------------------------------------------------------------------

// Four bytes of x (see BYTE_OFFSET) by four of w, in each lane, added to the sum. FAST: by the instruction for it.
template <bool FAST>
MLT_INLINE void add_byte_products(__m512i& sum, __m512i x, __m512i w) {
    sum = each_part<__m512i>([&](int i) { return byte_products<FAST>(sum.part[i], x.part[i], w.part[i]); });
}

// The lower (upper) four bits of each byte.
template <bool UPPER>
MLT_INLINE Ints nibbles(Ints x) {
    return (UPPER ? Ints(Words(x) >> 4) : x) & 0x0f0f0f0f;
}

}  // namespace mlt
