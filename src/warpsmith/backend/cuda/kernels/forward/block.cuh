// What one thread block (one SM) knows and shares while it runs.
#pragma once
#include "forward/barriers.cuh"

// Whose turn it is of two, a bit each, flipped after every use: copies of an exchange (see exchange.cuh); halves of the partial sums; sums of
// squares of a norm; signs (see signs.cuh) of partial sums, of DeltaNet blocks, of activations that are looked out for.
enum Turn { X_TURN = 1, LAYER_TURN = 2, DELTA_TURN = 4, ATTENTION_TURN = 8, BEST_TURN = 16, HALF_TURN = 32, NORM_TURN = 64, SUMS_TURN = 128,
            BLOCK_TURN = 256, THERE_TURN = 512 };

struct Block {
    const Params& p;
    const Request& r;
    const Draw* draw;  // null in builds that do not sample
    Shared& s;
    float* scratch;
    Ring ring;
    Signs signs;
    int sm = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    u32 turns = 0;
    int half = 0;    // a layer's mixer, then its MLP; at last the head
    int length;      // tokens committed before the tree
    int nodes;

    __device__ Block(const Params& params, const Request& request, const Draw* how, Shared& shared, float* scratch_area,
                     const Ring& r0, const Signs& signs0)
        : p(params), r(request), draw(how), s(shared), scratch(scratch_area), ring(r0), signs(signs0),
          length(request.length), nodes(NODES == 1 ? 1 : request.nodes) {}

    // Where things are in the copy of this use: what an octet exchanges, from `at` on; a node's row; four of its values, from k
    // on; one of its sums of squares. And how far the other copy is.
    __device__ u32* octet(Turn turn, int node, int at) const {
        return p.exchange + ((turns & turn ? COPY_WORDS : 0) + node / 8 * NODE_TILE_WORDS + at);
    }
    __device__ u32* words(Turn turn, int node, int at) const { return octet(turn, node, at) + node % 8 * NODE_WORDS; }
    template <class Activation>
    __device__ u32* value(Turn turn, int node, int at, int k) const { return octet(turn, node, at) + Activation::value(node, k); }
    template <class Activation>
    __device__ u32* square(Turn turn, int node, int at, int i) const { return octet(turn, node, at) + Activation::square(node, i); }
    __device__ int other(Turn turn) const { return turns & turn ? -COPY_WORDS : COPY_WORDS; }

    // Every stage starts with this. Without it the compiler computes addresses of all stages before the layer loop and
    // keeps them in local memory, which the small L1 beside a full ring cannot hold: each reload would go to L2.
    __device__ void begin_stage() {
        asm volatile("" : "+r"(sm), "+r"(warp), "+r"(lane), "+r"(length), "+r"(half));
        if (NODES > 1) asm volatile("" : "+r"(nodes));
    }

    // Where it is, worked out again in every stage: every register counts.
    __device__ int layer() const { return half >> 1; }
    __device__ bool is_mlp() const { return half & 1; }
    __device__ bool is_head() const { return half == 2 * LAYERS; }
    __device__ bool is_recurrent() const { return !is_head() && ::is_recurrent(layer()); }
    __device__ int delta_index() const { return recurrent_before(layer()); }
    __device__ int attention_index() const { return layer() - delta_index(); }
    __device__ const float* vectors(int at) const { return p.vectors + (vectors_at(layer()) + at); }

    __device__ u32 turn(Turn of) const { return turns & of ? 1 : 0; }

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
