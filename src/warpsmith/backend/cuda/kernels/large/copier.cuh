// Who copies weights to the ring, in the order in which they are used: one warp.
//
// Where the chip copies in bulk, a lane asks for a slot at a time, and what the warp does for a slot is what weights
// wait for when memory is fast: beside products each instruction that waits for another one costs ten clocks or more.
// So all numbers are the whole warp's, places of slots are addresses, and the next copy is asked for as soon as one has
// landed. Where parcels lie is a list that the warp looks up 32 at a time, long before it needs them. On other chips
// all lanes copy, sixteen bytes at a time.
#pragma once
#include "large/ring.cuh"

constexpr int PARCEL_UNIT = 128;  // of a list's numbers, in bytes
constexpr int MOST_ON_WAY = IN_FLIGHT < SLOTS ? IN_FLIGHT : SLOTS;  // who is waited for must be the ring's last round
// Fewer are on their way to a stage that has not begun: what SMs exchange before it would come behind them.
constexpr bool FEWER_BETWEEN = BETWEEN < MOST_ON_WAY && MOST_ON_WAY < SLOTS;

struct Producer {
    const u32 base, after_last;  // slots are known by their places of 8 bytes from `base` on
    const u32 begun;             // what a stage begins with
    const u32 stopped;           // where it is said that nobody waits for weights any more; or 0
    const u8 *stream = nullptr, *source = nullptr;
    const u32* list = nullptr;  // a lane's place in it
    u32 here = 0, ahead = 0;    // of 32 parcels a lane knows one, and one of the next 32
    int parcel = 0;             // which of them is next
    const u64 policy = evict_first();
    u32 copies = 0;
    u32 end = 0;                // of the last slot
    int empty = RING_BYTES;     // bytes of the ring that are known to be
    u32 slot, oldest, landing;  // the next one, the first that is not known to be empty, the first on its way
    u32 oldest_phase = 0, landing_phase = 0, begun_phase = 0;
    int on_way = 0;

    // `stop`: where that is, from the beginning of shared memory on.
    __device__ explicit Producer(u32 memory, u32 stop = 0)
        : base((u32)uniform((int)memory)), after_last(base + 8 * SLOTS), begun(Barriers(base).begun),
          stopped(stop ? base + stop : 0), slot(base), oldest(base), landing(base) {}

    // From here on, parcels of this list.
    __device__ __forceinline__ void follow(const u8* of, const u32* parcels) {
        stream = of, list = parcels + (threadIdx.x & 31);
        here = __ldg(list), ahead = __ldg(list + 32), parcel = 0;
        to_next_parcel();
    }
    __device__ __forceinline__ void to_next_parcel() {
        const bool mine = (threadIdx.x & 31) == parcel;
        const u64 at = (u64)stream + (u64)here * PARCEL_UNIT;
        const u32 low = __reduce_max_sync(~0u, mine ? (u32)at : 0u),
                  high = __reduce_max_sync(~0u, mine ? (u32)(at >> 32) : 0u);
        source = (const u8*)((u64)high << 32 | low);
        parcel++;
        // In a loop: of a condition the compiler would make instructions that wait for `ahead` with every parcel.
#pragma unroll 1
        for (; parcel >= 32; parcel -= 32) here = ahead, list += 32, ahead = __ldg(list + 32);
    }
    __device__ __forceinline__ void pass(u32& at, u32& phase) const {
        at += 8;
        if (at == after_last) at = base, phase ^= 1;
    }
    // Wait for the oldest slot's consumers. False when they have stopped.
    __device__ __forceinline__ bool take_back() {
        const u32 span = load_shared4(oldest + SPANS_AT);
        Watchdog dog;
        while (!everywhere(barrier_done(oldest + (BARRIERS_AT + 8 * SLOTS), oldest_phase))) {
            if (everywhere(stopped && poll_shared(stopped))) return false;
            dog.check();
        }
        empty += span;
        pass(oldest, oldest_phase);
        return true;
    }
    // A slot: the last one of a part may have fewer bytes than `room`. `ends`: a parcel. False when nobody waits for it
    // any more.
    __device__ __forceinline__ bool copy(u32 bytes, u32 room, bool ends) {
        const u32 before = end, at = next_place(end, room), span = room + (at == before ? 0 : RING_BYTES - before);
        // An empty ring has room for any slot, though it may skip more than the rest of it.
        while (empty < (int)min(span, RING_BYTES))
            if (!take_back()) return false;
        if (FEWER_BETWEEN && on_way >= BETWEEN && !everywhere(barrier_seen(begun, begun_phase))) {
#pragma unroll 1
            for (; on_way >= BETWEEN; on_way--) {
                barrier_wait(landing + BARRIERS_AT, landing_phase);
                pass(landing, landing_phase);
            }
        }
        const bool lands = MOST_ON_WAY < SLOTS && on_way == MOST_ON_WAY;
        if (lands) barrier_wait(landing + BARRIERS_AT, landing_phase);
        const u32 lane = threadIdx.x & 31;
        copies++;
        if (lane < COPY_LANES) copy_slot(base + RING_AT + at, source, bytes, slot + BARRIERS_AT, policy);
        if (lane == 0) {
            if (COPIES_COUNTED) tell(base + ISSUED_AT, copies);
            store_shared(slot + SPANS_AT, span);
        }
        __syncwarp();
        if (lands)
            pass(landing, landing_phase);
        else
            on_way++;
        empty -= span, slot += 8;
        if (ends)
            to_next_parcel();
        else
            source += bytes;
        if (slot == after_last) slot = base;
        return true;
    }
    __device__ __forceinline__ bool stage(const Run& run) {
#pragma unroll 1
        for (Walk walk(run); walk.more(); walk.to_part(run)) {
            const int type = tile_type(run, walk.tile), together = parcel_blocks_of(type),
                      at_once = ROOMY ? together : 1, count = walk.count_in_part(run);
            const u32 bytes = 4 * slab_bytes_of(type);
#pragma unroll 1
            for (int left = count; left > 0; left -= at_once) {
                const bool ends = ROOMY || left == 1 || ((count - left + 1) & (together - 1)) == 0;
                if (!copy(min(left, at_once) * bytes, at_once * bytes, ends)) return false;
            }
        }
        begun_phase ^= 1;
        return true;
    }
    // No copy may be on its way when the block exits.
    __device__ void drain() {
        for (; oldest != slot; pass(oldest, oldest_phase)) barrier_wait(oldest + BARRIERS_AT, oldest_phase);
    }
};
