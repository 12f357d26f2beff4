// Products of packed weights with the activations of all nodes at once.
//
// Maths: sums[row][node] = sum over k of W[row][k] a[node][k], for the rows and the superblocks of K that are this
// SM's. K is cut into groups of at most GROUP_BLOCKS superblocks. A group's (tile of 64 rows, superblock) pairs, tile
// by tile, are dealt to SMs by their bytes; where an SM begins or ends inside a tile, its results are parts of that
// tile. Activations of the group are in shared memory in fp16 (see operands.cuh), and stay there while the weights pass
// by. Eight warps are two groups of four: a group has every second superblock of 64 rows, a warp 16 of the
// rows. Sums of a tile stay in registers, then two further warps add both groups' up and write them to memory. Bytes:
// the weights, once; of a tree 4 bytes a k and node (read 2, keep 2); 4 a result.
#pragma once
#include "large/operands.cuh"
#include "large/copier.cuh"

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

// A tree's group of K as it was published. A warp has a superblock, a lane 64 k of one token of every octet.
__device__ __forceinline__ void prepare_operands(Block& b, const Run& run, int stage) {
    static_assert(GROUP_BLOCKS <= WARPS, "a warp a superblock");
    constexpr int SUMS = OCTETS * 16, EACH_SUMS = (SUMS + 31) / 32;  // of sixteen bytes
    const bool mine = b.warp < run.blocks;
    const u8* block = (const u8*)(operand_words(b, stage) + (run.first_block + b.warp) * BLOCK_WORDS);
    const u32 to = b.base + b.warp * BLOCK_BYTES;
    const int lane_at = (b.lane >> 3) * 4 * STEP_BYTES + (b.lane & 7) * 16;
    const u8* from = block + lane_at;
    // Sixteen bytes of a lane: i / 2 of four steps, one of its halves.
    const auto place = [](int octet, int i) { return i / 2 * STEP_BYTES + octet * 256 + i % 2 * 128; };
    const auto sums_place = [&](int i) { return 16 * STEP_BYTES + (i * 32 + b.lane) * 16; };
    const auto live = [&](int octet) { return mine && octet * 8 + (b.lane & 7) < b.nodes; };
    const auto has_sums = [&](int i) {
        const int at = i * 32 + b.lane;
        return mine && at < SUMS && at / 16 * 8 + at % 8 < b.nodes;
    };
    const bool has_back = mine && b.lane < b.nodes;
    const u32* back_at = (const u32*)(block + BACK_AT) + b.lane;
    uint4 raw[OCTETS][8], sums[EACH_SUMS] = {};
    u32 back = __float_as_uint(1.0f);
    // The few first: registers of their addresses would be waited for behind many loads.
#pragma unroll
    for (int i = 0; i < EACH_SUMS; i++)
        if (has_sums(i)) sums[i] = load16(block + sums_place(i));
    if (has_back) back = load4(back_at);
#pragma unroll
    for (int octet = 0; octet < OCTETS; octet++)
#pragma unroll
        for (int i = 0; i < 8; i++)
            raw[octet][i] = live(octet) ? __ldcg((const uint4*)(from + place(octet, i))) : uint4{};
#pragma unroll
    for (int octet = 0; octet < OCTETS; octet++) {
        for (Watchdog dog;; dog.check()) {
            u32 most = 0;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const uint4 v = raw[octet][i];
                most = max(max(max(most, v.x), max(v.y, v.z)), v.w);
            }
            if (everywhere(most != NOT_YET)) break;
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (!came4(raw[octet][i])) raw[octet][i] = load16(from + place(octet, i));
        }
        if (mine)
#pragma unroll
            for (int i = 0; i < 8; i++) store_shared(to + lane_at + place(octet, i), raw[octet][i]);
    }
#pragma unroll
    for (int i = 0; i < EACH_SUMS; i++) {
        for (Watchdog dog; !everywhere(came4(sums[i])); dog.check())
            if (has_sums(i)) sums[i] = load16(block + sums_place(i));
        if (mine && i * 32 + b.lane < SUMS) store_shared(to + sums_place(i), sums[i]);
    }
    for (Watchdog dog; !everywhere(back != NOT_YET); dog.check())
        if (has_back) back = load4(back_at);
    if (mine && b.lane < NODES) {
        store_shared(to + BACK_AT + b.lane * 4, back);
        if (back != __float_as_uint(1.0f)) b.s.scaled = stage;
    }
    show_to_products();
    b.sync();
    if (threadIdx.x < THREADS_ARRIVE) barrier_arrive(Barriers(b.base).begun);
}

#include "large/multiply_one.cuh"

// The sum of squares of one node's residual stream, once all have come: a lane has some of them.
__device__ __forceinline__ float square_of_one(const u32* words) {
    constexpr int EACH = (SQUARES + 31) / 32;
    const int lane = threadIdx.x & 31;
    u32 got[EACH];
    for (Watchdog dog;; dog.check()) {
        u32 most = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) got[i] = i * 32 + lane < SQUARES ? load4(words + i * 32 + lane) : 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) most = max(most, got[i]);
        if (everywhere(most != NOT_YET)) break;
    }
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++) square += __uint_as_float(got[i]);
    return warp_sum(square);
}
// Of every node of a tree, a lane one: the same sums in the same order, as many asked for at once as there is room for.
__device__ __forceinline__ float square_of_each(const u32* words) {
    constexpr int AT_ONCE = SQUARES <= 48 ? SQUARES : 32;
    float square[32] = {};
#pragma unroll
    for (int first = 0; first < SQUARES; first += AT_ONCE) {
        u32 got[AT_ONCE];
        for (Watchdog dog;; dog.check()) {
            u32 most = 0;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) got[i] = first + i < SQUARES ? load4(words + (first + i) * NODES) : 0;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) most = max(most, got[i]);
            if (everywhere(most != NOT_YET)) break;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) square[i % 32] += __uint_as_float(got[i]);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2)
#pragma unroll
        for (int i = 0; i < 32; i += 2 * step) square[i] += square[i + step];
    return square[0];
}
// 1 / rms of every node's residual stream, or 1 where activations are not of that.
__device__ __forceinline__ void measure(Block& b, int which, int stage) {
    float inverse = 1.0f;
    if (normed(stage)) {
        const u32* words = square_words(b, stage, min(b.lane, b.nodes - 1));
        inverse = inverse_root((POLLED ? square_of_one(words) : square_of_each(words)) / HIDDEN + EPS);
    }
    if (b.lane < NODES) b.s.inverse[which][b.lane] = inverse;
    __syncwarp();
}
