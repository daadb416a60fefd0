// Products of bytes where no instruction makes them without saturating: of AVX2 alone. What meets them (activations,
// queries, weights of values) is 16-bit numbers, the bytes become such as they are read, and vpmaddwd adds two products.
//
//   a row     [K / 4][4]   of 16 bits: k, k + 2, k + 1, k + 3 of each four, so that its even and odd ones lie together
//
// Sums of integers are exact and so those of linear.h and of int8_attention.h, bit for bit.
#pragma once

#include "simd.h"

namespace mlt {

#ifdef MLT_AVX2

constexpr bool HAS_WORDS = true;
constexpr int WORD_ROWS = 6;  // by sixteen columns: 12 sums, 2 registers of weights, one of a row and one of products
constexpr int WIDE_ROWS = 2;  // by thirty-two

// The same two words in every lane.
inline Ints two_words(const int16_t* from) { return all(load_part<int32_t>(from)); }

// The even ones of thirty-two bytes, or the odd ones, as 16-bit numbers.
template <bool SIGNED>
MLT_INLINE Ints even_of(const char* bytes) {
    const auto both = load_part<::__m256i>(bytes);
    if constexpr (SIGNED) return Ints(_mm256_srai_epi16(_mm256_slli_epi16(both, 8), 8));
    else return Ints(_mm256_and_si256(both, _mm256_set1_epi16(0xff)));
}

template <bool SIGNED>
MLT_INLINE Ints odd_of(const char* bytes) {
    const auto both = load_part<::__m256i>(bytes);
    return Ints(SIGNED ? _mm256_srai_epi16(both, 8) : _mm256_srli_epi16(both, 8));
}

// In assembly: gcc 12 would copy the sums, and put some into memory.
MLT_INLINE void add_word_products(Ints& sum, Ints x, Ints w) {
    Ints products;
    asm("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(products) : "x"(x), "x"(w));
}

// Sums of as many rows as there are indexes, by sixteen columns of bytes: `bytes` steps by `step`, rows by `row` words and
// `sums` by `sums_row` lanes. `next`, or null: what is to be near later, a cache line for each four k's.
template <bool SIGNED, size_t... M>
__attribute__((noinline)) void word_sums(std::index_sequence<M...>, const char* bytes, size_t step, const int16_t* x,
                                         size_t row, int K, int32_t* sums, size_t sums_row, const char* next) {
    Ints left[] = {(void(M), Ints{})...}, right[] = {(void(M), Ints{})...};
    for (const int16_t* const end = x + K; x < end; x += 4, bytes += step) {
        if (next) __builtin_prefetch(next, 0, 2), next += 64;
        Ints w0 = even_of<SIGNED>(bytes), w1 = even_of<SIGNED>(bytes + sizeof(Ints)), each;
        ((each = two_words(x + M * row), add_word_products(left[M], each, w0), add_word_products(right[M], each, w1)), ...);
        w0 = odd_of<SIGNED>(bytes), w1 = odd_of<SIGNED>(bytes + sizeof(Ints));
        ((each = two_words(x + M * row + 2), add_word_products(left[M], each, w0), add_word_products(right[M], each, w1)), ...);
    }
    ((std::memcpy(sums + M * sums_row, &left[M], sizeof(Ints)), std::memcpy(sums + M * sums_row + WIDTH, &right[M], sizeof(Ints))),
     ...);
}

// The products of some rows' even and odd words by a register of bytes.
template <bool SIGNED, size_t... M>
MLT_INLINE void add_rows(std::index_sequence<M...>, Ints (&sums)[sizeof...(M)], const Ints (&even)[sizeof...(M)],
                         const Ints (&odd)[sizeof...(M)], const char* bytes) {
    const Ints w0 = even_of<SIGNED>(bytes);
    (add_word_products(sums[M], even[M], w0), ...);
    const Ints w1 = odd_of<SIGNED>(bytes);
    (add_word_products(sums[M], odd[M], w1), ...);
}

// word_sums() by thirty-two columns.
template <bool SIGNED, size_t... M>
__attribute__((noinline)) void wide_word_sums(std::index_sequence<M...> rows, const char* bytes, size_t step, const int16_t* x,
                                              size_t row, int K, int32_t* sums, size_t sums_row, const char* next) {
    Ints s0[] = {(void(M), Ints{})...}, s1[] = {(void(M), Ints{})...};
    Ints s2[] = {(void(M), Ints{})...}, s3[] = {(void(M), Ints{})...};
    for (const int16_t* const end = x + K; x < end; x += 4, bytes += step) {
        if (next) __builtin_prefetch(next, 0, 2), next += 64;
        const Ints even[] = {two_words(x + M * row)...}, odd[] = {two_words(x + M * row + 2)...};
        add_rows<SIGNED>(rows, s0, even, odd, bytes), add_rows<SIGNED>(rows, s1, even, odd, bytes + sizeof(Ints));
        add_rows<SIGNED>(rows, s2, even, odd, bytes + 2 * sizeof(Ints));
        add_rows<SIGNED>(rows, s3, even, odd, bytes + 3 * sizeof(Ints));
    }
    ((std::memcpy(sums + M * sums_row, &s0[M], sizeof(Ints)), std::memcpy(sums + M * sums_row + WIDTH, &s1[M], sizeof(Ints)),
      std::memcpy(sums + M * sums_row + 2 * WIDTH, &s2[M], sizeof(Ints)),
      std::memcpy(sums + M * sums_row + 3 * WIDTH, &s3[M], sizeof(Ints))),
     ...);
}

// Of up to WORD_ROWS rows by thirty-two columns.
template <bool SIGNED, int M = WORD_ROWS>
inline void word_sums_of(int rows, const char* bytes, size_t step, const int16_t* x, size_t row, int K, int32_t* sums,
                         size_t sums_row, const char* next) {
    if constexpr (M > 1)
        if (rows < M) return word_sums_of<SIGNED, M - 1>(rows, bytes, step, x, row, K, sums, sums_row, next);
    constexpr std::make_index_sequence<M> each;
    if constexpr (M <= WIDE_ROWS) return wide_word_sums<SIGNED>(each, bytes, step, x, row, K, sums, sums_row, next);
    else {
        word_sums<SIGNED>(each, bytes, step, x, row, K, sums, sums_row, next);
        if (next) next += K / 4 * 64;
        word_sums<SIGNED>(each, bytes + 2 * sizeof(Ints), step, x, row, K, sums + LANES, sums_row, next);
    }
}

// Sixteen whole numbers as the words of a row.
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

}  // namespace mlt
