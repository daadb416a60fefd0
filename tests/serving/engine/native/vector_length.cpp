// What the library of SVE says of a processor, and of a thread whose vector length is another than it was: whether it runs
// (`mlt_supported`) before and after, what a call returns then, and why. In plain code: most processors are to refuse it.
#include <sys/prctl.h>

#include <cstdio>

extern "C" {
int mlt_supported();
int mlt_use_threads(int threads, int spin_us);
const char* mlt_problem();
}

int main() {
    constexpr int SET_LENGTH = 50;  // PR_SVE_SET_VL
    const int before = mlt_supported();
    std::printf("%d", before);
    if (!before) return 0;
    if (prctl(SET_LENGTH, 16) < 0) return 1;
    std::printf(" %d %d %s", mlt_supported(), mlt_use_threads(1, 0), mlt_problem());
}
