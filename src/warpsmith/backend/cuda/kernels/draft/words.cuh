// What SMs exchange between the products of a draft's layers: words that are there or not yet, as in the
// activations-first pass (large/words.cuh, common/exchange.cuh).
//
// A launch has few layers: every stage's words have a place of their own, and are set back beside the head's products,
// when all SMs have begun them. So are sums, which have two places by turns: their last bits are those of the stage's
// number, and an SM writes a stage's when all have begun the one before, so that they have read those that were there.
// A launch without a block sets back what it wrote itself.
//
// Parts of attention have one place, and one reader, who sets them back. Whoever writes the next layer's comes after
// `tabled` of MLP_OUT, before which those who add up have waited until all SMs had begun OUT, so that they had merged.
#pragma once
#include "draft/block.cuh"

enum { IN, OUT, MLP_IN, MLP_OUT };  // a layer's products; the head is an IN

// The residual stream for the context, for every IN and MLP_IN and for the head, each with its squares, those of 128
// rows each, [SQUARES][NODES] behind it; of every layer attention's output, the inner activation, and the block's rows
// as attention takes them, fp16: of each node queries, keys and values, none all ones, since a NaN is 0x7fff. All but
// squares and rows are operands (see large/operands.cuh).
constexpr int BLOCK_WORDS = BLOCK_BYTES / 4;
__host__ __device__ constexpr int activation_words(int k) { return k / BLOCK_K * BLOCK_WORDS; }
constexpr int SQUARES = HIDDEN / 128, X_WORDS = activation_words(HIDDEN) + NODES * SQUARES,
              Y_WORDS = activation_words(DRAFT_DIM), H_WORDS = activation_words(FFN), Y_AT = (2 * LAYERS + 2) * X_WORDS,
              H_AT = Y_AT + LAYERS * Y_WORDS, NODE_ROWS = HEADS + 2 * KV_HEADS,
              ROWS_AT = H_AT + LAYERS * H_WORDS, ALL_WORDS = ROWS_AT + LAYERS * NODES * NODE_ROWS * (DIM / 2);

__device__ __forceinline__ bool normed(int stage) { return stage == CONTEXT || (stage >= 0 && (stage & 1) == 0); }
__device__ __forceinline__ u32* x_words(const Block& b, int stage) { return b.p.words + ((stage + 2) >> 1) * X_WORDS; }
__device__ __forceinline__ u32* square_words(const Block& b, int stage, int node) {
    return x_words(b, stage) + activation_words(HIDDEN) + node;
}
// A node's query, key or value.
__device__ __forceinline__ u32* row_words(const Block& b, int layer, int node, int row) {
    return b.p.words + ROWS_AT + ((layer * NODES + node) * NODE_ROWS + row) * (DIM / 2);
}
// What a stage multiplies.
__device__ __forceinline__ u32* operand_words(const Block& b, int stage) {
    const int kind = stage & 3, layer = stage >> 2;
    return stage < 0         ? x_words(b, stage)
           : kind == OUT     ? b.p.words + Y_AT + layer * Y_WORDS
           : kind == MLP_OUT ? b.p.words + H_AT + layer * H_WORDS
                             : x_words(b, stage);
}

__device__ __forceinline__ float* sums_at(const Block& b, int stage) {
    return b.p.sums + (size_t)(stage & 1) * LAYER_RESULTS * NODES * ROWS;
}
__device__ __forceinline__ u32 tag_of(int stage) { return (u32)(stage - FC) >> 1; }

typedef Sums<HIDDEN_GROUPS> Projection;  // of the residual stream

template <int GROUPS>
__device__ __forceinline__ Sums<GROUPS> sums_of(const Block& b, int stage, int rows) {
    return Sums<GROUPS>(sums_at(b, stage), b.s.tiles, rows, tag_of(stage));
}

__device__ __forceinline__ void tell_square(const Block& b, int next, int node, int which, float square) {
    if (b.lane == 0) store4(square_words(b, next, node) + which * NODES, __float_as_uint(square));
}

__device__ __forceinline__ bool came(uint4 v) { return came4(v); }
__device__ __forceinline__ bool came(uint2 v) { return v.x != NOT_YET & v.y != NOT_YET; }
__device__ __forceinline__ void not_yet(uint4& v) { v = {NOT_YET, NOT_YET, NOT_YET, NOT_YET}; }
__device__ __forceinline__ void not_yet(uint2& v) { v = {NOT_YET, NOT_YET}; }

// The first words of so many, in all lanes of the warp, once all have come. `load` asks for number i.
template <int COUNT, class Words, class Load>
__device__ __forceinline__ void take(Words* words, Load load) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) not_yet(words[i]);
#pragma unroll 1
    for (Watchdog dog;; dog.check()) {
        bool all = true;
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (!came(words[i])) words[i] = load(i);
#pragma unroll
        for (int i = 0; i < COUNT; i++) all &= came(words[i]);
        if (everywhere(all)) break;
    }
}
