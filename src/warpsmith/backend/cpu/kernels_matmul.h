// A panel of 16 rows times n columns, for every weight type, as templates over a Simd struct.
//
// Float weights: each output is one chain of fused multiply-adds over k = 0, 1, 2 ... Quantised weights: integer dot
// products within a block (exact, so their order is free), one or two fused multiply-adds a block, blocks in order.
// So a single column, whose weights go from memory through registers, gets the bits that it gets among others, for
// which a block is unpacked once.
#pragma once
#include <cstring>
#include <type_traits>

#include "kernels.h"
#include "packing.h"

namespace warpsmith {
namespace {

template <class S>
struct Panel {
    using F = typename S::F;
    using I = typename S::I;
    using W = typename S::W;
    using X16 = typename S::X16;
    template <int J>
    using Quad = std::integral_constant<int, J>;

    // A single column is a stream from memory. It is fetched in two steps: into the second cache well ahead, where
    // enough lines can be under way to fill memory's latency, and from there into the first.
    static constexpr int kNear = 2048, kFar = 4096;
    static WARPSMITH_INLINE void fetch(const uint8_t* from, int bytes) {
        WARPSMITH_UNROLL
        for (int i = 0; i < bytes; i += 64) {
            S::prefetch(from + kNear + i);
            S::prefetch_far(from + kFar + i);
        }
    }

    // -- float weights -----------------------------------------------------------------------------------------------

    // Two weights of each row, k and k+1, at a time.
    struct LoadF32 {
        static constexpr int bytes = 4;
        static WARPSMITH_INLINE void pair(const uint8_t* p, F& first, F& second) {
            first = S::load(reinterpret_cast<const float*>(p));
            second = S::load(reinterpret_cast<const float*>(p + 64));
        }
    };
    struct LoadF16 {
        static constexpr int bytes = 2;
        static WARPSMITH_INLINE void pair(const uint8_t* p, F& first, F& second) {
            first = S::load_f16(p);
            second = S::load_f16(p + 32);
        }
    };
    struct LoadBF16 {
        static constexpr int bytes = 2;
        static WARPSMITH_INLINE void pair(const uint8_t* p, F& first, F& second) { S::load_bf16(p, first, second); }
    };

    template <class L, int C, int J>
    static WARPSMITH_INLINE void float_steps(const uint8_t* w, const typename S::X4 (&x)[C], F (&acc)[C]) {
        F first, second;
        L::pair(w + J * kPanel * L::bytes, first, second);
        WARPSMITH_UNROLL
        for (int c = 0; c < C; c++) acc[c] = S::template fma_x<J>(acc[c], first, x[c]);
        WARPSMITH_UNROLL
        for (int c = 0; c < C; c++) acc[c] = S::template fma_x<J + 1>(acc[c], second, x[c]);
    }

    template <class L, int C>
    static WARPSMITH_INLINE void float_columns(const uint8_t* panel, const Acts& x, int first, float* out, int stride) {
        F acc[C];
        WARPSMITH_UNROLL
        for (int c = 0; c < C; c++) acc[c] = S::set1(0.0f);
        const float* columns = x.f + static_cast<size_t>(first) * x.stride;
        for (int k = 0; k < x.k; k += 4) {
            const uint8_t* w = panel + static_cast<size_t>(k) * kPanel * L::bytes;
            if (C == 1) fetch(w, 4 * kPanel * L::bytes);
            typename S::X4 v[C];
            WARPSMITH_UNROLL
            for (int c = 0; c < C; c++) v[c] = S::load_x4(columns + static_cast<size_t>(c) * x.stride + k);
            float_steps<L, C, 0>(w, v, acc);
            float_steps<L, C, 2>(w, v, acc);
        }
        WARPSMITH_UNROLL
        for (int c = 0; c < C; c++) S::store(out + static_cast<size_t>(first + c) * stride, acc[c]);
    }

