// Two warps that publish a tree's nodes as soon as a DeltaNet block is done with them, while the others are still at the rest: most have
// arrived when the next stage asks for them.
#pragma once
#include "forward/delta.cuh"

// All DeltaNet layers; ends early when the consumers have stopped.
__device__ __forceinline__ void publish_outputs(Block& b) {
    const int first = first_unit(BLOCKS, b.sm), end = first_unit(BLOCKS, b.sm + 1);
    const float *vectors = b.p.vectors, *rows = b.scratch + MIX_AT;
    int index = 0;
#pragma unroll 1
    for (int layer = 0; layer < LAYERS; layer++) {
        if (!is_recurrent(layer)) {
            vectors += ATTENTION_VECTORS;
            continue;
        }
#pragma unroll 1
        for (int block = first; block < end; block++, b.turns ^= BLOCK_TURN) {
            const float2 weight = gated_norm(block, vectors);
#pragma unroll 1
            for (int node = b.warp * 4; node < b.nodes; node += PUBLISHERS * 4) {
                Watchdog dog;
                while (!everywhere(barrier_done(b.signs.nodes + 8 * (node / 4), b.turn(BLOCK_TURN)))) {
                    if (has_stopped(&b.s.stopped)) return;
                    rest<100>();  // a warp that spins would take the others' turns
                    dog.check();
                }
                publish_nodes(b, index, block, rows, node, weight);
            }
            arrive_for_warp(b.signs.published);
        }
        b.turns ^= DELTA_TURN;
        vectors += DELTA_VECTORS;
        index++;
    }
}
