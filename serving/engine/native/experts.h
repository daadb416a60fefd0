// Experts of a layer: a router chooses a few of them for each row, which gets the weighted sum of what their MLPs make.
//
//   rows ─ router ─ softmax, choose ─ rows of an expert side by side ─ gate,up ─ act·up ─ down ─ weighted sum of a row
//
// All experts of a layer are one linear, one below the other: who quantises, packs or maps it need not know of them. The
// weights of an expert are read once a step for all rows that chose it. A row's sum goes by the order of its own scores,
// the largest first, so it is the same whatever is beside the row.
#pragma once

#include <algorithm>
#include <vector>

#include "encoder_attention.h"
#include "linear.h"

namespace mlt {

struct Experts {
    const Linear *router, *gate_up, *down;  // [count, H], [count * 2 I, H], [count * H, I]; no router: none
    const float* share;  // [H], or null: the sigmoid of a row's product with it is what the shared MLP counts for
    int32_t count, chosen;
    int32_t normalized;  // 1: weights of those chosen add up to 1
    int32_t by_turns;    // 1: each is weighed among those left whose scores are near its own (SparseMixer, Liu et al. 2023)
    float near;          // that they differ by no more than, of the score
};

// Who goes where in one layer; room for a step, used by the layers one after the other.
class Routing {
  public:
    struct Group { int expert, first, count; };  // rows [first, first + count) of those side by side

    AlignedFloats scores;  // [T, experts]
    std::vector<float> weights;  // [T, chosen]
    std::vector<int> place;      // [T, chosen]: the row among those side by side
    std::vector<int> row_of;     // and back

    void room(int T, int most_experts, int most_chosen) {
        const auto grow = [](auto& buffer, size_t size) {
            if (buffer.size() < size) buffer.resize(size);
        };
        grow(scores, size_t(T) * most_experts), grow(weights, size_t(T) * most_chosen);
        grow(chosen, size_t(T) * most_chosen), grow(place, size_t(T) * most_chosen);
        grow(row_of, size_t(T) * most_chosen), grow(groups, most_experts), grow(next, most_experts);
    }

    // No more groups than these; the last of them may be empty.
    static int most_groups(int T, const Experts& experts) { return std::min(experts.count, T * experts.chosen); }
    const Group& group(int i) const { return groups[i]; }

    // Of a row's scores: those that are likeliest, the largest first, of equal ones the first.
    void choose(int t, const Experts& experts) {
        float* score = &scores[size_t(t) * experts.count];
        if (experts.by_turns) return choose_by_turns(t, experts, score);
        const float whole = soften(score, experts.count);
        float* weight = &weights[size_t(t) * experts.chosen];
        float sum = 0.0f;
        for (int j = 0; j < experts.chosen; j++) {
            int best = 0;
            for (int e = 1; e < experts.count; e++)
                if (score[e] > score[best]) best = e;
            chosen[size_t(t) * experts.chosen + j] = best;
            sum += weight[j] = score[best];
            score[best] = -1.0f;  // all are 0 or more
        }
        const float by = experts.normalized ? 1.0f / sum : whole;
        for (int j = 0; j < experts.chosen; j++) weight[j] *= by;
    }

    // The rows of each expert together, in their order.
    void gather(int T, const Experts& experts) {
        const int most = most_groups(T, experts), pairs = T * experts.chosen;
        std::fill_n(next.begin(), experts.count, 0);
        for (int i = 0; i < pairs; i++) next[chosen[i]]++;
        int number = 0, first = 0;
        for (int e = 0; e < experts.count; e++) {
            const int count = next[e];
            if (count) groups[number++] = {e, first, count};
            next[e] = first;
            first += count;
        }
        for (; number < most; number++) groups[number] = {0, 0, 0};
        for (int i = 0; i < pairs; i++) {
            place[i] = next[chosen[i]]++;
            row_of[place[i]] = i / experts.chosen;
        }
    }

  private:
    void choose_by_turns(int t, const Experts& experts, float* score) {
        for (int j = 0; j < experts.chosen; j++) {
            int best = -1;
            for (int e = 0; e < experts.count; e++)
                if (!taken(t, experts, j, e) && (best < 0 || score[e] > score[best])) best = e;
            const float most = score[best];
            float sum = 0.0f;
            for (int e = 0; e < experts.count; e++) {
                const bool far = (most - score[e]) / std::max(std::fabs(score[e]), most) > experts.near;
                if (!far && !taken(t, experts, j, e)) sum += std::exp(score[e] - most);
            }
            chosen[size_t(t) * experts.chosen + j] = best;
            weights[size_t(t) * experts.chosen + j] = 1.0f / sum;
        }
    }

    // Among the first j that a row chose.
    bool taken(int t, const Experts& experts, int j, int expert) const {
        const int* first = &chosen[size_t(t) * experts.chosen];
        return std::find(first, first + j, expert) != first + j;
    }

    std::vector<int> chosen;  // [T, chosen]
    std::vector<int> next;    // by expert
    std::vector<Group> groups;
};

// y [rows side by side, N] by the linear of each group's expert. `rows_of(group)` is what its rows are.
template <class RowsOf>
inline void multiply_groups(Team& team, const Linear& all, const Experts& experts, const Routing& routing, int T,
                            const RowsOf& rows_of, float* y) {
    const int N = all.N / experts.count, panels = N / PANEL, pieces = (panels + PANELS - 1) / PANELS;
    team.each(Routing::most_groups(T, experts) * pieces, [&](int i) {
        const Routing::Group& group = routing.group(i / pieces);
        if (!group.count) return;
        const int first = i % pieces * PANELS, last = std::min(first + PANELS, panels);
        const Linear expert = part(all, group.expert, experts.count);
        multiply_range(expert, rows_of(group), group.count, y + size_t(group.first) * N, Finish::WRITE, first, last);
    });
}

}  // namespace mlt
