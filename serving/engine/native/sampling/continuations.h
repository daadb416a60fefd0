// The best continuations of a beam search: among the next tokens of all beams those with the greatest sum of the beam's
// score and the token's log probability. Equivalent to log_softmax, a sum and topk over [beams, vocabulary].
#pragma once

#include <cstdint>
#include <vector>

#include "isa/simd.h"

namespace mlflow_llm {

struct Continuation {
    float sum;
    int64_t place;  // beam * vocabulary + token
};

// At max `keep` continuations, greatest first, in the order of entry among equals.
struct Continuations {
    std::vector<Continuation> best;
    size_t keep;

    explicit Continuations(int keep) : keep(keep) { best.reserve(keep + 1); }

    bool is_full() const { return best.size() >= keep; }
    float min_sum() const { return best.back().sum; }

    // Enter a continuation. Called in the order of places, so that it ranks behind its equals.
    void enter(float sum, int64_t place) {
        if (is_full() && !(sum > min_sum())) return;
        size_t at = best.size();
        while (at > 0 && sum > best[at - 1].sum) at--;
        best.insert(best.begin() + at, {sum, place});
        if (best.size() > keep) best.pop_back();
    }
};

// Enter the tokens of one beam's row; return false if it has a NaN or no finite maximum.
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
    const float max = _mm512_reduce_max_ps(largest);
    if (numbers != 0xffff || !std::isfinite(max)) return false;
    const __m512 from = _mm512_set1_ps(max);
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
        if (into.is_full()) in &= _mm512_cmp_ps_mask(sum, _mm512_set1_ps(into.min_sum()), _CMP_GT_OQ);
        if (!in) continue;
        _mm512_store_ps(sums, sum);
        for (; in; in &= in - 1) {
            const int lane = __builtin_ctz(in);
            into.enter(sums[lane], first + i + lane);
        }
    }
    return true;
}

}  // namespace mlflow_llm
