// The SVE vector length. The kernels are compiled for one length and would read and write the wrong memory at another.
// The length is per thread; a new thread inherits that of its creator. Compiled for the baseline CPU, as avx_vnni.h is.
#pragma once

#include <sys/auxv.h>
#include <sys/prctl.h>

namespace mlflow_llm {

constexpr int VECTOR_BYTES = 32;

// Return whether this thread has SVE at that length.
inline bool has_vector_length() {
    constexpr unsigned long SVE = 1ul << 22;      // HWCAP_SVE
    constexpr int GET_LENGTH = 51, LENGTH = 0xffff;  // PR_SVE_GET_VL, PR_SVE_VL_LEN_MASK
    if (!(getauxval(AT_HWCAP) & SVE)) return false;
    const int found = prctl(GET_LENGTH);
    return found >= 0 && (found & LENGTH) == VECTOR_BYTES;
}

}  // namespace mlflow_llm
