// What the host fixes at compile time, and what follows from it.
//
// Given with -D: HIDDEN FFN VOCAB LAYERS RECURRENT_MASK HEADS KV_HEADS KEY_HEADS VALUE_HEADS EPS (the model);
// SMS RING_SLOTS IN_FLIGHT SCRATCH_BYTES (the chip); NODES (tree nodes this build takes: 1, 8, 16, 32 or 64).
#pragma once
#include "ptx.cuh"

constexpr int WARPS = 8;                 // consumers; one more warp fills the ring
constexpr int CONSUMERS = WARPS * 32;
constexpr int THREADS = CONSUMERS + 32;

// --- the model ------------------------------------------------------------------------------------------------------
constexpr int HEAD_DIM = 256, ROTARY = 64;   // attention
constexpr int STATE_DIM = 128;               // DeltaNet: keys and values of a head
constexpr int KEY_DIM = KEY_HEADS * STATE_DIM, VALUE_DIM = VALUE_HEADS * STATE_DIM;
constexpr int CONV_CHANNELS = 2 * KEY_DIM + VALUE_DIM;
constexpr int GROUP = HEADS / KV_HEADS;      // query heads that share a key head
constexpr int ATTENTION_DIM = HEADS * HEAD_DIM;

__host__ __device__ constexpr bool is_recurrent(int layer) { return (RECURRENT_MASK >> layer) & 1; }
__host__ __device__ constexpr int count_recurrent(int below) {
    int n = 0;
    for (int i = 0; i < below; i++) n += is_recurrent(i);
    return n;
}
constexpr int DELTA_LAYERS = count_recurrent(LAYERS), ATTENTION_LAYERS = LAYERS - DELTA_LAYERS;

// --- the weight stream ----------------------------------------------------------------------------------------------
// A unit is 8 output rows of a matrix, all of K. It is cut into chunks of 256 k: 4 KB of bf16, in which warp w finds
// its 8 x 32 tile (row-major, 512 bytes) at w * 512. Warp w owns k in [w * K/8, (w+1) * K/8). A slot holds four chunks.
constexpr int CHUNK_K = 32 * WARPS, CHUNK_BYTES = 8 * CHUNK_K * 2, SLOT_CHUNKS = 4, SLOT_BYTES = SLOT_CHUNKS * CHUNK_BYTES;
__host__ __device__ constexpr int chunks_of(int k) { return (k + CHUNK_K - 1) / CHUNK_K; }
__host__ __device__ constexpr int units_of(int rows) { return (rows + 7) / 8; }

constexpr int DELTA_IN_ROWS = CONV_CHANNELS + VALUE_DIM + 2 * VALUE_HEADS;      // qkv | z | beta | alpha
constexpr int ATTENTION_IN_ROWS = 2 * ATTENTION_DIM + 2 * KV_HEADS * HEAD_DIM;  // q and gate | k | v
constexpr int DELTA_IN_UNITS = units_of(DELTA_IN_ROWS), ATTENTION_IN_UNITS = units_of(ATTENTION_IN_ROWS);
constexpr int MLP_IN_UNITS = units_of(2 * FFN);  // a unit is 4 gate rows and their 4 up rows
constexpr int HIDDEN_UNITS = units_of(HIDDEN);   // mixer output and MLP output: who owns a piece of the residual
constexpr int HEAD_UNITS = units_of(VOCAB);
constexpr int OWN_UNITS = (HIDDEN_UNITS + SMS - 1) / SMS;

// Units are dealt in order: SM i has [first_unit(U, i), first_unit(U, i + 1)).
__host__ __device__ constexpr int first_unit(int units, int sm) { return (int)((long long)units * sm / SMS); }
__host__ __device__ constexpr int owner_of(int units, int unit) { return (int)((((long long)unit + 1) * SMS - 1) / units); }

// --- DeltaNet and attention work items ------------------------------------------------------------------------------
constexpr int COLUMNS = 16;                       // value columns of a DeltaNet block: two a warp
constexpr int BLOCKS = VALUE_DIM / COLUMNS;       // of a layer
constexpr int BLOCKS_PER_HEAD = STATE_DIM / COLUMNS;
constexpr int BLOCK_CHANNELS = 2 * STATE_DIM + COLUMNS;  // q | k | its own v
constexpr int HISTORY = 4;                        // convolution inputs kept, by position modulo 4
constexpr int KEYS = 16;                          // keys of an attention chunk: two a warp
constexpr int SPLITS = 128 / KV_HEADS;            // chunk c belongs to split c mod SPLITS, whatever the chip
constexpr int ATTENTION_ITEMS = KV_HEADS * SPLITS;

// --- tokens ---------------------------------------------------------------------------------------------------------
constexpr int QUADS = (NODES + 3) / 4;            // groups of 4 tokens: what one mma takes

// --- packet buffers, in packets (4 values) --------------------------------------------------------------------------
constexpr int X_PACKETS = HIDDEN / 4;
constexpr int IN_PACKETS = (DELTA_IN_UNITS > ATTENTION_IN_UNITS ? DELTA_IN_UNITS : ATTENTION_IN_UNITS) * 2;
constexpr int Y_DIM = VALUE_DIM > ATTENTION_DIM ? VALUE_DIM : ATTENTION_DIM;
constexpr int Y_PACKETS = Y_DIM / 4;
constexpr int SQUARE_PACKETS = BLOCKS;
constexpr int H_PACKETS = FFN / 4;
constexpr int PART_PACKETS = HEADS * SPLITS * (HEAD_DIM / 4 + 1);  // partial sums, then {max, sum}
constexpr int BEST_PACKETS = SMS;

// --- vectors: the small F32 weights, layer after layer --------------------------------------------------------------
constexpr int DELTA_VECTORS = 2 * HIDDEN + 4 * CONV_CHANNELS + 2 * VALUE_HEADS + STATE_DIM;
constexpr int ATTENTION_VECTORS = 2 * HIDDEN + 2 * HEAD_DIM;
// inside a layer: mixer norm | MLP norm | then conv [channels][4] | dt | a | gated norm, or q norm | k norm
constexpr int MIX_NORM = 0, MLP_NORM = HIDDEN, AFTER_NORMS = 2 * HIDDEN;
constexpr int CONV_AT = AFTER_NORMS, DT_AT = CONV_AT + 4 * CONV_CHANNELS, A_AT = DT_AT + VALUE_HEADS;
constexpr int GATED_NORM_AT = A_AT + VALUE_HEADS;
constexpr int Q_NORM_AT = AFTER_NORMS, K_NORM_AT = AFTER_NORMS + HEAD_DIM;
