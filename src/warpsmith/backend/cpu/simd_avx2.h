// AVX2 with FMA and F16C: eight lanes. See simd_generic.h for what each operation means.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace warpsmith {
namespace {

struct Avx2 {
    static constexpr int lanes = 8;
    using F = __m256;
    using I = __m256i;
    using W = __m256i;
    using X4 = const float*;
    using X16 = const int8_t*;
    using M = __m256i;

    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
    static F set1(float v) { return _mm256_set1_ps(v); }
    static F add(F x, F y) { return _mm256_add_ps(x, y); }
    static F sub(F x, F y) { return _mm256_sub_ps(x, y); }
    static F mul(F x, F y) { return _mm256_mul_ps(x, y); }
    static F div(F x, F y) { return _mm256_div_ps(x, y); }
    static F max(F x, F y) { return _mm256_max_ps(x, y); }
    static F min(F x, F y) { return _mm256_min_ps(x, y); }
    static F abs(F x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
    static F fma(F acc, F x, F y) { return _mm256_fmadd_ps(x, y, acc); }
    static F fnma(F acc, F x, F y) { return _mm256_fnmadd_ps(x, y, acc); }
    static float reduce_add(F x) {
        __m128 v = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        v = _mm_add_ps(v, _mm_movehl_ps(v, v));
        return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
    }
    static float reduce_max(F x) {
        __m128 v = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        v = _mm_max_ps(v, _mm_movehl_ps(v, v));
        return _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)));
    }

    static X4 load_x4(const float* p) { return p; }
    template <int J>
    static F fma_x(F acc, F w, X4 x) { return _mm256_fmadd_ps(w, _mm256_broadcast_ss(x + J), acc); }

    static __m128i load16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
    static F load_bf16(const uint8_t* p) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load16(p)), 16));
    }
    static F load_f16(const uint8_t* p) { return _mm256_cvtph_ps(load16(p)); }
    static void store_f16(uint8_t* p, F v) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    }

    static I zero() { return _mm256_setzero_si256(); }
    static I set1(int32_t v) { return _mm256_set1_epi32(v); }
    static I load(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    static void store(int32_t* p, I v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
    static I mul(I x, I y) { return _mm256_mullo_epi32(x, y); }
    static I mla(I acc, I x, I y) { return _mm256_add_epi32(acc, _mm256_mullo_epi32(x, y)); }
    static __m128i load8(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
    static I load_u8(const uint8_t* p) { return _mm256_cvtepu8_epi32(load8(p)); }
    static I load_i8(const uint8_t* p) { return _mm256_cvtepi8_epi32(load8(p)); }
    static F to_float(I x) { return _mm256_cvtepi32_ps(x); }
    static I round(F x) { return _mm256_cvtps_epi32(x); }
    static F pow2(I n) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
    }
    static void store_i8(int8_t* p, I v) {
        const __m128i w = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(w, w));
    }

    static M load_mins(const uint8_t* p) { return load_u8(p); }
    static I mins_dot(const M* m, const int16_t* sums) {
        // pairs of sub-blocks: a min in the low half of a lane, the next one's in the high half
        I acc = zero();
        for (int s = 0; s < 8; s += 2) {
            int32_t pair;
            std::memcpy(&pair, sums + s, 4);
            const I both = _mm256_or_si256(m[s], _mm256_slli_epi32(m[s + 1], 16));
            acc = _mm256_add_epi32(acc, _mm256_madd_epi16(both, _mm256_set1_epi32(pair)));
        }
        return acc;
    }

    static W load_w(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    static W and_n(W w, uint8_t mask) { return _mm256_and_si256(w, _mm256_set1_epi8(static_cast<char>(mask))); }
    template <int N>
    static W shr(W w) { return and_n(_mm256_srli_epi16(w, N), static_cast<uint8_t>(0xff >> N)); }
    static W insert_high(W low, W high) { return _mm256_or_si256(and_n(low, 15), _mm256_slli_epi16(and_n(high, 15), 4)); }

    // Bytes in 0 .. 63: the product of two of them with signed bytes fits in 16 bits.
    static constexpr int kSixScale = 1, kSixOffset = 1;
    static void unpack6(W p0, W p1, W p2, W* w) {
        const W flip = _mm256_set1_epi8(0x20);
        w[0] = _mm256_xor_si256(shr<2>(p0), flip);
        w[1] = _mm256_xor_si256(shr<2>(p1), flip);
        w[2] = _mm256_xor_si256(shr<2>(p2), flip);
        const W high = _mm256_slli_epi16(and_n(p0, 3), 4), middle = _mm256_slli_epi16(and_n(p1, 3), 2);
        w[3] = _mm256_xor_si256(_mm256_or_si256(_mm256_or_si256(high, middle), and_n(p2, 3)), flip);
    }
    static X16 load_x(const int8_t* p) { return p; }
    static __m256i quad(X16 x, int j) {
        int32_t v;
        std::memcpy(&v, x + 4 * j, 4);
        return _mm256_set1_epi32(v);
    }
    static I add_products(I acc, __m256i unsigned_bytes, __m256i signed_bytes) {
        const __m256i pairs = _mm256_maddubs_epi16(unsigned_bytes, signed_bytes);
        return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    template <int J>
    static I dot(I acc, W w, X16 x) { return add_products(acc, w, quad(x, J)); }
    template <int J>
    static I dot_signed(I acc, W w, X16 x) {
        return add_products(acc, _mm256_abs_epi8(w), _mm256_sign_epi8(quad(x, J), w));
    }
    static void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }
};

}  // namespace
}  // namespace warpsmith
