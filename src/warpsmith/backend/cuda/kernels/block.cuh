// What one thread block (one SM) knows and shares while it runs.
#pragma once
#include "ring.cuh"

// Which copy of an exchange is in use: a bit each, flipped after every use (see exchange.cuh).
enum Turn { X_TURN = 1, LAYER_TURN = 2, DELTA_TURN = 4, ATTENTION_TURN = 8, BEST_TURN = 16 };

struct Block {
    const Params& p;
    const Request& r;
    const Draw* draw;  // null in builds that do not sample
    Shared& s;
    float* scratch;
    Ring ring;
    int sm = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    u32 turns = 0;
    int buffer = 0;  // which half of the partial sums the next go to
    int norm = 0;    // which of `squares` the last norm's sums are in
    int epoch = 0;   // DeltaNet blocks so far, in a tree
    int length;      // tokens committed before the tree
    int nodes;

    __device__ Block(const Params& params, const Request& request, const Draw* how, Shared& shared, float* scratch_area,
                     const Ring& r0)
        : p(params), r(request), draw(how), s(shared), scratch(scratch_area), ring(r0), length(request.length),
          nodes(NODES == 1 ? 1 : request.nodes) {}

    // Where a node's words of an exchange are, in the copy of this use; and how far the other copy is.
    __device__ u32* words(Turn turn, int node, int at) const {
        return p.exchange + ((turns & turn ? COPY_WORDS : 0) + node * NODE_WORDS + at);
    }
    // The state a node keeps for its children: in shared memory as long as there is room. [8][64] float4
    __device__ float4* kept_state(int place, int block) const {
        if (place < KEPT_STATES) return (float4*)(scratch + (MIX_AT + DELTA_FLOATS) + place * STATE_FLOATS);
        return (float4*)(p.branch_state + ((size_t)block * MAX_NODES + place) * STATE_FLOATS);
    }
    __device__ int other(Turn turn) const { return turns & turn ? -COPY_WORDS : COPY_WORDS; }

    // Every stage starts with this. Without it the compiler computes addresses of all stages before the layer loop and
    // keeps them in local memory, which the small L1 beside a full ring cannot hold: each reload would go to L2.
    __device__ void begin_stage() {
        asm volatile("" : "+r"(sm), "+r"(warp), "+r"(lane), "+r"(length));
        if (NODES > 1) asm volatile("" : "+r"(nodes));
    }

    // All consumer warps; the producer takes no part.
    __device__ void sync() const { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }
    __device__ bool decoding() const { return NODES == 1 && r.steps > 0; }

    // In a profiling build: when this SM got here.
    __device__ void mark() {
#ifdef PROFILE
        if (threadIdx.x == 0 && marks < PROFILE) p.profile[sm * PROFILE + marks++] = clock64();
#endif
    }
#ifdef PROFILE
    int marks = 0;
#endif
};
