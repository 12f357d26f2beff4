// The kernels for 64-bit Arm with dot product instructions.
#include "simd_neon.h"

#include "kernels_vector.h"

namespace warpsmith {
const Kernels kNeonKernels = kernels_of<Neon>("neon");
}
