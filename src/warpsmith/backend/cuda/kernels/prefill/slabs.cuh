// Weights in slabs (large/slab.cuh) as a product's register operand in bf16: all that depends on their type.
//
// A weight is made in f32 as the file means it and rounded to bf16 once: an integer below 2^11 that is an fp16 number
// as it lies (times 2^-24, or 2^-20 where it lies four bits higher), times the scale of its block, less the min.
// A lane has rows g and g + 8 of a slab at 16 k of every tile of 64, which belong to one block.
#pragma once
#include "large/slab.cuh"
#include "prefill/widen.cuh"

// A byte of a word as a float, less a whole number.
__device__ __forceinline__ float byte_less(u32 word, int which, float less) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 | which)) - (8388608.0f + less);
}

// load(): what serves all of a slab. tile<T>(): what a tile of 64 k needs. operand<T, J>(): rows g, g + 8 of half 0,
// then of half 1, of the tile's product J.
template <int TYPE>
struct SlabWeights;

template <>
struct SlabWeights<SLAB_Q4_K> {
    u32 at, lane;
    uint2 scale_bytes, d;
    uint4 min_bytes, w;
    float by[2], less[2];

    __device__ __forceinline__ void load(u32 from, u32 which) {
        at = from, lane = which;
        scale_bytes = load_shared8(at + 2048 + (lane >> 1) * 8);
        min_bytes = load_shared16(at + 2176 + (lane >> 2) * 16);  // a word a tile: [row][block of the tile]
        d = load_shared8(at + 2304 + (lane >> 2) * 8);
    }
    template <int T>
    __device__ __forceinline__ void tile() {
        w = load_shared16(at + T * 512 + lane * 16);
        const u32 mins = (T == 0   ? min_bytes.x
                          : T == 1 ? min_bytes.y
                          : T == 2 ? min_bytes.z
                                   : min_bytes.w) >>
                         (lane & 2) * 4;
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const float2 f = unpack_half(row ? d.y : d.x);
            by[row] = byte_less(row ? scale_bytes.y : scale_bytes.x, T, 0.0f) * (f.x * 0x1p24f);
            less[row] = byte_less(mins, row * 2, 0.0f) * -f.y;
        }
    }
    __device__ __forceinline__ u32 word(int j, int row) const {
        const u32 v = row ? (j < 2 ? w.z : w.w) : (j < 2 ? w.x : w.y);
        return j & 1 ? v >> 8 : v;
    }
    template <int T, int J>
    __device__ __forceinline__ void operand(u32* o) const {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const u32 v = word(J, row);
            o[row] = widened(v & 0x000f000fu, by[row], less[row]);
            o[row + 2] = widened(v & 0x00f000f0u, by[row] * 0x1p-4f, less[row]);
        }
    }
};

template <>
struct SlabWeights<SLAB_Q5_K> : SlabWeights<SLAB_Q4_K> {
    u32 high;

    template <int T>
    __device__ __forceinline__ void tile() {
        SlabWeights<SLAB_Q4_K>::tile<T>();
        high = load_shared4(at + 2368 + T * 128 + lane * 4);
    }
    template <int T, int J>
    __device__ __forceinline__ void operand(u32* o) const {
        typedef Slab<SLAB_Q5_K> Bits;
        const u32 v = word(J, 0), u = word(J, 1);
        o[0] = widened((v & 0x000f000fu) | (Bits::moved<2 * J, 4>(high) & 0x00100010u), by[0], less[0]);
        o[1] = widened((u & 0x000f000fu) | (Bits::moved<2 * J + 8, 4>(high) & 0x00100010u), by[1], less[1]);
        o[2] = widened((v & 0x00f000f0u) | (Bits::moved<2 * J + 1, 8>(high) & 0x01000100u), by[0] * 0x1p-4f, less[0]);
        o[3] = widened((u & 0x00f000f0u) | (Bits::moved<2 * J + 9, 8>(high) & 0x01000100u), by[1] * 0x1p-4f, less[1]);
    }
};

