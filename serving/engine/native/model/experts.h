// Mixture of experts: a router chooses a few experts for each row, which gets the weighted sum of their MLPs' outputs.
//
//   rows ─ router ─ softmax, top-k ─ rows grouped by expert ─ gate,up ─ act·up ─ down ─ weighted sum for each row
//
// All experts of a layer are stacked in one linear, so quantisation, packing and mapping need not know about them. An
// expert's weights are read once per step for all rows that chose it. A row's sum is in the order of its own scores,
// highest first, so it does not depend on the other rows.
#pragma once

#include <algorithm>
#include <vector>

#include "attention/encoder_attention.h"
#include "linear/dispatch.h"

namespace mlflow_llm {

struct Experts {
    const Linear *router, *gate_up, *down;  // [count, H], [count * 2 I, H], [count * H, I]; router null: no experts
    const float* shared_expert_gate;  // [H], or null: sigmoid(row · gate) weights the dense MLP
    int32_t count, top_k;
    int32_t normalized;  // 1: the weights of the chosen experts add up to 1
    int32_t sparsemixer;  // 1: softmax over the remaining experts with similar scores (SparseMixer, Liu et al. 2023)
    float jitter_eps;  // largest relative difference of similar scores
};

// Routing table of one layer, reused by all layers of a step.
class Routing {
  public:
    struct Group { int expert, first, count; };  // grouped rows [first, first + count)

    AlignedFloats scores;  // [T, experts]
    std::vector<float> weights;  // [T, top_k]
    std::vector<int> grouped_row;  // [T, top_k]: index of the grouped row
    std::vector<int> source_row;  // the row of a grouped row

    void reserve(int T, int max_experts, int max_top_k) {
        const auto grow = [](auto& buffer, size_t size) {
            if (buffer.size() < size) buffer.resize(size);
        };
        grow(scores, size_t(T) * max_experts), grow(weights, size_t(T) * max_top_k);
        grow(choices, size_t(T) * max_top_k), grow(grouped_row, size_t(T) * max_top_k);
        grow(source_row, size_t(T) * max_top_k), grow(groups, max_experts), grow(next, max_experts);
    }

    // Upper bound of the number of groups; the last groups may be empty.
    static int max_groups(int T, const Experts& experts) { return std::min(experts.count, T * experts.top_k); }
    const Group& group(int i) const { return groups[i]; }

    // Choose the top_k experts with the highest scores of a row, highest first, the lower index among equals.
    void choose(int t, const Experts& experts) {
        float* score = &scores[size_t(t) * experts.count];
        if (experts.sparsemixer) return choose_sparsemixer(t, experts, score);
        const float inverse_sum = exp_and_inverse_sum(score, experts.count);
        float* weight = &weights[size_t(t) * experts.top_k];
        float sum = 0.0f;
        for (int j = 0; j < experts.top_k; j++) {
            int best = 0;
            for (int e = 1; e < experts.count; e++)
                if (score[e] > score[best]) best = e;
            choices[size_t(t) * experts.top_k + j] = best;
            sum += weight[j] = score[best];
            score[best] = -1.0f;  // all scores are at least 0
        }
        const float by = experts.normalized ? 1.0f / sum : inverse_sum;
        for (int j = 0; j < experts.top_k; j++) weight[j] *= by;
    }

    // Group the rows by expert, in their order.
    void build_groups(int T, const Experts& experts) {
        const int num_groups = max_groups(T, experts), pairs = T * experts.top_k;
        std::fill_n(next.begin(), experts.count, 0);
        for (int i = 0; i < pairs; i++) next[choices[i]]++;
        int number = 0, first = 0;
        for (int e = 0; e < experts.count; e++) {
            const int count = next[e];
            if (count) groups[number++] = {e, first, count};
            next[e] = first;
            first += count;
        }
        for (; number < num_groups; number++) groups[number] = {0, 0, 0};
        for (int i = 0; i < pairs; i++) {
            grouped_row[i] = next[choices[i]]++;
            source_row[grouped_row[i]] = i / experts.top_k;
        }
    }

  private:
    void choose_sparsemixer(int t, const Experts& experts, float* score) {
        for (int j = 0; j < experts.top_k; j++) {
            int best = -1;
            for (int e = 0; e < experts.count; e++)
                if (!is_chosen(t, experts, j, e) && (best < 0 || score[e] > score[best])) best = e;
            const float max = score[best];
            float sum = 0.0f;
            for (int e = 0; e < experts.count; e++) {
                const bool below_jitter = (max - score[e]) / std::max(std::fabs(score[e]), max) > experts.jitter_eps;
                if (!below_jitter && !is_chosen(t, experts, j, e)) sum += std::exp(score[e] - max);
            }
            choices[size_t(t) * experts.top_k + j] = best;
            weights[size_t(t) * experts.top_k + j] = 1.0f / sum;
        }
    }

    // Return whether an expert is among the first j choices of a row.
    bool is_chosen(int t, const Experts& experts, int j, int expert) const {
        const int* first = &choices[size_t(t) * experts.top_k];
        return std::find(first, first + j, expert) != first + j;
    }

    std::vector<int> choices;  // [T, top_k]
    std::vector<int> next;  // by expert
    std::vector<Group> groups;
};

// Compute y [grouped rows, N] by the linear of each group's expert. `rows_of(group)` returns the group's rows.
template <class RowsOf>
inline void multiply_groups(Team& team, const Linear& all, const Experts& experts, const Routing& routing, int T,
                            const RowsOf& rows_of, float* y) {
    const int N = all.N / experts.count, panels = N / PANEL, pieces = (panels + PANELS_PER_TASK - 1) / PANELS_PER_TASK;
    team.parallel_for(Routing::max_groups(T, experts) * pieces, [&](int i) {
        const Routing::Group& group = routing.group(i / pieces);
        if (!group.count) return;
        const int first = i % pieces * PANELS_PER_TASK, last = std::min(first + PANELS_PER_TASK, panels);
        const Linear expert = stacked_part(all, group.expert, experts.count);
        multiply_range(expert, rows_of(group), group.count, y + size_t(group.first) * N, Epilogue::WRITE, first, last);
    });
}

}  // namespace mlflow_llm
