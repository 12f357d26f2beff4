// What a draft's program gives out: the logits of rows from `first_node` on, and the rows that the head was given.
#pragma once
#include "draft/steps.cuh"

__device__ __forceinline__ void give_out(Block& b, int first_node) {
    const Stage stage = b.p.stages[HEAD];
    const Sums<HIDDEN_GROUPS> sums(b, b.p.tiles + stage.tiles_at, stage);
    const int first = first_of(stage.tile_rows, b.sm),
              quads = (first_of(stage.tile_rows, b.sm + 1) - first) * (ROWS / 4);
    static_assert(VOCAB % 4 == 0, "four logits at a time");
#pragma unroll 1
    for (int i = b.r.want_logits ? threadIdx.x : quads; i < quads; i += CONSUMERS) {
        const int row = first * ROWS + i * 4;
        if (row < VOCAB)
            sums.each(first_node, b.nodes, row, [&](int node, float4 logits) {
                *(float4*)(b.p.out_logits + (size_t)node * VOCAB + row) = logits;
            });
    }
    if (b.r.want_hidden) {
        const int own = first_of(PIECES, b.sm) * 8, rows = first_of(PIECES, b.sm + 1) * 8 - own;
#pragma unroll 1
        for (int i = threadIdx.x; i < b.nodes * rows; i += CONSUMERS) {
            const int node = i / rows, row = i % rows;
            b.p.out_hidden[(size_t)node * HIDDEN + own + row] =
                b.s.residual[node][row] * b.s.inverse[0][node] * __ldg(b.vectors + own + row);
        }
    }
}
