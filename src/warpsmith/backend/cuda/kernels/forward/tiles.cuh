// Weights from the ring into registers, and from there into the mma: all that depends on their type.
//
// Every warp owns a fixed slice of K (see shape.cuh), 32 k a chunk. The products of the first four of a lane's eight k and
// of the last four are summed apart. Units of 16 rows: one mma (16 x 8 x 16) for the first four k, one for the last four, 8
// tokens (l / 4) in the columns. Units of 8 rows: a mma's upper 8 rows are the same rows at the last four k. For one
// token one mma does both: its columns 0 to 3 are the token at the first four k, 4 to 7 at the last. For a tree it takes two,
// for 8 tokens. Half of the result is not wanted.
//
// BF16: the 16 bytes a lane reads are an A operand. Sums run inside the mma over four chunks, then in a fixed order.
//
// Q8_0: a lane's bytes are its eight k of a row; 16 rows are two such halves. A byte b is the value + 128. As the low byte of
// a bf16 it is b * 2^-133: below 2^-125 bf16 is linear, subnormal or not. So widening is one byte permutation for two
// values. Activations are multiplied by 2^96, the sums by 2^37, and an mma starts from -128 times the sum of its
// activations, which is the same for every row. All of that is exact but for the mma's own sums. A chunk's sum is then
// multiplied by its row's scale and added to the others in order.
//
// Another type of blocks is a case more in each of `registers_of`, `load_tile`,
// `multiply_wide` and `NarrowSums::add_chain`.
#pragma once
#include "forward/block.cuh"

__device__ __forceinline__ float4 add(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
__device__ __forceinline__ float4 scaled(float4 a, float s) { return {a.x * s, a.y * s, a.z * s, a.w * s}; }

// --- from the ring --------------------------------------------------------------------------------------------------

// What a lane has of a tile, in registers: BF16 A operands; Q8_0 bytes, then its rows' scales as fp16.
__host__ __device__ constexpr int registers_of(int type, int rows) { return type == Q8_0 ? rows / 4 + 1 : rows / 2; }

// Units of 16 rows that are in registers together. Where types mix, BF16 is the exception and must not take more registers.
__host__ __device__ constexpr int units_at_once(int type) {
    return several(WIDE_TYPES) && type == BF16 ? larger(1, UNITS_AT_ONCE / 2) : UNITS_AT_ONCE;
}
// Registers for any type that may come: of units of 16 rows, or of COUNT chunks of a unit of 8 rows.
__host__ __device__ constexpr int wide_registers(int chunks) {
    int most = 0;
    for (int type = BF16; type <= Q8_0; type++)
        if (has(WIDE_TYPES, type)) most = larger(most, units_at_once(type) * chunks * registers_of(type, WIDE));
    return most;
}
__host__ __device__ constexpr int narrow_registers(int chunks) {
    return chunks * registers_of(has(NARROW_TYPES, BF16) ? BF16 : Q8_0, NARROW);
}

// A lane's part of the chunk at `at` in shared memory. Returns a word of the last load.
template <int TYPE, int ROWS>
__device__ __forceinline__ u32 load_tile(const Block& b, u32 at, u32* w) {
    if constexpr (TYPE == BF16) {
        const u32 mine = at + b.warp * (64 * ROWS) + b.lane * 16;
#pragma unroll
        for (int i = 0; i < ROWS / 8; i++) {
            const uint4 v = load_shared16(mine + i * 512);
            w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
        }
    } else {
        const u32 mine = at + (b.warp * 32 + b.lane) * ROWS, scales = at + WARPS * 32 * ROWS + (b.warp * 8 + b.lane / 4) * (ROWS / 4);
        if constexpr (ROWS == WIDE) {
            const uint4 v = load_shared16(mine);
            w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w, w[4] = load_shared4(scales);
        } else {
            const uint2 v = load_shared8(mine);
            w[0] = v.x, w[1] = v.y, w[2] = load_shared2(scales);
        }
    }
    return w[registers_of(TYPE, ROWS) - 1];
}

// This warp's tiles of COUNT chunks, which begin with the ring's slot `ahead`. Returns a word of the last loads.
template <int TYPE, int ROWS, int COUNT>
__device__ __forceinline__ u32 load_tiles(const Block& b, int ahead, u32* w) {
    constexpr int EACH = slot_chunks(TYPE, ROWS), SLOTS = (COUNT + EACH - 1) / EACH;
    u32 last = 0;
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
        b.ring.wait(ahead + s);
        const u32 data = b.ring.data(ahead + s);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int c = s * EACH + i;
            if (c >= COUNT) break;
            const u32 got = load_tile<TYPE, ROWS>(b, data + i * chunk_bytes(TYPE, ROWS), w + c * registers_of(TYPE, ROWS));
            last |= i == EACH - 1 || c == COUNT - 1 ? got : 0;
        }
    }
    return last;
}
// They are taken half a ring at a time.
template <int TYPE, int ROWS, int COUNT>
__device__ __forceinline__ void take_tiles(Block& b, u32* w) {
    constexpr int EACH = slot_chunks(TYPE, ROWS), SLOTS = (COUNT + EACH - 1) / EACH, SPAN = smaller(SLOTS, larger(1, RING_SLOTS / 2));
    const u32 last = load_tiles<TYPE, ROWS, smaller(COUNT, SPAN * EACH)>(b, 0, w);
    b.ring.release(SPAN, last & b.r.zero);
    if constexpr (SPAN < SLOTS) take_tiles<TYPE, ROWS, COUNT - SPAN * EACH>(b, w + SPAN * EACH * registers_of(TYPE, ROWS));
}

