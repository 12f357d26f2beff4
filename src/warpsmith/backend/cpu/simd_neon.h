// NEON with the dot product instructions: eight lanes as two quads. See simd_generic.h for what each operation means.
#pragma once
#include <arm_neon.h>

#include <cstdint>

namespace warpsmith {
namespace {

struct Neon {
    static constexpr int lanes = 8;
    struct F { float32x4_t a, b; };
    struct I { int32x4_t a, b; };
    struct W { uint8x16_t a, b; };  // 8 rows of 4 weights
    using X4 = float32x4_t;
    using X16 = int8x16_t;
    using M = int16x8_t;

    static F load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
    static void store(float* p, F v) { vst1q_f32(p, v.a); vst1q_f32(p + 4, v.b); }
    static F set1(float v) { return {vdupq_n_f32(v), vdupq_n_f32(v)}; }
    static F add(F x, F y) { return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
    static F sub(F x, F y) { return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b)}; }
    static F mul(F x, F y) { return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)}; }
    static F div(F x, F y) { return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b)}; }
    static F max(F x, F y) { return {vmaxq_f32(x.a, y.a), vmaxq_f32(x.b, y.b)}; }
    static F min(F x, F y) { return {vminq_f32(x.a, y.a), vminq_f32(x.b, y.b)}; }
    static F abs(F x) { return {vabsq_f32(x.a), vabsq_f32(x.b)}; }
    static F fma(F acc, F x, F y) { return {vfmaq_f32(acc.a, x.a, y.a), vfmaq_f32(acc.b, x.b, y.b)}; }
    static F fnma(F acc, F x, F y) { return {vfmsq_f32(acc.a, x.a, y.a), vfmsq_f32(acc.b, x.b, y.b)}; }
    static float reduce_add(F x) { return vaddvq_f32(vaddq_f32(x.a, x.b)); }
    static float reduce_max(F x) { return vmaxvq_f32(vmaxq_f32(x.a, x.b)); }

    static X4 load_x4(const float* p) { return vld1q_f32(p); }
    template <int J>
    static F fma_x(F acc, F w, X4 x) { return {vfmaq_laneq_f32(acc.a, w.a, x, J), vfmaq_laneq_f32(acc.b, w.b, x, J)}; }

    static F load_bf16(const uint8_t* p) {
        // zip with zeros where a shift would do: two of them issue in a cycle, and only one shift
        const uint16x8_t v = vld1q_u16(reinterpret_cast<const uint16_t*>(p)), zero = vdupq_n_u16(0);
        return {vreinterpretq_f32_u16(vzip1q_u16(zero, v)), vreinterpretq_f32_u16(vzip2q_u16(zero, v))};
    }
    static F load_f16(const uint8_t* p) {
        const float16x8_t v = vreinterpretq_f16_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(p)));
        return {vcvt_f32_f16(vget_low_f16(v)), vcvt_high_f32_f16(v)};
    }
    static void store_f16(uint8_t* p, F v) {
        const float16x8_t h = vcvt_high_f16_f32(vcvt_f16_f32(v.a), v.b);
        vst1q_u16(reinterpret_cast<uint16_t*>(p), vreinterpretq_u16_f16(h));
    }

    static I zero() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
    static I set1(int32_t v) { return {vdupq_n_s32(v), vdupq_n_s32(v)}; }
    static I load(const int32_t* p) { return {vld1q_s32(p), vld1q_s32(p + 4)}; }
    static void store(int32_t* p, I v) { vst1q_s32(p, v.a); vst1q_s32(p + 4, v.b); }
    static I mul(I x, I y) { return {vmulq_s32(x.a, y.a), vmulq_s32(x.b, y.b)}; }
    static I mla(I acc, I x, I y) { return {vmlaq_s32(acc.a, x.a, y.a), vmlaq_s32(acc.b, x.b, y.b)}; }
    static I load_u8(const uint8_t* p) {
        const uint16x8_t w = vmovl_u8(vld1_u8(p));
        return {vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(w))), vreinterpretq_s32_u32(vmovl_high_u16(w))};
    }
    static I load_i8(const uint8_t* p) {
        const int16x8_t w = vmovl_s8(vld1_s8(reinterpret_cast<const int8_t*>(p)));
        return {vmovl_s16(vget_low_s16(w)), vmovl_high_s16(w)};
    }
    static F to_float(I x) { return {vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b)}; }
    static I round(F x) { return {vcvtnq_s32_f32(x.a), vcvtnq_s32_f32(x.b)}; }
    static F pow2(I n) {
        const int32x4_t bias = vdupq_n_s32(127);
        return {vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n.a, bias), 23)),
                vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n.b, bias), 23))};
    }
    static void store_i8(int8_t* p, I v) {
        vst1_s8(p, vqmovn_s16(vqmovn_high_s32(vqmovn_s32(v.a), v.b)));
    }

    static M load_mins(const uint8_t* p) { return vreinterpretq_s16_u16(vmovl_u8(vld1_u8(p))); }
    static I mins_dot(const M* m, const int16_t* sums) {
        const int16x8_t s = vld1q_s16(sums);
        I acc{vmull_laneq_s16(vget_low_s16(m[0]), s, 0), vmull_high_laneq_s16(m[0], s, 0)};
#define STEP(J) acc = {vmlal_laneq_s16(acc.a, vget_low_s16(m[J]), s, J), vmlal_high_laneq_s16(acc.b, m[J], s, J)};
        STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7)
#undef STEP
        return acc;
    }

    static W load_w(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16)}; }
    static W and_n(W w, uint8_t mask) {
        const uint8x16_t m = vdupq_n_u8(mask);
        return {vandq_u8(w.a, m), vandq_u8(w.b, m)};
    }
    template <int N>
    static W shr(W w) {
        if constexpr (N == 0) return w;
        else return {vshrq_n_u8(w.a, N), vshrq_n_u8(w.b, N)};
    }
    static W insert_high(W low, W high) { return {vsliq_n_u8(low.a, high.a, 4), vsliq_n_u8(low.b, high.b, 4)}; }
    static constexpr int kSixScale = 4, kSixOffset = 0;
    static void unpack6(W p0, W p1, W p2, W* w) {
        w[0] = and_n(p0, 0xfc);
        w[1] = and_n(p1, 0xfc);
        w[2] = and_n(p2, 0xfc);
        w[3] = {last6(p0.a, p1.a, p2.a), last6(p0.b, p1.b, p2.b)};
    }
    static uint8x16_t last6(uint8x16_t p0, uint8x16_t p1, uint8x16_t p2) {
        return vshlq_n_u8(vsliq_n_u8(vsliq_n_u8(p2, p1, 2), p0, 4), 2);
    }
    static X16 load_x(const int8_t* p) { return vld1q_s8(p); }
    template <int J>
    static I dot(I acc, W w, X16 x) {
        return {vdotq_laneq_s32(acc.a, vreinterpretq_s8_u8(w.a), x, J),
                vdotq_laneq_s32(acc.b, vreinterpretq_s8_u8(w.b), x, J)};
    }
    template <int J>
    static I dot_signed(I acc, W w, X16 x) { return dot<J>(acc, w, x); }
    static void prefetch(const uint8_t* p) { __builtin_prefetch(p); }
};

}  // namespace
}  // namespace warpsmith
