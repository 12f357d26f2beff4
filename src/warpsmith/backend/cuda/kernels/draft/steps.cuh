// What happens to the sums of a stage: the residual stream, the MLP's inner activation; and the embedding.
#pragma once
#include "draft/products.cuh"
#include "large/embedding.cuh"

// --- the residual stream: every SM has some pieces of 8 rows
// ----------------------------------------------------------

// Publish what the next projection reads: rows times the next norm's weight, and this SM's sum of squares. `update`
// gives four rows' new values for a node, from the old ones.
template <class Update>
__device__ __forceinline__ void update_residual(Block& b, const float* norm, Update update) {
    const int first = first_of(PIECES, b.sm), pieces = first_of(PIECES, b.sm + 1) - first, count = pieces * b.nodes * 2;
#pragma unroll 1
    for (int at = 0; at < count; at += CONSUMERS) {
        const int i = at + threadIdx.x, node = i / 2 / pieces, piece = i / 2 - node * pieces,
                  row = piece * 8 + (i & 1) * 4;
        const bool live = i < count;
        float square = 0.0f;
        if (live) {
            const int k = first * 8 + row;
            const float4 w = __ldg((const float4*)(norm + k));
            float* own = &b.s.residual[node][row];
            const float4 x = update(*(const float4*)own, node, k);
            *(float4*)own = x;
            *(uint2*)(b.p.x + activation_at(node, k)) = {pack_bf16(x.x * w.x, x.y * w.y),
                                                         pack_bf16(x.z * w.z, x.w * w.w)};
            square = fmaf(x.x, x.x, fmaf(x.y, x.y, fmaf(x.z, x.z, x.w * x.w)));
        }
        square += __shfl_xor_sync(~0u, square, 1);
        if (live && (i & 1) == 0) b.s.squares[piece][node] = square;
    }
    b.sync();
    if (threadIdx.x < b.nodes) {
        float square = 0.0f;
#pragma unroll 1
        for (int piece = 0; piece < pieces; piece++) square += b.s.squares[piece][threadIdx.x];
        b.p.x_squares[b.sm * NODES + threadIdx.x] = square;
    }
}

// --- the embedding ------------------------------------------------------------------------

__device__ __forceinline__ void embed(Block& b) {
    update_residual(b, b.p.vectors + MIX_NORM, [&](float4, int node, int k) -> float4 {
        const u8* row = b.p.embedding + b.s.token[node] * embedding_row_bytes();
        return {embedding_value(row, k), embedding_value(row, k + 1), embedding_value(row, k + 2),
                embedding_value(row, k + 3)};
    });
}

// --- the MLP's inner activation: silu(gate) * up. Rows come eight of the gate, then their eight of up
// ------------------

__device__ __forceinline__ void activate(Block& b) {
    const Sums<HIDDEN_GROUPS> sums(b, MLP_ROWS);
    const int first = first_of(FFN / 8, b.sm), pieces = first_of(FFN / 8, b.sm + 1) - first,
              count = pieces * b.nodes * 2;
#pragma unroll 2
    for (int i = threadIdx.x; i < count; i += CONSUMERS) {
        const int node = i / 2 / pieces, piece = first + i / 2 - node * pieces, in = (i & 1) * 4;
        const float4 gate = sums.at(node, piece * 16 + in), up = sums.at(node, piece * 16 + 8 + in);
        *(uint2*)(b.p.h + activation_at(node, piece * 8 + in)) = {pack_bf16(silu(gate.x) * up.x, silu(gate.y) * up.y),
                                                                  pack_bf16(silu(gate.z) * up.z, silu(gate.w) * up.w)};
    }
}
