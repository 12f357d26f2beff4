// K-quants and their like in the weight stream: slabs of 16 rows x 256 k, one superblock a row.
//
// A tile is 64 k of a slab. Lane 4 g + q has rows g and g + 8 at k = 16 q .. 16 q + 15 of every tile; k = 16 q + 4 j +
// 2 h + i (j in 0..3, h and i in 0..1) is place 2 q + i of half h in the j-th product of 16 k. So a lane's weights of a
// tile belong to one block of 32, and one scale a row and tile serves it. The same registers are an A operand of
// mma.sync and of wgmma.
//
// A value in an operand is an integer times 2^-24 in fp16, which is linear there, subnormal or not: quant times 6-bit
// scale is exact (Q6_K rounds products over 2,048, by less than 2^-11). Half h = 1 is 16 times that: activations of
// that half are 1/16. A superblock's sums are multiplied by its d in f32. Mins are one product more: 6-bit mins times
// sums of 32 activations.
//
// Bytes of a slab, in this order (lane: 32 words or pairs of words; g: 8):
//   Q4_K 2368: 4 tiles x lane x 16 (rows g, g + 8: 8 bytes each; k is at word j / 2, bit 8 (j & 1) + 4 h + 16 i);
//              S [g][block of the tile][row][tile] bytes; M [lane][row][block 2 q, 2 q + 1] bytes; [g][row][d, dmin]
//              fp16
//   Q5_K 2880: the same, then 4 tiles x lane x 4: the fifth bits (row g in bits 0-7 of each half i, g + 8 in 8-15: bit
//   2 j + h) Q6_K 3360: 24 words a lane as [6][lane][4]: tile t has words 6 t .. + 2 of row g, then 3 of g + 8. Pairs i
//   of (j, h) lie
//              in the halves of a word: word j (< 3): h 0 in bits 0-5, h 1 in 6-11; j 3: h 0 low bits in word 0, 12-15,
//              high in word 2, 12-13; h 1 in word 1, 12-15 and word 2, 14-15. Then scales + 128 [lane][row][tile]
//              bytes; [g][row] d
//   Q8_0 4416: tiles x rows x lane x 16 bytes (value + 128: word j, byte 2 h + i); fp16 scales [g][block of the
//   tile][row][tile],
//              times 2^-shift; [g][row] f32 2^shift
//   HALF 8256: tiles x rows x j / 2 x lane x 16: word 2 (j & 1) + h, halves i, half h = 1 times 16; [g][row] f32
//   factors
#pragma once
#include "common/wgmma.cuh"

enum SlabType { SLAB_Q4_K, SLAB_Q5_K, SLAB_Q6_K, SLAB_Q8_0, SLAB_HALF, SLAB_TYPES };
__host__ __device__ constexpr int slab_bytes(int type) {
    return type == SLAB_Q4_K   ? 2368
           : type == SLAB_Q5_K ? 2880
           : type == SLAB_Q6_K ? 3360
           : type == SLAB_Q8_0 ? 4416
                               : 8256;
}

constexpr u32 HALF_1024 = 0x64006400u;  // fp16 1024 + n has n in its low bits

__device__ __forceinline__ float4 row_factors(u32 low, u32 high) {
    const float2 a = unpack_half(low), b = unpack_half(high);
    return {a.x, a.y, b.x, b.y};
}

// Activations k .. k + 3, multiplied with `full`: the words of both halves, and what they add up to.
struct OperandQuad {
    u32 low, high;
    float sum;
    __device__ __forceinline__ OperandQuad(u32 early, u32 late, float full) {
        // exact but for numbers that become subnormal: their sums may be taken before
        const float part = full * 0.0625f;
        const float2 a = {bf16_low(early) * full, bf16_high(early) * full},
                     c = {bf16_low(late) * part, bf16_high(late) * part};
        low = pack_half(a.x, a.y), high = pack_half(c.x, c.y);
        sum = fmaf(16.0f, c.x + c.y, a.x + a.y);
    }
};

// Where a lane's words of a slab lie, from `at` on. By shuffles, so that they stay in registers: worked out for every
// superblock, they would take as many instructions as the loads do.
__device__ __forceinline__ u32 kept(u32 place, int lane) { return __shfl_sync(~0u, place, lane); }