    // As many columns at a time as there are registers for: fewer sums under way than a core's multipliers can hold
    // leave them idle, and a weight is converted once for all of them.
    template <class L>
    static void floats(const uint8_t* panel, const Acts& x, float* out, int stride) {
        constexpr int most = S::kFloatColumns;
        int c = 0;
        for (; c + most <= x.n; c += most) float_columns<L, most>(panel, x, c, out, stride);
        if constexpr (most > 4) {
            for (; c + 4 <= x.n; c += 4) float_columns<L, 4>(panel, x, c, out, stride);
        }
        if (x.n - c == 3) float_columns<L, 3>(panel, x, c, out, stride);
        if (x.n - c == 2) float_columns<L, 2>(panel, x, c, out, stride);
        if (x.n - c == 1) float_columns<L, 1>(panel, x, c, out, stride);
    }

    // -- quads of quantised weights ----------------------------------------------------------------------------------

    // Hand the eight quads of 32 weights to `take(Quad<j>, quad)`: sub-block s = 4 * group + kSub of a K-quant's
    // eight, or a whole block of the others.
    template <Type T, int kSub = 0, class Take>
    static WARPSMITH_INLINE void unpack(const uint8_t* block, int group, const Take& take) {
        const int s = 4 * group + kSub;
        if constexpr (T == Type::Q8_0) {
            take(Quad<0>(), S::load_w(block + 32)), take(Quad<1>(), S::load_w(block + 96));
            take(Quad<2>(), S::load_w(block + 160)), take(Quad<3>(), S::load_w(block + 224));
            take(Quad<4>(), S::load_w(block + 288)), take(Quad<5>(), S::load_w(block + 352));
            take(Quad<6>(), S::load_w(block + 416)), take(Quad<7>(), S::load_w(block + 480));
        } else if constexpr (T == Type::Q2_K || T == Type::Q3_K) {
            const auto half = [&](auto a, auto b, auto c, auto d) {
                const W raw = S::load_w(block + kWeights + 128 * s + 16 * a);
                const W w[4] = {S::and_n(raw, 3), S::and_n(S::template shift<2>(raw), 3),
                                S::and_n(S::template shift<4>(raw), 3), S::template shr<6>(raw)};
                if constexpr (T == Type::Q2_K) {
                    take(a, w[0]), take(b, w[1]), take(c, w[2]), take(d, w[3]);
                } else {  // bit a + j of the byte is the third of quad j
                    const W bits = S::load_w(block + kThirdBits + 64 * s);
                    take(a, S::template insert<4>(w[0], S::template shift<a - 2>(bits)));
                    take(b, S::template insert<4>(w[1], S::template shift<b - 2>(bits)));
                    take(c, S::template insert<4>(w[2], S::template shift<c - 2>(bits)));
                    take(d, S::template insert<4>(w[3], S::template shift<d - 2>(bits)));
                }
            };
            half(Quad<0>(), Quad<1>(), Quad<2>(), Quad<3>());
            half(Quad<4>(), Quad<5>(), Quad<6>(), Quad<7>());
        } else if constexpr (T == Type::Q6_K) {
            const auto half = [&](auto a, auto b, auto c, auto d) {
                const uint8_t* planes = block + kWeights + 384 * s + 48 * a;
                W w[4];
                S::unpack6(S::load_w(planes), S::load_w(planes + 64), S::load_w(planes + 128), w);
                take(a, w[0]), take(b, w[1]), take(c, w[2]), take(d, w[3]);
            };
            half(Quad<0>(), Quad<1>(), Quad<2>(), Quad<3>());
            half(Quad<4>(), Quad<5>(), Quad<6>(), Quad<7>());
        } else {  // nibbles
            const uint8_t* lines = T == Type::Q4_0 ? block + 32 : block + kWeights + 256 * s;
            const auto line = [&](auto low, auto high) {
                const W raw = S::load_w(lines + 64 * low), below = S::and_n(raw, 15), above = S::template shr<4>(raw);
                if constexpr (T == Type::Q5_K) {
                    const W bits = S::load_w(block + kFifthBits + 256 * group + 64 * low);
                    take(low, S::template insert<16>(below, S::template shift<2 * kSub - 4>(bits)));
                    take(high, S::template insert<16>(above, S::template shift<2 * kSub - 3>(bits)));
                } else if constexpr (T == Type::Levels) {
                    take(low, S::lookup(block + kLevels, below));
                    take(high, S::lookup(block + kLevels, above));
                } else {
                    take(low, below);
                    take(high, above);
                }
            };
            line(Quad<0>(), Quad<4>()), line(Quad<1>(), Quad<5>()), line(Quad<2>(), Quad<6>()), line(Quad<3>(), Quad<7>());
        }
    }

