// The C interface that serving/engine/native/library.py binds. No Python in here: one build serves every version.
//
// Built without special flags: what is compiled for newer processors is entered only after mlt_supported() said so. One
// library holds the kernels of one instruction set: AVX-512 or NEON; native_avx2.cpp makes the one for AVX2, native_sve.cpp
// that for SVE.

#include <cstdint>

#define API __attribute__((visibility("default")))

#if defined(__GNUC__) && defined(__linux__) && !defined(__clang__)
#if defined(__x86_64__) || defined(__aarch64__)
#define MLT_KERNELS
#endif
#endif
#ifdef __aarch64__
#include "i8mm.h"
#endif
#ifdef MLT_AVX2
#include "avx_vnni.h"
#endif
#ifdef MLT_SVE
#include "vector_length.h"
#endif

extern "C" {

// Bit 0: the kernels run here. Bit 1: bfloat16 products too. Bit 2: bytes are multiplied by the instruction for it
// that not all processors of this library have.
API int mlt_supported() {
#ifndef MLT_KERNELS
    return 0;
#elif defined(MLT_SVE)
    return mlt::has_vector_length() ? 3 | (mlt::has_byte_products() ? 4 : 0) : 0;
#elif defined(__aarch64__)
    constexpr unsigned long DOT_PRODUCT = 1ul << 20;  // HWCAP_ASIMDDP
    return getauxval(AT_HWCAP) & DOT_PRODUCT ? 3 | (mlt::has_byte_products() ? 4 : 0) : 0;
#elif defined(MLT_AVX2)
    __builtin_cpu_init();
    const bool base = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && mlt::has_halves();
    return base ? 3 | (mlt::has_byte_products() ? 4 : 0) : 0;
#else
    __builtin_cpu_init();
    const bool base = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
    return base ? 5 | (__builtin_cpu_supports("avx512bf16") ? 2 : 0) : 0;
#endif
}
}

#ifdef MLT_KERNELS

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

#if defined(MLT_SVE)
#define MLT_INSTRUCTIONS "sve"
#pragma GCC target("arch=armv8.2-a+sve")
#elif defined(__aarch64__)
#define MLT_INSTRUCTIONS "neon"
#pragma GCC target("arch=armv8.2-a+dotprod")
#elif defined(MLT_AVX2)
#define MLT_INSTRUCTIONS "avx2"
#pragma GCC target("avx2,fma,f16c")
#else
#define MLT_INSTRUCTIONS "avx512"
#define MLT_AVX512  // g++ 12 does not define __AVX512F__ after the pragma
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,fma,avx2")
#endif

#include "continuations.h"
#include "decoder_step.h"
#include "encoder.h"
#include "sampler.h"

using namespace mlt;

namespace {

thread_local std::string problem;  // of this thread's last call that failed

// No exception leaves the library: 0, 1 where memory ran out, 2 for all else.
template <class Call>
int checked(const Call& call) {
    try {
#ifdef MLT_SVE
        if (vector_bytes() != VECTOR_BYTES) throw std::runtime_error("this thread has another vector length");
#endif
        call();
        return 0;
    } catch (const std::bad_alloc&) {
        problem = "out of memory";
        return 1;
    } catch (const std::exception& error) {
        problem = error.what();
        return 2;
    }
}

}  // namespace

