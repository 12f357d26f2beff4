// A whole forward pass, or many decoded tokens, in one dispatch: for models whose activations, not whose weights, are
// held.
//
// Grid: one block an SM, all resident (cooperative launch): 8 warps that compute, one that fills the ring, two that add
// up, one that finds tables. Steps: embed; per layer: in (projections), mix (DeltaNet; attention: rows, parts, merge),
// out (projection), residual, mlp_in, activate, mlp_out, residual; at last the head, a stage for each group of K, and
// rank. What follows products is waited for word by word, and so are sums (see words.cuh); attention's steps and the
// last one are ended by all SMs.
#include "large/attention.cuh"
#include "large/delta.cuh"
#include "large/rank.cuh"
#include "large/visits.cuh"

// The sums of a stage added to the residual stream.
template <int GROUPS>
__device__ __forceinline__ void add_to_residual(Block& b, int done, const float* norm, float* feature) {
    const auto sums = sums_of<GROUPS>(b, done, RESIDUAL_ROWS);
    update_residual(b, done + 1, norm, feature,
                    [&](float4 x, int node, int k) { return Sums<GROUPS>::add(x, sums.at(node, k)); });
}

// What becomes of the sums of products number `done`, but for a mixer's, of a layer whose vectors these are.
__device__ __forceinline__ void use_sums(Block& b, int done) {
    const int kind = done & 3, layer = done >> 2;
    const bool recurrent = b.recurrent(layer);
    if (kind == OUT) {
        if (groups_of(VALUE_DIM) == groups_of(ATTENTION_DIM) || recurrent)
            add_to_residual<groups_of(VALUE_DIM)>(b, done, b.vectors + MLP_NORM, nullptr);
        else
            add_to_residual<groups_of(ATTENTION_DIM)>(b, done, b.vectors + MLP_NORM, nullptr);
    } else if (kind == MLP_IN) {
        if constexpr (POLLED)
            activate_one(b, done);
        else
            activate(b, done);
    } else {
        float* feature = nullptr;
#pragma unroll 1
        for (int f = 0; f < b.r.features; f++)
            if (b.r.feature_layers[f] == layer) feature = b.p.out_features + b.feature_at(f) * HIDDEN;
        const float* next = b.vectors + (recurrent ? DELTA_VECTORS : ATTENTION_VECTORS);
        add_to_residual<INNER_GROUPS>(b, done, next + MIX_NORM, feature);
    }
}

// Where products begin: the steps done so far, and the address of the SM's run. The caller could work that out, but
// then the compiler keeps where shared memory begins on the stack, and every stage fetches it from there. One node's
// build has registers for that.
struct Beginning {
    u32 steps_done, run;
};

// From the products before number `i` to its operands: apart from the products, so that the compiler has all registers
// for either.
__device__ __noinline__ Beginning lead_to(int i, int length, u32 steps_done) {
    Block b;
    b.length = length, b.steps_done = steps_done;
    b.enter(max(i - 1, 0) >> 2);
    const int kind = i & 3;
    if (i > 0) barrier_wait(Barriers(b.base).tabled, b.turn(i - 1));
    if (i > HEAD) {
        // the head's next group of the same activations
    } else if (kind == OUT) {
        if (b.recurrent(i >> 2)) {
            b.steps_done = delta_mix(i - 1, b.deltas, b.length, b.vectors, b.steps_done);
        } else {
            b.mark();
            if (!POLLED) make_tree_rows(i - 1, b.deltas, b.length, b.vectors);
            b.steps_done = attention_mix(i - 1, b.deltas, b.length, b.vectors, b.steps_done);
            b.mark();
        }
    } else {
        if (i == 0) {
            if (threadIdx.x == 0) prepare_items(b);
            embed(b);
        } else {
            b.mark();
            use_sums(b, i - 1);
        }
        b.mark();
    }
    if (!POLLED) b.sync();  // who has nothing more to do rests: polls would be in the way of the others
    const Run& mine = b.s.runs[b.turn(i)];
    const Run run = uniform_run(mine);
    if constexpr (POLLED)
        prepare_one(b, run, min(i, HEAD), i < HEAD && kind == OUT && b.recurrent(i >> 2));
    else
        prepare_operands(b, run, min(i, HEAD));
    b.mark();
    return {b.steps_done, shared_address(&mine)};
}

