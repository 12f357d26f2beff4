// What one thread block (one SM) knows and shares while it runs.
#pragma once
#include "forward/barriers.cuh"

// Things that come in twos and take turns, a bit each, flipped after every use: copies of an exchange (see
// exchange.cuh); halves of the partial sums; sums of squares of a norm; phases of barriers (see barriers.cuh): of
// partial sums, of DeltaNet blocks, of activations that are looked out for.
enum Phase {
    X_PHASE = 1,
    LAYER_PHASE = 2,
    DELTA_PHASE = 4,
    ATTENTION_PHASE = 8,
    BEST_PHASE = 16,
    HALF_PHASE = 32,
    NORM_PHASE = 64,
    SUMS_PHASE = 128,
    BLOCK_PHASE = 256,
    THERE_PHASE = 512
};

struct Block {
    const Params& p;
    const Request& r;
    const Draw* draw;  // null in builds that do not sample
    Shared& s;
    float* scratch;
    Ring ring;
    Barriers barriers;
    int sm = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    u32 phases = 0;
    int half = 0;  // a layer's mixer, then its MLP; at last the head
    int length;    // tokens committed before the tree
    int nodes;

    __device__ Block(const Params& params, const Request& request, const Draw* how, Shared& shared, float* scratch_area,
                     const Ring& r0, const Barriers& barriers0)
        : p(params), r(request), draw(how), s(shared), scratch(scratch_area), ring(r0), barriers(barriers0),
          length(request.length), nodes(NODES == 1 ? 1 : request.tree_nodes()) {}

    // Where things are in the copy of this use: what a node tile exchanges, from `at` on; a node's row; four of its
    // values, from k on; one of its sums of squares. And how far the other copy is.
    __device__ u32* node_tile(Phase phase, int node, int at) const {
        return p.exchange + ((phases & phase ? COPY_WORDS : 0) + node / 8 * NODE_TILE_WORDS + at);
    }
    __device__ u32* words(Phase phase, int node, int at) const {
        return node_tile(phase, node, at) + node % 8 * NODE_WORDS;
    }
    template <class Activation>
    __device__ u32* value(Phase phase, int node, int at, int k) const {
        return node_tile(phase, node, at) + Activation::value(node, k);
    }
    template <class Activation>
    __device__ u32* square(Phase phase, int node, int at, int i) const {
        return node_tile(phase, node, at) + Activation::square(node, i);
    }
    __device__ int other(Phase phase) const { return phases & phase ? -COPY_WORDS : COPY_WORDS; }

    // Which row of features the first node has of the i-th layer: of a tree [layers][nodes], of tokens that are decoded
    // [layers][MAX_STEPS].
    __device__ size_t feature_at(int i) const {
        return decoding() ? (size_t)i * MAX_STEPS + (length - r.length) : (size_t)i * nodes;
    }

    // Every stage starts with this. Without it the compiler computes addresses of all stages before the layer loop and
    // keeps them in local memory, which the small L1 beside a full ring cannot hold: each reload would go to L2.
    __device__ void begin_stage() {
        asm volatile("" : "+r"(sm), "+r"(warp), "+r"(lane), "+r"(length), "+r"(half));
        if (NODES > 1) asm volatile("" : "+r"(nodes));
    }

    // Between two stages, or two steps of one. True where a debugging request stops after the stage.
    __device__ void step_done() {
        mark();
        begin_stage();
    }
    __device__ bool stage_done(int number) {
        mark();
        if (r.stop_after == number) return true;
        begin_stage();
        return false;
    }

    // Where it is, worked out again in every stage: every register counts.
    __device__ int layer() const { return half >> 1; }
    __device__ bool is_mlp() const { return half & 1; }
    __device__ bool is_head() const { return half == 2 * LAYERS; }
    __device__ bool is_recurrent() const { return !is_head() && ::is_recurrent(layer()); }
    __device__ int delta_index() const { return recurrent_before(layer()); }
    __device__ int attention_index() const { return layer() - delta_index(); }
    __device__ const float* vectors(int at) const { return p.vectors + (vectors_at(layer()) + at); }

    __device__ u32 phase(Phase of) const { return phases & of ? 1 : 0; }

    // All consumer warps; the producer takes no part.
    __device__ void sync() const { sync_threads<CONSUMERS>(); }
    __device__ bool decoding() const { return NODES == 1 && r.steps > 0; }

    // In a profiling build: when this SM got here.
    __device__ void mark() {
#ifdef PROFILE
        if (threadIdx.x == 0 && marks < PROFILE - 4) p.profile[sm * PROFILE + marks++] = clock64();
#endif
    }
    // And, so far from the end of its marks, what time it is: clocks, then nanoseconds.
    __device__ void mark_time(int from_end) const {
#ifdef PROFILE
        if (threadIdx.x != 0) return;
        long long* to = p.profile + (sm + 1) * PROFILE - 2 * from_end;
        to[0] = clock64(), to[1] = nanoseconds();
#endif
    }
#ifdef PROFILE
    int marks = 0;
#endif
};