extern "C" {

// What both sides of this interface have to agree on: its number, counted on with every change that sizes do not show, and
// the sizes of what is handed over. Returns how many numbers there are; `numbers` has room for `most`.
API int mlt_interface(int64_t* numbers, int most) {
    const int64_t found[] = {8,
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
    for (int i = 0; i < std::min(count, most); i++) numbers[i] = found[i];
    return count;
}

API const char* mlt_instructions() { return MLT_INSTRUCTIONS; }

API const char* mlt_problem() { return problem.c_str(); }

// The threads of all calls from now on, and how long one that waits spins before it sleeps.
API int mlt_use_threads(int threads, int spin_us) {
    return checked([&] { Pools::use(threads, spin_us); });
}

API void mlt_idle_spin(int us) { idle_spin_us() = us; }

API int mlt_threads() { return Pools::threads_wanted(); }

// Calls work(i) for each i below n, as the kernels call theirs; what it returns, if not 0, is thrown. For tests.
API int mlt_each(int n, int (*work)(int)) {
    return checked([&] {
        parallel(n, [&](Team& team) {
            team.each(n, [&](int i) {
                if (work(i)) throw std::runtime_error("index " + std::to_string(i));
            });
        });
    });
}

// Whether products of bytes are made by the instruction for it, where not all processors of this library have it: what is
// so from then on. 1 where there is none without it.
API int mlt_use_byte_products(int use) {
    if (CHOOSES_BYTE_PRODUCTS) byte_products() = use && has_byte_products();
    return CHOOSES_BYTE_PRODUCTS ? byte_products().load() : 1;
}

// Whether products are made by tiles: 0 no, 1 by the processor's (where it has them), 2 emulated. What is used then.
API int mlt_use_tiles(int use) {
    const bool none = BYTE_OFFSET == 0 || (TileUse(use) == TileUse::HARDWARE && !has_tiles());  // they take unsigned bytes
    tile_use() = none ? TileUse::NONE : TileUse(use);
    return int(tile_use().load());
}

// Whether the processor has tiles and the system lets the process use them.
API int mlt_has_tiles() { return BYTE_OFFSET != 0 && has_tiles(); }

API int mlt_tiles() { return int(tile_use().load()); }

API int mlt_linear_new(int kind, int K, int N, const float* weight, const float* bias, Linear** made) {
    return checked([&] {
        auto linear = std::make_unique<Linear>(Linear{Kind(kind), K, N, 0});
        pack(*linear, weight, bias);
        *made = linear.release();
    });
}

// Of int8 weights [N, K] with a scale for each row; of INT8 or, rotated already, ROTATED.
API int mlt_linear_of_int8(int kind, int K, int N, const int8_t* values, const float* scale, const float* bias, Linear** made) {
    return checked([&] {
        auto linear = std::make_unique<Linear>(Linear{Kind(kind), K, N, 0});
        pack_int8(*linear, values, scale, bias);
        *made = linear.release();
    });
}

// Of weights of four bits (int4.h), each in a byte, with scales in float16; of INT4 or, rotated already, ROTATED_INT4.
API int mlt_linear_of_int4(int kind, int K, int N, const uint8_t* values, const uint16_t* scale, const uint8_t* zero,
                           const float* input, const float* bias, Linear** made) {
    return checked([&] {
        auto linear = std::make_unique<Linear>(Linear{Kind(kind), K, N, 0});
        pack_int4(*linear, values, scale, zero, input, bias);
        *made = linear.release();
    });
}

// The parts of a packed linear: packed, scale, offset, bias, input, with their sizes in bytes; null and 0 where it has none.
API void mlt_linear_parts(const Linear* linear, const void** parts, int64_t* sizes) {
    const Linear& w = *linear;
    const void* each[] = {w.packed, w.scale, w.offset, w.bias, w.input};
    const size_t column = size_t(w.panels) * PANEL * 4;
    const size_t bytes[] = {w.panels * w.panel_bytes(), column, column, column, sizeof(float) * w.K};
    for (int i = 0; i < 5; i++) parts[i] = each[i], sizes[i] = each[i] ? int64_t(bytes[i]) : 0;
}

// A linear over such parts, which are only read, and must stay; each aligned to 64 bytes.
API int mlt_linear_over(int kind, int K, int N, void* const* parts, Linear** made) {
    return checked([&] {
        auto linear = std::make_unique<Linear>(Linear{Kind(kind), K, N, round_up(N, PANEL) / PANEL});
        linear->packed = parts[0], linear->scale = (float*)parts[1];
        linear->offset = (int32_t*)parts[2], linear->bias = (float*)parts[3];
        linear->input = (float*)parts[4];
        linear->owned = false;
        *made = linear.release();
    });
}

API void mlt_linear_free(Linear* linear) { delete linear; }

API int mlt_linear_dense(const Linear* linear, float* weight) {
    return checked([&] { unpack(*linear, weight); });
}

// y [T, N] = x [T, K] W^T + b
API int mlt_linear_multiply(const Linear* linear, int T, const float* x, float* y) {
    static thread_local Prepared own;
    const Linear& w = *linear;
    Prepared& prepared = own;  // the caller's, in every thread of the call
    return checked([&] {
        prepared.room(T, w.K);
        parallel(MOST_THREADS, [&](Team& team) {
            if (w.kind != Kind::F32) team.each(T, [&](int t) { prepared.fill(w, x, t); });
            multiply(team, w, prepared.of(w, x), T, y, Finish::WRITE);
        });
    });
}

API int mlt_can_attend(int head_dim, int group) { return can_attend(head_dim) && group <= MAX_GROUP; }

// Whether keys and values can be kept in bfloat16: bit 0 by such heads, bit 1 by this processor.
API int mlt_can_attend_bf16(int head_dim) { return int(can_attend_tiled(head_dim)) | int(multiplies_bf16()) << 1; }

API Decoder* mlt_decoder_new(const Shape* shape, const Layer* layers, const float* embedding, const float* positions,
                             const Norm* norm, const Linear* head) {
    Decoder* decoder = new Decoder;
    decoder->shape = *shape;
    decoder->layers.assign(layers, layers + shape->layers);
    decoder->embedding = embedding, decoder->positions = positions, decoder->norm = *norm, decoder->head = head;
    return decoder;
}

API void mlt_decoder_free(Decoder* decoder) { delete decoder; }

API int mlt_decoder_step(Decoder* decoder, const Step* step) {
    return checked([&] { decoder->step(*step); });
}

// The largest of each row [rows, size] of logits, -1 where it is not finite.
API int mlt_largest(const float* logits, int rows, int size, int32_t* tokens) {
    return checked([&] {
        parallel_for(rows, [&](int row) { tokens[row] = Sampler::largest(logits + size_t(row) * size, size); });
    });
}

// A token for each row [rows, size] of logits.
API int mlt_sample(const float* logits, int rows, int size, const Draw* draws, int32_t* tokens) {
    return checked([&] {
        parallel_for(rows, [&](int row) {
            static thread_local Sampler sampler;
            tokens[row] = sampler.token(logits + size_t(row) * size, size, draws[row]);
        });
    });
}

// The same of rows wherever they are, each with its mask or none.
API int mlt_sample_rows(const float* const* logits, const uint32_t* const* masks, int rows, int size, const Draw* draws,
                        int32_t* tokens) {
    return checked([&] {
        parallel_for(rows, [&](int row) {
            static thread_local Sampler sampler;
            tokens[row] = sampler.token(logits[row], size, draws[row], masks[row]);
        });
    });
}

// The `keep` best continuations of beams, of which there are so many, into `sums` and `places`; each row of logits [size]
// has its beam's score. `found`: how many there are, -1 where a row is not finite.
API int mlt_continuations(const float* const* logits, const float* scores, int beams, int size, int keep, float* sums,
                          int64_t* places, int32_t* found) {
    return checked([&] {
        std::vector<Continuations> each(beams, Continuations(keep));
        std::vector<char> finite(beams);
        parallel_for(beams, [&](int beam) {
            finite[beam] = continue_beam(logits[beam], size, scores[beam], int64_t(beam) * size, each[beam]);
        });
        *found = -1;
        if (std::find(finite.begin(), finite.end(), 0) != finite.end()) return;
        Continuations all(keep);
        for (const Continuations& one : each)
            for (const Continuation& c : one.best) all.enter(c.sum, c.place);
        *found = int32_t(all.best.size());
        for (int i = 0; i < *found; i++) sums[i] = all.best[i].sum, places[i] = all.best[i].place;
    });
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
API int mlt_encoder_run(Encoder* encoder, const int32_t* ids, const int32_t* lengths, int count, float* hidden) {
    return checked([&] { encoder->run(ids, lengths, count, hidden); });
}

API void mlt_gelu(const float* x, float* y, int n) {
    for (int i = 0; i < n; i += LANES) _mm512_storeu_ps(y + i, gelu(_mm512_loadu_ps(x + i)));
}
}

#endif
