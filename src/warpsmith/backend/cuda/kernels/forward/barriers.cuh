// Signs that warps of an SM give each other with mbarriers.
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

// Barriers that warps give each other signs with. One turn a unit of a projection back to the residual stream (see residual.cuh): an
// octet's partial sums are there; all of them have been read. One turn a DeltaNet block of a tree (see delta.cuh): an octet's rows are
// there; half of a state is kept; four nodes are done; all are published (see publish.cuh). One turn an activation of a tree (see
// lookout.cuh): an octet of it is there; all of it has been taken.
struct Signs {
    u32 sums, read, rows, kept, nodes, published, there, taken;

    __device__ explicit Signs(u32 barriers)
        : sums(barriers), read(sums + 8 * TREE_OCTETS), rows(read + 8), kept(rows + 8 * TREE_OCTETS), nodes(kept + 8 * NODES * WORKER_WARPS),
          published(nodes + 8 * DONE_GROUPS), there(published + 8), taken(there + 8 * TREE_OCTETS) {}

    // Each thread one, for a tree of `count` nodes.
    __device__ void init(int count) const {
        const int sign = threadIdx.x, row = sign - TREE_OCTETS - 1, done = row - TREE_OCTETS - NODES * WORKER_WARPS;
        if (sign >= SIGNS) return;
        const int nodes_here = min(4, count - done * 4);
        const int warps = sign < TREE_OCTETS    ? WARPS
                          : row < 0             ? (count + 7) / 8
                          : row < TREE_OCTETS   ? FETCHERS
                          : done < 0            ? 1
                          : done < DONE_GROUPS  ? WORKER_WARPS * max(1, nodes_here)
                          : done == DONE_GROUPS ? PUBLISHERS
                          : sign < SIGNS - 1    ? 1
                                                : WARPS;
        barrier_init(sums + 8 * sign, warps * LANES_ARRIVE);
    }
};
