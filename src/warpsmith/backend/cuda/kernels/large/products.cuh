// Products of packed weights with the activations of all nodes at once.
//
// Maths: sums[row][node] = sum over k of W[row][k] a[node][k], for the rows and the superblocks of K that are this
// SM's. K is cut into groups of at most GROUP_BLOCKS superblocks. A group's (tile of 64 rows, superblock) pairs, tile
// by tile, are dealt to SMs by their bytes; where an SM begins or ends inside a tile, its results are parts of that
// tile. Activations of the group are in shared memory in fp16, times a power of two that is the token's own (of its
// largest value in the group), so nothing overflows and a token's numbers depend on it alone. They stay there while the
// weights pass by. Eight warps are two groups of four: a group has every second superblock of 64 rows, a warp 16 of the
// rows. Sums of a tile stay in registers, then two further warps add both groups' up and write them to memory. Bytes:
// the weights, once; 10 bytes a k and node (read 2, write and read 4); 4 a result.
#pragma once
#include "large/words.cuh"
#include "large/ring.cuh"

// --- activations ----------------------------------------------------------------------------------------------------

// Where a stage's activations come from; DeltaNet outputs have a factor a head.
struct Source {
    const u16* rows;
    bool normed;  // times 1 / rms of the residual stream
    bool heads;   // times 1 / rms of a DeltaNet head
    bool polled;
};

// Of one node: a thread has eight k. The same operations in the same order.
__device__ __forceinline__ void prepare_one(Block& b, const Run& run, Source from) {
    const int k = threadIdx.x * 8, head = run.first_block * 2 + k / 128;
    const bool live = k < run.blocks * BLOCK_K;
    uint4 raw = {};
    float by = 1.0f;
    if (live) {
        const u16* at = from.rows + run.first_block * BLOCK_K + k;
        if (from.heads) {
            const float4* squares = (const float4*)(b.p.y_squares + head * 16);
            const float4 v[4] = {__ldcg(squares), __ldcg(squares + 1), __ldcg(squares + 2), __ldcg(squares + 3)};
            raw = __ldcg((const uint4*)at);
            float square = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; j++) square += (v[j].x + v[j].y) + (v[j].z + v[j].w);
            by = inverse_root(square / STATE_DIM + EPS);
        } else if (from.polled) {
            raw = load16(at);
            for (Watchdog dog; !came4(raw); raw = load16(at)) dog.check();
        } else {
            raw = __ldcg((const uint4*)at);
        }
    }
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
    u32 top = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) top = max(top, max(words[j] & 0x7fffu, words[j] >> 16 & 0x7fffu));
    top = __reduce_max_sync(~0u, __float_as_uint(__uint_as_float(top << 16) * by));
    if (b.lane == 0) b.s.exponent[b.warp][0] = (u8)(top >> 23);
    b.sync();
    u32 exponent = 10;
#pragma unroll
    for (int w = 0; w < WARPS; w++) exponent = max(exponent, (u32)b.s.exponent[w][0]);
    const float to_half = __uint_as_float((263 - exponent) << 23);  // the largest becomes 512 to 1024
    if (threadIdx.x == 0) b.s.scale[0] = __uint_as_float((exponent + 15) << 23);
    const float full = to_half * by, part = full * 0.0625f;
    const int tile = k / 64, q = k % 64 / 16, odd = k / 8 & 1;
    uint4 out;
    float sum[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const u32 early = words[2 * j], late = words[2 * j + 1];
        const float2 a = {bf16_low(early) * full, bf16_high(early) * full},
                     c = {bf16_low(late) * part, bf16_high(late) * part};
        const u32 low = pack_half(a.x, a.y), high = pack_half(c.x, c.y);
        if (j == 0)
            out.x = low, out.y = high;
        else
            out.z = low, out.w = high;
        sum[j] = fmaf(16.0f, c.x + c.y, a.x + a.y);
    }
    u8* to = b.scratch + tile / 4 * BLOCK_BYTES;
    if (live) *(uint4*)(to + (tile % 4 * 2 + odd) * 64 + q * 16) = out;
    float total = 0.0f + sum[0] + sum[1];  // the first eight k of sixteen
    total = __shfl_xor_sync(~0u, total, 1) + sum[0] + sum[1];
    total += __shfl_xor_sync(~0u, total, 2);
    if (live && (threadIdx.x & 3) == 1) {  // block 2 (tile mod 4) + q / 2 of the superblock
        u16* sums = (u16*)(to + 512 + tile % 4 * 8) + q / 2;
        const u32 rounded = pack_half(total, 0.0f);
        sums[0] = (u16)rounded, sums[2] = (u16)pack_half(total - unpack_half(rounded).x, 0.0f);
    }
    b.sync();
    if (threadIdx.x == 0) barrier_arrive(Barriers(b.base).begun);
}