// A slot is given back when its words are in registers: an arrival at a barrier may overtake loads before it. So it has
// to need them, or be far behind them. 0, but the compiler does not know that, if `lane` comes from a shuffle.
__device__ __forceinline__ u32 zero_after(u32 word, int lane) { return min(word, (u32)lane >> 5); }
// Loads come in order. Where a slot is given back soon after them (ORDERED), the last one must be behind all others:
// the compiler moves none across this, which is no instruction.
template <bool ORDERED>
__device__ __forceinline__ void before_last() {
    if constexpr (ORDERED) __syncwarp();
}

// A lane's part of a slab. `factors` are d and dmin of rows g, g + 8; TERMS: operands a product of 16 k takes.
// `row_word` is what row g or g + 8 has of these, `factor` both of them from it. `loaded` needs the last load, if all
// are made at once (EARLY), else the last one of each kind. `landed` is 0 and needs the last one.
template <int TYPE>
struct Slab;

template <>
struct Slab<SLAB_Q4_K> {
    static constexpr bool MINS = true, EARLY = true;  // EARLY: all words are in registers before the last product
    static constexpr int TERMS = 1;
    uint4 w[4];
    uint2 scale_bytes, d;
    u32 min_bytes, s[2][2];  // s: [row][tiles 0|1, 2|3]

    struct Places {
        u32 words, scales, mins, factors;
        __device__ __forceinline__ Places(u32 at, int lane)
            : words(kept(at + lane * 16, lane)), scales(kept(at + 2048 + (lane >> 1) * 8, lane)),
              mins(kept(at + 2176 + lane * 4, lane)), factors(kept(at + 2304 + (lane >> 2) * 8, lane)) {}
    };
    template <bool ORDERED>
    __device__ __forceinline__ void load(u32 from, const Places& at) {
        scale_bytes = load_shared8(from + at.scales);
        min_bytes = load_shared4(from + at.mins);
        d = load_shared8(from + at.factors);
#pragma unroll
        for (int t = 0; t < 3; t++) w[t] = load_shared16(from + at.words + t * 512);
        before_last<ORDERED>();
        w[3] = load_shared16(from + at.words + 3 * 512);
    }
    __device__ __forceinline__ void scales() {
        s[0][0] = subtract_half(__byte_perm(scale_bytes.x, 0x64646464u, 0x4140), HALF_1024);
        s[0][1] = subtract_half(__byte_perm(scale_bytes.x, 0x64646464u, 0x4342), HALF_1024);
        s[1][0] = subtract_half(__byte_perm(scale_bytes.y, 0x64646464u, 0x4140), HALF_1024);
        s[1][1] = subtract_half(__byte_perm(scale_bytes.y, 0x64646464u, 0x4342), HALF_1024);
    }
    __device__ __forceinline__ void mins(u32 (&o)[4]) const {
        o[0] = o[2] = __byte_perm(min_bytes, 0, 0x4140), o[1] = o[3] = __byte_perm(min_bytes, 0, 0x4342);
    }
    // Nibbles of j and its neighbour; of an odd j its own alone.
    __device__ __forceinline__ u32 word(int t, int j, int row) const {
        const u32 v = row ? (j < 2 ? w[t].z : w[t].w) : (j < 2 ? w[t].x : w[t].y);
        return j & 1 ? __byte_perm(v, 0, 0x4341) : v;
    }
    __device__ __forceinline__ u32 loaded() const { return w[3].x; }
    // The sign of an operand.
    __device__ __forceinline__ u32 landed() const { return multiply_half<1>(w[3].w & 0x00f000f0u, s[1][1]) >> 31; }
    template <int T, int J>
    __device__ __forceinline__ void operand(u32 (&o)[4], int) const {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const u32 v = word(T, J, row), scale = s[row][T / 2];
            o[row + 2] = multiply_half<T & 1>(v & 0x00f000f0u, scale);
            // of an odd one both nibbles less the upper ones: exact, and an instruction less
            o[row] = J & 1 ? multiply_subtract_half<T & 1>(v, scale, o[row + 2])
                           : multiply_half<T & 1>(v & 0x000f000fu, scale);
        }
    }
    __device__ __forceinline__ float4 factors() const { return row_factors(d.x, d.y); }
    __device__ __forceinline__ u32 row_word(bool late) const { return late ? d.y : d.x; }
    static __device__ __forceinline__ float2 factor(u32 word) { return unpack_half(word); }
};

