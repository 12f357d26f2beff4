// What one thread block (one SM) knows and shares while it runs.
#pragma once
#include "ring.cuh"

// Shared memory after the ring. `scratch` is used by one stage at a time; see each stage for its layout.
constexpr int STAGED_CHUNKS = chunks_of(FFN > Y_DIM ? FFN : Y_DIM);

struct Shared {
    u64 barriers[2 * RING_SLOTS];
    float residual[OWN_UNITS][NODES][8];   // the rows of the residual stream this SM owns
    float squares[2][WARPS][NODES];        // each warp's share of a norm's sum of squares
    int token[NODES], parent[NODES], depth[NODES];
    int path[NODES][4];                    // a node's nearest ancestors: itself, parent, ... ; -1 - i: i before the root
    int branches[NODES];                   // has children other than the next node
    u8 ancestor[NODES][NODES];             // [node][depth]
    uint4 staged[NODES == 1 ? WARPS * STAGED_CHUNKS * 4 : 1];  // one token's activations on their way to registers
    u64 best[NODES];                       // running argmax: value, then lowest id
    int stopped;                           // decoding has ended: the producer should leave
};
constexpr int SHARED_BYTES = RING_SLOTS * SLOT_BYTES + SCRATCH_BYTES + sizeof(Shared);

struct Block {
    const Params& p;
    const Request& r;
    Shared& s;
    float* scratch;
    Ring ring;
    int sm = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    u32 tag;         // of the exchange that the current stage publishes
    int buffer = 0;  // which half of the scratch the next partial sums go to
    int norm = 0;    // which of `squares` the last norm's sums are in
    int length;      // tokens committed before the tree
    int nodes;

    __device__ Block(const Params& params, const Request& request, Shared& shared, float* scratch_area, const Ring& r0)
        : p(params), r(request), s(shared), scratch(scratch_area), ring(r0), tag(request.first_tag),
          length(request.length), nodes(NODES == 1 ? 1 : request.nodes) {}

    // Every stage starts with this. Without it the compiler computes addresses of all stages before the layer loop and
    // keeps them in local memory, which the small L1 beside a full ring cannot hold: each reload would go to L2.
    __device__ void begin_stage() { asm volatile("" : "+r"(sm), "+r"(warp), "+r"(lane)); }

    // All consumer warps; the producer takes no part.
    __device__ void sync() const { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }
    __device__ bool decoding() const { return r.steps > 0; }

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
