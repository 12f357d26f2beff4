// Machine instructions on pairs of fp16.
#pragma once
#include "common/ptx.cuh"

__device__ __forceinline__ u32 subtract_half(u32 a, u32 b) {
    u32 out;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
// Of pairs of bf16: the larger magnitudes, the first without a sign; NaN if one is.
__device__ __forceinline__ u32 largest_bf16(u32 a, u32 b) {
    u32 out;
    asm("{ .reg .b32 m; abs.bf16x2 m, %2; max.NaN.bf16x2 %0, %1, m; }" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
__device__ __forceinline__ u32 multiply_halves(u32 a, u32 b) {
    u32 out;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
__device__ __forceinline__ u32 multiply_add_halves(u32 a, u32 b, u32 c) {
    u32 out;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}
// Both times one half of `pair`, which the machine selects for nothing.
template <int HIGH>
__device__ __forceinline__ u32 multiply_half(u32 a, u32 pair) {
    u32 out;
    if (HIGH)
        asm("{ .reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {h, h}; mul.rn.f16x2 %0, %1, s; }"
            : "=r"(out)
            : "r"(a), "r"(pair));
    else
        asm("{ .reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {l, l}; mul.rn.f16x2 %0, %1, s; }"
            : "=r"(out)
            : "r"(a), "r"(pair));
    return out;
}
// The same, plus a pair.
template <int HIGH>
__device__ __forceinline__ u32 multiply_add_half_by(u32 a, u32 pair, u32 add) {
    u32 out;
    if (HIGH)
        asm("{ .reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {h, h}; fma.rn.f16x2 %0, %1, s, %3; }"
            : "=r"(out)
            : "r"(a), "r"(pair), "r"(add));
    else
        asm("{ .reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {l, l}; fma.rn.f16x2 %0, %1, s, %3; }"
            : "=r"(out)
            : "r"(a), "r"(pair), "r"(add));
    return out;
}
// The same, less a pair.
template <int HIGH>
__device__ __forceinline__ u32 multiply_subtract_half(u32 a, u32 pair, u32 less) {
    u32 minus;
    asm("neg.f16x2 %0, %1;" : "=r"(minus) : "r"(less));
    return multiply_add_half_by<HIGH>(a, pair, minus);
}
// The same, plus one half of a pair.
template <int HIGH>
__device__ __forceinline__ u32 multiply_add_half(u32 a, u32 pair, u32 add) {
    u32 out;
    if (HIGH)
        asm("{ .reg .b16 l, h, m, n; .reg .b32 s, t; mov.b32 {l, h}, %2; mov.b32 s, {h, h}; mov.b32 {m, n}, %3; "
            "mov.b32 t, {n, n};"
            " fma.rn.f16x2 %0, %1, s, t; }"
            : "=r"(out)
            : "r"(a), "r"(pair), "r"(add));
    else
        asm("{ .reg .b16 l, h, m, n; .reg .b32 s, t; mov.b32 {l, h}, %2; mov.b32 s, {l, l}; mov.b32 {m, n}, %3; "
            "mov.b32 t, {m, m};"
            " fma.rn.f16x2 %0, %1, s, t; }"
            : "=r"(out)
            : "r"(a), "r"(pair), "r"(add));
    return out;
}
