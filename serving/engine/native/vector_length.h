// The vector length of SVE: the kernels are compiled for one, and at another they would read and write other than they
// mean. It is each thread's own, and a new thread has that of the one that starts it. In plain code, as avx_vnni.h.
#pragma once

#include <sys/auxv.h>
#include <sys/prctl.h>

namespace mlt {

constexpr int VECTOR_BYTES = 32;

// Whether this thread has SVE at that length.
inline bool has_vector_length() {
    constexpr unsigned long SVE = 1ul << 22;      // HWCAP_SVE
    constexpr int GET_LENGTH = 51, LENGTH = 0xffff;  // PR_SVE_GET_VL, PR_SVE_VL_LEN_MASK
    if (!(getauxval(AT_HWCAP) & SVE)) return false;
    const int found = prctl(GET_LENGTH);
    return found >= 0 && (found & LENGTH) == VECTOR_BYTES;
}

}  // namespace mlt
