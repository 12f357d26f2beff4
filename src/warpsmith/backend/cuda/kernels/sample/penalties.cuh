// Bias and penalties on an SM's own logits, before it says which is best (see sample.cuh).
#pragma once
#include "sample/candidates.cuh"
#include "sample/decide.cuh"
#include "sample/ranked.cuh"

// Bias, then penalties, as the sampler's `penalise`; returns the warp's best after them. All logits are there.
__device__ __forceinline__ u64 penalise_own(Block& b) {
    Candidates& c = candidates(b);
    const Draw& d = *b.draw;
    const int first = first_logit(b), count = own_logits(b), drawn = b.length - b.r.length;
#pragma unroll 1
    for (int i = threadIdx.x; i < d.biased; i += CONSUMERS) {
        const int2 bias = __ldg(d.biases + i);
        const int at = bias.x - first;
        if (at >= 0 && at < count) c.own[at] = c.own[at] + __int_as_float(bias.y);
    }
    if (d.last_n != 0) {
#pragma unroll 1
        for (int i = threadIdx.x; i < count; i += CONSUMERS) c.count[i] = 0;
        b.sync();
        const int end = d.windowed + drawn;
#pragma unroll 1
        for (int i = (d.last_n < 0 ? 0 : max(0, end - d.last_n)) + threadIdx.x; i < end; i += CONSUMERS) {
            const int at = (i < d.windowed ? __ldg(d.window + i) : b.s.drawn[i - d.windowed]) - first;
            if (at >= 0 && at < count) atomicAdd(&c.count[at], 1);
        }
    }
    b.sync();
    u64 best = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += CONSUMERS) {
        float logit = c.own[i];
        if (d.last_n != 0 && c.count[i] > 0) logit = penalised(d, logit, c.count[i]);
        logit += 0.0f;  // no -0, which is 0 to the sampler
        c.own[i] = logit;
        best = best_of(best, ranked(logit, first + i));
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) best = best_of(best, __shfl_xor_sync(~0u, best, step));
    return best;
}
