// AVX-512 with VNNI: sixteen lanes, a whole panel. See simd_generic.h for what each operation means.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace warpsmith {
namespace {

struct Avx512 {
    static constexpr int lanes = 16;
    static constexpr int kTileColumns = 0;
    static constexpr int kDirectColumns = 8;
    static constexpr int kQueries = 4;
    static constexpr int kFloatColumns = 8;
    using F = __m512;
    using I = __m512i;
    using W = __m512i;
    using X4 = const float*;
    using X16 = const int8_t*;

    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
    static F set1(float v) { return _mm512_set1_ps(v); }
    static F add(F x, F y) { return _mm512_add_ps(x, y); }
    static F sub(F x, F y) { return _mm512_sub_ps(x, y); }
    static F mul(F x, F y) { return _mm512_mul_ps(x, y); }
    static F div(F x, F y) { return _mm512_div_ps(x, y); }
    static F max(F x, F y) { return _mm512_max_ps(x, y); }
    static F min(F x, F y) { return _mm512_min_ps(x, y); }
    static F abs(F x) { return _mm512_abs_ps(x); }
    static F fma(F acc, F x, F y) { return _mm512_fmadd_ps(x, y, acc); }
    static F fnma(F acc, F x, F y) { return _mm512_fnmadd_ps(x, y, acc); }
    static float reduce_add(F x) { return _mm512_reduce_add_ps(x); }
    static int32_t reduce_add(I x) { return _mm512_reduce_add_epi32(x); }
    static float reduce_max(F x) { return _mm512_reduce_max_ps(x); }

    static X4 load_x4(const float* p) { return p; }
    template <int J>
    static F fma_x(F acc, F w, X4 x) { return _mm512_fmadd_ps(w, _mm512_set1_ps(x[J]), acc); }

    static __m256i load32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    static void load_bf16(const uint8_t* p, F& first, F& second) {
        const __m512i words = _mm512_loadu_si512(p);
        first = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
        second = _mm512_castsi512_ps(_mm512_and_si512(words, set1(-65536)));
    }
    static F load_f16(const uint8_t* p) { return _mm512_cvtph_ps(load32(p)); }
    static void store_f16(uint8_t* p, F v) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    }

    static I zero() { return _mm512_setzero_si512(); }
    static I set1(int32_t v) { return _mm512_set1_epi32(v); }
    static I load(const int32_t* p) { return _mm512_loadu_si512(p); }
    static void store(int32_t* p, I v) { _mm512_storeu_si512(p, v); }
    static I mla(I acc, I x, I y) { return _mm512_add_epi32(acc, _mm512_mullo_epi32(x, y)); }
    template <int N>
    static I shl(I x) { return _mm512_slli_epi32(x, N); }
    static __m128i load16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
    static I load_u8(const uint8_t* p) { return _mm512_cvtepu8_epi32(load16(p)); }
    static I load_i8(const uint8_t* p) { return _mm512_cvtepi8_epi32(load16(p)); }
    static F to_float(I x) { return _mm512_cvtepi32_ps(x); }
    static I round(F x) { return _mm512_cvtps_epi32(x); }
    static F pow2(I n) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
    }
    static void store_i8(int8_t* p, I v) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(v));
    }

    static W load_w(const uint8_t* p) { return _mm512_loadu_si512(p); }
    static void store_w(uint8_t* p, W v) { _mm512_storeu_si512(p, v); }
    static W and_n(W w, uint8_t mask) { return _mm512_and_si512(w, _mm512_set1_epi8(static_cast<char>(mask))); }
    template <int N>
    static W shr(W w) { return and_n(_mm512_srli_epi16(w, N), static_cast<uint8_t>(0xff >> N)); }
    template <int N>
    static W shift(W w) { return N < 0 ? _mm512_slli_epi16(w, N < 0 ? -N : 0) : _mm512_srli_epi16(w, N < 0 ? 0 : N); }
    template <int M>
    static W insert(W w, W bits) {
        return _mm512_ternarylogic_epi32(w, bits, _mm512_set1_epi8(M), 0xf8);  // w | bits & M
    }
    // The dot product instruction wants unsigned weights: 128 more than they are.
    static constexpr int kSignedOffset = 128;
    static W signed_quad(W w) { return _mm512_xor_si512(w, _mm512_set1_epi8(static_cast<char>(0x80))); }
    static W lookup(const uint8_t* table, W w) {
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load16(table)), w);
    }

    // Unsigned bytes, four times the weight: the dot product instruction does not saturate.
    static constexpr int kSixScale = 4, kSixOffset = 4;
    static void unpack6(W p0, W p1, W p2, W* w) {
        const W flip = _mm512_set1_epi8(static_cast<char>(0x80));
        w[0] = _mm512_xor_si512(and_n(p0, 0xfc), flip);
        w[1] = _mm512_xor_si512(and_n(p1, 0xfc), flip);
        w[2] = _mm512_xor_si512(and_n(p2, 0xfc), flip);
        const W high = _mm512_slli_epi16(and_n(p0, 3), 6), middle = _mm512_slli_epi16(and_n(p1, 3), 4);
        const W low = _mm512_slli_epi16(and_n(p2, 3), 2);
        w[3] = _mm512_xor_si512(_mm512_or_si512(_mm512_or_si512(high, middle), low), flip);
    }
    static X16 load_x(const int8_t* p) { return p; }
    static __m512i quad(X16 x, int j) {
        int32_t v;
        std::memcpy(&v, x + 4 * j, 4);
        return _mm512_set1_epi32(v);
    }
    template <int J>
    static I dot(I acc, W w, X16 x) { return _mm512_dpbusd_epi32(acc, w, quad(x, J)); }
    template <int J>
    static I dot_signed(I acc, W w, X16 x) { return dot<J>(acc, w, x); }
    // Forced inline: GCC deems a function that does nothing but prefetch to do nothing, and leaves out calls of it.
    static WARPSMITH_INLINE void prefetch(const uint8_t* p) {
        _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
    }
    static WARPSMITH_INLINE void prefetch_far(const uint8_t* p) {
        _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
    }
};

}  // namespace
}  // namespace warpsmith
