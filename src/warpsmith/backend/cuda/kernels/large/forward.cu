// A whole forward pass, or many decoded tokens, in one dispatch: for models whose activations, not whose weights, are
// held.
//
// Grid: one block an SM, all resident (cooperative launch): 8 warps that compute, one that fills the ring, two that add
// up. Steps, each ended by all SMs: embed; per layer: in (projections), mix (DeltaNet; attention: rows, parts, merge),
// out (projection), residual, mlp_in, activate, mlp_out, residual; at last head, rank.
#include "large/attention.cuh"
#include "large/delta.cuh"

__device__ __forceinline__ void prepare_tree(Block& b) {
    if (threadIdx.x < NODES) b.s.keeps[threadIdx.x] = 0;
    b.sync();
    if (threadIdx.x < b.nodes) {
        const int node = threadIdx.x, parent = b.r.parent(node);
        b.s.token[node] = b.r.token(node);
        b.s.parent[node] = (short)parent;
        if (parent >= 0 && parent != node - 1) b.s.keeps[parent] = 1;
    }
    b.sync();
    if (threadIdx.x < b.nodes) {
        const int node = threadIdx.x;
        int depth = 0, at = node;
        while (b.s.parent[at] >= 0) at = b.s.parent[at], depth++;
        b.s.depth[node] = depth;
        at = node;
        for (int d = depth; d >= 0; d--, at = b.s.parent[at]) b.s.ancestor[node][d] = (signed char)at;
        at = node;
        for (int age = 0; age < 4; age++) {
            b.s.path[node][age] = at;
            at = at >= 0 ? b.s.parent[at] : at - 1;
        }
    }
    b.sync();
    if (threadIdx.x == 0) {
        int deepest = 0;
        for (int node = 0; node < b.nodes; node++) deepest = max(deepest, b.s.depth[node]);
        b.s.deepest = deepest;
    }
    b.sync();
}

// The sums of a stage added to the residual stream.
template <int GROUPS>
__device__ __forceinline__ void add_to_residual(Block& b, const float* norm, float* feature) {
    const Sums<GROUPS> sums(b, RESIDUAL_ROWS);
    update_residual(b, norm, feature,
                    [&](float4 x, int node, int k) { return Sums<GROUPS>::add(x, sums.at(node, k)); });
}

// Every layer, the head, and the choice of a token, the launch's `token`-th. All stages share one copy of the products'
// code: what is executed again and again must stay in the instruction cache.
__device__ __forceinline__ void forward_pass(Block& b, int token) {
    enum { IN, OUT, MLP_IN, MLP_OUT };
    b.vectors = b.p.vectors, b.deltas = 0;
    embed(b);
    b.step_done();
    b.mark();
#pragma unroll 1
    for (int i = 0; i <= 4 * LAYERS; i++) {
        const int kind = i & 3, layer = i >> 2;
        const bool head = i == 4 * LAYERS, recurrent = !head && uniform(b.p.recurrent[layer]);
        const Run run = run_of(b.p, i);
        const Source from = kind == OUT       ? Source{b.p.y, false, recurrent}
                            : kind == MLP_OUT ? Source{b.p.h, false, false}
                                              : Source{b.p.x, true, false};
        b.wait_for_all();
        b.mark();
        prepare_operands(b, run, from);
        b.mark();
        multiply(b, run);
        b.mark();
        if (head) break;
        load_table(b, i);
        b.wait_for_all();
        b.mark();
        if (kind == IN) {
            if (recurrent)
                delta_mix(b);
            else
                b.steps_done = attention_mix(b.p, b.r, b.scratch, layer, b.deltas, b.length, b.vectors, b.steps_done);
        } else if (kind == OUT) {
            if (groups_of(VALUE_DIM) == groups_of(ATTENTION_DIM) || recurrent)
                add_to_residual<groups_of(VALUE_DIM)>(b, b.vectors + MLP_NORM, nullptr);
            else
                add_to_residual<groups_of(ATTENTION_DIM)>(b, b.vectors + MLP_NORM, nullptr);
        } else if (kind == MLP_IN) {
            activate(b);
        } else {
            b.vectors += recurrent ? DELTA_VECTORS : ATTENTION_VECTORS;
            b.deltas += recurrent;
            float* feature = nullptr;
#pragma unroll 1
            for (int f = 0; f < b.r.features; f++)
                if (b.r.feature_layers[f] == layer) feature = b.p.out_features + b.feature_at(f) * HIDDEN;
            add_to_residual<INNER_GROUPS>(b, b.vectors + MIX_NORM, feature);
        }
        b.mark();
        b.step_done();
        b.mark();
    }
    b.wait_for_all();
    rank_logits(b);
    b.step_done();
    b.wait_for_all();
    if (SAMPLES && b.draw->inverse_temperature > 0)
        draw_token(b, token);
    else
        choose_tokens(b);
    b.mark();
}

