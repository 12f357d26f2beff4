// The embedding in the file's own blocks.
//
// Given by the host: HIDDEN EMBEDDING_TYPE.
#pragma once
#include "common/ptx.cuh"

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
