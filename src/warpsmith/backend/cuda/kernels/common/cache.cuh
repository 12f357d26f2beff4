// How rows of keys and values are kept: fp16, or blocks of 32 as Q8_0 and Q4_0 have them.
//
// A cache of a key head is [position][row], drafted rows are [node][row]; a row is 256 dimensions, then the fp16 scales
// of its eight blocks, if it has blocks. Bytes of a row, all multiples of 16:
//   f16  512: dimension i in bytes 2 i, 2 i + 1
//   Q8_0 272: dimension i in byte i as n + 128; scales at 256
//   Q4_0 144: dimensions 8 i .. 8 i + 7 in word i: 8 i + 2 j in nibble j, 8 i + 2 j + 1 in nibble j + 4, as n + 8;
//             scales at 128
// n and the scale d of a block are those of llama.cpp to the bit. Whoever reads a row, drafted or committed, takes d n
// rounded to fp16. In shared memory rows lie as here: the scales keep rows of eight keys on different banks.
#pragma once
#include "common/halves.cuh"

enum CacheType { CACHE_F16, CACHE_Q8_0, CACHE_Q4_0 };
constexpr int CACHE_DIMS = 256, CACHE_BLOCK = 32;
__host__ __device__ constexpr int cache_scales_at(int type) {
    return type == CACHE_F16 ? 2 * CACHE_DIMS : type == CACHE_Q8_0 ? CACHE_DIMS : CACHE_DIMS / 2;
}
__host__ __device__ constexpr int cache_row_bytes(int type) {
    return cache_scales_at(type) + (type == CACHE_F16 ? 0 : CACHE_DIMS / CACHE_BLOCK * 2);
}

// --- from values to a row -------------------------------------------------------------------------------------------

__device__ __forceinline__ float inverse_scale(float d) {
    const float inverse = 1.0f / d;
    return fabsf(inverse) < -MINUS_INFINITY ? inverse : 0.0f;
}
// The value of largest magnitude, the first of equals.
__device__ __forceinline__ float larger_magnitude(float a, float b) { return fabsf(b) > fabsf(a) ? b : a; }

// Dimensions 8 eight .. + 7 of a row. The four lanes of a block are STEP apart, in the order of their dimensions; all
// lanes of a warp come here, and those that are live write.
template <int TYPE, int STEP>
__device__ __forceinline__ void store_eight(u8* row, int eight, const float (&v)[8], bool live = true) {
    if constexpr (TYPE == CACHE_F16) {
        if (live)
            *(uint4*)(row + 16 * eight) = {pack_half(v[0], v[1]), pack_half(v[2], v[3]), pack_half(v[4], v[5]),
                                           pack_half(v[6], v[7])};
    } else {
        float peak = v[0];
#pragma unroll
        for (int j = 1; j < 8; j++) peak = larger_magnitude(peak, v[j]);
#pragma unroll
        for (int step = STEP; step <= 2 * STEP; step *= 2) {
            const float other = __shfl_xor_sync(~0u, peak, step);
            peak = threadIdx.x & step ? larger_magnitude(other, peak) : larger_magnitude(peak, other);
        }
        const float d = TYPE == CACHE_Q8_0 ? fabsf(peak) / 127.0f : peak / -8.0f, inverse = inverse_scale(d);
        u32 words[2] = {};
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (TYPE == CACHE_Q8_0)
                words[j / 4] |= (u32)((int)roundf(v[j] * inverse) + 128) << 8 * (j % 4);
            else
                words[0] |= (u32)(int)fminf(v[j] * inverse + 8.5f, 15.0f) << (4 * (j / 2) + 16 * (j % 2));
        }
        if (!live) return;
        if (TYPE == CACHE_Q8_0)
            *(uint2*)(row + 8 * eight) = {words[0], words[1]};
        else
            *(u32*)(row + 4 * eight) = words[0];
        if (eight % 4 == 0) *(u16*)(row + cache_scales_at(TYPE) + 2 * (eight / 4)) = (u16)pack_half(d, 0.0f);
    }
}

// --- and back, as pairs of fp16 -------------------------------------------------------------------------------------

// fp16 1024 + a byte, or a nibble, is 0x6400 with it.
constexpr u32 TWICE_1024 = 0x64006400u, TWICE_1152 = 0x64806480u, TWICE_1032 = 0x64086408u;

// Two bytes in the lower half of each half of a word, as n + 128.
__device__ __forceinline__ u32 halves_of_bytes(u32 bytes) { return subtract_half(bytes | TWICE_1024, TWICE_1152); }
// Bytes FIRST and FIRST + 1 of a word, likewise.
template <int FIRST>
__device__ __forceinline__ u32 halves_of_two(u32 word) {
    return subtract_half(__byte_perm(word, TWICE_1024, 0x5050 | FIRST | (FIRST + 1) << 8), TWICE_1152);
}
// Nibbles WHICH and WHICH + 4, as n + 8. Odd ones are not moved: 1024 + 16 (n + 8) is taken / 16, less 72.
template <int WHICH>
__device__ __forceinline__ u32 halves_of_nibbles(u32 word) {
    constexpr u32 TWICE_16TH = 0x2c002c00u, TWICE_MINUS_72 = 0xd480d480u;
    word >>= WHICH / 2 * 8;
    if (WHICH % 2) return multiply_add_halves((word & 0x00f000f0u) | TWICE_1024, TWICE_16TH, TWICE_MINUS_72);
    return subtract_half((word & 0x000f000fu) | TWICE_1024, TWICE_1032);
}
// Dimensions 8 i .. + 7 from their stored words; `scale` has d in both halves.
template <int TYPE>
__device__ __forceinline__ uint4 eight_values(uint2 words, u32 scale) {
    if constexpr (TYPE == CACHE_Q8_0)
        return {multiply_halves(halves_of_two<0>(words.x), scale), multiply_halves(halves_of_two<2>(words.x), scale),
                multiply_halves(halves_of_two<0>(words.y), scale), multiply_halves(halves_of_two<2>(words.y), scale)};
    const u32 word = words.x;
    return {multiply_halves(halves_of_nibbles<0>(word), scale), multiply_halves(halves_of_nibbles<1>(word), scale),
            multiply_halves(halves_of_nibbles<2>(word), scale), multiply_halves(halves_of_nibbles<3>(word), scale)};
}
