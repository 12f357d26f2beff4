// Sixteen lanes in plain C++, for any processor; also the definition of what every operation of a Simd struct means.
//
// A lane is a row of a panel. F is 16 floats, I 16 32-bit integers, W 16 rows of 4 weights in bytes (row r in bytes
// 4r .. 4r+3).
// dot<J>(acc, w, x): lane r gains the product of w's row r with bytes 4J .. 4J+3 of x; w is unsigned and below 64
// (dot_signed: a signed byte). unpack6 turns the planes of a Q6_K sub-block into quads that dot multiplies: kSixScale
// times the weight less 32, once kSixOffset times -32 sum(x) is added. shift<N> moves the bits of a byte N to the right,
// or left where N is negative; what comes in from a neighbour is for a mask to take away. insert<M>(x, bits) takes the
// bits M, zero in x, from `bits`. lookup: a byte below 16 numbers one of a table's. fma_x<J>(acc, w, x): lane r gains
// w[r] * x[J]. signed_quad: signed bytes as dot_signed wants them, kSignedOffset more than they are.
// kFloatColumns: columns that float weights multiply at a time. kDirectColumns: columns that a quantised weight in a
// register multiplies at a time; where it is 1, more than one share a block that was unpacked into memory. kTileColumns:
// from how many columns on quads are paired (pair_quads) and multiplied several columns at a time (tile); 0 for never.
// kQueries: queries that a key or a value in a register serves at a time.
#pragma once
#include <cstdint>
#include <cstring>

#include "packing.h"

namespace warpsmith {
namespace {

struct Generic {
    static constexpr int lanes = 16;
    static constexpr int kTileColumns = 0;
    static constexpr int kDirectColumns = 1;
    static constexpr int kQueries = 1;
    static constexpr int kFloatColumns = 4;
    typedef float F __attribute__((vector_size(64)));
    typedef int32_t I __attribute__((vector_size(64)));
    typedef uint8_t W __attribute__((vector_size(64)));
    typedef uint8_t U8 __attribute__((vector_size(16)));
    typedef int8_t I8 __attribute__((vector_size(16)));
    using X4 = const float*;
    using X16 = const int8_t*;

    static F load(const float* p) { F v; std::memcpy(&v, p, 64); return v; }
    static void store(float* p, F v) { std::memcpy(p, &v, 64); }
    static F set1(float v) { return F{} + v; }
    static F add(F x, F y) { return x + y; }
    static F sub(F x, F y) { return x - y; }
    static F mul(F x, F y) { return x * y; }
    static F div(F x, F y) { return x / y; }
    static F max(F x, F y) { return x > y ? x : y; }
    static F min(F x, F y) { return x < y ? x : y; }
    static F abs(F x) { return max(x, -x); }
    static F fma(F acc, F x, F y) { return acc + x * y; }
    static F fnma(F acc, F x, F y) { return acc - x * y; }
    static float reduce_add(F x) {
        for (int width = lanes / 2; width; width /= 2) {
            for (int i = 0; i < width; i++) x[i] += x[i + width];
        }
        return x[0];
    }
    static int32_t reduce_add(I x) {
        int32_t sum = 0;
        for (int i = 0; i < lanes; i++) sum += x[i];
        return sum;
    }
    static float reduce_max(F x) {
        float m = x[0];
        for (int i = 1; i < lanes; i++) m = x[i] > m ? x[i] : m;
        return m;
    }

    static X4 load_x4(const float* p) { return p; }
    template <int J>
    static F fma_x(F acc, F w, X4 x) { return acc + w * set1(x[J]); }

