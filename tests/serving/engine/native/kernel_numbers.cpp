// Numbers of the native kernels, of inputs that are the same on every CPU, as float32 to standard output. Exits with
// 1 where a row, a text or a token is not bitwise the same alone as beside others. Calls the library's C interface alone;
// its headers are here for the structures (compiled for the library's instruction set). To standard error: what it supports.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "model/decoder_step.h"
#include "model/encoder.h"
#include "sampling/sampler.h"

using namespace mlflow_llm;

extern "C" {
int mlflow_llm_supported();
int mlflow_llm_use_threads(int threads, int spin_us);
int mlflow_llm_linear_new(int kind, int K, int N, const float* weight, const float* input, const float* bias,
                          Linear** made);
int mlflow_llm_linear_of_int4(int kind, int K, int N, const uint8_t* values, const uint16_t* scale, const uint8_t* zero,
                              const float* input, const float* bias, Linear** made);
int mlflow_llm_linear_multiply(const Linear* linear, int T, const float* x, float* y);
Decoder* mlflow_llm_decoder_new(const Shape* shape, const Layer* layers, const float* embedding, const float* positions,
                                const Norm* norm, const Linear* head);
int mlflow_llm_decoder_step(Decoder* decoder, const Step* step);
Encoder* mlflow_llm_encoder_new(const EncoderShape* shape, const EncoderEmbeddings* embeddings,
                                const EncoderLayer* layers);
int mlflow_llm_encoder_run(Encoder* encoder, const int32_t* ids, const int32_t* lengths, int count, float* hidden);
int mlflow_llm_sample(const float* logits, int rows, int size, const Draw* draws, int32_t* tokens);
void mlflow_llm_gelu(const float* x, float* y, int n);
}

