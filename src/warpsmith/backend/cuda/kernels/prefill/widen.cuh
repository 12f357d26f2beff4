// Small integers as weights in bf16.
#pragma once
#include "common/ptx.cuh"

// Two numbers that lie in the low bits of halves, times `by` and plus `add`, in bf16.
__device__ __forceinline__ u32 widened(u32 pair, float by, float add) {
    const float2 v = unpack_half(pair);
    return pack_bf16(fmaf(v.x, by, add), fmaf(v.y, by, add));
}
