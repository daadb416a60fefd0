// The kernels of native.cpp for CPUs with AVX2 and FMA but without AVX-512, as a library of its own.
#define MLFLOW_LLM_AVX2
#include "native.cpp"