    template <Type T, int J>
    static WARPSMITH_INLINE I dot(I acc, const W& w, X16 x) {
        if constexpr (T == Type::Q8_0 || T == Type::Levels) return S::template dot_signed<J>(acc, w, x);
        else return S::template dot<J>(acc, w, x);
    }

    // A quad times up to four columns, whose bytes lie side by side.
    template <Type T, int C>
    static WARPSMITH_INLINE void dots(I (&acc)[C], const uint8_t* quad, const int8_t* x) {
        const W w = S::load_w(quad);
        const X16 columns = S::load_x(x);
        acc[0] = dot<T, 0>(acc[0], w, columns);
        if constexpr (C > 1) acc[1] = dot<T, 1>(acc[1], w, columns);
        if constexpr (C > 2) acc[2] = dot<T, 2>(acc[2], w, columns);
        if constexpr (C > 3) acc[3] = dot<T, 3>(acc[3], w, columns);
    }

    // -- 32 weights a block, a float scale each: Q8_0 and Q4_0 -------------------------------------------------------

    template <Type T>
    static void small_one(const uint8_t* panel, const Acts& x, float* out) {
        constexpr int bytes = layout_of(T).packed_bytes;
        F total = S::set1(0.0f);
        for (int b = 0; b < x.k / 32; b++) {
            const uint8_t* block = panel + static_cast<size_t>(b) * bytes;
            fetch(block, bytes);
            const X16 low = S::load_x(x.q32 + 32 * b), high = S::load_x(x.q32 + 32 * b + 16);
            I acc = T == Type::Q4_0 ? S::set1(x.minus8[b]) : S::zero();
            unpack<T>(block, 0, [&](auto j, const W& w) { acc = dot<T, j % 4>(acc, w, j < 4 ? low : high); });
            total = S::fma(total, S::mul(S::load_f16(block), S::set1(x.d32[b])), S::to_float(acc));
        }
        S::store(out, total);
    }

    template <Type T, bool kTiled, int C>
    static void small_columns(const uint8_t* quads, F d, const Acts& x, int b, int first, float* out, int stride) {
        const int8_t* q = x.q32 + (static_cast<size_t>(b) * x.padded() + first) * 32;
        const size_t at = static_cast<size_t>(b) * x.n + first;
        I acc[C];
        WARPSMITH_UNROLL
        for (int c = 0; c < C; c++) acc[c] = T == Type::Q4_0 ? S::set1(x.minus8[at + c]) : S::zero();
        if constexpr (kTiled) {
            S::template tile<8>(acc, quads, q);
        } else {
            WARPSMITH_UNROLL
            for (int j = 0; j < 8; j++) dots<T, C>(acc, quads + 64 * j, q + 16 * j);
        }
        WARPSMITH_UNROLL
        for (int c = 0; c < C; c++) {
            float* to = out + static_cast<size_t>(first + c) * stride;
            const F before = b ? S::load(to) : S::set1(0.0f);
            S::store(to, S::fma(before, S::mul(d, S::set1(x.d32[at + c])), S::to_float(acc[c])));
        }
    }

    template <Type T, bool kTiled = false>
    static void small_blocks(const uint8_t* panel, const Acts& x, float* out, int stride) {
        if constexpr (S::kTileColumns > 0 && !kTiled) {
            if (x.n >= S::kTileColumns) return small_blocks<T, true>(panel, x, out, stride);
        }
        if (x.n == 1) return small_one<T>(panel, x, out);
        alignas(64) uint8_t room[8 * 64];
        for (int b = 0; b < x.k / 32; b++) {
            const uint8_t* block = panel + static_cast<size_t>(b) * layout_of(T).packed_bytes;
            const uint8_t* quads = block + 32;
            if constexpr (T == Type::Q4_0) {
                unpack<T>(block, 0, [&](auto j, const W& w) { S::store_w(room + 64 * j, w); });
                quads = room;
            }
            if constexpr (kTiled) {
                S::pair_quads(quads, 8, room);
                quads = room;
            }
            const F d = S::load_f16(block);
            int c = 0;
            for (; c + 4 <= x.n; c += 4) small_columns<T, kTiled, 4>(quads, d, x, b, c, out, stride);
            if (x.n - c == 3) small_columns<T, kTiled, 3>(quads, d, x, b, c, out, stride);
            if (x.n - c == 2) small_columns<T, kTiled, 2>(quads, d, x, b, c, out, stride);
            if (x.n - c == 1) small_columns<T, kTiled, 1>(quads, d, x, b, c, out, stride);
        }
    }

