// What is known of a tree before its first stage: depths, ancestors, and who works on which node in the mixers.
#pragma once
#include "forward/attention.cuh"

// Which worker takes which node of a DeltaNet layer, and when: a node goes on behind its parent if it is the first to,
// else to the worker that can start it soonest. Everybody's nodes are in the tree's order, so nobody waits in a circle.
__device__ __forceinline__ void deal_nodes(Block& b) {
    int last[WORKERS], free[WORKERS], kept = 0;
#pragma unroll
    for (int w = 0; w < WORKERS; w++) last[w] = b.s.first[w] = -1, free[w] = 0;
#pragma unroll 1
    for (int node = 0; node < b.nodes; node++) {
        const int parent = b.s.path[node][1];
        int worker = -1, start = 0, source = -1;
        if (parent < 0) {
            worker = 0;
        } else {
            const int ready = b.s.steps[parent].time;
#pragma unroll
            for (int w = 0; w < WORKERS; w++)
                if (last[w] == parent) worker = w, start = ready;
            if (worker < 0) {
                if (b.s.steps[parent].keep < 0) b.s.steps[parent].keep = kept++;
                source = b.s.steps[parent].keep;
                start = 1 << 30;
#pragma unroll
                for (int w = 0; w < WORKERS; w++)
                    if (max(free[w], ready) < start) worker = w, start = max(free[w], ready);
            }
        }
        b.s.steps[node] = {source, -1, -1, start + 1};
#pragma unroll
        for (int w = 0; w < WORKERS; w++)
            if (w == worker) {
                if (last[w] >= 0)
                    b.s.steps[last[w]].next = node;
                else
                    b.s.first[w] = node;
                last[w] = node, free[w] = start + 1;
            }
    }
}

__device__ __forceinline__ void prepare_tree(Block& b) {
    const auto parent_of = [&](int node) { return (int)b.s.path[node][1]; };
    if (threadIdx.x < b.nodes) {
        b.s.token[threadIdx.x] = NODES == 1 ? b.r.tokens[0] : b.r.token(threadIdx.x);
        b.s.path[threadIdx.x][1] = (signed char)(NODES == 1 ? -1 : b.r.parent(threadIdx.x));
    }
    b.sync();
    if (threadIdx.x < b.nodes) {
        const int node = threadIdx.x;
        int depth = 0, at = node;
        while (parent_of(at) >= 0) at = parent_of(at), depth++;
        b.s.depth[node] = depth;
        at = node;
        for (int d = depth; d >= 0; d--, at = parent_of(at)) b.s.ancestor[node][d] = (u8)at;
        at = node;
        for (int age = 0; age < 4; age++) {
            if (age != 1) b.s.path[node][age] = at;
            at = at >= 0 ? parent_of(at) : at - 1;
        }
    }
    b.sync();
    // What the mixers need, there after the first projection's barriers: by a warp that has nothing to embed, unless
    // the tree is large.
    if (NODES > 1 && threadIdx.x == CONSUMERS - 32) {
        deal_nodes(b);
        int deepest = 0;
        for (int node = 0; node < b.nodes; node++) deepest = max(deepest, b.s.depth[node]);
        b.s.deepest = deepest;
        deal_items(b);
    }
}
