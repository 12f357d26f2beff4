// A panel of 16 rows times n columns, as templates over a Simd struct: float weights, and blocks of 32 with one scale.
// Blocks of 256 are in kernels_large.h.
//
// Float weights: each output is one chain of fused multiply-adds over k = 0, 1, 2 ... Quantised weights: integer dot
// products within a block (exact, so their order is free), one or two fused multiply-adds a block, blocks in order.
// So a column gets the same bits alone and among others, and whether its weights go from the panel through registers or
// are unpacked into memory first.
#pragma once
#include <type_traits>
#include <utility>

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
    template <int C>
    using Count = std::integral_constant<int, C>;

    // For the first columns weights are a stream from memory. It is fetched in two steps: into the second cache well
    // ahead, where enough lines can be under way to fill memory's latency, and from there into the first. Where many
    // columns keep the core busy one step is enough, and the other would take turns away from their loads.
    static constexpr int kNear = 2048, kFar = 4096, kMany = 8;
    template <int C = 1>
    static WARPSMITH_INLINE void fetch(const uint8_t* from, int bytes) {
        WARPSMITH_UNROLL
        for (int i = 0; i < bytes; i += 64) {
            S::prefetch(from + (C < kMany ? kNear : kFar) + i);
            if (C < kMany) S::prefetch_far(from + kFar + i);
        }
    }

    // Hand n columns to `take(count, first)`: `most` at a time, then those that are left, all at once.
    template <int most, class Take>
    static WARPSMITH_INLINE void in_groups(int n, const Take& take) {
        int first = 0;
        for (; first + most <= n; first += most) take(Count<most>(), first);
        if constexpr (most > 1) rest(n - first, first, take, std::make_integer_sequence<int, most - 1>());
    }
    template <class Take, int... less>
    static WARPSMITH_INLINE void rest(int n, int first, const Take& take, std::integer_sequence<int, less...>) {
        ((n == less + 1 ? take(Count<less + 1>(), first) : void()), ...);
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
            if (first == 0) fetch(w, 4 * kPanel * L::bytes);
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
        in_groups<S::kFloatColumns>(x.n, [&](auto count, int first) {
            float_columns<L, count>(panel, x, first, out, stride);
        });
    }

    // -- quads of quantised weights ----------------------------------------------------------------------------------

    // Hand the eight quads of 32 weights to `take(Quad<j>, quad)`: sub-block s = 4 * group + kSub of a K-quant's
    // eight, or a whole block of the others.
    template <Type T, int kSub = 0, class Take>
    static WARPSMITH_INLINE void unpack(const uint8_t* block, int group, const Take& take) {
        const int s = 4 * group + kSub;
        if constexpr (T == Type::Q8_0) {
            const auto quad = [&](auto j) { take(j, S::signed_quad(S::load_w(block + 32 + 64 * j))); };
            quad(Quad<0>()), quad(Quad<1>()), quad(Quad<2>()), quad(Quad<3>());
            quad(Quad<4>()), quad(Quad<5>()), quad(Quad<6>()), quad(Quad<7>());
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
                    take(low, S::signed_quad(S::lookup(block + kLevels, below)));
                    take(high, S::signed_quad(S::lookup(block + kLevels, above)));
                } else {
                    take(low, below);
                    take(high, above);
                }
            };
            line(Quad<0>(), Quad<4>()), line(Quad<1>(), Quad<5>());
            line(Quad<2>(), Quad<6>()), line(Quad<3>(), Quad<7>());
        }
    }

    template <Type T, int J>
    static WARPSMITH_INLINE I dot(I acc, const W& w, X16 x) {
        if constexpr (T == Type::Q8_0 || T == Type::Levels) return S::template dot_signed<J>(acc, w, x);
        else return S::template dot<J>(acc, w, x);
    }

    // A quad, the j-th of a block of `elems` weights, times C columns that lie in fours side by side.
    template <Type T, int C, int kFrom = 0>
    static WARPSMITH_INLINE void dots(I (&acc)[C], const W& w, const int8_t* x, int elems, int j) {
        acc[kFrom] = dot<T, kFrom % 4>(acc[kFrom], w, S::load_x(x + kFrom / 4 * 4 * elems + 16 * j));
        if constexpr (kFrom + 1 < C) dots<T, C, kFrom + 1>(acc, w, x, elems, j);
    }

    // The same with a column that may lie by itself.
    template <Type T, int C, bool kAlone, int J>
    static WARPSMITH_INLINE void direct_dots(I (&acc)[C], const W& w, const int8_t* x, int elems) {
        if constexpr (kAlone) acc[0] = dot<T, J % 4>(acc[0], w, S::load_x(x + J / 4 * 16));
        else dots<T, C>(acc, w, x, elems, J);
    }

    // -- 32 weights a block, a float scale each: Q8_0 and Q4_0 -------------------------------------------------------

    // Thirty-two weights times x, to begin with: what the offset of unsigned weights takes away.
    template <Type T>
    static WARPSMITH_INLINE I small_offset(const Acts& x, size_t at) {
        static_assert(S::kSignedOffset == 0 || S::kSignedOffset == 128);
        if constexpr (T == Type::Q4_0) return S::set1(x.minus8[at]);
        else return S::kSignedOffset ? S::set1(x.minus128[at]) : S::zero();
    }

    // C columns from `first` on, or the only one there is. Weights come straight from the panel.
    template <Type T, int C, bool kAlone = false>
    static void small_direct(const uint8_t* panel, const Acts& x, int first, float* out, int stride) {
        constexpr int bytes = layout_of(T).packed_bytes;
        F total[C];
        WARPSMITH_UNROLL
        for (int c = 0; c < C; c++) total[c] = S::set1(0.0f);
        for (int b = 0; b < x.k / 32; b++) {
            const uint8_t* block = panel + static_cast<size_t>(b) * bytes;
            if (first == 0) fetch<C>(block, bytes);
            const int8_t* q = x.q32 + (static_cast<size_t>(b) * x.padded() + first) * 32;
            I acc[C];
            WARPSMITH_UNROLL
            for (int c = 0; c < C; c++) acc[c] = small_offset<T>(x, x.small(b, first, c));
            unpack<T>(block, 0, [&](auto j, const W& w) { direct_dots<T, C, kAlone, j>(acc, w, q, 32); });
            const F d = S::load_f16(block);
            WARPSMITH_UNROLL
            for (int c = 0; c < C; c++) {
                total[c] = S::fma(total[c], S::mul(d, S::set1(x.d32[x.small(b, first, c)])), S::to_float(acc[c]));
            }
        }
        WARPSMITH_UNROLL
        for (int c = 0; c < C; c++) S::store(out + static_cast<size_t>(first + c) * stride, total[c]);
    }

    template <Type T, bool kTiled, int C>
    static void small_columns(const uint8_t* quads, F d, const Acts& x, int b, int first, float* out, int stride) {
        const int8_t* q = x.q32 + (static_cast<size_t>(b) * x.padded() + first) * 32;
        I acc[C];
        WARPSMITH_UNROLL
        for (int c = 0; c < C; c++) acc[c] = small_offset<T>(x, x.small(b, first, c));
        if constexpr (kTiled) {
            S::template tile<8>(acc, quads, q);
        } else {
            WARPSMITH_UNROLL
            for (int j = 0; j < 8; j++) dots<T, C>(acc, S::load_w(quads + 64 * j), q, 32, j);
        }
        WARPSMITH_UNROLL
        for (int c = 0; c < C; c++) {
            float* to = out + static_cast<size_t>(first + c) * stride;
            const F before = b ? S::load(to) : S::set1(0.0f);
            S::store(to, S::fma(before, S::mul(d, S::set1(x.d32[x.small(b, first, c)])), S::to_float(acc[c])));
        }
    }

    template <Type T, bool kTiled = false>
    static void small_blocks(const uint8_t* panel, const Acts& x, float* out, int stride) {
        if constexpr (S::kTileColumns > 0 && !kTiled) {
            if (x.n >= S::kTileColumns) return small_blocks<T, true>(panel, x, out, stride);
        }
        if (x.n == 1) return small_direct<T, 1, true>(panel, x, 0, out, stride);
        if constexpr (S::kDirectColumns > 1) {
            in_groups<S::kDirectColumns>(x.n, [&](auto count, int first) {
                small_direct<T, count>(panel, x, first, out, stride);
            });
        } else {
            small_unpacked<T, kTiled>(panel, x, out, stride);
        }
    }

    // Columns four at a time, for which a block is unpacked into memory once.
    template <Type T, bool kTiled>
    static void small_unpacked(const uint8_t* panel, const Acts& x, float* out, int stride) {
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
            in_groups<4>(x.n, [&](auto count, int first) {
                small_columns<T, kTiled, count>(quads, d, x, b, first, out, stride);
            });
        }
    }
};

}  // namespace
}  // namespace warpsmith
