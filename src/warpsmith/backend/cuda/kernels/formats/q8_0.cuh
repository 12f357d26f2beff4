// Q8_0: the file's blocks, 32 bytes and an fp16 scale. A lane's bytes are its eight k of a row; 16 rows are two such
// halves; a chunk's scales lie behind its bytes.
//
// A byte b is the value + 128. As the low byte of a bf16 it is b * 2^-133: below 2^-125 bf16 is linear, subnormal or
// not. So widening is one byte permutation for two values. Activations are multiplied by 2^96, the sums by 2^37, and an
// mma starts from -128 times the sum of its activations, which is the same for every row. All of that is exact but for
// the mma's own sums. A chunk's sum is then multiplied by its row's scale and added to the others in order.
#pragma once
#include "formats/format.cuh"

struct Q8_0 {
    static constexpr int NUMBER = 8;
    static constexpr bool QUANTISED = true;
    static __host__ __device__ constexpr int chunk_bytes(int rows) { return WARPS * rows * 34; }
    static __host__ __device__ constexpr int slot_chunks(int rows) { return 64 / rows; }
    static __host__ __device__ constexpr int registers(int rows) {
        return rows / 4 + 1;
    }  // bytes, then the rows' scales

    static constexpr u32 RAISE = 0x6f806f80;         // bf16 2^96, twice
    static constexpr float LOWER = 137438953472.0f;  // 2^37
    static constexpr u32 MINUS_128 = 0x80808080;     // bf16 -128 * 2^-133, twice
    static __device__ __forceinline__ u32 raised(u32 x) { return multiply_bf16(x, RAISE); }
    // Two bytes as bf16, the earlier in the lower half.
    static __device__ __forceinline__ u32 early_bytes(u32 w) { return __byte_perm(w, 0, 0x4140); }
    static __device__ __forceinline__ u32 late_bytes(u32 w) { return __byte_perm(w, 0, 0x4342); }

    template <int ROWS>
    static __device__ __forceinline__ u32 load(u32 at, int warp, int lane, u32* w) {
        const u32 mine = at + (warp * 32 + lane) * ROWS,
                  scales = at + WARPS * 32 * ROWS + (warp * 8 + lane / 4) * (ROWS / 4);
        if constexpr (ROWS == WIDE) {
            const uint4 v = load_shared16(mine);
            w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w, w[4] = load_shared4(scales);
        } else {
            const uint2 v = load_shared8(mine);
            w[0] = v.x, w[1] = v.y, w[2] = load_shared2(scales);
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
            mma(start, MINUS_128, MINUS_128, MINUS_128, MINUS_128, v.x, v.y);
            mma(start, MINUS_128, MINUS_128, MINUS_128, MINUS_128, v.z, v.w);
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                const u32* w = all + (t * CHUNKS + c) * registers(WIDE);
                float part[4] = {start[0], start[1], start[2], start[3]};
                mma(part, early_bytes(w[0]), early_bytes(w[2]), late_bytes(w[0]), late_bytes(w[2]), v.x, v.y);
                mma(part, early_bytes(w[1]), early_bytes(w[3]), late_bytes(w[1]), late_bytes(w[3]), v.z, v.w);
                const float2 scale = unpack_half(w[4]);
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
            const float scale = unpack_half(w[2]).x;
            const auto product = [&](u32 x0, u32 x1, float (&part)[4]) {
                mma(part, MINUS_128, MINUS_128, MINUS_128, MINUS_128, x0, x1);
                mma(part, early_bytes(w[0]), early_bytes(w[1]), late_bytes(w[0]), late_bytes(w[1]), x0, x1);
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

    // Bytes as in the stream, and an fp16 scale.
    static __device__ __forceinline__ Eight widened(u32 early, u32 late, u32 scale) {
        const auto four = [&](u32 w) -> float4 {
            return {(float)((int)(w & 255) - 128), (float)((int)(w >> 8 & 255) - 128),
                    (float)((int)(w >> 16 & 255) - 128), (float)((int)(w >> 24) - 128)};
        };
        const float d = unpack_half(scale).x;
        return {scaled(four(early), d), scaled(four(late), d)};
    }
    static __device__ __forceinline__ Eight embed(const u8* chunk, int warp, int lane, int upper) {
        const uint2 v = __ldg((const uint2*)(chunk + (warp * 32 + lane) * WIDE) + upper);
        const u32 scales = __ldg((const u32*)(chunk + WARPS * 32 * WIDE) + warp * 8 + lane / 4);
        return widened(v.x, v.y, upper ? scales >> 16 : scales);
    }
    static __device__ __forceinline__ Eight look_up(const u8* table, size_t at) {
        const u16* block = (const u16*)(table + at / 32 * 34);
        const u16* v = block + 1 + at % 32 / 2;
        return widened((__ldg(v) | __ldg(v + 1) << 16) ^ 0x80808080, (__ldg(v + 2) | __ldg(v + 3) << 16) ^ 0x80808080,
                       __ldg(block));
    }

    static constexpr int PACKED = 32;
    static __device__ void pack(const Place& place, const u8* rows, long long at) {
        const int upper = place.row / 8;
        const u16* block = (const u16*)(rows + at / 32 * 34);
        u8* to = place.chunk + place.warp * 256 * place.halves + place.row % 8 * 4 * 8 * place.halves + upper * 8;
#pragma unroll
        for (int quarter = 0; quarter < 4; quarter++) {
            const u16* v = block + 1 + quarter * 4;
            *(uint2*)(to + quarter * 8 * place.halves) = {(v[0] | (u32)v[1] << 16) ^ 0x80808080u,
                                                          (v[2] | (u32)v[3] << 16) ^ 0x80808080u};
        }
        u16* scales = (u16*)(place.chunk + WARPS * 256 * place.halves) + place.warp * 8 * place.halves;
        scales[place.row % 8 * place.halves + upper] = block[0];
    }
};
