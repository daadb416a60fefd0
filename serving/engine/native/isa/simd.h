// Vector arithmetic shared by the kernels, written in AVX-512 intrinsics (F, BW, VL and DQ unless noted otherwise);
// narrow_vectors.h implements these for CPUs without AVX-512.
#pragma once

#ifdef MLFLOW_LLM_AVX512
#include <immintrin.h>
#else
#include "isa/narrow_vectors.h"
#endif

#include <cstdint>

namespace mlflow_llm {

constexpr int LANES = 16;  // floats in a vector
constexpr float LOG2E = 1.44269504f;

#ifdef MLFLOW_LLM_AVX512
// Return a vector whose lane i is lane i ^ STRIDE of x; STRIDE is a power of two.
template <int STRIDE>
inline __m512 xor_lanes(__m512 x) {
    if constexpr (STRIDE == 1) return _mm512_permute_ps(x, 0xb1);
    else if constexpr (STRIDE == 2) return _mm512_permute_ps(x, 0x4e);
    else if constexpr (STRIDE == 4) return _mm512_shuffle_f32x4(x, x, 0xb1);
    else return _mm512_shuffle_f32x4(x, x, 0x4e);
}
#endif

// Return exp(x) to about 2 ulp; exactly 0 below the smallest normal number, so that a score of -inf has no weight.
inline __m512 exp16(__m512 x) {
    const __mmask16 in_range = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.33f), _CMP_GE_OQ);
    x = _mm512_min_ps(x, _mm512_set1_ps(88.72f));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);  // polynomial of Cephes' expf
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_maskz_scalef_ps(in_range, p, n);
}

// Return 2^x to 4e-5, a hundredth of the rounding error of bfloat16 and of 14-bit weights; exactly 0 below the smallest
// normal number.
inline __m512 power_of_two(__m512 x) {
    const __mmask16 in_range = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_GE_OQ);
    const __m512 n = _mm512_roundscale_ps(x, 0), r = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(9.6181291e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5504109e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4022651e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9314718e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(in_range, p, n);
}

// Return x (1 + erf(x / sqrt 2)) / 2 with an error of at most 1.6e-7 |x|: an odd polynomial in x up to 5.3, beyond
// which the result is x or 0 in float32. In powers of x^2 shifted to [-1, 1], where coefficients do not cancel.
inline __m512 gelu(__m512 x) {
    constexpr float END = 5.3f;
    constexpr float COEFFICIENTS[] = {-7.695579483e-04f, 7.157180641e-04f,  -1.081953994e-03f, 3.153054225e-03f,
                                      -5.864464462e-03f, 8.818483830e-03f,  -1.317794704e-02f, 1.892839850e-02f,
                                      -2.530011794e-02f, 3.207921337e-02f,  -3.958874662e-02f, 4.926417592e-02f,
                                      -6.651851105e-02f, 1.333925625e-01f};
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 u = _mm512_fmsub_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(2.0f / END / END), one);
    __m512 p = _mm512_set1_ps(2.893081492e-04f);
    for (const float c : COEFFICIENTS) p = _mm512_fmadd_ps(p, u, _mm512_set1_ps(c));
    p = _mm512_fmadd_ps(p, x, _mm512_set1_ps(0.5f));
    const __m512 limit = _mm512_min_ps(_mm512_max_ps(x, _mm512_setzero_ps()), one);  // 0 or 1 where it is used
    return _mm512_mul_ps(x, _mm512_mask_mov_ps(p, _mm512_cmp_ps_mask(u, one, _CMP_GE_OQ), limit));
}

// Return x / (1 + e^-x).
inline __m512 silu(__m512 x) {
    const __m512 e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), x));
    return _mm512_div_ps(x, _mm512_add_ps(e, _mm512_set1_ps(1.0f)));
}

// Return x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), computed as x / (1 + e^-2u).
inline __m512 gelu_tanh(__m512 x) {
    const __m512 inner = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f), _mm512_set1_ps(1.0f));
    const __m512 e = exp16(_mm512_mul_ps(_mm512_mul_ps(x, inner), _mm512_set1_ps(-1.5957691216f)));
    return _mm512_div_ps(x, _mm512_add_ps(e, _mm512_set1_ps(1.0f)));
}

// Return cap tanh(x / cap), to 1e-7 of the cap; `by` is 2 / cap.
inline __m512 capped(__m512 x, float cap, float by) {
    const __m512 e = exp16(_mm512_mul_ps(x, _mm512_set1_ps(by)));
    const __m512 rest = _mm512_div_ps(_mm512_set1_ps(2.0f * cap), _mm512_add_ps(e, _mm512_set1_ps(1.0f)));
    return _mm512_sub_ps(_mm512_set1_ps(cap), rest);
}

