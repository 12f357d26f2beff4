// Q4_0: blocks of 32 weights, half a byte each and an fp16 scale. A lane's eight k of a row are one word; 16 rows are
// two such words; a chunk's scales lie behind its weights.
//
// Four bits n are the value + 8. A word holds a lane's k as pairs: bits 4i .. 4i+3 are k = 2i, and 16 more are k = 2i
// + 1. So a shift and a mask make two bf16, each n * 2^-133 (below 2^-125 bf16 is linear), as with bytes (q8_0.cuh):
// activations are multiplied by 2^96, sums by 2^37, and an mma starts from -8 times the sum of its activations.
#pragma once
#include "formats/format.cuh"

struct Q4_0 {
    static constexpr int NUMBER = 2;
    static constexpr bool QUANTISED = true;
    static __host__ __device__ constexpr int chunk_bytes(int rows) { return WARPS * rows * 18; }
    static __host__ __device__ constexpr int slot_chunks(int rows) { return 64 / rows; }
    static __host__ __device__ constexpr int registers(int rows) {
        return rows / 8 + 1;
    }  // words, then the rows' scales

    static constexpr u32 RAISE = 0x6f806f80;         // bf16 2^96, twice
    static constexpr float LOWER = 137438953472.0f;  // 2^37
    static constexpr u32 MINUS_8 = 0x80088008;       // bf16 -8 * 2^-133, twice
    static __device__ __forceinline__ u32 raised(u32 x) { return multiply_bf16(x, RAISE); }
    // Weights 2i and 2i + 1 of a word as bf16.
    static __device__ __forceinline__ u32 pair(u32 w, int i) { return w >> 4 * i & 0x000f000f; }

    template <int ROWS>
    static __device__ __forceinline__ u32 load(u32 at, int warp, int lane, u32* w) {
        const u32 mine = at + (warp * 32 + lane) * (ROWS / 2);
        const u32 scales = at + WARPS * 16 * ROWS + (warp * 8 + lane / 4) * (ROWS / 4);
        if constexpr (ROWS == WIDE) {
            const uint2 v = load_shared8(mine);
            w[0] = v.x, w[1] = v.y, w[2] = load_shared4(scales);
        } else {
            w[0] = load_shared4(mine), w[1] = load_shared2(scales);
        }
        return w[registers(ROWS) - 1];
    }

    template <int TILES, int CHUNKS, class Each, class Done>
    static __device__ __forceinline__ void multiply(const u32* all, const uint4 (&x)[CHUNKS], Each each, Done done) {
        float4 sum[TILES] = {};
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const uint4 v = {raised(x[c].x), raised(x[c].y), raised(x[c].z), raised(x[c].w)};
            float start[4] = {};
            mma(start, MINUS_8, MINUS_8, MINUS_8, MINUS_8, v.x, v.y);
            mma(start, MINUS_8, MINUS_8, MINUS_8, MINUS_8, v.z, v.w);
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                const u32* w = all + (t * CHUNKS + c) * registers(WIDE);
                float part[4] = {start[0], start[1], start[2], start[3]};
                mma(part, pair(w[0], 0), pair(w[1], 0), pair(w[0], 1), pair(w[1], 1), v.x, v.y);
                mma(part, pair(w[0], 2), pair(w[1], 2), pair(w[0], 3), pair(w[1], 3), v.z, v.w);
                const float2 scale = unpack_half(w[2]);
                sum[t] = {fmaf(scale.x, part[0], sum[t].x), fmaf(scale.x, part[1], sum[t].y),
                          fmaf(scale.y, part[2], sum[t].z), fmaf(scale.y, part[3], sum[t].w)};
            }
            done(c);
        }
#pragma unroll
        for (int t = 0; t < TILES; t++) each(t, scaled(sum[t], LOWER));
    }

    template <int WORDS>
    static __device__ __forceinline__ ChainSums chain(const u32* all, const u32 (*x)[WORDS], int chunks, int q) {
        ChainSums sums = {};
#pragma unroll
        for (int c = 0; c < CHAIN; c++) {
            if (c >= chunks) break;
            const u32* w = all + c * registers(NARROW);
            const float scale = unpack_half(w[1]).x;
            const auto product = [&](u32 x0, u32 x1, float (&part)[4]) {
                mma(part, MINUS_8, MINUS_8, MINUS_8, MINUS_8, x0, x1);
                mma(part, pair(w[0], 0), pair(w[0], 2), pair(w[0], 1), pair(w[0], 3), x0, x1);
            };
            float one[4] = {}, two[4] = {};
            product(raised(x[c][0]), raised(x[c][1]), one);
            const float2 first = at_first<WORDS>(one, q);
            sums.first = {fmaf(scale, first.x, sums.first.x), fmaf(scale, first.y, sums.first.y)};
            if (WORDS > ONE_NODE) {
                product(raised(x[c][WORDS - 2]), raised(x[c][WORDS - 1]), two);
                const float2 last = at_last(two);
                sums.last = {fmaf(scale, last.x, sums.last.x), fmaf(scale, last.y, sums.last.y)};
            }
        }
        return sums;
    }

    // A word as in the stream, and an fp16 scale.
    static __device__ __forceinline__ Eight widened(u32 word, u32 scale) {
        const float d = unpack_half(scale).x;
        const auto value = [&](int k) { return (float)((int)(word >> (k / 2 * 4 + k % 2 * 16) & 15) - 8) * d; };
        return {{value(0), value(1), value(2), value(3)}, {value(4), value(5), value(6), value(7)}};
    }
    static __device__ __forceinline__ Eight embed(const u8* chunk, int warp, int lane, int upper) {
        const u32 word = __ldg((const u32*)(chunk + (warp * 32 + lane) * (WIDE / 2)) + upper);
        const u32 scales = __ldg((const u32*)(chunk + WARPS * 16 * WIDE) + warp * 8 + lane / 4);
        return widened(word, upper ? scales >> 16 : scales);
    }
    // Eight weights of a block of the file from k on: bytes whose low halves are weights 0 to 15, the high ones 16
    // to 31.
    static __device__ __forceinline__ u32 word_of(const u16* block, int k) {
        const u16* from = block + 1 + k % 16 / 2;
        const u32 low = from[0] | (u32)from[1] << 16, high = from[2] | (u32)from[3] << 16;
        const int shift = k < 16 ? 0 : 4;
        u32 word = 0;
#pragma unroll
        for (int i = 0; i < 8; i++)
            word |= ((i < 4 ? low : high) >> (i % 4 * 8 + shift) & 15) << (i / 2 * 4 + i % 2 * 16);
        return word;
    }
    static __device__ __forceinline__ Eight look_up(const u8* table, size_t at) {
        const u16* block = (const u16*)(table + at / 32 * 18);
        return widened(word_of(block, at % 32), block[0]);
    }

    static constexpr int PACKED = 32;
    static __device__ void pack(const Place& place, const u8* rows, long long at) {
        const int upper = place.row / 8;
        const u16* block = (const u16*)(rows + at / 32 * 18);
        u32* to = (u32*)(place.chunk + place.warp * 128 * place.halves) + place.row % 8 * 4 * place.halves + upper;
#pragma unroll
        for (int quarter = 0; quarter < 4; quarter++) to[quarter * place.halves] = word_of(block, quarter * 8);
        u16* scales = (u16*)(place.chunk + WARPS * 128 * place.halves) + place.warp * 8 * place.halves;
        scales[place.row % 8 * place.halves + upper] = block[0];
    }
};
