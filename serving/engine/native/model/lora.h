// LoRA adapters of linears: h = A x, y += B h, for several rows of one adapter at a time, so that its factors are read
// once for all of them. A row's sums are in one order whatever the other rows are: alone it gives the same numbers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "linear/dispatch.h"
#include "isa/simd.h"

namespace mlflow_llm {

constexpr int RANK_TILE = 4;  // ranks of A that are stored and multiplied together
constexpr int RANK_BLOCK = 64;  // ranks whose h is kept between A and B
constexpr int ROWS_PER_PASS = 4;  // with RANK_TILE, as many sums as there are registers for
constexpr int GROUP_ROWS = 8;  // rows of one adapter that a thread processes
constexpr int FACTOR_PREFETCH_BYTES = 4096;  // how far ahead factors are prefetched
#ifdef MLFLOW_LLM_AVX512
constexpr int COLUMN_VECTORS_PER_PASS = 2;  // vectors of B's columns that share a row's factors
#else
constexpr int COLUMN_VECTORS_PER_PASS = 1;
#endif

// The factors of one adapter for one linear: h = scales (A x), y += B h. rank 0: the linear is not adapted.
//
// a: per RANK_TILE ranks (the last tile may have fewer) [K / LANES, ranks, LANES]; b: per RANK_BLOCK ranks [N / LANES,
// ranks, LANES]. `kind` is float32; bfloat16, with ranks in pairs [LANES, 2] and the last of an odd number as [LANES];
// or int8. scales is [rank].
//
// With a gain [N] (DoRA, or adapters with biases): y = gain * y + shift, of the linear's output alone.
struct Factors {
    const void *a, *b;
    const float *scales, *gain, *shift;
    int32_t rank;
    Kind kind;
};

// Rows of one adapter, or one row of the base model.
struct RowGroup {
    int adapter, count;
    int rows[GROUP_ROWS];
};

// Group the indexes 0 to n by adapter; `adapter_of(i)` is -1 for the base model. Groups are small enough for all
// threads to get some.
template <class AdapterOf>
inline void group_rows(int n, int threads, const AdapterOf& adapter_of, std::vector<RowGroup>& groups) {
    groups.clear();
    const int max_rows = std::max(1, std::min(n / std::max(threads, 1), GROUP_ROWS));
    std::vector<int> unfilled;  // by adapter: index of its unfilled group, or -1
    for (int i = 0; i < n; i++) {
        const int adapter = adapter_of(i);
        if (adapter >= int(unfilled.size())) unfilled.resize(adapter + 1, -1);
        if (adapter < 0 || unfilled[adapter] < 0) {
            if (adapter >= 0) unfilled[adapter] = int(groups.size());
            groups.push_back({adapter, 0, {}});
        }
        RowGroup& group = adapter < 0 ? groups.back() : groups[unfilled[adapter]];
        group.rows[group.count++] = i;
        if (adapter >= 0 && group.count == max_rows) unfilled[adapter] = -1;
    }
}

// A matrix whose row t begins at `first + t * width`.
template <class T>
struct Matrix {
    T* first;
    int width;
    T* operator[](int t) const { return first + size_t(t) * width; }
};

inline void fetch_ahead(const void* at) { _mm_prefetch((const char*)at + FACTOR_PREFETCH_BYTES, _MM_HINT_T0); }

inline __m512 load_factor(const float* at) {
    fetch_ahead(at);
    return _mm512_loadu_ps(at);
}

inline __m512 load_factor(const uint16_t* at) {
    fetch_ahead(at);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at)), 16));
}

inline __m512 load_factor(const int8_t* at) {
    fetch_ahead(at);
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)));
}

// Load the factors of two ranks: one after the other, or in bfloat16 interleaved.
template <class T>
inline void load_pair(const T* at, __m512* to) { to[0] = load_factor(at), to[1] = load_factor(at + LANES); }

inline void load_pair(const uint16_t* at, __m512* to) {
    fetch_ahead(at);
    const __m512i both = _mm512_loadu_si512(at);
    to[0] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    to[1] = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000))));
}

// Compute h[m][r] = scales[r] * (A x)[r] for M rows and R ranks.
template <int M, int R, class T>
inline void shrink(const T* a, const float* scales, const float* const* x, int K, float (*h)[RANK_BLOCK]) {
    __m512 sum[M][R];
    for (int m = 0; m < M; m++)
        for (int r = 0; r < R; r++) sum[m][r] = _mm512_setzero_ps();
    for (int k = 0; k < K; k += LANES, a += R * LANES) {
        __m512 factor[R];
        for (int r = 0; r + 1 < R; r += 2) load_pair(a + r * LANES, factor + r);
        if (R % 2) factor[R - 1] = load_factor(a + (R - 1) * LANES);
        for (int m = 0; m < M; m++) {
            const __m512 value = _mm512_loadu_ps(x[m] + k);
            for (int r = 0; r < R; r++) sum[m][r] = _mm512_fmadd_ps(factor[r], value, sum[m][r]);
        }
    }
    for (int m = 0; m < M; m++)
        for (int r = 0; r < R; r++) h[m][r] = scales[r] * _mm512_reduce_add_ps(sum[m][r]);
}

