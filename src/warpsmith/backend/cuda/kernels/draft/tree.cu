// The best tree of n nodes from what a draft believes about each of the next positions: draft/ddtree.py, to the bit.
//
// Of every node in the tree, its likeliest child that is not in it is a candidate, so there are as many as nodes: two a
// lane. The best candidate goes in, of equals the one of smaller ranks, until there are enough or none is worth it. One
// warp.
#include "common/made_tree.cuh"
#include "draft/report.cuh"

constexpr int DEEPEST = 15, WIDEST = 16, RANK_BITS = 4;  // a path's ranks are one number

struct Grow {
    const u32* tops;  // [depth][2 * width + 1] ids, logits, log-sum-exp, as top.cu leaves them
    MadeTree* tree;   // its first `verified` nodes
    Report* report;
    int root, depth, width;
    int nodes, verified;       // to grow and to verify at most, the root among them
    double least[MOST_NODES];  // by the nodes before it: the log-probability that a path must have
};

struct Candidate {
    double score;
    u64 ranks;
    int parent;

    __device__ bool better(const Candidate& o) const { return score > o.score || (score == o.score && ranks < o.ranks); }
};

extern "C" __global__ void __launch_bounds__(32) tree(const __grid_constant__ Grow g) {
    __shared__ double belief[DEEPEST][WIDEST], score[MOST_NODES];
    __shared__ u64 ranks[MOST_NODES];
    __shared__ int id[DEEPEST][WIDEST], token[MOST_NODES], parent[MOST_NODES], level[MOST_NODES], next[MOST_NODES];
    const int lane = threadIdx.x;
    const u64 began = nanoseconds();
    for (int i = lane; i < g.depth * g.width; i += 32) {
        const int d = i / g.width, r = i % g.width;
        const u32* row = g.tops + d * (2 * g.width + 1);
        id[d][r] = (int)row[r];
        belief[d][r] = (double)__uint_as_float(row[g.width + r]) - (double)__uint_as_float(row[2 * g.width]);
    }
    if (lane == 0) token[0] = g.root, parent[0] = -1, score[0] = 0, ranks[0] = 0, level[0] = 0, next[0] = 0;
    __syncwarp();

    const double never = (double)MINUS_INFINITY;
    int count = 1;
    while (count < g.nodes) {
        Candidate best = {never, ~0ull, -1};
        for (int node = lane; node < count; node += 32) {
            const int d = level[node], r = next[node];
            if (d >= g.depth || r >= g.width || !(belief[d][r] > never)) continue;
            const Candidate c = {score[node] + belief[d][r],
                                 ranks[node] | (u64)r << RANK_BITS * (DEEPEST - 1 - d), node};
            if (c.better(best)) best = c;
        }
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const Candidate other = {__shfl_xor_sync(~0u, best.score, step), __shfl_xor_sync(~0u, best.ranks, step),
                                     __shfl_xor_sync(~0u, best.parent, step)};
            if (other.better(best)) best = other;
        }
        if (best.parent < 0 || best.score < g.least[count - 1]) break;
        if (lane == 0) {
            const int above = best.parent, d = level[above], r = next[above]++;
            token[count] = id[d][r], parent[count] = above, score[count] = best.score, ranks[count] = best.ranks;
            level[count] = d + 1, next[count] = 0;
        }
        count++;
        __syncwarp();
    }

    const int verified = count < g.verified ? count : g.verified;
    if (lane == 0) {
        g.tree->nodes = g.report->verified = verified;
        g.report->grown = count;
        g.report->began = began;
    }
    for (int node = lane; node < count; node += 32) {
        g.tree->tokens[node] = g.report->tree_tokens[node] = token[node];
        g.tree->parents[node] = g.report->tree_parents[node] = parent[node];
        g.report->scores[node] = score[node];
    }
    __syncwarp();
    if (lane == 0) g.report->grew = nanoseconds();
}
