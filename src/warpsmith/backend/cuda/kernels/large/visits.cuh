// A tree, once a launch: its nodes' depths, ancestors and paths, and the order in which a DeltaNet's states are walked.
#pragma once
#include "large/block.cuh"

// Into the depth, at every node the leaves first, after which its state is still at hand, then its branches, the
// smallest first. A state is kept while branches of its node are still to come, except for the last: each place that is
// taken halves what can be under a node at least, so few are needed, and they stay in the cache. A lane is a node.
__device__ __forceinline__ void prepare_walk(Block& b) {
    const int lane = b.lane, nodes = b.nodes;
    const bool live = lane < nodes;
    const int parent = live ? b.r.parents[lane] : -2, depth = live ? b.s.depth[lane] : 0;
    int size = 0;  // nodes under this one, and itself
    for (int node = 0; node < nodes; node++)
        size += live && b.s.depth[node] >= depth && b.s.ancestor[node][depth] == lane;
    const u32 leaves = __ballot_sync(~0u, live && size == 1);
    bool visited = lane == 0;
    int place = NOWHERE, places = 0, node = 0, last = 0;  // last: the node whose state is at hand
    if (lane == 0) b.s.visits[0] = {0, HERE, NOWHERE, false};
    for (int visit = 1; visit < nodes;) {
        const bool child = live && parent == node && !visited;
        if (!__ballot_sync(~0u, child)) {
            node = __shfl_sync(~0u, parent, node);
            continue;
        }
        const int next = (int)__reduce_min_sync(~0u, child ? (unsigned)(size << 8 | lane) : ~0u) & 255;
        const bool leaf = leaves >> next & 1;
        const int branches = __popc(__ballot_sync(~0u, child && size > 1));
        if (!leaf && branches > 1 && __shfl_sync(~0u, place, node) == NOWHERE) {  // its state is fetched again
            if (lane == node) place = places;
            if (lane == 0) b.s.visits[visit - 1].to = (signed char)places;
            places++;
        }
        const int from = last == node ? HERE : __shfl_sync(~0u, place, node);
        if (branches == 1 && !leaf && __shfl_sync(~0u, place, node) != NOWHERE) places--;
        if (lane == next) visited = true;
        if (lane == 0) b.s.visits[visit] = {(signed char)next, (signed char)from, NOWHERE, leaf};
        if (!leaf) last = node = next;
        visit++;
    }
}

__device__ __forceinline__ void prepare_tree(Block& b) {
    if (threadIdx.x < b.nodes) {
        const int node = threadIdx.x;
        b.s.token[node] = b.r.tokens[node];
        int depth = 0, at = node;
        while (b.r.parents[at] >= 0) at = b.r.parents[at], depth++;
        b.s.depth[node] = depth;
        at = node;
        for (int d = depth; d >= 0; d--, at = b.r.parents[at]) b.s.ancestor[node][d] = (signed char)at;
        at = node;
        for (int age = 0; age < 4; age++) {
            b.s.path[node][age] = (signed char)at;
            at = at >= 0 ? b.r.parents[at] : at - 1;
        }
    }
    b.sync();
    if (b.warp == 0) prepare_walk(b);
    if (threadIdx.x == 32) {
        int deepest = 0;
        for (int node = 0; node < b.nodes; node++) deepest = max(deepest, b.s.depth[node]);
        b.s.deepest = deepest;
    }
    b.sync();
}
