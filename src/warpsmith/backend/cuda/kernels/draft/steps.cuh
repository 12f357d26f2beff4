// What happens to the sums of a stage: the residual stream, the MLP's inner activation; and the embedding.
#pragma once
#include "draft/products.cuh"

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
        b.p.x_squares[threadIdx.x * SMS + b.sm] = square;
    }
}

// --- the embedding, in the file's own blocks ------------------------------------------------------------------------

enum EmbeddingType { EMBED_F32, EMBED_F16, EMBED_BF16, EMBED_Q8_0, EMBED_Q4_K, EMBED_Q5_K, EMBED_Q6_K };
__host__ __device__ constexpr size_t embedding_row_bytes() {
    return EMBEDDING_TYPE == EMBED_F32    ? HIDDEN * 4
           : EMBEDDING_TYPE <= EMBED_BF16 ? HIDDEN * 2
           : EMBEDDING_TYPE == EMBED_Q8_0 ? HIDDEN / 32 * 34
           : EMBEDDING_TYPE == EMBED_Q4_K ? HIDDEN / 256 * 144
           : EMBEDDING_TYPE == EMBED_Q5_K ? HIDDEN / 256 * 176
                                          : HIDDEN / 256 * 210;
}
__device__ __forceinline__ float half_at(const u8* at) { return unpack_half(at[0] | (u32)at[1] << 8).x; }
// Six bits each of a K-quant's twelve bytes: the scale, or the min, of a block of 32.
__device__ __forceinline__ int k_scale(const u8* packed, int block, bool min) {
    const u8* own = packed + (min ? 4 : 0);
    if (block < 4) return own[block] & 63;
    const int nibble = min ? packed[4 + block] >> 4 : packed[4 + block] & 15;
    return nibble | own[block - 4] >> 6 << 4;
}
__device__ __forceinline__ float embedding_value(const u8* row, int k) {
    if constexpr (EMBEDDING_TYPE == EMBED_F32) return ((const float*)row)[k];
    if constexpr (EMBEDDING_TYPE == EMBED_F16) return half_at(row + 2 * k);
    if constexpr (EMBEDDING_TYPE == EMBED_BF16) return bf16_low(row[2 * k] | (u32)row[2 * k + 1] << 8);
    if constexpr (EMBEDDING_TYPE == EMBED_Q8_0) {
        const u8* block = row + k / 32 * 34;
        return half_at(block) * (float)(signed char)block[2 + k % 32];
    }
    if constexpr (EMBEDDING_TYPE == EMBED_Q4_K || EMBEDDING_TYPE == EMBED_Q5_K) {
        constexpr int BYTES = EMBEDDING_TYPE == EMBED_Q4_K ? 144 : 176;
        const u8* block = row + k / 256 * BYTES;
        const int in = k % 256, sub = in / 32;
        const u8* quants = block + (EMBEDDING_TYPE == EMBED_Q4_K ? 16 : 48) + in / 64 * 32 + in % 32;
        int n = sub & 1 ? *quants >> 4 : *quants & 15;
        if (EMBEDDING_TYPE == EMBED_Q5_K) n |= (block[16 + in % 32] >> sub & 1) << 4;
        const float scaled = half_at(block) * (float)k_scale(block + 4, sub, false) * (float)n;
        return scaled - half_at(block + 2) * (float)k_scale(block + 4, sub, true);
    }
    const u8* block = row + k / 256 * 210;
    const int in = k % 256, part = in % 128 / 32, at = in % 32;
    const u8 *low = block + in / 128 * 64 + part % 2 * 32 + at, *high = block + 128 + in / 128 * 32 + at;
    const int n = ((part < 2 ? *low & 15 : *low >> 4) | (*high >> 2 * part & 3) << 4) - 32;
    return half_at(block + 208) * (float)(signed char)block[192 + in / 16] * (float)n;
}
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
