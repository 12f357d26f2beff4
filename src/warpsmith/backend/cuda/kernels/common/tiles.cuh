// How matrices and activations are cut, whatever the model.
//
// A row tile is some output rows of a matrix, all of K: 16 rows where there are many (wide: projections into the mixer
// and the MLP, LM head), 8 where every SM must have its share of few (narrow: projections back to the residual stream).
// It is cut into chunks of 256 k, a fragment of 32 k for each warp: warp w owns k in [w * K/8, (w+1) * K/8). How a
// fragment's weights lie is up to their format (formats/): a lane has rows l / 4 (and l / 4 + 8) at k = 8 (l mod 4) ..
// + 7, as the mma wants them. A node tile is eight nodes of the tree: the columns of a mma.
#pragma once
#include "common/ptx.cuh"

constexpr int WARPS = 8;  // consumers; one more warp fills the ring
constexpr int CHUNK_K = 32 * WARPS, WIDE = 16, NARROW = 8;
constexpr int MAX_NODES = 64;
constexpr int CHAIN = 4;  // chunks summed inside the mma

__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int chunks_of(int k) { return (k + CHUNK_K - 1) / CHUNK_K; }
__host__ __device__ constexpr int tiles_of(int rows, int tile) { return (rows + tile - 1) / tile; }

__device__ __forceinline__ float4 add(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
__device__ __forceinline__ float4 scaled(float4 a, float s) { return {a.x * s, a.y * s, a.z * s, a.w * s}; }

// --- activations that SMs exchange: what a node tile takes, in 4-byte words (see exchange.cuh)
// ------------------------ First a row a node of all that is f32. Then an area for each kind of activation that a
// matrix product reads: sums of squares if there are any, a row a node; and bf16 values in the order of the mma's B
// operand, 512 bytes a chunk: [node][4][8 k]. Chunks lie four by four (what all warps need for a chain of sums), the
// warps' slices of K beside each other.
constexpr int CHUNK_WORDS = 128;
__host__ __device__ constexpr int on_lines(int words) { return (words + 31) / 32 * 32; }  // of 128 bytes
// 16 more keep the banks apart.
__host__ __device__ constexpr int square_stride(int squares) { return squares ? on_lines(squares) + 16 : 0; }
__host__ __device__ constexpr int square_words(int squares) { return 8 * square_stride(squares); }
// Where chunk `c` of a warp's slice lies, in chunks.
__host__ __device__ constexpr int chunk_place(unsigned chunks, unsigned warp, unsigned c) {
    const unsigned before = c / CHAIN * CHAIN, left = chunks - before;
    return before * WARPS + warp * (left < CHAIN ? left : CHAIN) + c - before;
}
// An activation's area: where a node's value lies, from the values on, and a sum of squares, from the sums on.
template <int VALUES, int SUMS>
struct Activation {
    static constexpr int K = VALUES, SQUARES = SUMS, VALUES_AT = square_words(SQUARES);

    static __host__ __device__ constexpr int value(unsigned node, unsigned k) {
        const unsigned chunks = chunks_of(K), chunk = k / 32;
        const int place = chunk_place(chunks, chunk / chunks, chunk % chunks);
        return place * CHUNK_WORDS + node % 8 * 16 + k % 32 / 2;
    }
    static __host__ __device__ constexpr int square(unsigned node, unsigned i) {
        return node % 8 * square_stride(SQUARES) + i;
    }
};

// Layers that use an area: its two copies take turns from one such layer to the next.
enum UsedIn { IN_EVERY_LAYER, IN_DELTA_LAYERS, IN_ATTENTION_LAYERS };
// What a stage takes: which activation, where its values begin, and which layers use it.
template <int K, int SQUARES, int AT, UsedIn WHERE>
struct Takes : Activation<K, SQUARES> {
    static constexpr int PLACE = AT;
    static constexpr UsedIn USED = WHERE;
};