// Units of a run, as many as go together; and one unit's COUNT chunks. Registers that are not needed are zero: left as they
// are, they would be taken all through the kernel.
template <int TYPE, int CHUNKS>
__device__ __forceinline__ void take_wide(Block& b, int units, u32 (&w)[wide_registers(CHUNKS)]) {
    constexpr int EACH = CHUNKS * registers_of(TYPE, WIDE), UNITS = units_at_once(TYPE);
    // A unit's slots are given back when the next one's loads have been asked for, if the ring holds two.
    constexpr int SLOTS = (CHUNKS + slot_chunks(TYPE, WIDE) - 1) / slot_chunks(TYPE, WIDE);
    constexpr bool TWO = 2 * SLOTS <= RING_SLOTS;
    u32 last = 0;
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        if (u < units) {
            if constexpr (TWO) {
                const u32 got = load_tiles<TYPE, WIDE, CHUNKS>(b, u == 0 ? 0 : SLOTS, w + u * EACH);
                if (u > 0) b.ring.release(SLOTS, last & b.r.zero);
                last = got;
            } else {
                take_tiles<TYPE, WIDE, CHUNKS>(b, w + u * EACH);
            }
        } else {
#pragma unroll
            for (int i = 0; i < EACH; i++) w[u * EACH + i] = 0;
        }
    }
    if (TWO) b.ring.release(SLOTS, last & b.r.zero);
#pragma unroll
    for (int i = UNITS * EACH; i < wide_registers(CHUNKS); i++) w[i] = 0;
}
template <int CHUNKS>
__device__ __forceinline__ void take_wide(Block& b, Run run, u32 (&w)[wide_registers(CHUNKS)]) {
    if (run.type == Q8_0) {
        if constexpr (has(WIDE_TYPES, Q8_0)) take_wide<Q8_0, CHUNKS>(b, run.units, w);
    } else {
        if constexpr (has(WIDE_TYPES, BF16)) take_wide<BF16, CHUNKS>(b, run.units, w);
    }
}
template <int TYPE, int COUNT>
__device__ __forceinline__ void take_narrow(Block& b, u32 (&w)[narrow_registers(COUNT)]) {
    take_tiles<TYPE, NARROW, COUNT>(b, w);
#pragma unroll
    for (int i = COUNT * registers_of(TYPE, NARROW); i < narrow_registers(COUNT); i++) w[i] = 0;
}
template <int COUNT>
__device__ __forceinline__ void take_narrow(Block& b, int type, u32 (&w)[narrow_registers(COUNT)]) {
    if (type == Q8_0) {
        if constexpr (has(NARROW_TYPES, Q8_0)) take_narrow<Q8_0, COUNT>(b, w);
    } else {
        if constexpr (has(NARROW_TYPES, BF16)) take_narrow<BF16, COUNT>(b, w);
    }
}

