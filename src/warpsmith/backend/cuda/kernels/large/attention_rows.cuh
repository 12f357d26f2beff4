// Rows of queries, keys and values: norm, RoPE, and how they are kept. A warp a row.
#pragma once
#include "large/steps.cuh"

constexpr float ATTENTION_SCALE = 0.0625f * 1.44269504f;  // 256 ** -0.5, and scores are to base 2
constexpr float LARGEST_HALF = 65504.0f;
constexpr int ATTENTION_ROWS = HEADS + 2 * KV_HEADS;

__device__ __forceinline__ int node_position(const Block& b, int node) { return b.length + b.s.depth[node]; }
// Which of all key heads' caches a layer's is.
__device__ __forceinline__ size_t cache_index(const Block& b, int layer, int kv_head) {
    return (size_t)(layer - b.deltas) * KV_HEADS + kv_head;
}

__device__ __forceinline__ void attention_rows(Block& b, int layer) {
    const Sums<HIDDEN_GROUPS> sums(b, ATTENTION_IN_ROWS);
#pragma unroll 1
    for (int task = b.warp * SMS + b.sm; task < b.nodes * ATTENTION_ROWS; task += WARPS * SMS) {
        const int node = task / ATTENTION_ROWS, row = task % ATTENTION_ROWS, position = uniform(node_position(b, node));
        const bool is_query = row < HEADS, is_value = row >= HEADS + KV_HEADS;
        const int from = is_query   ? row * 2 * HEAD_DIM
                         : is_value ? VALUES_AT + (row - HEADS - KV_HEADS) * HEAD_DIM
                                    : KEYS_AT + (row - HEADS) * HEAD_DIM;
        const float4 v0 = sums.at(node, from + b.lane * 8), v1 = sums.at(node, from + b.lane * 8 + 4);
        float v[8] = {v0.x, v0.y, v0.z, v0.w, v1.x, v1.y, v1.z, v1.w};
        if (is_value) {
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = fminf(fmaxf(v[j], -LARGEST_HALF), LARGEST_HALF);
        } else {
            // pairs (j, j + 32): lanes 0..3 hold the first of a pair, lanes 4..7 the second
            const float4* low = (const float4*)(b.p.rope + (position & 63) * 32 + (b.lane & 3) * 8);
            const float4* high = (const float4*)(b.p.rope + (64 + (position >> 6)) * 32 + (b.lane & 3) * 8);
            const float* norm = b.vectors + (is_query ? Q_NORM_AT : K_NORM_AT) + b.lane * 8;
            float square = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++) square = fmaf(v[j], v[j], square);
            const float scale = inverse_root(warp_sum(square) / HEAD_DIM + EPS);
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] *= scale * __ldg(norm + j);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float4 l = __ldg(low + i), h = __ldg(high + i);
                const float cosine[2] = {fmaf(l.x, h.x, -(l.y * h.y)), fmaf(l.z, h.z, -(l.w * h.w))};
                const float sine[2] = {fmaf(l.y, h.x, l.x * h.y), fmaf(l.w, h.z, l.z * h.w)};
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const float own = v[2 * i + j], other = __shfl_xor_sync(~0u, own, 4);
                    const float turned = fmaf(own, cosine[j], (b.lane < 4 ? -other : other) * sine[j]);
                    v[2 * i + j] = b.lane < 8 ? turned : own;
                    if (is_query) v[2 * i + j] *= ATTENTION_SCALE;
                }
            }
        }
        if (is_query) {
            store_eight<CACHE_F16, 1>((u8*)b.p.queries + ((size_t)node * HEADS + row) * (HEAD_DIM * 2), b.lane, v);
            continue;
        }
        const size_t head = cache_index(b, layer, (row - HEADS) % KV_HEADS),
                     at = b.decoding() ? head * b.p.context + b.length : head * MAX_NODES + node;
        if (is_value)
            store_eight<VALUE_TYPE, 1>((b.decoding() ? b.p.values : b.p.pending_values) + at * VALUE_ROW, b.lane, v);
        else
            store_eight<KEY_TYPE, 1>((b.decoding() ? b.p.keys : b.p.pending_keys) + at * KEY_ROW, b.lane, v);
    }
}
