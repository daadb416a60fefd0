// What adapters add to linears: h = A x, y += B h, for several rows of one adapter at a time, so that its factors are
// read once for all of them. A row's sums are in one order whatever rows are beside it: alone its numbers are the same.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "simd.h"

namespace mlt {

constexpr int RANK_TILE = 4;        // ranks of A that lie, and are multiplied, together
constexpr int RANK_BLOCK = 64;       // ranks whose h is kept between A and B
constexpr int ROWS_AT_ONCE = 4; // with RANK_TILE: as many sums under way as there are registers for
constexpr int GROUP_ROWS = 8;   // rows of one adapter that a thread takes
constexpr int AHEAD = 4096;     // bytes of factors asked for before they are read

// One adapter on one linear: h = A x, y += scale * B h. rank 0: not adapted.
// a: for each RANK_TILE ranks, the last fewer, [K / LANES, ranks, LANES]; b: for each RANK_BLOCK ranks [N / LANES, ranks, LANES];
// float32, or bfloat16 where `narrow`.
// Where there is a gain [N] (DoRA, biases of its own): then y = gain * y + shift, of the linear's output alone.
struct Factors {
    const void *a, *b;
    int32_t rank;
    float scale;
    const float *gain, *shift;
    int32_t narrow;
};

// Rows of one adapter, or one row of the base.
struct RowGroup {
    int adapter, count;
    int rows[GROUP_ROWS];
};

// Indexes from 0 to n in groups: `adapter_of(i)` is -1 for the base. Small enough that all threads have some.
template <class AdapterOf>
inline void group_rows(int n, int threads, const AdapterOf& adapter_of, std::vector<RowGroup>& groups) {
    groups.clear();
    const int most = std::max(1, std::min(n / std::max(threads, 1), GROUP_ROWS));
    std::vector<int> open;  // by adapter: its group that is not full, or -1
    for (int i = 0; i < n; i++) {
        const int adapter = adapter_of(i);
        if (adapter >= int(open.size())) open.resize(adapter + 1, -1);
        if (adapter < 0 || open[adapter] < 0) {
            if (adapter >= 0) open[adapter] = int(groups.size());
            groups.push_back({adapter, 0, {}});
        }
        RowGroup& group = adapter < 0 ? groups.back() : groups[open[adapter]];
        group.rows[group.count++] = i;
        if (adapter >= 0 && group.count == most) open[adapter] = -1;
    }
}

// Rows of a matrix: row t begins at `first + t * width`.
template <class T>
struct Matrix {
    T* first;
    int width;
    T* operator[](int t) const { return first + size_t(t) * width; }
};

inline __m512 load_factor(const float* at) {
    _mm_prefetch((const char*)at + AHEAD, _MM_HINT_T0);
    return _mm512_loadu_ps(at);
}

inline __m512 load_factor(const uint16_t* at) {
    _mm_prefetch((const char*)at + AHEAD, _MM_HINT_T0);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at)), 16));
}

// h[m][r] = scale * (A x)[r] of M rows and R ranks.
template <int M, int R, class T>
inline void shrink(const T* a, float scale, const float* const* x, int K, float (*h)[RANK_BLOCK]) {
    __m512 sum[M][R];
    for (int m = 0; m < M; m++)
        for (int r = 0; r < R; r++) sum[m][r] = _mm512_setzero_ps();
    for (int k = 0; k < K; k += LANES, a += R * LANES) {
        __m512 factor[R];
        for (int r = 0; r < R; r++) factor[r] = load_factor(a + r * LANES);
        for (int m = 0; m < M; m++) {
            const __m512 value = _mm512_loadu_ps(x[m] + k);
            for (int r = 0; r < R; r++) sum[m][r] = _mm512_fmadd_ps(factor[r], value, sum[m][r]);
        }
    }
    for (int m = 0; m < M; m++)
        for (int r = 0; r < R; r++) h[m][r] = scale * _mm512_reduce_add_ps(sum[m][r]);
}

