// i8mm: products of bytes, two rows by two columns, on newer processors of ARM. In plain code, as avx_vnni.h.
#pragma once

#include <sys/auxv.h>

namespace mlt {

inline bool has_byte_products() {
#if __GNUC__ >= 10  // whose assembler knows the instruction
#ifdef MLT_SVE
    constexpr unsigned long I8MM = 1ul << 9;  // HWCAP2_SVEI8MM
#else
    constexpr unsigned long I8MM = 1ul << 13;  // HWCAP2_I8MM
#endif
    static const bool has = getauxval(AT_HWCAP2) & I8MM;
    return has;
#else
    return false;
#endif
}

}  // namespace mlt
