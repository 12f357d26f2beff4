// Products of packed weights with the activations of all nodes at once.
//
// Maths: sums[row][node] = sum over k of W[row][k] a[node][k], for the rows and the superblocks of K that are this
// SM's. K is cut into groups of at most GROUP_BLOCKS superblocks. A group's (tile of 64 rows, superblock) pairs, tile
// by tile, are dealt to SMs by their bytes; where an SM begins or ends inside a tile, its results are parts of that
// tile. The head goes over K in rounds instead, a stage for each group: whole tiles stay with an SM, which adds up its
// own sums. Activations of the group are in shared memory in fp16 (see operands.cuh), and stay there while the weights
// pass by. Eight warps are two groups of four: a group has every second superblock of 64 rows, a warp 16 of the rows.
// Sums of a tile stay in registers, then two further warps add both groups' up and write them to memory. Bytes: the
// weights, once; of a tree 4 bytes a k and node (read 2, keep 2); 4 a result.
#pragma once
#include "large/words.cuh"
#include "large/operands.cuh"
#include "large/copier.cuh"
#include "large/published.cuh"

// --- activations ----------------------------------------------------------------------------------------------------

// A stage's activations are multiplied with 1 / rms of the residual stream where they are that (`normed`), and where
// they are a DeltaNet's output with 1 / rms of its head (`heads`).
__device__ __forceinline__ bool normed(int stage) { return (stage & 1) == 0; }

// 1 / rms of a head from its squares: every lane the same, of those that have come.
__device__ __forceinline__ float head_factor(const uint4 (&squares)[4]) {
    float square = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float4 f = floats(squares[j]);
        square += (f.x + f.y) + (f.z + f.w);
    }
    return inverse_root(square / STATE_DIM + EPS);
}

// Of one node: a thread has eight k, a warp a superblock.
__device__ __forceinline__ void prepare_one(Block& b, const Run& run, int stage, bool heads) {
    const int k = threadIdx.x * 8, head = run.first_block * 2 + k / 128;
    const bool live = k < run.blocks * BLOCK_K;
    uint4 raw = {};
    float by = 1.0f;
    if (live) {
        const u32* at = operand_words(b, stage) + (run.first_block * BLOCK_K + k) / 2;
        raw = load16(at);
        if (heads) {
            const u32* squares = head_square_words(b, stage, head, 0);
            uint4 v[4] = {load16(squares), load16(squares + 4), load16(squares + 8), load16(squares + 12)};
            for (Watchdog dog; !(came4(v[0]) & came4(v[1]) & came4(v[2]) & came4(v[3])); dog.check())
#pragma unroll
                for (int j = 0; j < 4; j++) v[j] = load16(squares + j * 4);
            by = head_factor(v);
        }
        for (Watchdog dog; !came4(raw); raw = load16(at)) dog.check();
    }
    const Fours<2> fours = {{{raw.x, raw.y}, {raw.z, raw.w}}};
    const BlockScale scale(__reduce_max_sync(~0u, __float_as_uint(__uint_as_float(fours.largest()) * by)));
    const OperandQuad first(raw.x, raw.y, scale.full * by), second(raw.z, raw.w, scale.full * by);
    const int tile = k / 64, q = k % 64 / 16, odd = k / 8 & 1;
    u8* to = b.scratch + tile / 4 * BLOCK_BYTES;
    float sum = first.sum + second.sum;
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const uint2 sums = block_sums(sum, __shfl_xor_sync(~0u, sum, 4));
    b.sync();  // others may still multiply what is there
    if (live) {
        *(uint4*)(to + (tile % 4 * 2 + odd) * 64 + q * 16) = {first.low, first.high, second.low, second.high};
        if (k % 64 == 0) *(uint2*)(to + 512 + tile % 4 * 8) = sums;
        if (b.lane == 0) *(float*)(to + BACK_AT) = scale.back;
    }
    b.sync();
    if (threadIdx.x < THREADS_ARRIVE) barrier_arrive(Barriers(b.base).begun);
}

#include "large/multiply_one.cuh"