// The group's activations as fp16 operands. A lane has 16 k of one token in a tile of 64 k. Those of all octets of
// tokens are asked for at once, then made one octet after another.
__device__ __forceinline__ void prepare_operands(Block& b, const Run& run, Source from) {
    constexpr int EACH = GROUP_BLOCKS * 4 / WARPS;
    static_assert(GROUP_BLOCKS % 2 == 0, "a warp has as many tiles as any other");
    const int first = run.first_block, tiles = run.blocks * 4;
    const int q = b.lane & 3, in_octet = b.lane >> 2;
    // Sums of squares of DeltaNet heads first, since all wait for them.
    constexpr int EACH_HEADS = (GROUP_BLOCKS * 2 * NODES + CONSUMERS - 1) / CONSUMERS;
    float4 squares[EACH_HEADS][4] = {};
    if (from.heads) {
#pragma unroll
        for (int i = 0; i < EACH_HEADS; i++) {
            const int item = min(i * CONSUMERS + (int)threadIdx.x, tiles / 2 * b.nodes - 1);
            const float4* at = (const float4*)(b.p.y_squares + (size_t)(item % b.nodes) * (VALUE_DIM / 8)) +
                               (first * 2 + item / b.nodes) * 4;
#pragma unroll
            for (int j = 0; j < 4; j++) squares[i][j] = __ldcg(at + j);
        }
    }
    uint4 raw[OCTETS][EACH][2];
#pragma unroll
    for (int octet = 0; octet < OCTETS; octet++)
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int token = octet * 8 + in_octet, tile = i * WARPS + b.warp;
            const uint4* at = (const uint4*)(from.rows + activation_at(token, first * BLOCK_K + tile * 64 + q * 16));
            const bool live = tile < tiles && token < b.nodes;
            raw[octet][i][0] = live ? __ldcg(at) : uint4{}, raw[octet][i][1] = live ? __ldcg(at + 1) : uint4{};
        }
    float* head_scale = (float*)(b.scratch + HEAD_SCALES_AT);
    if (from.heads) {
#pragma unroll
        for (int i = 0; i < EACH_HEADS; i++) {
            const int item = i * CONSUMERS + threadIdx.x;
            float square = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; j++)
                square += (squares[i][j].x + squares[i][j].y) + (squares[i][j].z + squares[i][j].w);
            if (item < tiles / 2 * b.nodes)
                head_scale[item / b.nodes * NODES + item % b.nodes] = inverse_root(square / STATE_DIM + EPS);
        }
        b.sync();
    }
#pragma unroll
    for (int octet = 0; octet < OCTETS; octet++) {
        const int token = octet * 8 + in_octet;
        float by[EACH];
        u32 most = 0;  // the largest value's exponent
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int tile = i * WARPS + b.warp;
            by[i] = from.heads && tile < tiles && token < b.nodes ? head_scale[tile / 2 * NODES + token] : 1.0f;
            u32 top = 0;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint4 v = raw[octet][i][half];
                const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int j = 0; j < 4; j++) top = max(top, max(words[j] & 0x7fffu, words[j] >> 16 & 0x7fffu));
            }
            most = max(most, __float_as_uint(__uint_as_float(top << 16) * by[i]));
        }
        most = max(most, __shfl_xor_sync(~0u, most, 1));
        most = max(most, __shfl_xor_sync(~0u, most, 2));
        if (q == 0) b.s.exponent[b.warp][token] = (u8)(most >> 23);
        b.sync();
        u32 exponent = 10;
#pragma unroll
        for (int w = 0; w < WARPS; w++) exponent = max(exponent, (u32)b.s.exponent[w][token]);
        const float to_half = __uint_as_float((263 - exponent) << 23);  // the largest becomes 512 to 1024
        if (b.warp == 0 && q == 0 && token < b.nodes)
            b.s.scale[token] = __uint_as_float((exponent + 15) << 23);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int tile = i * WARPS + b.warp;
            if (tile >= tiles) continue;
            const float full = to_half * by[i], part = full * 0.0625f;
            u8* to = b.scratch + (tile / 4 * 17 + tile % 4 * 4) * STEP_BYTES + octet * 256 + in_octet * 16 + q * 4;
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint4 v = raw[octet][i][j / 2];
                const u32 early = j & 1 ? v.z : v.x, late = j & 1 ? v.w : v.y;
                // exact but for numbers that become subnormal: their sums may be taken before
                const float2 a = {bf16_low(early) * full, bf16_high(early) * full},
                             c = {bf16_low(late) * part, bf16_high(late) * part};
                const u32 low = pack_half(a.x, a.y), high = pack_half(c.x, c.y);
                *(u32*)(to + j * STEP_BYTES) = low, *(u32*)(to + j * STEP_BYTES + 128) = high;
                sum += fmaf(16.0f, c.x + c.y, a.x + a.y);
            }
            sum += __shfl_xor_sync(~0u, sum, 1);
            if ((q & 1) == 0) {  // block 2 (tile mod 4) + q / 2 of the superblock
                u16* sums = (u16*)(b.scratch + (tile / 4 * 17 + 16) * STEP_BYTES + octet * 256 + in_octet * 16) +
                            tile % 4 * 2 + q / 2;
                const u32 rounded = pack_half(sum, 0.0f);
                sums[0] = (u16)rounded, sums[64] = (u16)pack_half(sum - unpack_half(rounded).x, 0.0f);
            }
        }
    }
    if (threadIdx.x == 0) b.s.normed = from.normed;
    show_to_products();
    b.sync();
    if (threadIdx.x == 0) barrier_arrive(Barriers(b.base).begun);
}

#include "large/multiply_one.cuh"

// 1 / rms of the one node's residual stream, as `measure_residual`.
__device__ __forceinline__ void measure_words(Block& b, int which, int stage) {
    float inverse = 1.0f;
    if ((stage & 1) == 0) {  // IN or MLP_IN
        constexpr int EACH = (SMS + 31) / 32;
        const u32* words = square_words(b, stage);
        u32 got[EACH];
        for (Watchdog dog;; dog.check()) {
            bool all = true;
#pragma unroll
            for (int i = 0; i < EACH; i++) got[i] = i * 32 + b.lane < SMS ? load4(words + i * 32 + b.lane) : 0;
#pragma unroll
            for (int i = 0; i < EACH; i++) all = all & got[i] != NOT_YET;
            if (everywhere(all)) break;
        }
        float square = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++) square += __uint_as_float(got[i]);
        inverse = inverse_root(warp_sum(square) / HIDDEN + EPS);
    }
    if (b.lane == 0) b.s.inverse[which][0] = inverse;
    __syncwarp();
}