// --- into the mma ---------------------------------------------------------------------------------------------------

constexpr u32 RAISE = 0x6f806f80;          // bf16 2^96, twice
constexpr float LOWER = 137438953472.0f;   // 2^37
constexpr u32 MINUS_128 = 0x80808080;      // bf16 -128 * 2^-133, twice
__device__ __forceinline__ u32 raised(u32 x) { return multiply_bf16(x, RAISE); }
// Two bytes as bf16, the earlier in the lower half.
__device__ __forceinline__ u32 early_bytes(u32 w) { return __byte_perm(w, 0, 0x4140); }
__device__ __forceinline__ u32 late_bytes(u32 w) { return __byte_perm(w, 0, 0x4342); }

// This warp's share of some units for an octet of tokens: each(u, sums of rows l / 4 and l / 4 + 8 for two tokens).
// done(c) when a chunk's activations are not needed any more.
template <int TYPE, int CHUNKS, class Each, class Done>
__device__ __forceinline__ void multiply_wide(const u32 (&all)[wide_registers(CHUNKS)], const uint4 (&x)[CHUNKS], Each each, Done done) {
    constexpr int UNITS = units_at_once(TYPE), TILE = registers_of(TYPE, WIDE);
    if constexpr (TYPE == BF16) {
        constexpr int BESIDE = smaller(2, UNITS);  // units side by side: enough to keep the tensor cores busy
#pragma unroll
        for (int u0 = 0; u0 < UNITS; u0 += BESIDE) {
            float4 sum[BESIDE];
#pragma unroll
            for (int c0 = 0; c0 < CHUNKS; c0 += CHAIN) {
                float low[BESIDE][4] = {}, high[BESIDE][4] = {};
#pragma unroll
                for (int c = c0; c < smaller(c0 + CHAIN, CHUNKS); c++) {
#pragma unroll
                    for (int u = 0; u < BESIDE; u++) {
                        const u32* w = all + ((u0 + u) * CHUNKS + c) * TILE;
                        mma(low[u], w[0], w[1], w[2], w[3], x[c].x, x[c].y);
                        mma(high[u], w[4], w[5], w[6], w[7], x[c].z, x[c].w);
                    }
                    if (u0 + BESIDE >= UNITS) done(c);
                }
#pragma unroll
                for (int u = 0; u < BESIDE; u++) {
                    const float4 chain = {low[u][0] + high[u][0], low[u][1] + high[u][1], low[u][2] + high[u][2], low[u][3] + high[u][3]};
                    sum[u] = c0 == 0 ? chain : add(sum[u], chain);
                }
            }
#pragma unroll
            for (int u = 0; u < BESIDE; u++) each(u0 + u, sum[u]);
        }
    } else {
        float4 sum[UNITS] = {};
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const uint4 v = {raised(x[c].x), raised(x[c].y), raised(x[c].z), raised(x[c].w)};
            float start[4] = {};
            mma(start, MINUS_128, MINUS_128, MINUS_128, MINUS_128, v.x, v.y);
            mma(start, MINUS_128, MINUS_128, MINUS_128, MINUS_128, v.z, v.w);
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                const u32* w = all + (u * CHUNKS + c) * TILE;
                float part[4] = {start[0], start[1], start[2], start[3]};
                mma(part, early_bytes(w[0]), early_bytes(w[2]), late_bytes(w[0]), late_bytes(w[2]), v.x, v.y);
                mma(part, early_bytes(w[1]), early_bytes(w[3]), late_bytes(w[1]), late_bytes(w[3]), v.z, v.w);
                const float2 scale = unpack_half(w[4]);
                sum[u] = {fmaf(scale.x, part[0], sum[u].x), fmaf(scale.x, part[1], sum[u].y),
                          fmaf(scale.y, part[2], sum[u].z), fmaf(scale.y, part[3], sum[u].w)};
            }
            done(c);
        }