// Apply the cap to n values in place; n is a multiple of LANES.
inline void cap_each(float* x, int n, float cap) {
    for (int i = 0; i < n; i += LANES) _mm512_storeu_ps(x + i, capped(_mm512_loadu_ps(x + i), cap, 2.0f / cap));
}

// Return a vector whose lane i is the reduction of all lanes of a[i] by `op`: 45 instructions for sixteen reductions.
// The order is lanes (0 + 2) + (1 + 3) of each quarter, then quarters (0 + 1) + (2 + 3).
template <class Op>
inline __m512 reduce_each(const __m512 (&a)[LANES], const Op& op) {
    __m512 b[8], c[4];
    for (int i = 0; i < 8; i++)
        b[i] = op(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        const __m512d low = _mm512_castps_pd(b[2 * i]), high = _mm512_castps_pd(b[2 * i + 1]);
        c[i] = op(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)), _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
    }
    const __m512 d = op(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
    const __m512 e = op(_mm512_shuffle_f32x4(c[2], c[3], 0x88), _mm512_shuffle_f32x4(c[2], c[3], 0xdd));
    return op(_mm512_shuffle_f32x4(d, e, 0x88), _mm512_shuffle_f32x4(d, e, 0xdd));
}

// Return the reduction of x in every lane, in the same order.
template <class Op>
inline __m512 reduce_lanes(__m512 x, const Op& op) {
    x = op(x, xor_lanes<2>(x)), x = op(x, xor_lanes<1>(x));
    x = op(x, xor_lanes<4>(x));
    return op(x, xor_lanes<8>(x));
}

// Like reduce_each(), for the first `count` vectors only.
template <class Op>
inline __m512 reduce_some(const __m512 (&a)[LANES], int count, const Op& op) {
    constexpr int FEW = 4;
    if (count > FEW) return reduce_each(a, op);
    __m512 each = _mm512_setzero_ps();
    for (int i = 0; i < count; i++) each = _mm512_mask_mov_ps(each, __mmask16(1 << i), reduce_lanes(a[i], op));
    return each;
}

inline __m512 sum_each(const __m512 (&a)[LANES]) {
    return reduce_each(a, [](__m512 x, __m512 y) { return _mm512_add_ps(x, y); });
}

// Transpose sixteen rows of sixteen floats; `from_row` and `to_row` are the row strides in floats.
inline void transpose(const float* from, int from_row, float* to, int to_row) {
    __m512 r[LANES], t[LANES];
    for (int i = 0; i < LANES; i++) r[i] = _mm512_loadu_ps(from + i * from_row);
    for (int i = 0; i < LANES; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    const auto pairs = [](__m512 a, __m512 b, bool high) {
        const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
        return _mm512_castpd_ps(high ? _mm512_unpackhi_pd(x, y) : _mm512_unpacklo_pd(x, y));
    };
    for (int i = 0; i < LANES; i += 4)  // quarter L of r[i + j] is column 4 L + j of rows i to i + 3
        for (int j = 0; j < 4; j++) r[i + j] = pairs(t[i + j / 2], t[i + j / 2 + 2], j % 2);
    for (int j = 0; j < 4; j++) {
        t[j] = _mm512_shuffle_f32x4(r[j], r[4 + j], 0x88), t[4 + j] = _mm512_shuffle_f32x4(r[j], r[4 + j], 0xdd);
        t[8 + j] = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0x88);
        t[12 + j] = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0xdd);
    }
    for (int j = 0; j < 4; j++) {
        _mm512_storeu_ps(to + j * to_row, _mm512_shuffle_f32x4(t[j], t[8 + j], 0x88));
        _mm512_storeu_ps(to + (4 + j) * to_row, _mm512_shuffle_f32x4(t[4 + j], t[12 + j], 0x88));
        _mm512_storeu_ps(to + (8 + j) * to_row, _mm512_shuffle_f32x4(t[j], t[8 + j], 0xdd));
        _mm512_storeu_ps(to + (12 + j) * to_row, _mm512_shuffle_f32x4(t[4 + j], t[12 + j], 0xdd));
    }
}

// Round n floats to bfloat16 (AVX-512 BF16); n is a multiple of LANES.
inline void to_bf16(const float* from, int n, uint16_t* to) {
    for (int i = 0; i < n; i += LANES)
        _mm256_storeu_si256((__m256i*)(to + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
}

// Round n floats to bfloat16 and store them as floats.
inline void round_to_bf16(const float* from, int n, float* to) {
    for (int i = 0; i < n; i += LANES) {
        const __m512i bits = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
        _mm512_storeu_ps(to + i, _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)));
    }
}

// Return the dot product of a and b; n is a multiple of LANES.
inline float dot(const float* a, const float* b, int n) {
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < n; i += LANES) sum = _mm512_fmadd_ps(_mm512_loadu_ps(a + i), _mm512_loadu_ps(b + i), sum);
    return _mm512_reduce_add_ps(sum);
}

inline int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

}  // namespace mlflow_llm
