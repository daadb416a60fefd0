// A BERT-like encoder over whole texts side by side, without padding.
//
//   ids ─ word + position ─ norm ─┬ q,k,v ─ attend ─ o ─(+)─ norm ─ up, gelu ─ down ─(+)─ norm ─┬─ hidden
//                                 └───────────────────────── layers ────────────────────────────┘
//
// Norms may stand before the branches instead (and one behind all layers), the MLP may be gated, gelu(up) * gate, and
// where a token is may be said by rotations or by a bias of scores instead of a table of positions.
//
// Many texts are cut into groups, and a thread takes a group through all layers: no thread waits, and a group's
// activations stay in that core's second cache. Few texts are one group, which all threads take together.
#pragma once

#include <vector>

#include "encoder_attention.h"
#include "linear.h"
#include "norms.h"

namespace mlt {

constexpr int GROUP = 128;  // rows of a group that one thread takes, about
constexpr int FEW = 48;     // rows a thread below which waiting costs less than each thread reading all weights

struct EncoderLayer {
    const Linear *qkv, *o, *up, *down;
    Norm attention, mlp;  // before these, or behind them
    int32_t window;       // tokens nearer than this are seen, to both sides; 0: all
    int32_t rotation;     // which table of rotations, -1: none
};

// `positions`, or null, begins with the first position of a text and has what all texts add besides.
struct EncoderEmbeddings {
    const float *words, *positions;  // [vocabulary, H], [longest text, H]
    Norm norm, last;                 // the last behind all layers
    const float *cos, *sin;          // [tables, longest text, D / 2]
    const float* bias;               // [heads, 2 * longest text]: of a key that far before a query, and so on; or null
};

struct EncoderShape {
    int32_t hidden, heads, head_dim, intermediate, layers, longest;
    float eps, scaling;
    int32_t norms_before, gated;
};

class Encoder {
  public:
    EncoderShape shape;
    EncoderEmbeddings embeddings;
    std::vector<EncoderLayer> layers;

    // Token ids of texts of these lengths one after the other -> `hidden` [T, H].
    void run(const int32_t* ids, const int32_t* lengths, int count, float* hidden) {
        const int threads = Pools::threads_wanted();
        texts.clear();
        int T = 0;
        for (int i = 0; i < count; T += lengths[i++]) texts.push_back({T, lengths[i]});
        const int rounds = (T + threads * GROUP - 1) / (threads * GROUP);
        cut(T, threads * rounds);
        const bool alone = T >= threads * FEW && longest_share(threads) <= 1.1 * T / threads;
        if (!alone) cut(T, rounds);
        rooms.resize(std::max(rooms.size(), size_t(alone ? threads : 1)));
        int most = 0;
        for (const Group& group : groups) most = std::max(most, group.rows);
        for (Room& room : rooms) room.grow(shape, most);
        parallel(threads, [&](Team& team) {
            if (!alone) {
                for (const Group& group : groups) pass(team, group, ids, hidden, rooms[0]);
                return;
            }
            team.each(int(groups.size()), [&](int g) {
                Team myself;
                pass(myself, groups[g], ids, hidden, rooms[team.thread]);
            });
        });
    }

  private:
    struct Text { int row, length; };
    struct Group { int first, last, row, rows; };  // texts [first, last)
    struct Room {
        AlignedFloats wide, attended;  // q,k,v or what is between up and down; by heads
        AlignedFloats normed, gated;   // where norms stand before, where there is a gate
        Prepared rows_for;

        void grow(const EncoderShape& shape, size_t T) {
            const size_t width = size_t(shape.heads) * shape.head_dim, inner = shape.intermediate;
            const auto grow = [](AlignedFloats& buffer, size_t size) {
                if (buffer.size() < size) buffer.resize(size);
            };
            grow(wide, T * std::max(width * 3, shape.gated ? 2 * inner : inner)), grow(attended, T * width);
            if (shape.norms_before) grow(normed, T * shape.hidden);
            if (shape.gated) grow(gated, T * inner);
            rows_for.room(T, std::max({size_t(shape.hidden), width, inner}));
        }
    };

    std::vector<Text> texts;
    std::vector<Group> groups;
    std::vector<Room> rooms;  // by thread, or the first for all

