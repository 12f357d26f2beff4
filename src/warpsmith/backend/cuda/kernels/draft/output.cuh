// What a draft's program gives out: the logits of rows from `first_node` on, and the rows that the head was given.
#pragma once
#include "draft/steps.cuh"

__device__ __forceinline__ void give_out(Block& b, int first_node) {
    constexpr int AT_ONCE = 4;  // nodes
    const Stage stage = b.p.stages[HEAD];
    const Sums<HIDDEN_GROUPS> sums(b.p.sums, b.p.tiles + stage.tiles_at, stage.tile_rows * ROWS, b.tag);
    const int first = first_of(stage.tile_rows, b.sm),
              quads = (first_of(stage.tile_rows, b.sm + 1) - first) * (ROWS / 4);
    static_assert(VOCAB % 4 == 0, "four logits at a time");
#pragma unroll 1
    for (int i = b.r.want_logits ? threadIdx.x : quads; i < quads; i += CONSUMERS) {
        const int row = first * ROWS + i * 4;
        if (row >= VOCAB) continue;
        const auto place = sums.place(row);
#pragma unroll 1
        for (int node = first_node; node < b.nodes; node += AT_ONCE) {
            Sums<HIDDEN_GROUPS>::Asked asked[AT_ONCE];
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++) sums.ask(asked[n], place, min(node + n, b.nodes - 1));
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++)
                if (node + n < b.nodes)
                    *(float4*)(b.p.out_logits + (size_t)(node + n) * VOCAB + row) = sums.sum(asked[n], place, node + n);
        }
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
