// NEON with the dot product instructions: sixteen lanes as four quads. See simd_generic.h for what each operation means.
#pragma once
#include <arm_neon.h>

#include <cstdint>

#include "kernels.h"

namespace warpsmith {
namespace {

struct Neon {
    static constexpr int lanes = 16;
    static constexpr int kTileColumns = 0;
    static constexpr int kDirectColumns = 1;
    static constexpr int kQueries = 1;
    static constexpr int kFloatColumns = 4;
    struct F { float32x4_t v[4]; };
    struct I { int32x4_t v[4]; };
    struct W { uint8x16_t v[4]; };
    using X4 = float32x4_t;
    using X16 = int8x16_t;

    // written out: a loop over registers would go through memory
    template <class R, class Op>
    static WARPSMITH_INLINE R each(const Op& op) { return {{op(0), op(1), op(2), op(3)}}; }

    static F load(const float* p) { return each<F>([&](int i) { return vld1q_f32(p + 4 * i); }); }
    static void store(float* p, F x) {
        WARPSMITH_UNROLL
        for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, x.v[i]);
    }
    static F set1(float x) { return each<F>([&](int) { return vdupq_n_f32(x); }); }
    static F add(F x, F y) { return each<F>([&](int i) { return vaddq_f32(x.v[i], y.v[i]); }); }
    static F sub(F x, F y) { return each<F>([&](int i) { return vsubq_f32(x.v[i], y.v[i]); }); }
    static F mul(F x, F y) { return each<F>([&](int i) { return vmulq_f32(x.v[i], y.v[i]); }); }
    static F div(F x, F y) { return each<F>([&](int i) { return vdivq_f32(x.v[i], y.v[i]); }); }
    static F max(F x, F y) { return each<F>([&](int i) { return vmaxq_f32(x.v[i], y.v[i]); }); }
    static F min(F x, F y) { return each<F>([&](int i) { return vminq_f32(x.v[i], y.v[i]); }); }
    static F abs(F x) { return each<F>([&](int i) { return vabsq_f32(x.v[i]); }); }
    static F fma(F acc, F x, F y) { return each<F>([&](int i) { return vfmaq_f32(acc.v[i], x.v[i], y.v[i]); }); }
    static F fnma(F acc, F x, F y) { return each<F>([&](int i) { return vfmsq_f32(acc.v[i], x.v[i], y.v[i]); }); }
    static float reduce_add(F x) { return vaddvq_f32(vaddq_f32(vaddq_f32(x.v[0], x.v[1]), vaddq_f32(x.v[2], x.v[3]))); }
    static int32_t reduce_add(I x) {
        return vaddvq_s32(vaddq_s32(vaddq_s32(x.v[0], x.v[1]), vaddq_s32(x.v[2], x.v[3])));
    }
    static float reduce_max(F x) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.v[0], x.v[1]), vmaxq_f32(x.v[2], x.v[3]))); }

    static X4 load_x4(const float* p) { return vld1q_f32(p); }
    template <int J>
    static F fma_x(F acc, F w, X4 x) { return each<F>([&](int i) { return vfmaq_laneq_f32(acc.v[i], w.v[i], x, J); }); }

    static void load_bf16(const uint8_t* p, F& first, F& second) {
        const I words = load(reinterpret_cast<const int32_t*>(p));
        first = each<F>([&](int i) { return vreinterpretq_f32_s32(vshlq_n_s32(words.v[i], 16)); });
        second = each<F>([&](int i) { return vreinterpretq_f32_s32(vandq_s32(words.v[i], vdupq_n_s32(-65536))); });
    }
    static F load_f16(const uint8_t* p) {
        const float16x8_t low = vreinterpretq_f16_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(p)));
        const float16x8_t high = vreinterpretq_f16_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(p + 16)));
        return {{vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low), vcvt_f32_f16(vget_low_f16(high)),
                 vcvt_high_f32_f16(high)}};
    }
    static void store_f16(uint8_t* p, F x) {
        WARPSMITH_UNROLL
        for (int i = 0; i < 4; i += 2) {
            const float16x8_t h = vcvt_high_f16_f32(vcvt_f16_f32(x.v[i]), x.v[i + 1]);
            vst1q_u16(reinterpret_cast<uint16_t*>(p + 8 * i), vreinterpretq_u16_f16(h));
        }
    }

    // Written out: the processor renames a register to zero for nothing, where compilers like to copy a zero they have.
    static I zero() {
        return each<I>([](int) {
            int32x4_t x;
            __asm__ volatile("movi %0.4s, #0" : "=w"(x));
            return x;
        });
    }
    static I load(const int32_t* p) { return each<I>([&](int i) { return vld1q_s32(p + 4 * i); }); }
    static void store(int32_t* p, I x) {
        WARPSMITH_UNROLL
        for (int i = 0; i < 4; i++) vst1q_s32(p + 4 * i, x.v[i]);
    }
    static I set1(int32_t x) { return each<I>([&](int) { return vdupq_n_s32(x); }); }
    static I mla(I acc, I x, I y) { return each<I>([&](int i) { return vmlaq_s32(acc.v[i], x.v[i], y.v[i]); }); }
    template <int N>
    static I shl(I x) { return each<I>([&](int i) { return vshlq_n_s32(x.v[i], N); }); }
    static I load_u8(const uint8_t* p) {
        // lookups that leave three of four bytes zero: again two in a cycle, and half as many as widening takes
        static constexpr uint8_t none = 255;
        static constexpr uint8_t rows[4][16] = {
            {0, none, none, none, 1, none, none, none, 2, none, none, none, 3, none, none, none},
            {4, none, none, none, 5, none, none, none, 6, none, none, none, 7, none, none, none},
            {8, none, none, none, 9, none, none, none, 10, none, none, none, 11, none, none, none},
            {12, none, none, none, 13, none, none, none, 14, none, none, none, 15, none, none, none}};
        const uint8x16_t x = vld1q_u8(p);
        return each<I>([&](int i) { return vreinterpretq_s32_u8(vqtbl1q_u8(x, vld1q_u8(rows[i]))); });
    }
    static I load_i8(const uint8_t* p) {
        const int8x16_t x = vreinterpretq_s8_u8(vld1q_u8(p));
        const int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_high_s8(x);
        return {{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)}};
    }
    static F to_float(I x) { return each<F>([&](int i) { return vcvtq_f32_s32(x.v[i]); }); }
    static I round(F x) { return each<I>([&](int i) { return vcvtnq_s32_f32(x.v[i]); }); }
    static F pow2(I n) {
        return each<F>([&](int i) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n.v[i], vdupq_n_s32(127)), 23)); });
    }
    static void store_i8(int8_t* p, I x) {
        const int16x8_t low = vqmovn_high_s32(vqmovn_s32(x.v[0]), x.v[1]), high = vqmovn_high_s32(vqmovn_s32(x.v[2]), x.v[3]);
        vst1q_s8(p, vqmovn_high_s16(vqmovn_s16(low), high));
    }

    static W load_w(const uint8_t* p) { return each<W>([&](int i) { return vld1q_u8(p + 16 * i); }); }
    static void store_w(uint8_t* p, W x) {
        WARPSMITH_UNROLL
        for (int i = 0; i < 4; i++) vst1q_u8(p + 16 * i, x.v[i]);
    }
    static W and_n(W x, uint8_t mask) { return each<W>([&](int i) { return vandq_u8(x.v[i], vdupq_n_u8(mask)); }); }
    template <int N>
    static W shr(W x) { return each<W>([&](int i) { return vshrq_n_u8(x.v[i], N); }); }
    template <int N>
    static W shift(W x) {
        if constexpr (N < 0) return each<W>([&](int i) { return vshlq_n_u8(x.v[i], -N); });
        else if constexpr (N == 0) return x;
        else return shr<N>(x);
    }
    template <int M>
    static W insert(W x, W bits) { return each<W>([&](int i) { return vbslq_u8(vdupq_n_u8(M), bits.v[i], x.v[i]); }); }
    static constexpr int kSignedOffset = 0;
    static W signed_quad(W w) { return w; }
    static W lookup(const uint8_t* table, W x) {
        const uint8x16_t levels = vld1q_u8(table);
        return each<W>([&](int i) { return vqtbl1q_u8(levels, x.v[i]); });
    }
    static constexpr int kSixScale = 4, kSixOffset = 0;
    static void unpack6(W p0, W p1, W p2, W* w) {
        w[0] = and_n(p0, 0xfc);
        w[1] = and_n(p1, 0xfc);
        w[2] = and_n(p2, 0xfc);
        w[3] = each<W>([&](int i) { return vshlq_n_u8(vsliq_n_u8(vsliq_n_u8(p2.v[i], p1.v[i], 2), p0.v[i], 4), 2); });
    }
    static X16 load_x(const int8_t* p) { return vld1q_s8(p); }
    template <int J>
    static I dot(I acc, W w, X16 x) {
        return each<I>([&](int i) { return vdotq_laneq_s32(acc.v[i], vreinterpretq_s8_u8(w.v[i]), x, J); });
    }
    template <int J>
    static I dot_signed(I acc, W w, X16 x) { return dot<J>(acc, w, x); }
    // Forced inline: GCC deems a function that does nothing but prefetch to do nothing, and leaves out calls of it.
    static WARPSMITH_INLINE void prefetch(const uint8_t* p) { __builtin_prefetch(p); }
    static WARPSMITH_INLINE void prefetch_far(const uint8_t* p) { __builtin_prefetch(p, 0, 2); }
};

}  // namespace
}  // namespace warpsmith
