// What the device sampler asks of this pass (see sample/sample.cuh).
#pragma once
#include "large/block.cuh"
#include "sample/decide.cuh"

// They lie in the scratch, which rests while logits are ranked.
__device__ __forceinline__ Candidates& candidates(const Block& b) { return *(Candidates*)b.scratch; }
__device__ __forceinline__ int first_logit(const Block& b) { return first_of(HEAD_TILES, b.sm) * ROWS; }
__device__ __forceinline__ int own_logits(const Block& b) {
    return min(first_of(HEAD_TILES, b.sm + 1) * ROWS, VOCAB) - first_logit(b);
}
// All SMs have written theirs.
__device__ __forceinline__ void hear_best(Block& b) {
#pragma unroll 1
    for (int sm = threadIdx.x; sm < SMS; sm += CONSUMERS) candidates(b).best[sm] = __ldcg(b.p.best + sm);
    b.sync();
}
#include "sample/sample.cuh"
