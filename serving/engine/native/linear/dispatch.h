// multiply() and multiply_gated(): the kernel for a linear on this CPU, split over the threads of a team.
#pragma once

#include "linear/panel_tiles.h"
#include "linear/int4.h"
#ifndef MLFLOW_LLM_AVX512
#include "linear/narrow_tiles.h"
#endif
#ifdef MLFLOW_LLM_AVX2
#include "linear/word_panels.h"
#endif
#ifdef __aarch64__
#include "linear/row_pairs.h"
#endif

namespace mlflow_llm {

template <Kind KIND>
inline void multiply_words(const Linear& w, Rows x, int T, float* y, Epilogue epilogue, int first, int last);
template <Kind KIND>
inline void multiply_floats(const Linear& w, Rows x, int T, float* y, Epilogue epilogue, int first, int last);

template <Kind KIND>
inline void multiply_narrow(const Linear& w, Rows x, int T, float* y, Epilogue epilogue, int first, int last) {
    if constexpr (HAS_WORDS && is_int8(KIND))
        if (uses_words()) return multiply_words<KIND>(w, x, T, y, epilogue, first, last);
    const TileUse use = tiles_for(w);
    if constexpr (HAS_OPTIONAL_BYTE_PRODUCTS && is_int8(KIND))
        if (use == TileUse::NONE && use_byte_products())
            return multiply_panels<KIND, true>(w, x, T, y, epilogue, first, last);
    if constexpr (NARROW_VECTORS && KIND == Kind::BF16)
        if (use == TileUse::NONE) return multiply_floats<KIND>(w, x, T, y, epilogue, first, last);
    if (use == TileUse::HARDWARE) multiply_tiles<KIND, HardwareTiles>(w, x, T, y, epilogue, first, last);
    else if (use == TileUse::EMULATED) multiply_tiles<KIND, EmulatedTiles>(w, x, T, y, epilogue, first, last);
    else if constexpr (!NARROW_VECTORS || is_int8(KIND)) multiply_panels<KIND>(w, x, T, y, epilogue, first, last);
}

inline void multiply_int4(const Linear& w, Rows x, int T, float* y, Epilogue epilogue, int first, int last);

template <Kind KIND>
inline void multiply_float32(const Linear& w, Rows x, int T, float* y, Epilogue epilogue, int first, int last) {
    if constexpr (NARROW_VECTORS) multiply_floats<KIND>(w, x, T, y, epilogue, first, last);
    else multiply_panels<KIND>(w, x, T, y, epilogue, first, last);
}

// Compute the columns of panels [first, last) of y [T, N] = x W^T + b.
inline void multiply_range(const Linear& w, Rows x, int T, float* y, Epilogue epilogue, int first, int last) {
    if (w.kind == Kind::F32) multiply_float32<Kind::F32>(w, x, T, y, epilogue, first, last);
    else if (is_int4(w.kind)) multiply_int4(w, x, T, y, epilogue, first, last);
    else if (is_int8(w.kind)) multiply_narrow<Kind::INT8>(w, x, T, y, epilogue, first, last);
    else multiply_narrow<Kind::BF16>(w, x, T, y, epilogue, first, last);
}

// Return whether multiply_gated() supports w, two stacked linears, and pays. With few rows it matters most that weights
// are streamed without a pause, from one end to the other.
inline bool can_multiply_gated(const Linear& w, int rows) {
    return w.N % (2 * PANEL) == 0 && (rows >= MIN_FUSED_GATE_ROWS || tiles_for(w) != TileUse::NONE);
}

// Compute y [T, N / 2] = act(gate) * up, where gate and up are the upper and the lower half of W times x: bitwise as
// multiply() and the activation give, but without writing gate and up to memory, which takes longer than the products
// by tiles.
template <Kind KIND, class Tiles, class Act>
inline void multiply_gated_tiles(const Linear& w, Rows x, int T, float* y, int first, int last, const Act& act) {
    const int width = w.N / 2, half = w.panels / 2;
    multiply_tiles<KIND, 2, Tiles>(w, x, T, first, last, [&](const TileSums* sums, int panel, int a, int count) {
        const PanelValues<KIND> gate(w, panel), up(w, panel + half);
        float* to = y + size_t(a) * width + panel * PANEL;
        for (int m = 0; m < count; m++, to += width) {
            const __m512 by = _mm512_set1_ps(x.scale ? x.scale[a + m] : 1.0f);
            for (int i = 0; i < 2; i++)
                _mm512_storeu_ps(to + i * LANES, _mm512_mul_ps(act(gate(sums[0][m], i, by)), up(sums[1][m], i, by)));
        }
    });
}

// The same by vectors: one panel of each half at a time, with rows whose outputs stay in cache.
template <class Act>
inline void multiply_gated_vectors(const Linear& w, Rows x, int T, float* y, int first, int last, const Act& act) {
    constexpr int MAX_ROWS = 96;
    const int width = w.N / 2, half = w.panels / 2;
    const int block_rows = std::min(MAX_ROWS, rows_in_l2<VECTOR_TILE_ROWS>(size_t(w.K) * 4)),
              parts = (T + block_rows - 1) / block_rows;
    alignas(64) float gate[MAX_ROWS][PANEL], up[MAX_ROWS][PANEL];
    for (int i = 0; i < parts; i++) {
        const int from = int(int64_t(T) * i / parts), count = int(int64_t(T) * (i + 1) / parts) - from;
        const Rows rows{(const char*)x.values + size_t(from) * w.row_bytes(), x.scale ? x.scale + from : nullptr};
        for (int panel = first; panel < last; panel++) {
            multiply_range(panel_range(w, panel, 1), rows, count, gate[0], Epilogue::WRITE, 0, 1);
            multiply_range(panel_range(w, panel + half, 1), rows, count, up[0], Epilogue::WRITE, 0, 1);
            float* to = y + size_t(from) * width + panel * PANEL;
            for (int m = 0; m < count; m++, to += width)
                for (int n = 0; n < PANEL; n += LANES)
                    _mm512_storeu_ps(to + n,
                                     _mm512_mul_ps(act(_mm512_load_ps(gate[m] + n)), _mm512_load_ps(up[m] + n)));
        }
    }
}

template <class Act>
inline void multiply_gated(Team& team, const Linear& w, Rows x, int T, float* y, const Act& act) {
    const TileUse use = tiles_for(w);
    team.parallel_ranges(w.panels / 2, PANELS_PER_TASK / 2, [&](int first, int last) {
        if (use == TileUse::NONE) return multiply_gated_vectors(w, x, T, y, first, last, act);
        const bool emulated = use == TileUse::EMULATED, bytes = is_int8(w.kind);
        if (bytes && !emulated) multiply_gated_tiles<Kind::INT8, HardwareTiles>(w, x, T, y, first, last, act);
        else if (bytes) multiply_gated_tiles<Kind::INT8, EmulatedTiles>(w, x, T, y, first, last, act);
        else if (!emulated) multiply_gated_tiles<Kind::BF16, HardwareTiles>(w, x, T, y, first, last, act);
        else multiply_gated_tiles<Kind::BF16, EmulatedTiles>(w, x, T, y, first, last, act);
    });
}

// Compute y [T, N] = x W^T + b, split by panels.
inline void multiply(Team& team, const Linear& w, Rows x, int T, float* y, Epilogue epilogue) {
    team.parallel_ranges(w.panels, PANELS_PER_TASK,
                         [&](int first, int last) { multiply_range(w, x, T, y, epilogue, first, last); });
}

}  // namespace mlflow_llm
