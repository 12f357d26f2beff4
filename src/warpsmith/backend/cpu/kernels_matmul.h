// A panel of 16 rows times n columns, for every weight type, as templates over a Simd struct.
//
// Float weights: each output is one chain of fused multiply-adds over k = 0, 1, 2 ... Quantised weights: integer dot
// products within a block (exact, so their order is free), one or two fused multiply-adds a block, blocks in order.
#pragma once
#include "kernels.h"
#include "packing.h"

namespace warpsmith {
namespace {

template <class S>
struct Panel {
    using F = typename S::F;
    using I = typename S::I;
    using W = typename S::W;
    static constexpr int kParts = kPanel / S::lanes;
    // A single column is a stream from memory: how far ahead of the arithmetic it is fetched, a few lines at a time.
    static constexpr int kAhead = 4096;

    // -- float weights -----------------------------------------------------------------------------------------------

    struct LoadF32 {
        static constexpr int bytes = 4;
        static F load(const uint8_t* p) { return S::load(reinterpret_cast<const float*>(p)); }
    };
    struct LoadF16 {
        static constexpr int bytes = 2;
        static F load(const uint8_t* p) { return S::load_f16(p); }
    };
    struct LoadBF16 {
        static constexpr int bytes = 2;
        static F load(const uint8_t* p) { return S::load_bf16(p); }
    };

    template <class L, int C, int J>
    static inline void float_step(const uint8_t* w, const typename S::X4 (&x)[C], F (&acc)[C][kParts]) {
        WARPSMITH_UNROLL
        for (int part = 0; part < kParts; part++) {
            const F weight = L::load(w + (J * kPanel + part * S::lanes) * L::bytes);
            WARPSMITH_UNROLL
            for (int c = 0; c < C; c++) acc[c][part] = S::template fma_x<J>(acc[c][part], weight, x[c]);
        }
    }

    template <class L, int C>
    static inline void float_columns(const uint8_t* panel, const Acts& x, int first, float* out, int stride) {
        F acc[C][kParts];
        WARPSMITH_UNROLL
        for (int c = 0; c < C; c++) {
            WARPSMITH_UNROLL
            for (int part = 0; part < kParts; part++) acc[c][part] = S::set1(0.0f);
        }
        const float* columns = x.f + static_cast<size_t>(first) * x.stride;
        for (int k = 0; k < x.k; k += 4) {
            const uint8_t* w = panel + static_cast<size_t>(k) * kPanel * L::bytes;
            if (C == 1) {
                WARPSMITH_UNROLL
                for (int i = 0; i < 4 * kPanel * L::bytes; i += 64) S::prefetch(w + kAhead / 4 + i);
            }
            typename S::X4 v[C];
            WARPSMITH_UNROLL
            for (int c = 0; c < C; c++) v[c] = S::load_x4(columns + static_cast<size_t>(c) * x.stride + k);
            float_step<L, C, 0>(w, v, acc);
            float_step<L, C, 1>(w, v, acc);
            float_step<L, C, 2>(w, v, acc);
            float_step<L, C, 3>(w, v, acc);
        }
        WARPSMITH_UNROLL
        for (int c = 0; c < C; c++) {
            WARPSMITH_UNROLL
            for (int part = 0; part < kParts; part++) {
                S::store(out + static_cast<size_t>(first + c) * stride + part * S::lanes, acc[c][part]);
            }
        }
    }

    template <class L>
    static void floats(const uint8_t* panel, const Acts& x, float* out, int stride) {
        int c = 0;
        for (; c + 4 <= x.n; c += 4) float_columns<L, 4>(panel, x, c, out, stride);
        if (x.n - c == 3) float_columns<L, 3>(panel, x, c, out, stride);
        if (x.n - c == 2) float_columns<L, 2>(panel, x, c, out, stride);
        if (x.n - c == 1) float_columns<L, 1>(panel, x, c, out, stride);
    }

    // -- 32 weights a block, a float scale each: Q8_0 and Q4_0 ---------------------------------------------------------

    template <bool kNibbles>
    static inline I dot32(I acc, const W (&w)[8], const int8_t* x) {
        const auto a = S::load_x(x), b = S::load_x(x + 16);
        if constexpr (kNibbles) {
            acc = S::template dot<0>(acc, w[0], a);
            acc = S::template dot<1>(acc, w[1], a);
            acc = S::template dot<2>(acc, w[2], a);
            acc = S::template dot<3>(acc, w[3], a);
            acc = S::template dot<0>(acc, w[4], b);
            acc = S::template dot<1>(acc, w[5], b);
            acc = S::template dot<2>(acc, w[6], b);
            acc = S::template dot<3>(acc, w[7], b);
        } else {
            acc = S::template dot_signed<0>(acc, w[0], a);
            acc = S::template dot_signed<1>(acc, w[1], a);
            acc = S::template dot_signed<2>(acc, w[2], a);
            acc = S::template dot_signed<3>(acc, w[3], a);
            acc = S::template dot_signed<0>(acc, w[4], b);
            acc = S::template dot_signed<1>(acc, w[5], b);
            acc = S::template dot_signed<2>(acc, w[6], b);
            acc = S::template dot_signed<3>(acc, w[7], b);
        }
        return acc;
    }