#pragma unroll
        for (int u = 0; u < UNITS; u++) each(u, scaled(sum[u], LOWER));
    }
}
template <int CHUNKS, class Each, class Done>
__device__ __forceinline__ void multiply_wide(int type, const u32 (&w)[wide_registers(CHUNKS)], const uint4 (&x)[CHUNKS], Each each, Done done) {
    if (type == Q8_0) {
        if constexpr (has(WIDE_TYPES, Q8_0)) multiply_wide<Q8_0, CHUNKS>(w, x, each, done);
    } else {
        if constexpr (has(WIDE_TYPES, BF16)) multiply_wide<BF16, CHUNKS>(w, x, each, done);
    }
}

// What a lane has of a chunk's activations, in words: of one token its first four k or its last, of eight tokens both.
constexpr int NARROW_WORDS = NODES == 1 ? 2 : 4;

// This warp's share of a unit of 8 rows, chain by chain: the sums of row l / 4 for tokens 2 q and the next, over the first four
// k and over the last.
struct NarrowSums {
    float2 early = {}, late = {};

    // `chunks` of a chain, whose sum is multiplied by `by`, for both tokens.
    template <int TYPE>
    __device__ __forceinline__ void add_chain(const u32* all, const u32 (*x)[NARROW_WORDS], int chunks, int q, float2 by) {
        constexpr int TILE = registers_of(TYPE, NARROW), LAST = NARROW_WORDS - 2;
        // Where a mma's result is: for one token in lanes 0 and 1 of four at the first four k, in 2 and 3 at the last.
        const auto at_first = [&](const float (&sum)[4]) -> float2 { return {NODES > 1 || q < 2 ? sum[0] : sum[2], sum[1]}; };
        const auto at_last = [&](const float (&sum)[4]) -> float2 { return {sum[2], sum[3]}; };
        float2 first = {}, last = {};
        float low[4] = {}, high[4] = {};
#pragma unroll
        for (int c = 0; c < CHAIN; c++) {
            if (c >= chunks) break;
            const u32* w = all + c * TILE;
            if constexpr (TYPE == BF16) {
                mma(low, w[0], w[1], w[2], w[3], x[c][0], x[c][1]);
                if (NODES > 1) mma(high, w[0], w[1], w[2], w[3], x[c][LAST], x[c][LAST + 1]);
            } else {
                const float each = unpack_half(w[2]).x;
                const auto product = [&](u32 x0, u32 x1, float (&part)[4]) {
                    mma(part, MINUS_128, MINUS_128, MINUS_128, MINUS_128, x0, x1);
                    mma(part, early_bytes(w[0]), early_bytes(w[1]), late_bytes(w[0]), late_bytes(w[1]), x0, x1);
                };
                float one[4] = {}, two[4] = {};
                product(raised(x[c][0]), raised(x[c][1]), one);
                first = {fmaf(each, at_first(one).x, first.x), fmaf(each, at_first(one).y, first.y)};
                if (NODES > 1) {
                    product(raised(x[c][LAST]), raised(x[c][LAST + 1]), two);
                    last = {fmaf(each, at_last(two).x, last.x), fmaf(each, at_last(two).y, last.y)};
                }
            }
        }
        if (TYPE == BF16) first = at_first(low), last = at_last(high);
        early = {fmaf(by.x, first.x, early.x), fmaf(by.y, first.y, early.y)};
        late = {fmaf(by.x, last.x, late.x), fmaf(by.y, last.y, late.y)};
    }
    // Chain `chain` of the registers that hold a unit's chunks.
    __device__ __forceinline__ void add(int type, const u32* all, int chain, const u32 (*x)[NARROW_WORDS], int chunks, int q, float2 by) {
        if (type == Q8_0) {
            if constexpr (has(NARROW_TYPES, Q8_0)) add_chain<Q8_0>(all + chain * CHAIN * registers_of(Q8_0, NARROW), x, chunks, q, by);
        } else {
            if constexpr (has(NARROW_TYPES, BF16)) add_chain<BF16>(all + chain * CHAIN * registers_of(BF16, NARROW), x, chunks, q, by);
        }
    }
    __device__ __forceinline__ float2 total(int type) {
        if (NODES == 1) late.x = __shfl_xor_sync(~0u, early.x, 2);
        const float by = type == Q8_0 ? LOWER : 1.0f;
        return {(early.x + late.x) * by, (early.y + late.y) * by};
    }
};
