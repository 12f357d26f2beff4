// AVX2 with FMA and F16C: sixteen lanes as two eights. See simd_generic.h for what each operation means.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace warpsmith {
namespace {

struct Avx2 {
    static constexpr int lanes = 16;
    static constexpr int kTileColumns = 0;
    static constexpr int kDirectColumns = 1;
    static constexpr int kQueries = 1;
    static constexpr int kFloatColumns = 4;
    struct F { __m256 v[2]; };
    struct I { __m256i v[2]; };
    struct W { __m256i v[2]; };
    using X4 = const float*;
    using X16 = const int8_t*;

    template <class R, class Op>
    static WARPSMITH_INLINE R each(const Op& op) { return {{op(0), op(1)}}; }

    static F load(const float* p) { return each<F>([&](int i) { return _mm256_loadu_ps(p + 8 * i); }); }
    static void store(float* p, F x) {
        for (int i = 0; i < 2; i++) _mm256_storeu_ps(p + 8 * i, x.v[i]);
    }
    static F set1(float x) { return each<F>([&](int) { return _mm256_set1_ps(x); }); }
    static F add(F x, F y) { return each<F>([&](int i) { return _mm256_add_ps(x.v[i], y.v[i]); }); }
    static F sub(F x, F y) { return each<F>([&](int i) { return _mm256_sub_ps(x.v[i], y.v[i]); }); }
    static F mul(F x, F y) { return each<F>([&](int i) { return _mm256_mul_ps(x.v[i], y.v[i]); }); }
    static F div(F x, F y) { return each<F>([&](int i) { return _mm256_div_ps(x.v[i], y.v[i]); }); }
    static F max(F x, F y) { return each<F>([&](int i) { return _mm256_max_ps(x.v[i], y.v[i]); }); }
    static F min(F x, F y) { return each<F>([&](int i) { return _mm256_min_ps(x.v[i], y.v[i]); }); }
    static F abs(F x) { return each<F>([&](int i) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x.v[i]); }); }
    static F fma(F acc, F x, F y) { return each<F>([&](int i) { return _mm256_fmadd_ps(x.v[i], y.v[i], acc.v[i]); }); }
    static F fnma(F acc, F x, F y) { return each<F>([&](int i) { return _mm256_fnmadd_ps(x.v[i], y.v[i], acc.v[i]); }); }
    static float reduce_add(F x) {
        const __m256 both = _mm256_add_ps(x.v[0], x.v[1]);
        __m128 v = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
        v = _mm_add_ps(v, _mm_movehl_ps(v, v));
        return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
    }
    static int32_t reduce_add(I x) {
        const __m256i both = _mm256_add_epi32(x.v[0], x.v[1]);
        __m128i v = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
        v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0x4e));
        return _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32(v, 0xb1)));
    }
    static float reduce_max(F x) {
        const __m256 both = _mm256_max_ps(x.v[0], x.v[1]);
        __m128 v = _mm_max_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
        v = _mm_max_ps(v, _mm_movehl_ps(v, v));
        return _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)));
    }

    static X4 load_x4(const float* p) { return p; }
    template <int J>
    static F fma_x(F acc, F w, X4 x) {
        return each<F>([&](int i) { return _mm256_fmadd_ps(w.v[i], _mm256_broadcast_ss(x + J), acc.v[i]); });
    }

    static __m128i load16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
    static __m128i load8(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
    static void load_bf16(const uint8_t* p, F& first, F& second) {
        const I words = load(reinterpret_cast<const int32_t*>(p));
        first = each<F>([&](int i) { return _mm256_castsi256_ps(_mm256_slli_epi32(words.v[i], 16)); });
        second = each<F>([&](int i) {
            return _mm256_castsi256_ps(_mm256_and_si256(words.v[i], _mm256_set1_epi32(-65536)));
        });
    }
    static F load_f16(const uint8_t* p) { return each<F>([&](int i) { return _mm256_cvtph_ps(load16(p + 16 * i)); }); }
    static void store_f16(uint8_t* p, F x) {
        for (int i = 0; i < 2; i++) {
            _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16 * i), _mm256_cvtps_ph(x.v[i], _MM_FROUND_TO_NEAREST_INT));
        }
    }

    static I zero() { return each<I>([](int) { return _mm256_setzero_si256(); }); }
    static I load(const int32_t* p) {
        return each<I>([&](int i) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8 * i)); });
    }
    static void store(int32_t* p, I x) {
        for (int i = 0; i < 2; i++) _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8 * i), x.v[i]);
    }
    static I set1(int32_t x) { return each<I>([&](int) { return _mm256_set1_epi32(x); }); }
    static I mla(I acc, I x, I y) {
        return each<I>([&](int i) { return _mm256_add_epi32(acc.v[i], _mm256_mullo_epi32(x.v[i], y.v[i])); });
    }
    template <int N>
    static I shl(I x) { return each<I>([&](int i) { return _mm256_slli_epi32(x.v[i], N); }); }
    static I load_u8(const uint8_t* p) { return each<I>([&](int i) { return _mm256_cvtepu8_epi32(load8(p + 8 * i)); }); }
    static I load_i8(const uint8_t* p) { return each<I>([&](int i) { return _mm256_cvtepi8_epi32(load8(p + 8 * i)); }); }
    static F to_float(I x) { return each<F>([&](int i) { return _mm256_cvtepi32_ps(x.v[i]); }); }
    static I round(F x) { return each<I>([&](int i) { return _mm256_cvtps_epi32(x.v[i]); }); }
    static F pow2(I n) {
        return each<F>([&](int i) {
            return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.v[i], _mm256_set1_epi32(127)), 23));
        });
    }
    static void store_i8(int8_t* p, I x) {
        for (int i = 0; i < 2; i++) {
            const __m128i w = _mm_packs_epi32(_mm256_castsi256_si128(x.v[i]), _mm256_extracti128_si256(x.v[i], 1));
            _mm_storel_epi64(reinterpret_cast<__m128i*>(p + 8 * i), _mm_packs_epi16(w, w));
        }
    }

    static W load_w(const uint8_t* p) {
        return each<W>([&](int i) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * i)); });
    }
    static void store_w(uint8_t* p, W x) {
        for (int i = 0; i < 2; i++) _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32 * i), x.v[i]);
    }
    static __m256i masked(__m256i x, int mask) { return _mm256_and_si256(x, _mm256_set1_epi8(static_cast<char>(mask))); }
    static W and_n(W x, uint8_t mask) { return each<W>([&](int i) { return masked(x.v[i], mask); }); }
    template <int N>
    static W shr(W x) { return each<W>([&](int i) { return masked(_mm256_srli_epi16(x.v[i], N), 0xff >> N); }); }
    template <int N>
    static W shift(W x) {
        return each<W>([&](int i) {
            return N < 0 ? _mm256_slli_epi16(x.v[i], N < 0 ? -N : 0) : _mm256_srli_epi16(x.v[i], N < 0 ? 0 : N);
        });
    }
    template <int M>
    static W insert(W x, W bits) {
        return each<W>([&](int i) { return _mm256_or_si256(x.v[i], masked(bits.v[i], M)); });
    }
    static constexpr int kSignedOffset = 0;
    static W signed_quad(W w) { return w; }
    static W lookup(const uint8_t* table, W x) {
        const __m256i levels = _mm256_broadcastsi128_si256(load16(table));
        return each<W>([&](int i) { return _mm256_shuffle_epi8(levels, x.v[i]); });
    }

    // Bytes in 0 .. 63: the product of two of them with signed bytes fits in 16 bits.
    static constexpr int kSixScale = 1, kSixOffset = 1;
    static void unpack6(W p0, W p1, W p2, W* w) {
        for (int i = 0; i < 2; i++) {
            const __m256i flip = _mm256_set1_epi8(0x20), a = p0.v[i], b = p1.v[i], c = p2.v[i];
            w[0].v[i] = _mm256_xor_si256(masked(_mm256_srli_epi16(a, 2), 63), flip);
            w[1].v[i] = _mm256_xor_si256(masked(_mm256_srli_epi16(b, 2), 63), flip);
            w[2].v[i] = _mm256_xor_si256(masked(_mm256_srli_epi16(c, 2), 63), flip);
            const __m256i high = _mm256_slli_epi16(masked(a, 3), 4), middle = _mm256_slli_epi16(masked(b, 3), 2);
            w[3].v[i] = _mm256_xor_si256(_mm256_or_si256(_mm256_or_si256(high, middle), masked(c, 3)), flip);
        }
    }
    static X16 load_x(const int8_t* p) { return p; }
    static __m256i quad(X16 x, int j) {
        int32_t v;
        std::memcpy(&v, x + 4 * j, 4);
        return _mm256_set1_epi32(v);
    }
    static __m256i add_products(__m256i acc, __m256i unsigned_bytes, __m256i signed_bytes) {
        const __m256i pairs = _mm256_maddubs_epi16(unsigned_bytes, signed_bytes);
        return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    template <int J>
    static I dot(I acc, W w, X16 x) {
        return each<I>([&](int i) { return add_products(acc.v[i], w.v[i], quad(x, J)); });
    }
    template <int J>
    static I dot_signed(I acc, W w, X16 x) {
        return each<I>([&](int i) {
            return add_products(acc.v[i], _mm256_abs_epi8(w.v[i]), _mm256_sign_epi8(quad(x, J), w.v[i]));
        });
    }
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
