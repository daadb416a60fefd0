// A BERT-like encoder over whole texts side by side, without padding.
//
//   ids ─ word + position ─ norm ─┬ q,k,v ─ attend ─ o ─(+)─ norm ─ up, gelu ─ down ─(+)─ norm ─┬─ hidden
//                                 └───────────────────────── layers ────────────────────────────┘
//
// Norms may precede the branches instead (with one after all layers), the MLP may be gated, gelu(up) * gate, and
// positions may be given by rotations or by a bias of the scores instead of a table.
//
// Many texts are cut into groups, and a thread takes a group through all layers: no thread waits, and a group's
// activations stay in its core's L2. Few texts are one group, which all threads process together.
#pragma once

#include <vector>

#include "attention/encoder_attention.h"
#include "linear/dispatch.h"
#include "model/norms.h"

namespace mlflow_llm {

constexpr int TARGET_GROUP_ROWS = 128;  // approximate rows of a group that one thread processes
// with fewer rows per thread, waiting costs less than each thread reading all weights
constexpr int MIN_ROWS_PER_THREAD = 48;

struct EncoderLayer {
    const Linear *qkv, *o, *up, *down;
    Norm attention, mlp;  // before attention and MLP, or after them
    int32_t window;  // tokens nearer than this are seen, to both sides; 0: all
    int32_t rotary_table;  // index of the table of rotations; -1: none
};

// `positions`, or null, starts at the first position of a text and includes what is added to every token.
struct EncoderEmbeddings {
    const float *words, *positions;  // [vocabulary, H], [max_length, H]
    Norm norm, last;  // `last` follows all layers
    const float *cos, *sin;  // [tables, max_length, D / 2]
    const float* bias;  // [heads, 2 * max_length]: by distance of key and query, from max_length before on; or null
};

struct EncoderShape {
    int32_t hidden, heads, head_dim, intermediate, layers, max_length;
    float eps, scaling;
    int32_t norms_before, gated;
};

class Encoder {
  public:
    EncoderShape shape;
    EncoderEmbeddings embeddings;
    std::vector<EncoderLayer> layers;

    // Compute the hidden states [T, H] of texts of these lengths, whose token ids follow each other.
    void run(const int32_t* ids, const int32_t* lengths, int count, float* hidden) {
        const int threads = ProcessPool::configured_threads();
        texts.clear();
        int T = 0;
        for (int i = 0; i < count; T += lengths[i++]) texts.push_back({T, lengths[i]});
        const int rounds = (T + threads * TARGET_GROUP_ROWS - 1) / (threads * TARGET_GROUP_ROWS);
        make_groups(T, threads * rounds);
        const bool group_per_thread =
            T >= threads * MIN_ROWS_PER_THREAD && max_thread_rows(threads) <= 1.1 * T / threads;
        if (!group_per_thread) make_groups(T, rounds);
        scratch.resize(std::max(scratch.size(), size_t(group_per_thread ? threads : 1)));
        int max_rows = 0;
        for (const Group& group : groups) max_rows = std::max(max_rows, group.rows);
        for (Scratch& buffers : scratch) buffers.grow(shape, max_rows);
        parallel(threads, [&](Team& team) {
            if (!group_per_thread) {
                for (const Group& group : groups) run_group(team, group, ids, hidden, scratch[0]);
                return;
            }
            team.parallel_for(int(groups.size()), [&](int g) {
                Team myself;
                run_group(myself, groups[g], ids, hidden, scratch[team.thread]);
            });
        });
    }

  private:
    struct Text { int row, length; };
    struct Group { int first, last, row, rows; };  // texts [first, last)
    struct Scratch {
        AlignedFloats inner_out, attended;  // q,k,v or the MLP's inner values; heads
        AlignedFloats normed, mlp_act;  // only with norms_before, only with a gated MLP
        RowBuffer linear_rows;

        void grow(const EncoderShape& shape, size_t T) {
            const size_t width = size_t(shape.heads) * shape.head_dim, inner = shape.intermediate;
            const auto grow = [](AlignedFloats& buffer, size_t size) {
                if (buffer.size() < size) buffer.resize(size);
            };
            grow(inner_out, T * std::max(width * 3, shape.gated ? 2 * inner : inner)), grow(attended, T * width);
            if (shape.norms_before) grow(normed, T * shape.hidden);
            if (shape.gated) grow(mlp_act, T * inner);
            linear_rows.reserve(T, std::max({size_t(shape.hidden), width, inner}));
        }
    };

    std::vector<Text> texts;
    std::vector<Group> groups;
    std::vector<Scratch> scratch;  // by thread, or one for all

    // Cut the texts into at most `parts` groups of similar numbers of rows.
    void make_groups(int T, int parts) {
        groups.clear();
        int64_t before = -1;
        for (int i = 0; i < int(texts.size()); i++) {
            const int64_t part = (2 * int64_t(texts[i].row) + texts[i].length) * parts / (2 * std::max(T, 1));
            if (part != before) groups.push_back({i, i, texts[i].row, 0});
            before = part;
            groups.back().last = i + 1, groups.back().rows += texts[i].length;
        }
    }