// The launch's `token`-th token, or one for every node, once the head's products are made.
__device__ __noinline__ u32 choose(const Draw* draw, int length, u32 steps_done, int token) {
    Block b;
    b.length = length, b.steps_done = steps_done, b.draw = draw;
    b.enter(LAYERS);
    barrier_wait(Barriers(b.base).tabled, b.turn(STAGES - 1));
    b.mark();
    rank_logits(b);
    b.step_done();
    b.mark();
    b.wait_for_all();
    b.mark();
    if (SAMPLES && draw->inverse_temperature > 0)
        draw_token(b, token);
    else
        choose_tokens(b);
    b.mark();
    return b.steps_done;
}

__device__ __forceinline__ void forward_pass(Block& b, int token) {
#pragma unroll 1
    for (int i = 0; i < STAGES; i++) {
        const Beginning here = lead_to(i, b.length, b.steps_done);
        const Run run = uniform_run(POLLED ? b.s.runs[b.turn(i)] : shared_at<Run>(here.run));
        b.steps_done = here.steps_done;
        if constexpr (POLLED)
            multiply_by<OneMultiplier>(b, run);
        else if (uniform(b.s.scaled == min(i, HEAD)))
            multiply_by<ScaledMultiplier>(b, run);
        else
            multiply_by<Multiplier>(b, run);
        if (!POLLED) wait_for_empty_buffers(b);
        b.mark();
    }
    b.steps_done = choose(b.draw, b.length, b.steps_done, token);
}

__device__ __forceinline__ void consume(Block& b) {
    if (SAMPLES && threadIdx.x == 0) b.s.reach = first_reach(b);
    prepare_tree(b);
    b.length = b.r.length;  // read again, else it would be kept in memory until here
#pragma unroll 1
    for (int step = 0; step < (POLLED ? max(1, b.r.steps) : 1); step++) {  // of a tree one pass
        forward_pass(b, step);
        const int token = b.s.token[0];
        b.length++;
        if (SAMPLES && b.draw->sampled && threadIdx.x == 0) b.s.drawn[step] = token;
        int stop = token == UNDECIDED;
        for (int i = 0; i < b.r.stops; i++) stop |= b.r.stop_ids[i] == token;
        b.sync();  // for the compiler: it keeps numbers in registers of the whole warp only if its lanes are together
        if (uniform(stop)) break;
    }
    // Nobody waits for weights any more, or for another stage.
    if (threadIdx.x == 0) b.s.stopped = 1;
    if (threadIdx.x < THREADS_ARRIVE) barrier_arrive(Barriers(b.base).begun);
}

__device__ __forceinline__ void copy_weights(Block& b) {
    Producer producer(b.base, (u32)((u8*)&b.s.stopped - b.scratch));
#pragma unroll 1
    for (int step = 0; step < max(1, b.r.steps); step++) {
        producer.follow(b.p.stream, b.p.parcels + b.p.first_parcel[blockIdx.x]);
        Run run = b.p.runs[blockIdx.x];
        int stage = 0;
#pragma unroll 1
        for (; stage < STAGES; stage++) {
            const Run next = b.p.runs[min(stage + 1, STAGES - 1) * SMS + blockIdx.x];  // early: it comes from memory
            if (!producer.stage(uniform_run(run))) break;
            run = next;
        }
        if (stage < STAGES) break;
    }
    producer.drain();
}

// Those who work beside the consumers wait for every stage to begin, and for the end.
__device__ __forceinline__ bool begun(const Block& b, u32 phase) {
    barrier_wait(Barriers(b.base).begun, phase);
    return !uniform(b.s.stopped);
}

// A tree's sums take the place of those before them: two places in turn would be too much for the L2 cache. Others may
// still read these where a stage needs nothing of every SM, as the squares of the residual stream are. They have read
// them when they have begun the stage, and by then consumers have filled a buffer of sums or two.
__device__ __forceinline__ void wait_for_use(const Block& b, int which, u32 uses) {
    u32* counter = b.p.counter + 32;
    if (b.lane == 0) {
        if (which == 0) add_release(counter, 1);
        for (Watchdog dog; (int)(load_acquire(counter) - uses * SMS) < 0;) dog.check();
    }
    __syncwarp();
}

