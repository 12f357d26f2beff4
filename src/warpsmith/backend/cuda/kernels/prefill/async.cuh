// Machine instructions of the products, under the same names for both kinds of chips: copies that end on a barrier, and
// tiles that are multiplied.
#pragma once
#include "common/cluster.cuh"
#include "common/wgmma.cuh"
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "prefill/queued.cuh"
#else
#include "prefill/direct.cuh"
#endif

// Lanes of a warp that come to a barrier for all of it, when all have done their part: one. Racecheck follows only what
// each of them does for itself.
#ifdef EVERY_LANE_ARRIVES
constexpr int ARRIVALS = 32;
#else
constexpr int ARRIVALS = 1;
#endif
__device__ __forceinline__ bool arrives() { return threadIdx.x % 32 < ARRIVALS; }

// A place in a ring of STAGES.
struct StagePlace {
    u32 slot = 0, parity = 0;
    template <int STAGES>
    __device__ __forceinline__ void step(u32 by = 1) {
        slot += by;
        if (slot >= STAGES) slot -= STAGES, parity ^= 1;
    }
};
