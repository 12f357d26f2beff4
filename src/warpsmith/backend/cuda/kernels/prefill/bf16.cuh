// BF16 weights of the packed stream as wgmma's register operand: all that depends on their type.
//
// A warp has 16 of the 64 rows of an operand: a unit of 16 rows, whose tile of 32 k is 1 KB, or two units of 8 rows
// with 512 bytes each. Sixteen bytes of a lane are the operand of one product of 16 k, or of two halves of rows (see
// pack.cu).
#pragma once
#include "prefill/async.cuh"

struct Bf16Weights {
    static constexpr int REGISTERS = 8;  // of a tile: two operands
    __host__ __device__ static constexpr int tile_bytes(bool narrow) { return narrow ? 512 : 1024; }

    // `load16(to, offset from the tile's first byte of this lane, which half)`.
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
};
