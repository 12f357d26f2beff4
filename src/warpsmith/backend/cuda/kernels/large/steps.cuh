// What happens to the sums of a stage besides the residual stream (residual.cuh): heads of a DeltaNet, one node's inner
// activation, the choice of a token.
#pragma once
#include "large/embedding.cuh"
#include "large/products.cuh"
#include "large/sampling.cuh"

__device__ __forceinline__ void tell_square(const Block& b, int next, int node, int which, float square) {
    if (POLLED && (next & 3) == MLP_IN) barrier_wait(Barriers(b.base).cleared, b.layer_turn(next >> 2));
    if (b.lane == 0) store4(square_words(b, next, node) + which * NODES, __float_as_uint(square));
}

#include "large/residual.cuh"

// --- a DeltaNet's output --------------------------------------------------------------------------------------------

// A tree's heads, normed by all SMs: a warp has a head of a node.
__device__ __forceinline__ void norm_heads(Block& b, int stage) {
    u32* words = operand_words(b, stage);
    int turn = 0;
#pragma unroll 1
    for (Spans<VALUE_DIM> own(b); own.more(); own.next(), turn ^= 1) {
        const int node = own.node(), k = own.k();
        const u32 *squares_at = head_square_words(b, stage, k / STATE_DIM, node),
                  *values_at = head_words(b, stage, node) + k / 2;
        uint4 squares[4];
        uint2 values;
        for (Watchdog dog;; dog.check()) {
            values = load8(values_at);
#pragma unroll
            for (int j = 0; j < 4; j++) squares[j] = load16(squares_at + j * 4);
            const bool all = came4(squares[0]) & came4(squares[1]) & came4(squares[2]) & came4(squares[3]);
            if (everywhere(all & values.x != NOT_YET & values.y != NOT_YET)) break;
        }
        publish_half(b, words, node, k, values, turn, head_factor(squares));
    }
}

// --- the MLP's inner activation ------------------------------------------------------------------------------------

// Of one node a thread has four rows of some.
__device__ __forceinline__ void activate_one(Block& b, int stage) {
    const InnerSums sums(b, stage);
    const int first = first_of(FFN / 8, b.sm) * 2, count = first_of(FFN / 8, b.sm + 1) * 2 - first;
#pragma unroll 2
    for (int at = 0; at < count; at += CONSUMERS) {
        const int k = (first + min(at + (int)threadIdx.x, count - 1)) * 4;  // a warp waits together
        InnerSums::Asked asked;
        sums.ask(asked, 0, k);
        const uint2 out = sums.activation(asked, 0);
        if (at + (int)threadIdx.x < count) store8(operand_words(b, stage + 1) + k / 2, out.x, out.y);
    }
}

// --- the next token -------------------------------------------------------------------------------------------------

// The best of this SM's logits, for every node. A thread has four rows at a time, of all nodes, and asks for some
// nodes' at once: they come from memory.
__device__ __forceinline__ void rank_logits(Block& b) {
    constexpr int AT_ONCE = NODES < 4 ? NODES : 4;
    const Stage stage = b.p.stages[4 * LAYERS];
    const Sums<HIDDEN_GROUPS> sums(b.p.head_sums, b.p.tiles + stage.tiles_at, HEAD_TILES * ROWS, 4 * LAYERS & SUM_TAGS);
    if (threadIdx.x < NODES) b.s.best[threadIdx.x] = 0;
    b.sync();
    const int first = first_of(stage.tile_rows, b.sm), tiles = first_of(stage.tile_rows, b.sm + 1) - first;
#pragma unroll 1
    for (int at = 0; at < tiles * (ROWS / 4); at += CONSUMERS) {
        const int i = at + threadIdx.x, row = first * ROWS + i * 4;
        const bool live = i < tiles * (ROWS / 4) && row < VOCAB;
        const auto place = sums.place(live ? row : 0);  // its table comes from memory
#pragma unroll 1
        for (int node = 0; node < b.nodes; node += AT_ONCE) {
            Sums<HIDDEN_GROUPS>::Asked asked[AT_ONCE];
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++) sums.ask(asked[n], place, min(node + n, b.nodes - 1));
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++) {
                if (node + n >= b.nodes) break;
                u64 best = 0;
                if (live) {
                    const float4 v = sums.sum(asked[n], place, node + n);
                    if (SAMPLES && b.draw->sampled) *(float4*)(candidates(b).own + i * 4) = v;
                    const float logit[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        if (row + j < VOCAB) {
                            best = best_of(best, ranked(logit[j], row + j));
                            if (b.r.want_logits) b.p.out_logits[(size_t)b.place(node + n) * VOCAB + row + j] = logit[j];
                        }
                }
#pragma unroll
                for (int step = 1; step < 32; step *= 2) best = best_of(best, __shfl_xor_sync(~0u, best, step));
                if (b.lane == 0) atomicMax(&b.s.best[node + n], best);
            }
        }
    }
    b.sync();
    if (SAMPLES && b.draw->sampled) {  // one node
        if (threadIdx.x == 0) b.s.best[0] = 0;
        const u64 best = penalise_own(b);
        if (b.lane == 0) atomicMax(&b.s.best[0], best);
        b.sync();
    }
    if (threadIdx.x < b.nodes) b.p.best[threadIdx.x * SMS + b.sm] = b.s.best[threadIdx.x];
    if (b.r.want_hidden) {
        const float* norm = b.vectors;
#pragma unroll 1
        for (Spans<HIDDEN> own(b); own.more(); own.next()) {
            const float4 x = *(const float4*)&b.s.residual[own.slot][own.in_span()],
                         w = __ldg((const float4*)(norm + own.k()));
            const float by = b.s.inverse[0][own.node()];
            *(float4*)(b.p.out_hidden + (size_t)b.place(own.node()) * HIDDEN + own.k()) = {
                x.x * by * w.x, x.y * by * w.y, x.z * by * w.z, x.w * by * w.w};
        }
    }
}

// The best of all SMs, known to every thread of the block afterwards (in s.token).
__device__ __forceinline__ void choose_tokens(Block& b) {
#pragma unroll 1
    for (int node = b.warp; node < b.nodes; node += WARPS) {
        u64 best = 0;
#pragma unroll
        for (int i = b.lane; i < SMS; i += 32) best = best_of(best, __ldcg(b.p.best + node * SMS + i));
#pragma unroll
        for (int step = 1; step < 32; step *= 2) best = best_of(best, __shfl_xor_sync(~0u, best, step));
        if (b.lane == 0) b.s.token[node] = token_of(best);
    }
    b.sync();
}
