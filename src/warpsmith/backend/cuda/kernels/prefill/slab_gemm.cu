// One product of a prompt over slabs, specialised: see slab_gemm.cuh.
//
// Given with -D: SLAB_VARIANT, SlabConfig's arguments: tokens of a tile, stages of activations, slots of weights,
// ending, types, CTAs of a cluster; PAIRS where that is two. Grid: at most one CTA an SM; tiles of tokens of the same
// rows lie next to each other.
#include "prefill/slab_gemm.cuh"

typedef SlabConfig<SLAB_VARIANT> Chosen;

#ifdef PAIRS  // of CTAs
static_assert(Chosen::CLUSTER == 2, "");
extern "C" __global__ void __cluster_dims__(2, 1, 1)
#else
static_assert(Chosen::CLUSTER == 1, "");
extern "C" __global__ void
#endif
    __launch_bounds__(Chosen::THREADS, 1)
    slab_gemm(const __grid_constant__ Gemm a, const __grid_constant__ Span s) {
    multiply_slab_matrix<Chosen>(a, s);
}
