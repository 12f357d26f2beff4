// One product of a prompt over slabs, specialised: see slab_gemm.cuh.
//
// Given with -D: SLAB_VARIANT, SlabConfig's arguments: tokens of a tile, stages of activations, slots of weights,
// ending, types. Grid: at most one CTA an SM; tiles of tokens of the same rows lie next to each other.
#include "prefill/slab_gemm.cuh"

typedef SlabConfig<SLAB_VARIANT> Chosen;

extern "C" __global__ void __launch_bounds__(Chosen::THREADS, 1)
    slab_gemm(const __grid_constant__ Gemm a, const __grid_constant__ Span s) {
    multiply_slab_matrix<Chosen>(a, s);
}