    // -- 256 weights a block with integer sub-scales: Q2_K to Q6_K, Levels -------------------------------------------

    static constexpr bool has_mins(Type t) { return t == Type::Q2_K || t == Type::Q4_K || t == Type::Q5_K; }
    static constexpr bool by_sixteens(Type t) { return t != Type::Q4_K && t != Type::Q5_K; }  // weights under a scale

    // Sixteen weights times x, to begin with: what the offset of unsigned weights takes away.
    template <Type T>
    static WARPSMITH_INLINE I offset(int32_t minus32) {
        if constexpr (T == Type::Q3_K) return S::set1(minus32 / 8);  // exactly
        else if constexpr (T == Type::Q6_K && S::kSixOffset != 0) return S::set1(S::kSixOffset * minus32);
        else return S::zero();
    }

    // Where a block's scales are, a byte each. Those of Q2_K are nibbles, and go to `room` first.
    template <Type T>
    static WARPSMITH_INLINE const uint8_t* scales_of(const uint8_t* block, uint8_t* room) {
        if constexpr (T != Type::Q2_K) return block + kScales;
        WARPSMITH_UNROLL
        for (int i = 0; i < 2; i++) {
            const W raw = S::load_w(block + kScales + 64 * i);
            S::store_w(room + 128 * i, S::and_n(raw, 15));
            S::store_w(room + 128 * i + 64, S::template shr<4>(raw));
        }
        return room;
    }

    template <Type T>
    static WARPSMITH_INLINE I load_scale(const uint8_t* scales) {
        return has_mins(T) ? S::load_u8(scales) : S::load_i8(scales);
    }

    // One column's sum over sub-blocks of scale * (weights . x) gains that of 32 weights.
    template <Type T, int kSub>
    static WARPSMITH_INLINE I sub_block(I sum, const uint8_t* block, const uint8_t* scales, int group, const int8_t* q,
                                        const int32_t* minus32) {
        constexpr int share = (layout_of(T).packed_bytes / 8 + 63) / 64 * 64;  // of the bytes to fetch, an eighth
        const int s = 4 * group + kSub;
        fetch(block + s * share, share);
        const X16 low = S::load_x(q + 32 * s), high = S::load_x(q + 32 * s + 16);
        if constexpr (by_sixteens(T)) {
            I a = offset<T>(minus32[2 * s]), b = offset<T>(minus32[2 * s + 1]);
            unpack<T, kSub>(block, group, [&](auto j, const W& w) {
                if constexpr (j < 4) a = dot<T, j>(a, w, low);
                else b = dot<T, j % 4>(b, w, high);
            });
            return S::mla(S::mla(sum, a, load_scale<T>(scales + 32 * s)), b, load_scale<T>(scales + 32 * s + 16));
        } else {
            I a = S::zero();
            unpack<T, kSub>(block, group, [&](auto j, const W& w) { a = dot<T, j % 4>(a, w, j < 4 ? low : high); });
            return S::mla(sum, a, load_scale<T>(scales + 16 * s));
        }
    }

    // A block's part of an output, from its sums of products with weights and with mins.
    template <Type T>
    static WARPSMITH_INLINE F add_block(F total, F d, F dmin, float dx, I sum, I mins) {
        F value = S::mul(d, S::to_float(sum));
        if constexpr (has_mins(T)) value = S::fnma(value, dmin, S::to_float(mins));
        return S::fma(total, value, S::set1(T == Type::Q6_K ? dx / S::kSixScale : dx));
    }

