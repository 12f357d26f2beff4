// A DFlash draft in one dispatch: what was committed goes into its memory, and a block of positions is filled.
//
// The parts are those of the activations-first pass (large/): the ring, the products, the residual stream, words that
// SMs poll for. Grid: one block an SM, all resident (cooperative launch). Steps. Rows to append: fc (their features),
// norm, keys and values of all layers, keep. The block: embed; per layer: in, rows, parts, merge, out, residual,
// mlp_in, activate, mlp_out, residual; then the target's head. Bytes: the draft's weights once, those of keys and
// values twice, the target's head once, and what the draft remembers.
#include "draft/attention.cuh"
#include "draft/products.cuh"

// The sums of a stage added to the residual stream, or in its place.
template <int GROUPS, bool ADD>
__device__ __forceinline__ void to_residual(Block& b, int done, const float* norm) {
    const auto sums = sums_of<GROUPS>(b, done, RESIDUAL_ROWS);
    update_residual(b, done + 1, norm, nullptr, [&](float4 x, int node, int k) {
        const float4 v = sums.at(node, k);
        return ADD ? Sums<GROUPS>::add(x, v) : v;
    });
}

// A layer's attention, apart from the rest: the compiler would give the products worse code beside it.
__device__ __noinline__ void block_mix(int stage) {
    const int layer = stage >> 2;
    Block b;
    b.vectors = b.p.vectors + layer * VECTORS;
    block_rows(b, stage);
    b.mark();
    draft_parts(b, layer);
    b.mark();
    draft_merge(b, stage);
}

// The inner activation, likewise: within `lead_to` its places of sums would be kept in memory.
__device__ __noinline__ void activate_inner(int done) {
    Block b;
    activate(b, done);
}

// What becomes of features that are projected, and of keys and values of the context.
__device__ __noinline__ void append_rows(int done) {
    Block b;
    b.nodes = b.r.rows;
    barrier_wait(Barriers(b.base).tabled, b.turn(done));
    b.mark();
    if (done == FC)
        to_residual<FC_GROUPS, false>(b, done, b.p.vectors + HIDDEN_NORM);
    else
        keep_context(b);
}

// From a layer's products before number `stage`, or from where a block begins, to this one's operands: apart from the
// products, so that the compiler has all registers for either.
__device__ __noinline__ void lead_to(int stage) {
    Block b;
    const int done = stage - 1, kind = done & 3;
    if (stage > HEAD) {  // the head's next group of the same activations
        barrier_wait(Barriers(b.base).tabled, b.turn(done));
    } else if (stage < 0) {
        b.nodes = b.r.rows;
    } else if (stage == 0) {
        b.take_nodes(b.r.nodes);
        embed(b);
    } else {
        const float* vectors = b.p.vectors + (done >> 2) * VECTORS;
        barrier_wait(Barriers(b.base).tabled, b.turn(done));
        b.mark();
        if (kind == IN)
            block_mix(done);
        else if (kind == OUT)
            to_residual<OUT_GROUPS, true>(b, done, vectors + MLP_NORM);
        else if (kind == MLP_IN)
            activate_inner(done);
        else
            to_residual<INNER_GROUPS, true>(b, done, vectors + VECTORS + MIX_NORM);
    }
    b.mark();
    b.sync();  // who has nothing more to do rests: polls would be in the way of the others
    const Run run = uniform_run(b.s.runs[b.turn(stage)]);
    if (stage == FC)
        prepare_rows(b, run, stage, b.p.waiting);
    else
        prepare_operands(b, run, min(stage, HEAD));
    b.mark();
}

// Of rows that were appended without a block what was exchanged is set back, when all SMs have read it.
__device__ __forceinline__ void forget_context(Block& b) {
    b.step_done();
    b.wait_for_all();
    reset_words(b, x_words(b, CONTEXT), X_WORDS, threadIdx.x, CONSUMERS);
    reset_words(b, (u32*)sums_at(b, FC), FC_RESULTS * NODES * ROWS, threadIdx.x, CONSUMERS);
    reset_words(b, (u32*)sums_at(b, CONTEXT), CONTEXT_RESULTS * NODES * ROWS, threadIdx.x, CONSUMERS);
    b.leave();
}

__device__ __forceinline__ void draft_pass(Block& b) {
    const int first = b.first_stage(), end = b.r.nodes ? LAST : CONTEXT;
    if (threadIdx.x < b.r.nodes) b.s.token[threadIdx.x] = b.r.tokens[threadIdx.x];
    if (first < 0) b.take_nodes(b.r.rows);
    b.mark();
#pragma unroll 1
    for (int stage = first; stage <= end; stage++) {
        if (stage > first && stage <= 0) append_rows(stage - 1);
        lead_to(stage);
        multiply_stage(b, stage, uniform_run(b.s.runs[b.turn(stage)]));
        b.mark();
    }
    if (end == CONTEXT) {
        append_rows(CONTEXT);
        forget_context(b);
        return;
    }
    barrier_wait(Barriers(b.base).tabled, b.turn(LAST));
    b.nodes = b.r.nodes;
    b.mark();
    b.leave();
    b.vectors = b.p.vectors + LAYERS * VECTORS;
    if (b.r.want_hidden) give_hidden(b);
}

