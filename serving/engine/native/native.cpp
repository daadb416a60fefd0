// The C interface that serving/engine/native/library.py binds. No Python in here: one build serves every version.
//
// Built without special flags: what is compiled for newer processors is entered only after mlt_supported() said so.

#include <cstdint>

#define API __attribute__((visibility("default")))

extern "C" {

// Bit 0: the kernels run here. Bit 1: bfloat16 products too.
API int mlt_supported() {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(_OPENMP)
    __builtin_cpu_init();
    const bool base = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
    return base ? 1 | (__builtin_cpu_supports("avx512bf16") ? 2 : 0) : 0;
#else
    return 0;
#endif
}
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(_OPENMP)

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,fma,avx2")

#include "decoder_step.h"
#include "encoder.h"
#include "sampler.h"

using namespace mlt;

extern "C" {

API Linear* mlt_linear_new(int kind, int K, int N, const float* weight, const float* bias) {
    Linear* linear = new Linear{Kind(kind), K, N, 0};
    pack(*linear, weight, bias);
    return linear;
}

API void mlt_linear_free(Linear* linear) { delete linear; }

API void mlt_linear_dense(const Linear* linear, float* weight) { unpack(*linear, weight); }

// y [T, N] = x [T, K] W^T + b
API void mlt_linear_multiply(const Linear* linear, int T, const float* x, float* y) {
    static thread_local Prepared own;
    const Linear& w = *linear;
    Prepared& prepared = own;  // the caller's, in every thread of the region
    prepared.room(T, w.K);
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int t = 0; t < T; t++) prepared.fill(w, x, t);
        multiply(w, prepared.of(w, x), T, y, Finish::WRITE, omp_get_thread_num(), omp_get_num_threads());
    }
}

API int mlt_can_attend(int head_dim, int group) { return can_attend(head_dim) && group <= MAX_GROUP; }

API Decoder* mlt_decoder_new(const Shape* shape, const Layer* layers, const float* embedding, const float* norm,
                         const Linear* head) {
    Decoder* decoder = new Decoder;
    decoder->shape = *shape;
    decoder->layers.assign(layers, layers + shape->layers);
    decoder->embedding = embedding, decoder->norm = norm, decoder->head = head;
    return decoder;
}

API void mlt_decoder_free(Decoder* decoder) { delete decoder; }

API void mlt_decoder_step(Decoder* decoder, const Step* step) { decoder->step(*step); }

// A token for each row [rows, size] of logits.
API void mlt_sample(const float* logits, int rows, int size, const Draw* draws, int32_t* tokens) {
#pragma omp parallel
    {
        thread_local Sampler sampler;
#pragma omp for schedule(dynamic, 1)
        for (int row = 0; row < rows; row++)
            tokens[row] = sampler.token(logits + size_t(row) * size, size, draws[row]);
    }
}

API void mlt_exponentials(uint64_t seed, uint64_t position, int size, float* times) {
    const Philox random{seed, position};
    uint32_t bits[8];
    for (int t = 0; t < size; t++) {
        if (t % 8 == 0) random.block(t / 8, bits);
        times[t] = exponential(bits[t % 8]);
    }
}

API Encoder* mlt_encoder_new(const EncoderShape* shape, const EncoderEmbeddings* embeddings,
                             const EncoderLayer* layers) {
    Encoder* encoder = new Encoder;
    encoder->shape = *shape, encoder->embeddings = *embeddings;
    encoder->layers.assign(layers, layers + shape->layers);
    return encoder;
}

API void mlt_encoder_free(Encoder* encoder) { delete encoder; }

// Of token ids of `count` texts side by side, hidden [T, H].
API void mlt_encoder_run(Encoder* encoder, const int32_t* ids, const int32_t* lengths, int count, float* hidden) {
    encoder->run(ids, lengths, count, hidden);
}

API void mlt_gelu(const float* x, float* y, int n) {
    for (int i = 0; i < n; i += LANES) _mm512_storeu_ps(y + i, gelu(_mm512_loadu_ps(x + i)));
}
}

#endif
