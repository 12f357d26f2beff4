// Weights from the ring into registers, and from there into the mma, whatever their format (see formats/format.cuh).
#pragma once
#include "forward/block.cuh"

// --- from the ring --------------------------------------------------------------------------------------------------

// Row tiles of 16 rows that are in registers together. Where formats mix, the larger must not take more registers.
template <class Format>
__host__ __device__ constexpr int tiles_at_once() {
    if (!WideFormats::SEVERAL) return TILES_AT_ONCE;
    return larger(1, TILES_AT_ONCE * WideFormats::least_registers(WIDE) / Format::registers(WIDE));
}
// Registers for any format that may come: of row tiles of 16 rows, or of COUNT chunks of a row tile of 8 rows.
template <class Format, class... Others>
__host__ __device__ constexpr int wide_registers(Formats<Format, Others...>, int chunks) {
    int most = tiles_at_once<Format>() * chunks * Format::registers(WIDE);
    if constexpr (sizeof...(Others) > 0) most = larger(most, wide_registers(Formats<Others...>(), chunks));
    return most;
}
__host__ __device__ constexpr int wide_registers(int chunks) { return wide_registers(WideFormats(), chunks); }
__host__ __device__ constexpr int narrow_registers(int chunks) {
    return chunks * NarrowFormats::most_registers(NARROW);
}

// This warp's fragments of COUNT chunks, which begin with the ring's slot `ahead`. Returns a word of the last loads.
template <class Format, int ROWS, int COUNT>
__device__ __forceinline__ u32 load_fragments(const Block& b, int ahead, u32* w) {
    constexpr int EACH = Format::slot_chunks(ROWS), SLOTS = (COUNT + EACH - 1) / EACH;
    u32 last = 0;
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
        b.ring.wait(ahead + s);
        const u32 data = b.ring.data(ahead + s);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int c = s * EACH + i;
            if (c >= COUNT) break;
            const u32 at = data + i * Format::chunk_bytes(ROWS);
            const u32 got = Format::template load<ROWS>(at, b.warp, b.lane, w + c * Format::registers(ROWS));
            last |= i == EACH - 1 || c == COUNT - 1 ? got : 0;
        }
    }
    return last;
}
// They are taken half a ring at a time.
template <class Format, int ROWS, int COUNT>
__device__ __forceinline__ void take_fragments(Block& b, u32* w) {
    constexpr int EACH = Format::slot_chunks(ROWS), SLOTS = (COUNT + EACH - 1) / EACH;
    constexpr int SPAN = smaller(SLOTS, larger(1, RING_SLOTS / 2));
    const u32 last = load_fragments<Format, ROWS, smaller(COUNT, SPAN * EACH)>(b, 0, w);
    b.ring.release(SPAN, last & b.r.zero);
    if constexpr (SPAN < SLOTS)
        take_fragments<Format, ROWS, COUNT - SPAN * EACH>(b, w + SPAN * EACH * Format::registers(ROWS));
}

// Row tiles: TILES, or `tiles` if these are fewer. Registers that are not needed are zero: left as they are, they would
// be taken all through the kernel.
template <class Format, int CHUNKS, int TILES>
__device__ __forceinline__ void take_tiles(Block& b, int tiles, u32* w) {
    constexpr int EACH = CHUNKS * Format::registers(WIDE);
    // A row tile's slots are given back when the next one's loads have been asked for, if the ring holds two.
    constexpr int SLOTS = (CHUNKS + Format::slot_chunks(WIDE) - 1) / Format::slot_chunks(WIDE);
    constexpr bool TWO = 2 * SLOTS <= RING_SLOTS;
    u32 last = 0;
#pragma unroll
    for (int u = 0; u < TILES; u++) {
        if (u < tiles) {
            if constexpr (TWO) {
                const u32 got = load_fragments<Format, WIDE, CHUNKS>(b, u == 0 ? 0 : SLOTS, w + u * EACH);
                if (u > 0) b.ring.release(SLOTS, last & b.r.zero);
                last = got;
            } else {
                take_fragments<Format, WIDE, CHUNKS>(b, w + u * EACH);
            }
        } else {
#pragma unroll
            for (int i = 0; i < EACH; i++) w[u * EACH + i] = 0;
        }
    }
    if (TWO) b.ring.release(SLOTS, last & b.r.zero);
}

