// One product of a prompt, specialised: see gemm.cuh.
//
// Given with -D: GEMM_VARIANT, Config's arguments: tokens of a tile, blocks of 64 rows a warpgroup, tiles of 32 k a
// stage, stages, tiles a step, steps in registers, ending, type; PAIRS where CTAs work in pairs. Grid: at most one CTA
// an SM, or a pair a tile; tiles of tokens of the same rows lie next to each other.
#include "prefill/gemm.cuh"

typedef Config<GEMM_VARIANT> Chosen;
#ifdef PAIRS  // of CTAs
static_assert(Chosen::CLUSTER == 2, "");
extern "C" __global__ void __cluster_dims__(2, 1, 1)
#else
static_assert(Chosen::CLUSTER == 1, "");
extern "C" __global__ void
#endif
    __launch_bounds__(Chosen::THREADS, Chosen::CTAS)
    gemm(const __grid_constant__ Gemm a, const __grid_constant__ Span s) {
    multiply<Chosen>(a, s);
}
