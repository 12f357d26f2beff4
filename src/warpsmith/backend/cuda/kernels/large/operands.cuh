// Activations as products take them: fp16, with sums of 32 k beside them.
//
// Values are rounded to bf16 first. Those of a superblock of a token are operands as they are, if the largest is well
// within what fp16 has (1/64 to 2,048: then 32 of them add up to less than its largest number, and what becomes
// subnormal is off by less than 2^-15 of the largest); else times a power of two that makes the largest 512 to 1,024,
// and the superblock's sums are multiplied back (`back`; 1 for others). So nothing overflows, and a token's numbers
// depend on it alone. Every second pair of k is 1/16 of that (see slab.cuh).
//
// In a tree who makes activations publishes operands, in the order in which they lie in shared memory (BLOCK_BYTES a
// superblock). For one node who multiplies makes them.
//
// Included where the pass has its own words (large/words.cuh, draft/words.cuh).
#pragma once

// `largest`: bits of the superblock's largest absolute value, in f32.
struct BlockScale {
    float full, back;
    __device__ __forceinline__ explicit BlockScale(u32 largest) {
        constexpr u32 USUAL = 136, LEAST = 127 - 6, MOST = 127 + 10;
        const u32 given = largest >> 23;
        const bool usual = (given >= LEAST) & (given <= MOST) | (largest == 0);
        const u32 exponent = usual ? USUAL : max(given, 10u);
        full = __uint_as_float((263 - exponent) << 23), back = __uint_as_float((exponent + 127 - USUAL) << 23);
    }
};

// Sums of two blocks of 32, rounded, and the rests.
__device__ __forceinline__ uint2 block_sums(float even, float odd) {
    const u32 rounded = pack_half(even, odd);
    const float2 back = unpack_half(rounded);
    return {rounded, pack_half(even - back.x, odd - back.y)};
}

// Pairs of bf16, k .. k + 4 QUADS - 1.
template <int QUADS>
struct Fours {
    u32 pairs[QUADS][2];
    // Bits of the largest absolute value, in f32.
    __device__ __forceinline__ u32 largest() const {
        u32 most = 0;
#pragma unroll
        for (int i = 0; i < QUADS; i++) most = largest_bf16(largest_bf16(most, pairs[i][0]), pairs[i][1]);
        return max(most << 16, most & 0xffff0000u);
    }
};

// A warp's lanes have QUADS fours each of a node's superblock, one behind another, the first lane's from a multiple of
// 128 on. They are multiplied with `by`; `most`: the superblock's largest after that.
template <int QUADS>
__device__ __forceinline__ void publish_operands(u32* words, u32 node, u32 k, Fours<QUADS> fours, float by, u32 most) {
    constexpr int STEP_WORDS = STEP_BYTES / 4;
    const BlockScale scale(most);
    words += k / BLOCK_K * BLOCK_WORDS;
    u32* own = words + node / 8 * 64 + node % 8 * 4;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        const u32 in = k % BLOCK_K + i * 4;
        const OperandQuad quad(fours.pairs[i][0], fours.pairs[i][1], scale.full * by);
        u32* at = own + in / 64 * (4 * STEP_WORDS) + in / 4 % 4 * STEP_WORDS + in % 64 / 16;
        store4(at, quad.low), store4(at + 32, quad.high);
        sum += quad.sum;
    }
    constexpr int LANES = 8 / QUADS;  // that have 32 k
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    const float odd = __shfl_xor_sync(~0u, sum, LANES);
    const u32 lane = k / (4 * QUADS);
    if (lane % (2 * LANES) == 0) {
        const uint2 sums = block_sums(sum, odd);
        u32* at = own + 16 * STEP_WORDS + k % BLOCK_K / 64;
        store4(at, sums.x), store4(at + 32, sums.y);
    }
    if (k % BLOCK_K == 0) store4(words + BACK_AT / 4 + node, __float_as_uint(scale.back));
}
