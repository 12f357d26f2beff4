// A whole forward pass, or many decoded tokens, in one dispatch: for models whose activations, not whose weights, are
// held.
//
// Grid: one block an SM, all resident (cooperative launch): 8 warps that compute, one that fills the ring, two that add
// up. Steps: embed; per layer: in (projections), mix (DeltaNet; attention: rows, parts, merge), out (projection),
// residual, mlp_in, activate, mlp_out, residual; at last head, rank. An SM begins a step when what it needs has come.
#include "large/attention.cuh"
#include "large/delta.cuh"

__device__ __forceinline__ void prepare_tree(Block& b) {
    if (threadIdx.x < NODES) b.s.keeps[threadIdx.x] = 0;
    b.sync();
    if (threadIdx.x < b.nodes) {
        const int node = threadIdx.x, parent = b.r.parents[node];
        b.s.token[node] = b.r.tokens[node];
        b.s.parent[node] = (short)parent;
        if (parent >= 0 && parent != node - 1) b.s.keeps[parent] = 1;
        int depth = 0, at = node;
        while (b.r.parents[at] >= 0) at = b.r.parents[at], depth++;
        b.s.depth[node] = depth;
        at = node;
        for (int d = depth; d >= 0; d--, at = b.r.parents[at]) b.s.ancestor[node][d] = (signed char)at;
        at = node;
        for (int age = 0; age < 4; age++) {
            b.s.path[node][age] = at;
            at = at >= 0 ? b.r.parents[at] : at - 1;
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

enum Kind { IN, OUT, MLP_IN, MLP_OUT };  // of a layer's stages

// The sums of a stage added to the residual stream.
template <int GROUPS>
__device__ __forceinline__ void add_to_residual(Block& b, const float* norm, float* feature, int next) {
    const Sums<GROUPS> sums(b, RESIDUAL_ROWS);
    update_residual(b, norm, feature, next,
                    [&](float4 x, int node, int k) { return Sums<GROUPS>::add(x, sums.at(node, k)); });
}

// What becomes of a stage's sums, but for attention and the head; before the first stage, the embedding. Returns the
// steps done so far.
__device__ __noinline__ u32 work(const Params& p, const Request& r, u8* memory, int stage, bool recurrent, int deltas,
                                 u32 token, int length, const float* vectors, u32 steps_done) {
    Block b(p, r, memory);
    b.deltas = deltas, b.token = token, b.length = length, b.vectors = vectors, b.steps_done = steps_done;
    const int kind = stage & 3, layer = stage >> 2;
    if (stage < 0) {
        embed(b);
    } else if (kind == IN) {
        delta_mix(b);
    } else if (kind == OUT) {
        if (groups_of(VALUE_DIM) == groups_of(ATTENTION_DIM) || recurrent)
            add_to_residual<groups_of(VALUE_DIM)>(b, vectors + MLP_NORM, nullptr, stage + 1);
        else
            add_to_residual<groups_of(ATTENTION_DIM)>(b, vectors + MLP_NORM, nullptr, stage + 1);
    } else if (kind == MLP_IN) {
        activate(b, layer);
    } else {
        float* feature = nullptr;
#pragma unroll 1
        for (int f = 0; f < r.features; f++)
            if (r.feature_layers[f] == layer) feature = p.out_features + (size_t)f * r.nodes * HIDDEN;
        const int own = recurrent ? DELTA_VECTORS : ATTENTION_VECTORS;  // the next norm is the next layer's
        add_to_residual<INNER_GROUPS>(b, vectors + own + MIX_NORM, feature, stage + 1);
    }
    return b.steps_done;
}

// The choice of a token, when the head's sums are there. Returns the steps done so far.
__device__ __noinline__ u32 choose_next(const Params& p, const Request& r, u8* memory, u32 token, int length,
                                        const float* vectors, u32 steps_done, const Draw* draw) {
    Block b(p, r, memory);
    b.draw = draw, b.token = token, b.length = length, b.vectors = vectors, b.steps_done = steps_done;
    b.wait_for_all();
    rank_logits(b);
    b.step_done();
    b.wait_for_all();
    if (SAMPLES && draw->inverse_temperature > 0)
        draw_token(b, token);
    else
        choose_tokens(b);
    return b.steps_done;
}

// A stage's activations and its table. This and `work` are functions of their own: the compiler keeps the addresses of
// the products' operands in registers of the whole warp only where nothing around could have let a lane go ahead.
__device__ __noinline__ void prepare(const Params& p, const Request& r, u8* memory, int stage, Source from, u32 tag,
                                     int mixed) {
    Block b(p, r, memory);
    load_table(b, stage, tag, mixed);
    prepare_operands(b, run_of(p, stage), from, tag & 1);
}

// Every layer and the head. All stages share one copy of the products' code: what is executed again and again must stay
// in the instruction cache.
__device__ __forceinline__ void forward_pass(Block& b) {
    b.vectors = b.p.vectors, b.deltas = 0;
    work(b.p, b.r, b.scratch, -1, false, 0, b.token, b.length, b.vectors, b.steps_done);
    b.mark();
#pragma unroll 1
    for (int i = 0; i <= 4 * LAYERS; i++) {
        const int kind = i & 3, layer = i >> 2;
        const bool recurrent = i < 4 * LAYERS && b.p.recurrent[layer];
        const int mixed = mixed_copy(b, layer, recurrent);
        const Copy source = kind == MLP_OUT ? h_copy(b, layer)
                            : kind != OUT   ? x_copy(b, i)
                            : recurrent     ? Copy(b.p, DELTA_AT, DELTA_WORDS, mixed)
                                            : Copy(b.p, ATTENTION_AT, ATTENTION_WORDS, mixed);
        const u32* squares = kind == OUT && recurrent ? Copy(b.p, Y_SQUARES_AT, Y_SQUARES, mixed).words : nullptr;
        b.sync();  // the last step's table and scratch have been used
        prepare(b.p, b.r, b.scratch, i, {source.words, squares}, tag_of(b.token, i), mixed);
        b.mark();
        multiply(b, run_of(b.p, i));
        b.mark();
        b.sync();  // operands have been used, the table is there
        if (i == 4 * LAYERS)
            b.steps_done = choose_next(b.p, b.r, b.scratch, b.token, b.length, b.vectors, b.steps_done, b.draw);
        else if (kind == IN && !recurrent)
            b.steps_done = attention_mix(b.p, b.r, b.scratch, layer, b.deltas, b.length, b.vectors, b.steps_done);
        else
            b.steps_done =
                work(b.p, b.r, b.scratch, i, recurrent, b.deltas, b.token, b.length, b.vectors, b.steps_done);
        if (kind == MLP_OUT) {
            b.vectors += recurrent ? DELTA_VECTORS : ATTENTION_VECTORS;
            b.deltas += recurrent;
        }
        b.mark();
    }
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
        forward_pass(b);
        if (!b.decoding()) {
            if (b.sm == 0 && threadIdx.x < b.nodes) b.p.out_tokens[threadIdx.x] = b.s.token[threadIdx.x];
        } else {
            const int token = b.s.token[0];
            b.length++, b.token++;
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
    u32 count = 0;
#pragma unroll 1
    for (u32 token = 0; token < (u32)max(1, b.r.steps); token++) {
#pragma unroll 1
        for (int i = 0; i <= 4 * LAYERS; i++) {
            const u32 tag = tag_of(token, i);
            const bool head = i == 4 * LAYERS;
            reduce(b, which, run_of(b.p, i), count, sums_of(b.p, tag, head), tag,
                   (i & 1) == 0 ? squares_copy(b.p, token, i).words : nullptr);
            if (head) sums_done(b);
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