__device__ __forceinline__ void add_up(Block& b, int which) {
    const Barriers bars(b.base);
    u32 count = 0, phase = 0, uses = 0, turns[ONE_GROUPS] = {};
#pragma unroll 1
    for (int i = 0; begun(b, phase); i = i == STAGES - 1 ? 0 : i + 1, phase ^= 1) {
        if (i <= HEAD) measure(b, which, i, normed(i));
        const Run run = uniform_run(b.s.runs[phase]);
        if (i < STAGES - 1)
            arrive_for_warp(bars.tabled, b.lane);
        else if (b.lane == 0)
            add_release(b.sums_counter(HEAD), 1);  // this SM has read all words
        if constexpr (POLLED) {
            const float by = b.sum_factor(which, 0);
            if (i < HEAD)
                reduce_one(b, which, run, turns, by, sums_at(b, i), TaggedSum{i & SUM_TAGS});
            else
                reduce_one(b, which, run, turns, by, b.p.head_sums, OwnSum{i == HEAD});
        } else if (i < HEAD) {
            if (i & 1) wait_for_use(b, which, ++uses);
            TaggedSums sums(b, which, run, sums_at(b, i), i & SUM_TAGS);
            reduce_tiles(b, which, run, count, sums);
            if (b.lane == 0) add_release(b.sums_counter(i), 1);
        } else {
            OwnSums<Ranks> sums(b, which, run, b.p.head_sums, i == HEAD, i == STAGES - 1, Ranks(b, which, run));
            reduce_tiles(b, which, run, count, sums);
            if (i == STAGES - 1) sums.outcome.tell();
        }
        if (i == STAGES - 1) arrive_for_warp(bars.tabled, b.lane);  // this SM's logits are there, or the best of them
    }
}

// The host learns of tokens.
__device__ __forceinline__ void report(const Block& b, int tokens) {
    if (b.sm != 0) return;
    if (!b.decoding()) {
        if (b.lane < b.nodes) b.p.out_tokens[b.place(b.lane)] = b.s.token[b.lane];
    } else if (b.lane == 0) {
        b.p.out_tokens[tokens - 1] = b.s.token[0];
        __threadfence_system();
        *b.p.out_count = tokens;
    }
}

// Ask for what the step after products number `i` will read besides their sums: weights have pushed it out of the L2
// cache. What it must have at once goes to shared memory, the rest there.
__device__ __forceinline__ void ask_early(const Block& b, int i) {
    if (i >= HEAD) return;
    const int kind = i & 3;
    const bool recurrent = b.recurrent(i >> 2);
    if (kind == OUT || kind == MLP_OUT) {
        const float* norm = b.vectors + (kind == OUT   ? MLP_NORM
                                         : recurrent ? DELTA_VECTORS + MIX_NORM
                                                     : ATTENTION_VECTORS + MIX_NORM);
        const int span = b.lane / 8 * SMS + b.sm, at = b.lane % 8 * 32;
        if (span < SPANS * b.nodes && at < SPAN)
            prefetch(norm + Block::over_nodes(span, b.s.half_by_nodes) * SPAN + at);
    } else if (kind == IN && recurrent) {
        const DeltaShare share(b.sm);
        const float* states = b.p.delta + (size_t)b.deltas * VALUE_DIM * STATE_DIM + b.lane * 32;
        if (POLLED) ask_inputs(b, share, b.lane, 32);
#pragma unroll 1
        for (int mine = 0; mine < share.units; mine++) prefetch(states + share.unit(mine) * 8 * STATE_DIM);
        if (b.lane < 4) prefetch(b.vectors + GATED_NORM_AT + b.lane * 32);
    } else if (kind == IN) {
        if (b.lane < HEAD_DIM / 16) prefetch(b.vectors + Q_NORM_AT + b.lane * 32);
    }
}

