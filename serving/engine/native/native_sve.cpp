// The kernels of native.cpp for processors with SVE at a vector length of 256 bits: a library of its own, in other words.
#define MLT_SVE
#include "native.cpp"
