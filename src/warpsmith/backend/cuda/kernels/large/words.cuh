// What SMs exchange between the products of a layer, in a build for one node: words that are there or not yet.
//
// Sums of a stage, the residual stream times the next norm's weight, sums of its squares, and the MLP's inner
// activation are polled for where they are needed (see common/exchange.cuh): no fence, no counter, and an SM waits only
// for those SMs whose results it uses. What a mixer gives is waited for by the counter, and so are the head's sums.
//
// Before a layer's mixer every SM knows that all have published the squares for its IN: so they have read all words
// of the layer before but those of IN itself, and these too are read when the mixer before ended. There they are set
// back to NOT_YET, and the counter shows that to all before anyone writes or polls for them again; words of IN have two
// places, for layers in turn. After a launch all words are NOT_YET.
#pragma once
#include "common/exchange.cuh"
#include "large/block.cuh"

enum { IN, OUT, MLP_IN, MLP_OUT };  // a layer's products; the head is an IN

// Where they lie.
constexpr int SQUARES = up(SMS, 4), OUT_AT = 0, MLP_IN_AT = OUT_RESULTS * ROWS,
              MLP_OUT_AT = MLP_IN_AT + MLP_IN_RESULTS * ROWS, H_AT = MLP_OUT_AT + MLP_OUT_RESULTS * ROWS,
              MLP_X_AT = H_AT + FFN / 2, IN_X_AT = MLP_X_AT + HIDDEN / 2 + SQUARES,
              IN_WORDS = HIDDEN / 2 + SQUARES + IN_RESULTS * ROWS;

__device__ __forceinline__ u32* sum_words(const Block& b, int stage) {
    const int kind = stage & 3, turn = stage >> 2 & 1;
    return b.p.words + (kind == IN       ? IN_X_AT + turn * IN_WORDS + HIDDEN / 2 + SQUARES
                        : kind == OUT    ? OUT_AT
                        : kind == MLP_IN ? MLP_IN_AT
                                         : MLP_OUT_AT);
}
// The residual stream that a stage reads; its squares lie behind it.
__device__ __forceinline__ u32* x_words(const Block& b, int stage) {
    return b.p.words + ((stage & 3) == MLP_IN ? MLP_X_AT : IN_X_AT + (stage >> 2 & 1) * IN_WORDS);
}
__device__ __forceinline__ u32* square_words(const Block& b, int stage) { return x_words(b, stage) + HIDDEN / 2; }

// Every SM some of them.
__device__ __forceinline__ void reset_words(const Block& b, int first, int words) {
    const int end = first_of(words / 4, b.sm + 1);
#pragma unroll 1
    for (int i = first_of(words / 4, b.sm) + threadIdx.x; i < end; i += CONSUMERS)
        store16(b.p.words + first + i * 4, NOT_YET, NOT_YET, NOT_YET, NOT_YET);
}
// At a layer's mixer, and after the head.
__device__ __forceinline__ void reset_words(const Block& b, int layer) {
    reset_words(b, 0, IN_X_AT);
    reset_words(b, IN_X_AT + (~layer & 1) * IN_WORDS, IN_WORDS);
}
__device__ __forceinline__ void reset_all_words(const Block& b) { reset_words(b, 0, IN_X_AT + 2 * IN_WORDS); }

// `Sums` that are polled for.
template <int GROUPS>
struct SumWords {
    const u32* words;
    const u16* tiles;
    int stride;

    __device__ SumWords(const Block& b, int stage, int rows)
        : words(sum_words(b, stage)), tiles(b.s.tiles), stride(rows / ROWS + 1) {}

    struct Place {
        const u32* at[GROUPS];
        int parts[GROUPS];
    };
    struct Asked {
        uint4 v[GROUPS][2];
    };
    __device__ __forceinline__ Place place(int row) const {
        const u16* from = tiles + row / ROWS;
        Place place;
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const int tile = from[g * stride];
            place.parts[g] = from[g * stride + 1] - tile;
            place.at[g] = words + tile * ROWS + row % ROWS;
        }
        return place;
    }
    static __device__ __forceinline__ void ask(Asked& a, const Place& place, int) {
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            a.v[g][0] = load16(place.at[g]), a.v[g][1] = {};
            if (place.parts[g] > 1) a.v[g][1] = load16(place.at[g] + ROWS);
        }
    }
    // Once they have come.
    static __device__ __forceinline__ float4 total(Asked& a, const Place& place, int node) {
        for (Watchdog dog;; dog.check()) {
            bool all = true;
#pragma unroll
            for (int g = 0; g < GROUPS; g++) all = all & came4(a.v[g][0]) & came4(a.v[g][1]);
            if (all) break;
            ask(a, place, node);
        }
        float4 total = {};
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            total = add(add(total, floats(a.v[g][0])), floats(a.v[g][1]));
#pragma unroll 1
            for (int i = 2; i < place.parts[g]; i++) {
                uint4 more = load16(place.at[g] + i * ROWS);
                for (Watchdog dog; !came4(more); more = load16(place.at[g] + i * ROWS)) dog.check();
                total = add(total, floats(more));
            }
        }
        return total;
    }
    __device__ __forceinline__ float4 at(int node, int row) const {
        const Place where = place(row);
        Asked a;
        ask(a, where, node);
        return total(a, where, node);
    }
    static __device__ __forceinline__ float4 add(float4 a, float4 b) { return Sums<GROUPS>::add(a, b); }
};

template <int GROUPS>
__device__ __forceinline__ auto sums_of(const Block& b, int stage, int rows) {
    if constexpr (POLLED)
        return SumWords<GROUPS>(b, stage, rows);
    else
        return Sums<GROUPS>(b, rows);
}
