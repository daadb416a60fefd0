// The tiles of Intel's AMX: eight two-dimensional registers of 16 rows by 64 bytes, and products of two of them, C += A
// B.
//
//   bytes      A  16 rows of activations, 64 k's each     B  16 groups of four k's, 16 columns each (linear.h's panel)
//   bfloat16   A  16 rows of 32 k's                       B  16 pairs of k's, 16 columns each
//   C  16 rows by 16 columns, of int32 or float32
//
// Integer sums are exact in any order, so results are bitwise those of vpdpbusd. bfloat16 is summed in the order of the
// manual: even and odd k's separately, each product and sum rounded once, subnormal numbers flushed to zero. A row of C
// depends only on that row of A, and on B.
//
// See the Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18. The kernel grants a
// process the tile state by arch_prctl(ARCH_REQ_XCOMP_PERM) and saves it only while tiles are in use: HardwareTiles
// configures them for one scope.
#pragma once

#ifdef MLFLOW_LLM_AVX512
#include <cpuid.h>
#endif
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace mlflow_llm {

constexpr int TILE_ROWS = 16;
constexpr int TILE_BYTES = 64;  // of a row

enum class TileUse : int { NONE = 0, HARDWARE = 1, EMULATED = 2 };

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    TileShapes() {
        for (int i = 0; i < 8; i++) row_bytes[i] = TILE_BYTES, rows[i] = TILE_ROWS;
    }
};
static_assert(sizeof(TileShapes) == 64);

#ifdef MLFLOW_LLM_AVX512
// The CPU's tiles. Their content is undefined before zero() or load().
class HardwareTiles {
  public:
    HardwareTiles() {
        static const TileShapes shapes;
        asm volatile("ldtilecfg %0" ::"m"(shapes));
    }
    ~HardwareTiles() { asm volatile("tilerelease"); }
    HardwareTiles(const HardwareTiles&) = delete;

    template <int I>
    void zero() { asm volatile("tilezero %%tmm%c0" ::"i"(I)); }
    template <int I>
    void load(const void* from, size_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(I) : "memory");
    }
    template <int I>
    void store(void* to, size_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(I) : "memory");
    }
    template <int C, int A, int B>
    void multiply() { asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B)); }
    template <int C, int A, int B>  // A is signed, not B
    void multiply_signed() { asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B)); }
    template <int C, int A, int B>
    void multiply_bf16() { asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B)); }
};

#endif

