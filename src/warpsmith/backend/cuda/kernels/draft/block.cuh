// What one thread block (one SM) knows while it runs, and how all of them wait for each other.
//
// A launch is a sequence of steps. Between two steps every SM waits until all have ended the one before: a counter in
// memory, to which each SM adds when what it wrote can be seen. Sums of products are polled for instead (see
// large/sums.cuh): their last bits are those of the stage's number, counted from the first launch on. What wrote to the
// same place before is less than eight stages older, or an odd number of them. Only the head's are a step. Weights do
// not wait: their ring fills on through every step.
#pragma once
#include "draft/shape.cuh"
#include "large/sums.cuh"

constexpr int ARRIVALS = REDUCERS * SMS;  // of a step

struct Block {
    const Params& p;
    const Request& r;
    Shared& s;
    u8* scratch;
    u32 base;  // address of the shared memory
    int sm = blockIdx.x, warp = uniform(threadIdx.x >> 5), lane = threadIdx.x & 31;
    int nodes;
    u32 steps_done = 0;
    u32 tag = 0;  // of this stage's sums
    // the consumers' places in the ring and in the buffers of sums
    int slot = 0, buffer = 0;
    u32 slot_phase = 0, buffer_phase = 0, ring_end = 0;
    const float* vectors;

    __device__ Block(const Params& params, const Request& request, u8* memory)
        : p(params), r(request), s(*(Shared*)(memory + SHARED_AT)), scratch(memory), base(shared_address(memory)),
          nodes(request.nodes), vectors(params.vectors) {}

    __device__ float sum_factor(int which, int token) const { return s.scale[token] * s.inverse[which][token]; }
    __device__ void sync() const { sync_threads<CONSUMERS>(); }

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
    // This SM is done with a step that its consumers do.
    __device__ void step_done() {
        sync();
        if (threadIdx.x == 0) add_release(p.counter, REDUCERS);
    }
    // After the last wait: who leaves last leaves no arrivals behind, but how many stages there have been.
    __device__ void leave(int stages) {
        if (threadIdx.x == 0 && atomicAdd(p.counter + 1, 1u) == SMS - 1)
            p.counter[0] = p.counter[1] = 0, p.counter[2] += stages;
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

// The stage's table of tiles to shared memory; it is there after the next barrier.
__device__ __forceinline__ void load_table(Block& b, int stage_index) {
    const Stage stage = b.p.stages[stage_index];
    const u32* from = (const u32*)(b.p.tiles + stage.tiles_at);
    const int words = (stage.groups * (stage.tile_rows + 1) + 1) / 2;
#pragma unroll 4
    for (int i = threadIdx.x; i < words; i += CONSUMERS) ((u32*)b.s.tiles)[i] = __ldg(from + i);
}
