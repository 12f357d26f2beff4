// One dispatch for a whole forward pass, or for many decoded tokens: embedding to argmax, every layer.
//
// Grid: one block an SM, all resident (cooperative launch). 16 consumer warps compute; one warp feeds the ring.
// Stages and what they publish (a packet exchange each, numbered by `tag`):
//   embed -> x;  per layer: in (norm, projections) -> in;  mix -> y (attention: parts, then merge);
//   out (projection, residual) -> x_mid;  mlp_in (norm, gate, up) -> h;  mlp_out (projection, residual) -> x;
//   head (norm, logits) -> best.
#include "attention.cuh"
#include "delta.cuh"
#include "head.cuh"

__device__ __forceinline__ void prepare_tree(Block& b) {
    if (threadIdx.x < b.nodes) {
        const int node = threadIdx.x;
        b.s.token[node] = b.r.tokens[node];
        b.s.parent[node] = b.r.parents[node];
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
        b.s.branches[node] = 0;
#pragma unroll 1
        for (int child = node + 2; child < b.nodes; child++) b.s.branches[node] |= b.r.parents[child] == node;
    }
    b.sync();
}

// Every layer and the head. Returns false where a debugging request stops it.
__device__ __forceinline__ bool forward_pass(Block& b) {
    constexpr int CHUNKS = chunks_of(HIDDEN);
    int left = b.r.stop_after;
#define STAGE_DONE                 \
    b.mark();                      \
    if (left-- == 0) return false; \
    b.begin_stage()
    b.mark();
    embed(b);
    u32 x_tag = b.tag++;
    STAGE_DONE;
    const float* vectors = b.p.vectors;
    int delta_index = 0, attention_index = 0;
#pragma unroll 1
    for (int layer = 0; layer < LAYERS; layer++) {
        const bool recurrent = is_recurrent(layer);
        {
            const auto load = [&](Activations<CHUNKS>& a) { load_normed<CHUNKS>(b, a, b.p.x, x_tag, vectors + MIX_NORM); };
            const int all = recurrent ? DELTA_IN_UNITS : ATTENTION_IN_UNITS;
            const int first = first_unit(all, b.sm), units = first_unit(all, b.sm + 1) - first;
            constexpr int FEWEST = DELTA_IN_UNITS < ATTENTION_IN_UNITS ? DELTA_IN_UNITS : ATTENTION_IN_UNITS;
            multiply_resident<CHUNKS, FEWEST>(b, units, load, [&](bool live, int unit, int token, int quarter, float4 sum) {
                const float scale = inverse_rms(b, token);
                if (live && (b.lane & 3) == 0)
                    publish(b.p.in + (size_t)token * IN_PACKETS + (first + unit) * 2 + quarter,
                            {sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale}, b.tag);
            });
        }
        const u32 in_tag = b.tag++;
        STAGE_DONE;
        float* feature = nullptr;
#pragma unroll 1
        for (int i = 0; i < b.r.features; i++)
            if (b.r.feature_layers[i] == layer) feature = b.p.out_features + (size_t)i * b.nodes * HIDDEN;
        if (recurrent) {
            delta_mix(b, delta_index++, vectors, in_tag);
            const u32 y_tag = b.tag++;
            STAGE_DONE;
            project_to_residual<VALUE_DIM, true>(b, b.p.y, Y_PACKETS, y_tag, b.p.x_mid, nullptr);
        } else {
            attention_parts(b, attention_index++, vectors, in_tag);
            const u32 part_tag = b.tag++;
            b.mark();
            b.begin_stage();
            attention_merge(b, in_tag, part_tag);
            const u32 y_tag = b.tag++;
            STAGE_DONE;
            project_to_residual<ATTENTION_DIM, false>(b, b.p.y, Y_PACKETS, y_tag, b.p.x_mid, nullptr);
        }
        const u32 mid_tag = b.tag++;
        STAGE_DONE;
        {
            const auto load = [&](Activations<CHUNKS>& a) {
                load_normed<CHUNKS>(b, a, b.p.x_mid, mid_tag, vectors + MLP_NORM);
            };
            const int first = first_unit(MLP_IN_UNITS, b.sm), units = first_unit(MLP_IN_UNITS, b.sm + 1) - first;
            multiply_resident<CHUNKS, MLP_IN_UNITS>(b, units, load, [&](bool live, int unit, int token, int quarter, float4 sum) {
                const float scale = inverse_rms(b, token);
                float4 up;
                up.x = __shfl_xor_sync(~0u, sum.x, 4), up.y = __shfl_xor_sync(~0u, sum.y, 4);
                up.z = __shfl_xor_sync(~0u, sum.z, 4), up.w = __shfl_xor_sync(~0u, sum.w, 4);
                if (live && quarter == 0 && (b.lane & 3) == 0)
                    publish(b.p.h + (size_t)token * H_PACKETS + first + unit,
                            {silu(sum.x * scale) * up.x * scale, silu(sum.y * scale) * up.y * scale,
                             silu(sum.z * scale) * up.z * scale, silu(sum.w * scale) * up.w * scale}, b.tag);
            });
        }
        const u32 h_tag = b.tag++;
        STAGE_DONE;
        project_to_residual<FFN, false>(b, b.p.h, H_PACKETS, h_tag, b.p.x, feature);
        x_tag = b.tag++;
        vectors += recurrent ? DELTA_VECTORS : ATTENTION_VECTORS;
        STAGE_DONE;
    }
#undef STAGE_DONE
    lm_head(b, vectors, x_tag);
    b.mark();
    return true;
}

__device__ __forceinline__ void consume(Block& b) {
    prepare_tree(b);
#pragma unroll 1
    for (int step = 0; step < max(1, b.r.steps); step++) {
        if (!forward_pass(b)) break;
        const u32 best_tag = b.tag++;
        if (!b.decoding()) {
            if (b.sm == 0) {
                choose_greedy(b, best_tag);
                if (threadIdx.x < b.nodes) b.p.out_tokens[threadIdx.x] = b.s.token[threadIdx.x];
            }
            break;
        }
        choose_greedy(b, best_tag);
        const int token = b.s.token[0];
        b.length++;
        if (b.sm == 0 && threadIdx.x == 0) {
            b.p.out_tokens[step] = token;
            __threadfence_system();
            *b.p.out_count = step + 1;
        }
        bool stop = false;
#pragma unroll 1
        for (int i = 0; i < b.r.stops; i++) stop |= b.r.stop_ids[i] == token;
        if (stop) break;
    }
    b.s.stopped = 1;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ Params params,
                                                                 const __grid_constant__ Request request) {
    extern __shared__ __align__(128) u8 memory[];
    float* scratch = (float*)(memory + RING_SLOTS * SLOT_BYTES);
    Shared& shared = *(Shared*)(memory + RING_SLOTS * SLOT_BYTES + SCRATCH_BYTES);
    Ring ring(shared_address(memory), shared_address(shared.barriers));
    if (threadIdx.x == 0) {
        ring.init();
        shared.stopped = 0;
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        if ((threadIdx.x & 31) < COPY_LANES) {
            Producer producer(ring, &shared.stopped);
            const StageSizes sizes(blockIdx.x);
            const u8* stream = params.stream + params.stream_start[blockIdx.x];
#pragma unroll 1
            for (int step = 0; step < max(1, request.steps); step++)
                if (!producer.token(stream, sizes)) break;
            producer.drain();
        }
        return;
    }
    Block block(params, request, shared, scratch, ring);
    consume(block);
}
