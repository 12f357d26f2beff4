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

// Eight rows of the projection, a multiple of 8: asked for, and taken.
struct Eight {
    const Projection& sums;
    const int node;
    const Projection::Place place;
    Projection::Asked low, high;
    __device__ __forceinline__ Eight(const Projection& from, int of, int row)
        : sums(from), node(of), place(from.place(row)) {
        sums.ask(low, place, node), sums.ask(high, place, node, 4);
    }
    __device__ __forceinline__ void take(float (&v)[8]) {
        const float4 a = sums.total(low, place, node), c = sums.total(high, place, node, 4);
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = c.x, v[5] = c.y, v[6] = c.z, v[7] = c.w;
    }
};

// What a row is multiplied with, besides its own norm, and how it is turned: nothing of it depends on the projection.
// Pairs (j, j + 32): lanes 0..3 hold the first of a pair, lanes 4..7 the second.
struct RowFactors {
    float norm[8], cosine[8], sine[8];
    __device__ __forceinline__ RowFactors(const Block& b, int position, bool is_query) {
        const float4* low = (const float4*)(b.p.rope + (position & 63) * 32 + (b.lane & 3) * 8);
        const float4* high = (const float4*)(b.p.rope + (64 + (position >> 6)) * 32 + (b.lane & 3) * 8);
        const float4* weights = (const float4*)(b.vectors + (is_query ? Q_NORM_AT : K_NORM_AT)) + b.lane * 2;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float4 w = __ldg(weights + i);
            norm[4 * i] = w.x, norm[4 * i + 1] = w.y, norm[4 * i + 2] = w.z, norm[4 * i + 3] = w.w;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float4 l = __ldg(low + i), h = __ldg(high + i);
            cosine[2 * i] = fmaf(l.x, h.x, -(l.y * h.y)), cosine[2 * i + 1] = fmaf(l.z, h.z, -(l.w * h.w));
            sine[2 * i] = fmaf(l.y, h.x, l.x * h.y), sine[2 * i + 1] = fmaf(l.w, h.z, l.z * h.w);
        }
    }
};

// Row `row` of a node's, HEADS queries, then keys, then values: a lane has eight dimensions. Factors are fetched while
// sums come.
__device__ __forceinline__ void make_row(const Block& b, const Projection& sums, int node, int row, float (&v)[8]) {
    const bool is_query = row < HEADS, is_value = row >= HEADS + KV_HEADS;
    const int from = is_query   ? row * 2 * HEAD_DIM
                     : is_value ? VALUES_AT + (row - HEADS - KV_HEADS) * HEAD_DIM
                                : KEYS_AT + (row - HEADS) * HEAD_DIM;
    Eight eight(sums, node, from + b.lane * 8);
    const RowFactors by(b, uniform(node_position(b, node)), is_query);
    eight.take(v);
    if (is_value) {
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = fminf(fmaxf(v[j], -LARGEST_HALF), LARGEST_HALF);
        return;
    }
    float square = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) square = fmaf(v[j], v[j], square);
    const float scale = inverse_root(warp_sum(square) / HEAD_DIM + EPS);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] *= scale * by.norm[j];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float own = v[j], other = __shfl_xor_sync(~0u, own, 4);
        const float turned = fmaf(own, by.cosine[j], (b.lane < 4 ? -other : other) * by.sine[j]);
        v[j] = b.lane < 8 ? turned : own;
        if (is_query) v[j] *= ATTENTION_SCALE;
    }
}

// A row of keys or values to where it is kept.
__device__ __forceinline__ void keep_row(const Block& b, int layer, int node, int row, const float (&v)[8]) {
    const size_t head = cache_index(b, layer, (row - HEADS) % KV_HEADS),
                 at = b.decoding() ? head * b.p.context + b.length : head * MAX_NODES + b.place(node);
    if (row >= HEADS + KV_HEADS)
        store_eight<VALUE_TYPE, 1>((b.decoding() ? b.p.values : b.p.pending_values) + at * VALUE_ROW, b.lane, v);
    else
        store_eight<KEY_TYPE, 1>((b.decoding() ? b.p.keys : b.p.pending_keys) + at * KEY_ROW, b.lane, v);
}
