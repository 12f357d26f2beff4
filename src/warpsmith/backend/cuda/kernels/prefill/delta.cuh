// The DeltaNet of a prompt in chunks of 64 tokens: what its kernels share.
//
// Maths, per value head with state S [128, 128]; in a chunk G is the running sum of the log decays, q and k are unit
// vectors (q times 128^-0.5), A_ij = beta_i e^(G_i - G_j) k_i.k_j for j < i, X = (I + A)^-1, U = X beta V, W = X (beta
// e^G) K, P_ij = e^(G_i - G_j) q_i.k_j for j <= i, K~ = e^(G_last - G) K. Then
//     S' = e^(G_last) S + B - N S   with N = K~^T W, B = K~^T U
//     O  = Q^ S + O0                with Q^ = e^G Q - P W, O0 = P U
// prep makes N, B, Q^ and O0 of every chunk at once; scan walks along the chunks, one product a chunk; output makes O,
// norms and gates it; short does all of it where there is one chunk. Chunks sit at absolute positions, and the state
// crosses them in f32: where a prompt is cut does not show. Tokens of a chunk that are not of the piece have k = beta =
// decay = 0, and change nothing.
//
// Everything on the way is bf16 in the order of an mma's registers, [tile of 16 rows][tile of 16 columns][lane] of 16
// bytes: as operand A, and as sums of two tiles of eight columns.
#pragma once
#include "prefill/common.cuh"

constexpr int DELTA_TILES = STATE_DIM / 32;            // tiles of activations of a head
constexpr float QUERY_SCALE = 0.08838834764831845f;    // 128 ** -0.5
constexpr int SLICE = 16, SLICES = STATE_DIM / SLICE;  // columns of the state that a CTA of the scan has

struct Delta {
    const u8* raw;  // tiles of the projection: qkv | z, in the order of rows
    // [beta heads, alpha heads][tokens], before sigmoid and softplus: in f32, as errors of the decay add up.
    const float* gates;
    const float* vectors;  // the layer's small weights
    float* history;        // [HISTORY][CONV_CHANNELS]
    float* state;          // [VALUE_HEADS][128 columns][128]
    uint4* n;              // [chunk][head][8][8][32]
    uint4* b;
    uint4* q;  // [chunk][head][4][8][32]
    uint4* o;
    float* fade;  // [chunk][head]
    // [chunk][head][SLICES][8][32]: the state before a chunk in bf16, as operand B of two tiles of columns.
    uint4* states;
    u8* y;         // tiles, in the order of the next product's k
    u32* arrived;  // [KEY_HEADS] heads of delta_short that have read their last inputs; 0 between launches
};

__device__ __forceinline__ int chunks_in(const Piece& p) { return (p.end + CHUNK - 1) / CHUNK; }