// Keys and values that attention will read after a layer's first products, of this SM's first item: weights have pushed
// them out of the L2 cache.
__device__ __forceinline__ void ask_remembered(const Block& b, int layer) {
    const int remembered = uniform(remembered_rows(b)), kv_head = b.sm % KV_HEADS, split = b.sm / KV_HEADS;
    const int rows = split < splits_of(remembered) ? min(CHUNK, remembered - split * CHUNK) : 0;  // else others ask
    const size_t first = (size_t)(layer * KV_HEADS + kv_head) * b.p.capacity + split * CHUNK;
#pragma unroll 1
    for (int line = b.lane; line < rows * 2; line += 32) {
        const size_t at = first * (DIM / 2) + line * 32;
        prefetch(b.p.keys + at), prefetch(b.p.values + at);
    }
}

// One warp finds what the consumers need after a stage and for the next while they multiply, and beside the head sets
// back what was exchanged.
__device__ __forceinline__ void find_tables(Block& b, int end) {
    const Barriers bars(b.base);
    Stage next = b.p.stages[b.first_stage()];
#pragma unroll 1
    for (int stage = b.first_stage(); stage <= end; stage++) {
        const Stage here = next;
        next = b.p.stages[min(stage + 1, end)];
        barrier_wait(bars.begun, b.turn(stage));
        if (stage < end && b.lane < (int)sizeof(Run) / 16)
            copy16((uint4*)&b.s.runs[b.turn(stage) ^ 1] + b.lane,
                   (const uint4*)&b.p.runs[(stage + 1) * SMS + b.sm] + b.lane);
        if (stage < HEAD) {
            load_table(b, here);
            if (stage >= 0 && (stage & 3) == IN) ask_remembered(b, stage >> 2);
            if (stage == 0) {  // so that all have kept the rows that were appended before anybody attends to them
                if (b.lane == 0) b.wait_until_begun(stage);
                __syncwarp();
            }
        } else if (stage == LAST) {
            if (b.lane == 0) b.wait_until_begun(LAST);
            __syncwarp();
            reset_words(b, b.p.words, ALL_WORDS, b.lane, 32);
            reset_words(b, (u32*)b.p.sums, 2 * LAYER_RESULTS * NODES * ROWS, b.lane, 32);
        }
        copies_done();
        arrive_for_warp(bars.tabled, b.lane);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    draft(const __grid_constant__ Params params, const __grid_constant__ Request asked) {
    Shared& shared = *(Shared*)(shared_memory() + SHARED_AT);
    Request& request = shared.request;
    for (int i = threadIdx.x; i < (int)sizeof(Params) / 4; i += THREADS) ((u32*)&shared.params)[i] = ((u32*)&params)[i];
    if (threadIdx.x == 0) {
        Barriers(shared_address(shared_memory())).init();
        show_barriers();
        request = asked;
        shared.marks = 0, shared.scaled = NO_STAGE;
#ifdef EVERY_LANE_ARRIVES
        for (int i = 0; i < WARPS / 2; i++) barrier_init(shared_address(&shared.pairs[i]), 64);
        for (int i = 0; i < WARPS; i++) shared.meetings[i] = 0;
#endif
        if (asked.path) {
            request.rows = asked.path->count;
            request.position = asked.first_position + request.rows;
            request.tokens[0] = max(asked.path->last, 0);  // where none was decided this block is of no use
        }
        shared.runs[0] = params.runs[(request.rows ? FC : 0) * SMS + (int)blockIdx.x];
    }
    __syncthreads();
    Block block;
    const int first = request.rows ? FC : 0, end = request.nodes ? LAST : CONTEXT;
    constexpr int OTHERS_REGISTERS = 80, CONSUMER_REGISTERS = 208;
    if (block.warp < WARPS) {
        take_registers<CONSUMER_REGISTERS>();
        draft_pass(block);
    } else {
        leave_registers<OTHERS_REGISTERS>();
        const int other = block.warp - WARPS;
        if (other == 0) {
            Producer producer(block.base);
            producer.follow(params.stream,
                            params.parcels + params.first_parcel[(first == FC ? 0 : SMS) + blockIdx.x]);
            Run run = params.runs[first * SMS + (int)blockIdx.x];
#pragma unroll 1
            for (int i = first; i <= end; i++) {
                const Run next = params.runs[min(i + 1, end) * SMS + (int)blockIdx.x];  // early: it comes from memory
                if (i == HEAD)
                    producer.follow(params.head_stream, params.head_parcels + params.first_head_parcel[blockIdx.x]);
                producer.stage(uniform_run(run));
                run = next;
            }
            producer.drain();
        }
        if (other == 1 || other == 2) {
            u32 count = 0;
#pragma unroll 1
            for (int i = first; i <= end; i++) {
                block.nodes = i < 0 ? request.rows : request.nodes;
                reduce(block, other - 1, i, count);
            }
        }
        if (other == 3) find_tables(block, end);
    }
}
