// What the host fixes at compile time, and what follows from it.
//
// Given with -D: HIDDEN FFN VOCAB LAYERS RECURRENT_LOW RECURRENT_HIGH HEADS KV_HEADS KEY_HEADS VALUE_HEADS EPS (the model);
// LAYER_TYPES HEAD_TYPE TIED EMBEDDING_TYPE (how its weights are stored, see weights.cuh);
// SMS SHARED_MEMORY IN_FLIGHT (the chip); NODES (tree nodes this build takes).
#pragma once
#include "common/ptx.cuh"

constexpr int WARPS = 8;                 // consumers; one more warp fills the ring
constexpr int CONSUMERS = WARPS * 32;
// On sm_90 the ring's warp has three idle companions: registers are moved from such a group of four to the consumers.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr int THREADS = CONSUMERS + 128;
#else
constexpr int THREADS = CONSUMERS + 32;
#endif

// --- the model ------------------------------------------------------------------------------------------------------
constexpr int HEAD_DIM = 256, ROTARY = 64;   // attention
constexpr int STATE_DIM = 128;               // DeltaNet: keys and values of a head
constexpr int KEY_DIM = KEY_HEADS * STATE_DIM, VALUE_DIM = VALUE_HEADS * STATE_DIM;
constexpr int CONV_CHANNELS = 2 * KEY_DIM + VALUE_DIM;
constexpr int GROUP = HEADS / KV_HEADS;      // query heads that share a key head
constexpr int ATTENTION_DIM = HEADS * HEAD_DIM;

// Recurrent layers, a bit each: of the first 64, then of the others.
__host__ __device__ constexpr bool is_recurrent(int layer) {
    return (LAYERS <= 64 || layer < 64 ? RECURRENT_LOW >> layer : RECURRENT_HIGH >> (layer - 64)) & 1;
}
__host__ __device__ constexpr int count_recurrent(int below) {
    int n = 0;
    for (int i = 0; i < below; i++) n += is_recurrent(i);
    return n;
}
// The same where the layer is known when it runs.
__device__ __forceinline__ int recurrent_before(int layer) {
    if (LAYERS < 64 || layer < 64) return __popcll(RECURRENT_LOW & (1ull << layer) - 1);
    const u64 high = layer < 128 ? RECURRENT_HIGH & (1ull << (layer - 64)) - 1 : RECURRENT_HIGH;
    return __popcll(RECURRENT_LOW) + __popcll(high);
}
constexpr int DELTA_LAYERS = count_recurrent(LAYERS), ATTENTION_LAYERS = LAYERS - DELTA_LAYERS;

// --- the weight stream ----------------------------------------------------------------------------------------------
// A unit is some output rows of a matrix, all of K: 16 rows where there are many (projections into the mixer and the MLP,
// LM head), 8 where every SM must have its share of few (projections back to the residual stream). It is cut into chunks of
// 256 k, a tile of 32 k for each warp: warp w owns k in [w * K/8, (w+1) * K/8). How a tile's weights lie is up to the
// unit's type (weights.cuh): a lane has rows l / 4 (and l / 4 + 8) at k = 8 (l mod 4) .. + 7, as the mma wants them.
// A slot of the ring holds whole chunks of one unit: 16 KB of weights, and their scales; a unit's last slot what is left.
constexpr int CHUNK_K = 32 * WARPS, WIDE = 16, NARROW = 8;
enum WeightType { BF16, Q8_0 };
// BF16: 64 bytes a row of a tile. Q8_0: a row of a tile is a block of the file, 32 values with their fp16 scale.
__host__ __device__ constexpr int chunk_bytes(int type, int rows) { return WARPS * rows * (type == Q8_0 ? 34 : 64); }
__host__ __device__ constexpr int slot_chunks(int type, int rows) { return (type == Q8_0 ? 64 : 32) / rows; }
__host__ __device__ constexpr int slot_bytes(int type) { return slot_chunks(type, WIDE) * chunk_bytes(type, WIDE); }
__host__ __device__ constexpr int chunks_of(int k) { return (k + CHUNK_K - 1) / CHUNK_K; }
__host__ __device__ constexpr int units_of(int rows, int unit) { return (rows + unit - 1) / unit; }

