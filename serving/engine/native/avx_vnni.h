// AVX-VNNI: products of bytes on processors without AVX-512; and F16C. In plain code: it is asked before anything else is entered.
#pragma once

#include <cpuid.h>

namespace mlt {

// F16C: float16, of weights of four bits. All processors with AVX2 that are known have it.
inline bool has_halves() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & 1u << 29);
}

inline bool has_byte_products() {
#if __GNUC__ >= 11  // whose assembler knows the instruction
    static const bool has = [] {
        unsigned a, b, c, d;
        return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
    }();
    return has;
#else
    return false;
#endif
}

}  // namespace mlt
