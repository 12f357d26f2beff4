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

// A node of the tree, in the registers of its lane, and its likeliest child that is not in it.
struct Node {
    double score;
    u64 ranks;
    int level, next;  // how deep it is, and its child's rank
    u64 key;          // the child's score, in an order of whole numbers; 0: there is no child
};

// Larger for larger numbers, never 0.
__device__ __forceinline__ u64 ordered(double score) {
    const u64 bits = (u64)__double_as_longlong(score);
    return bits >> 63 ? ~bits : bits | 1ull << 63;
}

// Whether this lane has the largest of those that are still in.
__device__ __forceinline__ bool has_largest(bool in, u32 value) {
    const u32 most = __reduce_max_sync(~0u, in ? value : 0u);  // by all lanes
    return in && value == most;
}
__device__ __forceinline__ bool largest(bool in, u64 value) {
    in = has_largest(in, (u32)(value >> 32));
    return has_largest(in, (u32)value);
}

extern "C" __global__ void __launch_bounds__(32) tree(const __grid_constant__ Grow g) {
    __shared__ double belief[DEEPEST][WIDEST];
    __shared__ int id[DEEPEST][WIDEST];
    const int lane = threadIdx.x;
    const u64 began = nanoseconds();
    const double never = (double)MINUS_INFINITY;
    for (int i = lane; i < g.depth * g.width; i += 32) {
        const int d = i / g.width, r = i % g.width;
        const u32* row = g.tops + d * (2 * g.width + 1);
        id[d][r] = (int)row[r];
        belief[d][r] = (double)__uint_as_float(row[g.width + r]) - (double)__uint_as_float(row[2 * g.width]);
    }
    __syncwarp();

    Node own[2] = {};  // nodes `lane` and `lane` + 32
    int token[2] = {g.root, 0}, parent[2] = {-1, 0};
    const auto look = [&](Node& n) {
        const bool there = n.level < g.depth && n.next < g.width && belief[n.level][n.next] > never;
        n.key = there ? ordered(n.score + belief[n.level][n.next]) : 0;
    };
    const auto ranks_of = [&](const Node& n) {
        return n.ranks | (u64)n.next << RANK_BITS * (DEEPEST - 1 - n.level);
    };
    if (lane == 0) look(own[0]);
    int count = 1;
    while (count < g.nodes) {
        const bool second = own[1].key > own[0].key ||
                            (own[1].key == own[0].key && own[1].key && ranks_of(own[1]) < ranks_of(own[0]));
        const Node best = second ? own[1] : own[0];
        const bool in = largest(best.key > 0, best.key);
        u32 who = __ballot_sync(~0u, in);
        if (who & (who - 1)) who = __ballot_sync(~0u, largest(in, ~ranks_of(best)));
        if (!who) break;
        const int winner = __ffs(who) - 1, d = __shfl_sync(~0u, best.level, winner);
        const int r = __shfl_sync(~0u, best.next, winner);
        const double score = __shfl_sync(~0u, best.score, winner) + belief[d][r];
        if (score < g.least[count - 1]) break;
        const u64 ranks = __shfl_sync(~0u, ranks_of(best), winner);
        const int above = __shfl_sync(~0u, second ? lane + 32 : lane, winner);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int node = lane + 32 * i;
            if (node == above) own[i].next++, look(own[i]);
            if (node == count) {
                own[i] = {score, ranks, d + 1, 0, 0}, token[i] = id[d][r], parent[i] = above;
                look(own[i]);
            }
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
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int node = lane + 32 * i;
        if (node >= count) break;
        g.tree->tokens[node] = g.report->tree_tokens[node] = token[i];
        g.tree->parents[node] = g.report->tree_parents[node] = parent[i];
        g.report->scores[node] = own[i].score;
    }
    __syncwarp();
    if (lane == 0) g.report->grew = nanoseconds();
}
