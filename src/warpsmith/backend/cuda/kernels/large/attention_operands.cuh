// Keys and values on their way from a cache's rows to operands of products, for every way to keep them.
//
// Scores: 16 queries x 8 keys x 16 dimensions a product, a warp 8 keys of a chunk. Lane 4 g + q has key g of its warp:
// eight times 8 dimensions, straight from memory. Sums: 16 queries x 8 dimensions x 16 keys, a warp 32 dimensions,
// which are one block. Its lane has keys 2 q, 2 q + 1, 2 q + 8, 2 q + 9 of every 16, and four dimensions of them, from
// shared memory.
#pragma once
#include "large/shape.cuh"

// --- keys -----------------------------------------------------------------------------------------------------------

// A lane's part of a key as it was loaded.
template <int TYPE>
struct KeyWords;

template <>
struct KeyWords<CACHE_F16> {
    uint4 w[8];

    __device__ __forceinline__ void load(const u8* row, int q) {
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] = __ldcg((const uint4*)row + q + 4 * i);
    }
    __device__ __forceinline__ void operands(uint4 (&key)[8], int) const {
#pragma unroll
        for (int i = 0; i < 8; i++) key[i] = w[i];
    }
    // Which operand of which lane of four has the eight-th eight dimensions.
    static __device__ __forceinline__ int operand_of(int eight) { return eight / 4; }
    static __device__ __forceinline__ int lane_of(int eight) { return eight % 4; }
};

template <>
struct KeyWords<CACHE_Q8_0> {
    uint4 w[4], scales;

    __device__ __forceinline__ void load(const u8* row, int q) {
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = __ldcg((const uint4*)row + q + 4 * i);
        scales = __ldcg((const uint4*)(row + cache_scales_at(CACHE_Q8_0)));
    }
    __device__ __forceinline__ void operands(uint4 (&key)[8], int q) const {
        const u32 pairs[4] = {scales.x, scales.y, scales.z, scales.w}, which = q & 2 ? 0x3232 : 0x1010;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 scale = __byte_perm(pairs[i], 0, which);
            key[2 * i] = eight_values<CACHE_Q8_0>({w[i].x, w[i].y}, scale);
            key[2 * i + 1] = eight_values<CACHE_Q8_0>({w[i].z, w[i].w}, scale);
        }
    }
    static __device__ __forceinline__ int operand_of(int eight) { return eight / 8 * 2 + eight % 2; }
    static __device__ __forceinline__ int lane_of(int eight) { return eight % 8 / 2; }
};

template <>
struct KeyWords<CACHE_Q4_0> {
    uint2 w[4];
    uint4 scales;

    __device__ __forceinline__ void load(const u8* row, int q) {
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = __ldcg((const uint2*)row + q + 4 * i);
        scales = __ldcg((const uint4*)(row + cache_scales_at(CACHE_Q4_0)));
    }
    __device__ __forceinline__ void operands(uint4 (&key)[8], int q) const {
        const u32 pairs[4] = {scales.x, scales.y, scales.z, scales.w}, which = q & 2 ? 0x3232 : 0x1010;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 scale = __byte_perm(pairs[i], 0, which);
            key[2 * i] = eight_values<CACHE_Q4_0>({w[i].x, 0}, scale);
            key[2 * i + 1] = eight_values<CACHE_Q4_0>({w[i].y, 0}, scale);
        }
    }
    static __device__ __forceinline__ int operand_of(int eight) { return eight / 8 * 2 + eight % 2; }
    static __device__ __forceinline__ int lane_of(int eight) { return eight % 8 / 2; }
};

// --- values ---------------------------------------------------------------------------------------------------------

// Sixteen bytes of a value's row in shared memory. fp16 rows, whose length would put all on the same banks, have them
// in another order.
template <int TYPE>
__device__ __forceinline__ int value_place(int row, int unit) {
    return row * cache_row_bytes(TYPE) + (TYPE == CACHE_F16 ? unit ^ (row & 7) : unit) * 16;
}

// Scales of a chunk's values in the warp's block: lane l has those of keys 2 l, 2 l + 1.
template <int TYPE>
__device__ __forceinline__ u32 value_scales(const u8* rows, int warp, int lane) {
    if constexpr (TYPE == CACHE_F16) return 0;
    const u16* d = (const u16*)(rows + 2 * lane * cache_row_bytes(TYPE) + cache_scales_at(TYPE)) + warp;
    return d[0] | (u32)d[cache_row_bytes(TYPE) / 2] << 16;
}

// Operands of 16 keys from `keys` on: four products' {first, second} halves of K.
template <int TYPE>
__device__ __forceinline__ void value_operands(u32 (&v)[4][2], const u8* rows, u32 all_scales, int keys, int warp,
                                               int lane) {
    const int g = lane >> 2, q = lane & 3;
    if constexpr (TYPE == CACHE_F16) {
        const int row = keys + (lane & 15), unit = warp * 4 + (lane >> 4);
        const uint4 a = load_transposed(rows + value_place<TYPE>(row, unit)),
                    c = load_transposed(rows + value_place<TYPE>(row, unit + 2));
        v[0][0] = a.x, v[0][1] = a.y, v[1][0] = a.z, v[1][1] = a.w;
        v[2][0] = c.x, v[2][1] = c.y, v[3][0] = c.z, v[3][1] = c.w;
    } else {
        constexpr int ROW = cache_row_bytes(TYPE);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u8* first = rows + (keys + 2 * q + 8 * half) * ROW;
            const u32 scales = __shfl_sync(~0u, all_scales, keys / 2 + 4 * half + q);
            if constexpr (TYPE == CACHE_Q8_0) {
                const u32 a = *(const u32*)(first + 32 * warp + 4 * g),
                          b = *(const u32*)(first + ROW + 32 * warp + 4 * g);
#pragma unroll
                for (int j = 0; j < 4; j++)
                    v[j][half] =
                        multiply_halves(halves_of_bytes(__byte_perm(a, b, j | (4 + j) << 8) & 0x00ff00ffu), scales);
            } else {
                const u16* at = (const u16*)(first + 16 * warp) + g;
                const u32 both = at[0] | (u32)at[ROW / 2] << 16;
                v[0][half] = multiply_halves(halves_of_nibbles<0>(both), scales);
                v[1][half] = multiply_halves(halves_of_nibbles<1>(both), scales);
                v[2][half] = multiply_halves(halves_of_nibbles<2>(both), scales);
                v[3][half] = multiply_halves(halves_of_nibbles<3>(both), scales);
            }
        }
    }
}

// A lane's sums of one query, two of each product, as pairs of fp16 in the order of dimensions: `out` is the warp's 32.
template <int TYPE>
__device__ __forceinline__ void store_sums(u32* out, const float (&first)[4], const float (&second)[4], int q) {
    if constexpr (TYPE == CACHE_F16) {
#pragma unroll
        for (int j = 0; j < 4; j++) out[j * 4 + q] = pack_half(first[j], second[j]);
    } else if constexpr (TYPE == CACHE_Q8_0) {
        *(uint4*)(out + q * 4) = {pack_half(first[0], first[1]), pack_half(first[2], first[3]),
                                  pack_half(second[0], second[1]), pack_half(second[2], second[3])};
    } else {
        *(uint4*)(out + q * 4) = {pack_half(first[0], second[0]), pack_half(first[1], second[1]),
                                  pack_half(first[2], second[2]), pack_half(first[3], second[3])};
    }
}
