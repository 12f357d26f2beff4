// Activations cross between SMs as words that are there or not yet.
//
// A word that has not come is all ones, which no result is (a NaN is 0x7fff... here). Words are written 4, 8 or 16
// bytes at a time, each with one access, and a reader polls the data itself: no fence, no counter, no second read.
// Every exchange has two copies. Who writes one for this use sets the other back to NOT_YET: by then everybody has read
// it, since this use follows from theirs of the one before; and whoever reads it next has gone through further
// exchanges with the writer, so the reset has long arrived. The host resets all copies before a launch.
#pragma once
#include "common/ptx.cuh"

constexpr u32 NOT_YET = 0xffffffffu;

// Publish at one copy and reset the other, `other` words away.
__device__ __forceinline__ void publish16(u32* at, int other, float4 v) {
    store16(at, __float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w));
    store16(at + other, NOT_YET, NOT_YET, NOT_YET, NOT_YET);
}
__device__ __forceinline__ void publish16(u32* at, int other, uint4 v) {
    store16(at, v.x, v.y, v.z, v.w);
    store16(at + other, NOT_YET, NOT_YET, NOT_YET, NOT_YET);
}
__device__ __forceinline__ void publish8(u32* at, int other, u32 a, u32 b) {
    store8(at, a, b);
    store8(at + other, NOT_YET, NOT_YET);
}
__device__ __forceinline__ void publish4(u32* at, int other, u32 a) {
    store4(at, a);
    store4(at + other, NOT_YET);
}

// Has a group of words come that was written 16, 8 or 4 bytes at a time?
__device__ __forceinline__ bool came16(uint4 v) { return v.x != NOT_YET; }
__device__ __forceinline__ bool came8(uint4 v) { return v.x != NOT_YET & v.z != NOT_YET; }
__device__ __forceinline__ bool came4(uint4 v) {
    return v.x != NOT_YET & v.y != NOT_YET & v.z != NOT_YET & v.w != NOT_YET;
}

__device__ __forceinline__ float4 floats(uint4 v) {
    return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
}
