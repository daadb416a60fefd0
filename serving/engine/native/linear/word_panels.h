// Linears with int8 panels by rows of 16-bit words (words.h).
#pragma once

#include "linear/panel_tiles.h"

namespace mlflow_llm {

// Multiply some rows by a panel of 32 columns; `next` is prefetched as in word_sums().
template <Kind KIND>
inline void word_tile(const Linear& w, int panel, const int16_t* x, int rows, const float* x_scale, float* y, bool add,
                      const char* next) {
    alignas(64) int32_t sums[WORD_ROWS][PANEL];
    const char* weights = (const char*)w.packed + panel * w.panel_bytes();
    dispatch_word_sums<true>(rows, weights, PANEL * 4, x, w.K, w.K, sums[0], PANEL, next);
    for (int m = 0; m < rows; m++)
        for (int n = 0; n < PANEL && panel * PANEL + n < w.N; n += LANES)
            store_sum<KIND, false>(w, _mm512_load_si512(sums[m] + n), panel * PANEL + n, x_scale + m,
                                   y + size_t(m) * w.N, add);
}

template <Kind KIND>
inline void multiply_words(const Linear& w, Rows x, int T, float* y, Epilogue epilogue, int first, int last) {
    for_each_tile<WORD_ROWS>(T, w.K * sizeof(int16_t), first, last, [&](int panel, int a, int count, bool begins) {
        const bool fetches = begins && panel + 1 < last;
        const char* next = fetches ? (const char*)w.packed + (panel + 1) * w.panel_bytes() : nullptr;
        const int16_t* rows = (const int16_t*)x.values + size_t(a) * w.K;
        float* out = y + size_t(a) * w.N;
        word_tile<KIND>(w, panel, rows, count, x.scale + a, out, epilogue == Epilogue::ADD, next);
        if (epilogue == Epilogue::GELU) gelu_tile(out, count, panel, w.N);
    });
}

}  // namespace mlflow_llm
