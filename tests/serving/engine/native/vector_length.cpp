// Prints the SVE library's report on a CPU, and in a thread whose vector length has changed: whether it is supported
// (`mlflow_llm_supported`) before and after, the result of a call then, and why. Without SVE itself: most CPUs refuse.
#include <sys/prctl.h>

#include <cstdio>

extern "C" {
int mlflow_llm_supported();
int mlflow_llm_use_threads(int threads, int spin_us);
const char* mlflow_llm_last_error();
}

int main() {
    constexpr int SET_LENGTH = 50;  // PR_SVE_SET_VL
    const int before = mlflow_llm_supported();
    std::printf("%d", before);
    if (!before) return 0;
    if (prctl(SET_LENGTH, 16) < 0) return 1;
    std::printf(" %d %d %s", mlflow_llm_supported(), mlflow_llm_use_threads(1, 0), mlflow_llm_last_error());
}
