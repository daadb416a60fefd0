// Detection of i8mm: byte products of two rows by two columns, on newer ARM CPUs. Compiled for the baseline CPU, as
// avx_vnni.h is.
#pragma once

#include <sys/auxv.h>

namespace mlflow_llm {

inline bool cpu_has_byte_products() {
#if __GNUC__ >= 10  // its assembler knows the instruction
#ifdef MLFLOW_LLM_SVE
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

}  // namespace mlflow_llm
