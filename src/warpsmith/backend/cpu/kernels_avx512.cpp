// The kernels for x86-64 with AVX-512 (F, BW, VL, VNNI).
#include "simd_avx512.h"

#include "kernels_vector.h"

namespace warpsmith {
const Kernels kAvx512Kernels = kernels_of<Avx512>("avx512");
}
