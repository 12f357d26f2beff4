// Logits in the order in which tokens are preferred.
#pragma once
#include "common/ptx.cuh"

// A logit and its id as one number that orders by value, then by lowest id. Never 0.
__device__ __forceinline__ u64 ranked(float logit, int id) {
    const u32 bits = __float_as_uint(logit);
    const u32 ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (u64)ordered << 32 | (u32)~id;
}
__device__ __forceinline__ float logit_of(u64 ranked) {
    const u32 ordered = (u32)(ranked >> 32);
    return __uint_as_float(ordered & 0x80000000u ? ordered ^ 0x80000000u : ~ordered);
}
__device__ __forceinline__ int id_of(u64 ranked) { return (int)~(u32)ranked; }
// The token that greedy decoding takes; UNDECIDED where even the best logit is not a finite number.
constexpr int UNDECIDED = -1;
__device__ __forceinline__ int token_of(u64 best) {
    return fabsf(logit_of(best)) < -MINUS_INFINITY ? id_of(best) : UNDECIDED;
}
__device__ __forceinline__ u64 best_of(u64 a, u64 b) { return a > b ? a : b; }
