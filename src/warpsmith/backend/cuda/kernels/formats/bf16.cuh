// BF16: the 16 bytes a lane reads are an A operand. Sums run inside the mma over four chunks, then in a fixed order.
#pragma once
#include "formats/format.cuh"

struct Bf16 {
    static constexpr int NUMBER = 30;
    static constexpr bool QUANTISED = false;
    static __host__ __device__ constexpr int chunk_bytes(int rows) { return WARPS * rows * 64; }
    static __host__ __device__ constexpr int slot_chunks(int rows) { return 32 / rows; }
    static __host__ __device__ constexpr int registers(int rows) { return rows / 2; }
    static constexpr float LOWER = 1.0f;

    template <int ROWS>
    static __device__ __forceinline__ u32 load(u32 at, int warp, int lane, u32* w) {
        const u32 mine = at + warp * (64 * ROWS) + lane * 16;
#pragma unroll
        for (int i = 0; i < ROWS / 8; i++) {
            const uint4 v = load_shared16(mine + i * 512);
            w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
        }
        return w[registers(ROWS) - 1];
    }

    template <int TILES, int CHUNKS, class Each, class Done>
    static __device__ __forceinline__ void multiply(const u32* all, const uint4 (&x)[CHUNKS], Each each, Done done) {
        constexpr int BESIDE = smaller(2, TILES);  // row tiles side by side: enough to keep the tensor cores busy
#pragma unroll
        for (int t0 = 0; t0 < TILES; t0 += BESIDE) {
            float4 sum[BESIDE];
#pragma unroll
            for (int c0 = 0; c0 < CHUNKS; c0 += CHAIN) {
                float low[BESIDE][4] = {}, high[BESIDE][4] = {};
#pragma unroll
                for (int c = c0; c < smaller(c0 + CHAIN, CHUNKS); c++) {
#pragma unroll
                    for (int t = 0; t < BESIDE; t++) {
                        const u32* w = all + ((t0 + t) * CHUNKS + c) * registers(WIDE);
                        mma(low[t], w[0], w[1], w[2], w[3], x[c].x, x[c].y);
                        mma(high[t], w[4], w[5], w[6], w[7], x[c].z, x[c].w);
                    }
                    if (t0 + BESIDE >= TILES) done(c);
                }
#pragma unroll
                for (int t = 0; t < BESIDE; t++) {
                    const float4 chain = {low[t][0] + high[t][0], low[t][1] + high[t][1], low[t][2] + high[t][2],
                                          low[t][3] + high[t][3]};
                    sum[t] = c0 == 0 ? chain : add(sum[t], chain);
                }
            }
#pragma unroll
            for (int t = 0; t < BESIDE; t++) each(t0 + t, sum[t]);
        }
    }

    template <int WORDS>
    static __device__ __forceinline__ ChainSums chain(const u32* all, const u32 (*x)[WORDS], int chunks, int q) {
        float low[4] = {}, high[4] = {};
#pragma unroll
        for (int c = 0; c < CHAIN; c++) {
            if (c >= chunks) break;
            const u32* w = all + c * registers(NARROW);
            mma(low, w[0], w[1], w[2], w[3], x[c][0], x[c][1]);
            if (WORDS > ONE_NODE) mma(high, w[0], w[1], w[2], w[3], x[c][WORDS - 2], x[c][WORDS - 1]);
        }
        return {at_first<WORDS>(low, q), at_last(high)};
    }

    static __device__ __forceinline__ Eight widened(uint4 v) {
        return {{bf16_low(v.x), bf16_high(v.x), bf16_low(v.y), bf16_high(v.y)},
                {bf16_low(v.z), bf16_high(v.z), bf16_low(v.w), bf16_high(v.w)}};
    }
    static __device__ __forceinline__ Eight embed(const u8* chunk, int warp, int lane, int upper) {
        const uint4* fragment = (const uint4*)(chunk + warp * 64 * WIDE) + lane;
        const uint4 early = __ldg(fragment), late = __ldg(fragment + 32);
        return widened(upper ? uint4{early.y, early.w, late.y, late.w} : uint4{early.x, early.z, late.x, late.z});
    }
    static __device__ __forceinline__ Eight look_up(const u8* table, size_t at) {
        return widened(__ldg((const uint4*)(table + at * 2)));
    }

    static constexpr int PACKED = 8;
    static __device__ void pack(const Place& place, const u8* rows, long long at) {
        const int lane = place.row % 8 * 4 + place.quarter;
        const uint4 v = ((const uint4*)rows)[at / 8];
        u32* to = (u32*)(place.chunk + place.warp * 512 * place.halves + lane * 16);
        if (place.halves == 1) {  // the mma's upper eight rows are the same rows at the later four k
            *(uint4*)to = {v.x, v.z, v.y, v.w};
        } else {  // the mma's upper eight rows are the row tile's; the later four k go to a second mma
            const int upper = place.row / 8;
            to[upper] = v.x, to[upper + 2] = v.y;
            to[128 + upper] = v.z, to[128 + upper + 2] = v.w;
        }
    }
};