// One warp finds what the consumers need after a stage while they multiply.
__device__ __forceinline__ void find_tables(Block& b) {
    const Barriers bars(b.base);
    u32 phase = 0;
    int tokens = 0, i = 0;
    Stage stage = b.p.stages[0];
#pragma unroll 1
    for (; begun(b, phase); phase ^= 1) {
        const int next = i == STAGES - 1 ? 0 : i + 1;
        // All copies are on their way at once: beside weights that stream, each takes microseconds.
        if (i < HEAD) load_table(b, stage);
        if (b.lane < (int)sizeof(Run) / 16)
            copy16((uint4*)&b.s.runs[phase ^ 1] + b.lane, (const uint4*)&b.p.runs[next * SMS + b.sm] + b.lane);
        stage = b.p.stages[next];
        ask_early(b, i);
        if (!POLLED && i <= HEAD) {
            for (Watchdog dog; i > 0 && !everywhere(b.sums_written(i - 1));) dog.check();
            reset_read_words(b, i);
        }
        if (i == STAGES - 1) {
            for (Watchdog dog; !everywhere(b.words_read(tokens));) dog.check();
            reset_all_words(b);
        }
        copies_done();
        arrive_for_warp(bars.tabled, b.lane);
        if (POLLED && i < HEAD && (i & 3) == OUT) {
            reset_read_words(b, i);
            arrive_for_warp(bars.cleared, b.lane);
        }
        if (i == 0 && tokens > 0) report(b, tokens);
        if (next == 0 || i < HEAD && (i & 3) == MLP_OUT) b.enter(next >> 2);
        if (next == 0) b.length++, tokens++;
        i = next;
    }
    report(b, tokens);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    forward(const __grid_constant__ Params params, const __grid_constant__ Request request,
            const __grid_constant__ Draw draw) {
    Shared& shared = *(Shared*)(shared_memory() + SHARED_AT);
    for (int i = threadIdx.x; i < (int)sizeof(Params) / 4; i += THREADS) ((u32*)&shared.params)[i] = ((u32*)&params)[i];
    for (int i = threadIdx.x; i < (int)sizeof(Request) / 4; i += THREADS)
        ((u32*)&shared.request)[i] = ((u32*)&request)[i];
    __syncthreads();
    if (request.made) {  // a tree that was grown on this device
        if (threadIdx.x == 0) shared.request.nodes = request.made->nodes;
        if (threadIdx.x < NODES)
            shared.request.tokens[threadIdx.x] = request.made->tokens[threadIdx.x],
            shared.request.parents[threadIdx.x] = request.made->parents[threadIdx.x];
        __syncthreads();
    }
    if (threadIdx.x < NODES) shared.best[threadIdx.x] = 0;
    if (threadIdx.x >= 32 && threadIdx.x < 36) {
        const int first = (threadIdx.x - 32) * 32;
        u32 bits = 0;
        for (int i = 0; i < min(32, LAYERS - first); i++) bits |= (u32)params.recurrent[first + i] << i;
        shared.recurrent[first / 32] = bits;
    }
    Block block;
    if (SAMPLES) block.draw = &draw;
    if (threadIdx.x == 0) {
        Barriers(block.base).init();
        *(u32*)(block.scratch + ISSUED_AT) = 0;
        block.s.stopped = 0, block.s.scaled = -1;
        block.s.half_by_nodes = ((1u << 31) + block.nodes - 1) / block.nodes;
        block.s.runs[0] = params.runs[blockIdx.x];
#ifdef EVERY_LANE_ARRIVES
        for (int i = 0; i < WARPS / 2; i++) barrier_init(shared_address(&block.s.pairs[i]), 64);
        for (int i = 0; i < WARPS; i++) block.s.meetings[i] = 0;
#endif
#ifdef PROFILE
        block.s.marks = 0;
#endif
        show_barriers();
    }
    __syncthreads();
    if (block.warp < WARPS) {
        take_registers<CONSUMER_REGISTERS>();
        consume(block);
    } else {
        leave_registers<OTHERS_REGISTERS>();
        const int other = block.warp - WARPS;
        if (other == 0) copy_weights(block);
        if (other == 1 || other == 2) add_up(block, other - 1);
        if (other == 3) find_tables(block);
    }
}
