// One dispatch for a whole forward pass, or for many decoded tokens: embedding to argmax, every layer.
//
// Grid: one block an SM, all resident (cooperative launch). 8 consumer warps compute; one warp feeds the ring; for
// trees on sm_90a one looks out for activations and two publish nodes. The stages and their order are the schedule's
// (schedule.py).
#include "forward/attention_merge.cuh"
#include "forward/delta.cuh"
#include "forward/embedding.cuh"
#include "forward/lookout.cuh"
#include "forward/project.cuh"
#include "forward/publish.cuh"
#include "forward/residual.cuh"
#include "forward/tree.cuh"
#include "sample/sample.cuh"

// Stage: the mixer of this layer. It reads its projections and publishes y.
__device__ __forceinline__ void mix(Block& b) {
    if (b.is_recurrent()) {
        delta_mix(b, b.delta_index(), b.vectors(0));
        return;
    }
    if constexpr (NODES > 1) {
        attention_rows(b, b.attention_index(), b.vectors(0));
        b.step_done();
    }
    attention_parts(b, b.attention_index(), b.vectors(0));
    b.step_done();
    attention_merge(b);
}

// Stage: the mixer's output joins the residual stream.
__device__ __forceinline__ void mix_out(Block& b) {
    const StageParts parts = parts_of<StageOf<MIX_OUT>>(b.layer());
    const bool scaled = b.is_recurrent();  // DeltaNet outputs come before their norm
    const u32* squares = scaled ? b.node_tile(DELTA_PHASE, 0, DELTA_SQUARES_AT) : nullptr;
    const u32* y = scaled ? squares + DeltaOutput::VALUES_AT : b.node_tile(ATTENTION_PHASE, 0, ATTENTION_VALUES_AT);
    const ToResidual mid = {LAYER_PHASE, MID_VALUES_AT, MID_SQUARES_AT, b.vectors(MLP_NORM), nullptr};
    if (VALUE_DIM == ATTENTION_DIM || scaled)
        project_to_residual<VALUE_DIM, true>(b, parts, y, squares, mid);
    else
        project_to_residual<ATTENTION_DIM, false>(b, parts, y, nullptr, mid);
    b.phases ^= b.is_recurrent() ? DELTA_PHASE : ATTENTION_PHASE;
}

// Stage: the MLP's output joins the residual stream, which is kept as a feature if asked.
__device__ __forceinline__ void mlp_out(Block& b) {
    float* feature = nullptr;
#pragma unroll 1
    for (int i = 0; i < b.r.features; i++)
        if (b.r.feature_layers[i] == b.layer()) feature = b.p.out_features + b.feature_at(i) * HIDDEN;
    b.phases ^= X_PHASE;
    const float* next_norm = b.p.vectors + vectors_at(b.layer() + 1) + MIX_NORM;
    const StageParts parts = parts_of<StageOf<MLP_OUT>>(b.layer());
    const ToResidual x = {X_PHASE, X_VALUES_AT, X_SQUARES_AT, next_norm, feature};
    project_to_residual<FFN, false>(b, parts, b.node_tile(LAYER_PHASE, 0, H_VALUES_AT), nullptr, x);
    b.phases ^= LAYER_PHASE;
}

static_assert(MIX_IN == 0 && MIX == 1 && MIX_OUT == 2 && MLP_IN == 3 && MLP_OUT == 4 && LAYER_SLOTS == 5,
              "these are the stages of a layer that forward_pass runs, in this order");

// Every layer and the head. Returns false where a debugging request stops it: stages count from the embedding on.
__device__ __forceinline__ bool forward_pass(Block& b) {
    const auto stop_after = [&](int slot) { return b.stage_done(1 + b.layer() * LAYER_SLOTS + slot); };
    b.mark();
    embed(b, b.p.vectors + MIX_NORM);
    if (b.stage_done(0)) return false;
#pragma unroll 1
    for (b.half = 0; b.half <= 2 * LAYERS; b.half++) {
        project_in(b);
        if (b.is_head()) break;
        if (stop_after(b.is_mlp() ? MLP_IN : MIX_IN)) return false;
        if (b.is_mlp()) {
            mlp_out(b);
        } else {
            mix(b);
            if (stop_after(MIX)) return false;
            mix_out(b);
        }
        if (stop_after(b.is_mlp() ? MLP_OUT : MIX_OUT)) return false;
    }
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
        if (SAMPLES && b.draw->inverse_temperature > 0) {
            b.begin_stage();
            draw_token(b, step);
        } else {
            choose_greedy(b);
        }
        b.phases ^= X_PHASE | BEST_PHASE;
        const int token = b.s.token[0];
        b.length++;
        if (b.sm == 0 && threadIdx.x == 0) {
            b.p.out_tokens[step] = token;
            __threadfence_system();
            *b.p.out_count = step + 1;
        }
        if (SAMPLES && threadIdx.x == 0 && b.draw->sampled) b.s.drawn[step] = token;
        bool stop = token == UNDECIDED;
#pragma unroll 1
        for (int i = 0; i < b.r.stops; i++) stop |= b.r.stop_ids[i] == token;
        if (stop) break;
    }
    if (threadIdx.x == 0) atomicExch(&b.s.stopped, 1);  // nobody waits for weights any more
    b.mark_time(1);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    forward(const __grid_constant__ Params params,
#if NODES == 1
            const __grid_constant__ Request request, const __grid_constant__ Draw how) {
    const Draw* draw = &how;
#else
            const __grid_constant__ Request request) {
    const Draw* draw = nullptr;
#endif
    extern __shared__ __align__(128) u8 memory[];
    Shared& shared = *(Shared*)(memory + SHARED_AT);
    Ring ring(shared_address(memory), shared_address(memory + RING_BARRIERS_AT));
    const Barriers barriers(shared_address(memory + WARP_BARRIERS_AT));
    if (threadIdx.x == 0) {
        ring.init();
        shared.stopped = 0;
    }
    const int nodes = NODES == 1 ? 1 : request.tree_nodes();
    barriers.init(nodes);
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
            if (other >= 32 && other < 64) Lookout(params, barriers, &shared.stopped, nodes).run();
            if (other >= 64) {
                Block block(params, request, draw, shared, (float*)(memory + SCRATCH_AT), ring, barriers);
                block.warp -= WARPS + 2;
                publish_outputs(block);
            }
        }
    } else {
        take_registers<240 - (OTHERS_REGISTERS - 24) / 2>();
        Block block(params, request, draw, shared, (float*)(memory + SCRATCH_AT), ring, barriers);
        consume(block);
    }
}