    static inline void nibbles(const uint8_t* quads, W (&w)[8]) {
        WARPSMITH_UNROLL
        for (int j = 0; j < 4; j++) {
            const W raw = S::load_w(quads + 64 * j);
            w[j] = S::and_n(raw, 15);
            w[j + 4] = S::template shr<4>(raw);
        }
    }

    template <Type T, bool kOne>
    static void blocks_of_32(const uint8_t* panel, const Acts& x, float* out, int stride) {
        constexpr bool kNibbles = T == Type::Q4_0;
        constexpr int bytes = layout_of(T).packed_bytes;
        const int n = kOne ? 1 : x.n;
        F total[kParts];
        WARPSMITH_UNROLL
        for (int part = 0; part < kParts; part++) total[part] = S::set1(0.0f);
        for (int b = 0; b < x.k / 32; b++) {
            const uint8_t* block = panel + static_cast<size_t>(b) * bytes;
            if (kOne) {
                for (int i = 0; i < bytes; i += 64) S::prefetch(block + kAhead + i);
            }
            const int8_t* q = x.q32 + static_cast<size_t>(b) * x.n * 32;
            const float* dx = x.d32 + static_cast<size_t>(b) * x.n;
            const int32_t* offset = x.minus8 + static_cast<size_t>(b) * x.n;
            WARPSMITH_UNROLL
            for (int part = 0; part < kParts; part++) {
                W w[8];
                const uint8_t* quads = block + 32 + 4 * S::lanes * part;
                if constexpr (kNibbles) {
                    nibbles(quads, w);
                } else {
                    WARPSMITH_UNROLL
                    for (int j = 0; j < 8; j++) w[j] = S::load_w(quads + 64 * j);
                }
                const F d = S::load_f16(block + 2 * S::lanes * part);
                for (int c = 0; c < n; c++) {
                    const I start = kNibbles ? S::set1(offset[c]) : S::zero();
                    const I dot = dot32<kNibbles>(start, w, q + 32 * c);
                    const F scale = S::mul(d, S::set1(dx[c]));
                    if constexpr (kOne) {
                        total[part] = S::fma(total[part], scale, S::to_float(dot));
                    } else {
                        float* to = out + static_cast<size_t>(c) * stride + part * S::lanes;
                        const F before = b ? S::load(to) : S::set1(0.0f);
                        S::store(to, S::fma(before, scale, S::to_float(dot)));
                    }
                }
            }
        }
        if constexpr (kOne) {
            WARPSMITH_UNROLL
            for (int part = 0; part < kParts; part++) S::store(out + part * S::lanes, total[part]);
        }
    }

    template <Type T>
    static void small_blocks(const uint8_t* panel, const Acts& x, float* out, int stride) {
        x.n == 1 ? blocks_of_32<T, true>(panel, x, out, stride) : blocks_of_32<T, false>(panel, x, out, stride);
    }

    // -- 256 weights a block with integer sub-scales: Q4_K, Q5_K, Q6_K -------------------------------------------------

    // Weights of sub-block s (32 of the block's 256): w[0..3] the first sixteen, w[4..7] the others.
    template <Type T, int kSub>
    static inline void unpack(const uint8_t* block, int group, int part, W (&w)[8]) {
        const int s = 4 * group + kSub, at = 4 * S::lanes * part;
        if constexpr (T == Type::Q4_K) {
            nibbles(block + kQuads45 + 256 * s + at, w);
        } else if constexpr (T == Type::Q5_K) {
            WARPSMITH_UNROLL
            for (int j = 0; j < 4; j++) {
                const W raw = S::load_w(block + kQuads45 + 256 * s + 64 * j + at);
                const W bits = S::load_w(block + kHigh5 + 256 * group + 64 * j + at);
                const W low = S::and_n(S::template shr<2 * kSub>(bits), 1);
                const W high = kSub == 3 ? S::template shr<7>(bits) : S::and_n(S::template shr<2 * kSub + 1>(bits), 1);
                w[j] = S::insert_high(raw, low);
                w[j + 4] = S::insert_high(S::template shr<4>(raw), high);
            }
        } else {
            for (int i = 0; i < 2; i++) {
                const uint8_t* planes = block + kPlanes6 + 192 * (2 * s + i) + at;
                S::unpack6(S::load_w(planes), S::load_w(planes + 64), S::load_w(planes + 128), w + 4 * i);
            }
        }
    }

    template <class G>
    static inline I dot16(I acc, const W* w, const G x) {
        acc = S::template dot<0>(acc, w[0], x);
        acc = S::template dot<1>(acc, w[1], x);
        acc = S::template dot<2>(acc, w[2], x);
        return S::template dot<3>(acc, w[3], x);
    }

    static inline I six_offset(int32_t minus32) {
        if constexpr (S::kSixOffset == 0) return S::zero();
        else return S::set1(S::kSixOffset * minus32);
    }

