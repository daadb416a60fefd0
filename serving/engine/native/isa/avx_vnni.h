// Detection of AVX-VNNI (byte dot products without AVX-512) and of F16C. Compiled for the baseline CPU, since it runs
// before any kernel is entered.
#pragma once

#include <cpuid.h>

namespace mlflow_llm {

// Return whether the CPU has F16C, for the float16 scales of 4-bit weights. All known CPUs with AVX2 have it.
inline bool cpu_has_f16c() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & 1u << 29);
}

inline bool cpu_has_byte_products() {
#if __GNUC__ >= 11  // its assembler knows the instruction
    static const bool has = [] {
        unsigned a, b, c, d;
        return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
    }();
    return has;
#else
    return false;
#endif
}

}  // namespace mlflow_llm
