// Gated attention over any length.
//
// Maths: softmax(q k^T / 16) v, times sigmoid(gate), with norms and RoPE on q and k.
// Keys are worked on in chunks of 64 positions. A query at position p shares with the others the chunks that end before
// p - 63: no tree is that deep, so their keys are committed whoever drafts. What is left, 64 to 127 positions, is every
// node's own, gathered along its path. So plain and tree runs agree to the bit. Steps: rows (norm, RoPE, quantised if
// they are kept so); parts (items: a key head, and a split of the shared chunks for some tiles of 16 queries, or a
// node's own chunks); merge (splits in order, then own chunks; the gate).
// Bytes: a row of keys and one of values a position and key head, once for QUERY_TILES tiles.
#pragma once
#include "large/attention_walk.cuh"

// A warp a node's head, a lane eight dimensions.
__device__ __forceinline__ void attention_merge(Block& b) {
    const Sums<HIDDEN_GROUPS> sums(b, ATTENTION_IN_ROWS);
#pragma unroll 1
    for (int task = b.warp * SMS + b.sm; task < b.nodes * HEADS; task += WARPS * SMS) {
        const int node = task / HEADS, head = task % HEADS, position = uniform(node_position(b, node));
        const int splits = min(shared_chunks(position), SPLITS), count = splits + 1;
        const size_t at = (size_t)task * PARTS;
        const int gate_row = head * 2 * HEAD_DIM + HEAD_DIM + b.lane * 8;
        const float4 gate0 = sums.at(node, gate_row), gate1 = sums.at(node, gate_row + 4);
        const auto place = [&](int i) { return i < splits ? i : SPLITS; };
        // What a part weighs, a lane some parts.
        constexpr int EACH = (PARTS + 31) / 32;
        float2 stats[EACH];
        float peak = MINUS_INFINITY, shares[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int which = i * 32 + b.lane;
            stats[i] = which < count ? __ldcg(b.p.part_stats + at + place(which)) : float2{MINUS_INFINITY, 0.0f};
            peak = fmaxf(peak, stats[i].x);
        }
        peak = warp_max(peak);
#pragma unroll
        for (int i = 0; i < EACH; i++) shares[i] = power_of_2(stats[i].x - peak) * stats[i].y;
        float sum[8] = {}, weight = 0.0f;
        const uint4* parts = (const uint4*)(b.p.parts + at * (HEAD_DIM / 2)) + b.lane;
#pragma unroll
        for (int group = 0; group < EACH; group++) {
#pragma unroll 8
            for (int i = 0; i < min(32, count - group * 32); i++) {
                const uint4 v = __ldcg(parts + place(group * 32 + i) * (HEAD_DIM / 8));
                const float share = __shfl_sync(~0u, shares[group], i);
                weight += share;
                const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float2 two = unpack_half(words[j]);
                    sum[2 * j] = fmaf(share, two.x, sum[2 * j]), sum[2 * j + 1] = fmaf(share, two.y, sum[2 * j + 1]);
                }
            }
        }
        const float inverse = reciprocal(weight);
        u32 out[4];
        const float gates[8] = {gate0.x, gate0.y, gate0.z, gate0.w, gate1.x, gate1.y, gate1.z, gate1.w};
#pragma unroll
        for (int j = 0; j < 4; j++)
            out[j] = pack_bf16(sum[2 * j] * inverse * sigmoid(gates[2 * j]),
                               sum[2 * j + 1] * inverse * sigmoid(gates[2 * j + 1]));
        *(uint4*)(b.p.y + activation_at(node, head * HEAD_DIM + b.lane * 8)) = {out[0], out[1], out[2], out[3]};
    }
}

// An attention layer's mixer, apart from the rest: the compiler would give the products worse code beside it. Returns
// the steps done so far.
__device__ __noinline__ u32 attention_mix(int layer, int deltas, int length, const float* vectors, u32 steps_done) {
    Block b;
    b.deltas = deltas, b.length = length, b.vectors = vectors, b.steps_done = steps_done;
    const AttentionItems items(b);
    bool rows_done = false;
#pragma unroll 1
    for (int item = b.sm; item < items.all || !rows_done; item += SMS) {
        KeyWalk walk(b, layer, items, min(item, items.all - 1));
        b.sync();                               // what the scratch holds may still be read
        if (item < items.shared) walk.begin();  // what was committed long ago does not wait for this layer's rows
        if (!rows_done) {
            attention_rows(b, layer);
            b.mark();
            b.step_done();
            b.wait_for_all();
            b.mark();
            rows_done = true;
        }
        if (item >= items.all) break;
        if (item >= items.shared) walk.begin();
        walk.run();
    }
    b.mark();
    b.step_done();
    b.wait_for_all();
    b.mark();
    attention_merge(b);
    return b.steps_done;
}
