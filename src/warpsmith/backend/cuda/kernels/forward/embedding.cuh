// The beginning of a forward pass: the residual stream starts as the token's embedding, exactly as the file has it.
//
// Tied: the table is the LM head's own stream, row `id` being a row of row tile id / 16. Else it is a table of its own,
// the file's rows as they are.
#pragma once
#include "forward/matmul.cuh"

// Eight values of a row from k on, a multiple of 8.
__device__ __forceinline__ Eight embedding_piece(const Block& b, int id, int k) {
    if constexpr (TIED) {
        constexpr int CHUNKS = chunks_of(HIDDEN), CHUNK_BYTES = HeadFormat::chunk_bytes(WIDE);
        const int tile = id / WIDE, sm = owner_of(HEAD_TILES, tile), lane = id % 8 * 4 + k % 32 / 8,
                  upper = id % WIDE / 8;
        const int warp = k / (CHUNKS * 32), chunk = k % (CHUNKS * 32) / 32;
        const size_t before = (size_t)((tile - first_of(HEAD_TILES, sm)) * CHUNKS + chunk) * CHUNK_BYTES;
        return HeadFormat::embed(b.p.stream + b.p.head_start[sm] + before, warp, lane, upper);
    }
    return EmbeddingFormat::look_up(b.p.embedding, (size_t)id * HIDDEN + k);
}

__device__ __forceinline__ void embed(Block& b, const float* norm) {
    const OwnTiles own(b.sm);
#pragma unroll 1
    for (int item = threadIdx.x; item < own.count * b.nodes; item += CONSUMERS) {
        const int tile = item / b.nodes, token = item % b.nodes, k = (own.first + tile) * NARROW;
        const float4 n0 = __ldg((const float4*)(norm + k)), n1 = __ldg((const float4*)(norm + k) + 1);
        const Eight row = embedding_piece(b, b.s.token[token], k);
        const float4 x0 = row.low, x1 = row.high;
        ((float4*)b.s.residual[tile][token])[0] = x0;
        ((float4*)b.s.residual[tile][token])[1] = x1;
        u32* to = b.value<Residual>(X_PHASE, token, X_VALUES_AT, k);
        publish8(to, b.other(X_PHASE), pack_bf16(x0.x * n0.x, x0.y * n0.y), pack_bf16(x0.z * n0.z, x0.w * n0.w));
        publish8(to + 2, b.other(X_PHASE), pack_bf16(x1.x * n1.x, x1.y * n1.y), pack_bf16(x1.z * n1.z, x1.w * n1.w));
        const float low = fmaf(x0.x, x0.x, fmaf(x0.y, x0.y, fmaf(x0.z, x0.z, x0.w * x0.w)));
        const float high = fmaf(x1.x, x1.x, fmaf(x1.y, x1.y, fmaf(x1.z, x1.z, x1.w * x1.w)));
        publish4(b.square<Residual>(X_PHASE, token, X_SQUARES_AT, own.first + tile), b.other(X_PHASE),
                 __float_as_uint(low + high));
    }
}
