// What a draft's program gives out: the logits of rows from `first_node` on, and the rows that the head was given.
#pragma once
#include "draft/products.cuh"

// When the head's sums are there.
__device__ __forceinline__ void give_out(Block& b, int first_node) {
    constexpr int AT_ONCE = 4;  // nodes that are asked for
    const Stage stage = b.p.stages[HEAD];
    const Projection sums(b.p.head_sums, b.p.tiles + stage.tiles_at, stage.tile_rows * ROWS, tag_of(HEAD));
    const int first = first_of(stage.tile_rows, b.sm),
              quads = (first_of(stage.tile_rows, b.sm + 1) - first) * (ROWS / 4);
    static_assert(VOCAB % 4 == 0, "four logits at a time");
#pragma unroll 1
    for (int i = b.r.want_logits ? threadIdx.x : quads; i < quads; i += CONSUMERS) {
        const int row = first * ROWS + i * 4;
        if (row >= VOCAB) continue;
        const Projection::Place place = sums.place(row);
#pragma unroll 1
        for (int node = first_node; node < b.nodes; node += AT_ONCE) {
            Projection::Asked asked[AT_ONCE];
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++) sums.ask(asked[n], place, min(node + n, b.nodes - 1));
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++)
                if (node + n < b.nodes)
                    *(float4*)(b.p.out_logits + (size_t)(node + n) * VOCAB + row) =
                        sums.sum(asked[n], place, node + n);
        }
    }
    if (b.r.want_hidden) {
#pragma unroll 1
        for (Spans<HIDDEN> own(b); own.more(); own.next()) {
            const float4 x = *(const float4*)&b.s.residual[own.slot][own.in_span()],
                         w = __ldg((const float4*)(b.vectors + own.k()));
            const float by = b.s.inverse[0][own.node()];
            *(float4*)(b.p.out_hidden + (size_t)own.node() * HIDDEN + own.k()) = {x.x * by * w.x, x.y * by * w.y,
                                                                                  x.z * by * w.z, x.w * by * w.w};
        }
    }
}
