// What happens to the sums of a stage: the residual stream, the MLP's inner activation, the embedding, the choice of a
// token.
#pragma once
#include "large/embedding.cuh"
#include "large/products.cuh"
#include "large/sampling.cuh"

// --- the residual stream: every SM has some pieces of 8 rows
// ----------------------------------------------------------

// Publish what the next projection reads: rows times the next norm's weight, and this SM's sum of squares. `update`
// gives four rows' new values for a node, from the old ones; `next` is that projection's stage.
template <class Update>
__device__ __forceinline__ void update_residual(Block& b, int next, const float* norm, float* feature, Update update) {
    const int first = first_of(PIECES, b.sm), pieces = first_of(PIECES, b.sm + 1) - first, count = pieces * b.nodes * 2;
#pragma unroll 1
    for (int at = 0; at < count; at += CONSUMERS) {
        const int i = at + threadIdx.x, node = i / 2 / pieces, piece = i / 2 - node * pieces,
                  row = piece * 8 + (i & 1) * 4;
        const bool live = i < count;
        float square = 0.0f;
        if (live) {
            const int k = first * 8 + row;
            const float4 w = __ldg((const float4*)(norm + k));
            float* own = &b.s.residual[node][row];
            const float4 x = update(*(const float4*)own, node, k);
            *(float4*)own = x;
            if (feature) *(float4*)(feature + (size_t)b.place(node) * HIDDEN + k) = x;
            const uint2 out = {pack_bf16(x.x * w.x, x.y * w.y), pack_bf16(x.z * w.z, x.w * w.w)};
            store_activations(x_words(b, next), node, k, out);
            square = fmaf(x.x, x.x, fmaf(x.y, x.y, fmaf(x.z, x.z, x.w * x.w)));
        }
        square += __shfl_xor_sync(~0u, square, 1);
        if (live && (i & 1) == 0) b.s.squares[piece][node] = square;
    }
    b.sync();
    if (threadIdx.x < b.nodes) {
        float square = 0.0f;
#pragma unroll 1
        for (int piece = 0; piece < pieces; piece++) square += b.s.squares[piece][threadIdx.x];
        if (POLLED && (next & 3) == MLP_IN) barrier_wait(Barriers(b.base).cleared, b.layer_turn(next >> 2));
        store4(square_words(b, next, threadIdx.x) + b.sm, __float_as_uint(square));
    }
}

// --- the embedding ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ void embed(Block& b) {
    update_residual(b, 0, b.p.vectors + MIX_NORM, nullptr, [&](float4, int node, int k) -> float4 {
        const u8* row = b.p.embedding + b.s.token[node] * embedding_row_bytes();
        return {embedding_value(row, k), embedding_value(row, k + 1), embedding_value(row, k + 2),
                embedding_value(row, k + 3)};
    });
}

// --- the MLP's inner activation: silu(gate) * up. Rows come eight of the gate, then their eight of up
// ------------------

__device__ __forceinline__ void activate(Block& b, int stage) {
    auto sums = sums_of<HIDDEN_GROUPS>(b, stage, MLP_ROWS);
    const int first = first_of(FFN / 8, b.sm), pieces = first_of(FFN / 8, b.sm + 1) - first,
              count = pieces * b.nodes * 2;
#pragma unroll 2
    for (int i = threadIdx.x; i < count; i += CONSUMERS) {
        const int node = i / 2 / pieces, piece = first + i / 2 - node * pieces, in = (i & 1) * 4;
        typename decltype(sums)::Asked asked[2];
        const auto gates = sums.place(piece * 16 + in), ups = sums.place(piece * 16 + 8 + in);
        sums.ask(asked[0], gates, node), sums.ask(asked[1], ups, node);
        const float4 gate = sums.total(asked[0], gates, node), up = sums.total(asked[1], ups, node);
        const int k = piece * 8 + in;
        const uint2 out = {pack_bf16(silu(gate.x) * up.x, silu(gate.y) * up.y),
                           pack_bf16(silu(gate.z) * up.z, silu(gate.w) * up.w)};
        store_activations(operand_words(b, stage + 1), node, k, out);
    }
}

// --- the next token -------------------------------------------------------------------------------------------------

// The best of this SM's logits, for every node. A thread has four rows at a time, of all nodes.
__device__ __forceinline__ void rank_logits(Block& b) {
    const Stage stage = b.p.stages[4 * LAYERS];
    const Sums<HIDDEN_GROUPS> sums(b, b.p.tiles + stage.tiles_at, HEAD_TILES * ROWS);
    if (threadIdx.x < NODES) b.s.best[threadIdx.x] = 0;
    b.sync();
    const int first = first_of(stage.tile_rows, b.sm), tiles = first_of(stage.tile_rows, b.sm + 1) - first;
#pragma unroll 1
    for (int at = 0; at < tiles * (ROWS / 4); at += CONSUMERS) {
        const int i = at + threadIdx.x, row = first * ROWS + i * 4;
        const bool live = i < tiles * (ROWS / 4) && row < VOCAB;
#pragma unroll 4
        for (int node = 0; node < b.nodes; node++) {
            u64 best = 0;
            if (live) {
                const float4 v = sums.at(node, row);
                if (SAMPLES && b.draw->sampled) *(float4*)(candidates(b).own + i * 4) = v;
                const float logit[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if (row + j < VOCAB) {
                        best = best_of(best, ranked(logit[j], row + j));
                        if (b.r.want_logits) b.p.out_logits[(size_t)b.place(node) * VOCAB + row + j] = logit[j];
                    }
            }
#pragma unroll
            for (int step = 1; step < 32; step *= 2) best = best_of(best, __shfl_xor_sync(~0u, best, step));
            if (b.lane == 0) atomicMax(&b.s.best[node], best);
        }
    }
    b.sync();
    if (SAMPLES && b.draw->sampled) {  // one node
        if (threadIdx.x == 0) b.s.best[0] = 0;
        const u64 best = penalise_own(b);
        if (b.lane == 0) atomicMax(&b.s.best[0], best);
        b.sync();
    }
    if (threadIdx.x < b.nodes) b.p.best[threadIdx.x * SMS + b.sm] = b.s.best[threadIdx.x];
    if (b.r.want_hidden) {
        const float* norm = b.vectors;
        const int own = first_of(PIECES, b.sm), rows = (first_of(PIECES, b.sm + 1) - own) * 8;
#pragma unroll 1
        for (int i = threadIdx.x; i < b.nodes * rows; i += CONSUMERS) {
            const int node = i / rows, row = i % rows, k = own * 8 + row;
            const float x = b.s.residual[node][row] * b.s.inverse[0][node];
            b.p.out_hidden[(size_t)b.place(node) * HIDDEN + k] = x * __ldg(norm + k);
        }
    }
}

// The best of all SMs, known to every thread of the block afterwards (in s.token).
__device__ __forceinline__ void choose_tokens(Block& b) {
#pragma unroll 1
    for (int node = b.warp; node < b.nodes; node += WARPS) {
        u64 best = 0;
#pragma unroll 1
        for (int i = b.lane; i < SMS; i += 32) best = best_of(best, __ldcg(b.p.best + node * SMS + i));
#pragma unroll
        for (int step = 1; step < 32; step *= 2) best = best_of(best, __shfl_xor_sync(~0u, best, step));
        if (b.lane == 0) b.s.token[node] = token_of(best);
    }
    b.sync();
}
