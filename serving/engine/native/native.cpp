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
    static thread_local std::vector<uint8_t> values;
    static thread_local std::vector<float> scales;
    const Linear& w = *linear;
    if (w.kind != Kind::F32) values.resize(size_t(T) * w.K * 2), scales.resize(T);
    uint8_t* bytes = values.data();
    float* scale = scales.data();
#pragma omp parallel
    {
        if (w.kind != Kind::F32) {
#pragma omp for schedule(static)
            for (int t = 0; t < T; t++) {
                if (w.kind == Kind::INT8) scale[t] = quantize_row(x + size_t(t) * w.K, w.K, bytes + size_t(t) * w.K);
                else narrow_row(x + size_t(t) * w.K, w.K, (uint16_t*)bytes + size_t(t) * w.K);
            }
        }
        const Rows rows = w.kind == Kind::F32 ? Rows{x, nullptr} : Rows{bytes, scale};
        multiply(w, rows, T, y, false, omp_get_thread_num(), omp_get_num_threads());
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

}

#endif
