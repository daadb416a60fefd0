// The C interface bound by serving/engine/native/library.py. It contains no Python, so that one build serves every
// version.
//
// Built without CPU flags: code for newer CPUs is entered only if mlflow_llm_supported() allows it. Each library holds
// the kernels of one instruction set: this file's are for AVX-512 or NEON, native_avx2.cpp makes those for AVX2 and
// native_sve.cpp those for SVE.

#include <cstdint>

#define API __attribute__((visibility("default")))

#if defined(__GNUC__) && defined(__linux__) && !defined(__clang__)
#if defined(__x86_64__) || defined(__aarch64__)
#define MLFLOW_LLM_KERNELS
#endif
#endif
#ifdef __aarch64__
#include "isa/i8mm.h"
#endif
#ifdef MLFLOW_LLM_AVX2
#include "isa/avx_vnni.h"
#endif
#ifdef MLFLOW_LLM_SVE
#include "isa/vector_length.h"
#endif

extern "C" {

// Return a bit mask. Bit 0: the kernels run on this CPU. Bit 1: bfloat16 products do too. Bit 2: the CPU has the byte
// dot-product instruction that some CPUs of this library lack.
API int mlflow_llm_supported() {
#ifndef MLFLOW_LLM_KERNELS
    return 0;
#elif defined(MLFLOW_LLM_SVE)
    return mlflow_llm::has_vector_length() ? 3 | (mlflow_llm::cpu_has_byte_products() ? 4 : 0) : 0;
#elif defined(__aarch64__)
    constexpr unsigned long DOT_PRODUCT = 1ul << 20;  // HWCAP_ASIMDDP
    return getauxval(AT_HWCAP) & DOT_PRODUCT ? 3 | (mlflow_llm::cpu_has_byte_products() ? 4 : 0) : 0;
#elif defined(MLFLOW_LLM_AVX2)
    __builtin_cpu_init();
    const bool base = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && mlflow_llm::cpu_has_f16c();
    return base ? 3 | (mlflow_llm::cpu_has_byte_products() ? 4 : 0) : 0;
#else
    __builtin_cpu_init();
    const bool base = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
    return base ? 5 | (__builtin_cpu_supports("avx512bf16") ? 2 : 0) : 0;
#endif
}
}

#ifdef MLFLOW_LLM_KERNELS

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(MLFLOW_LLM_SVE)
#define MLFLOW_LLM_INSTRUCTIONS "sve"
#pragma GCC target("arch=armv8.2-a+sve")
#elif defined(__aarch64__)
#define MLFLOW_LLM_INSTRUCTIONS "neon"
#pragma GCC target("arch=armv8.2-a+dotprod")
#elif defined(MLFLOW_LLM_AVX2)
#define MLFLOW_LLM_INSTRUCTIONS "avx2"
#pragma GCC target("avx2,fma,f16c")
#else
#define MLFLOW_LLM_INSTRUCTIONS "avx512"
#define MLFLOW_LLM_AVX512  // g++ 12 does not define __AVX512F__ after the pragma
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,fma,avx2")
#endif

#include "sampling/continuations.h"
#include "model/decoder_step.h"
#include "model/encoder.h"
#include "sampling/sampler.h"

using namespace mlflow_llm;

namespace {

thread_local std::string last_error;  // message of this thread's last failed call

// Run `call` without letting exceptions leave the library: return 0 on success, 1 if memory ran out, 2 on other errors.
template <class Call>
int guarded(const Call& call) {
    try {
#ifdef MLFLOW_LLM_SVE
        if (vector_bytes() != VECTOR_BYTES) throw std::runtime_error("the vector length of this thread is not 256 bits");
#endif
        call();
        return 0;
    } catch (const std::bad_alloc&) {
        last_error = "out of memory";
        return 1;
    } catch (const std::exception& error) {
        last_error = error.what();
        return 2;
    }
}

}  // namespace

