// Rows of q, k and v as attention wants them: normed and rotated, in fp16.
//
// Maths: v / rms(v) * weight, then RoPE on the first 64 dimensions; queries times the scale of scores. Values are as
// they are. One node's rows are made by the items that use them. A tree's are made once, a warp a row over all SMs, and
// published. Bytes: 1 KB of f32 read and 512 of fp16 written a row.
#pragma once
#include "forward/block.cuh"

static_assert(HEAD_DIM == 256 && ROTARY == 64, "a lane has eight dimensions; the rotated ones are in lanes 0 to 7");
constexpr float ATTENTION_SCALE = 0.0625f * 1.44269504f;  // 256 ** -0.5, and scores are to base 2
constexpr float LARGEST_HALF = 65504.0f;

// One warp makes a row of a node, eight dimensions a lane: rows are all query heads, then all keys, then all values.
// Normed and rotated, except for a value, which is kept finite: in a tree it is multiplied by other nodes' zeros.
__device__ __forceinline__ uint4 make_row(const Block& b, int node, int row, const float* vectors) {
    const bool is_query = row < HEADS, is_value = row >= HEADS + KV_HEADS;
    const int position = b.length + (NODES == 1 ? 0 : b.s.depth[node]);
    // pairs (j, j + 32): lanes 0..3 hold the first of a pair, lanes 4..7 the second
    const float4* low = (const float4*)(b.p.rope + (position & 63) * 32 + (b.lane & 3) * 8);
    const float4* high = (const float4*)(b.p.rope + (64 + (position >> 6)) * 32 + (b.lane & 3) * 8);
    float4 rope_low[4], rope_high[4];  // asked for now, used once the row is here
#pragma unroll
    for (int i = 0; i < 4; i++) rope_low[i] = __ldg(low + i), rope_high[i] = __ldg(high + i);
    const float4* norm =
        (const float4*)(vectors + (is_query ? ATTENTION_MIX_Q_NORM : ATTENTION_MIX_K_NORM)) + b.lane * 2;
    const float4 w0 = __ldg(norm), w1 = __ldg(norm + 1);
    const u32* from = b.words(ATTENTION_PHASE, node, ATTENTION_IN_AT) + b.lane * 8 +
                      (is_query ? row * 2 * HEAD_DIM : 2 * ATTENTION_DIM + (row - HEADS) * HEAD_DIM);
    uint4 got[2];
    Watchdog dog;
    do {
        got[0] = load16(from), got[1] = load16(from + 4);
        dog.check();
    } while (!everywhere(came16(got[0]) & came16(got[1])));
    const float4 a = floats(got[0]), c = floats(got[1]);
    float v[8] = {a.x, a.y, a.z, a.w, c.x, c.y, c.z, c.w};
    if (is_value) {
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = fminf(fmaxf(v[j], -LARGEST_HALF), LARGEST_HALF);
    } else {
        float cosine[8], sine[8];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float4 l = rope_low[i], h = rope_high[i];
            cosine[2 * i] = fmaf(l.x, h.x, -(l.y * h.y)), sine[2 * i] = fmaf(l.y, h.x, l.x * h.y);
            cosine[2 * i + 1] = fmaf(l.z, h.z, -(l.w * h.w)), sine[2 * i + 1] = fmaf(l.w, h.z, l.z * h.w);
        }
        float square = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) square = fmaf(v[j], v[j], square);
        const float scale = inverse_root(fmaf(warp_sum(square), 1.0f / HEAD_DIM, EPS));
        v[0] *= scale * w0.x, v[1] *= scale * w0.y, v[2] *= scale * w0.z, v[3] *= scale * w0.w;
        v[4] *= scale * w1.x, v[5] *= scale * w1.y, v[6] *= scale * w1.z, v[7] *= scale * w1.w;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float other = __shfl_xor_sync(~0u, v[j], 4);
            if (b.lane < 8) v[j] = fmaf(v[j], cosine[j], b.lane < 4 ? -(other * sine[j]) : other * sine[j]);
            if (is_query) v[j] *= ATTENTION_SCALE;
        }
    }
    return {pack_half(v[0], v[1]), pack_half(v[2], v[3]), pack_half(v[4], v[5]), pack_half(v[6], v[7])};
}

// A row of a drafted or decoded key or value, where it is kept.
__device__ __forceinline__ void keep_row(const Block& b, int index, int node, int row, uint4 packed) {
    const bool is_value = row >= HEADS + KV_HEADS;
    const size_t head_at = (size_t)index * KV_HEADS + (row - HEADS) % KV_HEADS;
    u32* to = b.decoding()
                  ? (is_value ? b.p.values : b.p.keys) + (head_at * b.p.context + b.length) * (HEAD_DIM / 2)
                  : (is_value ? b.p.pending_values : b.p.pending_keys) + (head_at * MAX_NODES + node) * (HEAD_DIM / 2);
    *(uint4*)(to + b.lane * 4) = packed;
}

// Step of a tree: its rows, a warp each.
__device__ __forceinline__ void attention_rows(Block& b, int index, const float* vectors) {
#pragma unroll 1
    for (int task = b.warp * SMS + b.sm; task < b.nodes * ATTENTION_ROWS; task += WARPS * SMS) {
        const int node = task / ATTENTION_ROWS, row = task % ATTENTION_ROWS;
        const uint4 packed = make_row(b, node, row, vectors);
        u32* to = b.words(ATTENTION_PHASE, node, ATTENTION_ROWS_AT) + row * (HEAD_DIM / 2) + b.lane * 4;
        publish16(to, b.other(ATTENTION_PHASE), packed);
        if (row >= HEADS) keep_row(b, index, node, row, packed);
    }
}
