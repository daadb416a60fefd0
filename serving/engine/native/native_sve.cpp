// The kernels of native.cpp for CPUs with SVE at a vector length of 256 bits, as a library of its own.
#define MLFLOW_LLM_SVE
#include "native.cpp"
