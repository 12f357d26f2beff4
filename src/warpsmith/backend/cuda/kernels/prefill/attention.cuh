// Gated attention of a prompt: what its three kernels share.
//
// rows norms and rotates queries and keys and writes keys and values into the cache; flash attends, a segment of keys
// at a time; merge joins the segments and gates. A query head's rows and those of the heads that share its keys lie
// together: row = token * GROUP + head % GROUP, per key head. Keys are taken in tiles of 64 at absolute positions,
// ascending, and in segments, which are merged in order: short ones where a context begins, so that few queries find
// work for all SMs (of 132 at 8,192 keys one each: sixteen segments, eight tiles of rows of 64 tokens), and long ones
// later, of which there would be too many. Queries read keys and values as the cache has them, those of their own piece
// too. Where a prompt is cut, how many tokens there are and which CTA has what does not show in the bits.
#pragma once
#include "common/cache.cuh"
#include "prefill/common.cuh"

constexpr int SHORT = 512, SHORTS = 15, LONG = 2048;  // keys of a segment; how many are short
__device__ __forceinline__ int segment_start(int segment) {
    return segment < SHORTS ? segment * SHORT : SHORTS * SHORT + (segment - SHORTS) * LONG;
}
__device__ __forceinline__ int segment_of(int position) {
    return position < SHORTS * SHORT ? position / SHORT : SHORTS + (position - SHORTS * SHORT) / LONG;
}
constexpr int DIM_TILES = HEAD_DIM / 32, KEY_ROW = cache_row_bytes(KEY_TYPE), VALUE_ROW = cache_row_bytes(VALUE_TYPE);

struct Attention {
    const u8* raw;         // tiles of the projection: heads of query and gate | k | v, in the order of rows
    const float* vectors;  // the layer's small weights
    const float2* rope;    // see params.cuh
    u8* keys;              // [KV_HEADS][context] rows of KEY_TYPE (common/cache.cuh)
    u8* values;            // the same, of VALUE_TYPE
    u16* queries;   // fp16 [KV_HEADS][tokens * GROUP][HEAD_DIM], scaled
    uint4* parts;   // means of a segment: fp16 [segment][KV_HEADS][rows][tile of 32 dimensions][4][4 pairs]
    float2* stats;  // their maximum and weight [segment][KV_HEADS][rows]
    u8* y;          // tiles, in the order of the next product's k
    int context;
};

// The tokens of a launch of flash and merge: [first, first + count), multiples of eight. Their rows are all that parts
// and stats have.
struct Queries {
    int first, count;
};
