// Gated attention over any length.
//
// Maths: softmax(q k^T / 16) v, times sigmoid(gate), with norms and RoPE on q and k.
// Keys are worked on in chunks of 64 positions. The last two chunks up to a query's position are a part each; those
// before belong to splits, each a part. So parts depend on the position alone, and a chunk's operations are the same
// whether its keys are committed, and all nodes share it, or some are drafted, and it is a node's own, gathered along
// its path: plain and tree runs agree to the bit. Steps: rows (norm, RoPE, quantised if they are kept so); items (a key
// head, and a split for some tiles of 16 queries, or a node's own chunk), each of which makes parts; merge (parts in
// order; the gate).
// Bytes: a row of keys and one of values a position and key head, once for QUERY_TILES tiles.
#pragma once
#include "large/attention_walk.cuh"

// A warp merges the parts of a node's head, a lane eight dimensions: first its gates, which are there before the parts.
struct Merge {
    static constexpr int EACH = (PARTS + 31) / 32;
    static constexpr int AT_ONCE = up(12, EACH);  // so that it is known which of a lane's parts is next
    float gate[8];

    __device__ __forceinline__ void take_gates(const Block& b, const Projection& sums, int task) {
        Eight(sums, task / HEADS, task % HEADS * 2 * HEAD_DIM + HEAD_DIM + b.lane * 8).take(gate);
#pragma unroll
        for (int j = 0; j < 8; j++) gate[j] = sigmoid(gate[j]);
    }
    __device__ __forceinline__ void run(const Block& b, int stage, int task) const {
        const int node = task / HEADS, head = task % HEADS, position = uniform(node_position(b, node));
        const int early = early_chunks(position), splits = min(early, SPLITS),
                  count = splits + position / CHUNK - early + 1;
        const size_t at = (size_t)task * PARTS;
        const uint4* parts = (const uint4*)(b.p.parts + at * (HEAD_DIM / 2)) + b.lane;
        const auto place = [&](int i) { return i < splits ? i : SPLITS + i - splits; };
        float2 stats[EACH];
        uint4 v[AT_ONCE];
        const auto ask = [&](int first) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                v[i] = __ldcg(parts + place(min(first + i, count - 1)) * (HEAD_DIM / 8));
        };
        // What a part weighs, a lane EACH parts.
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int which = b.lane * EACH + i;
            stats[i] = which < count ? __ldcg(b.p.part_stats + at + place(which)) : float2{MINUS_INFINITY, 0.0f};
        }
        ask(0);
        float peak = MINUS_INFINITY, shares[EACH], sum[8] = {}, weight = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++) peak = fmaxf(peak, stats[i].x);
        peak = warp_max(peak);
#pragma unroll
        for (int i = 0; i < EACH; i++) shares[i] = power_of_2(stats[i].x - peak) * stats[i].y;
#pragma unroll 1
        for (int first = 0;;) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const float share = __shfl_sync(~0u, shares[i % EACH], (first + i) / EACH);  // 0 past the last one
                weight += share;
                const u32 words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float2 two = unpack_half(words[j]);
                    sum[2 * j] = fmaf(share, two.x, sum[2 * j]), sum[2 * j + 1] = fmaf(share, two.y, sum[2 * j + 1]);
                }
            }
            first += AT_ONCE;
            if (first >= count) break;
            ask(first);
        }
        const float inverse = reciprocal(weight);
        u32 out[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            out[j] = pack_bf16(sum[2 * j] * inverse * gate[2 * j], sum[2 * j + 1] * inverse * gate[2 * j + 1]);
        const int k = head * HEAD_DIM + b.lane * 8;
        u32* words = operand_words(b, stage + 1);
        if constexpr (POLLED) {
            store16(words + k / 2, out[0], out[1], out[2], out[3]);
        } else {
            const Fours<2> fours = {{{out[0], out[1]}, {out[2], out[3]}}};
            publish_operands(words, node, k, fours, 1.0f, __reduce_max_sync(~0u, fours.largest()));
        }
    }
};

// What all attention layers do for a token, or for a tree: by one thread, when it begins.
__device__ __forceinline__ void prepare_items(Block& b) {
    const ItemCounts items = count_items(b);
    b.s.items = items;
    b.s.first_item = item_of(b, items, min(b.sm, items.all - 1));
}

// Rows of a tree, each by one warp of all SMs: a step.
__device__ __noinline__ void make_tree_rows(int stage, int deltas, int length, const float* vectors) {
    Block b;
    b.deltas = deltas, b.length = length, b.vectors = vectors;
    const auto sums = sums_of<HIDDEN_GROUPS>(b, stage, ATTENTION_IN_ROWS);
#pragma unroll 1
    for (int task = b.warp * SMS + b.sm; task < b.nodes * ATTENTION_ROWS; task += WARPS * SMS) {
        const int node = task / ATTENTION_ROWS, row = task % ATTENTION_ROWS;
        float v[8];
        make_row(b, sums, node, row, v);
        if (row >= HEADS)
            keep_row(b, stage >> 2, node, row, v);
        else
            store_eight<CACHE_F16, 1>((u8*)b.p.queries + ((size_t)node * HEADS + row) * (HEAD_DIM * 2), b.lane, v);
    }
    b.step_done();
}

// An attention layer's mixer, apart from the rest: the compiler would give the products worse code beside it. It waits
// for the projection's sums, or for rows of a tree. Returns the steps done so far.
__device__ __noinline__ u32 attention_mix(int stage, int deltas, int length, const float* vectors, u32 steps_done) {
    Block b;
    b.deltas = deltas, b.length = length, b.vectors = vectors, b.steps_done = steps_done;
    const int layer = stage >> 2, all = uniform(b.s.items.all);
    const auto sums = sums_of<HIDDEN_GROUPS>(b, stage, ATTENTION_IN_ROWS);
#pragma unroll 1
    for (int item = b.sm; item < all || item == b.sm; item += SMS) {
        KeyWalk walk(b, layer, item == b.sm ? b.s.first_item : item_of(b, b.s.items, item));
        const bool some = item < all && walk.steps > 0;
        b.sync();  // what the scratch holds may still be read
        if (some) walk.begin();
        if constexpr (POLLED) {
            if (some) walk.make_rows(layer, sums);
        } else {
            if (item == b.sm) b.wait_for_all();
            if (some) walk.take_queries();
        }
        b.sync();
        if (item == b.sm) b.mark();
        if (some) {
            walk.go_on();
            walk.run();
        }
    }
    b.mark();
    Merge merge = {};
    const int tasks = b.nodes * HEADS, first = b.warp * SMS + b.sm;
    b.step_done();
#pragma unroll 1
    for (int task = first; task < tasks || task == first; task += WARPS * SMS) {
        if (task < tasks) merge.take_gates(b, sums, task);
        if (task == first) {
            b.wait_for_all();
            b.mark();
        }
        if (task < tasks) merge.run(b, stage, task);
    }
    return b.steps_done;
}