constexpr int DELTA_IN_ROWS = CONV_CHANNELS + VALUE_DIM + 2 * VALUE_HEADS;      // qkv | z | beta | alpha
constexpr int ATTENTION_IN_ROWS = 2 * ATTENTION_DIM + 2 * KV_HEADS * HEAD_DIM;  // q and gate | k | v
constexpr int DELTA_IN_UNITS = units_of(DELTA_IN_ROWS, WIDE), ATTENTION_IN_UNITS = units_of(ATTENTION_IN_ROWS, WIDE);
constexpr int MLP_IN_UNITS = units_of(2 * FFN, WIDE);     // a unit is 8 gate rows and their 8 up rows
constexpr int HIDDEN_UNITS = units_of(HIDDEN, NARROW);    // mixer output and MLP output: who owns a piece of the residual
constexpr int HEAD_UNITS = units_of(VOCAB, WIDE);
constexpr int OWN_UNITS = (HIDDEN_UNITS + SMS - 1) / SMS;

// Units are dealt in order: SM i has [first_unit(U, i), first_unit(U, i + 1)).
__host__ __device__ constexpr int first_unit(int units, int sm) { return (int)((unsigned)units * (unsigned)sm / SMS); }
__host__ __device__ constexpr int owner_of(int units, int unit) {
    return (int)((((unsigned)unit + 1) * SMS - 1) / (unsigned)units);
}
// The units of the residual stream that an SM has.
struct OwnUnits {
    int first, count;
    __host__ __device__ constexpr explicit OwnUnits(int sm)
        : first(first_unit(HIDDEN_UNITS, sm)), count(first_unit(HIDDEN_UNITS, sm + 1) - first) {}
};

// --- DeltaNet and attention work items ------------------------------------------------------------------------------
constexpr int COLUMNS = 16;                       // value columns of a DeltaNet block
constexpr int BLOCKS = VALUE_DIM / COLUMNS;       // of a layer
constexpr int BLOCKS_PER_HEAD = STATE_DIM / COLUMNS;
constexpr int HISTORY = 4;                        // convolution inputs kept, by position modulo 4
constexpr int KEYS = 16;                          // keys of an attention chunk: two a warp
constexpr int SPLITS = 128 / KV_HEADS;            // chunk c belongs to split c mod SPLITS, whatever the chip

// --- exchanges: what eight nodes' activations take, in 4-byte words (see exchange.cuh) --------------------------------
// First a row a node of all that is f32. Then an area for each kind of activation that a matrix product reads: sums of squares
// if there are any, a row a node; and bf16 values in the order of the mma's B operand, 512 bytes a chunk: [node][4][8 k].
// Chunks lie four by four (what all warps need for a chain of sums), the warps' slices of K beside each other.
__host__ __device__ constexpr int aligned(int words) { return (words + 3) / 4 * 4; }
__host__ __device__ constexpr int on_lines(int words) { return (words + 31) / 32 * 32; }  // of 128 bytes
constexpr int MAX_NODES = 64, CHUNK_WORDS = 128, CHAIN = 4;  // CHAIN: chunks summed inside the mma
constexpr int Y_DIM = VALUE_DIM > ATTENTION_DIM ? VALUE_DIM : ATTENTION_DIM;
__host__ __device__ constexpr int square_stride(int squares) { return squares ? on_lines(squares) + 16 : 0; }  // keeps the banks apart
__host__ __device__ constexpr int square_words(int squares) { return 8 * square_stride(squares); }
// Where chunk `c` of a warp's slice lies, in chunks.
__host__ __device__ constexpr int chunk_place(unsigned chunks, unsigned warp, unsigned c) {
    const unsigned before = c / CHAIN * CHAIN, left = chunks - before;
    return before * WARPS + warp * (left < CHAIN ? left : CHAIN) + c - before;
}
// An activation's area: where a node's value lies, from the values on, and a sum of squares, from the sums on.
template <int VALUES, int SUMS>
struct Activation {
    static constexpr int K = VALUES, SQUARES = SUMS, VALUES_AT = square_words(SQUARES), WORDS = VALUES_AT + chunks_of(K) * WARPS * CHUNK_WORDS;

