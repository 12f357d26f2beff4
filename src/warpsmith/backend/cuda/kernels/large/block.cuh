// What one thread block (one SM) knows while it runs, and how all of them wait for each other.
//
// A pass is a sequence of steps. Between two steps an SM waits for the words that it needs (see words.cuh), or until
// all have ended the one before: a counter in memory, to which each SM adds when what it wrote can be seen. Weights do
// not wait: their ring fills on through every step.
#pragma once
#include "common/exchange.cuh"
#include "large/shape.cuh"

constexpr int ARRIVALS = REDUCERS * SMS;  // of a step

__device__ __forceinline__ u8* shared_memory() {
    extern __shared__ __align__(128) u8 memory[];
    return memory;
}

struct Block {
    const Params& p;
    const Request& r;
    Shared& s;
    u8* scratch;
    u32 base;  // address of the shared memory
    int sm = blockIdx.x, warp = uniform(threadIdx.x >> 5), lane = threadIdx.x & 31;
    int nodes, length;
    u32 steps_done = 0;
    // the consumers' places in the ring and in the buffers of sums
    int slot = 0, buffer = 0;
    u32 slot_phase = 0, buffer_phase = 0, ring_end = 0;
    u32 slots = 0, issued = 0;  // of one node: slots so far, and how many copies are known to have been asked for
    int deltas = 0;  // DeltaNet layers before this one
    const float* vectors;
    const struct Draw* draw = nullptr;  // of a build that samples

    __device__ Block()
        : p(((Shared*)(shared_memory() + SHARED_AT))->params), r(((Shared*)(shared_memory() + SHARED_AT))->request),
          s(*(Shared*)(shared_memory() + SHARED_AT)), scratch(shared_memory()), base(shared_address(shared_memory())),
          nodes(POLLED ? 1 : r.nodes), length(r.length), vectors(p.vectors) {}

    __device__ bool decoding() const { return r.steps > 0; }
    __device__ bool recurrent(int layer) const { return uniform(s.recurrent[layer >> 5] >> (layer & 31) & 1); }
    // What follows is of this layer: its vectors, and how many DeltaNets come before it. They are worked out from the
    // layer, since numbers that are kept from stage to stage end up in memory.
    __device__ void enter(int layer) {
        deltas = 0;
#pragma unroll
        for (int word = 0; word < (LAYERS + 31) / 32; word++) {
            const int here = layer - word * 32;  // layers of this word that come before
            deltas += __popc(s.recurrent[word] & (here >= 32 ? ~0u : (1u << max(here, 0)) - 1));
        }
        vectors = p.vectors + (size_t)deltas * DELTA_VECTORS + (size_t)(layer - deltas) * ATTENTION_VECTORS;
    }
    // Odd or even: how many stages came before the i-th of this token.
    __device__ u32 turn(int i) const { return (u32)((length - r.length) * STAGES + i) & 1; }
    // The same of layers.
    __device__ u32 layer_turn(int layer) const { return (u32)((length - r.length) * LAYERS + layer) & 1; }
    // Which row of what a tree leaves is a node's: of results, and of what a commit needs.
    __device__ int place(int node) const { return POLLED ? 0 : r.place[node]; }
    // Which row of features the first node has of the i-th layer: of a tree [layers][nodes], of tokens that are decoded
    // [layers][MAX_STEPS].
    __device__ size_t feature_at(int i) const {
        return decoding() ? (size_t)i * MAX_STEPS + (length - r.length) : (size_t)i * (r.whole ? r.whole : nodes);
    }
    __device__ void sync() const { sync_threads<CONSUMERS>(); }
    // number / nodes by a multiplication: the compiler's division is many instructions more.
    static __device__ int over_nodes(int number, u32 half_by_nodes) {
        return POLLED ? number : (int)((u64)(2 * (u32)number + 1) * half_by_nodes >> 32);
    }
    // Where factors of a superblock's sums are (see operands.cuh). Its operands begin at so many sixteen bytes.
    __device__ u32 back_at(u32 sixteens) const { return sixteens * 16 + BACK_AT; }
    // What a token's sums are multiplied with.
    __device__ float sum_factor(int which, int token) const { return s.inverse[which][token] * OPERANDS_BACK; }

    // All SMs have done what came before.
    __device__ void wait_for_all() {
        steps_done++;
        if (threadIdx.x == 0) {
            Watchdog dog;
            while ((int)(load_acquire(p.counter) - steps_done * ARRIVALS) < 0) dog.check();
        }
        __syncwarp();
        sync();
    }
    // Who has written a tree's sums of a stage is counted by kinds of stages, since an SM may be done with one before
    // another is with the one before.
    __device__ u32* sums_counter(int stage) const { return p.counter + 32 * (2 + (stage & 3)); }
    __device__ bool sums_written(int stage) const {
        return (int)(load_acquire(sums_counter(stage)) - ((stage >> 2) + 1) * ARRIVALS) >= 0;
    }
    // All SMs have read the words and sums of a token's layers, which `tokens` others came before.
    __device__ bool words_read(int tokens) const {
        return (int)(load_acquire(sums_counter(HEAD)) - ((POLLED ? tokens : LAYERS) + 1) * ARRIVALS) >= 0;
    }
    // This SM is done with a step that its consumers do.
    __device__ void step_done() {
        sync();
        if (threadIdx.x == 0) add_release(p.counter, REDUCERS);
    }
    __device__ void mark() {
#ifdef PROFILE
        if (threadIdx.x == 0 && s.marks + 1 < PROFILE)
            p.profile[sm * PROFILE + s.marks++] = clock64(), p.profile[sm * PROFILE + s.marks++] = waited;
        waited = 0;
#endif
    }
    // Clocks this warp has waited while it multiplied, from the last mark on.
    __device__ void begin_wait() {
#ifdef PROFILE
        waited -= clock64();
#endif
    }
    __device__ void end_wait() {
#ifdef PROFILE
        waited += clock64();
#endif
    }
#ifdef PROFILE
    long long waited = 0;
#endif
};

#include "large/sums.cuh"
