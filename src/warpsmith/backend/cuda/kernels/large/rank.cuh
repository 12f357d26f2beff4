// The choice of tokens, from the head's sums: every SM ranks its own logits, then all of them hear of the best.
#pragma once
#include "large/sampling.cuh"
#include "large/steps.cuh"

__device__ __forceinline__ u64 better_over(u64 best, int first_step) {
#pragma unroll
    for (int step = first_step; step < 32; step *= 2) best = best_of(best, __shfl_xor_sync(~0u, best, step));
    return best;
}

// Of one node. A thread has four rows at a time.
__device__ __forceinline__ void rank_one(Block& b) {
    const int first = first_logit(b), end = own_logits(b);
    u64 best = 0;
#pragma unroll 2
    for (int i = threadIdx.x * 4; i < end; i += CONSUMERS * 4) {
        const float4 v = __ldcg((const float4*)(b.p.head_sums + first + i));
        if (SAMPLES && b.draw->sampled) *(float4*)(candidates(b).own + i) = v;
        const float logit[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (i + j < end) {
                best = best_of(best, ranked(logit[j], first + i + j));
                if (b.r.want_logits) b.p.out_logits[first + i + j] = logit[j];
            }
    }
    best = better_over(best, 1);
    if (b.lane == 0) atomicMax(&b.s.best[0], best);
    if (SAMPLES && b.draw->sampled) {
        b.sync();
        if (threadIdx.x == 0) b.s.best[0] = 0;
        best = penalise_own(b);
        if (b.lane == 0) atomicMax(&b.s.best[0], best);
    }
}

// Of a tree's nodes, by those who add up, beside the head's last products: the best logits of a lane's tokens.
struct Ranks {
    const Block& b;
    int row;  // the lane's first one
    u64 best[OCTETS][2] = {};

    __device__ __forceinline__ Ranks(const Block& block, int which, const Run& run)
        : b(block), row(run.result * ROWS + which * 32 + (block.lane >> 2)) {}
    __device__ __forceinline__ void take(int octet, int i, float4 v) {
        const int at = row + i * 16;
        rank(octet, 0, at, v.x), rank(octet, 1, at, v.y), rank(octet, 0, at + 8, v.z), rank(octet, 1, at + 8, v.w);
    }
    __device__ __forceinline__ void rank(int octet, int which, int at, float logit) {
        if (VOCAB % ROWS && at >= VOCAB) return;
        best[octet][which] = best_of(best[octet][which], ranked(logit, at));
        const int node = octet * 8 + (b.lane & 3) * 2 + which;
        if (b.r.want_logits && node < b.nodes) b.p.out_logits[(size_t)b.place(node) * VOCAB + at] = logit;
    }
    __device__ __forceinline__ void next() { row += ROWS; }
    // To the other lanes, and to the other warp.
    __device__ __forceinline__ void tell() const {
#pragma unroll
        for (int octet = 0; octet < OCTETS; octet++)
#pragma unroll
            for (int which = 0; which < 2; which++) {
                const u64 all = better_over(best[octet][which], 4);
                if (b.lane < 4) atomicMax(&b.s.best[octet * 8 + b.lane * 2 + which], all);
            }
        __syncwarp();
    }
};

__device__ __forceinline__ void rank_logits(Block& b) {
    if constexpr (POLLED) {
        if (threadIdx.x == 0) b.s.best[0] = 0;
        b.sync();
        rank_one(b);
        b.sync();
    }
    if (threadIdx.x < b.nodes) b.p.best[threadIdx.x * SMS + b.sm] = b.s.best[threadIdx.x];
    if (b.r.want_hidden) give_hidden(b);
}

// The best of all SMs, known to every thread of the block afterwards (in s.token).
__device__ __forceinline__ void choose_tokens(Block& b) {
#pragma unroll 1
    for (int node = b.warp; node < b.nodes; node += WARPS) {
        u64 best = 0;
#pragma unroll
        for (int i = b.lane; i < SMS; i += 32) best = best_of(best, __ldcg(b.p.best + node * SMS + i));
        best = better_over(best, 1);
        if (b.lane == 0) b.s.token[node] = token_of(best);
    }
    b.sync();
}
