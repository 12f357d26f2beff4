// The kernels' arguments. The host builds the same structs field by field (see structures.py).
#pragma once
#include "sample/decide.cuh"
#include "common/exchange.cuh"
#include "common/made_tree.cuh"
#include "common/shape.cuh"

constexpr int MAX_STOPS = 16, MAX_FEATURES = 8;

// What is asked of one launch.
struct Request {
    int nodes;       // of the tree; 1 when decoding
    int length;      // tokens committed before this launch
    int steps;       // tokens to decode; 0: a forward pass that commits nothing
    int stop_after;  // stage to stop after (debugging), or a large number
    int stops;       // ids in stop_ids
    int features;    // layers in feature_layers
    int want_logits, want_hidden;
    u32 zero;  // is 0, which the compiler cannot know (see Ring::release)
    int tokens[MAX_NODES];
    int parents[MAX_NODES];
    int stop_ids[MAX_STOPS];
    int feature_layers[MAX_FEATURES];
    const MadeTree* made;  // instead of these tokens and parents, of `nodes` at most; or null

    __device__ int tree_nodes() const { return made ? made->nodes : nodes; }
    __device__ int token(int node) const { return made ? made->tokens[node] : tokens[node]; }
    __device__ int parent(int node) const { return made ? made->parents[node] : parents[node]; }
};

struct Params {
    // weights
    const u8* stream;         // every SM's stream, one after the other
    const u64* stream_start;  // [SMS] offset of each
    const u64* head_start;    // [SMS] offset of each SM's share of the LM head in `stream`
    const u8* embedding;      // the file's rows, where the LM head has weights of its own
    const float* vectors;
    const float2* rope;  // cos, sin: [64][32] of a position's low six bits, then [context / 64 + 1][32] of the rest
    // one sequence
    float* delta;    // [DELTA_LAYERS][BLOCKS][COLUMNS][STATE_DIM]
    float* history;  // [DELTA_LAYERS][HISTORY][CONV_CHANNELS], before the convolution, by position modulo 4
    u32* keys;       // fp16 pairs [ATTENTION_LAYERS][KV_HEADS][context][HEAD_DIM / 2], after norm and RoPE
    u32* values;
    int context;
    // activations on their way between SMs (see exchange.cuh)
    u32* exchange;  // [2 copies][MAX_NODES / 8][NODE_TILE_WORDS]
    u32* parts;  // attention: fp16 pairs of means [MAX_NODES][HEADS][SPLITS][HEAD_DIM / 2], reset by their one reader
    // what a commit needs of each node
    float* pending_raw;    // [DELTA_LAYERS][MAX_NODES][CONV_CHANNELS]
    float* pending_key;    // [DELTA_LAYERS][KEY_HEADS][MAX_NODES][STATE_DIM], not normalised
    float* pending_write;  // [DELTA_LAYERS][BLOCKS][MAX_NODES][COLUMNS], over the key's norm
    float* pending_fade;   // [DELTA_LAYERS][BLOCKS][MAX_NODES]
    u32* pending_keys;     // fp16 pairs [ATTENTION_LAYERS][KV_HEADS][MAX_NODES][HEAD_DIM / 2]
    u32* pending_values;
    float* branch_state;  // [BLOCKS][MAX_NODES][COLUMNS][STATE_DIM]: states of nodes with several children
    // results
    int*
        out_tokens;  // decode: ids as they come (-1: undecided, the last), in host memory; forward: argmax of each node
    volatile int* out_count;  // decode: how many ids there are
    float* out_logits;        // [nodes][VOCAB]
    float* out_features;      // [features][nodes][HIDDEN]
    float* out_hidden;        // [nodes][HIDDEN]
    long long* profile;       // [SMS][PROFILE] clocks, in a profiling build
};