    static __host__ __device__ constexpr int value(unsigned node, unsigned k) {
        const unsigned chunks = chunks_of(K), chunk = k / 32;
        return chunk_place(chunks, chunk / chunks, chunk % chunks) * CHUNK_WORDS + node % 8 * 16 + k % 32 / 2;
    }
    static __host__ __device__ constexpr int square(unsigned node, unsigned i) { return node % 8 * square_stride(SQUARES) + i; }
};
typedef Activation<HIDDEN, HIDDEN_UNITS> Residual;
typedef Activation<FFN, SMS> Inner;  // no squares: a sign of every SM, given with an octet's last node
typedef Activation<VALUE_DIM, BLOCKS> DeltaOutput;
typedef Activation<ATTENTION_DIM, 0> AttentionOutput;

constexpr int DELTA_IN_AT = 0;                                                         // f32 projections into the mixer
constexpr int ATTENTION_IN_AT = DELTA_IN_AT + on_lines(DELTA_IN_UNITS * WIDE);
constexpr int STATS_AT = ATTENTION_IN_AT + on_lines(ATTENTION_IN_UNITS * WIDE);        // {maximum, sum} of a split [HEADS][SPLITS][2]
constexpr int ATTENTION_ROWS = HEADS + 2 * KV_HEADS;                                   // of q, k and v
constexpr int ATTENTION_ROWS_AT = STATS_AT + on_lines(HEADS * SPLITS * 2);             // in a tree: fp16, after norm and RoPE [ATTENTION_ROWS][HEAD_DIM]
constexpr int BEST_AT = ATTENTION_ROWS_AT + on_lines(ATTENTION_ROWS * HEAD_DIM / 2);   // {id, logit} of each SM's best token [SMS][2]
constexpr int NODE_WORDS = BEST_AT + on_lines(SMS * 2);

constexpr int X_SQUARES_AT = 8 * NODE_WORDS, X_AT = X_SQUARES_AT + Residual::VALUES_AT;           // x times the next norm's weight
constexpr int MID_SQUARES_AT = X_SQUARES_AT + Residual::WORDS, MID_AT = MID_SQUARES_AT + Residual::VALUES_AT;  // the same after the mixer
constexpr int H_SIGNS_AT = MID_SQUARES_AT + Residual::WORDS, H_AT = H_SIGNS_AT + Inner::VALUES_AT;     // silu(gate) * up [FFN]
constexpr int DELTA_SQUARES_AT = H_SIGNS_AT + Inner::WORDS;                                           // of a block's outputs [BLOCKS]
constexpr int DELTA_Y_AT = DELTA_SQUARES_AT + DeltaOutput::VALUES_AT;                           // mixer output [VALUE_DIM]
constexpr int ATTENTION_Y_AT = DELTA_SQUARES_AT + DeltaOutput::WORDS;
constexpr int OCTET_WORDS = ATTENTION_Y_AT + AttentionOutput::WORDS;
constexpr int COPY_WORDS = MAX_NODES / 8 * OCTET_WORDS;

// --- vectors: the small F32 weights, layer after layer --------------------------------------------------------------
constexpr int DELTA_VECTORS = 2 * HIDDEN + 4 * CONV_CHANNELS + 2 * VALUE_HEADS + STATE_DIM;
constexpr int ATTENTION_VECTORS = 2 * HIDDEN + 2 * HEAD_DIM;
// inside a layer: mixer norm | MLP norm | then conv [channels][4] | dt | a | gated norm, or q norm | k norm
constexpr int MIX_NORM = 0, MLP_NORM = HIDDEN, AFTER_NORMS = 2 * HIDDEN;
constexpr int CONV_AT = AFTER_NORMS, DT_AT = CONV_AT + 4 * CONV_CHANNELS, A_AT = DT_AT + VALUE_HEADS;
constexpr int GATED_NORM_AT = A_AT + VALUE_HEADS;
constexpr int Q_NORM_AT = AFTER_NORMS, K_NORM_AT = AFTER_NORMS + HEAD_DIM;
// Where a layer's begin.
__device__ __forceinline__ int vectors_at(int layer) {
    const int deltas = recurrent_before(layer);
    return deltas * DELTA_VECTORS + (layer - deltas) * ATTENTION_VECTORS;
}
