// Products of packed weights with the activations of all rows at once, as the activations-first pass makes them
// (large/), with barriers between steps.
//
// Maths: sums[row][node] = sum over k of W[row][k] a[node][k], for the rows and the superblocks of K that are this
// SM's. K is cut into groups of at most GROUP_BLOCKS superblocks. A group's (tile of 64 rows, superblock) pairs, tile
// by tile, are dealt to SMs by their bytes; where an SM begins or ends inside a tile, its results are parts of that
// tile. Activations of the group are in shared memory in fp16, times a power of two that is the row's own (of its
// largest value in the group), and stay there while the weights pass by. Eight warps are two groups of four: a group
// has every second superblock of 64 rows, a warp 16 of the rows. Sums of a tile stay in registers, then two further
// warps add both groups' up and write them to memory.
#pragma once
#include "draft/block.cuh"
#include "large/copier.cuh"

// --- activations ----------------------------------------------------------------------------------------------------

// Where a stage's activations come from.
struct Source {
    const u16* rows;
    bool normed;  // times 1 / rms of the residual stream
};

constexpr bool MINS = has_type(SLAB_Q4_K) || has_type(SLAB_Q5_K);  // sums of activations are wanted

// The group's activations as fp16 operands. A lane has 16 k of one token in a tile of 64 k. With it the stage begins.
__device__ __forceinline__ void prepare_operands(Block& b, const Run& run, Source from) {
    constexpr int EACH = GROUP_BLOCKS * 4 * OCTETS / WARPS;
    static_assert(GROUP_BLOCKS % 2 == 0, "a warp has as many tiles as any other");
    const int first = run.first_block, tiles = run.blocks * 4;
    const int q = b.lane & 3, in_octet = b.lane >> 2;
    if (threadIdx.x == 0) b.s.normed = from.normed;
    if (threadIdx.x < THREADS_ARRIVE) barrier_arrive(Barriers(b.base).begun);
    uint4 raw[EACH][2];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int token = i % OCTETS * 8 + in_octet, tile = i / OCTETS * WARPS + b.warp;
        const uint4* at = (const uint4*)(from.rows + activation_at(token, first * BLOCK_K + tile * 64 + q * 16));
        const bool live = tile < tiles && token < b.nodes;
        raw[i][0] = live ? __ldcg(at) : uint4{}, raw[i][1] = live ? __ldcg(at + 1) : uint4{};
    }
    // the largest value's exponent
#pragma unroll
    for (int octet = 0; octet < OCTETS; octet++) {
        u32 most = 0;
#pragma unroll
        for (int i = octet; i < EACH; i += OCTETS) {
            u32 top = 0;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const u32 words[4] = {raw[i][half].x, raw[i][half].y, raw[i][half].z, raw[i][half].w};
#pragma unroll
                for (int j = 0; j < 4; j++) top = max(top, max(words[j] & 0x7fffu, words[j] >> 16 & 0x7fffu));
            }
            most = max(most, top << 16);
        }
        most = max(most, __shfl_xor_sync(~0u, most, 1));
        most = max(most, __shfl_xor_sync(~0u, most, 2));
        if (q == 0) b.s.exponent[b.warp][octet * 8 + in_octet] = most >> 23;
    }
    b.sync();
#pragma unroll
    for (int octet = 0; octet < OCTETS; octet++) {
        const int token = octet * 8 + in_octet;
        u32 exponent = 10;
#pragma unroll
        for (int w = 0; w < WARPS; w++) exponent = max(exponent, b.s.exponent[w][token]);
        const float to_half = __uint_as_float((263 - exponent) << 23);  // the largest becomes 512 to 1024
        if (b.warp == 0 && q == 0 && token < b.nodes)
            b.s.scale[token] = __uint_as_float((exponent + 15) << 23);
#pragma unroll
        for (int i = octet; i < EACH; i += OCTETS) {
            const int tile = i / OCTETS * WARPS + b.warp;
            if (tile >= tiles) continue;
            u8* to = b.scratch + (tile / 4 * 17 + tile % 4 * 4) * STEP_BYTES + octet * 256 + in_octet * 16 + q * 4;
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint4 v = raw[i][j / 2];
                const u32 early = j & 1 ? v.z : v.x, late = j & 1 ? v.w : v.y;
                const OperandQuad quad(early, late, to_half);
                *(u32*)(to + j * STEP_BYTES) = quad.low, *(u32*)(to + j * STEP_BYTES + 128) = quad.high;
                if (MINS) sum += quad.sum;
            }
            if (!MINS) continue;
            sum += __shfl_xor_sync(~0u, sum, 1);
            if ((q & 1) == 0) {  // block 2 (tile mod 4) + q / 2 of the superblock
                u16* sums = (u16*)(b.scratch + (tile / 4 * 17 + 16) * STEP_BYTES + octet * 256 + in_octet * 16) +
                            tile % 4 * 2 + q / 2;
                const u32 rounded = pack_half(sum, 0.0f);
                sums[0] = (u16)rounded, sums[64] = (u16)pack_half(sum - unpack_half(rounded).x, 0.0f);
            }
        }
    }
    show_to_products();
    b.sync();
}

#include "large/multiply.cuh"

// 1 / rms of every node's residual stream, or 1 where activations are not of that. A lane has four nodes' squares of
// every eighth SM: a load of the warp is whole lines, and few loads follow each other.
__device__ __forceinline__ void measure_residual(Block& b, int which) {
    static_assert(NODES == 16, "four lanes have the nodes of an SM");
    float4 square = {};
    if (b.s.normed) {
#pragma unroll 6
        for (int sm = b.lane >> 2; sm < SMS; sm += 8)
            square = Sums<1>::add(square, __ldcg((const float4*)(b.p.x_squares + sm * NODES) + (b.lane & 3)));
    }
    const float sums[4] = {square.x, square.y, square.z, square.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float sum = sums[j];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (b.lane < 4) b.s.inverse[which][b.lane * 4 + j] = b.s.normed ? inverse_root(sum / HIDDEN + EPS) : 1.0f;
    }
    __syncwarp();
}

// A stage's sums, all of it. They begin with the consumers: an SM that has nothing to do in a stage may not say so
// before the stage. What a normed stage needs besides is there by then.
__device__ __forceinline__ void reduce(Block& b, int which, const Run& run, u32 phase, u32& count) {
    barrier_wait(Barriers(b.base).begun, phase);
    measure_residual(b, which);
    reduce_tiles(b, which, run, count, b.p.sums, 0);
    if (b.lane == 0) add_release(b.p.counter, 1);
}
