// Weights of row tiles (formats/) as the register operand of a product in bf16: all that depends on their type.
//
// A warp has 16 of the 64 rows of an operand: a unit of 16 rows, or two units of 8. Of a tile of 32 k a lane has rows g
// and g + 8 at its eight k, which are two operands: the first four k, and the last. A chunk of 256 k has eight tiles;
// scales of blocks lie behind them. BF16 is the operand as it lies; else a weight is made in f32 as the file means it
// and rounded to bf16 once.
#pragma once
#include "prefill/async.cuh"
#include "prefill/widen.cuh"

enum RowType { ROWS_Q4_0 = 2, ROWS_Q8_0 = 8, ROWS_BF16 = 30 };  // their numbers in a file

// values(narrow), scales(narrow): bytes of a tile of a unit. Chunk: a lane's part of 256 k of a unit of 16 rows,
// straight from memory. SCALED: RAW words of a tile of either row make, with its scale, operands.
template <int TYPE>
struct RowWeights;
template <class Weights>
struct ScaledChunk;

template <>
struct RowWeights<ROWS_BF16> {
    static constexpr bool SCALED = false;
    __host__ __device__ static constexpr int values(bool narrow) { return narrow ? 512 : 1024; }
    __host__ __device__ static constexpr int scales(bool) { return 0; }

    // `load16(to, offset from the tile's first byte of this lane, which half of the rows)`.
    template <bool NARROW_UNITS, class Load>
    __device__ static __forceinline__ void load(u32* d, Load load16) {
        if constexpr (NARROW_UNITS) {
            u32 p[4], q[4];
            load16(p, 0, 0), load16(q, 0, 1);
            d[0] = p[0], d[1] = q[0], d[2] = p[2], d[3] = q[2], d[4] = p[1], d[5] = q[1], d[6] = p[3], d[7] = q[3];
        } else {
            load16(d, 0, 0), load16(d + 4, 512, 0);
        }
    }

    struct Chunk {
        uint4 w[8][2];
        __device__ __forceinline__ void load(const u8* from, int lane) {
#pragma unroll
            for (int i = 0; i < 16; i++) w[i / 2][i % 2] = __ldcs((const uint4*)from + i * 32 + lane);
        }
        __device__ __forceinline__ void operands(u32 (&d)[8], int tile) const {
            const uint4 early = w[tile][0], late = w[tile][1];
            d[0] = early.x, d[1] = early.y, d[2] = early.z, d[3] = early.w;
            d[4] = late.x, d[5] = late.y, d[6] = late.z, d[7] = late.w;
        }
    };
};

template <>
struct RowWeights<ROWS_Q8_0> {
    static constexpr bool SCALED = true;
    static constexpr int RAW = 2;
    typedef ScaledChunk<RowWeights> Chunk;
    __host__ __device__ static constexpr int values(bool narrow) { return narrow ? 256 : 512; }
    __host__ __device__ static constexpr int scales(bool narrow) { return narrow ? 16 : 32; }

    __device__ static __forceinline__ void operands(u32* d, const u32 (&raw)[2][RAW], float2 scale) {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const float by = row ? scale.y : scale.x, less = by * -1152.0f;  // fp16 1024 + (value + 128)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                d[i * 4 + row] = widened(__byte_perm(raw[row][i], 0x64646464u, 0x4140), by, less);
                d[i * 4 + row + 2] = widened(__byte_perm(raw[row][i], 0x64646464u, 0x4342), by, less);
            }
        }
    }
};

template <>
struct RowWeights<ROWS_Q4_0> {
    static constexpr bool SCALED = true;
    static constexpr int RAW = 1;
    typedef ScaledChunk<RowWeights> Chunk;
    __host__ __device__ static constexpr int values(bool narrow) { return narrow ? 128 : 256; }
    __host__ __device__ static constexpr int scales(bool narrow) { return narrow ? 16 : 32; }

    __device__ static __forceinline__ void operands(u32* d, const u32 (&raw)[2][RAW], float2 scale) {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const float by = (row ? scale.y : scale.x) * 0x1p24f, less = by * -0x1p-21f;  // fp16 (value + 8) 2^-24
#pragma unroll
            for (int i = 0; i < 4; i++)
                d[i / 2 * 4 + i % 2 * 2 + row] = widened(raw[row][0] >> 4 * i & 0x000f000fu, by, less);
        }
    }
};

template <class Weights>
struct ScaledChunk {
    static constexpr int RAW = Weights::RAW;
    u32 raw[8][2][RAW], scale[8];
    __device__ __forceinline__ void load(const u8* from, int lane) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const u32* mine = (const u32*)(from + i * Weights::values(false)) + lane * 2 * RAW;
            if constexpr (RAW == 2) {
                const uint4 v = __ldcs((const uint4*)mine);
                raw[i][0][0] = v.x, raw[i][0][1] = v.y, raw[i][1][0] = v.z, raw[i][1][1] = v.w;
            } else {
                const uint2 v = __ldcs((const uint2*)mine);
                raw[i][0][0] = v.x, raw[i][1][0] = v.y;
            }
            scale[i] = __ldcs((const u32*)(from + 8 * Weights::values(false)) + i * 8 + lane / 4);
        }
    }
    __device__ __forceinline__ void operands(u32 (&d)[8], int tile) const {
        Weights::operands(d, raw[tile], unpack_half(scale[tile]));
    }
};

// A tile of 16 rows whose units have values and scales at shared addresses: of this lane's rows `apart` bytes apart.
template <class Weights, bool NARROW_UNITS>
__device__ __forceinline__ void load_scaled(u32* d, u32 values, u32 scales, u32 apart) {
    constexpr int RAW = Weights::RAW;
    const u32 lane = threadIdx.x % 32;
    u32 raw[2][RAW];
    float2 scale;
    if constexpr (NARROW_UNITS) {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const u32 at = values + row * apart + lane * (4 * RAW);
            if constexpr (RAW == 2) {
                const uint2 v = load_shared8(at);
                raw[row][0] = v.x, raw[row][1] = v.y;
            } else {
                raw[row][0] = load_shared4(at);
            }
        }
        const u32 at = scales + lane / 4 * 2;
        scale = unpack_half(load_shared2(at) | load_shared2(at + apart) << 16);
    } else {
        if constexpr (RAW == 2) {
            const uint4 v = load_shared16(values + lane * 16);
            raw[0][0] = v.x, raw[0][1] = v.y, raw[1][0] = v.z, raw[1][1] = v.w;
        } else {
            const uint2 v = load_shared8(values + lane * 8);
            raw[0][0] = v.x, raw[1][0] = v.y;
        }
        scale = unpack_half(load_shared4(scales + lane / 4 * 4));
    }
    Weights::operands(d, raw, scale);
}