    template <Type T>
    static WARPSMITH_INLINE F load_d(const uint8_t* block) {
        if constexpr (T != Type::Levels) return S::load_f16(block);
        float unit;
        std::memcpy(&unit, block + kUnit, 4);
        return S::mul(S::load_f16(block), S::set1(unit));
    }

    // Hand the quads of a block's mins to `take`: two, or four.
    template <Type T, class Take>
    static WARPSMITH_INLINE void unpack_mins(const uint8_t* block, const Take& take) {
        const W first = S::load_w(block + kMins), second = S::load_w(block + kMins + 64);
        if constexpr (T == Type::Q2_K) {
            take(Quad<0>(), S::and_n(first, 15)), take(Quad<1>(), S::template shr<4>(first));
            take(Quad<2>(), S::and_n(second, 15)), take(Quad<3>(), S::template shr<4>(second));
        } else {
            take(Quad<0>(), first), take(Quad<1>(), second);
        }
    }

    // One column's products of mins with the sums of activations.
    template <Type T>
    static WARPSMITH_INLINE I minimums(const uint8_t* block, const Acts& x, int b) {
        I mins = S::zero();
        if constexpr (T == Type::Q2_K) {
            const X16 high = S::load_x(x.sums16 + 32 * b), low = S::load_x(x.sums16 + 32 * b + 16);
            unpack_mins<T>(block, [&](auto j, const W& w) { mins = dot<T, j>(mins, w, high); });
            mins = S::template shl<6>(mins);
            unpack_mins<T>(block, [&](auto j, const W& w) { mins = dot<T, j>(mins, w, low); });
        } else if constexpr (has_mins(T)) {
            const X16 sums = S::load_x(x.sums + 16 * b);
            unpack_mins<T>(block, [&](auto j, const W& w) { mins = dot<T, j>(mins, w, sums); });
            mins = S::template shl<6>(mins);
            unpack_mins<T>(block, [&](auto j, const W& w) { mins = dot<T, j + 2>(mins, w, sums); });
        }
        return mins;
    }

    template <Type T>
    static void large_one(const uint8_t* panel, const Acts& x, float* out) {
        constexpr int bytes = layout_of(T).packed_bytes;
        alignas(64) uint8_t room[256];
        F total = S::set1(0.0f);
        for (int b = 0; b < x.k / 256; b++) {
            const uint8_t* block = panel + static_cast<size_t>(b) * bytes;
            const uint8_t* scales = scales_of<T>(block, room);
            const int8_t* q = x.q256 + 256 * b;
            const int32_t* minus32 = x.minus32 + 16 * b;
            I sum = S::zero();
            for (int group = 0; group < 2; group++) {
                sum = sub_block<T, 0>(sum, block, scales, group, q, minus32);
                sum = sub_block<T, 1>(sum, block, scales, group, q, minus32);
                sum = sub_block<T, 2>(sum, block, scales, group, q, minus32);
                sum = sub_block<T, 3>(sum, block, scales, group, q, minus32);
            }
            const I mins = minimums<T>(block, x, b);
            total = add_block<T>(total, load_d<T>(block), S::load_f16(block + 32), x.d256[b], sum, mins);
        }
        S::store(out, total);
    }

    // What several columns need of a block: its weights as quads in the order of k, mins, and scales widened.
    struct Unpacked {
        alignas(64) uint8_t quads[64 * 64];
        alignas(64) uint8_t mins[4 * 64];
        int32_t scales[16][kPanel];
        float d[kPanel], dmin[kPanel];
    };

    template <Type T, int kSub>
    static WARPSMITH_INLINE void unpack_to(Unpacked& to, const uint8_t* block, int group) {
        uint8_t* quads = to.quads + 512 * (4 * group + kSub);
        unpack<T, kSub>(block, group, [&](auto j, const W& w) { S::store_w(quads + 64 * j, w); });
    }