    // Return the most rows that a thread gets if each takes the next group when it is idle.
    int max_thread_rows(int threads) const {
        std::vector<int> rows(threads, 0);
        for (const Group& group : groups) *std::min_element(rows.begin(), rows.end()) += group.rows;
        return *std::max_element(rows.begin(), rows.end());
    }

    void run_group(Team& team, const Group& group, const int32_t* ids, float* hidden, Scratch& buffers) const {
        team.parallel_for(group.last - group.first, [&](int i) {
            const auto [row, length] = texts[group.first + i];
            for (int t = 0; t < length; t++) embed(ids[row + t], t, hidden + size_t(row + t) * shape.hidden);
        });
        float* rows = hidden + size_t(group.row) * shape.hidden;
        for (const EncoderLayer& each : layers) layer(team, each, group, rows, buffers);
        if (embeddings.last.weight) norm(team, embeddings.last, group.rows, rows, rows);
    }

    void norm(Team& team, const Norm& norm, int T, const float* from, float* to) const {
        const size_t H = shape.hidden;
        team.parallel_for(T, [&](int t) { norm(from + t * H, H, shape.eps, to + t * H); });
    }

    void embed(int id, int position, float* x) const {
        const float* word = embeddings.words + size_t(id) * shape.hidden;
        if (!embeddings.positions) return embeddings.norm(word, shape.hidden, shape.eps, x);
        const float* place = embeddings.positions + size_t(position) * shape.hidden;
        for (int i = 0; i < shape.hidden; i += LANES)
            _mm512_storeu_ps(x + i, _mm512_add_ps(_mm512_loadu_ps(word + i), _mm512_loadu_ps(place + i)));
        embeddings.norm(x, shape.hidden, shape.eps, x);
    }

    void rotate_head(const EncoderLayer& layer, float* q, float* k, int row, int length) const {
        const int half = shape.head_dim / 2;
        const size_t table = size_t(layer.rotary_table) * shape.max_length * half;
        for (int t = 0; t < length; t++, q += row, k += row) {
            const size_t at = table + size_t(t) * half;
            rotate(q, embeddings.cos + at, embeddings.sin + at, half);
            rotate(k, embeddings.cos + at, embeddings.sin + at, half);
        }
    }

    void layer(Team& team, const EncoderLayer& layer, const Group& group, float* hidden, Scratch& buffers) const {
        const int D = shape.head_dim, W = shape.heads * D, T = group.rows, I = shape.intermediate;
        const auto linear = [&](const Linear& w, const float* x, float* y, Epilogue epilogue) {
            if (w.kind != Kind::F32) team.parallel_for(T, [&](int t) { buffers.linear_rows.fill(w, x, t); });
            multiply(team, w, buffers.linear_rows.rows(w, x), T, y, epilogue);
        };
        const bool before = shape.norms_before;
        float* in = before ? buffers.normed.data() : hidden;
        if (before) norm(team, layer.attention, T, hidden, in);
        linear(*layer.qkv, in, buffers.inner_out.data(), Epilogue::WRITE);
        team.parallel_for((group.last - group.first) * shape.heads, [&](int i) {
            static thread_local HeadAttention attention;
            const Text& text = texts[group.first + i / shape.heads];
            const int head = i % shape.heads;
            const size_t row = text.row - group.row, at = head * D;
            float* q = &buffers.inner_out[row * 3 * W + at];
            if (layer.rotary_table >= 0) rotate_head(layer, q, q + W, 3 * W, text.length);
            AttentionMask mask{layer.window};
            if (embeddings.bias) mask.bias = embeddings.bias + size_t(head) * 2 * shape.max_length + shape.max_length;
            attention.attend(q, q + W, q + 2 * W, 3 * W, text.length, D, shape.scaling, mask,
                             &buffers.attended[row * W + at], W);
        });
        linear(*layer.o, buffers.attended.data(), hidden, Epilogue::ADD);
        norm(team, before ? layer.mlp : layer.attention, T, hidden, in);
        linear(*layer.up, in, buffers.inner_out.data(), shape.gated ? Epilogue::WRITE : Epilogue::GELU);
        if (shape.gated)
            team.parallel_for(T, [&](int t) {
                const float* up = &buffers.inner_out[size_t(t) * 2 * I];
                float* to = &buffers.mlp_act[size_t(t) * I];
                for (int i = 0; i < I; i += LANES)
                    _mm512_storeu_ps(to + i, _mm512_mul_ps(gelu(_mm512_loadu_ps(up + i)), _mm512_loadu_ps(up + I + i)));
            });
        linear(*layer.down, shape.gated ? buffers.mlp_act.data() : buffers.inner_out.data(), hidden, Epilogue::ADD);
        if (!before) norm(team, layer.mlp, T, hidden, hidden);
    }
};

}  // namespace mlflow_llm
