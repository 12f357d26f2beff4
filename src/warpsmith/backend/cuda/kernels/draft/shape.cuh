// A DFlash draft in the words of the activations-first pass: what its launch is told beside that.
//
// Given with -D, beside what large/shape.cuh names: FEATURES (layers of the target that it reads). Heads have 128
// dimensions. Stages count from the block's first: -2 is fc, -1 keys and values of the context for all layers, then
// four a layer, then the target's head.
#pragma once
#include "large/steps.cuh"

constexpr int DIM = 128, MAX_LAYERS = 32;
constexpr int FC = -2, CONTEXT = -1, HEAD = 4 * LAYERS;
constexpr int DRAFT_DIM = HEADS * DIM, KV_ROWS = KV_HEADS * DIM;

// Rows of stages.
constexpr int IN_ROWS = DRAFT_DIM + 2 * KV_ROWS, CONTEXT_ROWS = LAYERS * 2 * KV_ROWS;  // q | k | v; [layer] k | v
constexpr int FC_GROUPS = groups_of(FEATURES * HIDDEN), OUT_GROUPS = groups_of(DRAFT_DIM);

// Vectors: of every layer two norms of rows, norms of queries and keys; the last norm; that of the context.
constexpr int DRAFT_Q_NORM = 2 * HIDDEN, DRAFT_K_NORM = DRAFT_Q_NORM + DIM, DRAFT_VECTORS = DRAFT_K_NORM + DIM;
constexpr int HIDDEN_NORM = LAYERS * DRAFT_VECTORS + HIDDEN;

// Attention: chunks of 64 keys; chunk c belongs to split c mod DRAFT_SPLITS.
constexpr int QUERIES = NODES * GROUP, BATCH = 64, BATCHES = (QUERIES + BATCH - 1) / BATCH;  // of a key head
constexpr int DRAFT_SPLITS = SMS / (KV_HEADS * BATCHES) < 1    ? 1
                             : SMS / (KV_HEADS * BATCHES) > 32 ? 32
                                                               : SMS / (KV_HEADS * BATCHES);

struct DraftParams : Params {
    const u8* head_stream;  // the target's
    const u64* head_start;  // [SMS]
    const u16* waiting;     // bf16, features of rows to be appended (see activation_at)
    int* positions;         // [context] of the rows in the rings, -1 where there is none
};
// `nodes`: of the block, 0 for none; `length`: the root's position.
struct DraftRequest : Request {
    int rows, first_position;  // to append, and where the first of them stands
    int appended;              // before, since the beginning
    int window[MAX_LAYERS];    // how far a layer sees, 0: all the way
    int causal[MAX_LAYERS];
};