extern "C" {

// Describe the interface that both sides must agree on: a version, increased with every change that sizes do not show,
// and the sizes of the structures. Return the number of entries; `numbers` has space for `capacity`.
API int mlflow_llm_interface(int64_t* numbers, int capacity) {
    const int64_t found[] = {9,
                             sizeof(Factors),
                             sizeof(Norm),
                             sizeof(Experts),
                             sizeof(Layer),
                             sizeof(Shape),
                             sizeof(EncoderLayer),
                             sizeof(EncoderEmbeddings),
                             sizeof(EncoderShape),
                             sizeof(Draw),
                             sizeof(Step)};
    constexpr int count = sizeof found / sizeof *found;
    for (int i = 0; i < std::min(count, capacity); i++) numbers[i] = found[i];
    return count;
}

// Return the digest of the sources that this was compiled of (setup.py), "" if it was not given.
#ifndef MLFLOW_LLM_SOURCES
#define MLFLOW_LLM_SOURCES ""
#endif
API const char* mlflow_llm_sources() { return MLFLOW_LLM_SOURCES; }

API const char* mlflow_llm_instructions() { return MLFLOW_LLM_INSTRUCTIONS; }

API const char* mlflow_llm_last_error() { return last_error.c_str(); }

// Set the threads of all calls from now on, and how long a waiting thread spins before it sleeps.
API int mlflow_llm_use_threads(int threads, int spin_us) {
    return guarded([&] { ProcessPool::configure(threads, spin_us); });
}

API void mlflow_llm_idle_spin(int us) { idle_spin_us() = us; }

API int mlflow_llm_threads() { return ProcessPool::configured_threads(); }

// Call work(i) for each i below n as the kernels do; a nonzero result is thrown. For tests.
API int mlflow_llm_each(int n, int (*work)(int)) {
    return guarded([&] {
        parallel(n, [&](Team& team) {
            team.parallel_for(n, [&](int i) {
                if (work(i)) throw std::runtime_error("index " + std::to_string(i));
            });
        });
    });
}

// Set whether the byte dot-product instruction is used that some CPUs of this library lack; return whether it is from
// now on. Always 1 if the kernels need it.
API int mlflow_llm_use_byte_products(int use) {
    if (HAS_OPTIONAL_BYTE_PRODUCTS) use_byte_products() = use && cpu_has_byte_products();
    return HAS_OPTIONAL_BYTE_PRODUCTS ? use_byte_products().load() : 1;
}

// Set whether products use tiles: 0 no, 1 the CPU's (if it has them), 2 emulated. Return what is used from now on.
API int mlflow_llm_use_tiles(int use) {
    // tiles take unsigned bytes
    const bool none = BYTE_OFFSET == 0 || (TileUse(use) == TileUse::HARDWARE && !has_tiles());
    tile_use() = none ? TileUse::NONE : TileUse(use);
    return int(tile_use().load());
}

// Return whether the CPU has tiles and the operating system lets the process use them.
API int mlflow_llm_has_tiles() { return BYTE_OFFSET != 0 && has_tiles(); }

API int mlflow_llm_tiles() { return int(tile_use().load()); }

// Make a linear of weights [N, K]. `input` is null, or has a factor of the activations of a ROTATED linear for each k.
API int mlflow_llm_linear_new(int kind, int K, int N, const float* weight, const float* input, const float* bias,
                              Linear** made) {
    return guarded([&] {
        auto linear = std::make_unique<Linear>(Linear{Kind(kind), K, N, 0});
        pack(*linear, weight, bias, input);
        *made = linear.release();
    });
}

// Make a linear of int8 weights [N, K] with a scale per row: INT8 or, divided by `input` (or null) and rotated already,
// ROTATED.
API int mlflow_llm_linear_of_int8(int kind, int K, int N, const int8_t* values, const float* scale, const float* input,
                                  const float* bias, Linear** made) {
    return guarded([&] {
        auto linear = std::make_unique<Linear>(Linear{Kind(kind), K, N, 0});
        pack_int8(*linear, values, scale, input, bias);
        *made = linear.release();
    });
}

// Make a linear of 4-bit weights (int4.h), one per byte, with scales in float16: INT4 or, rotated already,
// ROTATED_INT4.
API int mlflow_llm_linear_of_int4(int kind, int K, int N, const uint8_t* values, const uint16_t* scale,
                                  const uint8_t* zero, const float* input, const float* bias, Linear** made) {
    return guarded([&] {
        auto linear = std::make_unique<Linear>(Linear{Kind(kind), K, N, 0});
        pack_int4(*linear, values, scale, zero, input, bias);
        *made = linear.release();
    });
}

// Return the parts of a linear, packed, scale, offset, bias and input, and their sizes in bytes; null and 0 for a
// missing part.
API void mlflow_llm_linear_parts(const Linear* linear, const void** parts, int64_t* sizes) {
    const Linear& w = *linear;
    const void* each[] = {w.packed, w.scale, w.offset, w.bias, w.input};
    const size_t column = size_t(w.panels) * PANEL * 4;
    const size_t bytes[] = {w.panels * w.panel_bytes(), column, column, column, sizeof(float) * w.K};
    for (int i = 0; i < 5; i++) parts[i] = each[i], sizes[i] = each[i] ? int64_t(bytes[i]) : 0;
}

// Make a linear from such parts, which are used in place, only read, and must outlive it; each is aligned to 64 bytes.
API int mlflow_llm_linear_over(int kind, int K, int N, void* const* parts, Linear** made) {
    return guarded([&] {
        auto linear = std::make_unique<Linear>(Linear{Kind(kind), K, N, round_up(N, PANEL) / PANEL});
        linear->packed = parts[0], linear->scale = (float*)parts[1];
        linear->offset = (int32_t*)parts[2], linear->bias = (float*)parts[3];
        linear->input = (float*)parts[4];
        linear->owned = false;
        *made = linear.release();
    });
}

API void mlflow_llm_linear_free(Linear* linear) { delete linear; }

API int mlflow_llm_linear_dense(const Linear* linear, float* weight) {
    return guarded([&] { unpack(*linear, weight); });
}

// Compute y [T, N] = x [T, K] W^T + b.
API int mlflow_llm_linear_multiply(const Linear* linear, int T, const float* x, float* y) {
    static thread_local RowBuffer own;
    const Linear& w = *linear;
    RowBuffer& prepared = own;  // the calling thread's, used by all threads of the call
    return guarded([&] {
        prepared.reserve(T, w.K);
        parallel(MAX_THREADS, [&](Team& team) {
            if (w.kind != Kind::F32) team.parallel_for(T, [&](int t) { prepared.fill(w, x, t); });
            multiply(team, w, prepared.rows(w, x), T, y, Epilogue::WRITE);
        });
    });
}

API int mlflow_llm_can_attend(int head_dim, int group) { return can_attend(head_dim) && group <= MAX_GROUP; }

// Return whether keys and values can be in bfloat16: bit 0 for heads of this width, bit 1 on this CPU.
API int mlflow_llm_can_attend_bf16(int head_dim) {
    return int(can_attend_tiled(head_dim)) | int(multiplies_bf16()) << 1;
}

API Decoder* mlflow_llm_decoder_new(const Shape* shape, const Layer* layers, const float* embedding,
                                    const float* positions, const Norm* norm, const Linear* head) {
    Decoder* decoder = new Decoder;
    decoder->shape = *shape;
    decoder->layers.assign(layers, layers + shape->layers);
    decoder->embedding = embedding, decoder->positions = positions, decoder->norm = *norm, decoder->head = head;
    return decoder;
}

API void mlflow_llm_decoder_free(Decoder* decoder) { delete decoder; }

API int mlflow_llm_decoder_step(Decoder* decoder, const Step* step) {
    return guarded([&] { decoder->step(*step); });
}

// Find the largest of each row [rows, size] of logits; -1 if it is not finite.
API int mlflow_llm_largest(const float* logits, int rows, int size, int32_t* tokens) {
    return guarded([&] {
        parallel_for(rows, [&](int row) { tokens[row] = Sampler::largest(logits + size_t(row) * size, size); });
    });
}

// Draw a token for each row [rows, size] of logits.
API int mlflow_llm_sample(const float* logits, int rows, int size, const Draw* draws, int32_t* tokens) {
    return guarded([&] {
        parallel_for(rows, [&](int row) {
            static thread_local Sampler sampler;
            tokens[row] = sampler.token(logits + size_t(row) * size, size, draws[row]);
        });
    });
}

// The same for rows at any addresses, each with its mask or null.
API int mlflow_llm_sample_rows(const float* const* logits, const uint32_t* const* masks, int rows, int size,
                               const Draw* draws, int32_t* tokens) {
    return guarded([&] {
        parallel_for(rows, [&](int row) {
            static thread_local Sampler sampler;
            tokens[row] = sampler.token(logits[row], size, draws[row], masks[row]);
        });
    });
}

// Find the `keep` best continuations of the beams, into `sums` and `places`; each row of logits [size] has its beam's
// score. `found` is their number, or -1 if a row is not finite.
API int mlflow_llm_continuations(const float* const* logits, const float* scores, int beams, int size, int keep,
                                 float* sums, int64_t* places, int32_t* found) {
    return guarded([&] {
        std::vector<Continuations> each(beams, Continuations(keep));
        std::vector<char> finite(beams);
        parallel_for(beams, [&](int beam) {
            finite[beam] = continue_beam(logits[beam], size, scores[beam], int64_t(beam) * size, each[beam]);
        });
        *found = -1;
        if (std::find(finite.begin(), finite.end(), 0) != finite.end()) return;
        Continuations merged(keep);
        for (const Continuations& one : each)
            for (const Continuation& c : one.best) merged.enter(c.sum, c.place);
        *found = int32_t(merged.best.size());
        for (int i = 0; i < *found; i++) sums[i] = merged.best[i].sum, places[i] = merged.best[i].place;
    });
}

API void mlflow_llm_exponentials(uint64_t seed, uint64_t position, int size, float* times) {
    const Philox random{seed, position};
    uint32_t bits[8];
    for (int t = 0; t < size; t++) {
        if (t % 8 == 0) random.block(t / 8, bits);
        times[t] = exponential(bits[t % 8]);
    }
}

API Encoder* mlflow_llm_encoder_new(const EncoderShape* shape, const EncoderEmbeddings* embeddings,
                                    const EncoderLayer* layers) {
    Encoder* encoder = new Encoder;
    encoder->shape = *shape, encoder->embeddings = *embeddings;
    encoder->layers.assign(layers, layers + shape->layers);
    return encoder;
}

API void mlflow_llm_encoder_free(Encoder* encoder) { delete encoder; }

// Compute the hidden states [T, H] of `count` texts side by side.
API int mlflow_llm_encoder_run(Encoder* encoder, const int32_t* ids, const int32_t* lengths, int count, float* hidden) {
    return guarded([&] { encoder->run(ids, lengths, count, hidden); });
}

API void mlflow_llm_gelu(const float* x, float* y, int n) {
    for (int i = 0; i < n; i += LANES) _mm512_storeu_ps(y + i, gelu(_mm512_loadu_ps(x + i)));
}
}

#endif
