// A decoder of the Llama family run whole: embedding, layers, final norm, head; one call of the threads a step.
//
//   hidden ─ norm ─ q,k,v ─ rotate, write KV ─ attend ─ o ─(+)─ norm ─ gate,up ─ silu·up ─ down ─(+)─ ... ─ norm ─ head
//
// Everything between two GEMMs works on single rows, so what adapters add is added there too, to the rows of one adapter
// together (lora.h).
#pragma once

#include <vector>

#include "attention.h"
#include "linear.h"
#include "lora.h"
#include "tile_attention.h"

namespace mlt {

constexpr int QUERY_ROWS = 8;  // rows of a prompt that one item of attention takes
constexpr int MAX_GROUP = 16;  // query heads of a KV head

enum Member { Q, K, V, O, GATE, UP, DOWN, MEMBERS };

struct Layer {
    const float *norm1, *norm2;      // [H]
    const float *q_norm, *k_norm;    // [D], or null
    const Linear *qkv, *o, *gate_up, *down;
    int32_t window;                  // tokens a query sees, 0: all before it
    int64_t kv_offset;               // of this layer in a slot, in numbers: K [Hkv, S, D] then V
};

struct Shape {
    int32_t hidden, heads, kv_heads, head_dim, intermediate, layers, slot_tokens;
    int64_t slot_elements;
    float eps, scaling;
    int32_t bf16_kv;  // 1: keys and values are kept in bfloat16, as tile_attention.h has them; 0: in float32
};

// Consecutive tokens of one sequence in the flat row of a step.
struct Run {
    int32_t slot, start, count, adapter;  // adapter -1: the base
};

struct Step {
    const Run* runs;
    int32_t num_runs, T;
    const int64_t* ids;          // [T]
    const float *cos, *sin;      // [positions, D / 2]
    void* slab;
    const Factors* const* adapters;  // by number: [layers * MEMBERS]
    const int32_t* kept;         // [num_kept] rows whose logits are wanted
    int32_t num_kept;
    float* logits;               // [num_kept, vocabulary]
    const float* const* vectors; // [T] in place of the embedding of an id, or null; or null: of none
};

class Decoder {
  public:
    Shape shape;
    std::vector<Layer> layers;
    const float *embedding, *norm;
    const Linear* head;

    void step(const Step& step);

  private:
    struct Row { int run, position; };
    // A thread's piece of attention: rows [row, row + count) of a run for one KV head, one segment or (-1) all.
    struct Item { int row, count, kv_head, segment, partial; };

    std::vector<Row> rows;
    std::vector<Item> items;
    std::vector<RowGroup> groups, kept_groups;  // of rows, and of places among those whose logits are wanted
    std::vector<int> split;  // by row: first of its partials, or -1
    std::vector<Partial> partials;
    std::vector<TiledPartial> tiled_partials;
    std::vector<float> hidden, normed, qkv, attended, wide, gated;
    std::vector<float> before;  // hidden states that o and down are added to, of rows whose adapter has a gain there
    Prepared rows_for;

    void plan(const Step& step);
    void layer(Team& team, const Layer& layer, int index, const Step& step);
    void rotate_row(const Layer& layer, const Step& step, int t);
    void attend(const Layer& layer, const Step& step, const Item& item);
    void attend_bf16(const Layer& layer, const Step& step, const Item& item);
    void join(int t);
    const Factors* factors(const Step& step, int adapter, int layer, int member) const {
        return adapter < 0 ? nullptr : &step.adapters[adapter][layer * MEMBERS + member];
    }
    void adapt(const Step& step, const RowGroup& group, int layer, int member, const std::vector<float>& x, int K,
               float* y, int width, int N, bool added = false) const;
    void keep(const Step& step, int t, int layer, int member);
    int group() const { return shape.heads / shape.kv_heads; }
    // Rows of a prompt that one item takes, and softmaxes that a segment of a row has for a KV head.
    int rows_together() const { return shape.bf16_kv ? std::max(1, TILED_COLUMNS / group()) : QUERY_ROWS; }
    int parts_together() const { return shape.bf16_kv ? 1 : group(); }
    // Where a KV head's keys and values of a layer begin in a run's slot.
    template <class T>
    std::pair<T*, T*> kept(const Layer& layer, const Step& step, const Run& run, int kv_head) const {
        const size_t S = shape.slot_tokens, D = shape.head_dim;
        T* slot = (T*)step.slab + run.slot * shape.slot_elements + layer.kv_offset;
        return {slot + kv_head * S * D, slot + (shape.kv_heads + kv_head) * S * D};
    }
    int seen_from(const Layer& layer, int position) const {
        return layer.window ? std::max(0, position + 1 - layer.window) : 0;
    }
};

}  // namespace mlt
