// A DFlash draft in one dispatch: what was committed goes into its memory, and a block of positions is filled.
//
// The parts are those of the activations-first pass (large/), with barriers between steps: the ring, the products, the
// residual stream. Grid: one block an SM, all resident (cooperative launch). Steps, each ended by all SMs. Rows to
// append: fc (their features), norm, keys and values of all layers, keep. The block: embed; per layer: in, rows, parts,
// merge, out, residual, mlp_in, activate, mlp_out, residual; then the target's head. Bytes: the draft's weights once,
// those of keys and values twice, the target's head once, and what the draft remembers.
#include "draft/attention.cuh"
#include "draft/output.cuh"

// The sums of a stage added to the residual stream, or in its place.
template <int GROUPS, bool ADD>
__device__ __forceinline__ void to_residual(Block& b, const float* norm) {
    const Sums<GROUPS> sums(b, RESIDUAL_ROWS);
    update_residual(b, norm, [&](float4 x, int node, int k) {
        const float4 v = sums.at(node, k);
        return ADD ? Sums<GROUPS>::add(x, v) : v;
    });
}

// A layer's attention, apart from the rest: the compiler would give the products worse code beside it. Returns the
// steps done so far.
__device__ __noinline__ u32 block_mix(const Params& p, const Request& r, u8* memory, int layer,
                                      const float* vectors, u32 steps_done) {
    Block b(p, r, memory);
    b.vectors = vectors, b.steps_done = steps_done;
    block_rows(b);
    b.step_done();
    b.wait_for_all();
    b.mark();
    draft_parts(b, p, r, layer);
    b.step_done();
    b.wait_for_all();
    b.mark();
    draft_merge(b, p, r);
    return b.steps_done;
}

// Features of committed rows to what every layer keeps of them. The last step is left to who comes next.
__device__ __noinline__ u32 append_rows(const Params& p, const Request& r, u8* memory, u32 steps_done,
                                        int stage) {
    Block b(p, r, memory);
    b.nodes = r.rows, b.steps_done = steps_done;
    if (stage == FC) {
        to_residual<FC_GROUPS, false>(b, p.vectors + HIDDEN_NORM);
        b.step_done();
    } else {
        keep_context(b, p, r);
    }
    return b.steps_done;
}

__device__ __forceinline__ void draft_pass(Block& b, const Params& p, const Request& r) {
    enum { IN, OUT, MLP_IN, MLP_OUT };
    const int first = r.rows ? FC : 0, end = r.nodes ? HEAD : CONTEXT;
    b.vectors = p.vectors;
    if (threadIdx.x < r.nodes) b.s.token[threadIdx.x] = r.tokens[threadIdx.x];
    b.sync();
    if (!r.rows) {
        embed(b);
        b.step_done();
    }
    b.mark();
#pragma unroll 1
    for (int i = first; i <= end; i++) {
        const int kind = i & 3, layer = i >> 2;
        const bool head = i == HEAD, appends = i < 0;
        const Run run = run_of(p, i);
        const Source from = i == FC                      ? Source{p.waiting, false}
                            : !appends && kind == OUT     ? Source{p.y, false}
                            : !appends && kind == MLP_OUT ? Source{p.h, false}
                                                          : Source{p.x, true};
        b.nodes = appends ? r.rows : r.nodes;
        if (i != FC) b.wait_for_all();
        b.mark();
        prepare_operands(b, run, from);
        b.mark();
        multiply(b, run);
        b.mark();
        if (head) break;
        load_table(b, i);
        b.wait_for_all();
        b.mark();
        if (appends) {
            b.steps_done = append_rows(p, r, b.scratch, b.steps_done, i);
            if (i == FC) continue;
            if (!r.nodes) {
                b.leave();
                return;
            }
            b.nodes = r.nodes;
            embed(b);
        } else if (kind == IN) {
            b.steps_done = block_mix(p, r, b.scratch, layer, b.vectors, b.steps_done);
        } else if (kind == OUT) {
            to_residual<OUT_GROUPS, true>(b, b.vectors + MLP_NORM);
        } else if (kind == MLP_IN) {
            activate(b);
        } else {
            b.vectors += VECTORS;
            to_residual<INNER_GROUPS, true>(b, b.vectors + MIX_NORM);
        }
        b.mark();
        b.step_done();
        b.mark();
    }
    b.wait_for_all();
    b.mark();
    b.leave();
    give_out(b, 1);  // nobody asks about the root
    b.mark();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    draft(const __grid_constant__ Params params, const __grid_constant__ Request asked) {
    extern __shared__ __align__(128) u8 memory[];
    Request& request = ((Shared*)(memory + SHARED_AT))->request;
    if (threadIdx.x == 0) {
        Barriers(shared_address(memory)).init();
        show_barriers();
        request = asked;
        ((Shared*)(memory + SHARED_AT))->marks = 0;
        if (asked.path) {
            request.rows = asked.path->count;
            request.position = asked.first_position + request.rows;
            request.tokens[0] = max(asked.path->last, 0);  // where none was decided this block is of no use
        }
    }
    __syncthreads();
    Block block(params, request, memory);
    const int first = request.rows ? FC : 0, end = request.nodes ? HEAD : CONTEXT;
    constexpr int OTHERS_REGISTERS = 80, CONSUMER_REGISTERS = 208;
    if (block.warp < WARPS) {
        take_registers<CONSUMER_REGISTERS>();
        draft_pass(block, params, request);
    } else {
        leave_registers<OTHERS_REGISTERS>();
        const int other = block.warp - WARPS;
        if (other == 0) {
            Producer producer(shared_address(memory));
            producer.read_from(params.stream + params.stream_start[blockIdx.x] +
                               (first == FC ? 0 : params.stream_start[SMS + blockIdx.x]));
#pragma unroll 1
            for (int i = first; i <= end; i++) {
                if (i == HEAD) producer.read_from(params.head_stream + params.head_start[blockIdx.x]);
                producer.stage(run_of(params, i));
            }
            producer.drain();
        }
        if (other == 1 || other == 2) {
            u32 count = 0, phase = 0;
#pragma unroll 1
            for (int i = first; i <= end; i++, phase ^= 1) {
                block.nodes = i < 0 ? request.rows : request.nodes;
                reduce(block, other - 1, run_of(params, i), phase, count);
            }
        }
    }
}