// All threads that compute or add up: whether there is another token.
__device__ __forceinline__ bool token_done(const Block& b) {
    sync_with_reducers<CONSUMERS + REDUCERS * 32>();
    const bool stopped = uniform(b.s.stopped);
    sync_with_reducers<CONSUMERS + REDUCERS * 32>();
    return stopped;
}

__device__ __forceinline__ void consume(Block& b) {
    if (SAMPLES && threadIdx.x == 0) b.s.reach = first_reach(b);
    prepare_tree(b);
#pragma unroll 1
    for (int step = 0; step < max(1, b.r.steps); step++) {
        forward_pass(b, step);
        if (!b.decoding()) {
            if (b.sm == 0 && threadIdx.x < b.nodes) b.p.out_tokens[threadIdx.x] = b.s.token[threadIdx.x];
        } else {
            const int token = b.s.token[0];
            b.length++;
            if (b.sm == 0 && threadIdx.x == 0) {
                b.p.out_tokens[step] = token;
                __threadfence_system();
                *b.p.out_count = step + 1;
            }
            if (threadIdx.x == 0) {
                if (SAMPLES && b.draw->sampled) b.s.drawn[step] = token;
                int stop = token == UNDECIDED;
                for (int i = 0; i < b.r.stops; i++) stop |= b.r.stop_ids[i] == token;
                if (stop) b.s.stopped = 1;
            }
        }
        if (token_done(b)) break;
    }
    if (threadIdx.x == 0) b.s.stopped = 1;  // nobody waits for weights any more
}

__device__ __forceinline__ void add_up(Block& b, int which) {
    u32 count = 0, phase = 0;
#pragma unroll 1
    for (int step = 0; step < max(1, b.r.steps); step++) {
#pragma unroll 1
        for (int i = 0; i <= 4 * LAYERS; i++, phase ^= 1) {
            const Run run = run_of(b.p, i);
            reduce(b, which, run, phase, count);
        }
        if (token_done(b)) break;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    forward(const __grid_constant__ Params params, const __grid_constant__ Request request,
            const __grid_constant__ Draw draw) {
    extern __shared__ __align__(128) u8 memory[];
    Block block(params, request, memory);
    if (SAMPLES) block.draw = &draw;
    if (threadIdx.x == 0) {
        Barriers(block.base).init();
        block.s.stopped = 0;
        show_barriers();
    }
    __syncthreads();
    constexpr int OTHERS_REGISTERS = 80, CONSUMER_REGISTERS = 208;
    if (block.warp < WARPS) {
        take_registers<CONSUMER_REGISTERS>();
        consume(block);
    } else {
        leave_registers<OTHERS_REGISTERS>();
        const int other = block.warp - WARPS;
        if (other == 0 && block.lane == 0) Producer(block.base, block.s).run(params, max(1, request.steps));
        if (other == 1 || other == 2) add_up(block, other - 1);
    }
}