template <>
struct SlabWeights<SLAB_Q6_K> {
    u32 at, lane, d;
    uint2 scale_bytes;
    u32 w[12];  // of two tiles
    float by[2], less[2];

    __device__ __forceinline__ void load(u32 from, u32 which) {
        at = from, lane = which;
        scale_bytes = load_shared8(at + 3072 + lane * 8);
        d = load_shared4(at + 3328 + (lane >> 2) * 4);
    }
    template <int T>
    __device__ __forceinline__ void tile() {
        if constexpr (T % 2 == 0) {
#pragma unroll
            for (int i = 0; i < 3; i++) {
                const uint4 v = load_shared16(at + (T / 2 * 3 + i) * 512 + lane * 16);
                w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
            }
        }
        const float2 f = unpack_half(d);
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const float scale = byte_less(row ? scale_bytes.y : scale_bytes.x, T, 128.0f) * (row ? f.y : f.x);
            by[row] = scale * 0x1p24f, less[row] = scale * -32.0f;
        }
    }
    template <int T, int J>
    __device__ __forceinline__ void operand(u32* o) const {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const u32* v = w + T % 2 * 6 + 3 * row;
            u32 low, high;
            if constexpr (J < 3) {
                low = v[J] & 0x003f003fu, high = (v[J] >> 2) & 0x03f003f0u;
            } else {
                low = ((v[0] >> 12) & 0x000f000fu) | ((v[2] >> 8) & 0x00300030u);
                high = ((v[1] >> 8) & 0x00f000f0u) | ((v[2] >> 6) & 0x03000300u);
            }
            o[row] = widened(low, by[row], less[row]);
            o[row + 2] = widened(high, by[row] * 0x1p-4f, less[row]);
        }
    }
};

template <>
struct SlabWeights<SLAB_Q8_0> {
    u32 at, lane;
    uint4 s, w[2];
    uint2 d;
    float by[2];

    __device__ __forceinline__ void load(u32 from, u32 which) {
        at = from, lane = which;
        s = load_shared16(at + 4096 + (lane >> 1) * 16);
        d = load_shared8(at + 4352 + (lane >> 2) * 8);
    }
    template <int T>
    __device__ __forceinline__ void tile() {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            w[row] = load_shared16(at + (T * 2 + row) * 512 + lane * 16);
            const float2 scales = unpack_half(row ? (T < 2 ? s.z : s.w) : (T < 2 ? s.x : s.y));
            by[row] = (T % 2 ? scales.y : scales.x) * (__uint_as_float(row ? d.y : d.x) * 0x1p24f);
        }
    }
    template <int T, int J>
    __device__ __forceinline__ void operand(u32* o) const {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const u32 v = J == 0 ? w[row].x : J == 1 ? w[row].y : J == 2 ? w[row].z : w[row].w;
            const float less = by[row] * -1152.0f;  // fp16 1024 + (value + 128)
            o[row] = widened(__byte_perm(v, 0x64646464u, 0x4140), by[row], less);
            o[row + 2] = widened(__byte_perm(v, 0x64646464u, 0x4342), by[row], less);
        }
    }
};

template <>
struct SlabWeights<SLAB_HALF> {
    u32 at, lane;
    uint2 d;
    uint4 w[2][2];

    __device__ __forceinline__ void load(u32 from, u32 which) {
        at = from, lane = which;
        d = load_shared8(at + 8192 + (lane >> 2) * 8);
    }
    template <int T>
    __device__ __forceinline__ void tile() {
#pragma unroll
        for (int i = 0; i < 4; i++) w[i / 2][i % 2] = load_shared16(at + (T * 4 + i) * 512 + lane * 16);
    }
    template <int T, int J>
    __device__ __forceinline__ void operand(u32* o) const {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const uint4 v = w[row][J / 2];
            const float by = __uint_as_float(row ? d.y : d.x) * 0x1p24f;
            o[row] = widened(J & 1 ? v.z : v.x, by, 0.0f);
            o[row + 2] = widened(J & 1 ? v.w : v.y, by * 0x1p-4f, 0.0f);
        }
    }
};
