// One dispatch for a whole forward pass, or for many decoded tokens: embedding to argmax, every layer.
//
// Grid: one block an SM, all resident (cooperative launch). 8 consumer warps compute; one warp feeds the ring; for trees on sm_90a one
// looks out for activations and two publish nodes.
// Stages and what they publish:
//   embed -> x;  per layer: in (norm, projections) -> in;  mix -> y (attention: in a tree rows, then parts, then merge);
//   out (projection, residual) -> mid;  mlp_in (norm, gate, up) -> h;  mlp_out (projection, residual) -> x;
//   head (norm, logits) -> best.
#include "forward/attention.cuh"
#include "forward/attention_merge.cuh"
#include "forward/convolve.cuh"
#include "forward/delta.cuh"
#include "forward/embedding.cuh"
#include "forward/lookout.cuh"
#include "forward/publish.cuh"
#include "forward/residual.cuh"
#include "sample/sample.cuh"

// Which worker takes which node of a DeltaNet layer, and when: a node goes on behind its parent if it is the first to, else
// to the worker that can start it soonest. Everybody's nodes are in the tree's order, so nobody waits in a circle.
__device__ __forceinline__ void deal_nodes(Block& b) {
    int last[WORKERS], free[WORKERS], kept = 0;
#pragma unroll
    for (int w = 0; w < WORKERS; w++) last[w] = b.s.first[w] = -1, free[w] = 0;
#pragma unroll 1
    for (int node = 0; node < b.nodes; node++) {
        const int parent = b.r.parents[node];
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
    if (threadIdx.x < b.nodes) {
        const int node = threadIdx.x;
        b.s.token[node] = b.r.tokens[node];
        int depth = 0, at = node;
        while (b.r.parents[at] >= 0) at = b.r.parents[at], depth++;
        b.s.depth[node] = depth;
        at = node;
        for (int d = depth; d >= 0; d--, at = b.r.parents[at]) b.s.ancestor[node][d] = (u8)at;
        at = node;
        for (int age = 0; age < 4; age++) {
            b.s.path[node][age] = at;
            at = at >= 0 ? b.r.parents[at] : at - 1;
        }
    }
    b.sync();
    // What the mixers need, there after the first projection's barriers: by a warp that has nothing to embed, unless the tree is large.
    if (NODES > 1 && threadIdx.x == CONSUMERS - 32) {
        deal_nodes(b);
        int deepest = 0;
        for (int node = 0; node < b.nodes; node++) deepest = max(deepest, b.s.depth[node]);
        b.s.deepest = deepest;
        deal_items(b);
    }
}

static_assert(MIX_IN == 0 && MIX == 1 && MIX_OUT == 2 && MLP_IN == 3 && MLP_OUT == 4 && LAYER_SLOTS == 5,
              "these are the stages of a layer that forward_pass runs, in this order");

// Every layer and the head. Returns false where a debugging request stops it.
// The three kinds of stages over normed x share one copy of the code: what is executed again and again must stay in the
// instruction cache.
__device__ __forceinline__ bool forward_pass(Block& b) {
    // The number of a stage, as `stop_after` counts: the embedding, then the slots of each layer.
#define STAGE_DONE(number)                        \
    b.mark();                                     \
    if (b.r.stop_after == (number)) return false; \
    b.begin_stage()
#define IN_LAYER(slot) (1 + b.layer() * LAYER_SLOTS + (slot))
    b.mark();
    embed(b, b.p.vectors + MIX_NORM);
    STAGE_DONE(0);
#pragma unroll 1
    for (b.half = 0; b.half <= 2 * LAYERS; b.half++) {
        const bool head = b.is_head(), mlp = b.is_mlp(), recurrent = b.is_recurrent(), gather = recurrent && !mlp;
        typedef StageOf<MIX_IN> MixIn;
        typedef StageOf<MLP_IN> MlpIn;
        typedef StageOf<HEAD> Head;
        const int all = head ? Head::tiles(false) : mlp ? MlpIn::tiles(recurrent) : MixIn::tiles(recurrent);
        const int first = first_unit(all, b.sm), units = first_unit(all, b.sm + 1) - first;
        const StageParts parts = head  ? parts_of<Head>(b.layer())
                                 : mlp ? parts_of<MlpIn>(b.layer())
                                       : parts_of<MixIn>(b.layer());
        const u32* x = mlp ? b.octet(LAYER_TURN, 0, MID_VALUES_AT) : b.octet(X_TURN, 0, X_VALUES_AT);
        if (head) begin_head(b);
        if (gather) ask_for_taps(b, b.delta_index(), b.vectors(0));
        const auto where = [&](int unit, int quarter) {
            const int row = (first + unit) * WIDE + quarter * 4;
            return mlp ? H_VALUES_AT + Inner::value(0, (first + unit) * 8 + quarter * 4) : (recurrent ? DELTA_IN_AT : ATTENTION_IN_AT) + row;
        };
        multiply_normed(b, parts, first, units, x, x + (X_SQUARES_AT - X_VALUES_AT), gather, where, [&](bool live, int unit, int token, int quarter, int place, float4 v, const float* kept) {
            if (b.is_head()) {
                rank_logits(b, live, (first + unit) * WIDE + quarter * 4, token, v);
            } else if (b.is_mlp()) {  // gate rows, then up rows
                float4 up;
                up.x = __shfl_xor_sync(~0u, v.x, 1), up.y = __shfl_xor_sync(~0u, v.y, 1);
                up.z = __shfl_xor_sync(~0u, v.z, 1), up.w = __shfl_xor_sync(~0u, v.w, 1);
                if (live && quarter < 2)
                    publish8(b.octet(LAYER_TURN, token, place + Inner::value(token, 0)), b.other(LAYER_TURN),
                             pack_bf16(silu(v.x) * up.x, silu(v.y) * up.y), pack_bf16(silu(v.z) * up.z, silu(v.w) * up.w));
                if (HELPED && unit == units - 1 && quarter == 0 && live && (token % 8 == 7 || token == b.nodes - 1))
                    publish4(b.square<Inner>(LAYER_TURN, token, H_SQUARES_AT, b.sm), b.other(LAYER_TURN), 0);
            } else if (live) {
                const int row = (first + unit) * WIDE + quarter * 4;
                if (b.is_recurrent()) {
                    const float4 made = after_projection(b, row, v, [&](int age) {
                        const int source = NODES == 1 ? -age : b.s.path[token][age];
                        return source < 0 ? past_input(b, row, -source) : *(const float4*)(kept + source * ROW_STRIDE);
                    });
                    publish16(b.words(DELTA_TURN, token, place), b.other(DELTA_TURN), made);
                    keep_input(b, b.delta_index(), token, row, v);
                } else {
                    publish16(b.words(ATTENTION_TURN, token, place), b.other(ATTENTION_TURN), v);
                }
            }
        });
        if (b.is_head()) break;
        STAGE_DONE(IN_LAYER(b.is_mlp() ? MLP_IN : MIX_IN));
        if (b.is_mlp()) {
            float* feature = nullptr;
#pragma unroll 1
            for (int i = 0; i < b.r.features; i++)
                if (b.r.feature_layers[i] == b.layer()) feature = b.p.out_features + (size_t)i * b.nodes * HIDDEN;
            b.turns ^= X_TURN;
            project_to_residual<FFN, false>(b, parts_of<StageOf<MLP_OUT>>(b.layer()), b.octet(LAYER_TURN, 0, H_VALUES_AT), nullptr,
                                            {X_TURN, X_VALUES_AT, X_SQUARES_AT, b.p.vectors + vectors_at(b.layer() + 1) + MIX_NORM, feature});
            b.turns ^= LAYER_TURN;
        } else {
            if (b.is_recurrent()) {
                delta_mix(b, b.delta_index(), b.vectors(0));
            } else {
                if constexpr (NODES > 1) {
                    attention_rows(b, b.attention_index(), b.vectors(0));
                    b.mark();
                    b.begin_stage();
                }
                attention_parts(b, b.attention_index(), b.vectors(0));
                b.mark();
                b.begin_stage();
                attention_merge(b);
            }
            STAGE_DONE(IN_LAYER(MIX));
            const bool scaled = b.is_recurrent();
            const u32* squares = scaled ? b.octet(DELTA_TURN, 0, DELTA_SQUARES_AT) : nullptr;
            const u32* y = scaled ? squares + DeltaOutput::VALUES_AT : b.octet(ATTENTION_TURN, 0, ATTENTION_VALUES_AT);
            const ToResidual mid = {LAYER_TURN, MID_VALUES_AT, MID_SQUARES_AT, b.vectors(MLP_NORM), nullptr};
            if (VALUE_DIM == ATTENTION_DIM || scaled)
                project_to_residual<VALUE_DIM, true>(b, parts_of<StageOf<MIX_OUT>>(b.layer()), y, squares, mid);
            else
                project_to_residual<ATTENTION_DIM, false>(b, parts_of<StageOf<MIX_OUT>>(b.layer()), y, nullptr, mid);
            b.turns ^= b.is_recurrent() ? DELTA_TURN : ATTENTION_TURN;
        }
        STAGE_DONE(IN_LAYER(b.is_mlp() ? MLP_OUT : MIX_OUT));
    }
#undef IN_LAYER
#undef STAGE_DONE
    end_head(b, b.p.vectors + vectors_at(LAYERS));
    b.mark();
    return true;
}

__device__ __forceinline__ void consume(Block& b) {
    b.mark_time(2);
    if (SAMPLES && threadIdx.x == 0) b.s.reach = first_reach(b);
    prepare_tree(b);
#pragma unroll 1
    for (int step = 0; step < max(1, b.r.steps); step++) {
        if (!forward_pass(b)) break;
        if (!b.decoding()) {
            if (b.sm == 0) {
                choose_greedy(b);
                if (threadIdx.x < b.nodes) b.p.out_tokens[threadIdx.x] = b.s.token[threadIdx.x];
            }
            break;
        }
        if (SAMPLES && b.draw->inverse_temperature > 0)
            draw_token(b, step);
        else
            choose_greedy(b);
        b.turns ^= X_TURN | BEST_TURN;
        const int token = b.s.token[0];
        b.length++;
        if (b.sm == 0 && threadIdx.x == 0) {
            b.p.out_tokens[step] = token;
            __threadfence_system();
            *b.p.out_count = step + 1;
        }
        if (SAMPLES && threadIdx.x == 0 && b.draw->sampled) b.s.drawn[step] = token;
        bool stop = SAMPLES && token == UNDECIDED;
#pragma unroll 1
        for (int i = 0; i < b.r.stops; i++) stop |= b.r.stop_ids[i] == token;
        if (stop) break;
    }
    if (threadIdx.x == 0) atomicExch(&b.s.stopped, 1);  // nobody waits for weights any more
    b.mark_time(1);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ Params params,
#if NODES == 1
                                                                 const __grid_constant__ Request request,
                                                                 const __grid_constant__ Draw how) {
    const Draw* draw = &how;
#else
                                                                 const __grid_constant__ Request request) {
    const Draw* draw = nullptr;
#endif
    extern __shared__ __align__(128) u8 memory[];
    Shared& shared = *(Shared*)(memory + SHARED_AT);
    Ring ring(shared_address(memory), shared_address(memory + BARRIERS_AT));
    const Signs signs(shared_address(memory + SIGNS_AT));
    if (threadIdx.x == 0) {
        ring.init();
        shared.stopped = 0;
    }
    signs.init(request.nodes);
    show_barriers();
    __syncthreads();
    constexpr int OTHERS_REGISTERS = HELPED ? 40 : 24;  // of a thread that does not consume
    if (threadIdx.x >= CONSUMERS) {
        leave_registers<OTHERS_REGISTERS>();
        const int other = threadIdx.x - CONSUMERS;
        if (other < COPY_LANES) {
            Producer producer(ring, &shared.stopped);
#pragma unroll 1
            for (int step = 0; step < max(1, request.steps); step++)
                if (!producer.token(params.stream + params.stream_start[blockIdx.x])) break;
            producer.drain();
        }
        if constexpr (HELPED) {
            if (other >= 32 && other < 64) Lookout(params, signs, &shared.stopped, request.nodes).run();
            if (other >= 64) {
                Block block(params, request, draw, shared, (float*)(memory + SCRATCH_AT), ring, signs);
                block.warp -= WARPS + 2;
                publish_outputs(block);
            }
        }
    } else {
        take_registers<240 - (OTHERS_REGISTERS - 24) / 2>();
        Block block(params, request, draw, shared, (float*)(memory + SCRATCH_AT), ring, signs);
        consume(block);
    }
}
