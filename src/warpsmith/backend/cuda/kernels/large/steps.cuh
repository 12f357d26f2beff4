// What happens to the sums of a stage besides the residual stream (residual.cuh): heads of a DeltaNet, one node's inner
// activation.
#pragma once
#include "large/embedding.cuh"
#include "large/products.cuh"

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
