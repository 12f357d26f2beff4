// Who copies weights to the ring, in the order in which they are used: one warp.
//
// Where the chip copies in bulk, a lane asks for a slot at a time, and what the warp does for a slot is what weights
// wait for when memory is fast: beside products each instruction that waits for another one costs ten clocks or more.
// So all numbers are the whole warp's, places of slots are addresses, and the next copy is asked for as soon as one has
// landed. On other chips all lanes copy, sixteen bytes at a time, and have far more to do than that. They keep the
// copier that their programs have been tested with (see the notebook, "The day's figures").
#pragma once
#include "large/ring.cuh"

constexpr int MOST_ON_WAY = IN_FLIGHT < SLOTS ? IN_FLIGHT : SLOTS;  // who is waited for must be the ring's last round

// `Own` copies a slot: `copy(bytes, room)`, where the last one of a part may have fewer bytes than `room`; false when
// nobody waits for weights any more.
template <class Own>
struct Copier {
    const u32 base;
    const u32 stopped;  // where it is said that nobody waits any more; or 0
    const u8* source = nullptr;
    const u64 policy = evict_first();

    // `stop`: where that is, from the beginning of shared memory on.
    __device__ Copier(u32 memory, u32 stop)
        : base((u32)uniform((int)memory)), stopped(stop ? base + stop : 0) {}

    __device__ void read_from(const u8* at) {
        source = (const u8*)((u64)(u32)uniform((int)((u64)at >> 32)) << 32 | (u32)uniform((int)(u64)at));
    }
    // Wait for a slot's consumers. False when they have stopped.
    __device__ __forceinline__ bool emptied(u32 barrier, u32 phase) const {
        Watchdog dog;
        while (!everywhere(barrier_done(barrier, phase))) {
            if (everywhere(stopped && poll_shared(stopped))) return false;
            dog.check();
        }
        return true;
    }
    __device__ __forceinline__ bool stage(const Run& run) {
#pragma unroll 1
        for (Walk walk(run); walk.more(); walk.to_part(run)) {
            const int type = tile_type(run, walk.tile), at_once = slot_blocks_of(type);
            const u32 bytes = 4 * slab_bytes_of(type);
#pragma unroll 1
            for (int left = walk.count_in_part(run); left > 0; left -= at_once)
                if (!static_cast<Own*>(this)->copy(min(left, at_once) * bytes, at_once * bytes)) return false;
        }
        return true;
    }
};

struct BulkCopier : Copier<BulkCopier> {
    const u32 after_last;  // slots are known by their places of 8 bytes from `base` on
    u32 copies = 0;
    u32 end = 0;                // of the last slot
    int empty = RING_BYTES;     // bytes of the ring that are known to be
    u32 slot, oldest, landing;  // the next one, the first that is not known to be empty, the first on its way
    u32 oldest_phase = 0, landing_phase = 0;
    int on_way = 0;

    __device__ explicit BulkCopier(u32 memory, u32 stop = 0)
        : Copier(memory, stop), after_last(base + 8 * SLOTS), slot(base), oldest(base), landing(base) {}

    __device__ __forceinline__ void pass(u32& at, u32& phase) const {
        at += 8;
        if (at == after_last) at = base, phase ^= 1;
    }
    __device__ __forceinline__ bool take_back() {
        const u32 span = load_shared4(oldest + SPANS_AT);
        if (!emptied(oldest + (BARRIERS_AT + 8 * SLOTS), oldest_phase)) return false;
        empty += span;
        pass(oldest, oldest_phase);
        return true;
    }
    __device__ __forceinline__ bool copy(u32 bytes, u32 room) {
        const u32 before = end, at = next_place(end, room), span = room + (at == before ? 0 : RING_BYTES - before);
        // An empty ring has room for any slot, though it may skip more than the rest of it.
        while (empty < (int)min(span, RING_BYTES))
            if (!take_back()) return false;
        const bool lands = MOST_ON_WAY < SLOTS && on_way == MOST_ON_WAY;
        if (lands) barrier_wait(landing + BARRIERS_AT, landing_phase);
        const u32 lane = threadIdx.x & 31;
        copies++;
        if (lane == 0) {
            copy_slot(base + RING_AT + at, source, bytes, slot + BARRIERS_AT, policy);
            if (COPIES_COUNTED) tell(base + ISSUED_AT, copies);
            store_shared(slot + SPANS_AT, span);
        }
        __syncwarp();
        if (lands)
            pass(landing, landing_phase);
        else
            on_way++;
        empty -= span, source += bytes, slot += 8;
        if (slot == after_last) slot = base;
        return true;
    }
    // No copy may be on its way when the block exits.
    __device__ void drain() {
        for (; oldest != slot; pass(oldest, oldest_phase)) barrier_wait(oldest + BARRIERS_AT, oldest_phase);
    }
};

struct LaneCopier : Copier<LaneCopier> {
    const Barriers bars;
    u32 copies = 0;
    u32 end = 0;    // of the last slot
    u32 taken = 0;  // bytes of the ring that are not known to be empty again
    int slot = 0, first_taken = 0, slots_taken = 0, first_on_way = 0, on_way = 0;
    u32 taken_phase = 0, on_way_phase = 0;

    __device__ explicit LaneCopier(u32 memory, u32 stop = 0) : Copier(memory, stop), bars(base) {}

    __device__ void land_one() {
        barrier_wait(bars.full + 8 * first_on_way, on_way_phase);
        if (++first_on_way == SLOTS) first_on_way = 0, on_way_phase ^= 1;
        on_way--;
    }
    __device__ bool take_back() {
        if (!emptied(bars.empty + 8 * first_taken, taken_phase)) return false;
        taken -= load_shared4(base + SPANS_AT + 8 * first_taken), slots_taken--;
        if (++first_taken == SLOTS) first_taken = 0, taken_phase ^= 1;
        return true;
    }
    __device__ bool copy(u32 bytes, u32 room) {
        if (on_way >= MOST_ON_WAY) land_one();
        const u32 before = end, at = next_place(end, room), span = room + (at == before ? 0 : RING_BYTES - before);
        // An empty ring has room for any slot, though it may skip more than the rest of it.
        while (slots_taken > 0 && (taken + span > RING_BYTES || slots_taken == SLOTS))
            if (!take_back()) return false;
        copy_slot(base + RING_AT + at, source, bytes, bars.full + 8 * slot, policy);
        if (COPIES_COUNTED) tell(base + ISSUED_AT, ++copies);
        store_shared(base + SPANS_AT + 8 * slot, span);
        taken += span, slots_taken++, on_way++;
        source += bytes;
        if (++slot == SLOTS) slot = 0;
        return true;
    }
    __device__ void drain() {
        while (on_way > 0) land_one();
    }
};

template <bool BULK>
struct CopierOf {
    typedef LaneCopier Type;
};
template <>
struct CopierOf<true> {
    typedef BulkCopier Type;
};
typedef CopierOf<COPY_LANES == 1>::Type Producer;
