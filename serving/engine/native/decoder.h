// A decoder run whole: embedding, layers, final norm, head; one call of the threads a step.
//
//   hidden ─ norm ─ q,k,v ─ rotate, write KV ─ attend ─ o ─(+)─ norm ─ gate,up ─ act·up ─ down ─(+)─ ... ─ norm ─ head
//
// A layer's MLP is one for all rows, or experts (experts.h), or both, added to each other.
//
// What differs between architectures is data of `Shape` and `Layer`: which norms there are (before a branch, behind it,
// of heads or of all of them together), what is rotated and by which table, windows, activations, multipliers, caps.
//
// Everything between two GEMMs works on single rows, so what adapters add is added there too, to the rows of one adapter
// together (lora.h).
#pragma once

#include <tuple>
#include <vector>

#include "attention.h"
#include "experts.h"
#include "hadamard.h"
#include "int8_attention.h"
#include "linear.h"
#include "lora.h"
#include "norms.h"
#include "tile_attention.h"

namespace mlt {

constexpr int QUERY_ROWS = 8;  // rows of a prompt that one item of attention takes
constexpr int MAX_GROUP = 16;  // query heads of a KV head

enum Member { Q, K, V, O, GATE, UP, DOWN, SHARE, MEMBERS };

enum class Activation : int { SILU = 0, GELU_TANH = 1, GELU = 2 };

struct Layer {
    Norm before_attention, after_attention, before_mlp, after_mlp;  // [H]; those after only where `apart`
    const float *q_norm, *k_norm;    // [D], or of all heads together, or null
    const Linear *qkv, *o, *gate_up, *down;  // of experts alone: the last two are null
    int32_t window;                  // tokens a query sees, 0: all before it
    int32_t rotation;                // which table of rotations, -1: none
    int64_t kv_offset;               // of this layer in a slot, in numbers: K [Hkv, S, D] then V; in int8 with scales
    Experts experts;
};

struct Shape {
    int32_t hidden, heads, kv_heads, head_dim, layers, slot_tokens;
    int64_t slot_elements;
    float eps, scaling;
    Kind kv;          // what keys and values are kept in: as attention.h, tile_attention.h or int8_attention.h has them
    int32_t rotated;  // dimensions of a head that are rotated
    Activation activation;
    int32_t gated;           // 1: act(gate) * up; 0: act of the one there is
    int32_t apart;           // 1: o and down are not added to the hidden states as they are
    int32_t norm_all_heads;  // 1: q_norm and k_norm are of all heads together
    int32_t q_columns;       // that member Q of an adapter is for: all where linears are one
    int32_t joined;          // 1: member GATE of an adapter is for UP too
    float word_scale, vector_scale;   // of embeddings, and of vectors in their place
    float branch_scale;      // of what is added to the hidden states, where `apart`
    float score_cap;         // 0: none
    float logit_scale, logit_cap;     // 0: none
};

// Consecutive tokens of one sequence in the flat row of a step. What it shares are parts [first_part, first_part + num_parts).
struct Run {
    int32_t slot, start, count, adapter, first_part, num_parts;  // adapter -1: the base
};

struct Step {
    const Run* runs;
    int32_t num_runs, T;
    const SharedPart* parts;           // of all runs
    const int64_t* ids;          // [T]
    const float *cos, *sin;      // [tables, positions, rotated / 2]
    int64_t table;               // numbers from one table to the next
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
    const float *embedding, *positions;  // positions [longest, H], or null
    Norm norm;
    const Linear* head;

    void step(const Step& step);

  private:
    struct Row { int run, position; };
    // A thread's piece of attention: rows [row, row + count) of a run for one KV head, one segment or (-1) all; or places
    // of `together`, rows of several runs that read the segment in one slot.
    struct Item {
        int row, count, kv_head, segment, partial;
        bool together;
    };
    struct SegmentRead { int slot, segment, row; };