    // One sub-block for all columns: sums[c] gains scale * (weights . x).
    template <Type T, int kSub, bool kOne>
    static inline void sub_block(const uint8_t* block, int group, int part, const int8_t* q, const int32_t* minus32, int n,
                                 int32_t* sums, I& one) {
        const int s = 4 * group + kSub;
        if constexpr (kOne) {  // a sixteenth of what comes kAhead bytes later, at each of the sixteen steps of a block
            constexpr int share = (layout_of(T).packed_bytes / 16 + 63) / 64 * 64;
            WARPSMITH_UNROLL
            for (int i = 0; i < share; i += 64) S::prefetch(block + kAhead + (8 * part + s) * share + i);
        }
        W w[8];
        unpack<T, kSub>(block, group, part, w);
        if constexpr (T == Type::Q6_K) {
            const uint8_t* scales = block + kScales + 32 * s + part * S::lanes;
            const I first = S::load_i8(scales), second = S::load_i8(scales + 16);
            for (int c = 0; c < n; c++) {
                const int8_t* x = q + 256 * c + 32 * s;
                const int32_t* offset = minus32 + 16 * c + 2 * s;
                const I a = dot16(six_offset(offset[0]), w, S::load_x(x));
                const I b = dot16(six_offset(offset[1]), w + 4, S::load_x(x + 16));
                if constexpr (kOne) one = S::mla(S::mla(one, a, first), b, second);
                else S::store(sums + c * S::lanes, S::mla(S::mla(S::load(sums + c * S::lanes), a, first), b, second));
            }
        } else {
            const I scale = S::load_u8(block + kScales + 16 * s + part * S::lanes);
            for (int c = 0; c < n; c++) {
                const I a = dot32<true>(S::zero(), w, q + 256 * c + 32 * s);
                if constexpr (kOne) one = S::mla(one, a, scale);
                else S::store(sums + c * S::lanes, S::mla(S::load(sums + c * S::lanes), a, scale));
            }
        }
    }

    template <Type T, bool kOne>
    static void blocks_of_256(const uint8_t* panel, const Acts& x, float* out, int stride) {
        constexpr int bytes = layout_of(T).packed_bytes;
        constexpr bool kHasMins = T != Type::Q6_K;
        const int n = kOne ? 1 : x.n;
        alignas(64) int32_t sums[kOne ? 1 : kMaxNodes * S::lanes];
        F total[kParts];
        WARPSMITH_UNROLL
        for (int part = 0; part < kParts; part++) total[part] = S::set1(0.0f);
        for (int b = 0; b < x.k / 256; b++) {
            const uint8_t* block = panel + static_cast<size_t>(b) * bytes;
            const size_t at = static_cast<size_t>(b) * x.n;
            const int8_t* q = x.q256 + at * 256;
            const int32_t* minus32 = x.minus32 + at * 16;
            const int16_t* sum32 = x.sum32 + at * 8;
            const float* dx = x.d256 + at;
            WARPSMITH_UNROLL
            for (int part = 0; part < kParts; part++) {
                I one = S::zero();
                if constexpr (!kOne) {
                    for (int c = 0; c < n; c++) S::store(sums + c * S::lanes, one);
                }
                for (int group = 0; group < 2; group++) {
                    sub_block<T, 0, kOne>(block, group, part, q, minus32, n, sums, one);
                    sub_block<T, 1, kOne>(block, group, part, q, minus32, n, sums, one);
                    sub_block<T, 2, kOne>(block, group, part, q, minus32, n, sums, one);
                    sub_block<T, 3, kOne>(block, group, part, q, minus32, n, sums, one);
                }
                F d = S::load_f16(block + 2 * S::lanes * part);
                if constexpr (T == Type::Q6_K) d = S::mul(d, S::set1(1.0f / S::kSixScale));
                F dmin = d;
                typename S::M mins[8];
                if constexpr (kHasMins) {
                    dmin = S::load_f16(block + 32 + 2 * S::lanes * part);
                    for (int s = 0; s < 8; s++) mins[s] = S::load_mins(block + kMins + 16 * s + part * S::lanes);
                }
                for (int c = 0; c < n; c++) {
                    float* to = out + static_cast<size_t>(c) * stride + part * S::lanes;
                    const I sum = kOne ? one : S::load(sums + c * S::lanes);
                    const F scale = S::set1(dx[c]);
                    F value = kOne ? total[part] : b ? S::load(to) : S::set1(0.0f);
                    value = S::fma(value, S::mul(d, scale), S::to_float(sum));
                    if constexpr (kHasMins) {
                        value = S::fnma(value, S::mul(dmin, scale), S::to_float(S::mins_dot(mins, sum32 + 8 * c)));
                    }
                    if constexpr (kOne) total[part] = value;
                    else S::store(to, value);
                }
            }
        }
        if constexpr (kOne) {
            WARPSMITH_UNROLL
            for (int part = 0; part < kParts; part++) S::store(out + part * S::lanes, total[part]);
        }
    }

    template <Type T>
    static void large_blocks(const uint8_t* panel, const Acts& x, float* out, int stride) {
        x.n == 1 ? blocks_of_256<T, true>(panel, x, out, stride) : blocks_of_256<T, false>(panel, x, out, stride);
    }
};

}  // namespace
}  // namespace warpsmith