namespace {

using Floats32 = std::vector<float>;
constexpr int H = 64, HEADS = 4, KV_HEADS = 2, D = 16, WIDE = 96, LAYERS = 2, WORDS = 100, SLOT = 1024, LONG = 530;

void check(bool fine, const char* what) {
    if (fine) return;
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}

uint32_t state = 7;
float next() {
    state = state * 1664525u + 1013904223u;
    return float(state >> 8) / float(1 << 23) - 1.0f;
}

// Kept until the end, as the kernels only point to it.
float* values(size_t count, float size, float around = 0.0f) {
    float* made = (float*)std::aligned_alloc(64, (count * 4 + 63) / 64 * 64);
    for (size_t i = 0; i < count; i++) made[i] = around + size * next();
    return made;
}

void print(const float* x, size_t count) { std::fwrite(x, 4, count, stdout); }

bool same(const float* a, const float* b, size_t count) { return !std::memcmp(a, b, count * 4); }

Linear* linear(Kind kind, int K, int N) {
    Linear* made = nullptr;
    const float *weight = values(size_t(K) * N, 0.3f), *bias = values(N, 0.1f);
    check(!mlflow_llm_linear_new(int(kind), K, N, weight, nullptr, bias, &made), "linear");
    return made;
}

Linear* linear_of_int4(Kind kind, int K, int N) {
    std::vector<uint8_t> q(size_t(K) * N), zero(size_t(K) / INT4_GROUP * N);
    std::vector<uint16_t> scale(zero.size());
    for (uint8_t& value : q) value = uint8_t(8.0f + 8.0f * next());
    for (uint8_t& value : zero) value = uint8_t(8.0f + 8.0f * next());
    for (uint16_t& half : scale) half = uint16_t(0x1800 + 0x400 * next());  // about 2^-9
    scale[0] = 0x0200;  // 2^-15, below the smallest normal one
    Linear* made = nullptr;
    const float *input = values(K, 0.5f, 1.0f), *bias = values(N, 0.1f);
    check(!mlflow_llm_linear_of_int4(int(kind), K, N, q.data(), scale.data(), zero.data(), input, bias, &made),
          "linear of int4");
    return made;
}

void linears(Kind kind) {
    constexpr int N = 100, T = 17;
    const int K = is_int4(kind) ? 96 : kind == Kind::ROTATED ? 384 : 80;
    const Linear* w = is_int4(kind) ? linear_of_int4(kind, K, N) : linear(kind, K, N);
    const float* x = values(K * T, 1.0f);
    Floats32 whole(N * T), row(N);
    mlflow_llm_linear_multiply(w, T, x, whole.data());
    for (int t = 0; t < T; t += 4) {
        mlflow_llm_linear_multiply(w, 1, x + t * K, row.data());
        check(same(row.data(), &whole[t * N], N), "a row alone");
    }
    print(whole.data(), whole.size());
}

Norm norm() { return {values(H, 0.1f, 1.0f), nullptr}; }

// The logits of a text's last tokens, computed in pieces which end at `cuts`.
Floats32 logits_of(Decoder* decoder, const int64_t* ids, const std::vector<int>& cuts, const float* cos,
                   const float* sin, float* slab) {
    constexpr int KEPT = 3;
    Floats32 logits(KEPT * WORDS), all;
    int from = 0;
    for (const int to : cuts) {
        const Chunk chunk{0, from, to - from, -1};
        std::vector<int32_t> kept;
        for (int i = std::max(from, cuts.back() - KEPT); i < to; i++) kept.push_back(i - from);
        Step step{};
        step.chunks = &chunk, step.num_chunks = 1, step.T = to - from, step.ids = ids + from;
        step.cos = cos, step.sin = sin, step.slab = slab, step.logit_rows = kept.data();
        step.num_logit_rows = int(kept.size()), step.logits = logits.data();
        check(!mlflow_llm_decoder_step(decoder, &step), "step");
        all.insert(all.end(), logits.begin(), logits.begin() + kept.size() * WORDS);
        from = to;
    }
    return all;
}

void decoder(Kind weights, Kind kv) {
    std::vector<Layer> layers(LAYERS);
    const int64_t of_layer = 2 * KV_HEADS * SLOT * int64_t(kv == Kind::INT8 ? int8_token_bytes(D) : D);
    for (int i = 0; i < LAYERS; i++) {
        Layer& layer = layers[i] = Layer{};
        layer.before_attention = norm(), layer.before_mlp = norm();
        layer.qkv = linear(weights, H, (HEADS + 2 * KV_HEADS) * D), layer.o = linear(weights, HEADS * D, H);
        layer.gate_up = linear(weights, H, 2 * WIDE), layer.down = linear(weights, WIDE, H);
        layer.window = i ? 40 : 0, layer.rotary_table = 0, layer.kv_offset = i * of_layer;
    }
    Shape shape{};
    shape.hidden = H, shape.heads = HEADS, shape.kv_heads = KV_HEADS, shape.head_dim = D, shape.layers = LAYERS;
    shape.slot_tokens = SLOT, shape.slot_elements = LAYERS * of_layer, shape.eps = 1e-5f, shape.scaling = 0.25f;
    shape.kv = kv, shape.rotary_dims = D, shape.activation = Activation::SILU, shape.gated = 1;
    shape.q_columns = HEADS * D, shape.embedding_scale = shape.vector_scale = shape.branch_scale = 1.0f;
    const Norm last = norm();
    const float* words = values(WORDS * H, 1.0f);
    Linear* head = nullptr;
    shape.tied = weights == Kind::ROTATED;
    if (shape.tied) check(!mlflow_llm_linear_new(int(weights), H, WORDS, words, nullptr, nullptr, &head), "head");
    else head = linear(Kind::F32, H, WORDS);
    Decoder* made = mlflow_llm_decoder_new(&shape, layers.data(), words, nullptr, &last, head);
    const float *cos = values(SLOT * D / 2, 1.0f), *sin = values(SLOT * D / 2, 1.0f);
    std::vector<int64_t> ids(LONG);
    for (int i = 0; i < LONG; i++) ids[i] = (i * 31 + i / 7) % WORDS;
    const size_t size = shape.slot_elements / (kv == Kind::INT8 ? 4 : 1);
    float* slab = values(size, 0.0f);
    const Floats32 whole = logits_of(made, ids.data(), {LONG}, cos, sin, slab);
    std::fill_n(slab, size, 0.0f);
    mlflow_llm_use_threads(3, 0);
    check(whole == logits_of(made, ids.data(), {5, 33, 512, 528, 529, LONG}, cos, sin, slab), "a prompt in chunks");
    mlflow_llm_use_threads(1, 0);
    print(whole.data(), whole.size());
}

void encoder(Kind weights) {
    std::vector<EncoderLayer> layers(LAYERS);
    const auto layer_norm = [] { return Norm{values(H, 0.1f, 1.0f), values(H, 0.1f)}; };
    for (EncoderLayer& layer : layers) {
        layer = EncoderLayer{};
        layer.qkv = linear(weights, H, 3 * H), layer.o = linear(weights, H, H);
        layer.up = linear(weights, H, WIDE), layer.down = linear(weights, WIDE, H);
        layer.attention = layer_norm(), layer.mlp = layer_norm(), layer.rotary_table = -1;
    }
    EncoderShape shape{};
    shape.hidden = H, shape.heads = HEADS, shape.head_dim = D, shape.intermediate = WIDE, shape.layers = LAYERS;
    shape.max_length = 128, shape.eps = 1e-5f, shape.scaling = 0.25f;
    EncoderEmbeddings embeddings{};
    embeddings.words = values(WORDS * H, 1.0f), embeddings.positions = values(128 * H, 0.5f);
    embeddings.norm = layer_norm();
    Encoder* made = mlflow_llm_encoder_new(&shape, &embeddings, layers.data());
    const int32_t lengths[] = {1, 37, 70};
    std::vector<int32_t> ids(108);
    for (int i = 0; i < 108; i++) ids[i] = i * 13 % WORDS;
    Floats32 together(108 * H), alone(37 * H);
    check(!mlflow_llm_encoder_run(made, ids.data(), lengths, 3, together.data()), "encoder");
    mlflow_llm_encoder_run(made, &ids[1], &lengths[1], 1, alone.data());
    check(same(alone.data(), &together[H], alone.size()), "a text alone");
    print(together.data(), together.size());
}

void draws() {
    constexpr int SIZE = 1003;
    const float* logits = values(3 * SIZE, 8.0f);
    Draw each[3];
    for (int i = 0; i < 3; i++) {
        Draw& draw = each[i] = Draw{};
        draw.temperature = i * 0.4f, draw.top_p = i == 2 ? 0.9f : 1.0f, draw.min_p = i == 1 ? 0.05f : 0.0f;
        draw.top_k = i == 2 ? 40 : 0, draw.typical_p = 1.0f, draw.seed = 2 * i, draw.position = 3 + i;
    }
    int32_t tokens[3];
    check(!mlflow_llm_sample(logits, 3, SIZE, each, tokens), "sample");
    for (const int32_t token : tokens) {
        const float number = float(token);
        print(&number, 1);
    }
}

}  // namespace

int main() {
    if (!mlflow_llm_supported()) return 2;
    std::fprintf(stderr, "supported %d\n", mlflow_llm_supported());
    mlflow_llm_use_threads(1, 0);
    for (int kind = 0; kind <= int(Kind::ROTATED_INT4); kind++) linears(Kind(kind));
    Floats32 curve(160);
    mlflow_llm_gelu(values(160, 6.0f), curve.data(), 160);
    print(curve.data(), 160);
    draws();
    encoder(Kind::F32), encoder(Kind::INT8);
    decoder(Kind::F32, Kind::F32), decoder(Kind::INT8, Kind::F32), decoder(Kind::INT8, Kind::INT8);
    decoder(Kind::ROTATED, Kind::INT8);
}
