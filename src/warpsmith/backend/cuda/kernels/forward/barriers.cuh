// What warps of an SM wait for each other with: mbarriers.
#pragma once
#include "forward/ring.cuh"

// A warp's arrival: what it wrote before is there for who waits.
__device__ __forceinline__ void arrive_for_warp(u32 barrier) {
    __syncwarp();
#ifdef EVERY_LANE_ARRIVES
    barrier_arrive(barrier);
#else
    if ((threadIdx.x & 31) == 0) barrier_arrive(barrier);
#endif
}

// The consumers have stopped: all lanes of a warp learn it, or none.
__device__ __forceinline__ bool has_stopped(const int* stopped) { return !everywhere(!*(const volatile int*)stopped); }

// A phase for each row tile of a projection back to the residual stream (see residual.cuh):
//   sums       a node tile's partial sums are there
//   read       all of them have been read
// A phase for each DeltaNet block of a tree (see delta.cuh, publish.cuh):
//   rows       a node tile's rows are there
//   kept       half of a state is kept
//   nodes      four nodes are done
//   published  all are published
// A phase for each activation of a tree (see lookout.cuh):
//   there      a node tile of it is there
//   taken      all of it has been taken
struct Barriers {
    u32 sums, read, rows, kept, nodes, published, there, taken;

    __device__ explicit Barriers(u32 barriers)
        : sums(barriers), read(sums + 8 * NODE_TILES), rows(read + 8), kept(rows + 8 * NODE_TILES),
          nodes(kept + 8 * NODES * WORKER_WARPS), published(nodes + 8 * DONE_GROUPS), there(published + 8),
          taken(there + 8 * NODE_TILES) {}

    // Each thread one, for a tree of `count` nodes.
    __device__ void init(int count) const {
        const int barrier = threadIdx.x, row = barrier - NODE_TILES - 1, done = row - NODE_TILES - NODES * WORKER_WARPS;
        if (barrier >= WARP_BARRIERS) return;
        const int nodes_here = min(4, count - done * 4);
        const int warps = barrier < NODE_TILES          ? WARPS
                          : row < 0                     ? (count + 7) / 8
                          : row < NODE_TILES            ? FETCHERS
                          : done < 0                    ? 1
                          : done < DONE_GROUPS          ? WORKER_WARPS * max(1, nodes_here)
                          : done == DONE_GROUPS         ? publishers_of(count)
                          : barrier < WARP_BARRIERS - 1 ? 1
                                                        : WARPS;
        barrier_init(sums + 8 * barrier, warps * LANES_ARRIVE);
    }
};
