// Products of flash attention on chips without wgmma, fp16 operands and f32 sums: a warp's 16 rows at a time, tiles
// where wgmma would find them (attention_flash.cu).
#pragma once
#include "prefill/async.cuh"

// 16 bytes of a row: blocks of 64 dimensions, in each of which a row's eight pieces are swapped.
template <int ROWS>
__device__ __forceinline__ const u8* piece_at(const u8* tile, int row, int piece) {
    return tile + piece / 8 * (ROWS * 128) + row * 128 + (piece % 8 ^ row % 8) * 16;
}
// d (16 rows from `row` on x KEYS) = queries * keys.
template <int ROWS, int KEYS, int DIMENSIONS>
__device__ __forceinline__ void mma_scores(float (&d)[KEYS / 8][4], const u8* queries, int row, const u8* keys) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) d[i / 4][i % 4] = 0.0f;
#pragma unroll
    for (int k = 0; k < DIMENSIONS / 16; k++) {
        const uint4 a = load_matrices(piece_at<ROWS>(queries, row + lane % 16, 2 * k + lane / 16));
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
            const int key = n * 16 + lane / 16 * 8 + lane % 8;
            const uint4 b = load_matrices(piece_at<KEYS>(keys, key, 2 * k + lane / 8 % 2));
            mma_half(d[2 * n], a, b.x, b.y);
            mma_half(d[2 * n + 1], a, b.z, b.w);
        }
    }
}
// d (16 rows x DIMENSIONS) += weights (registers) * values.
template <int KEYS, int DIMENSIONS>
__device__ __forceinline__ void mma_values(float (&d)[DIMENSIONS / 8][4], const u32 (&weights)[KEYS / 4],
                                           const u8* values) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) {
        const uint4 a = {weights[4 * k], weights[4 * k + 1], weights[4 * k + 2], weights[4 * k + 3]};
#pragma unroll
        for (int n = 0; n < DIMENSIONS / 16; n++) {
            const uint4 b = load_transposed(piece_at<KEYS>(values, k * 16 + lane % 16, 2 * n + lane / 16));
            mma_half(d[2 * n], a, b.x, b.y);
            mma_half(d[2 * n + 1], a, b.z, b.w);
        }
    }
}
