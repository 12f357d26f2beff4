// The wide stages: projections of normed x into the mixer and into the MLP, and the LM head. They share one copy of the
// code: what is executed again and again must stay in the instruction cache.
#pragma once
#include "forward/convolve.cuh"
#include "forward/head.cuh"

// silu(gate) * up: gate rows are in even quarters' lanes, up rows in their neighbours'.
__device__ __forceinline__ void publish_inner(Block& b, bool live, bool last_tile, int token, int quarter, int place,
                                              float4 v) {
    float4 up;
    up.x = __shfl_xor_sync(~0u, v.x, 1), up.y = __shfl_xor_sync(~0u, v.y, 1);
    up.z = __shfl_xor_sync(~0u, v.z, 1), up.w = __shfl_xor_sync(~0u, v.w, 1);
    if (live && quarter < 2)
        publish8(b.node_tile(LAYER_PHASE, token, place + Inner::value(token, 0)), b.other(LAYER_PHASE),
                 pack_bf16(silu(v.x) * up.x, silu(v.y) * up.y), pack_bf16(silu(v.z) * up.z, silu(v.w) * up.w));
    // a mark for the lookout, with a node tile's last node
    if (HELPED && last_tile && quarter == 0 && live && (token % 8 == 7 || token == b.nodes - 1))
        publish4(b.square<Inner>(LAYER_PHASE, token, H_SQUARES_AT, b.sm), b.other(LAYER_PHASE), 0);
}

// Four rows of a mixer's projections. A DeltaNet's are convolved and gated first; `kept` has a tree's other nodes.
__device__ __forceinline__ void publish_mixer_input(Block& b, int row, int token, int place, float4 v,
                                                    const float* kept) {
    if (b.is_recurrent()) {
        const float4 made = after_projection(b, row, v, [&](int age) {
            const int source = NODES == 1 ? -age : b.s.path[token][age];
            return source < 0 ? past_input(b, row, -source) : *(const float4*)(kept + source * ROW_STRIDE);
        });
        publish16(b.words(DELTA_PHASE, token, place), b.other(DELTA_PHASE), made);
        keep_input(b, b.delta_index(), token, row, v);
    } else {
        publish16(b.words(ATTENTION_PHASE, token, place), b.other(ATTENTION_PHASE), v);
    }
}

// Stage: MIX_IN, MLP_IN or HEAD, whichever it is the time for.
__device__ __forceinline__ void project_in(Block& b) {
    typedef StageOf<MIX_IN> MixIn;
    typedef StageOf<MLP_IN> MlpIn;
    typedef StageOf<HEAD> Head;
    const bool head = b.is_head(), mlp = b.is_mlp(), recurrent = b.is_recurrent(), gather = recurrent && !mlp;
#ifdef DEALT_TILES
    const auto first_here = [&](int sm) {
        return head  ? first_tile<Head>(LAYERS, false, sm)
               : mlp ? first_tile<MlpIn>(b.layer(), recurrent, sm)
                     : first_tile<MixIn>(b.layer(), recurrent, sm);
    };
#else
    const int all = head ? Head::tiles(false) : mlp ? MlpIn::tiles(recurrent) : MixIn::tiles(recurrent);
    const auto first_here = [&](int sm) { return first_of(all, sm); };
#endif
    const int first = first_here(b.sm), tiles = first_here(b.sm + 1) - first;
    const StageParts parts = head  ? parts_of<Head>(b.layer())
                             : mlp ? parts_of<MlpIn>(b.layer())
                                   : parts_of<MixIn>(b.layer());
    const u32* x = mlp ? b.node_tile(LAYER_PHASE, 0, MID_VALUES_AT) : b.node_tile(X_PHASE, 0, X_VALUES_AT);
    if (head) begin_head(b);
    if constexpr (HEAD_HOLDS_NODES) {
        if (head) {
            multiply_head(b, x, x + (X_SQUARES_AT - X_VALUES_AT));
            return;
        }
    }
    if (gather) ask_for_conv_weights(b, b.delta_index(), b.vectors(0));
    const auto where = [&](int tile, int quarter) {
        const int row = (first + tile) * WIDE + quarter * 4;
        return mlp ? H_VALUES_AT + Inner::value(0, (first + tile) * 8 + quarter * 4)
                   : (recurrent ? DELTA_IN_AT : ATTENTION_IN_AT) + row;
    };
    const auto finish = [&](bool live, int tile, int token, int quarter, int place, float4 v, const float* kept) {
        const int row = (first + tile) * WIDE + quarter * 4;
        if (!HEAD_HOLDS_NODES && b.is_head()) {
            rank_logits(b, live, row, token, tile % TILES_AT_ONCE * 4 + quarter, v);
        } else if (b.is_mlp()) {
            publish_inner(b, live, tile == tiles - 1, token, quarter, place, v);
        } else if (live) {
            publish_mixer_input(b, row, token, place, v, kept);
        }
    };
    const WideRows rows = {parts, first, tiles, x, x + (X_SQUARES_AT - X_VALUES_AT)};
    if constexpr (NODES == 1)
        multiply_normed_one(b, rows, where, finish);
    else
        multiply_normed_tree(b, rows, gather, where, finish);
}