// Compute y += B h for M rows and C vectors of columns.
template <int M, int C, class T>
inline void expand_columns(const T* b, int ranks, const float (*h)[RANK_BLOCK], float* const* y, int n) {
    __m512 value[C][M];
    for (int c = 0; c < C; c++)
        for (int m = 0; m < M; m++) value[c][m] = _mm512_loadu_ps(y[m] + n + c * LANES);
    int r = 0;
    for (; r + 1 < ranks; r += 2) {
        __m512 factor[C][2];
        for (int c = 0; c < C; c++) load_pair(b + (c * ranks + r) * LANES, factor[c]);
        for (int i = 0; i < 2; i++)
            for (int m = 0; m < M; m++) {
                const __m512 by = _mm512_set1_ps(h[m][r + i]);
                for (int c = 0; c < C; c++) value[c][m] = _mm512_fmadd_ps(by, factor[c][i], value[c][m]);
            }
    }
    for (int c = 0; r < ranks && c < C; c++) {
        const __m512 factor = load_factor(b + (c * ranks + r) * LANES);
        for (int m = 0; m < M; m++) value[c][m] = _mm512_fmadd_ps(_mm512_set1_ps(h[m][r]), factor, value[c][m]);
    }
    for (int c = 0; c < C; c++)
        for (int m = 0; m < M; m++) _mm512_storeu_ps(y[m] + n + c * LANES, value[c][m]);
}

// Compute y += B h for M rows in one pass over y.
template <int M, class T>
inline void expand(const T* b, int ranks, const float (*h)[RANK_BLOCK], float* const* y, int N) {
    int n = 0;
    for (; n + COLUMN_VECTORS_PER_PASS * LANES <= N;
         n += COLUMN_VECTORS_PER_PASS * LANES, b += size_t(COLUMN_VECTORS_PER_PASS) * ranks * LANES)
        expand_columns<M, COLUMN_VECTORS_PER_PASS>(b, ranks, h, y, n);
    for (; n < N; n += LANES, b += size_t(ranks) * LANES) expand_columns<M, 1>(b, ranks, h, y, n);
}

template <int M, class T>
inline void add_rows(const Factors& f, const float* const* x, int K, float* const* y, int N) {
    const T *a = (const T*)f.a, *b = (const T*)f.b;
    float h[M][RANK_BLOCK];
    for (int first = 0; first < f.rank; first += RANK_BLOCK) {
        const int ranks = std::min(f.rank - first, RANK_BLOCK);
        int r = 0;
        for (; r + RANK_TILE <= ranks; r += RANK_TILE, a += size_t(RANK_TILE) * K)
            shrink<M, RANK_TILE>(a, f.scales + first + r, x, K, (float(*)[RANK_BLOCK]) & h[0][r]);
        if (ranks - r == 3) shrink<M, 3>(a, f.scales + first + r, x, K, (float(*)[RANK_BLOCK]) & h[0][r]);
        if (ranks - r == 2) shrink<M, 2>(a, f.scales + first + r, x, K, (float(*)[RANK_BLOCK]) & h[0][r]);
        if (ranks - r == 1) shrink<M, 1>(a, f.scales + first + r, x, K, (float(*)[RANK_BLOCK]) & h[0][r]);
        expand<M>(b, ranks, h, y, N);
        b += size_t(ranks) * N;
    }
}

template <class T, int M = ROWS_PER_PASS>
inline void dispatch_add_rows(int count, const Factors& f, const float* const* x, int K, float* const* y, int N) {
    if constexpr (M > 1)
        if (count < M) return dispatch_add_rows<T, M - 1>(count, f, x, K, y, N);
    add_rows<M, T>(f, x, K, y, N);
}

// Add the contribution of a group's adapter to `y`, the output for `x`. `residual` is what the output was added to, if
// any.
inline void adapt_rows(const Factors& f, const RowGroup& group, Matrix<const float> x, int K, Matrix<float> y, int N,
                       Matrix<const float> residual) {
    const float* from[GROUP_ROWS];
    float* to[GROUP_ROWS];
    for (int m = 0; m < group.count; m++) from[m] = x[group.rows[m]], to[m] = y[group.rows[m]];
    const bool subtract_base = f.gain && residual.first;
    for (int m = 0; subtract_base && m < group.count; m++) {
        const float* base = residual[group.rows[m]];
        for (int n = 0; n < N; n += LANES)
            _mm512_storeu_ps(to[m] + n, _mm512_sub_ps(_mm512_loadu_ps(to[m] + n), _mm512_loadu_ps(base + n)));
    }
    for (int m = 0; f.rank && m < group.count; m += ROWS_PER_PASS) {
        const int count = std::min(group.count - m, ROWS_PER_PASS);
        if (f.kind == Kind::INT8) dispatch_add_rows<int8_t>(count, f, from + m, K, to + m, N);
        else if (f.kind == Kind::BF16) dispatch_add_rows<uint16_t>(count, f, from + m, K, to + m, N);
        else dispatch_add_rows<float>(count, f, from + m, K, to + m, N);
    }
    for (int m = 0; f.gain && m < group.count; m++)
        for (int n = 0; n < N; n += LANES) {
            const __m512 value = _mm512_fmadd_ps(_mm512_loadu_ps(f.gain + n), _mm512_loadu_ps(to[m] + n),
                                                 _mm512_loadu_ps(f.shift + n));
            const float* base = subtract_base ? residual[group.rows[m]] + n : nullptr;
            _mm512_storeu_ps(to[m] + n, base ? _mm512_add_ps(value, _mm512_loadu_ps(base)) : value);
        }
}

}  // namespace mlflow_llm
