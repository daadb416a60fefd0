// The work of decoder.h, phase by phase.
#pragma once

#include <stdexcept>

#include "decoder.h"

namespace mlt {

inline void Decoder::plan(const Step& step) {
    rows.clear(), items.clear();
    split.assign(step.T, -1);
    int at = 0, parts = 0;
    bool in_others = false;  // some read in others' slots
    for (int r = 0; r < step.num_runs; r++) in_others |= step.runs[r].num_parts > 0;
    for (int r = 0; r < step.num_runs; r++) {
        const Run& run = step.runs[r];
        for (int i = 0; i < run.count; i++) rows.push_back({r, run.start + i});
        const int segments = (run.start + run.count + SEGMENT - 1) / SEGMENT;
        for (int kv_head = 0; kv_head < shape.kv_heads; kv_head++) {
            if (run.count == 1 && segments > 1) {  // a long context is shared out; join() merges in order
                split[at] = parts;
                for (int s = 0; s < segments && !in_others; s++)
                    items.push_back({at, 1, kv_head, s, partial_of(at, kv_head, s), false});
            } else {
                for (int a = 0; a < run.count; a += rows_together())
                    items.push_back({at + a, std::min(rows_together(), run.count - a), kv_head, -1, -1, false});
            }
        }
        if (split[at] >= 0) parts += shape.kv_heads * segments * parts_together();
        at += run.count;
    }
    if (in_others) plan_together(step);
    const auto adapter_of = [&](int t) { return step.runs[rows[t].run].adapter; };
    group_rows(step.T, Pools::threads_wanted(), adapter_of, groups);
    adapted = std::any_of(groups.begin(), groups.end(), [](const RowGroup& group) { return group.adapter >= 0; });
    group_rows(step.num_kept, Pools::threads_wanted(), [&](int i) { return adapter_of(step.kept[i]); }, kept_groups);
    if (shape.kv == Kind::BF16) tiled_partials.resize(std::max(tiled_partials.size(), size_t(parts)));
    else partials.resize(std::max(partials.size(), size_t(parts)));
    const auto room = [&](AlignedFloats& buffer, int width) {
        if (buffer.size() < size_t(step.T) * width) buffer.resize(size_t(step.T) * width);
    };
    const int attention = shape.heads * shape.head_dim;
    if (shape.apart) room(branch, shape.hidden);
    room(hidden, shape.hidden), room(before, shape.hidden), room(normed, shape.hidden), room(attended, attention);
    room(qkv, attention + 2 * shape.kv_heads * shape.head_dim);
    int inner = 0, experts = 0, chosen = 0, expert_inner = 0;
    for (const Layer& layer : layers) {
        if (layer.down) inner = std::max(inner, layer.down->K);
        if (!layer.experts.router) continue;
        experts = std::max(experts, layer.experts.count), chosen = std::max(chosen, layer.experts.chosen);
        expert_inner = std::max(expert_inner, layer.experts.down->K);
    }
    room(wide, 2 * inner), room(gated, inner);
    rows_for.room(step.T, std::max({shape.hidden, attention, inner}));
    if (!experts) return;
    routing.room(step.T, experts, chosen);
    room(expert_in, chosen * shape.hidden), room(expert_made, chosen * shape.hidden);
    room(expert_wide, 2 * chosen * expert_inner), room(expert_gated, chosen * expert_inner);
    if (inner) room(shared, shape.hidden), room(share, LANES);
    routed_for.room(step.T, shape.hidden);
    expert_for.room(step.T * chosen + 2 * TILE_ROWS, std::max(shape.hidden, expert_inner));  // tiles from any row on
}

// The segments of single rows, where some read in others' slots: what several read in one is read for them together,
// by as many as leave each thread more than one item.
inline void Decoder::plan_together(const Step& step) {
    constexpr int BY_ITSELF = INT32_MAX;  // last: the longest items come first
    reads.clear(), together.clear();
    for (int t = 0; t < step.T; t++) {
        if (split[t] < 0) continue;
        const auto head = kept<const char>(layers[0], step, step.runs[rows[t].run], 0);
        for (int s = 0; s <= rows[t].position / SEGMENT; s++) {
            const int slot = head.slot_of(s * SEGMENT), last = (s + 1) * SEGMENT - 1;
            const bool whole = last <= rows[t].position && head.slot_of(last) == slot;
            reads.push_back({whole ? slot : BY_ITSELF, s, t});
        }
    }
    std::sort(reads.begin(), reads.end(), [](const SegmentRead& a, const SegmentRead& b) {
        return std::tie(a.slot, a.segment, a.row) < std::tie(b.slot, b.segment, b.row);
    });
    const size_t share = reads.size() * shape.kv_heads / (2 * Pools::threads_wanted());
    const size_t most = std::clamp(share, size_t(1), size_t(rows_together()));
    for (size_t a = 0, b; a < reads.size(); a = b) {
        const int slot = reads[a].slot, segment = reads[a].segment, row = reads[a].row, first = int(together.size());
        for (b = a; b < reads.size() && reads[b].slot == slot && reads[b].segment == segment; b++) {
            if (b - a == (slot == BY_ITSELF ? 1 : most)) break;
            together.push_back(reads[b].row);
        }
        for (int kv_head = 0; kv_head < shape.kv_heads; kv_head++) {
            if (b - a == 1) items.push_back({row, 1, kv_head, segment, partial_of(row, kv_head, segment), false});
            else items.push_back({first, int(b - a), kv_head, segment, -1, true});
        }
    }
}

inline void Decoder::step(const Step& step) {
    // Checked at load too. Tiles that were refused since then would be illegal instructions.
    if (shape.kv == Kind::BF16 && !multiplies_bf16()) throw std::runtime_error("keys and values in bfloat16 without tiles");
    plan(step);
    parallel(MOST_THREADS, [&](Team& team) {
        team.each(step.T, [&](int t) { embed(step, t); });
        for (int i = 0; i < shape.layers; i++) layer(team, layers[i], i, step);
        const int H = shape.hidden;
        team.each(int(kept_groups.size()), [&](int g) {
            RowGroup group = kept_groups[g];
            for (int m = 0; m < group.count; m++) group.rows[m] = step.kept[group.rows[m]];
            adapt_down(step, group, shape.layers - 1);
            for (int m = 0; m < group.count; m++) {
                const int i = kept_groups[g].rows[m];
                join_mlp(shape.layers - 1, group.rows[m]);
                norm(&hidden[size_t(group.rows[m]) * H], H, shape.eps, &normed[size_t(i) * H]);
                rows_for.fill(*head, normed.data(), i);
            }
        });
        multiply(team, *head, rows_for.of(*head, normed.data()), step.num_kept, step.logits, Finish::WRITE);
        if (shape.logit_scale != 0.0f || shape.logit_cap != 0.0f)
            team.each(step.num_kept, [&](int i) { finish_logits(step.logits + size_t(i) * head->N); });
    });
}

inline void Decoder::embed(const Step& step, int t) {
    const float* vector = step.vectors ? step.vectors[t] : nullptr;
    const float* from = vector ? vector : embedding + step.ids[t] * shape.hidden;
    const float scale = vector ? shape.vector_scale : shape.word_scale;
    const float* place = positions ? positions + size_t(rows[t].position) * shape.hidden : nullptr;
    float* to = &hidden[size_t(t) * shape.hidden];
    for (int i = 0; i < shape.hidden; i += LANES) {
        __m512 value = _mm512_loadu_ps(from + i);
        if (scale != 1.0f) value = _mm512_mul_ps(value, _mm512_set1_ps(scale));
        if (place) value = _mm512_add_ps(value, _mm512_loadu_ps(place + i));
        _mm512_storeu_ps(to + i, value);
    }
}

// What o or down made of a row goes to its hidden states, where it was not added already.
inline void Decoder::join_branch(const Norm& after, int t) {
    if (!shape.apart) return;
    float *made = &branch[size_t(t) * shape.hidden], *to = &hidden[size_t(t) * shape.hidden];
    after(made, shape.hidden, shape.eps, made);
    const __m512 scale = _mm512_set1_ps(shape.branch_scale);
    for (int i = 0; i < shape.hidden; i += LANES)
        _mm512_storeu_ps(to + i, _mm512_fmadd_ps(_mm512_loadu_ps(made + i), scale, _mm512_loadu_ps(to + i)));
}

inline void Decoder::finish_logits(float* logits) const {
    for (int i = 0; i < head->N; i += LANES) {
        const __mmask16 mask = head->N - i >= LANES ? 0xffff : (1u << (head->N - i)) - 1;
        __m512 value = _mm512_maskz_loadu_ps(mask, logits + i);
        if (shape.logit_scale != 0.0f) value = _mm512_mul_ps(value, _mm512_set1_ps(shape.logit_scale));
        if (shape.logit_cap != 0.0f) value = capped(value, shape.logit_cap, 2.0f / shape.logit_cap);
        _mm512_mask_storeu_ps(logits + i, mask, value);
    }
}

inline void Decoder::layer(Team& team, const Layer& layer, int index, const Step& step) {
    const int H = shape.hidden, T = step.T, A = shape.heads * shape.head_dim;
    const int KV = shape.kv_heads * shape.head_dim, wide_row = A + 2 * KV;
    each_row(
        team, [&](const RowGroup& group) { if (index) adapt_down(step, group, index - 1); },
        [&](int t) {
            if (index) join_mlp(index - 1, t);
            layer.before_attention(&hidden[size_t(t) * H], H, shape.eps, &normed[size_t(t) * H]);
            rows_for.fill(*layer.qkv, normed.data(), t);
        });
    multiply(team, *layer.qkv, rows_for.of(*layer.qkv, normed.data()), T, qkv.data(), Finish::WRITE);
    each_row(
        team,
        [&](const RowGroup& group) {
            adapt(step, group, index, Q, normed, H, qkv.data(), wide_row, shape.q_columns);
            adapt(step, group, index, K, normed, H, qkv.data() + A, wide_row, KV);
            adapt(step, group, index, V, normed, H, qkv.data() + A + KV, wide_row, KV);
        },
        [&](int t) { rotate_row(layer, step, t); });
    team.each(int(items.size()), [&](int i) { attend(layer, step, i); });
    team.each(T, [&](int t) {
        if (split[t] >= 0) join(t);
        keep(step, t, index, O);
        rows_for.fill(*layer.o, attended.data(), t);
    });
    multiply(team, *layer.o, rows_for.of(*layer.o, attended.data()), T, sums().data(), adding());
    each_row(
        team,
        [&](const RowGroup& group) { adapt(step, group, index, O, attended, A, sums().data(), H, H, !shape.apart); },
        [&](int t) {
            join_branch(layer.after_attention, t);
            layer.before_mlp(&hidden[size_t(t) * H], H, shape.eps, &normed[size_t(t) * H]);
            if (layer.gate_up) rows_for.fill(*layer.gate_up, normed.data(), t);
            if (layer.experts.router) routed_for.fill(*layer.experts.gate_up, normed.data(), t);
        });
    if (layer.experts.router) run_experts(team, layer, step);
    if (layer.gate_up) mlp(team, layer, index, step);
}

// Beside experts what it makes stands by itself, until join_mlp().
inline void Decoder::mlp(Team& team, const Layer& layer, int index, const Step& step) {
    const int H = shape.hidden, I = layer.down->K, T = step.T, W = shape.gated ? 2 * I : I;
    const bool beside = layer.experts.router;
    const Rows rows = rows_for.of(*layer.gate_up, normed.data());
    const bool together = shape.gated && !adapted && can_multiply_gated(*layer.gate_up, T);
    if (together) with_activation([&](const auto& act) { multiply_gated(team, *layer.gate_up, rows, T, gated.data(), act); });
    else multiply(team, *layer.gate_up, rows, T, wide.data(), Finish::WRITE);
    each_row(
        team,
        [&](const RowGroup& group) {
            adapt(step, group, index, GATE, normed, H, wide.data(), W, shape.joined ? W : I);
            adapt(step, group, index, UP, normed, H, wide.data() + I, W, I);
            if (layer.experts.share) adapt(step, group, index, SHARE, normed, H, share.data(), LANES, LANES);
        },
        [&](int t) {
            if (!beside) keep(step, t, index, DOWN);
            if (!together) activate(&wide[size_t(t) * W], I, &gated[size_t(t) * I]);
            rows_for.fill(*layer.down, gated.data(), t);
        });
    AlignedFloats& made = beside ? shared : sums();
    multiply(team, *layer.down, rows_for.of(*layer.down, gated.data()), T, made.data(), beside ? Finish::WRITE : adding());
}

// Of rows that are normed, and prepared in `routed_for`.
inline void Decoder::run_experts(Team& team, const Layer& layer, const Step& step) {
    const Experts& experts = layer.experts;
    const int H = shape.hidden, I = experts.down->K, T = step.T, pairs = T * experts.chosen;
    multiply(team, *experts.router, {normed.data(), nullptr}, T, routing.scores.data(), Finish::WRITE);
    const auto choose = [&](int t) {
        routing.choose(t, experts);
        if (experts.share) share[size_t(t) * LANES] = dot(&normed[size_t(t) * H], experts.share, H);
    };
    if (T > 1) team.each(T, choose);
    team.each(1, [&](int) {
        if (T == 1) choose(0);
        routing.gather(T, experts);
    });
    const Linear &up = *experts.gate_up, &down = *experts.down;
    if (T > 1)
        team.each(pairs, [&](int i) {
            const int t = routing.row_of[i];
            expert_for.copy(up, routed_for, t, i);
            if (up.kind == Kind::F32) std::memcpy(&expert_in[size_t(i) * H], &normed[size_t(t) * H], H * sizeof(float));
        });
    const auto read = [&](const Routing::Group& group) {
        return T == 1 ? routed_for.of(up, normed.data()) : expert_for.of(up, expert_in.data(), group.first);
    };
    multiply_groups(team, up, experts, routing, T, read, expert_wide.data());
    team.each(pairs, [&](int i) {
        activate(&expert_wide[size_t(i) * 2 * I], I, &expert_gated[size_t(i) * I]);
        expert_for.fill(down, expert_gated.data(), i);
    });
    const auto inner = [&](const Routing::Group& group) { return expert_for.of(down, expert_gated.data(), group.first); };
    multiply_groups(team, down, experts, routing, T, inner, expert_made.data());
}

// What adapters add to what the MLP of a layer made.
inline void Decoder::adapt_down(const Step& step, const RowGroup& group, int index) {
    const Layer& layer = layers[index];
    if (!layer.down) return;
    const int H = shape.hidden, I = layer.down->K;
    if (layer.experts.router) adapt(step, group, index, DOWN, gated, I, shared.data(), H, H);
    else adapt(step, group, index, DOWN, gated, I, sums().data(), H, H, !shape.apart);
}

// What the MLP of a layer made of a row goes to its hidden states, where it was not added already.
inline void Decoder::join_mlp(int index, int t) {
    const Layer& layer = layers[index];
    const Experts& experts = layer.experts;
    const int H = shape.hidden, chosen = experts.chosen;
    if (experts.router) {
        const int* place = &routing.place[size_t(t) * chosen];
        const float* weights = &routing.weights[size_t(t) * chosen];
        float* to = &sums()[size_t(t) * H];
        const float counts = experts.share ? 1.0f / (1.0f + std::exp(-share[size_t(t) * LANES])) : 1.0f;
        for (int i = 0; i < H; i += LANES) {
            __m512 sum = _mm512_setzero_ps();
            for (int j = 0; j < chosen; j++)
                sum = _mm512_fmadd_ps(_mm512_set1_ps(weights[j]), _mm512_loadu_ps(&expert_made[size_t(place[j]) * H + i]), sum);
            if (layer.down) sum = _mm512_fmadd_ps(_mm512_set1_ps(counts), _mm512_loadu_ps(&shared[size_t(t) * H + i]), sum);
            _mm512_storeu_ps(to + i, shape.apart ? sum : _mm512_add_ps(sum, _mm512_loadu_ps(to + i)));
        }
    }
    join_branch(layer.after_mlp, t);
}

// Calls work(act) with the function of a vector that the shape names.
template <class Work>
inline void Decoder::with_activation(const Work& work) const {
    if (shape.activation == Activation::SILU) work([](__m512 x) { return silu(x); });
    else if (shape.activation == Activation::GELU_TANH) work([](__m512 x) { return gelu_tanh(x); });
    else work([](__m512 x) { return gelu(x); });
}

inline void Decoder::activate(const float* wide, int I, float* out) const {
    with_activation([&](const auto& act) {
        if (shape.gated)
            for (int i = 0; i < I; i += LANES)
                _mm512_storeu_ps(out + i, _mm512_mul_ps(act(_mm512_loadu_ps(wide + i)), _mm512_loadu_ps(wide + I + i)));
        else
            for (int i = 0; i < I; i += LANES) _mm512_storeu_ps(out + i, act(_mm512_loadu_ps(wide + i)));
    });
}

inline void Decoder::adapt(const Step& step, const RowGroup& group, int layer, int member, const AlignedFloats& x,
                           int K, float* y, int width, int N, bool added) const {
    const Factors* f = factors(step, group.adapter, layer, member);
    if (f) adapt_rows(*f, group, {x.data(), K}, K, {y, width}, N, {added ? before.data() : nullptr, N});
}

// Before o or down is added to a row whose adapter needs their output by itself.
inline void Decoder::keep(const Step& step, int t, int layer, int member) {
    const Factors* f = factors(step, step.runs[rows[t].run].adapter, layer, member);
    if (f && f->gain && !shape.apart)
        std::memcpy(&before[size_t(t) * shape.hidden], &hidden[size_t(t) * shape.hidden], shape.hidden * sizeof(float));
}

// Queries are rotated and scaled in place; keys and values go to their place in the slot.
inline void Decoder::rotate_row(const Layer& layer, const Step& step, int t) {
    const int D = shape.head_dim, H = shape.heads, G = shape.kv_heads, position = rows[t].position;
    float* q = &qkv[size_t(t) * (H + 2 * G) * D];
    float *k = q + H * D, *v = k + G * D;
    const int half = layer.rotation < 0 ? 0 : shape.rotated / 2;  // no table: nothing is rotated
    const size_t at = half ? layer.rotation * step.table + size_t(position) * half : 0;
    const float *cos = step.cos + at, *sin = step.sin + at;
    const bool norm_each = layer.q_norm && !shape.norm_all_heads;
    if (layer.q_norm && shape.norm_all_heads) {
        rms_norm(q, layer.q_norm, H * D, shape.eps, q);
        rms_norm(k, layer.k_norm, G * D, shape.eps, k);
    }
    for (int h = 0; h < H; h++) {
        if (norm_each) rms_norm(q + h * D, layer.q_norm, D, shape.eps, q + h * D);
        rotate(q + h * D, cos, sin, half);
        if (shape.kv == Kind::INT8) hadamard(q + h * D, D, shape.scaling / hadamard_order(D));
        else for (int d = 0; d < D; d++) q[h * D + d] *= shape.scaling;
    }
    const Run& run = step.runs[rows[t].run];
    for (int h = 0; h < G; h++) {
        if (norm_each) rms_norm(k + h * D, layer.k_norm, D, shape.eps, k + h * D);
        rotate(k + h * D, cos, sin, half);
        if (shape.kv == Kind::BF16) {
            const auto to = kept<uint16_t>(layer, step, run, h);
            keep_bf16(k + h * D, v + h * D, D, position, to.own_keys(), to.own_values());
        } else if (shape.kv == Kind::INT8) {
            hadamard(k + h * D, D, 1.0f);
            const auto to = kept<uint8_t>(layer, step, run, h);
            keep_int8(k + h * D, v + h * D, D, position, to.own_keys(), to.own_values());
        } else {
            const auto to = kept<float>(layer, step, run, h);
            std::memcpy(to.own_keys() + size_t(position) * D, k + h * D, D * sizeof(float));
            std::memcpy(to.own_values() + size_t(position) * D, v + h * D, D * sizeof(float));
        }
    }
}

// What an item reads first, of keys and values in int8.
inline NextBlock Decoder::first_block(const Layer& layer, const Step& step, const Item& item) const {
    const Row& row = rows[row_of(item, 0)];
    const int from = std::max(seen_from(layer, row.position), item.segment * SEGMENT) / KEPT_BLOCK * KEPT_BLOCK;
    const auto head = kept<const uint8_t>(layer, step, step.runs[row.run], item.kv_head);
    return {head.keys(from), head.values(from)};
}

inline void Decoder::attend(const Layer& layer, const Step& step, int number) {
    const Item& item = items[number];
    if (shape.kv == Kind::BF16) return attend_bf16(layer, step, item);
    const int D = shape.head_dim, G = shape.kv_heads, wide_row = (shape.heads + 2 * G) * D;
    const float* q[QUERY_ROWS * MAX_GROUP];
    int lo[QUERY_ROWS * MAX_GROUP], hi[QUERY_ROWS * MAX_GROUP], n = 0, longest = 0;
    for (int i = 0; i < item.count; i++) {
        const int t = row_of(item, i), position = rows[t].position;
        for (int g = 0; g < group(); g++, n++) {
            q[n] = &qkv[size_t(t) * wide_row + (item.kv_head * group() + g) * D];
            lo[n] = seen_from(layer, position), hi[n] = position + 1;
        }
        longest = std::max(longest, position + 1);
    }
    const Run& run = step.runs[rows[row_of(item, 0)].run];
    if (shape.kv == Kind::INT8) {
        static thread_local ByteQueries own;
        ByteQueries& queries = own;
        queries.count = n, queries.cap = shape.score_cap, queries.words = by_words();
        for (int i = 0; i < n; i++) queries.set(i, q[i], D, lo[i], hi[i]);
        const auto head = kept<const uint8_t>(layer, step, run, item.kv_head);
        NextBlock after;  // mostly the same thread takes the next item
        if (number + 1 < int(items.size())) after = first_block(layer, step, items[number + 1]);
        return attend_segments(item, n, longest, [&](int segment, Partial* states) {
            const int then = (segment + 1) * SEGMENT;
            const bool goes_on = item.segment < 0 && then < longest;
            attend_int8(D, queries, head, segment, goes_on ? NextBlock{head.keys(then), head.values(then)} : after, states);
        });
    }
    const Queries queries{n, q, lo, hi, shape.score_cap};
    const auto head = kept<const float>(layer, step, run, item.kv_head);
    attend_segments(item, n, longest, [&](int segment, Partial* states) {
        attend_segment(D, queries, head, segment, states);
    });
}

// What `segment` makes of one, or of all of them, by as many queries.
template <class Segment>
inline void Decoder::attend_segments(const Item& item, int queries, int longest, const Segment& segment) {
    const int D = shape.head_dim;
    if (item.segment >= 0 && !item.together) return segment(item.segment, &partials[item.partial]);
    thread_local std::vector<Partial> total(QUERY_ROWS * MAX_GROUP), part(QUERY_ROWS * MAX_GROUP);
    if (item.together) {
        segment(item.segment, total.data());
        for (int i = 0; i < queries; i++) {
            Partial& to = partials[partial_of(row_of(item, i / group()), item.kv_head, item.segment) + i % group()];
            to.most = total[i].most, to.sum = total[i].sum;
            std::copy_n(total[i].values, D, to.values);
        }
        return;
    }
    for (int s = 0; s * SEGMENT < longest; s++) {
        segment(s, s ? part.data() : total.data());
        if (s)
            for (int i = 0; i < queries; i++) merge(total[i], part[i], D);
    }
    for (int i = 0; i < queries; i++) {
        const size_t head = size_t(item.row + i / group()) * shape.heads + item.kv_head * group() + i % group();
        finish(total[i], D, &attended[head * D]);
    }
}

// The same over keys and values in bfloat16.
inline void Decoder::attend_bf16(const Layer& layer, const Step& step, const Item& item) {
    const int D = shape.head_dim, G = shape.kv_heads, wide_row = (shape.heads + 2 * G) * D;
    static thread_local TiledQueries queries;
    static thread_local TiledPartial total[COLUMN_TILES], part[COLUMN_TILES];
    float* out[TILED_COLUMNS];
    int n = 0, longest = 0;
    for (int i = 0; i < item.count; i++) {
        const int t = row_of(item, i), position = rows[t].position;
        for (int g = 0; g < group(); g++, n++) {
            const int head = item.kv_head * group() + g;
            queries.set(n, &qkv[size_t(t) * wide_row + head * D], D, seen_from(layer, position), position + 1);
            out[n] = &attended[(size_t(t) * shape.heads + head) * D];
        }
        longest = std::max(longest, position + 1);
    }
    queries.pack(n, D, shape.score_cap);
    const auto head = kept<const uint16_t>(layer, step, step.runs[rows[row_of(item, 0)].run], item.kv_head);
    if (item.together) {
        attend_tiled(D, queries, head, item.segment, part);
        for (int i = 0; i < n; i++) {
            const int column = i % group();
            TiledPartial& to = tiled_partials[partial_of(row_of(item, i / group()), item.kv_head, item.segment)];
            if (!column) clear(to, D);
            take_column(part[i / LANES], i % LANES, D, to, column);
        }
        return;
    }
    if (item.segment >= 0) return attend_tiled(D, queries, head, item.segment, &tiled_partials[item.partial]);
    for (int s = 0; s * SEGMENT < longest; s++) {
        attend_tiled(D, queries, head, s, s ? part : total);
        if (s)
            for (int c = 0; c < queries.tiles(); c++) merge(total[c], part[c], D);
    }
    for (int c = 0; c < queries.tiles(); c++) finish(total[c], D, std::min(LANES, n - c * LANES), out + c * LANES);
}

// The segments of a decode over a long context, merged in order.
inline void Decoder::join(int t) {
    const int D = shape.head_dim, segments = rows[t].position / SEGMENT + 1;
    if (shape.kv == Kind::BF16) {
        for (int kv_head = 0; kv_head < shape.kv_heads; kv_head++) {
            TiledPartial* first = &tiled_partials[split[t] + kv_head * segments];
            for (int s = 1; s < segments; s++) merge(first[0], first[s], D);
            float* out[LANES];
            for (int g = 0; g < group(); g++)
                out[g] = &attended[(size_t(t) * shape.heads + kv_head * group() + g) * D];
            finish(first[0], D, group(), out);
        }
        return;
    }
    for (int head = 0; head < shape.heads; head++) {
        Partial* first = &partials[split[t] + head / group() * segments * group() + head % group()];
        for (int s = 1; s < segments; s++) merge(first[0], first[s * group()], D);
        finish(first[0], D, &attended[(size_t(t) * shape.heads + head) * D]);
    }
}

}  // namespace mlt
