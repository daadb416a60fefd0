// A whole decoder: embedding, layers, final norm, head; one call of the thread pool per step.
//
//   hidden ─ norm ─ q,k,v ─ rotate, write KV ─ attend ─ o ─(+)─ norm ─ gate,up ─ act·up ─ down ─(+)─ ... ─ norm ─ head
//
// The MLP of a layer is dense, or experts (experts.h), or both, added up.
//
// Differences between architectures are data of `Shape` and `Layer`: which norms there are (before a branch, after it,
// of each head or of all heads together), what is rotated and by which table, windows, activations, multipliers, caps.
//
// A head in int8 whose weights are the embedding, which is there in floats, has the logits of likely tokens corrected.
//
// Everything between two matrix products works on single rows. The contributions of adapters are added there too, for
// the rows of one adapter together (lora.h).
#pragma once

#include <tuple>
#include <vector>

#include "attention/attention.h"
#include "model/experts.h"
#include "model/hadamard.h"
#include "attention/int8_attention.h"
#include "linear/dispatch.h"
#include "model/lora.h"
#include "model/norms.h"
#include "attention/tile_attention.h"

namespace mlflow_llm {

constexpr int QUERY_ROWS = 8;  // rows of a prompt that one work item of attention processes
constexpr int MAX_GROUP = 16;  // query heads per KV head
constexpr float LIKELY_WITHIN = 5.0f;  // nats below the most probable token, of those whose logits are corrected,
constexpr int MAX_LIKELY = 64;  // and how many of them there may be
constexpr int NARROWINGS = 6;  // halvings of the range while it has more

enum Member { Q, K, V, O, GATE, UP, DOWN, SHARED_EXPERT_GATE, MEMBERS };

enum class Activation : int { SILU = 0, GELU_TANH = 1, GELU = 2 };

struct Layer {
    Norm before_attention, after_attention, before_mlp, after_mlp;  // [H]; the latter two only with separate_branch
    const float *q_norm, *k_norm;  // [D], or [heads * D] with norm_all_heads, or null
    const Linear *qkv, *o, *gate_up, *down;  // the last two are null without a dense MLP
    int32_t window;  // tokens that a query sees; 0: all before it
    int32_t rotary_table;  // index of the table of rotations; -1: none
    int64_t kv_offset;  // start of this layer in a slot, in elements: K [Hkv, S, D], then V; in int8 with scales
    Experts experts;
};

struct Shape {
    int32_t hidden, heads, kv_heads, head_dim, layers, slot_tokens;
    int64_t slot_elements;
    float eps, scaling;
    Kind kv;  // storage of keys and values: see attention.h, tile_attention.h and int8_attention.h
    int32_t rotary_dims;  // dimensions of a head that are rotated
    Activation activation;
    int32_t gated;  // 1: act(gate) * up; 0: act(up)
    // 1: outputs of o and down are normed or scaled before they are added to the hidden states
    int32_t separate_branch;
    int32_t norm_all_heads;  // 1: q_norm and k_norm span all heads together
    int32_t q_columns;  // columns of member Q of an adapter: all of q, k and v if these are one linear
    int32_t fused_gate_up;  // 1: member GATE of an adapter covers UP too
    float embedding_scale, vector_scale;  // of embeddings by id, and of vectors that replace them
    float branch_scale;  // of what is added to the hidden states, with separate_branch
    float score_cap;  // 0: no cap
    float logit_scale, logit_cap;  // 0: none
    int32_t tied;  // 1: the output head's weights are the embedding
};

// Consecutive tokens of one sequence, within the rows of a step. It reads other slots by the parts [first_part,
// first_part + num_parts).
struct Chunk {
    int32_t slot, start, count, adapter, first_part, num_parts;  // adapter -1: the base model
};

struct Step {
    const Chunk* chunks;
    int32_t num_chunks, T;
    const SharedPart* parts;  // of all chunks
    const int64_t* ids;  // [T]
    const float *cos, *sin;  // [tables, positions, rotary_dims / 2]
    int64_t table_stride;  // elements of a table
    void* slab;
    const Factors* const* adapters;  // by number: [layers * MEMBERS]
    const int32_t* logit_rows;  // [num_logit_rows]: rows whose logits are computed
    int32_t num_logit_rows;
    float* logits;  // [num_logit_rows, vocabulary]
    const float* const* vectors;  // [T]: embeddings that replace those of the ids, or null; null: none
};

class Decoder {
  public:
    Shape shape;
    std::vector<Layer> layers;
    const float *embedding, *positions;  // positions [max_length, H], or null
    Norm norm;
    const Linear* head;

    void step(const Step& step);

  private:
    struct Row { int chunk, position; };
    // A work item of attention: rows [row, row + count) of a chunk for one KV head, and one segment or (-1) all; or,
    // with shares_segment, a range of `shared_rows`: rows of several chunks that read the segment in the same slot.
    struct Item {
        int row, count, kv_head, segment, partial;
        bool shares_segment;
    };
    struct SegmentRead { int slot, segment, row; };

