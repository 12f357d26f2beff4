// The kernels for any processor.
#include "simd_generic.h"

#include "kernels_vector.h"

namespace warpsmith {
const Kernels kGenericKernels = kernels_of<Generic>("portable");
}
