// The weight stream's way into shared memory.
//
// Weights depend on nothing, so the producer never waits for an exchange: it keeps the ring full, straight through
// every stage and token. It holds back only so that few bytes are on their way at a time: activations queue behind
// them.
#pragma once
#include "forward/shared.cuh"

// One lane gives a slot back for its warp. The race checker does not follow that: for it every lane does.
#ifdef EVERY_LANE_ARRIVES
constexpr int LANES_ARRIVE = 32;
#else
constexpr int LANES_ARRIVE = 1;
#endif

struct Ring {
    u32 slots, full, empty;  // shared addresses: all slots' bytes, and two barriers a slot
    int slot = 0;
    u32 parity = 0;

    __device__ Ring(u32 base, u32 barriers) : slots(base), full(barriers), empty(barriers + 8 * RING_SLOTS) {}

    __device__ void init() const {
#pragma unroll 1
        for (int i = 0; i < RING_SLOTS; i++) {
            barrier_init(full + 8 * i, COPY_LANES);
            barrier_init(empty + 8 * i, WARPS * LANES_ARRIVE);
        }
    }
    __device__ void advance() {
        if (++slot == RING_SLOTS) slot = 0, parity ^= 1;
    }
    // consumers, a warp at a time: slots `ahead` of the current one
    __device__ int index(int ahead) const {
        return slot + ahead < RING_SLOTS ? slot + ahead : slot + ahead - RING_SLOTS;
    }
    __device__ void wait(int ahead) const {
        barrier_wait(full + 8 * index(ahead), slot + ahead < RING_SLOTS ? parity : parity ^ 1);
    }
    __device__ u32 data(int ahead) const { return slots + index(ahead) * SLOT_BYTES; }
    // `after` is 0 and must come from what was read last: an arrival may overtake loads that are still queued behind
    // the polling of other warps, and then the slot would be filled again before it is read.
    __device__ void release(int count, u32 after) {
        __syncwarp();
#ifdef EVERY_LANE_ARRIVES
        for (int i = 0; i < count; i++) barrier_arrive(empty + 8 * index(i) + after);
#else
        const int lane = threadIdx.x & 31;
        if (lane < count) barrier_arrive(empty + 8 * index(lane) + after);
#endif
        slot = index(count);
        if (slot < count) parity ^= 1;
    }
};

// Copies on their way at a time: what is waited for must be the ring's last round. A tree's activations are held up by
// more than one; beside the LM head, none come. But one at a time, the weights of a mixer's projections come too late
// in BF16: of these and of what comes just before them two are on their way.
constexpr int HEAD_IN_FLIGHT = smaller(IN_FLIGHT, RING_SLOTS), TREE_IN_FLIGHT = 1,
              LATE_IN_FLIGHT = WideFormats::QUANTISED ? TREE_IN_FLIGHT : smaller(2, HEAD_IN_FLIGHT);
__host__ __device__ constexpr int copies_in_flight(int slot) {
    if (slot == HEAD || NODES <= 8) return HEAD_IN_FLIGHT;
    return slot == MLP_OUT || slot == MIX_IN ? LATE_IN_FLIGHT : TREE_IN_FLIGHT;
}

struct Producer {
    Ring ring;
    const u8* source;
    int on_way = 0;  // copies
    int oldest = 0;  // slot of the oldest copy not yet known to have landed
    u32 oldest_parity = 0;
    int* stopped;
    const u64 policy = evict_first();

    __device__ Producer(const Ring& r, int* stop) : ring(r), source(nullptr), stopped(stop) {}

    __device__ void land_one() {
        barrier_wait(ring.full + 8 * oldest, oldest_parity);
        if (++oldest == RING_SLOTS) oldest = 0, oldest_parity ^= 1;
        on_way--;
    }
    // Copy this SM's row tiles of a stage, each in slots of its own. False when the consumers have stopped.
    template <class Stage>
    __device__ bool stage(int layer) {
        typedef FormatsOf<Stage::TILE_ROWS> FormatsHere;
        constexpr int ROWS = Stage::TILE_ROWS, IN_FLIGHT_HERE = copies_in_flight(Stage::SLOT);
        const bool recurrent = Stage::SLOT != HEAD && is_recurrent(layer);
        const StageParts parts = parts_of<Stage>(layer);
        const int who = sm(), chunks = chunks_of(Stage::k(recurrent));
        for (int tile = first_tile<Stage>(layer, recurrent, who), end = first_tile<Stage>(layer, recurrent, who + 1);
             tile < end;) {
            const Run run = parts.run<FormatsHere>(tile, end);
            int tile_bytes, slot_bytes;
            FormatsHere::with(run.format, [&](auto format) {
                tile_bytes = chunks * format.chunk_bytes(ROWS),
                slot_bytes = format.slot_chunks(ROWS) * format.chunk_bytes(ROWS);
            });
            if (!copy(run.tiles, tile_bytes, slot_bytes, IN_FLIGHT_HERE)) return false;
            tile += run.tiles;
        }
        return true;
    }
    __device__ bool copy(int tiles, int tile_bytes, int most, int in_flight) {
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++) {
#pragma unroll 1
            for (int left = tile_bytes; left > 0; left -= most) {
                if (on_way >= in_flight) land_one();
                Watchdog dog;
                while (!barrier_done(ring.empty + 8 * ring.slot, ring.parity ^ 1)) {  // passes in the first round
                    if (atomicAdd(stopped, 0)) return false;
                    dog.check();
                }
                const u32 bytes = min(left, most);
                copy_slot(ring.data(0), source, bytes, ring.full + 8 * ring.slot, policy);
                source += bytes;
                ring.advance();
                on_way++;
            }
        }
        return true;
    }
    // Which block this is. The compiler may not know that it is always the same: it would compute all stages' row tiles
    // before the loop and has no registers to keep them in.
    __device__ static int sm() {
        int index = blockIdx.x;
        asm volatile("" : "+r"(index));
        return index;
    }
    __device__ bool token(const u8* stream) {
        source = stream;
        return every_weight_stage([&](auto stage, int layer) { return this->stage<decltype(stage)>(layer); });
    }
    // No copy may be on its way when the block exits.
    __device__ void drain() {
        while (on_way > 0) land_one();
    }
};
