// Two warps that publish a tree's nodes as soon as a DeltaNet block is done with them, while the others are still at
// the rest: most have arrived when the next stage asks for them.
#pragma once
#include "forward/delta.cuh"

// All DeltaNet layers; ends early when the consumers have stopped.
__device__ __forceinline__ void publish_outputs(Block& b) {
    if (b.warp >= publishers_of(b.nodes)) return;
    const int first = first_of(BLOCKS, b.sm), end = first_of(BLOCKS, b.sm + 1);
    const float *vectors = b.p.vectors, *rows = b.scratch + MIX_AT;
    int index = 0;
#pragma unroll 1
    for (int layer = 0; layer < LAYERS; layer++) {
        if (!is_recurrent(layer)) {
            vectors += ATTENTION_VECTORS;
            continue;
        }
#pragma unroll 1
        for (int block = first; block < end; block++, b.phases ^= BLOCK_PHASE) {
            const float2 weight = gated_norm(block, vectors);
#pragma unroll 1
            for (int node = b.warp * 4; node < b.nodes; node += PUBLISHERS * 4) {
                Watchdog dog;
                while (!everywhere(barrier_done(b.barriers.nodes + 8 * (node / 4), b.phase(BLOCK_PHASE)))) {
                    if (has_stopped(&b.s.stopped)) return;
                    rest<100>();  // a warp that spins would slow the others down
                    dog.check();
                }
                publish_nodes(b, index, block, rows, node, weight);
            }
            arrive_for_warp(b.barriers.published);
        }
        b.phases ^= DELTA_PHASE;
        vectors += DELTA_VECTORS;
        index++;
    }
}