    std::vector<Row> rows;
    std::vector<Item> items;
    std::vector<SegmentRead> reads;  // of single rows, sorted by what they read
    std::vector<int> together;
    std::vector<RowGroup> groups, kept_groups;  // of rows, and of places among those whose logits are wanted
    bool adapted;  // rows of some adapter are in the step
    std::vector<int> split;  // by row: first of its partials, or -1
    std::vector<Partial> partials;
    std::vector<TiledPartial> tiled_partials;
    AlignedFloats hidden, normed, qkv, attended, wide, gated;
    AlignedFloats branch;  // what o and down make, where `apart`
    Routing routing;
    AlignedFloats expert_in, expert_wide, expert_gated, expert_made;  // of rows side by side
    AlignedFloats shared, share;  // what the MLP for all made, beside experts; what it counts for [T, LANES]
    Prepared routed_for, expert_for;   // rows as experts' linears take them: each once, and side by side
    AlignedFloats before;  // hidden states that o and down are added to, of rows whose adapter has a gain there
    Prepared rows_for;

    void plan(const Step& step);
    void plan_together(const Step& step);
    void layer(Team& team, const Layer& layer, int index, const Step& step);
    // Calls work(t) for each row, after adapt(group) for the rows of an adapter together.
    template <class Adapt, class Work>
    void each_row(Team& team, const Adapt& adapt, const Work& work) {
        team.each(int(groups.size()), [&](int g) {
            const RowGroup& group = groups[g];
            if (group.adapter >= 0) adapt(group);
            for (int m = 0; m < group.count; m++) work(group.rows[m]);
        });
    }
    void embed(const Step& step, int t);
    template <class Work>
    void with_activation(const Work& work) const;
    void activate(const float* wide, int I, float* out) const;
    void mlp(Team& team, const Layer& layer, int index, const Step& step);
    void run_experts(Team& team, const Layer& layer, const Step& step);
    void adapt_down(const Step& step, const RowGroup& group, int index);
    void join_mlp(int index, int t);
    void finish_logits(float* logits) const;
    void rotate_row(const Layer& layer, const Step& step, int t);
    void attend(const Layer& layer, const Step& step, int item);
    NextBlock first_block(const Layer& layer, const Step& step, const Item& item) const;
    void attend_bf16(const Layer& layer, const Step& step, const Item& item);
    int row_of(const Item& item, int i) const { return item.together ? together[item.row + i] : item.row + i; }
    // Of a row's softmaxes over a segment: the first of those that split[] has begun.
    int partial_of(int t, int kv_head, int segment) const {
        const int segments = rows[t].position / SEGMENT + 1;
        return split[t] + (kv_head * segments + segment) * parts_together();
    }
    template <class Segment>
    void attend_segments(const Item& item, int queries, int longest, const Segment& segment);
    void join(int t);
    const Factors* factors(const Step& step, int adapter, int layer, int member) const {
        return adapter < 0 ? nullptr : &step.adapters[adapter][layer * MEMBERS + member];
    }
    void adapt(const Step& step, const RowGroup& group, int layer, int member, const AlignedFloats& x, int K,
               float* y, int width, int N, bool added = false) const;
    void keep(const Step& step, int t, int layer, int member);
    // Where o and down write, and how.
    AlignedFloats& sums() { return shape.apart ? branch : hidden; }
    Finish adding() const { return shape.apart ? Finish::WRITE : Finish::ADD; }
    void join_branch(const Norm& after, int t);
    int group() const { return shape.heads / shape.kv_heads; }
    // Rows of a prompt that one item takes, and softmaxes that a segment of a row has for a KV head.
    int rows_together() const {
        if (shape.kv == Kind::F32) return QUERY_ROWS;
        return std::max(1, (shape.kv == Kind::BF16 ? TILED_COLUMNS : BYTE_QUERIES) / group());
    }
    int parts_together() const { return shape.kv == Kind::BF16 ? 1 : group(); }
    // A KV head's keys and values of a layer.
    template <class T>
    KeptHead<T> kept(const Layer& layer, const Step& step, const Run& run, int kv_head) const {
        const size_t token = shape.kv == Kind::INT8 ? kept_bytes(shape.head_dim) : shape.head_dim;
        const size_t head = shape.slot_tokens * token;
        T* first = (T*)step.slab + layer.kv_offset + kv_head * head;
        return {first, token, shape.kv_heads * head, size_t(shape.slot_elements), run.slot, step.parts + run.first_part,
                run.num_parts};
    }
    int seen_from(const Layer& layer, int position) const {
        return layer.window ? std::max(0, position + 1 - layer.window) : 0;
    }
};

}  // namespace mlt
