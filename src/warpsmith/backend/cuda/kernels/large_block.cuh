// What one thread block (one SM) knows while it runs, and how all of them wait for each other.
//
// A pass is a sequence of steps. Between two steps every SM waits until all have ended the one before: a counter in memory, to
// which each SM adds when what it wrote can be seen. Weights do not wait: their ring fills on through every step.
#pragma once
#include "large_shape.cuh"

constexpr int ARRIVALS = REDUCERS * SMS;  // of a step

struct Block {
    const Params& p;
    const Request& r;
    Shared& s;
    u8* scratch;
    u32 base;  // address of the shared memory
    int sm = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int nodes, length;
    u32 steps_done = 0;
    // the consumers' places in the ring and in the buffers of sums
    int slot = 0, buffer = 0;
    u32 slot_phase = 0, buffer_phase = 0;
    int deltas = 0;  // DeltaNet layers before this one
    const float* vectors;

    __device__ Block(const Params& params, const Request& request, u8* memory)
        : p(params), r(request), s(*(Shared*)(memory + SHARED_AT)), scratch(memory), base(shared_address(memory)),
          nodes(request.nodes), length(request.length), vectors(params.vectors) {}

    __device__ bool decoding() const { return r.steps > 0; }
    __device__ void sync() const { sync_threads<CONSUMERS>(); }

    // All SMs have done what came before.
    __device__ void wait_for_all() {
        steps_done++;
        if (threadIdx.x == 0) {
            Watchdog dog;
            while ((int)(load_acquire(p.counter) - steps_done * ARRIVALS) < 0) dog.check();
        }
        sync();
    }
    // This SM is done with a step that its consumers do.
    __device__ void step_done() {
        sync();
        if (threadIdx.x == 0) {
            fence_gpu();
            add_release(p.counter, REDUCERS);
        }
    }
    __device__ void mark() {
#ifdef PROFILE
        if (threadIdx.x == 0 && marks < PROFILE) p.profile[sm * PROFILE + marks++] = clock64();
#endif
    }
#ifdef PROFILE
    int marks = 0;
#endif
};

// What a tile of results has been summed to: all groups of K, and where SMs share a group's tile, all its parts, in order.
struct Sums {
    const float* sums;
    const u16* tiles;
    int groups, stride;

    __device__ Sums(const Params& p, const Stage& stage)
        : sums(p.sums), tiles(p.tiles + stage.tiles_at), groups(stage.groups), stride(stage.tile_rows + 1) {}

    __device__ float at(int node, int row) const {
        const u16* from = tiles + row / ROWS;
        float total = 0.0f;
#pragma unroll 3
        for (int g = 0; g < groups; g++) {
            const int first = __ldg(from + g * stride), end = __ldg(from + g * stride + 1);
            for (int tile = first; tile < end; tile++) total += __ldcg(sums + ((size_t)tile * NODES + node) * ROWS + row % ROWS);
        }
        return total;
    }
};