// y += B h of M rows: one pass over y.
template <int M, class T>
inline void expand(const T* b, int ranks, const float (*h)[RANK_BLOCK], float* const* y, int N) {
    for (int n = 0; n < N; n += LANES) {
        __m512 value[M];
        for (int m = 0; m < M; m++) value[m] = _mm512_loadu_ps(y[m] + n);
        for (int r = 0; r < ranks; r++, b += LANES) {
            const __m512 factor = load_factor(b);
            for (int m = 0; m < M; m++) value[m] = _mm512_fmadd_ps(_mm512_set1_ps(h[m][r]), factor, value[m]);
        }
        for (int m = 0; m < M; m++) _mm512_storeu_ps(y[m] + n, value[m]);
    }
}

template <int M, class T>
inline void add_rows(const Factors& f, const float* const* x, int K, float* const* y, int N) {
    const T *a = (const T*)f.a, *b = (const T*)f.b;
    float h[M][RANK_BLOCK];
    for (int first = 0; first < f.rank; first += RANK_BLOCK) {
        const int ranks = std::min(f.rank - first, RANK_BLOCK);
        int r = 0;
        for (; r + RANK_TILE <= ranks; r += RANK_TILE, a += size_t(RANK_TILE) * K)
            shrink<M, RANK_TILE>(a, f.scale, x, K, (float(*)[RANK_BLOCK]) & h[0][r]);
        if (ranks - r == 3) shrink<M, 3>(a, f.scale, x, K, (float(*)[RANK_BLOCK]) & h[0][r]);
        if (ranks - r == 2) shrink<M, 2>(a, f.scale, x, K, (float(*)[RANK_BLOCK]) & h[0][r]);
        if (ranks - r == 1) shrink<M, 1>(a, f.scale, x, K, (float(*)[RANK_BLOCK]) & h[0][r]);
        expand<M>(b, ranks, h, y, N);
        b += size_t(ranks) * N;
    }
}

template <class T, int M = ROWS_AT_ONCE>
inline void add_rows_of(int count, const Factors& f, const float* const* x, int K, float* const* y, int N) {
    if constexpr (M > 1)
        if (count < M) return add_rows_of<T, M - 1>(count, f, x, K, y, N);
    add_rows<M, T>(f, x, K, y, N);
}

// What the adapter of a group adds to `y`, the output for `x`. `before` is what the output was added to, if it was.
inline void adapt_rows(const Factors& f, const RowGroup& group, Matrix<const float> x, int K, Matrix<float> y, int N,
                       Matrix<const float> before) {
    const float* from[GROUP_ROWS];
    float* to[GROUP_ROWS];
    for (int m = 0; m < group.count; m++) from[m] = x[group.rows[m]], to[m] = y[group.rows[m]];
    const bool apart = f.gain && before.first;
    for (int m = 0; apart && m < group.count; m++) {
        const float* base = before[group.rows[m]];
        for (int n = 0; n < N; n += LANES)
            _mm512_storeu_ps(to[m] + n, _mm512_sub_ps(_mm512_loadu_ps(to[m] + n), _mm512_loadu_ps(base + n)));
    }
    for (int m = 0; f.rank && m < group.count; m += ROWS_AT_ONCE) {
        if (f.narrow) add_rows_of<uint16_t>(std::min(group.count - m, ROWS_AT_ONCE), f, from + m, K, to + m, N);
        else add_rows_of<float>(std::min(group.count - m, ROWS_AT_ONCE), f, from + m, K, to + m, N);
    }
    for (int m = 0; f.gain && m < group.count; m++)
        for (int n = 0; n < N; n += LANES) {
            const __m512 value = _mm512_fmadd_ps(_mm512_loadu_ps(f.gain + n), _mm512_loadu_ps(to[m] + n),
                                                 _mm512_loadu_ps(f.shift + n));
            const float* base = apart ? before[group.rows[m]] + n : nullptr;
            _mm512_storeu_ps(to[m] + n, base ? _mm512_add_ps(value, _mm512_loadu_ps(base)) : value);
        }
}

}  // namespace mlt
