// Native sampling: draws a token from a row of logits by the same race as sampler.py.
//
// A row may have a grammar's bitmask, a bit per token; tokens that it forbids count as if their logit were -infinity.
//
// Token t arrives after an exponential time that depends on (seed, position, t) only; the smallest ratio of time to
// weight wins. Times are drawn only for tokens that remain after top_k, top_p, min_p and typical_p.
#pragma once

#include <cstdint>
#include <vector>

#include "isa/simd.h"

namespace mlflow_llm {

struct Draw {
    float temperature, top_p, min_p;
    int32_t top_k;  // 0: all
    float typical_p;
    uint64_t seed, position;
};

// Philox 4x64-10 (Salmon et al. 2011) as in numpy: keyed by seed and position, with block b at counter b + 1.
struct Philox {
    uint64_t seed, position;

    // Compute the 32 random bits of each of the tokens [8 b, 8 b + 8).
    void block(uint64_t b, uint32_t* bits) const {
        uint64_t x[4] = {b + 1, 0, 0, 0}, k0 = seed, k1 = position;
        for (int round = 0; round < 10; round++) {
            const unsigned __int128 left = (unsigned __int128)0xD2E7470EE14C6C93ULL * x[0];
            const unsigned __int128 right = (unsigned __int128)0xCA5A826395121157ULL * x[2];
            const uint64_t next[4] = {uint64_t(right >> 64) ^ x[1] ^ k0, uint64_t(right),
                                      uint64_t(left >> 64) ^ x[3] ^ k1, uint64_t(left)};
            for (int i = 0; i < 4; i++) x[i] = next[i];
            k0 += 0x9E3779B97F4A7C15ULL, k1 += 0xBB67AE8584CAA73BULL;
        }
        for (int i = 0; i < 4; i++) bits[2 * i] = uint32_t(x[i]), bits[2 * i + 1] = uint32_t(x[i] >> 32);
    }
};

// Return an exponential time: above zero, and with float32's relative precision near it, where races are decided.
inline float exponential(uint32_t bits) {
    const float uniform = (float(bits) + 0.5f) * 2.3283064365386963e-10f;
    return -std::log1p(-std::min(uniform, 1.0f - 5.9604645e-8f));
}

// Finds the entrant with the smallest ratio of time to weight.
struct Race {
    const Philox& random;
    int32_t winner = 0;
    double best = 0.0;

    explicit Race(const Philox& random) : random(random) {}

    void enter(int32_t token, double weight) {
        uint32_t bits[8];
        random.block(token / 8, bits);
        const double speed = weight / exponential(bits[token % 8]);
        if (speed > best) best = speed, winner = token;
    }
};

class Sampler {
  public:
    // Draw a token. `mask` may be null. With temperature 0 the largest logit wins, the first among equals.
    int32_t token(const float* logits, int size, const Draw& draw, const uint32_t* mask = nullptr) {
        if (draw.temperature == 0.0f) return best(logits, size, mask);
        scaled.resize(round_up(size, LANES));
        scale(logits, size, draw.temperature, mask);
        const Philox random{draw.seed, draw.position};
        if (draw.typical_p < 1.0f) return sample_typical(size, draw, random);
        return draw.top_k > 0 || draw.top_p < 1.0f ? sample_truncated(size, draw, random)
                                                   : sample_all(size, draw, random);
    }