template <>
struct Slab<SLAB_Q5_K> : Slab<SLAB_Q4_K> {
    u32 high[4];

    template <bool ORDERED>
    __device__ __forceinline__ void load(u32 from, const Places& at) {
        Slab<SLAB_Q4_K>::load<ORDERED>(from, at);
#pragma unroll
        for (int t = 0; t < 3; t++) high[t] = load_shared4(from + at.mins + (2368 - 2176) + t * 128);
        before_last<ORDERED>();
        high[3] = load_shared4(from + at.mins + (2368 - 2176) + 3 * 128);
    }
    __device__ __forceinline__ u32 loaded() const { return high[3]; }
    __device__ __forceinline__ u32 landed() const { return multiply_half<1>(high[3] & 0x00800080u, s[1][1]) >> 31; }
    // Bit `from` of each half to bit `to`.
    template <int FROM, int TO>
    static __device__ __forceinline__ u32 moved(u32 v) {
        return FROM > TO ? v >> (FROM > TO ? FROM - TO : 0) : v << (TO > FROM ? TO - FROM : 0);
    }
    template <int T, int J>
    __device__ __forceinline__ void operand(u32 (&o)[4], int) const {
        const u32 v = word(T, J, 0), u = word(T, J, 1);
        o[0] = multiply_half<T & 1>((v & 0x000f000fu) | (moved<2 * J, 4>(high[T]) & 0x00100010u), s[0][T / 2]);
        o[1] = multiply_half<T & 1>((u & 0x000f000fu) | (moved<2 * J + 8, 4>(high[T]) & 0x00100010u), s[1][T / 2]);
        o[2] = multiply_half<T & 1>((v & 0x00f000f0u) | (moved<2 * J + 1, 8>(high[T]) & 0x01000100u), s[0][T / 2]);
        o[3] = multiply_half<T & 1>((u & 0x00f000f0u) | (moved<2 * J + 9, 8>(high[T]) & 0x01000100u), s[1][T / 2]);
    }
};

template <>
struct Slab<SLAB_Q6_K> {
    static constexpr bool MINS = false, EARLY = true;
    static constexpr int TERMS = 1;
    u32 w[24];
    uint2 scale_bytes;
    u32 d, s[2][2], offset[2][2], offset16[2][2];

    struct Places {
        u32 words, scales, factors;
        __device__ __forceinline__ Places(u32 at, int lane)
            : words(kept(at + lane * 16, lane)), scales(kept(at + 3072 + lane * 8, lane)),
              factors(kept(at + 3328 + (lane >> 2) * 4, lane)) {}
    };
    template <bool ORDERED>
    __device__ __forceinline__ void load(u32 from, const Places& at) {
        scale_bytes = load_shared8(from + at.scales);
        d = load_shared4(from + at.factors);
#pragma unroll
        for (int i = 0; i < 6; i++) {
            if (i == 5) before_last<ORDERED>();
            const uint4 v = load_shared16(from + at.words + i * 512);
            w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
        }
    }
    __device__ __forceinline__ void scales() {
#pragma unroll
        for (int row = 0; row < 2; row++)
#pragma unroll
            for (int pair = 0; pair < 2; pair++) {
                const u32 bytes = row ? scale_bytes.y : scale_bytes.x;
                s[row][pair] = subtract_half(__byte_perm(bytes, 0x64646464u, pair ? 0x4342 : 0x4140), 0x64806480u);
                offset[row][pair] = multiply_halves(s[row][pair], 0x80208020u);    // -32 * 2^-24
                offset16[row][pair] = multiply_halves(s[row][pair], 0x82008200u);  // -512 * 2^-24
            }
    }
    __device__ __forceinline__ void mins(u32 (&)[4]) const {}
    __device__ __forceinline__ u32 loaded() const { return w[20]; }
    __device__ __forceinline__ u32 landed() const { return multiply_half<1>(w[23] & 0x003f003fu, s[1][1]) >> 30 & 1; }
    template <int T, int J>
    __device__ __forceinline__ void operand(u32 (&o)[4], int) const {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const u32* v = w + 6 * T + 3 * row;
            u32 low, high;
            if constexpr (J < 3) {
                low = v[J] & 0x003f003fu, high = (v[J] >> 2) & 0x03f003f0u;
            } else {
                low = ((v[0] >> 12) & 0x000f000fu) | ((v[2] >> 8) & 0x00300030u);
                high = ((v[1] >> 8) & 0x00f000f0u) | ((v[2] >> 6) & 0x03000300u);
            }
            o[row] = multiply_add_half<T & 1>(low, s[row][T / 2], offset[row][T / 2]);
            o[row + 2] = multiply_add_half<T & 1>(high, s[row][T / 2], offset16[row][T / 2]);
        }
    }
    __device__ __forceinline__ float4 factors() const {
        const float2 f = unpack_half(d);
        return {f.x, 0.0f, f.y, 0.0f};
    }
    __device__ __forceinline__ u32 row_word(bool late) const { return late ? d >> 16 : d; }
    static __device__ __forceinline__ float2 factor(u32 word) { return {unpack_half(word).x, 0.0f}; }
};

