// The sampler's way through a tree that was run just now: the nodes it chose at, and the token it chose at each.
//
// Greedy: what the pass chose for every node. Sampled: from the best logits of a node (top.cu) by the rules of
// decide.cuh; where these leave it open the walk ends, and the host decides that one token. One warp.
#include "common/commit.cuh"
#include "common/made_tree.cuh"
#include "draft/report.cuh"
#include "sample/decide.cuh"

constexpr int MAX_TOP = 256, MAX_STOPS = 16, UNDECIDED = -1;

struct Walk {
    const MadeTree* tree;
    const int* chosen;  // greedy: for every node
    const u32* tops;    // sampled: [nodes][2 * count + 1] ids, logits, log-sum-exp
    Path* path;
    Report* report;
    StepTimes* times;
    int count;   // of the best logits of a node
    int length;  // tokens committed before the tree
    u32 serial;
    int stops;
    int stop_ids[MAX_STOPS];
};

// The sum over the vocabulary is known in single precision only.
__device__ __forceinline__ double error_of(float logsumexp) { return 1e-4 + 1e-7 * fabs((double)logsumexp); }

// Every lane gets the token.
__device__ __forceinline__ int drawn(const Walk& w, const Draw& d, const u32* row, int position) {
    __shared__ double weight[MAX_TOP], heated[MAX_TOP];
    __shared__ int token;
    const int lane = threadIdx.x, n = w.count;
    const auto logit = [&](int i) { return __uint_as_float(row[n + i]); };
    const double best = logit(0);
    for (int i = lane; i < n; i += 32) {
        const double below = (double)logit(i) - best;
        weight[i] = exp(below), heated[i] = exp(below * d.inverse_temperature);
    }
    __syncwarp();
    if (lane == 0) {
        const float logsumexp = __uint_as_float(row[2 * n]);
        const double fraction = uniform_at(d, position), total = exp((double)logsumexp - best);
        const double error = d.top_k > 0 ? 0.0 : error_of(logsumexp);
        // without top-k, what min-p leaves must be among these
        const bool all = d.top_k > 0 || !uses_min_p(d) || (double)logit(n - 1) < best + d.log_min_p;
        int index = TOO_FEW;
        if (all && fabs(best) < -(double)MINUS_INFINITY) {
            // all cuts grow with the sum: where both ends of what it may be agree, so does what it is
            index = decide(d, n, logit, weight, heated, total * (1 - error), fraction);
            if (error > 0 && index != decide(d, n, logit, weight, heated, total * (1 + error), fraction))
                index = TOO_CLOSE;
        }
        token = index < 0 ? UNDECIDED : (int)row[index];
    }
    __syncwarp();
    const int got = token;
    __syncwarp();
    return got;
}

extern "C" __global__ void __launch_bounds__(32)
    walk(const __grid_constant__ Walk w, const __grid_constant__ Draw d) {
    const int lane = threadIdx.x, nodes = w.tree->nodes;
    const u64 ran = nanoseconds();
    int mine[2], above[2], chosen[2];  // of the lane's nodes: tokens, parents, choices
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int node = lane + 32 * i;
        const bool there = node < nodes;
        mine[i] = there ? w.tree->tokens[node] : -1, above[i] = there ? w.tree->parents[node] : -2;
        chosen[i] = there && !d.sampled ? w.chosen[node] : UNDECIDED;
    }
    int at = 0, count = 0, token;
    while (at >= 0) {
        token = d.sampled ? drawn(w, d, w.tops + (size_t)at * (2 * w.count + 1), w.length + count + 1)
                          : __shfl_sync(~0u, at < 32 ? chosen[0] : chosen[1], at % 32);
        if (lane == 0) {
            w.path->node[count] = w.report->path[count] = at;
            w.report->token[count] = token;
        }
        count++;
        bool ends = token == UNDECIDED;
        for (int i = 0; i < w.stops; i++) ends |= w.stop_ids[i] == token;
        int child = MOST_NODES;  // of children with the same token the first counts
#pragma unroll
        for (int i = 1; i >= 0; i--)
            if (above[i] == at && mine[i] == token) child = lane + 32 * i;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) child = min(child, __shfl_xor_sync(~0u, child, step));
        at = ends || child == MOST_NODES ? -1 : child;
    }
    if (lane == 0) {
        w.path->count = w.report->decided = count;
        w.path->last = token;
        const u64 committed = w.times->committed;  // 0: nothing was queued behind the walk before
        w.report->committing = committed ? committed - w.times->walked : 0;
        w.report->committed = committed;
        w.report->ran = ran, w.report->walked = w.times->walked = nanoseconds();
        w.times->committed = 0;
        __threadfence_system();
        *(volatile u32*)&w.report->serial = w.serial;
    }
}