    // Return the token with the largest logit, the first among equals; -1 if that logit is not finite or a logit is
    // NaN.
    static int32_t largest(const float* logits, int size) {
        const __m512 none = _mm512_set1_ps(-INFINITY);
        __m512 max[4] = {none, none, none, none};
        __mmask16 not_nan = 0xffff;
        const auto update = [&](__m512 x, int turn) {
            not_nan &= _mm512_cmp_ps_mask(x, x, _CMP_EQ_OQ);
            max[turn] = _mm512_max_ps(max[turn], x);
        };
        int i = 0;
        for (; i + 4 * LANES <= size; i += 4 * LANES) {
            update(_mm512_loadu_ps(logits + i), 0), update(_mm512_loadu_ps(logits + i + LANES), 1);
            update(_mm512_loadu_ps(logits + i + 2 * LANES), 2), update(_mm512_loadu_ps(logits + i + 3 * LANES), 3);
        }
        for (; i < size; i += LANES) update(_mm512_mask_loadu_ps(none, allowed(i, size, nullptr), logits + i), 0);
        const float found =
            _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(max[0], max[1]), _mm512_max_ps(max[2], max[3])));
        if (not_nan != 0xffff || !std::isfinite(found)) return -1;
        for (i = 0;; i += LANES) {
            const __m512 x = _mm512_mask_loadu_ps(none, allowed(i, size, nullptr), logits + i);
            if (const __mmask16 same = _mm512_cmp_ps_mask(x, _mm512_set1_ps(found), _CMP_EQ_OQ))
                return i + __builtin_ctz(same);
        }
    }

  private:
    struct Candidate { float value; int32_t token; };
    struct Surprise { double distance, weight; int32_t token; };  // distance: of the surprise from its mean

    std::vector<float> scaled;  // logits / temperature - their maximum
    std::vector<Candidate> candidates;
    std::vector<float> weights;  // exp(scaled)
    std::vector<Surprise> by_distance;
    double total = 0.0;  // sum of exp(scaled)

    // Return the mask of allowed tokens in [i, i + 16).
    static __mmask16 allowed(int i, int size, const uint32_t* mask) {
        const __mmask16 inside = size - i >= LANES ? 0xffff : (1u << (size - i)) - 1;
        return mask ? inside & __mmask16(mask[i / 32] >> (i % 32)) : inside;
    }

    static int32_t best(const float* logits, int size, const uint32_t* mask) {
        float max = -INFINITY;
        int32_t winner = 0;
        for (int i = 0; i < size; i += LANES) {
            const __mmask16 in = allowed(i, size, mask);
            const __m512 x = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), in, logits + i);
            __mmask16 above = _mm512_mask_cmp_ps_mask(in, x, _mm512_set1_ps(max), _CMP_GT_OQ);
            if (!above) continue;
            max = _mm512_reduce_max_ps(x);
            above = _mm512_mask_cmp_ps_mask(in, x, _mm512_set1_ps(max), _CMP_EQ_OQ);
            winner = i + __builtin_ctz(above);
        }
        return winner;
    }

    void scale(const float* logits, int size, float temperature, const uint32_t* mask) {
        __m512 max = _mm512_set1_ps(-INFINITY);
        const __m512 by = _mm512_set1_ps(temperature);
        for (int i = 0; i < size; i += LANES) {
            const __m512 x = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), allowed(i, size, mask), logits + i);
            const __m512 value = _mm512_div_ps(x, by);
            _mm512_storeu_ps(&scaled[i], value);
            max = _mm512_max_ps(max, value);
        }
        const __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps(max));
        __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
        for (int i = 0; i < size; i += LANES) {
            const __m512 value = _mm512_sub_ps(_mm512_loadu_ps(&scaled[i]), largest);
            _mm512_storeu_ps(&scaled[i], value);
            const __m512 weight = exp16(value);
            low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(weight)));
            high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(weight, 1)));
        }
        total = _mm512_reduce_add_pd(_mm512_add_pd(low, high));
    }

    // Draw without truncation. Since -log(1 - u) >= u, the logarithm is only computed if weight / u beats the best so
    // far.
    int32_t sample_all(int size, const Draw& draw, const Philox& random) const {
        int32_t winner = 0;
        float best = 0.0f;
        alignas(64) uint32_t bits[LANES];
        alignas(64) float weights[LANES];
        const __m512 floor = _mm512_set1_ps(std::max(draw.min_p, 1e-38f));
        for (int first = 0; first < size; first += LANES) {
            random.block(first / 8, bits), random.block(first / 8 + 1, bits + 8);
            const __m512 weight = exp16(_mm512_loadu_ps(&scaled[first]));
            const __m512 uniform = _mm512_mul_ps(
                _mm512_add_ps(_mm512_cvtepu32_ps(_mm512_load_si512(bits)), _mm512_set1_ps(0.5f)),
                _mm512_set1_ps(2.3283064365386963e-10f));
            __mmask16 in = _mm512_cmp_ps_mask(weight, floor, _CMP_GE_OQ);
            in &= _mm512_cmp_ps_mask(weight, _mm512_mul_ps(uniform, _mm512_set1_ps(best * 0.999999f)), _CMP_GE_OQ);
            if (size - first < LANES) in &= (1u << (size - first)) - 1;
            if (!in) continue;
            _mm512_store_ps(weights, weight);
            for (; in; in &= in - 1) {
                const int i = __builtin_ctz(in);
                const float speed = weights[i] / exponential(bits[i]);
                if (speed > best) best = speed, winner = first + i;
            }
        }
        return winner;
    }

    // Return whether the tokens within `depth` of the maximum include all that top_k, or top_p, can keep.
    bool is_enough(int size, const Draw& draw, float depth) const {
        const __m512 threshold = _mm512_set1_ps(-depth);
        __m512 mass = _mm512_setzero_ps();
        int count = 0;
        for (int i = 0; i < size; i += LANES) {
            const __m512 value = _mm512_loadu_ps(&scaled[i]);
            const __mmask16 in = _mm512_cmp_ps_mask(value, threshold, _CMP_GE_OQ);
            if (!in) continue;
            count += __builtin_popcount(in);
            mass = _mm512_mask_add_ps(mass, in, mass, exp16(value));
        }
        if (draw.top_k > 0) return count >= std::min(draw.top_k, size);
        return _mm512_reduce_add_ps(mass) >= double(draw.top_p) * total * 1.00001;  // these sums are rounded
    }

    // Collect the most likely tokens in order, at least all that top_k and top_p keep.
    void collect(int size, const Draw& draw) {
        float depth = 4.0f;  // distance below the maximum
        while (depth < 200.0f && !is_enough(size, draw, depth)) depth *= 1.5f;
        const __m512 threshold = _mm512_set1_ps(depth < 200.0f ? -depth : -INFINITY);
        candidates.clear();
        for (int i = 0; i < size; i += LANES) {
            __mmask16 in = _mm512_cmp_ps_mask(_mm512_loadu_ps(&scaled[i]), threshold, _CMP_GE_OQ);
            if (size - i < LANES) in &= (1u << (size - i)) - 1;
            for (; in; in &= in - 1) {
                const int t = i + __builtin_ctz(in);
                candidates.push_back({scaled[t], t});
            }
        }
        const auto before = [](const Candidate& a, const Candidate& b) {
            return a.value != b.value ? a.value > b.value : a.token < b.token;
        };
        if (draw.top_k > 0 && size_t(draw.top_k) < candidates.size()) {
            std::nth_element(candidates.begin(), candidates.begin() + draw.top_k, candidates.end(), before);
            candidates.resize(draw.top_k);
        }
        std::sort(candidates.begin(), candidates.end(), before);
    }

    // Call in(token, weight) for each candidate that top_k, top_p and min_p keep, in order; return their number.
    template <class In>
    size_t truncate(int size, const Draw& draw, In in) {
        collect(size, draw);
        double sum = total;  // top_p refers to all tokens, or those that top_k keeps
        if (draw.top_k > 0) {
            sum = 0.0;
            for (const Candidate& c : candidates) sum += std::exp(double(c.value));
        }
        double passed = 0.0;
        size_t count = 0;
        for (; count < candidates.size(); count++) {
            const double weight = std::exp(double(candidates[count].value));  // 1 for the first
            if (count > 0 && (passed >= double(draw.top_p) * sum || weight < draw.min_p || weight <= 0.0)) break;
            passed += weight;
            in(candidates[count].token, weight);
        }
        return count;
    }

    int32_t sample_truncated(int size, const Draw& draw, const Philox& random) {
        Race race(random);
        truncate(size, draw, [&](int32_t token, double weight) { race.enter(token, weight); });
        return race.winner;
    }

    // Locally typical sampling (Meister et al. 2022): of the tokens that the other parameters keep, those whose
    // surprise is closest to the entropy are kept, until their probability reaches typical_p. Without the logits'
    // common offset the surprise is -value and the entropy its mean.
    int32_t sample_typical(int size, const Draw& draw, const Philox& random) {
        const bool all = draw.top_k <= 0 && draw.top_p >= 1.0f;
        weights.clear();
        const int count =
            all ? size : int(truncate(size, draw, [&](int32_t, double w) { weights.push_back(float(w)); }));
        if (all) compute_weights(size, draw);
        const auto value = [&](int i) { return double(all ? scaled[i] : candidates[i].value); };
        const auto token = [&](int i) { return all ? i : candidates[i].token; };
        double mass = 0.0, mean = 0.0;
        for (int i = 0; i < count; i++)
            if (weights[i] > 0.0f) mass += weights[i], mean += double(weights[i]) * value(i);
        mean /= mass;
        const double wanted = double(draw.typical_p) * mass;
        const auto within = [&](double radius) {  // the mass of tokens within `radius` of the mean
            double found = 0.0;
            for (int i = 0; i < count; i++) found += std::abs(value(i) - mean) <= radius ? double(weights[i]) : 0.0;
            return found;
        };
        double radius = 0.25;
        while (radius < 200.0 && within(radius) < wanted * 1.00001) radius *= 1.5;  // these sums are rounded
        by_distance.clear();
        for (int i = 0; i < count; i++) {
            const double distance = std::abs(value(i) - mean);
            if (weights[i] > 0.0f && (distance <= radius || radius >= 200.0))
                by_distance.push_back({distance, weights[i], token(i)});
        }
        std::sort(by_distance.begin(), by_distance.end(), [](const Surprise& a, const Surprise& b) {
            if (a.distance != b.distance) return a.distance < b.distance;
            return a.weight != b.weight ? a.weight > b.weight : a.token < b.token;
        });
        Race race(random);
        double passed = 0.0;
        for (const Surprise& n : by_distance) {
            if (passed > 0.0 && passed >= wanted) break;
            passed += n.weight;
            race.enter(n.token, n.weight);
        }
        return race.winner;
    }

    // Compute the weights of all tokens, 0 for those that min_p excludes.
    void compute_weights(int size, const Draw& draw) {
        weights.resize(scaled.size());
        const __m512 floor = _mm512_set1_ps(std::max(draw.min_p, 1e-38f));
        for (int i = 0; i < size; i += LANES) {
            const __m512 weight = exp16(_mm512_loadu_ps(&scaled[i]));
            const __mmask16 in = _mm512_cmp_ps_mask(weight, floor, _CMP_GE_OQ);
            _mm512_storeu_ps(&weights[i], _mm512_mask_mov_ps(_mm512_setzero_ps(), in, weight));
        }
    }
};

}  // namespace mlflow_llm