    // Whole texts in at most `parts` groups of about as many rows.
    void cut(int T, int parts) {
        groups.clear();
        int64_t before = -1;
        for (int i = 0; i < int(texts.size()); i++) {
            const int64_t part = (2 * int64_t(texts[i].row) + texts[i].length) * parts / (2 * std::max(T, 1));
            if (part != before) groups.push_back({i, i, texts[i].row, 0});
            before = part;
            groups.back().last = i + 1, groups.back().rows += texts[i].length;
        }
    }

    // Rows of the thread with most, when each takes the next group as soon as it can.
    int longest_share(int threads) const {
        std::vector<int> rows(threads, 0);
        for (const Group& group : groups) *std::min_element(rows.begin(), rows.end()) += group.rows;
        return *std::max_element(rows.begin(), rows.end());
    }

    void pass(Team& team, const Group& group, const int32_t* ids, float* hidden, Room& room) const {
        team.each(group.last - group.first, [&](int i) {
            const auto [row, length] = texts[group.first + i];
            for (int t = 0; t < length; t++) embed(ids[row + t], t, hidden + size_t(row + t) * shape.hidden);
        });
        float* rows = hidden + size_t(group.row) * shape.hidden;
        for (const EncoderLayer& each : layers) layer(team, each, group, rows, room);
        if (embeddings.last.weight) norm(team, embeddings.last, group.rows, rows, rows);
    }

    void norm(Team& team, const Norm& norm, int T, const float* from, float* to) const {
        const size_t H = shape.hidden;
        team.each(T, [&](int t) { norm(from + t * H, H, shape.eps, to + t * H); });
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
        const size_t table = size_t(layer.rotation) * shape.longest * half;
        for (int t = 0; t < length; t++, q += row, k += row) {
            const size_t at = table + size_t(t) * half;
            rotate(q, embeddings.cos + at, embeddings.sin + at, half);
            rotate(k, embeddings.cos + at, embeddings.sin + at, half);
        }
    }

    void layer(Team& team, const EncoderLayer& layer, const Group& group, float* hidden, Room& room) const {
        const int D = shape.head_dim, W = shape.heads * D, T = group.rows, I = shape.intermediate;
        const auto linear = [&](const Linear& w, const float* x, float* y, Finish finish) {
            if (w.kind != Kind::F32) team.each(T, [&](int t) { room.rows_for.fill(w, x, t); });
            multiply(team, w, room.rows_for.of(w, x), T, y, finish);
        };
        const bool before = shape.norms_before;
        float* in = before ? room.normed.data() : hidden;
        if (before) norm(team, layer.attention, T, hidden, in);
        linear(*layer.qkv, in, room.wide.data(), Finish::WRITE);
        team.each((group.last - group.first) * shape.heads, [&](int i) {
            static thread_local HeadAttention attention;
            const Text& text = texts[group.first + i / shape.heads];
            const int head = i % shape.heads;
            const size_t row = text.row - group.row, at = head * D;
            float* q = &room.wide[row * 3 * W + at];
            if (layer.rotation >= 0) rotate_head(layer, q, q + W, 3 * W, text.length);
            Sight sight{layer.window};
            if (embeddings.bias) sight.bias = embeddings.bias + size_t(head) * 2 * shape.longest + shape.longest;
            attention.attend(q, q + W, q + 2 * W, 3 * W, text.length, D, shape.scaling, sight,
                             &room.attended[row * W + at], W);
        });
        linear(*layer.o, room.attended.data(), hidden, Finish::ADD);
        norm(team, before ? layer.mlp : layer.attention, T, hidden, in);
        linear(*layer.up, in, room.wide.data(), shape.gated ? Finish::WRITE : Finish::GELU);
        if (shape.gated)
            team.each(T, [&](int t) {
                const float* up = &room.wide[size_t(t) * 2 * I];
                float* to = &room.gated[size_t(t) * I];
                for (int i = 0; i < I; i += LANES)
                    _mm512_storeu_ps(to + i, _mm512_mul_ps(gelu(_mm512_loadu_ps(up + i)), _mm512_loadu_ps(up + I + i)));
            });
        linear(*layer.down, shape.gated ? room.gated.data() : room.wide.data(), hidden, Finish::ADD);
        if (!before) norm(team, layer.mlp, T, hidden, hidden);
    }
};

}  // namespace mlt