    template <Type T>
    static void unpack_block(const uint8_t* block, Unpacked& to) {
        for (int group = 0; group < 2; group++) {
            unpack_to<T, 0>(to, block, group);
            unpack_to<T, 1>(to, block, group);
            unpack_to<T, 2>(to, block, group);
            unpack_to<T, 3>(to, block, group);
        }
        alignas(64) uint8_t room[256];
        const uint8_t* scales = scales_of<T>(block, room);
        for (int s = 0; s < (by_sixteens(T) ? 16 : 8); s++) S::store(to.scales[s], load_scale<T>(scales + 16 * s));
        S::store(to.d, load_d<T>(block));
        if constexpr (has_mins(T)) {
            S::store(to.dmin, S::load_f16(block + 32));
            unpack_mins<T>(block, [&](auto j, const W& w) { S::store_w(to.mins + 64 * j, w); });
        }
    }

    template <Type T, bool kTiled, int C>
    static void large_columns(const Unpacked& unpacked, const Acts& x, int b, int first, float* out, int stride) {
        constexpr int each = by_sixteens(T) ? 4 : 8;  // quads that share a scale
        const size_t group = static_cast<size_t>(b) * x.padded() + first, at = static_cast<size_t>(b) * x.n + first;
        const int8_t* q = x.q256 + group * 256;
        I sum[C], mins[C];
        WARPSMITH_UNROLL
        for (int c = 0; c < C; c++) sum[c] = mins[c] = S::zero();
        for (int s = 0; s < 64 / each; s++) {
            I acc[C];
            WARPSMITH_UNROLL
            for (int c = 0; c < C; c++) acc[c] = by_sixteens(T) ? offset<T>(x.minus32[(at + c) * 16 + s]) : S::zero();
            if constexpr (kTiled) {
                S::template tile<each>(acc, unpacked.quads + 64 * each * s, q + 16 * each * s);
            } else {
                WARPSMITH_UNROLL
                for (int j = each * s; j < each * s + each; j++) dots<T, C>(acc, unpacked.quads + 64 * j, q + 16 * j);
            }
            const I scale = S::load(unpacked.scales[s]);
            WARPSMITH_UNROLL
            for (int c = 0; c < C; c++) sum[c] = S::mla(sum[c], acc[c], scale);
        }
        if constexpr (has_mins(T)) {
            constexpr int quads = T == Type::Q2_K ? 4 : 2;
            const int8_t* sums = T == Type::Q2_K ? x.sums16 + group * 32 : x.sums + group * 16;
            for (int j = 0; j < quads; j++) dots<T, C>(mins, unpacked.mins + 64 * j, sums + 16 * j);
            WARPSMITH_UNROLL
            for (int c = 0; c < C; c++) mins[c] = S::template shl<6>(mins[c]);
            for (int j = 0; j < quads; j++) dots<T, C>(mins, unpacked.mins + 64 * j, sums + 16 * (quads + j));
        }
        const F d = S::load(unpacked.d), dmin = has_mins(T) ? S::load(unpacked.dmin) : d;
        WARPSMITH_UNROLL
        for (int c = 0; c < C; c++) {
            float* to = out + static_cast<size_t>(first + c) * stride;
            const F before = b ? S::load(to) : S::set1(0.0f);
            S::store(to, add_block<T>(before, d, dmin, x.d256[at + c], sum[c], mins[c]));
        }
    }

    template <Type T, bool kTiled = false>
    static void large_blocks(const uint8_t* panel, const Acts& x, float* out, int stride) {
        if constexpr (S::kTileColumns > 0 && !kTiled) {
            if (x.n >= S::kTileColumns) return large_blocks<T, true>(panel, x, out, stride);
        }
        if (x.n == 1) return large_one<T>(panel, x, out);
        Unpacked unpacked;
        for (int b = 0; b < x.k / 256; b++) {
            unpack_block<T>(panel + static_cast<size_t>(b) * layout_of(T).packed_bytes, unpacked);
            if constexpr (kTiled) S::pair_quads(unpacked.quads, 64, unpacked.quads);
            int c = 0;
            for (; c + 4 <= x.n; c += 4) large_columns<T, kTiled, 4>(unpacked, x, b, c, out, stride);
            if (x.n - c == 3) large_columns<T, kTiled, 3>(unpacked, x, b, c, out, stride);
            if (x.n - c == 2) large_columns<T, kTiled, 2>(unpacked, x, b, c, out, stride);
            if (x.n - c == 1) large_columns<T, kTiled, 1>(unpacked, x, b, c, out, stride);
        }
    }
};

}  // namespace
}  // namespace warpsmith
