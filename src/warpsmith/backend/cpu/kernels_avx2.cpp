// The kernels for x86-64 with AVX2, FMA and F16C.
#include "simd_avx2.h"

#include "kernels_vector.h"

namespace warpsmith {
const Kernels kAvx2Kernels = kernels_of<Avx2>("avx2");
}
