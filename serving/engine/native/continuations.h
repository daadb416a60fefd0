// The best continuations of the beams of a search: of all beams' next tokens those whose sums of log probabilities, the
// beam's own score and the token's, are the greatest. What log_softmax, a sum and topk over [beams, vocabulary] give.
#pragma once

#include <cstdint>
#include <vector>

#include "simd.h"

namespace mlt {

struct Continuation {
    float sum;
    int64_t place;  // beam * vocabulary + token
};

// At most `keep`, the greatest first, and of equals the first one.
struct Continuations {
    std::vector<Continuation> best;
    size_t keep;

    explicit Continuations(int keep) : keep(keep) { best.reserve(keep + 1); }

    bool is_full() const { return best.size() >= keep; }
    float least() const { return best.back().sum; }

    // In the order of their places, so that one goes behind its equals.
    void enter(float sum, int64_t place) {
        if (is_full() && !(sum > least())) return;
        size_t at = best.size();
        while (at > 0 && sum > best[at - 1].sum) at--;
        best.insert(best.begin() + at, {sum, place});
        if (best.size() > keep) best.pop_back();
    }
};

// Enters the tokens of one beam's row; false where it has a NaN or no finite maximum.
inline bool continue_beam(const float* logits, int size, float score, int64_t first, Continuations& into) {
    const __m512 none = _mm512_set1_ps(-INFINITY);
    const auto inside = [&](int i) { return __mmask16(size - i >= LANES ? 0xffff : (1u << (size - i)) - 1); };
    __m512 largest = none;
    __mmask16 numbers = 0xffff;
    for (int i = 0; i < size; i += LANES) {
        const __m512 x = _mm512_mask_loadu_ps(none, inside(i), logits + i);
        numbers &= _mm512_cmp_ps_mask(x, x, _CMP_EQ_OQ);
        largest = _mm512_max_ps(largest, x);
    }
    const float most = _mm512_reduce_max_ps(largest);
    if (numbers != 0xffff || !std::isfinite(most)) return false;
    const __m512 from = _mm512_set1_ps(most);
    __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
    for (int i = 0; i < size; i += LANES) {
        const __m512 weight = exp16(_mm512_sub_ps(_mm512_mask_loadu_ps(none, inside(i), logits + i), from));
        low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(weight)));
        high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(weight, 1)));
    }
    const float total = float(std::log(_mm512_reduce_add_pd(_mm512_add_pd(low, high))));
    const __m512 by = _mm512_set1_ps(total), own = _mm512_set1_ps(score);
    alignas(64) float sums[LANES];
    for (int i = 0; i < size; i += LANES) {
        const __m512 x = _mm512_mask_loadu_ps(none, inside(i), logits + i);
        const __m512 sum = _mm512_add_ps(_mm512_sub_ps(_mm512_sub_ps(x, from), by), own);
        __mmask16 in = inside(i);
        if (into.is_full()) in &= _mm512_cmp_ps_mask(sum, _mm512_set1_ps(into.least()), _CMP_GT_OQ);
        if (!in) continue;
        _mm512_store_ps(sums, sum);
        for (; in; in &= in - 1) {
            const int lane = __builtin_ctz(in);
            into.enter(sums[lane], first + i + lane);
        }
    }
    return true;
}

}  // namespace mlt
