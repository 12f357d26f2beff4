// The weight stream's way into shared memory.
//
// Weights depend on nothing, so the producer never waits for an exchange: it keeps the ring full, straight through
// every stage and token. It holds back only so that few bytes are on their way at a time: packets of activations queue
// behind them.
#pragma once
#include "params.cuh"

struct Ring {
    u32 slots, full, empty;  // shared addresses: RING_SLOTS * SLOT_BYTES, then two barriers a slot
    int slot = 0;
    u32 parity = 0;

    __device__ Ring(u32 base, u32 barriers) : slots(base), full(barriers), empty(barriers + 8 * RING_SLOTS) {}

    __device__ void init() const {
#pragma unroll 1
        for (int i = 0; i < RING_SLOTS; i++) {
            barrier_init(full + 8 * i, COPY_LANES);
            barrier_init(empty + 8 * i, WARPS);
        }
#if __CUDA_ARCH__ >= 900  // the copy engine must see the barriers
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    __device__ void advance() {
        if (++slot == RING_SLOTS) slot = 0, parity ^= 1;
    }
    // consumers, a warp at a time
    __device__ void wait() const { barrier_wait(full + 8 * slot, parity); }
    __device__ u32 data() const { return slots + slot * SLOT_BYTES; }
    __device__ void release() {
        __syncwarp();
        if ((threadIdx.x & 31) == 0) barrier_arrive(empty + 8 * slot);
        advance();
    }
    // several slots at once: `ahead` of the current one
    __device__ int index(int ahead) const { return slot + ahead < RING_SLOTS ? slot + ahead : slot + ahead - RING_SLOTS; }
    __device__ void wait(int ahead) const {
        barrier_wait(full + 8 * index(ahead), slot + ahead < RING_SLOTS ? parity : parity ^ 1);
    }
    __device__ u32 data(int ahead) const { return slots + index(ahead) * SLOT_BYTES; }
    __device__ void release(int count) {
        __syncwarp();
        const int lane = threadIdx.x & 31;
        if (lane < count) barrier_arrive(empty + 8 * index(lane));
        slot = index(count);
        if (slot < count) parity ^= 1;
    }
};

// Stage by stage, how many chunks an SM reads. The consumers walk the same list.
struct StageSizes {
    int delta_in, attention_in, mix_delta, mix_attention, mlp_in, mlp_out, head;

    __device__ explicit StageSizes(int sm) {
        auto mine = [sm](int units) { return first_unit(units, sm + 1) - first_unit(units, sm); };
        delta_in = mine(DELTA_IN_UNITS) * chunks_of(HIDDEN);
        attention_in = mine(ATTENTION_IN_UNITS) * chunks_of(HIDDEN);
        mix_delta = mine(HIDDEN_UNITS) * chunks_of(VALUE_DIM);
        mix_attention = mine(HIDDEN_UNITS) * chunks_of(ATTENTION_DIM);
        mlp_in = mine(MLP_IN_UNITS) * chunks_of(HIDDEN);
        mlp_out = mine(HIDDEN_UNITS) * chunks_of(FFN);
        head = mine(HEAD_UNITS) * chunks_of(HIDDEN);
    }
};

struct Producer {
    Ring ring;
    const u8* source;
    int issued = 0;
    int oldest = 0;  // slot of the oldest copy not yet known to have landed
    u32 oldest_parity = 0;
    int landed = 0;
    volatile const int* stopped;
    const u64 policy = evict_first();

    __device__ Producer(const Ring& r, const volatile int* stop) : ring(r), source(nullptr), stopped(stop) {}

    __device__ void land_one() {
        barrier_wait(ring.full + 8 * oldest, oldest_parity);
        if (++oldest == RING_SLOTS) oldest = 0, oldest_parity ^= 1;
        landed++;
    }
    // Copy a stage's chunks, four a slot. False when the consumers have stopped.
    __device__ bool stage(int chunks) {
#pragma unroll 1
        for (; chunks > 0; chunks -= SLOT_CHUNKS) {
            if (issued - landed == IN_FLIGHT) land_one();
            if (issued >= RING_SLOTS) {
                Watchdog dog;
                while (!barrier_done(ring.empty + 8 * ring.slot, ring.parity ^ 1)) {
                    if (*stopped) return false;
                    dog.check();
                }
            }
            const u32 bytes = min(chunks, SLOT_CHUNKS) * CHUNK_BYTES;
            copy_slot(ring.data(), source, bytes, ring.full + 8 * ring.slot, policy);
            source += bytes;
            ring.advance();
            issued++;
        }
        return true;
    }
    __device__ bool token(const u8* stream, const StageSizes& sizes) {
        source = stream;
#pragma unroll 1
        for (int layer = 0; layer < LAYERS; layer++) {
            const bool recurrent = is_recurrent(layer);
            if (!stage(recurrent ? sizes.delta_in : sizes.attention_in)) return false;
            if (!stage(recurrent ? sizes.mix_delta : sizes.mix_attention)) return false;
            if (!stage(sizes.mlp_in) || !stage(sizes.mlp_out)) return false;
        }
        return stage(sizes.head);
    }
    // No copy may be on its way when the block exits.
    __device__ void drain() {
        while (landed < issued) land_one();
    }
};
