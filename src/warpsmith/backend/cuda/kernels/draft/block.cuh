// What one thread block (one SM) knows while it runs, and how all of them wait for each other.
//
// A launch is a sequence of steps. Between two steps every SM waits until all have ended the one before: a counter in
// memory, to which each SM adds when what it wrote can be seen. Weights do not wait: their ring fills on through every
// step.
#pragma once
#include "draft/shape.cuh"

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
    // After the last wait: who leaves last leaves no arrivals behind.
    __device__ void leave() {
        if (threadIdx.x == 0 && atomicAdd(p.counter + 1, 1u) == SMS - 1) p.counter[0] = p.counter[1] = 0;
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

// What a tile of results has been summed to: all groups of K, and where SMs share a group's tile, all its parts, in
// order. The stage's table of tiles is in shared memory, where `load_table` put it. GROUPS: as many groups as K has at
// most.
template <int GROUPS>
struct Sums {
    const float* sums;
    const u16* tiles;
    int stride;

    __device__ Sums(const Block& b, const u16* table, const Stage& stage)
        : sums(b.p.sums), tiles(table), stride(stage.tile_rows + 1) {}
    __device__ Sums(const Block& b, int rows) : sums(b.p.sums), tiles(b.s.tiles), stride(rows / ROWS + 1) {}

    // Rows `row` .. + 3, a multiple of 4: every part is asked for at once.
    __device__ float4 at(int node, int row) const {
        const u16* from = tiles + row / ROWS;
        const float4* first = (const float4*)(sums + node * ROWS + row % ROWS);
        int tile[GROUPS], end[GROUPS];
        float4 v[GROUPS][2];
#pragma unroll
        for (int g = 0; g < GROUPS; g++) tile[g] = from[g * stride], end[g] = from[g * stride + 1];
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            v[g][0] = __ldcg(first + (size_t)tile[g] * (NODES * ROWS / 4));
            v[g][1] = tile[g] + 1 < end[g] ? __ldcg(first + (size_t)(tile[g] + 1) * (NODES * ROWS / 4)) : float4{};
        }
        float4 total = {};
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            total = add(add(total, v[g][0]), v[g][1]);
#pragma unroll 1
            for (int i = tile[g] + 2; i < end[g]; i++)
                total = add(total, __ldcg(first + (size_t)i * (NODES * ROWS / 4)));
        }
        return total;
    }
    // The same of every node from `first` on: `use(node, sum)`. Four nodes are asked for at once.
    template <class Use>
    __device__ __forceinline__ void each(int first, int nodes, int row, Use use) const {
        const u16* from = tiles + row / ROWS;
        int tile[GROUPS], end[GROUPS];
#pragma unroll
        for (int g = 0; g < GROUPS; g++) tile[g] = from[g * stride], end[g] = from[g * stride + 1];
#pragma unroll 1
        for (int at = first; at < nodes; at += 4) {
            float4 v[4][GROUPS][2];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const float4* to = (const float4*)(sums + min(at + n, nodes - 1) * ROWS + row % ROWS);
#pragma unroll
                for (int g = 0; g < GROUPS; g++) {
                    v[n][g][0] = __ldcg(to + (size_t)tile[g] * (NODES * ROWS / 4));
                    v[n][g][1] = float4{};
                    if (tile[g] + 1 < end[g]) v[n][g][1] = __ldcg(to + (size_t)(tile[g] + 1) * (NODES * ROWS / 4));
                }
            }
#pragma unroll
            for (int n = 0; n < 4; n++) {
                if (at + n >= nodes) break;
                const float4* to = (const float4*)(sums + (at + n) * ROWS + row % ROWS);
                float4 total = {};
#pragma unroll
                for (int g = 0; g < GROUPS; g++) {
                    total = add(add(total, v[n][g][0]), v[n][g][1]);
#pragma unroll 1
                    for (int i = tile[g] + 2; i < end[g]; i++)
                        total = add(total, __ldcg(to + (size_t)i * (NODES * ROWS / 4)));
                }
                use(at + n, total);
            }
        }
    }
    static __device__ __forceinline__ float4 add(float4 a, float4 b) {
        return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
    }
};

// The stage's table of tiles to shared memory; it is there after the next barrier.
__device__ __forceinline__ void load_table(Block& b, int stage_index) {
    const Stage stage = b.p.stages[stage_index];
    const u32* from = (const u32*)(b.p.tiles + stage.tiles_at);
    const int words = (stage.groups * (stage.tile_rows + 1) + 1) / 2;
#pragma unroll 4
    for (int i = threadIdx.x; i < words; i += CONSUMERS) ((u32*)b.s.tiles)[i] = __ldg(from + i);
}
