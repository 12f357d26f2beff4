// A panel of 16 rows times n columns, for the types with 256 weights a block and integer sub-scales: Q2_K to Q6_K, Levels.
#pragma once
#include <cstring>

#include "kernels_matmul.h"

namespace warpsmith {
namespace {

template <class S>
struct LargePanel {
    using P = Panel<S>;
    using F = typename S::F;
    using I = typename S::I;
    using W = typename S::W;
    using X16 = typename S::X16;
    template <int J>
    using Quad = typename P::template Quad<J>;

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
        P::fetch(block + s * share, share);
        const X16 low = S::load_x(q + 32 * s), high = S::load_x(q + 32 * s + 16);
        if constexpr (by_sixteens(T)) {
            I a = offset<T>(minus32[2 * s]), b = offset<T>(minus32[2 * s + 1]);
            P::template unpack<T, kSub>(block, group, [&](auto j, const W& w) {
                if constexpr (j < 4) a = P::template dot<T, j>(a, w, low);
                else b = P::template dot<T, j % 4>(b, w, high);
            });
            return S::mla(S::mla(sum, a, load_scale<T>(scales + 32 * s)), b, load_scale<T>(scales + 32 * s + 16));
        } else {
            I a = S::zero();
            P::template unpack<T, kSub>(block, group, [&](auto j, const W& w) {
                a = P::template dot<T, j % 4>(a, w, j < 4 ? low : high);
            });
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
            unpack_mins<T>(block, [&](auto j, const W& w) { mins = P::template dot<T, j>(mins, w, high); });
            mins = S::template shl<6>(mins);
            unpack_mins<T>(block, [&](auto j, const W& w) { mins = P::template dot<T, j>(mins, w, low); });
        } else if constexpr (has_mins(T)) {
            const X16 sums = S::load_x(x.sums + 16 * b);
            unpack_mins<T>(block, [&](auto j, const W& w) { mins = P::template dot<T, j>(mins, w, sums); });
            mins = S::template shl<6>(mins);
            unpack_mins<T>(block, [&](auto j, const W& w) { mins = P::template dot<T, j + 2>(mins, w, sums); });
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
        P::template unpack<T, kSub>(block, group, [&](auto j, const W& w) { S::store_w(quads + 64 * j, w); });
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
                for (int j = each * s; j < each * s + each; j++) {
                    P::template dots<T, C>(acc, unpacked.quads + 64 * j, q + 16 * j);
                }
            }
            const I scale = S::load(unpacked.scales[s]);
            WARPSMITH_UNROLL
            for (int c = 0; c < C; c++) sum[c] = S::mla(sum[c], acc[c], scale);
        }
        if constexpr (has_mins(T)) {
            constexpr int quads = T == Type::Q2_K ? 4 : 2;
            const int8_t* sums = T == Type::Q2_K ? x.sums16 + group * 32 : x.sums + group * 16;
            for (int j = 0; j < quads; j++) P::template dots<T, C>(mins, unpacked.mins + 64 * j, sums + 16 * j);
            WARPSMITH_UNROLL
            for (int c = 0; c < C; c++) mins[c] = S::template shl<6>(mins[c]);
            for (int j = 0; j < quads; j++) {
                P::template dots<T, C>(mins, unpacked.mins + 64 * j, sums + 16 * (quads + j));
            }
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
