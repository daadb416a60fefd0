// Byte products by 16-bit words, for AVX2 without AVX-VNNI, whose byte product saturates. Activations, queries and
// weights of values are stored as 16-bit words, int8 values are widened as they are read, and vpmaddwd adds pairs of
// products.
//
//   a row   [K / 4][4]   16-bit words in the order k, k + 2, k + 1, k + 3 of each four: even and odd ones are adjacent
//
// Integer sums are exact, so results are bitwise those of linear.h and int8_attention.h.
#pragma once

#include "isa/simd.h"

namespace mlflow_llm {

#ifdef MLFLOW_LLM_AVX2

constexpr bool HAS_WORDS = true;
constexpr int WORD_ROWS = 6;  // by 16 columns: 12 sums, 2 registers of weights, one of a row and one of products
constexpr int WIDE_WORD_ROWS = 2;  // by 32 columns

// Return the same two words in every lane.
inline Ints broadcast_words(const int16_t* from) { return broadcast(load_part<int32_t>(from)); }

// Return the even (odd) bytes of thirty-two, widened to 16 bits.
template <bool SIGNED>
MLFLOW_LLM_INLINE Ints even_bytes(const char* bytes) {
    const auto both = load_part<::__m256i>(bytes);
    if constexpr (SIGNED) return Ints(_mm256_srai_epi16(_mm256_slli_epi16(both, 8), 8));
    else return Ints(_mm256_and_si256(both, _mm256_set1_epi16(0xff)));
}

template <bool SIGNED>
MLFLOW_LLM_INLINE Ints odd_bytes(const char* bytes) {
    const auto both = load_part<::__m256i>(bytes);
    return Ints(SIGNED ? _mm256_srai_epi16(both, 8) : _mm256_srli_epi16(both, 8));
}

// In assembly: gcc 12 would copy the sums and spill some of them.
MLFLOW_LLM_INLINE void add_word_products(Ints& sum, Ints x, Ints w) {
    Ints products;
    asm("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(products) : "x"(x), "x"(w));
}

// Compute the sums of sizeof...(M) rows by sixteen columns of bytes. `step` is the stride of `bytes`, `row` that of
// rows in words and `sums_row` that of `sums` in lanes. `next`, if not null, is prefetched, a cache line per four k's.
template <bool SIGNED, size_t... M>
__attribute__((noinline)) void word_sums(std::index_sequence<M...>, const char* bytes, size_t step, const int16_t* x,
                                         size_t row, int K, int32_t* sums, size_t sums_row, const char* next) {
    Ints left[] = {(void(M), Ints{})...}, right[] = {(void(M), Ints{})...};
    for (const int16_t* const end = x + K; x < end; x += 4, bytes += step) {
        if (next) __builtin_prefetch(next, 0, 2), next += 64;
        Ints w0 = even_bytes<SIGNED>(bytes), w1 = even_bytes<SIGNED>(bytes + sizeof(Ints)), each;
        ((each = broadcast_words(x + M * row), add_word_products(left[M], each, w0),
          add_word_products(right[M], each, w1)),
         ...);
        w0 = odd_bytes<SIGNED>(bytes), w1 = odd_bytes<SIGNED>(bytes + sizeof(Ints));
        ((each = broadcast_words(x + M * row + 2), add_word_products(left[M], each, w0),
          add_word_products(right[M], each, w1)),
         ...);
    }
    ((std::memcpy(sums + M * sums_row, &left[M], sizeof(Ints)),
      std::memcpy(sums + M * sums_row + WIDTH, &right[M], sizeof(Ints))),
     ...);
}

// Add the products of several rows' even and odd words by a register of bytes.
template <bool SIGNED, size_t... M>
MLFLOW_LLM_INLINE void add_rows(std::index_sequence<M...>, Ints (&sums)[sizeof...(M)], const Ints (&even)[sizeof...(M)],
                                const Ints (&odd)[sizeof...(M)], const char* bytes) {
    const Ints w0 = even_bytes<SIGNED>(bytes);
    (add_word_products(sums[M], even[M], w0), ...);
    const Ints w1 = odd_bytes<SIGNED>(bytes);
    (add_word_products(sums[M], odd[M], w1), ...);
}

// Like word_sums(), by thirty-two columns.
template <bool SIGNED, size_t... M>
__attribute__((noinline)) void wide_word_sums(std::index_sequence<M...> rows, const char* bytes, size_t step,
                                              const int16_t* x, size_t row, int K, int32_t* sums, size_t sums_row,
                                              const char* next) {
    Ints s0[] = {(void(M), Ints{})...}, s1[] = {(void(M), Ints{})...};
    Ints s2[] = {(void(M), Ints{})...}, s3[] = {(void(M), Ints{})...};
    for (const int16_t* const end = x + K; x < end; x += 4, bytes += step) {
        if (next) __builtin_prefetch(next, 0, 2), next += 64;
        const Ints even[] = {broadcast_words(x + M * row)...}, odd[] = {broadcast_words(x + M * row + 2)...};
        add_rows<SIGNED>(rows, s0, even, odd, bytes), add_rows<SIGNED>(rows, s1, even, odd, bytes + sizeof(Ints));
        add_rows<SIGNED>(rows, s2, even, odd, bytes + 2 * sizeof(Ints));
        add_rows<SIGNED>(rows, s3, even, odd, bytes + 3 * sizeof(Ints));
    }
    ((std::memcpy(sums + M * sums_row, &s0[M], sizeof(Ints)),
      std::memcpy(sums + M * sums_row + WIDTH, &s1[M], sizeof(Ints)),
      std::memcpy(sums + M * sums_row + 2 * WIDTH, &s2[M], sizeof(Ints)),
      std::memcpy(sums + M * sums_row + 3 * WIDTH, &s3[M], sizeof(Ints))),
     ...);
}

// Compute the sums of up to WORD_ROWS rows by thirty-two columns.
template <bool SIGNED, int M = WORD_ROWS>
inline void dispatch_word_sums(int rows, const char* bytes, size_t step, const int16_t* x, size_t row, int K,
                               int32_t* sums, size_t sums_row, const char* next) {
    if constexpr (M > 1)
        if (rows < M) return dispatch_word_sums<SIGNED, M - 1>(rows, bytes, step, x, row, K, sums, sums_row, next);
    constexpr std::make_index_sequence<M> each;
    if constexpr (M <= WIDE_WORD_ROWS)
        return wide_word_sums<SIGNED>(each, bytes, step, x, row, K, sums, sums_row, next);
    else {
        word_sums<SIGNED>(each, bytes, step, x, row, K, sums, sums_row, next);
        if (next) next += K / 4 * 64;
        word_sums<SIGNED>(each, bytes + 2 * sizeof(Ints), step, x, row, K, sums + LANES, sums_row, next);
    }
}

// Store sixteen integers as the words of a row.
inline void store_words(int16_t* to, __m512i x) {
    const auto turned = [](Ints four) { return _mm256_shuffle_epi32(::__m256i(four), 0xd8); };
    const ::__m256i pairs = _mm256_packs_epi32(turned(x.part[0]), turned(x.part[1]));
    const ::__m256i words = _mm256_permute4x64_epi64(pairs, 0xd8);
    std::memcpy(to, &words, sizeof words);
}

#else

constexpr bool HAS_WORDS = false;
inline void store_words(int16_t*, __m512i) {}

#endif

}  // namespace mlflow_llm
