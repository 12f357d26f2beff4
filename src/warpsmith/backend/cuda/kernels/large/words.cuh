// What SMs exchange between the products of a layer: words that are there or not yet.
//
// The residual stream times the next norm's weight, sums of its squares, what the mixer gives, the MLP's inner
// activation and the sums of a layer's stages are polled for where they are needed (see common/exchange.cuh): no fence,
// no counter, and an SM waits only for those SMs whose results it uses. Attention's rows and parts are waited for by
// counters. The head's sums stay with their SM. Nobody waits for nodes that are not there.
//
// One node: layers have two places in turn. When an SM has the sums of squares for a layer's IN, which all SMs publish,
// everybody has read all words of the layer before. They are then set back to NOT_YET beside the products of OUT and
// what follows, and that is seen by all before the SM publishes the squares for MLP_IN (it waits for `cleared`),
// without which nobody comes to the layer that has this place next.
//
// A tree: one place is enough, and less of the L2 cache. Words for a stage are set back beside the products of the next
// one, when all SMs have written the stage's sums, so that they have read those words. An SM's consumers wait for that
// before they go on (`tabled`). Whoever writes words of this kind again, four stages on, depends on sums of every SM
// that were made after that.
//
// Sums are too many to be set back in every stage: their last bits, SUM_TAGS, are those of the stage's number, and
// differ from those of whoever wrote to this place before (see LargeLayout.sum_tags). An SM writes sums when everybody
// has read those before. A tree's stages have one place: squares of the residual stream, or `wait_for_use`, say so. One
// node's stages have two by turns, and squares alone do: every second stage waits for those of all SMs.
//
// After a token all words and sums are NOT_YET, however many nodes it had: beside the head's last products they are set
// back, when all SMs have begun them.
#pragma once
#include "common/exchange.cuh"
#include "large/block.cuh"

enum { IN, OUT, MLP_IN, MLP_OUT };  // a layer's products; the head is an IN

// Where a layer's words lie: the residual stream for IN and for MLP_IN, its squares, those of 128 rows each,
// [SQUARES][NODES] behind it (of one node every SM says something: 0 if it has no rows); the mixer's output; a
// DeltaNet's before its heads are normed, [NODES][VALUE_DIM] (of one node in the mixer's place), squares of its heads
// [VALUE_HEADS][NODES][16], its q and k if they are exchanged, [KEY_HEADS][NODES][256] f32; the inner activation.
// Activations of one node and what is not normed yet are pairs of bf16, in order; others are operands (see
// operands.cuh).
constexpr int BLOCK_WORDS = BLOCK_BYTES / 4;
__host__ __device__ constexpr int activation_words(int k) { return POLLED ? k / 2 : k / BLOCK_K * BLOCK_WORDS; }
constexpr int SQUARES = POLLED ? larger(SMS, HIDDEN / 128) : HIDDEN / 128,
              X_WORDS = activation_words(HIDDEN) + up(NODES * SQUARES, 4), Y_AT = 2 * X_WORDS,
              HEADS_AT = Y_AT + (POLLED ? 0 : activation_words(larger(VALUE_DIM, ATTENTION_DIM))),
              HEAD_SQUARES_AT = HEADS_AT + NODES * (POLLED ? larger(VALUE_DIM, ATTENTION_DIM) : VALUE_DIM) / 2,
              QK_AT = HEAD_SQUARES_AT + NODES * VALUE_DIM / 8,
              H_AT = QK_AT + (QK_SHARED ? KEY_HEADS * NODES * 2 * STATE_DIM : 0),
              LAYER_WORDS = H_AT + activation_words(FFN), PLACES = POLLED ? 2 : 1;

__device__ __forceinline__ u32* layer_words(const Block& b, int stage) {
    return b.p.words + (stage >> 2 & PLACES - 1) * LAYER_WORDS;
}
// A stage's sums: of one node in one of two places by turns.
__device__ __forceinline__ float* sums_at(const Block& b, int stage) {
    return b.p.sums + (POLLED ? (stage & 1) * (LAYER_RESULTS * ROWS) : 0);
}
// The residual stream that a stage reads.
__device__ __forceinline__ u32* x_words(const Block& b, int stage) {
    return layer_words(b, stage) + ((stage & 3) == MLP_IN ? X_WORDS : 0);
}
__device__ __forceinline__ u32* square_words(const Block& b, int stage, int node) {
    return x_words(b, stage) + activation_words(HIDDEN) + node;
}
// A node's values of a DeltaNet for OUT before their heads are normed, and squares of a head.
__device__ __forceinline__ u32* head_words(const Block& b, int stage, int node) {
    return layer_words(b, stage) + HEADS_AT + node * (VALUE_DIM / 2);
}
__device__ __forceinline__ u32* head_square_words(const Block& b, int stage, int head, int node) {
    return layer_words(b, stage) + HEAD_SQUARES_AT + (head * NODES + node) * 16;
}
// A node's q and k for the mixer before OUT.
__device__ __forceinline__ u32* qk_words(const Block& b, int stage, int key_head, int node) {
    return layer_words(b, stage) + QK_AT + (key_head * NODES + node) * (2 * STATE_DIM);
}
// What a stage multiplies.
__device__ __forceinline__ u32* operand_words(const Block& b, int stage) {
    const int kind = stage & 3;
    return kind == OUT       ? layer_words(b, stage) + Y_AT
           : kind == MLP_OUT ? layer_words(b, stage) + H_AT
                             : x_words(b, stage);
}

// Beside the products of a stage, by one warp: those that everybody has read by then.
__device__ __forceinline__ void reset_read_words(const Block& b, int stage) {
    if (!POLLED && stage == 0) return;
    if (POLLED) {
        reset_words(b, layer_words(b, stage + 4), LAYER_WORDS, b.lane, 32);  // of the layer before
    } else {
        const int before = stage - 1, kind = before & 3,
                  count = kind == OUT ? H_AT - Y_AT : kind == MLP_OUT ? LAYER_WORDS - H_AT : X_WORDS;
        reset_words(b, operand_words(b, before), count, b.lane, 32);
    }
    fence_gpu();
}
__device__ __forceinline__ void reset_all_words(const Block& b) {
    reset_words(b, b.p.words, PLACES * LAYER_WORDS, b.lane, 32);
    reset_words(b, (u32*)b.p.sums, LAYER_RESULTS * (POLLED ? 2 : NODES) * ROWS, b.lane, 32);
}

typedef Sums<HIDDEN_GROUPS> Projection;  // of the residual stream

template <int GROUPS>
__device__ __forceinline__ Sums<GROUPS> sums_of(const Block& b, int stage, int rows) {
    return Sums<GROUPS>(sums_at(b, stage), b.s.tiles, rows, stage & SUM_TAGS);
}