    static float half(uint16_t h) {
        // widen by scaling: subnormal halves become normal floats
        const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, rest = h & 0x7fff;
        uint32_t bits = rest << 13;
        float v;
        std::memcpy(&v, &bits, 4);
        v *= 0x1p112f;
        std::memcpy(&bits, &v, 4);
        if (rest >= 0x7c00) bits |= 0x7f800000u;
        bits |= sign;
        std::memcpy(&v, &bits, 4);
        return v;
    }
    static uint16_t to_half(float f) {
        // round to nearest even; values past the largest half become infinite
        uint32_t bits;
        std::memcpy(&bits, &f, 4);
        const uint32_t sign = bits >> 16 & 0x8000;
        bits &= 0x7fffffffu;
        if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00);
        if (bits >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00);
        if (bits < 0x38800000u) {  // subnormal: let the float adder do the rounding
            float v;
            std::memcpy(&v, &bits, 4);
            v += 0.5f;
            std::memcpy(&bits, &v, 4);
            return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
        }
        bits += 0xfffu + (bits >> 13 & 1);
        return static_cast<uint16_t>(sign | ((bits - 0x38000000u) >> 13));
    }
    static void load_bf16(const uint8_t* p, F& first, F& second) {
        const I words = load(reinterpret_cast<const int32_t*>(p));
        const I low = words << 16, high = words & set1(-65536);
        first = reinterpret_cast<F>(low);
        second = reinterpret_cast<F>(high);
    }
    static F load_f16(const uint8_t* p) {
        F v;
        for (int i = 0; i < lanes; i++) {
            uint16_t h;
            std::memcpy(&h, p + 2 * i, 2);
            v[i] = half(h);
        }
        return v;
    }
    static void store_f16(uint8_t* p, F v) {
        for (int i = 0; i < lanes; i++) {
            const uint16_t h = to_half(v[i]);
            std::memcpy(p + 2 * i, &h, 2);
        }
    }

    static I zero() { return I{}; }
    static I set1(int32_t v) { return I{} + v; }
    static I load(const int32_t* p) { I v; std::memcpy(&v, p, 64); return v; }
    static void store(int32_t* p, I v) { std::memcpy(p, &v, 64); }
    static I mla(I acc, I x, I y) { return acc + x * y; }
    template <int N>
    static I shl(I x) { return x << N; }
    static I load_u8(const uint8_t* p) { U8 v; std::memcpy(&v, p, 16); return __builtin_convertvector(v, I); }
    static I load_i8(const uint8_t* p) { I8 v; std::memcpy(&v, p, 16); return __builtin_convertvector(v, I); }
    static F to_float(I x) { return __builtin_convertvector(x, F); }
    static I round(F x) {  // to nearest even, for |x| < 2^22
        const F magic = set1(12582912.0f);
        return __builtin_convertvector((x + magic) - magic, I);
    }
    static F pow2(I n) { const I bits = (n + set1(127)) << 23; F v; std::memcpy(&v, &bits, 64); return v; }
    static void store_i8(int8_t* p, I v) { const I8 bytes = __builtin_convertvector(v, I8); std::memcpy(p, &bytes, 16); }

    static W load_w(const uint8_t* p) { W w; std::memcpy(&w, p, 64); return w; }
    static void store_w(uint8_t* p, W w) { std::memcpy(p, &w, 64); }
    static W and_n(W w, uint8_t mask) { return w & mask; }
    template <int N>
    static W shr(W w) { return w >> N; }
    template <int N>
    static W shift(W w) { return N < 0 ? w << (N < 0 ? -N : 0) : w >> (N < 0 ? 0 : N); }
    template <int M>
    static W insert(W w, W bits) { return w | (bits & static_cast<uint8_t>(M)); }
    static constexpr int kSignedOffset = 0;
    static W signed_quad(W w) { return w; }
    static W lookup(const uint8_t* table, W w) {
        for (int i = 0; i < 64; i++) w[i] = table[w[i]];
        return w;
    }
    static constexpr int kSixScale = 4, kSixOffset = 0;
    static void unpack6(W p0, W p1, W p2, W* w) {
        w[0] = p0 & 0xfc, w[1] = p1 & 0xfc, w[2] = p2 & 0xfc;
        w[3] = p0 << 6 | (p1 & 3) << 4 | (p2 & 3) << 2;
    }
    static X16 load_x(const int8_t* p) { return p; }
    template <int J>
    static I dot(I acc, W w, X16 x) {
        const I words = reinterpret_cast<I>(w);  // a row each; shifting left and back extends the sign of one byte
        for (int t = 0; t < 4; t++) acc += (words << (24 - 8 * t) >> 24) * static_cast<int32_t>(x[4 * J + t]);
        return acc;
    }
    template <int J>
    static I dot_signed(I acc, W w, X16 x) { return dot<J>(acc, w, x); }
    static void prefetch(const uint8_t*) {}
    static void prefetch_far(const uint8_t*) {}
};

}  // namespace
}  // namespace warpsmith
