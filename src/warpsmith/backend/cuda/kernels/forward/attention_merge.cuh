// The end of attention: what the splits of a node's head publish becomes its output.
//
// Maths: y = sum of w_s m_s / sum of w_s, with m_s a split's mean of values and w_s its softmax weight at the common
// maximum; then times sigmoid(gate). Splits are added in a fixed order, whatever the chip and however many nodes.
// Bytes: 512 of fp16 means a split, head and node, read once and reset; 512 of bf16 published.
#pragma once
#include "forward/block.cuh"

// What a lane needs of one node's head: of the splits it looks after, maximum and weight; of every fourth split, eight
// dimensions of its means; the gates of two dimensions.
struct SplitMeans {
    static constexpr int ROUNDS = SPLITS / 4, EACH = SPLITS / 32;
    static_assert(SPLITS % 32 == 0, "a lane looks after whole splits");
    uint2 stats[EACH], gates;
    uint4 got[ROUNDS];

    __device__ __forceinline__ void poll(const Block& b, const u32* stats_at, const u32* gate_at, const u32* part,
                                         int splits) {
        const int quarter = b.lane >> 3;
        gates = {NOT_YET, NOT_YET};
#pragma unroll
        for (int i = 0; i < EACH; i++) stats[i] = {NOT_YET, NOT_YET};
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) got[i] = {NOT_YET, NOT_YET, NOT_YET, NOT_YET};
        Watchdog dog;
        bool came;
        do {  // what has not come yet
            came = true;
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (stats[i].x == NOT_YET) stats[i] = load8(stats_at + min(i * 32 + b.lane, splits - 1) * 2);
            if (gates.x == NOT_YET) gates = load8(gate_at);
#pragma unroll
            for (int i = 0; i < ROUNDS; i++) {
                if (i * 4 >= splits) break;
                if (!came16(got[i])) got[i] = load16(part + min(i * 4, splits - 1 - quarter) * (HEAD_DIM / 2));
            }
#pragma unroll
            for (int i = 0; i < EACH; i++) came &= stats[i].x != NOT_YET;
            came &= gates.x != NOT_YET;
#pragma unroll
            for (int i = 0; i < ROUNDS; i++) {
                if (i * 4 >= splits) break;
                came &= came16(got[i]);
            }
            dog.check();
        } while (!everywhere(came));
    }
    // The weights of the splits that this lane looks after, and of all: at the common maximum.
    __device__ __forceinline__ float weigh(const Block& b, int splits, float (&share)[EACH]) const {
        float peak = MINUS_INFINITY, weight = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            peak = fmaxf(peak, __uint_as_float(stats[i].x));  // past the last: the last again
        peak = warp_max(peak);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const float mine = power_of_2(__uint_as_float(stats[i].x) - peak) * __uint_as_float(stats[i].y);
            share[i] = i * 32 + b.lane < splits ? mine : 0.0f;
            weight += share[i];
        }
        return warp_sum(weight);
    }
    // The weighted sum of the means: a lane's two dimensions. At every step a lane passes on half of what it has.
    __device__ __forceinline__ float2 sum(const Block& b, int splits, const float (&share)[EACH]) const {
        const int quarter = b.lane >> 3;
        float sum[8] = {};
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            if (i * 4 >= splits) break;
            const float mine = __shfl_sync(~0u, share[i / 8], i % 8 * 4 + quarter);  // 0 past the last split
            const u32 words[4] = {got[i].x, got[i].y, got[i].z, got[i].w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float2 two = unpack_half(words[j]);
                sum[2 * j] = fmaf(mine, two.x, sum[2 * j]), sum[2 * j + 1] = fmaf(mine, two.y, sum[2 * j + 1]);
            }
        }
        float four[4], two[2];
        const bool late = quarter & 2, odd = quarter & 1;
#pragma unroll
        for (int j = 0; j < 4; j++)
            four[j] = (late ? sum[j + 4] : sum[j]) + __shfl_xor_sync(~0u, late ? sum[j] : sum[j + 4], 16);
#pragma unroll
        for (int j = 0; j < 2; j++)
            two[j] = (odd ? four[j + 2] : four[j]) + __shfl_xor_sync(~0u, odd ? four[j] : four[j + 2], 8);
        return {two[0], two[1]};
    }
};

// Stage: merge the splits in their order, gate, publish. A warp takes 64 dimensions of a node's head, a lane eight of
// them in every fourth split.
__device__ __forceinline__ void attention_merge(Block& b) {
    constexpr int PIECES = HEAD_DIM / 64, ROUNDS = SplitMeans::ROUNDS;
    const int tasks = b.nodes * HEADS * PIECES, quarter = b.lane >> 3;
#pragma unroll 1
    for (int task = b.warp * SMS + b.sm; task < tasks; task += WARPS * SMS) {
        const int node = task / (HEADS * PIECES), head = task / PIECES % HEADS, piece = task % PIECES;
        const int dim =
            piece * 64 + (b.lane >> 2 & 1) * 32 + quarter * 8 + (b.lane & 3) * 2;  // the lane's two in the end
        const int splits = min(SPLITS, (b.length + (NODES == 1 ? 0 : b.s.depth[node])) / KEYS + 1);
        const u32* stats_at = b.words(ATTENTION_PHASE, node, STATS_AT) + head * SPLITS * 2;
        const u32* gate_at = b.words(ATTENTION_PHASE, node, ATTENTION_IN_AT) + (head * 2 + 1) * HEAD_DIM + dim;
        const size_t first = ((size_t)node * HEADS + head) * SPLITS + quarter;
        u32* part = b.p.parts + first * (HEAD_DIM / 2) + piece * 32 + (b.lane & 7) * 4;
        SplitMeans means;
        means.poll(b, stats_at, gate_at, part, splits);
        float share[SplitMeans::EACH];
        const float inverse = reciprocal(means.weigh(b, splits, share));
        const float2 two = means.sum(b, splits, share);
        const float gate0 = sigmoid(__uint_as_float(means.gates.x)), gate1 = sigmoid(__uint_as_float(means.gates.y));
        const u32 pair = pack_bf16(two.x * inverse * gate0, two.y * inverse * gate1);
        const u32 next = __shfl_down_sync(~0u, pair, 1);
        if (b.lane % 2 == 0)
            publish8(b.value<AttentionOutput>(ATTENTION_PHASE, node, ATTENTION_VALUES_AT, head * HEAD_DIM + dim),
                     b.other(ATTENTION_PHASE), pair, next);
#pragma unroll
        for (int i = 0; i < ROUNDS; i++)
            if (i * 4 + quarter < splits) store16(part + i * 4 * (HEAD_DIM / 2), NOT_YET, NOT_YET, NOT_YET, NOT_YET);
    }
}
