// A BERT-like encoder over whole texts side by side, without padding.
//
//   ids ─ word + position ─ norm ─┬ q,k,v ─ attend ─ o ─(+)─ norm ─ up, gelu ─ down ─(+)─ norm ─┬─ hidden
//                                 └───────────────────────── layers ────────────────────────────┘
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
    const float *norm1, *bias1, *norm2, *bias2;  // [H]
};

// `positions` begins with the first position of a text and has what all texts add besides.
struct EncoderEmbeddings {
    const float *words, *positions, *norm, *bias;  // [vocabulary, H], [longest text, H], [H], [H]
};

struct EncoderShape {
    int32_t hidden, heads, head_dim, intermediate, layers;
    float eps, scaling;
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
        std::vector<float> wide, attended;  // q,k,v or what is between up and down; by heads
        Prepared rows_for;

        void grow(const EncoderShape& shape, size_t T) {
            const size_t width = size_t(shape.heads) * shape.head_dim, inner = shape.intermediate;
            const auto grow = [](std::vector<float>& buffer, size_t size) {
                if (buffer.size() < size) buffer.resize(size);
            };
            grow(wide, T * std::max(width * 3, inner)), grow(attended, T * width);
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
    }

    void embed(int id, int position, float* x) const {
        const float* word = embeddings.words + size_t(id) * shape.hidden;
        const float* place = embeddings.positions + size_t(position) * shape.hidden;
        for (int i = 0; i < shape.hidden; i += LANES)
            _mm512_storeu_ps(x + i, _mm512_add_ps(_mm512_loadu_ps(word + i), _mm512_loadu_ps(place + i)));
        layer_norm(x, embeddings.norm, embeddings.bias, shape.hidden, shape.eps, x);
    }

    void layer(Team& team, const EncoderLayer& layer, const Group& group, float* hidden, Room& room) const {
        const int H = shape.hidden, D = shape.head_dim, W = shape.heads * D, T = group.rows;
        const auto linear = [&](const Linear& w, const float* x, float* y, Finish finish) {
            if (w.kind != Kind::F32) team.each(T, [&](int t) { room.rows_for.fill(w, x, t); });
            multiply(team, w, room.rows_for.of(w, x), T, y, finish);
        };
        linear(*layer.qkv, hidden, room.wide.data(), Finish::WRITE);
        team.each((group.last - group.first) * shape.heads, [&](int i) {
            static thread_local HeadAttention head;
            const Text& text = texts[group.first + i / shape.heads];
            const size_t row = text.row - group.row, at = i % shape.heads * D;
            const float* q = &room.wide[row * 3 * W + at];
            head.attend(q, q + W, q + 2 * W, 3 * W, text.length, D, shape.scaling, &room.attended[row * W + at], W);
        });
        linear(*layer.o, room.attended.data(), hidden, Finish::ADD);
        const auto norm = [&](const float* weight, const float* bias) {
            team.each(T, [&](int t) {
                float* row = hidden + size_t(t) * H;
                layer_norm(row, weight, bias, H, shape.eps, row);
            });
        };
        norm(layer.norm1, layer.bias1);
        linear(*layer.up, hidden, room.wide.data(), Finish::GELU);
        linear(*layer.down, room.wide.data(), hidden, Finish::ADD);
        norm(layer.norm2, layer.bias2);
    }
};

}  // namespace mlt
