// The kernels for 64-bit Arm with matrix multiplication instructions for bytes.
#include "simd_neon_i8mm.h"

#include "kernels_vector.h"

namespace warpsmith {
const Kernels kNeonI8mmKernels = kernels_of<NeonI8mm>("neon-i8mm");
}