// Row tiles of a run, as many as go together; and one row tile's COUNT chunks.
template <class Format, int CHUNKS>
__device__ __forceinline__ void take_wide(Block& b, int tiles, u32 (&w)[wide_registers(CHUNKS)]) {
    constexpr int TILES = tiles_at_once<Format>(), TAKEN = TILES * CHUNKS * Format::registers(WIDE);
    take_tiles<Format, CHUNKS, TILES>(b, tiles, w);
#pragma unroll
    for (int i = TAKEN; i < wide_registers(CHUNKS); i++) w[i] = 0;
}
template <int CHUNKS>
__device__ __forceinline__ void take_wide(Block& b, Run run, u32 (&w)[wide_registers(CHUNKS)]) {
    WideFormats::with(run.format, [&](auto format) { take_wide<decltype(format), CHUNKS>(b, run.tiles, w); });
}
template <int COUNT>
__device__ __forceinline__ void take_narrow(Block& b, int format, u32 (&w)[narrow_registers(COUNT)]) {
    NarrowFormats::with(format, [&](auto format) {
        typedef decltype(format) Format;
        take_fragments<Format, NARROW, COUNT>(b, w);
#pragma unroll
        for (int i = COUNT * Format::registers(NARROW); i < narrow_registers(COUNT); i++) w[i] = 0;
    });
}

// --- into the mma ---------------------------------------------------------------------------------------------------

// This warp's share of some row tiles for a node tile of tokens: each(u, sums of rows l / 4 and l / 4 + 8 for two
// tokens). done(c) when a chunk's activations are not needed any more.
template <int CHUNKS, class Each, class Done>
__device__ __forceinline__ void multiply_wide(int format, const u32 (&w)[wide_registers(CHUNKS)],
                                              const uint4 (&x)[CHUNKS], Each each, Done done) {
    WideFormats::with(format, [&](auto format) {
        typedef decltype(format) Format;
        Format::template multiply<tiles_at_once<Format>()>(w, x, each, done);
    });
}

constexpr int NARROW_WORDS = NODES == 1 ? ONE_NODE : NODE_TILE;

// This warp's share of a row tile of 8 rows, chain by chain: the sums of row l / 4 for tokens 2 q and the next, over
// the first four k and over the last.
struct NarrowSums {
    float2 early = {}, late = {};

    // Chain `chain` of the registers that hold a row tile's chunks: `chunks` of them, whose sum is multiplied by `by`,
    // for both tokens.
    __device__ __forceinline__ void add(int format, const u32* all, int chain, const u32 (*x)[NARROW_WORDS], int chunks,
                                        int q, float2 by) {
        NarrowFormats::with(format, [&](auto format) {
            typedef decltype(format) Format;
            const u32* w = all + chain * CHAIN * Format::registers(NARROW);
            const ChainSums sums = Format::template chain<NARROW_WORDS>(w, x, chunks, q);
            early = {fmaf(by.x, sums.first.x, early.x), fmaf(by.y, sums.first.y, early.y)};
            late = {fmaf(by.x, sums.last.x, late.x), fmaf(by.y, sums.last.y, late.y)};
        });
    }
    __device__ __forceinline__ float2 total(int format) {
        if (NODES == 1) late.x = __shfl_xor_sync(~0u, early.x, 2);
        float by;
        NarrowFormats::with(format, [&](auto format) { by = decltype(format)::LOWER; });
        return {(early.x + late.x) * by, (early.y + late.y) * by};
    }
};
