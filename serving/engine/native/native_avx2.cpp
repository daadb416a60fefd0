// The kernels of native.cpp for processors with AVX2 and FMA, without AVX-512: a library of its own, in other words.
#define MLT_AVX2
#include "native.cpp"
