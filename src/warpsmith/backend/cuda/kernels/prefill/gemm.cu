// One product of a prompt, specialised: see gemm.cuh.
//
// Given with -D: GEMM_VARIANT, Config's arguments: tokens of a tile, blocks of 64 rows a warpgroup, tiles of 32 k a
// stage, stages, tiles a step, steps in registers, ending. Grid: at most one CTA an SM; tiles of tokens of the same
// rows lie next to each other.
#include "prefill/gemm.cuh"

typedef Config<GEMM_VARIANT> Chosen;

extern "C" __global__ void __launch_bounds__(Chosen::THREADS, 1)
    gemm(const __grid_constant__ Gemm a, const __grid_constant__ Span s) {
    multiply<Chosen>(a, s);
}
