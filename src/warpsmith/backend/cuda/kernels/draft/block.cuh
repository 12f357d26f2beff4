// What one thread block (one SM) knows while it runs, and how all of them wait for each other.
//
// A launch is a sequence of steps. Between two steps an SM waits for the words that it needs (see words.cuh), or, after
// the last one, until all have ended it: a counter in memory, to which each SM adds when what it wrote can be seen.
// Weights do not wait: their ring fills on through every step.
#pragma once
#include "draft/shape.cuh"

constexpr int ARRIVALS = REDUCERS * SMS;  // at a counter

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
    int nodes;
    // the consumers' places in the ring and in the buffers of sums
    int slot = 0, buffer = 0;
    u32 slot_phase = 0, buffer_phase = 0, ring_end = 0;
    const float* vectors;

    __device__ Block()
        : p(((Shared*)(shared_memory() + SHARED_AT))->params), r(((Shared*)(shared_memory() + SHARED_AT))->request),
          s(*(Shared*)(shared_memory() + SHARED_AT)), scratch(shared_memory()), base(shared_address(shared_memory())),
          nodes(r.nodes), vectors(p.vectors) {}

    __device__ int first_stage() const { return r.rows ? FC : 0; }
    // Odd or even: how many stages came before this one.
    __device__ u32 turn(int stage) const { return (u32)(stage - first_stage()) & 1; }
    __device__ int place(int node) const { return node; }
    __device__ void sync() const { sync_threads<CONSUMERS>(); }
    // From here on with so many rows.
    __device__ void take_nodes(int count) {
        nodes = count;
        sync();
        if (threadIdx.x == 0) s.half_by_nodes = ((1u << 31) + count - 1) / count;
        sync();
    }
    static __device__ int over_nodes(int number, u32 half_by_nodes) {
        return (int)((u64)(2 * (u32)number + 1) * half_by_nodes >> 32);
    }
    __device__ u32 back_at(u32 sixteens) const { return sixteens * 16 + BACK_AT; }
    __device__ float sum_factor(int which, int token) const { return s.inverse[which][token] * OPERANDS_BACK; }

    // All SMs have ended the last step.
    __device__ void wait_for_all() const {
        if (threadIdx.x == 0) {
            Watchdog dog;
            while (load_acquire(p.counter) < ARRIVALS) dog.check();
        }
        __syncwarp();
        sync();
    }
    // This SM has, where that is a step of its consumers.
    __device__ void step_done() const {
        sync();
        if (threadIdx.x == 0) add_release(p.counter, REDUCERS);
    }
    // A stage has begun on this SM, so that all words and sums before it have been read: a counter for every fourth
    // stage, since an SM may be at one before another is at the one before.
    __device__ u32* begun_counter(int stage) const { return p.counter + 32 * (1 + (stage & 3)); }
    __device__ void wait_until_begun(int stage) const {
        const u32 all = (((stage - first_stage()) >> 2) + 1) * ARRIVALS;
        for (Watchdog dog; (int)(load_acquire(begun_counter(stage)) - all) < 0;) dog.check();
    }
    // After the last wait: who leaves last leaves no arrivals behind.
    __device__ void leave() {
        if (threadIdx.x != 0 || atomicAdd(p.counter + 1, 1u) != SMS - 1) return;
        p.counter[0] = p.counter[1] = 0;
        for (int i = 0; i < 4; i++) *begun_counter(i) = 0;
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

// Where a node's activation k lies among those that a projection reads: 64 k of all nodes side by side, so that a warp
// takes whole lines.
__device__ __forceinline__ size_t activation_at(int node, int k) {
    return ((size_t)(k / 64) * NODES + node) * 64 + k % 64;
}

#include "large/sums.cuh"
