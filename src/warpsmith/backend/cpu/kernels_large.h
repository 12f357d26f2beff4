// A panel of 16 rows times n columns, for the types with 256 weights a block and integer sub-scales: Q2_K to Q6_K and
// Levels.
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
        else if constexpr (T == Type::Levels && S::kSignedOffset != 0) return S::set1(S::kSignedOffset / 32 * minus32);
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

    // Sums of C columns over sub-blocks of scale * (weights . x) gain those of 32 weights.
    template <Type T, int C, bool kAlone, int kSub>
    static WARPSMITH_INLINE void sub_block(I (&sum)[C], const uint8_t* block, const uint8_t* scales, int group,
                                           const int8_t* q, const int32_t* minus32, bool fetch) {
        constexpr int share = (layout_of(T).packed_bytes / 8 + 63) / 64 * 64;  // of the bytes to fetch, an eighth
        const int s = 4 * group + kSub;
        if (fetch) P::fetch(block + s * share, share);
        q += (kAlone ? 32 : 128) * s;
        I low[C], high[C];
        WARPSMITH_UNROLL
        for (int c = 0; c < C; c++) {
            low[c] = by_sixteens(T) ? offset<T>(minus32[16 * c + 2 * s]) : S::zero();
            if constexpr (by_sixteens(T)) high[c] = offset<T>(minus32[16 * c + 2 * s + 1]);
        }
        P::template unpack<T, kSub>(block, group, [&](auto j, const W& w) {
            if constexpr (j < 4 || !by_sixteens(T)) P::template direct_dots<T, C, kAlone, j>(low, w, q, 256);
            else P::template direct_dots<T, C, kAlone, j>(high, w, q, 256);
        });
        const I scale = load_scale<T>(scales + (by_sixteens(T) ? 32 : 16) * s);
        WARPSMITH_UNROLL
        for (int c = 0; c < C; c++) sum[c] = S::mla(sum[c], low[c], scale);
        if constexpr (by_sixteens(T)) {
            const I second = load_scale<T>(scales + 32 * s + 16);
            WARPSMITH_UNROLL
            for (int c = 0; c < C; c++) sum[c] = S::mla(sum[c], high[c], second);
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

    // Products of C columns' sums of activations with mins.
    template <Type T, int C, bool kAlone>
    static WARPSMITH_INLINE void minimums(I (&mins)[C], const uint8_t* block, const int8_t* sums) {
        constexpr int quads = T == Type::Q2_K ? 4 : 2;
        unpack_mins<T>(block, [&](auto j, const W& w) {
            P::template direct_dots<T, C, kAlone, j>(mins, w, sums, 8 * quads);
        });
        WARPSMITH_UNROLL
        for (int c = 0; c < C; c++) mins[c] = S::template shl<6>(mins[c]);
        unpack_mins<T>(block, [&](auto j, const W& w) {
            P::template direct_dots<T, C, kAlone, j + quads>(mins, w, sums, 8 * quads);
        });
    }

    // C columns from `first` on, or the only one there is. Weights come straight from the panel.
    template <Type T, int C, bool kAlone = false>
    static void large_direct(const uint8_t* panel, const Acts& x, int first, float* out, int stride) {
        constexpr int bytes = layout_of(T).packed_bytes;
        alignas(64) uint8_t room[256];
        F total[C];
        WARPSMITH_UNROLL
        for (int c = 0; c < C; c++) total[c] = S::set1(0.0f);
        for (int b = 0; b < x.k / 256; b++) {
            const uint8_t* block = panel + static_cast<size_t>(b) * bytes;
            const uint8_t* scales = scales_of<T>(block, room);
            const size_t columns = static_cast<size_t>(b) * x.padded() + first;
            const size_t at = static_cast<size_t>(b) * x.n + first;
            const int8_t* q = x.q256 + columns * 256;
            const int32_t* minus32 = x.minus32 + at * 16;
            I sum[C], mins[C];
            WARPSMITH_UNROLL
            for (int c = 0; c < C; c++) sum[c] = mins[c] = S::zero();
            for (int group = 0; group < 2; group++) {
                sub_block<T, C, kAlone, 0>(sum, block, scales, group, q, minus32, first == 0);
                sub_block<T, C, kAlone, 1>(sum, block, scales, group, q, minus32, first == 0);
                sub_block<T, C, kAlone, 2>(sum, block, scales, group, q, minus32, first == 0);
                sub_block<T, C, kAlone, 3>(sum, block, scales, group, q, minus32, first == 0);
            }
            if constexpr (T == Type::Q2_K) minimums<T, C, kAlone>(mins, block, x.sums16 + columns * 32);
            else if constexpr (has_mins(T)) minimums<T, C, kAlone>(mins, block, x.sums + columns * 16);
            const F d = load_d<T>(block), dmin = S::load_f16(block + 32);
            WARPSMITH_UNROLL
            for (int c = 0; c < C; c++) total[c] = add_block<T>(total[c], d, dmin, x.d256[at + c], sum[c], mins[c]);
        }
        WARPSMITH_UNROLL
        for (int c = 0; c < C; c++) S::store(out + static_cast<size_t>(first + c) * stride, total[c]);
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
                    P::template dots<T, C>(acc, S::load_w(unpacked.quads + 64 * j), q, 256, j);
                }
            }
            const I scale = S::load(unpacked.scales[s]);
            WARPSMITH_UNROLL
            for (int c = 0; c < C; c++) sum[c] = S::mla(sum[c], acc[c], scale);
        }
        if constexpr (has_mins(T)) {
            constexpr int quads = T == Type::Q2_K ? 4 : 2;
            const int8_t* sums = T == Type::Q2_K ? x.sums16 + group * 32 : x.sums + group * 16;
            const auto add = [&](int from) {
                for (int j = 0; j < quads; j++) {
                    P::template dots<T, C>(mins, S::load_w(unpacked.mins + 64 * j), sums, 8 * quads, from + j);
                }
            };
            add(0);
            WARPSMITH_UNROLL
            for (int c = 0; c < C; c++) mins[c] = S::template shl<6>(mins[c]);
            add(quads);
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
        if (x.n == 1) return large_direct<T, 1, true>(panel, x, 0, out, stride);
        if constexpr (S::kDirectColumns > 1) {
            P::template in_groups<S::kDirectColumns>(x.n, [&](auto count, int first) {
                large_direct<T, count>(panel, x, first, out, stride);
            });
        } else {
            large_unpacked<T, kTiled>(panel, x, out, stride);
        }
    }

    // Columns four at a time, for which a block is unpacked into memory once.
    template <Type T, bool kTiled>
    static void large_unpacked(const uint8_t* panel, const Acts& x, float* out, int stride) {
        Unpacked unpacked;
        for (int b = 0; b < x.k / 256; b++) {
            unpack_block<T>(panel + static_cast<size_t>(b) * layout_of(T).packed_bytes, unpacked);
            if constexpr (kTiled) S::pair_quads(unpacked.quads, 64, unpacked.quads);
            P::template in_groups<4>(x.n, [&](auto count, int first) {
                large_columns<T, kTiled, count>(unpacked, x, b, first, out, stride);
            });
        }
    }
};

}  // namespace
}  // namespace warpsmith