struct PlacesQ8_0 {
    u32 words, scales, factors;
    __device__ __forceinline__ PlacesQ8_0(u32 at, int lane)
        : words(kept(at + lane * 16, lane)), scales(kept(at + 4096 + (lane >> 1) * 16, lane)),
          factors(kept(at + 4352 + (lane >> 2) * 8, lane)) {}
};
#ifdef ROUND_Q8_0
// What a draft multiplies may be rounded once more: (value + 128) times scale less 128 times scale is one operation on
// fp16, with a result that is off by less than 2^-11. Operands are 2^-17 of what they are below.
template <>
struct Slab<SLAB_Q8_0> {
    static constexpr bool MINS = false, EARLY = true;
    static constexpr int TERMS = 1;
    uint4 w[8], stored;  // tiles x rows g, g + 8; scales
    uint2 d;
    u32 s[2][2], s16[2][2], offset[2][2], offset16[2][2];  // [row][tiles 0|1, 2|3]

    typedef PlacesQ8_0 Places;
    template <bool ORDERED>
    __device__ __forceinline__ void load(u32 from, const Places& at) {
        stored = load_shared16(from + at.scales);
        d = load_shared8(from + at.factors);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (i == 7) before_last<ORDERED>();
            w[i] = load_shared16(from + at.words + i * 512);
        }
    }
    __device__ __forceinline__ void scales() {
        const u32 words[2][2] = {{stored.x, stored.y}, {stored.z, stored.w}};
#pragma unroll
        for (int row = 0; row < 2; row++)
#pragma unroll
            for (int pair = 0; pair < 2; pair++) {
                s[row][pair] = multiply_halves(words[row][pair], 0x58005800u);      // 2^7
                s16[row][pair] = multiply_halves(words[row][pair], 0x68006800u);    // 2^11
                offset[row][pair] = multiply_halves(s[row][pair], 0x80808080u);     // -128 * 2^-24
                offset16[row][pair] = multiply_halves(s16[row][pair], 0x80808080u);
            }
    }
    __device__ __forceinline__ void mins(u32 (&)[4]) const {}
    __device__ __forceinline__ u32 loaded() const { return w[7].x; }
    // Bit 30 of an operand below 2.
    __device__ __forceinline__ u32 landed() const {
        return multiply_add_half<1>(__byte_perm(w[7].w, 0, 0x4342), s16[1][1], offset16[1][1]) >> 30 & 1;
    }
    template <int T, int J>
    __device__ __forceinline__ void operand(u32 (&o)[4], int) const {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const uint4 words = w[T * 2 + row];
            const u32 v = J == 0 ? words.x : J == 1 ? words.y : J == 2 ? words.z : words.w;
            o[row] = multiply_add_half<T & 1>(__byte_perm(v, 0, 0x4140), s[row][T / 2], offset[row][T / 2]);
            o[row + 2] = multiply_add_half<T & 1>(__byte_perm(v, 0, 0x4342), s16[row][T / 2], offset16[row][T / 2]);
        }
    }
    __device__ __forceinline__ float4 factors() const {
        return {__uint_as_float(d.x) * 0x1p17f, 0.0f, __uint_as_float(d.y) * 0x1p17f, 0.0f};
    }
    __device__ __forceinline__ u32 row_word(bool late) const { return late ? d.y : d.x; }
    static __device__ __forceinline__ float2 factor(u32 word) { return {__uint_as_float(word) * 0x1p17f, 0.0f}; }
};
#else
// A product of quant and fp16 scale has 19 bits: its upper part in one operand, the rest in a second one, both exact.
template <>
struct Slab<SLAB_Q8_0> {
    static constexpr bool MINS = false, EARLY = false;
    static constexpr int TERMS = 2;
    u32 words;
    uint4 w[2], s;  // rows g, g + 8: this tile's values; scales of tiles 0..3
    uint2 d;

