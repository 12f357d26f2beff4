// NEON with the matrix instructions besides: one multiplies two rows by two columns, eight weights deep.
#pragma once
#include "simd_neon.h"

namespace warpsmith {
namespace {

struct NeonI8mm : Neon {
    static constexpr int kTileColumns = 16;

    // Two quads of four rows each become two rows of eight weights, twice; `to` may be `quads`.
    static void pair_quads(const uint8_t* quads, int count, uint8_t* to) {
        for (int j = 0; j < count; j += 2, quads += 128, to += 128) {
            const W first = load_w(quads), second = load_w(quads + 64);
            WARPSMITH_UNROLL
            for (int i = 0; i < 4; i++) {
                const uint32x4_t a = vreinterpretq_u32_u8(first.v[i]), b = vreinterpretq_u32_u8(second.v[i]);
                vst1q_u8(to + 32 * i, vreinterpretq_u8_u32(vzip1q_u32(a, b)));
                vst1q_u8(to + 32 * i + 16, vreinterpretq_u8_u32(vzip2q_u32(a, b)));
            }
        }
    }

    // acc[c] gains the products of N paired quads with columns c < C of four, whose bytes lie side by side.
    template <int N, int C>
    static WARPSMITH_INLINE void tile(I (&acc)[C], const uint8_t* quads, const int8_t* x) {
        constexpr int pairs = (C + 1) / 2;  // of columns
        int32x4_t sums[8][pairs];           // two rows: column 0, column 1 of the one, then of the other
        WARPSMITH_UNROLL
        for (int i = 0; i < 8; i++) {
            WARPSMITH_UNROLL
            for (int p = 0; p < pairs; p++) sums[i][p] = vdupq_n_s32(0);
        }
        WARPSMITH_UNROLL
        for (int j = 0; j < N; j += 2) {
            const int32x4_t a = vreinterpretq_s32_s8(vld1q_s8(x + 16 * j)), b = vreinterpretq_s32_s8(vld1q_s8(x + 16 * j + 16));
            const int8x16_t columns[2] = {vreinterpretq_s8_s32(vzip1q_s32(a, b)), vreinterpretq_s8_s32(vzip2q_s32(a, b))};
            WARPSMITH_UNROLL
            for (int i = 0; i < 8; i++) {
                const int8x16_t rows = vreinterpretq_s8_u8(vld1q_u8(quads + 64 * j + 16 * i));
                WARPSMITH_UNROLL
                for (int p = 0; p < pairs; p++) sums[i][p] = vmmlaq_s32(sums[i][p], rows, columns[p]);
            }
        }
        WARPSMITH_UNROLL
        for (int c = 0; c < C; c++) {
            WARPSMITH_UNROLL
            for (int i = 0; i < 4; i++) {
                const int32x4_t low = sums[2 * i][c / 2], high = sums[2 * i + 1][c / 2];
                acc[c].v[i] = vaddq_s32(acc[c].v[i], c % 2 ? vuzp2q_s32(low, high) : vuzp1q_s32(low, high));
            }
        }
    }
};

}  // namespace
}  // namespace warpsmith
