// Weights on their way through shared memory: where each superblock lies, and when. Who copies them: copier.cuh.
//
// A slot of the ring is 64 rows x 1 or 2 superblocks, with the bytes of their type; slots lie one behind another and
// begin again at 0 where one would not fit. Copier and consumers find the same places by the same rule (`next_place`).
// A slot is full when its copy has ended and empty when all eight warps have taken it: two barriers a slot, in turn.
// Included where the pass has its own `Params` and constants (large/block.cuh, draft/block.cuh).
#pragma once

// One lane arrives for its warp, or one thread for all that have met at a barrier. The race checker does not follow
// that: for it every one of them does.
#ifdef EVERY_LANE_ARRIVES
constexpr int LANES_ARRIVE = 32, THREADS_ARRIVE = CONSUMERS;
// A number in shared memory that one thread writes and others poll.
__device__ __forceinline__ void tell(u32 at, u32 n) { atomicExch((u32*)__cvta_shared_to_generic(at), n); }
__device__ __forceinline__ u32 told(u32 at) { return atomicAdd((u32*)__cvta_shared_to_generic(at), 0); }
#else
constexpr int LANES_ARRIVE = 1, THREADS_ARRIVE = 1;
__device__ __forceinline__ void tell(u32 at, u32 n) { store_shared(at, n); }
__device__ __forceinline__ u32 told(u32 at) { return poll_shared(at); }
#endif
__device__ __forceinline__ void arrive_for_warp(u32 barrier, int lane) {
    __syncwarp();
    if (lane < LANES_ARRIVE) barrier_arrive(barrier);
}

struct Barriers {
    u32 full, empty, sums_full, sums_empty, begun, tabled, cleared;
    __device__ explicit Barriers(u32 base)
        : full(base + BARRIERS_AT), empty(full + 8 * SLOTS), sums_full(empty + 8 * SLOTS),
          sums_empty(sums_full + 8 * SUM_BUFFERS), begun(sums_empty + 8 * SUM_BUFFERS), tabled(begun + 8),
          cleared(tabled + 8) {}
    __device__ void init() const {
        for (int i = 0; i < SLOTS; i++)
            barrier_init(full + 8 * i, COPY_LANES), barrier_init(empty + 8 * i, WARPS * LANES_ARRIVE);
        for (int i = 0; i < SUM_BUFFERS; i++) {
            barrier_init(sums_full + 8 * i, SUM_WRITERS * LANES_ARRIVE);
            barrier_init(sums_empty + 8 * i, REDUCERS * LANES_ARRIVE);
        }
        barrier_init(begun, THREADS_ARRIVE), barrier_init(tabled, (REDUCERS + 1) * LANES_ARRIVE);
        barrier_init(cleared, LANES_ARRIVE);
    }
};

// An SM's run of a stage, the same for all its threads.
__device__ __forceinline__ Run uniform_run(const Run& at) {
    return {uniform(at.first_block), uniform(at.blocks), uniform(at.tile),
            uniform(at.block),       uniform(at.count),  uniform(at.result),
            uniform(at.second),      uniform(at.third),  (u32)uniform((int)at.types)};
}
__device__ __forceinline__ Run run_of(const Params& p, int stage) {
    return uniform_run(p.runs[stage * SMS + (int)blockIdx.x]);
}

// The pieces of a run: all superblocks of a tile of rows that are this SM's.
struct Walk {
    int tile, block, blocks, left;
    __device__ explicit Walk(const Run& run) : tile(run.tile), block(run.block), blocks(run.blocks), left(run.count) {}
    __device__ bool more() const { return left > 0; }
    __device__ int count() const { return min(blocks - block, left); }
    __device__ void next() { left -= count(), block = 0, tile++; }
    // A part is all tiles of rows of one type: its end, how many superblocks are left of it, and the way there.
    __device__ int part_end(const Run& run) const {
        return tile < run.second ? run.second : tile < run.third ? run.third : tile + left;
    }
    __device__ int count_in_part(const Run& run) const { return min((part_end(run) - tile) * blocks - block, left); }
    __device__ void to_part(const Run& run) {
        const int passed = count_in_part(run);
        tile = part_end(run), left -= passed, block = 0;
    }
};
__device__ __forceinline__ int tile_type(const Run& run, int tile) {
    return run.types >> (tile < run.second ? 0 : tile < run.third ? 8 : 16) & 255;
}
__device__ __forceinline__ int slab_bytes_of(int type) {
    int bytes = 0;
#pragma unroll
    for (int t = 0; t < SLAB_TYPES; t++)
        if (has_type(t) && t == type) bytes = slab_bytes(t);
    return bytes;
}

__device__ __forceinline__ int parcel_blocks_of(int type) {
    int blocks = 0;
#pragma unroll
    for (int t = 0; t < SLAB_TYPES; t++)
        if (has_type(t) && t == type) blocks = parcel_blocks(t);
    return blocks;
}

// Where the next slot lies in the ring, `end` being that of the one before.
__device__ __forceinline__ u32 next_place(u32& end, u32 bytes) {
    const u32 at = end + bytes <= RING_BYTES ? end : 0;
    end = at + bytes;
    return at;
}
