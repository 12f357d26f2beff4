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

// Of a tree's nodes. A thread has what a lane of those who add up had of a tile (see OwnSums).
__device__ __forceinline__ void rank_nodes(Block& b) {
    const int first = first_of(HEAD_TILES, b.sm), halves = 2 * (first_of(HEAD_TILES, b.sm + 1) - first);
    u64 best[OCTETS][2] = {};
#pragma unroll 1
    for (int half = b.warp; half < halves; half += WARPS) {
        const float4* from = (const float4*)b.p.head_sums + own_sums_at(first, 0, b.lane) + half * own_sums_at(0, 1, 0);
        const int row = first * ROWS + half * 32 + (b.lane >> 2);
        float4 v[OCTETS][2];
#pragma unroll
        for (int o = 0; o < OCTETS; o++)
#pragma unroll
            for (int i = 0; i < 2; i++) v[o][i] = __ldcg(from + (o * 2 + i) * 32);
        const auto rank = [&](int o, int which, int at, float logit) {
            if (VOCAB % ROWS && at >= VOCAB) return;
            best[o][which] = best_of(best[o][which], ranked(logit, at));
            const int node = o * 8 + (b.lane & 3) * 2 + which;
            if (b.r.want_logits && node < b.nodes) b.p.out_logits[(size_t)b.place(node) * VOCAB + at] = logit;
        };
#pragma unroll
        for (int o = 0; o < OCTETS; o++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int at = row + i * 16;
                rank(o, 0, at, v[o][i].x), rank(o, 1, at, v[o][i].y);
                rank(o, 0, at + 8, v[o][i].z), rank(o, 1, at + 8, v[o][i].w);
            }
    }
#pragma unroll
    for (int o = 0; o < OCTETS; o++)
#pragma unroll
        for (int which = 0; which < 2; which++) {
            const u64 all = better_over(best[o][which], 4);
            if (b.lane < 4) atomicMax(&b.s.best[o * 8 + b.lane * 2 + which], all);
        }
}

__device__ __forceinline__ void rank_logits(Block& b) {
    if (threadIdx.x < NODES) b.s.best[threadIdx.x] = 0;
    b.sync();
    if constexpr (POLLED)
        rank_one(b);
    else
        rank_nodes(b);
    b.sync();
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