    std::vector<Row> rows;
    std::vector<Item> items;
    std::vector<SegmentRead> reads;  // of single rows, sorted by what they read
    std::vector<int> shared_rows;
    std::vector<RowGroup> groups, logit_groups;  // of rows, and of indexes into the step's logit_rows
    bool has_adapters;  // the step has rows with an adapter
    std::vector<int> split;  // by row: index of its first partial, or -1
    std::vector<Partial> partials;
    std::vector<TiledPartial> tiled_partials;
    AlignedFloats hidden, normed, qkv, attended, gate_up_out, mlp_act;
    AlignedFloats branch;  // output of o and down, with separate_branch
    Routing routing;
    AlignedFloats expert_in, expert_gate_up_out, expert_mlp_act, expert_out;  // rows grouped by expert
    AlignedFloats shared_out, shared_gate;  // output of the dense MLP beside experts, and its gate [T, LANES]
    RowBuffer routed_rows, expert_rows;  // inputs of the experts' linears: in row order, and grouped by expert
    AlignedFloats residual;  // hidden states before o or down is added, for rows whose adapter has a gain there
    RowBuffer linear_rows;

    void plan(const Step& step);
    void plan_shared_segments(const Step& step);
    void layer(Team& team, const Layer& layer, int index, const Step& step);
    // Call work(t) for each row, after adapt(group) for the rows of an adapter together.
    template <class Adapt, class Work>
    void for_each_row(Team& team, const Adapt& adapt, const Work& work) {
        team.parallel_for(int(groups.size()), [&](int g) {
            const RowGroup& group = groups[g];
            if (group.adapter >= 0) adapt(group);
            for (int m = 0; m < group.count; m++) work(group.rows[m]);
        });
    }
    void embed(const Step& step, int t);
    template <class Work>
    void with_activation(const Work& work) const;
    void activate(const float* gate_up_out, int I, float* out) const;
    void mlp(Team& team, const Layer& layer, int index, const Step& step);
    void run_experts(Team& team, const Layer& layer, const Step& step);
    void adapt_down(const Step& step, const RowGroup& group, int index);
    void add_mlp_output(int index, int t);
    void correct_logits(const float* x, float* logits) const;
    void finish_logits(float* logits) const;
    void rotate_row(const Layer& layer, const Step& step, int t);
    void attend(const Layer& layer, const Step& step, int item);
    NextBlock first_block(const Layer& layer, const Step& step, const Item& item) const;
    void attend_bf16(const Layer& layer, const Step& step, const Item& item);
    int row_of(const Item& item, int i) const { return item.shares_segment ? shared_rows[item.row + i] : item.row + i; }
    // Return the index of the first partial of a split row's segment for a KV head.
    int partial_of(int t, int kv_head, int segment) const {
        const int segments = rows[t].position / SEGMENT_TOKENS + 1;
        return split[t] + (kv_head * segments + segment) * partials_per_segment();
    }
    template <class Segment>
    void attend_segments(const Item& item, int queries, int max_length, const Segment& segment);
    void merge_segments(int t);
    const Factors* factors(const Step& step, int adapter, int layer, int member) const {
        return adapter < 0 ? nullptr : &step.adapters[adapter][layer * MEMBERS + member];
    }
    void adapt(const Step& step, const RowGroup& group, int layer, int member, const AlignedFloats& x, int K,
               float* y, int width, int N, bool added = false) const;
    void save_residual(const Step& step, int t, int layer, int member);
    // The destination of o and down, and how they are written there.
    AlignedFloats& branch_output() { return shape.separate_branch ? branch : hidden; }
    Epilogue branch_epilogue() const { return shape.separate_branch ? Epilogue::WRITE : Epilogue::ADD; }
    void add_branch(const Norm& after, int t);
    int group() const { return shape.heads / shape.kv_heads; }
    // Rows of a prompt that one work item processes, and partials per segment of a row and KV head.
    int rows_per_item() const {
        if (shape.kv == Kind::F32) return QUERY_ROWS;
        return std::max(1, (shape.kv == Kind::BF16 ? MAX_TILE_QUERIES : MAX_INT8_QUERIES) / group());
    }
    int partials_per_segment() const { return shape.kv == Kind::BF16 ? 1 : group(); }
    // Return a KV head's keys and values in a layer.
    template <class T>
    CachedHead<T> cached(const Layer& layer, const Step& step, const Chunk& chunk, int kv_head) const {
        const size_t token = shape.kv == Kind::INT8 ? int8_token_bytes(shape.head_dim) : shape.head_dim;
        const size_t head = shape.slot_tokens * token;
        T* first = (T*)step.slab + layer.kv_offset + kv_head * head;
        return {first, token, shape.kv_heads * head, size_t(shape.slot_elements), chunk.slot,
                step.parts + chunk.first_part, chunk.num_parts};
    }
    int seen_from(const Layer& layer, int position) const {
        return layer.window ? std::max(0, position + 1 - layer.window) : 0;
    }
};

}  // namespace mlflow_llm
