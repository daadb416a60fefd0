// The phases of a decoder step (decoder.h).
#pragma once

#include <stdexcept>

#include "model/decoder.h"

namespace mlflow_llm {

inline void Decoder::plan(const Step& step) {
    rows.clear(), items.clear();
    split.assign(step.T, -1);
    int at = 0, parts = 0;
    bool reads_shared = false;  // some chunk reads other slots
    for (int r = 0; r < step.num_chunks; r++) reads_shared |= step.chunks[r].num_parts > 0;
    for (int r = 0; r < step.num_chunks; r++) {
        const Chunk& chunk = step.chunks[r];
        for (int i = 0; i < chunk.count; i++) rows.push_back({r, chunk.start + i});
        const int segments = (chunk.start + chunk.count + SEGMENT_TOKENS - 1) / SEGMENT_TOKENS;
        for (int kv_head = 0; kv_head < shape.kv_heads; kv_head++) {
            if (chunk.count == 1 && segments > 1) {  // a long context is split; merge_segments() merges in order
                split[at] = parts;
                for (int s = 0; s < segments && !reads_shared; s++)
                    items.push_back({at, 1, kv_head, s, partial_of(at, kv_head, s), false});
            } else {
                for (int a = 0; a < chunk.count; a += rows_per_item())
                    items.push_back({at + a, std::min(rows_per_item(), chunk.count - a), kv_head, -1, -1, false});
            }
        }
        if (split[at] >= 0) parts += shape.kv_heads * segments * partials_per_segment();
        at += chunk.count;
    }
    if (reads_shared) plan_shared_segments(step);
    const auto adapter_of = [&](int t) { return step.chunks[rows[t].chunk].adapter; };
    group_rows(step.T, ProcessPool::configured_threads(), adapter_of, groups);
    has_adapters = std::any_of(groups.begin(), groups.end(), [](const RowGroup& group) { return group.adapter >= 0; });
    group_rows(
        step.num_logit_rows, ProcessPool::configured_threads(), [&](int i) { return adapter_of(step.logit_rows[i]); },
        logit_groups);
    if (shape.kv == Kind::BF16) tiled_partials.resize(std::max(tiled_partials.size(), size_t(parts)));
    else partials.resize(std::max(partials.size(), size_t(parts)));
    const auto reserve = [&](AlignedFloats& buffer, int width) {
        if (buffer.size() < size_t(step.T) * width) buffer.resize(size_t(step.T) * width);
    };
    const int attention = shape.heads * shape.head_dim;
    if (shape.separate_branch) reserve(branch, shape.hidden);
    reserve(hidden, shape.hidden), reserve(residual, shape.hidden), reserve(normed, shape.hidden),
        reserve(attended, attention);
    reserve(qkv, attention + 2 * shape.kv_heads * shape.head_dim);
    int inner = 0, experts = 0, top_k = 0, expert_inner = 0;
    for (const Layer& layer : layers) {
        if (layer.down) inner = std::max(inner, layer.down->K);
        if (!layer.experts.router) continue;
        experts = std::max(experts, layer.experts.count), top_k = std::max(top_k, layer.experts.top_k);
        expert_inner = std::max(expert_inner, layer.experts.down->K);
    }
    reserve(gate_up_out, 2 * inner), reserve(mlp_act, inner);
    linear_rows.reserve(step.T, std::max({shape.hidden, attention, inner}));
    if (!experts) return;
    routing.reserve(step.T, experts, top_k);
    reserve(expert_in, top_k * shape.hidden), reserve(expert_out, top_k * shape.hidden);
    reserve(expert_gate_up_out, 2 * top_k * expert_inner), reserve(expert_mlp_act, top_k * expert_inner);
    if (inner) reserve(shared_out, shape.hidden), reserve(shared_gate, LANES);
    routed_rows.reserve(step.T, shape.hidden);
    // tiles read full tiles from any row on
    expert_rows.reserve(step.T * top_k + 2 * TILE_ROWS, std::max(shape.hidden, expert_inner));
}

// Plan the segments of single rows if some read other slots: rows that read a segment in the same slot share a work
// item, as many as leave each thread more than one item.
inline void Decoder::plan_shared_segments(const Step& step) {
    constexpr int PRIVATE_READ = INT32_MAX;  // sorts last, so that the longest items come first
    reads.clear(), shared_rows.clear();
    for (int t = 0; t < step.T; t++) {
        if (split[t] < 0) continue;
        const auto head = cached<const char>(layers[0], step, step.chunks[rows[t].chunk], 0);
        for (int s = 0; s <= rows[t].position / SEGMENT_TOKENS; s++) {
            const int slot = head.slot_of(s * SEGMENT_TOKENS), last = (s + 1) * SEGMENT_TOKENS - 1;
            const bool whole = last <= rows[t].position && head.slot_of(last) == slot;
            reads.push_back({whole ? slot : PRIVATE_READ, s, t});
        }
    }
    std::sort(reads.begin(), reads.end(), [](const SegmentRead& a, const SegmentRead& b) {
        return std::tie(a.slot, a.segment, a.row) < std::tie(b.slot, b.segment, b.row);
    });
    const size_t shared_gate = reads.size() * shape.kv_heads / (2 * ProcessPool::configured_threads());
    const size_t max_rows = std::clamp(shared_gate, size_t(1), size_t(rows_per_item()));
    for (size_t a = 0, b; a < reads.size(); a = b) {
        const int slot = reads[a].slot, segment = reads[a].segment, row = reads[a].row, first = int(shared_rows.size());
        for (b = a; b < reads.size() && reads[b].slot == slot && reads[b].segment == segment; b++) {
            if (b - a == (slot == PRIVATE_READ ? 1 : max_rows)) break;
            shared_rows.push_back(reads[b].row);
        }
        for (int kv_head = 0; kv_head < shape.kv_heads; kv_head++) {
            if (b - a == 1) items.push_back({row, 1, kv_head, segment, partial_of(row, kv_head, segment), false});
            else items.push_back({first, int(b - a), kv_head, segment, -1, true});
        }
    }
}

inline void Decoder::step(const Step& step) {
    // Checked at load too, but permission for tiles may have been refused since; they would be illegal instructions.
    if (shape.kv == Kind::BF16 && !multiplies_bf16())
        throw std::runtime_error("keys and values in bfloat16 need tiles, which are off");
    plan(step);
    parallel(MAX_THREADS, [&](Team& team) {
        team.parallel_for(step.T, [&](int t) { embed(step, t); });
        for (int i = 0; i < shape.layers; i++) layer(team, layers[i], i, step);
        const int H = shape.hidden;
        team.parallel_for(int(logit_groups.size()), [&](int g) {
            RowGroup group = logit_groups[g];
            for (int m = 0; m < group.count; m++) group.rows[m] = step.logit_rows[group.rows[m]];
            adapt_down(step, group, shape.layers - 1);
            for (int m = 0; m < group.count; m++) {
                const int i = logit_groups[g].rows[m];
                add_mlp_output(shape.layers - 1, group.rows[m]);
                norm(&hidden[size_t(group.rows[m]) * H], H, shape.eps, &normed[size_t(i) * H]);
                linear_rows.fill(*head, normed.data(), i);
            }
        });
        multiply(team, *head, linear_rows.rows(*head, normed.data()), step.num_logit_rows, step.logits,
                 Epilogue::WRITE);
        const bool corrects = shape.tied && is_int8(head->kind);
        const bool finishes = shape.logit_scale != 0.0f || shape.logit_cap != 0.0f;
        if (corrects || finishes)
            team.parallel_for(step.num_logit_rows, [&](int i) {
                float* logits = step.logits + size_t(i) * head->N;
                if (corrects) correct_logits(&normed[size_t(i) * H], logits);
                if (finishes) finish_logits(logits);
            });
    });
}

inline void Decoder::embed(const Step& step, int t) {
    const float* vector = step.vectors ? step.vectors[t] : nullptr;
    const float* from = vector ? vector : embedding + step.ids[t] * shape.hidden;
    const float scale = vector ? shape.vector_scale : shape.embedding_scale;
    const float* place = positions ? positions + size_t(rows[t].position) * shape.hidden : nullptr;
    float* to = &hidden[size_t(t) * shape.hidden];
    for (int i = 0; i < shape.hidden; i += LANES) {
        __m512 value = _mm512_loadu_ps(from + i);
        if (scale != 1.0f) value = _mm512_mul_ps(value, _mm512_set1_ps(scale));
        if (place) value = _mm512_add_ps(value, _mm512_loadu_ps(place + i));
        _mm512_storeu_ps(to + i, value);
    }
}

// Add the attention or MLP output to the residual stream, if it is a separate branch.
inline void Decoder::add_branch(const Norm& after, int t) {
    if (!shape.separate_branch) return;
    float *out = &branch[size_t(t) * shape.hidden], *to = &hidden[size_t(t) * shape.hidden];
    after(out, shape.hidden, shape.eps, out);
    const __m512 scale = _mm512_set1_ps(shape.branch_scale);
    for (int i = 0; i < shape.hidden; i += LANES)
        _mm512_storeu_ps(to + i, _mm512_fmadd_ps(_mm512_loadu_ps(out + i), scale, _mm512_loadu_ps(to + i)));
}

// Compute the logits of the likely tokens of row x again, with the embedding's floats. They are few, and int8's errors
// in all others hardly change a probability. Which they are depends on the row alone.
inline void Decoder::correct_logits(const float* x, float* logits) const {
    constexpr int SPANS = 64;  // of tokens; those without a likely one are not looked at again
    const int N = head->N, H = shape.hidden, width = round_up((N + SPANS - 1) / SPANS, LANES);
    const __m512 none = _mm512_set1_ps(-INFINITY);
    const auto load = [&](int i) {
        return _mm512_mask_loadu_ps(none, N - i >= LANES ? 0xffff : (1u << (N - i)) - 1, logits + i);
    };
    float largest[SPANS], most = -INFINITY;
    for (int span = 0; span < SPANS; span++) {
        __m512 max = none, other = none;
        int i = span * width;
        const int end = std::min(i + width, N);
        for (; i + 2 * LANES <= end; i += 2 * LANES) {
            max = _mm512_max_ps(max, _mm512_loadu_ps(logits + i));
            other = _mm512_max_ps(other, _mm512_loadu_ps(logits + i + LANES));
        }
        for (; i < end; i += LANES) max = _mm512_max_ps(max, load(i));
        largest[span] = _mm512_reduce_max_ps(_mm512_max_ps(max, other));
        most = std::max(most, largest[span]);
    }
    if (!std::isfinite(most)) return;
    float within = LIKELY_WITHIN / (shape.logit_scale != 0.0f ? std::abs(shape.logit_scale) : 1.0f);
    int likely[MAX_LIKELY];
    for (int narrowing = 0; narrowing <= NARROWINGS; narrowing++, within *= 0.5f) {
        const float least = most - within;
        int count = 0;
        for (int span = 0; span < SPANS && count <= MAX_LIKELY; span++) {
            if (!(largest[span] >= least)) continue;
            for (int i = span * width; i < std::min((span + 1) * width, N); i += LANES)
                for (unsigned found = _mm512_cmp_ps_mask(load(i), _mm512_set1_ps(least), _CMP_GE_OQ); found;
                     found &= found - 1, count++)
                    if (count < MAX_LIKELY) likely[count] = i + __builtin_ctz(found);
        }
        if (count > MAX_LIKELY) continue;
        for (int c = 0; c < count; c++) {
            const int token = likely[c];
            logits[token] = dot(x, embedding + size_t(token) * H, H) + (head->bias ? head->bias[token] : 0.0f);
        }
        return;
    }
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
    const int KV = shape.kv_heads * shape.head_dim, qkv_width = A + 2 * KV;
    for_each_row(
        team, [&](const RowGroup& group) { if (index) adapt_down(step, group, index - 1); },
        [&](int t) {
            if (index) add_mlp_output(index - 1, t);
            layer.before_attention(&hidden[size_t(t) * H], H, shape.eps, &normed[size_t(t) * H]);
            linear_rows.fill(*layer.qkv, normed.data(), t);
        });
    multiply(team, *layer.qkv, linear_rows.rows(*layer.qkv, normed.data()), T, qkv.data(), Epilogue::WRITE);
    for_each_row(
        team,
        [&](const RowGroup& group) {
            adapt(step, group, index, Q, normed, H, qkv.data(), qkv_width, shape.q_columns);
            adapt(step, group, index, K, normed, H, qkv.data() + A, qkv_width, KV);
            adapt(step, group, index, V, normed, H, qkv.data() + A + KV, qkv_width, KV);
        },
        [&](int t) { rotate_row(layer, step, t); });
    team.parallel_for(int(items.size()), [&](int i) { attend(layer, step, i); });
    team.parallel_for(T, [&](int t) {
        if (split[t] >= 0) merge_segments(t);
        save_residual(step, t, index, O);
        linear_rows.fill(*layer.o, attended.data(), t);
    });
    multiply(team, *layer.o, linear_rows.rows(*layer.o, attended.data()), T, branch_output().data(), branch_epilogue());
    for_each_row(
        team,
        [&](const RowGroup& group) {
            adapt(step, group, index, O, attended, A, branch_output().data(), H, H, !shape.separate_branch);
        },
        [&](int t) {
            add_branch(layer.after_attention, t);
            layer.before_mlp(&hidden[size_t(t) * H], H, shape.eps, &normed[size_t(t) * H]);
            if (layer.gate_up) linear_rows.fill(*layer.gate_up, normed.data(), t);
            if (layer.experts.router) routed_rows.fill(*layer.experts.gate_up, normed.data(), t);
        });
    if (layer.experts.router) run_experts(team, layer, step);
    if (layer.gate_up) mlp(team, layer, index, step);
}

// With experts, the dense MLP writes to a separate buffer; add_mlp_output() adds it.
inline void Decoder::mlp(Team& team, const Layer& layer, int index, const Step& step) {
    const int H = shape.hidden, I = layer.down->K, T = step.T, W = shape.gated ? 2 * I : I;
    const bool has_experts = layer.experts.router;
    const Rows rows = linear_rows.rows(*layer.gate_up, normed.data());
    const bool fuse_gate = shape.gated && !has_adapters && can_multiply_gated(*layer.gate_up, T);
    if (fuse_gate)
        with_activation([&](const auto& act) { multiply_gated(team, *layer.gate_up, rows, T, mlp_act.data(), act); });
    else multiply(team, *layer.gate_up, rows, T, gate_up_out.data(), Epilogue::WRITE);
    for_each_row(
        team,
        [&](const RowGroup& group) {
            adapt(step, group, index, GATE, normed, H, gate_up_out.data(), W, shape.fused_gate_up ? W : I);
            adapt(step, group, index, UP, normed, H, gate_up_out.data() + I, W, I);
            if (layer.experts.shared_expert_gate)
                adapt(step, group, index, SHARED_EXPERT_GATE, normed, H, shared_gate.data(), LANES, LANES);
        },
        [&](int t) {
            if (!has_experts) save_residual(step, t, index, DOWN);
            if (!fuse_gate) activate(&gate_up_out[size_t(t) * W], I, &mlp_act[size_t(t) * I]);
            linear_rows.fill(*layer.down, mlp_act.data(), t);
        });
    AlignedFloats& out = has_experts ? shared_out : branch_output();
    multiply(team, *layer.down, linear_rows.rows(*layer.down, mlp_act.data()), T, out.data(),
             has_experts ? Epilogue::WRITE : branch_epilogue());
}

// Route normalised rows to experts (uses `routed_rows`) and compute the chosen experts' outputs.
inline void Decoder::run_experts(Team& team, const Layer& layer, const Step& step) {
    const Experts& experts = layer.experts;
    const int H = shape.hidden, I = experts.down->K, T = step.T, pairs = T * experts.top_k;
    multiply(team, *experts.router, {normed.data(), nullptr}, T, routing.scores.data(), Epilogue::WRITE);
    const auto choose = [&](int t) {
        routing.choose(t, experts);
        if (experts.shared_expert_gate)
            shared_gate[size_t(t) * LANES] = dot(&normed[size_t(t) * H], experts.shared_expert_gate, H);
    };
    if (T > 1) team.parallel_for(T, choose);
    team.parallel_for(1, [&](int) {
        if (T == 1) choose(0);
        routing.build_groups(T, experts);
    });
    const Linear &up = *experts.gate_up, &down = *experts.down;
    if (T > 1)
        team.parallel_for(pairs, [&](int i) {
            const int t = routing.source_row[i];
            expert_rows.copy_row(up, routed_rows, t, i);
            if (up.kind == Kind::F32) std::memcpy(&expert_in[size_t(i) * H], &normed[size_t(t) * H], H * sizeof(float));
        });
    const auto read = [&](const Routing::Group& group) {
        return T == 1 ? routed_rows.rows(up, normed.data()) : expert_rows.rows(up, expert_in.data(), group.first);
    };
    multiply_groups(team, up, experts, routing, T, read, expert_gate_up_out.data());
    team.parallel_for(pairs, [&](int i) {
        activate(&expert_gate_up_out[size_t(i) * 2 * I], I, &expert_mlp_act[size_t(i) * I]);
        expert_rows.fill(down, expert_mlp_act.data(), i);
    });
    const auto inner = [&](const Routing::Group& group) {
        return expert_rows.rows(down, expert_mlp_act.data(), group.first);
    };
    multiply_groups(team, down, experts, routing, T, inner, expert_out.data());
}

// Add the contributions of adapters to the MLP output of a layer.
inline void Decoder::adapt_down(const Step& step, const RowGroup& group, int index) {
    const Layer& layer = layers[index];
    if (!layer.down) return;
    const int H = shape.hidden, I = layer.down->K;
    if (layer.experts.router) adapt(step, group, index, DOWN, mlp_act, I, shared_out.data(), H, H);
    else adapt(step, group, index, DOWN, mlp_act, I, branch_output().data(), H, H, !shape.separate_branch);
}

// Add a row's MLP output of a layer to the residual stream, if that has not been done.
inline void Decoder::add_mlp_output(int index, int t) {
    const Layer& layer = layers[index];
    const Experts& experts = layer.experts;
    const int H = shape.hidden, top_k = experts.top_k;
    if (experts.router) {
        const int* place = &routing.grouped_row[size_t(t) * top_k];
        const float* weights = &routing.weights[size_t(t) * top_k];
        float* to = &branch_output()[size_t(t) * H];
        const float gate =
            experts.shared_expert_gate ? 1.0f / (1.0f + std::exp(-shared_gate[size_t(t) * LANES])) : 1.0f;
        for (int i = 0; i < H; i += LANES) {
            __m512 sum = _mm512_setzero_ps();
            for (int j = 0; j < top_k; j++)
                sum = _mm512_fmadd_ps(_mm512_set1_ps(weights[j]),
                                      _mm512_loadu_ps(&expert_out[size_t(place[j]) * H + i]), sum);
            if (layer.down)
                sum = _mm512_fmadd_ps(_mm512_set1_ps(gate), _mm512_loadu_ps(&shared_out[size_t(t) * H + i]), sum);
            _mm512_storeu_ps(to + i, shape.separate_branch ? sum : _mm512_add_ps(sum, _mm512_loadu_ps(to + i)));
        }
    }
    add_branch(layer.after_mlp, t);
}

// Call work(act) with the activation function of the shape.
template <class Work>
inline void Decoder::with_activation(const Work& work) const {
    if (shape.activation == Activation::SILU) work([](__m512 x) { return silu(x); });
    else if (shape.activation == Activation::GELU_TANH) work([](__m512 x) { return gelu_tanh(x); });
    else work([](__m512 x) { return gelu(x); });
}

inline void Decoder::activate(const float* gate_up_out, int I, float* out) const {
    with_activation([&](const auto& act) {
        if (shape.gated)
            for (int i = 0; i < I; i += LANES)
                _mm512_storeu_ps(out + i, _mm512_mul_ps(act(_mm512_loadu_ps(gate_up_out + i)),
                                                        _mm512_loadu_ps(gate_up_out + I + i)));
        else
            for (int i = 0; i < I; i += LANES) _mm512_storeu_ps(out + i, act(_mm512_loadu_ps(gate_up_out + i)));
    });
}

inline void Decoder::adapt(const Step& step, const RowGroup& group, int layer, int member, const AlignedFloats& x,
                           int K, float* y, int width, int N, bool added) const {
    const Factors* f = factors(step, group.adapter, layer, member);
    if (f) adapt_rows(*f, group, {x.data(), K}, K, {y, width}, N, {added ? residual.data() : nullptr, N});
}

// Save the hidden states of a row before o or down is added, if its adapter needs their output separately.
inline void Decoder::save_residual(const Step& step, int t, int layer, int member) {
    const Factors* f = factors(step, step.chunks[rows[t].chunk].adapter, layer, member);
    if (f && f->gain && !shape.separate_branch)
        std::memcpy(&residual[size_t(t) * shape.hidden], &hidden[size_t(t) * shape.hidden],
                    shape.hidden * sizeof(float));
}

// Norm and rotate a row's queries and keys; scale queries in place and store keys and values in the slot.
inline void Decoder::rotate_row(const Layer& layer, const Step& step, int t) {
    const int D = shape.head_dim, H = shape.heads, G = shape.kv_heads, position = rows[t].position;
    float* q = &qkv[size_t(t) * (H + 2 * G) * D];
    float *k = q + H * D, *v = k + G * D;
    const int half = layer.rotary_table < 0 ? 0 : shape.rotary_dims / 2;  // without a table nothing is rotated
    const size_t at = half ? layer.rotary_table * step.table_stride + size_t(position) * half : 0;
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
    const Chunk& chunk = step.chunks[rows[t].chunk];
    for (int h = 0; h < G; h++) {
        if (norm_each) rms_norm(k + h * D, layer.k_norm, D, shape.eps, k + h * D);
        rotate(k + h * D, cos, sin, half);
        if (shape.kv == Kind::BF16) {
            const auto to = cached<uint16_t>(layer, step, chunk, h);
            store_bf16(k + h * D, v + h * D, D, position, to.own_keys(), to.own_values());
        } else if (shape.kv == Kind::INT8) {
            hadamard(k + h * D, D, 1.0f);
            const auto to = cached<uint8_t>(layer, step, chunk, h);
            store_int8(k + h * D, v + h * D, D, position, to.own_keys(), to.own_values());
        } else {
            const auto to = cached<float>(layer, step, chunk, h);
            std::memcpy(to.own_keys() + size_t(position) * D, k + h * D, D * sizeof(float));
            std::memcpy(to.own_values() + size_t(position) * D, v + h * D, D * sizeof(float));
        }
    }
}

// Return the first int8 block of keys and values that a work item reads, to prefetch it.
inline NextBlock Decoder::first_block(const Layer& layer, const Step& step, const Item& item) const {
    const Row& row = rows[row_of(item, 0)];
    const int from =
        std::max(seen_from(layer, row.position), item.segment * SEGMENT_TOKENS) / INT8_BLOCK_TOKENS * INT8_BLOCK_TOKENS;
    const auto head = cached<const uint8_t>(layer, step, step.chunks[row.chunk], item.kv_head);
    return {head.keys(from), head.values(from)};
}

inline void Decoder::attend(const Layer& layer, const Step& step, int number) {
    const Item& item = items[number];
    if (shape.kv == Kind::BF16) return attend_bf16(layer, step, item);
    const int D = shape.head_dim, G = shape.kv_heads, qkv_width = (shape.heads + 2 * G) * D;
    const float* q[QUERY_ROWS * MAX_GROUP];
    int lo[QUERY_ROWS * MAX_GROUP], hi[QUERY_ROWS * MAX_GROUP], n = 0, max_length = 0;
    for (int i = 0; i < item.count; i++) {
        const int t = row_of(item, i), position = rows[t].position;
        for (int g = 0; g < group(); g++, n++) {
            q[n] = &qkv[size_t(t) * qkv_width + (item.kv_head * group() + g) * D];
            lo[n] = seen_from(layer, position), hi[n] = position + 1;
        }
        max_length = std::max(max_length, position + 1);
    }
    const Chunk& chunk = step.chunks[rows[row_of(item, 0)].chunk];
    if (shape.kv == Kind::INT8) {
        static thread_local LevelQueries own;
        LevelQueries& queries = own;
        queries.count = n, queries.cap = shape.score_cap, queries.words = uses_words();
        for (int i = 0; i < n; i++) queries.set(i, q[i], D, lo[i], hi[i]);
        const auto head = cached<const uint8_t>(layer, step, chunk, item.kv_head);
        NextBlock after;  // usually the same thread takes the next work item
        if (number + 1 < int(items.size())) after = first_block(layer, step, items[number + 1]);
        return attend_segments(item, n, max_length, [&](int segment, Partial* states) {
            const int following = (segment + 1) * SEGMENT_TOKENS;
            const bool continues = item.segment < 0 && following < max_length;
            attend_int8(D, queries, head, segment,
                        continues ? NextBlock{head.keys(following), head.values(following)} : after, states);
        });
    }
    const Queries queries{n, q, lo, hi, shape.score_cap};
    const auto head = cached<const float>(layer, step, chunk, item.kv_head);
    attend_segments(item, n, max_length, [&](int segment, Partial* states) {
        attend_segment(D, queries, head, segment, states);
    });
}

// Compute a work item with segment(index, states), which computes the partials of one segment for all of the item's
// queries, and merge the segments if the item covers all of them.
template <class Segment>
inline void Decoder::attend_segments(const Item& item, int queries, int max_length, const Segment& segment) {
    const int D = shape.head_dim;
    if (item.segment >= 0 && !item.shares_segment) return segment(item.segment, &partials[item.partial]);
    thread_local std::vector<Partial> total(QUERY_ROWS * MAX_GROUP), part(QUERY_ROWS * MAX_GROUP);
    if (item.shares_segment) {
        segment(item.segment, total.data());
        for (int i = 0; i < queries; i++) {
            Partial& to = partials[partial_of(row_of(item, i / group()), item.kv_head, item.segment) + i % group()];
            to.max = total[i].max, to.sum = total[i].sum;
            std::copy_n(total[i].values, D, to.values);
        }
        return;
    }
    for (int s = 0; s * SEGMENT_TOKENS < max_length; s++) {
        segment(s, s ? part.data() : total.data());
        if (s)
            for (int i = 0; i < queries; i++) merge(total[i], part[i], D);
    }
    for (int i = 0; i < queries; i++) {
        const size_t head = size_t(item.row + i / group()) * shape.heads + item.kv_head * group() + i % group();
        finish(total[i], D, &attended[head * D]);
    }
}

// Compute a work item over keys and values in bfloat16.
inline void Decoder::attend_bf16(const Layer& layer, const Step& step, const Item& item) {
    const int D = shape.head_dim, G = shape.kv_heads, qkv_width = (shape.heads + 2 * G) * D;
    static thread_local TiledQueries queries;
    static thread_local TiledPartial total[COLUMN_TILES], part[COLUMN_TILES];
    float* out[MAX_TILE_QUERIES];
    int n = 0, max_length = 0;
    for (int i = 0; i < item.count; i++) {
        const int t = row_of(item, i), position = rows[t].position;
        for (int g = 0; g < group(); g++, n++) {
            const int head = item.kv_head * group() + g;
            queries.set(n, &qkv[size_t(t) * qkv_width + head * D], D, seen_from(layer, position), position + 1);
            out[n] = &attended[(size_t(t) * shape.heads + head) * D];
        }
        max_length = std::max(max_length, position + 1);
    }
    queries.pack(n, D, shape.score_cap);
    const auto head = cached<const uint16_t>(layer, step, step.chunks[rows[row_of(item, 0)].chunk], item.kv_head);
    if (item.shares_segment) {
        attend_tiled(D, queries, head, item.segment, part);
        for (int i = 0; i < n; i++) {
            const int column = i % group();
            TiledPartial& to = tiled_partials[partial_of(row_of(item, i / group()), item.kv_head, item.segment)];
            if (!column) clear(to, D);
            copy_column(part[i / LANES], i % LANES, D, to, column);
        }
        return;
    }
    if (item.segment >= 0) return attend_tiled(D, queries, head, item.segment, &tiled_partials[item.partial]);
    for (int s = 0; s * SEGMENT_TOKENS < max_length; s++) {
        attend_tiled(D, queries, head, s, s ? part : total);
        if (s)
            for (int c = 0; c < queries.tiles(); c++) merge(total[c], part[c], D);
    }
    for (int c = 0; c < queries.tiles(); c++) finish(total[c], D, std::min(LANES, n - c * LANES), out + c * LANES);
}

// Merge the segments of a row whose context was split, in order.
inline void Decoder::merge_segments(int t) {
    const int D = shape.head_dim, segments = rows[t].position / SEGMENT_TOKENS + 1;
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

}  // namespace mlflow_llm