// Return a bfloat16 as tiles read it: subnormal numbers are zero.
inline float tile_float(uint16_t bits) {
    const uint32_t wide = bits & 0x7f80 ? uint32_t(bits) << 16 : uint32_t(bits & 0x8000) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

// Return a sum as tiles keep it: subnormal numbers are zero.
inline float flushed(float value) { return std::fabs(value) < 1.17549435e-38f ? std::copysign(0.0f, value) : value; }

// The same operations in plain C++, to test the code around them on CPUs without AMX.
class EmulatedTiles {
  public:
    template <int I>
    void zero() { std::memset(tiles[I], 0, sizeof tiles[I]); }
    template <int I>
    void load(const void* from, size_t stride) {
        for (int r = 0; r < TILE_ROWS; r++) std::memcpy(tiles[I][r], (const char*)from + r * stride, TILE_BYTES);
    }
    template <int I>
    void store(void* to, size_t stride) {
        for (int r = 0; r < TILE_ROWS; r++) std::memcpy((char*)to + r * stride, tiles[I][r], TILE_BYTES);
    }
    template <int C, int A, int B>
    void multiply() { multiply_bytes<C, A, B, uint8_t, int8_t>(); }
    template <int C, int A, int B>
    void multiply_signed() { multiply_bytes<C, A, B, int8_t, uint8_t>(); }
    template <int C, int A, int B>
    void multiply_bf16() {
        constexpr int COLUMNS = TILE_BYTES / 4;
        for (int m = 0; m < TILE_ROWS; m++) {
            float row[COLUMNS], sums[2][COLUMNS] = {};
            uint16_t a[2 * COLUMNS], b[2 * COLUMNS];
            std::memcpy(row, tiles[C][m], TILE_BYTES), std::memcpy(a, tiles[A][m], TILE_BYTES);
            for (int k = 0; k < TILE_ROWS; k++) {
                std::memcpy(b, tiles[B][k], TILE_BYTES);
                for (int n = 0; n < COLUMNS; n++)
                    for (int i = 0; i < 2; i++)
                        sums[i][n] = flushed(std::fma(tile_float(a[2 * k + i]), tile_float(b[2 * n + i]), sums[i][n]));
            }
            for (int n = 0; n < COLUMNS; n++) row[n] = flushed(row[n] + flushed(sums[0][n] + sums[1][n]));
            std::memcpy(tiles[C][m], row, TILE_BYTES);
        }
    }

  private:
    uint8_t tiles[8][TILE_ROWS][TILE_BYTES];

    template <int C, int A, int B, class Left, class Right>
    void multiply_bytes() {
        for (int m = 0; m < TILE_ROWS; m++) {
            int32_t row[TILE_BYTES / 4];
            std::memcpy(row, tiles[C][m], TILE_BYTES);
            for (int k = 0; k < TILE_ROWS; k++)
                for (int n = 0; n < TILE_BYTES / 4; n++)
                    for (int i = 0; i < 4; i++)
                        row[n] += int32_t(Left(tiles[A][m][4 * k + i])) * int32_t(Right(tiles[B][k][4 * n + i]));
            std::memcpy(tiles[C][m], row, TILE_BYTES);
        }
    }
};

#ifndef MLFLOW_LLM_AVX512
using HardwareTiles = EmulatedTiles;  // never used: has_tiles() is false
#endif

// What the CPU multiplies by tiles, if the operating system permits it: bytes, or bfloat16 too. Determined once: the
// permission belongs to the process and all its later threads.
enum class TileKinds : int { NONE = 0, BYTES = 1, BYTES_AND_BF16 = 2 };

inline TileKinds tile_kinds() {
#if defined(MLFLOW_LLM_AVX512) && __GNUC__ >= 11  // its assembler knows the instructions
    static const TileKinds granted = [] {
        constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24, INT8 = 1u << 25, OSXSAVE = 1u << 27;
        constexpr uint64_t STATE = uint64_t(3) << 17;  // XTILECFG and XTILEDATA in XCR0
        constexpr int REQUEST_PERMISSION = 0x1023, XTILEDATA = 18;
        unsigned a, b, c, d;
        if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE)) return TileKinds::NONE;
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (TILE | INT8)) != (TILE | INT8))
            return TileKinds::NONE;
        const bool bf16 = d & BF16;
        unsigned low, high;
        asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        if (((uint64_t(high) << 32 | low) & STATE) != STATE) return TileKinds::NONE;
        if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, XTILEDATA) != 0) return TileKinds::NONE;
        return bf16 ? TileKinds::BYTES_AND_BF16 : TileKinds::BYTES;
    }();
    return granted;
#else
    return TileKinds::NONE;
#endif
}

inline bool has_tiles() { return tile_kinds() != TileKinds::NONE; }

// The tiles used by all calls from now on: the CPU's if it has them, unless a test sets something else.
inline std::atomic<TileUse>& tile_use() {
    static std::atomic<TileUse> use{has_tiles() ? TileUse::HARDWARE : TileUse::NONE};
    return use;
}

// Return whether the tiles in use multiply bfloat16.
inline bool multiplies_bf16() {
    const TileUse use = tile_use();
    return use == TileUse::EMULATED || (use == TileUse::HARDWARE && tile_kinds() == TileKinds::BYTES_AND_BF16);
}

}  // namespace mlflow_llm
