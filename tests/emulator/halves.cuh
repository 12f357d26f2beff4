// What kernels/common/halves.cuh names, on the emulated machine.
#pragma once
#include "common/ptx.cuh"

inline u32 subtract_half(u32 a, u32 b) {
    const float2 x = unpack_half(a), y = unpack_half(b);
    return pack_half(x.x - y.x, x.y - y.y);
}
inline u32 largest_bf16(u32 a, u32 b) {
    const u32 low = b & 0x7fff, high = b & 0x7fff0000u;
    return (low > (a & 0xffff) ? low : a & 0xffff) | (high > (a & 0xffff0000u) ? high : a & 0xffff0000u);
}
inline u32 multiply_halves(u32 a, u32 b) {
    const float2 x = unpack_half(a), y = unpack_half(b);
    return pack_half(x.x * y.x, x.y * y.y);
}
inline u32 one_half(u32 pair, int high) { return high ? pair >> 16 | (pair & 0xffff0000u) : (pair & 0xffff) | pair << 16; }
template <int HIGH>
inline u32 multiply_half(u32 a, u32 pair) { return multiply_halves(a, one_half(pair, HIGH)); }
// A product of two halves is exact in a float, and its sum with a third in a double.
inline u32 multiply_add_halves(u32 a, u32 b, u32 c) {
    const float2 x = unpack_half(a), y = unpack_half(b), z = unpack_half(c);
    return pack_half((float)((double)x.x * y.x + z.x), (float)((double)x.y * y.y + z.y));
}
template <int HIGH>
inline u32 multiply_add_half_by(u32 a, u32 pair, u32 add) { return multiply_add_halves(a, one_half(pair, HIGH), add); }
template <int HIGH>
inline u32 multiply_subtract_half(u32 a, u32 pair, u32 less) {
    return multiply_add_half_by<HIGH>(a, pair, less ^ 0x80008000u);
}
template <int HIGH>
inline u32 multiply_add_half(u32 a, u32 pair, u32 add) { return multiply_add_halves(a, one_half(pair, HIGH), one_half(add, HIGH)); }