    typedef PlacesQ8_0 Places;
    template <bool ORDERED>
    __device__ __forceinline__ void load(u32 from, const Places& at) {
        words = from + at.words;
        s = load_shared16(from + at.scales);
        d = load_shared8(from + at.factors);
    }
    __device__ __forceinline__ void scales() {}
    __device__ __forceinline__ void mins(u32 (&)[4]) const {}
    __device__ __forceinline__ u32 loaded() const { return w[0].x ^ w[1].x ^ s.x ^ d.x; }
    template <int T, int J>
    __device__ __forceinline__ void operand(u32 (&o)[4], int term) {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            if (J == 0) w[row] = load_shared16(words + (T * 2 + row) * 512);
            const u32 bytes = J == 0 ? w[row].x : J == 1 ? w[row].y : J == 2 ? w[row].z : w[row].w;
            const u32 scale = row ? (T < 2 ? s.z : s.w) : (T < 2 ? s.x : s.y);
            // fp16 1024 + byte, less 1152: the value; the second pair times 16
            const u32 low = subtract_half(__byte_perm(bytes, 0x64646464u, 0x4140), 0x64806480u);
            const u32 high =
                multiply_halves(subtract_half(__byte_perm(bytes, 0x64646464u, 0x4342), 0x64806480u), 0x4c004c00u);
            const u32 first = multiply_half<T & 1>(low, scale), second = multiply_half<T & 1>(high, scale);
            o[row] = term == 0 ? first : multiply_add_half_by<T & 1>(low, scale, first ^ 0x80008000u);
            o[row + 2] = term == 0 ? second : multiply_add_half_by<T & 1>(high, scale, second ^ 0x80008000u);
        }
    }
    __device__ __forceinline__ float4 factors() const {
        return {__uint_as_float(d.x), 0.0f, __uint_as_float(d.y), 0.0f};
    }
    __device__ __forceinline__ u32 row_word(bool late) const { return late ? d.y : d.x; }
    static __device__ __forceinline__ float2 factor(u32 word) { return {__uint_as_float(word), 0.0f}; }
};
#endif

template <>
struct Slab<SLAB_HALF> {
    static constexpr bool MINS = false, EARLY = false;
    static constexpr int TERMS = 1;
    u32 words, last_words[2];  // of rows g, g + 8
    uint2 d;

    struct Places {
        u32 words, factors;
        __device__ __forceinline__ Places(u32 at, int lane)
            : words(kept(at + lane * 16, lane)), factors(kept(at + 8192 + (lane >> 2) * 8, lane)) {}
    };
    template <bool ORDERED>
    __device__ __forceinline__ void load(u32 from, const Places& at) {
        words = from + at.words;
        d = load_shared8(from + at.factors);
    }
    __device__ __forceinline__ void scales() {}
    __device__ __forceinline__ void mins(u32 (&)[4]) const {}
    __device__ __forceinline__ u32 loaded() const { return last_words[0] ^ last_words[1] ^ d.x; }
    template <int T, int J>
    __device__ __forceinline__ void operand(u32 (&o)[4], int) {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const uint2 v = load_shared8(words + ((T * 2 + row) * 2 + J / 2) * 512 + (J & 1) * 8);
            o[row] = v.x, o[row + 2] = v.y, last_words[row] = v.x;
        }
    }
    __device__ __forceinline__ float4 factors() const {
        return {__uint_as_float(d.x), 0.0f, __uint_as_float(d.y), 0.0f};
    }
    __device__ __forceinline__ u32 row_word(bool late) const { return late ? d.y : d.x; }
    static __device__ __forceinline__ float2 factor(u32 word) { return {__uint_as_float(word), 0.0f}; }
};
