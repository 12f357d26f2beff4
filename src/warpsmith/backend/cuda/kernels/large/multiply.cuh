// A stage's products on one SM, once its operands are in shared memory: sums of every tile of rows, over this SM's K.
//
// Included where the pass has its own `Block`, `Params` and `Shared` (large/block.cuh, draft/block.cuh).
#pragma once

// Where a group of warps is in a part, that is, in all tiles of rows of one type: it has every second superblock. A
// scheduler begins a product only when no other instruction is ready: each of these costs a clock, and there are few.
template <int TYPE>
struct PartWalk {
    static constexpr u32 BYTES = 4 * slab_bytes(TYPE), PLACE = BLOCK_BYTES >> 4;
    static constexpr int SUMS = OCTETS * 4, AT_ONCE = slot_blocks(TYPE);
    Block& b;
    const Barriers bars;
    const int group;
    int left;        // superblocks that this group has still to multiply
    const int rest;  // slots after the last of them that have nothing for this group
    const u32 tile;  // bytes of a tile's operands, as all of these numbers in sixteens
    u32 at;          // where the operands of its superblock are, or would be if the tile had no end
    u32 end;         // the same after the last tile
    const int lane;  // by a shuffle: else it would be asked for again and again, which takes long
    const typename Slab<TYPE>::Places places;
    u32 slot = 0;  // 8 bytes for each slot before the one it has words of, from the beginning of shared memory on
    float total[SUMS] = {};

    __device__ __forceinline__ PartWalk(Block& block, const Walk& walk, int count)
        : b(block), bars(block.base), group(block.warp >> 2), left((count + 1 - group) >> 1),
          rest(AT_ONCE == 2 ? ((count + 1) >> 1) - left : count + 1 - group - 2 * left), tile(walk.blocks * PLACE),
          at((block.base >> 4) + (walk.block + group) * PLACE),
          end((block.base >> 4) + (walk.block + count - 1) * PLACE + tile),
          lane(__shfl_sync(~0u, block.lane, block.lane)),
          places(block.base + RING_AT + (AT_ONCE == 2 ? group : 0) * BYTES + (block.warp & 3) * slab_bytes(TYPE),
                 lane) {
        if (left == 0) at = end;
    }
    __device__ __forceinline__ bool tile_ended() const { return at >= (b.base >> 4) + tile; }
    // Wait for the next slot, and know where it lies.
    __device__ __forceinline__ u32 next_slot() {
        const u32 from = next_place(b.ring_end, AT_ONCE * BYTES);
        slot = b.base + 8 * b.slot;
        b.begin_wait();
        barrier_wait(BARRIERS_AT + slot, b.slot_phase);
        b.end_wait();
        if (++b.slot == SLOTS) b.slot = 0, b.slot_phase ^= 1;
        return from;
    }
    __device__ __forceinline__ void give_back(u32 zero = 0) const {
        arrive_for_warp(slot + (BARRIERS_AT + 8 * SLOTS) + zero, lane);
    }
    // Slots that have nothing for this group.
    __device__ __forceinline__ void pass_slots(int count) {
#pragma unroll 1
        for (; count > 0; count--) {
            next_slot();
            give_back();
        }
    }
    __device__ __forceinline__ void load(Slab<TYPE>& slab) {
        slab.template load<!PRODUCTS_QUEUE>(next_slot(), places);
    }
    __device__ __forceinline__ void end_tile() {
        b.begin_wait();
        barrier_wait(bars.sums_empty + 8 * b.buffer, b.buffer_phase ^ 1);
        b.end_wait();
        float4* to = (float4*)(b.scratch + SUMS_AT + b.buffer * SUM_BYTES) + b.warp * OCTETS * 32 + lane;
#pragma unroll
        for (int o = 0; o < OCTETS; o++)
            to[o * 32] = {total[o * 4], total[o * 4 + 1], total[o * 4 + 2], total[o * 4 + 3]};
        arrive_for_warp(bars.sums_full + 8 * b.buffer, lane);
        if (++b.buffer == SUM_BUFFERS) b.buffer = 0, b.buffer_phase ^= 1;
#pragma unroll
        for (int i = 0; i < SUMS; i++) total[i] = 0.0f;
        at -= tile, end -= tile;
    }
};

// Products are queued and end in order. Four sets of registers hold operands, each of 64 k: those of a superblock are
// made while products of it are on their way; where products do not queue, one set does. The next superblock is loaded
// before the sums of this one are waited for, and what was loaded is looked at when they have been added. SCALED:
// superblocks have scales of their own (see large/operands.cuh).
template <int TYPE, bool SCALED>
struct AnyMultiplier : PartWalk<TYPE> {
    typedef Slab<TYPE> Here;
    typedef PartWalk<TYPE> Part;
    using Part::b, Part::SUMS, Part::AT_ONCE, Part::lane, Part::total, Part::left, Part::at;
    Here slab = {};  // set, since registers that are set on some paths only are live in the whole kernel
    static constexpr int SETS = PRODUCTS_QUEUE ? 4 : 1;
    u32 a[SETS][4][4] = {};

    using Part::Part;
    // Operands of 64 k in one of the sets; with two terms, of one of them.
    template <int NUMBER>
    __device__ __forceinline__ void make() {
        constexpr int T = NUMBER / Here::TERMS, TERM = NUMBER % Here::TERMS;
        u32(&o)[4][4] = a[NUMBER % SETS];
        slab.template operand<T, 0>(o[0], TERM);
        slab.template operand<T, 1>(o[1], TERM);
        slab.template operand<T, 2>(o[2], TERM);
        slab.template operand<T, 3>(o[3], TERM);
    }
    // Mins are multiplied with the second set: before the first, all four warps would wait for each other with nothing
    // else under way.
    template <int NUMBER>
    __device__ __forceinline__ void make_and_queue(float (&acc)[SUMS], float (&mins)[SUMS], u64 operands) {
        if constexpr (NUMBER < 4 * Here::TERMS) {
            constexpr int T = NUMBER / Here::TERMS;
            if constexpr (NUMBER >= SETS) products_done<SETS - 1>();
            make<NUMBER>();
            products_begin();
            if constexpr (Here::MINS && NUMBER == 1) {
                u32 m[4];
                slab.mins(m);
                multiply_group(mins, m, operands + 16 * (STEP_BYTES >> 4), 0);
            }
#pragma unroll
            for (int j = 0; j < 4; j++)
                multiply_group(acc, a[NUMBER % SETS][j], operands + (T * 4 + j) * (STEP_BYTES >> 4), NUMBER + j > 0);
            products_queued();
            make_and_queue<NUMBER + 1>(acc, mins, operands);
        }
    }
    // By powers of two.
    __device__ __forceinline__ void scale_back(float (&acc)[SUMS], float (&mins)[SUMS], u32 operands_at) const {
        const u32 from = b.back_at(operands_at) + (lane & 3) * 8;
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            const float by = load_shared_float(from + i / 4 * 32 + (i & 1) * 4);
            acc[i] *= by;
            if (Here::MINS) mins[i] *= by;
        }
    }
    // A superblock whose words are loaded. Its slot is given back once they have landed, or, where words are loaded one
    // after another, after the last one.
    __device__ __forceinline__ void superblock() {
        const u64 operands = matrix_at<128, 256>(at);
        float acc[SUMS], mins[SUMS];
        // where products queue, it was loaded long before
        if constexpr (Here::EARLY) this->give_back(PRODUCTS_QUEUE ? slab.landed() : zero_after(slab.loaded(), lane));
        make_and_queue<0>(acc, mins, operands);
        if constexpr (!Here::EARLY) this->give_back(zero_after(slab.loaded(), lane));
        const float4 f = slab.factors();
        const u32 operands_at = at;
        at += 2 * Part::PLACE;
        if (--left > 0) {
            if (AT_ONCE == 1) this->pass_slots(1);
            this->load(slab);
        } else {
            at = this->end;
        }
        products_done<0>();
        if constexpr (SCALED) scale_back(acc, mins, operands_at);
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            total[i] = fmaf(i & 2 ? f.z : f.x, acc[i], total[i]);
            if (Here::MINS) total[i] = fmaf(i & 2 ? -f.w : -f.y, mins[i], total[i]);
        }
        slab.scales();
    }
    __device__ __forceinline__ void run() {
        if (left > 0) {
            if (AT_ONCE == 1) this->pass_slots(this->group);
            this->load(slab);
            slab.scales();
        }
#pragma unroll 1
        while (true) {
#pragma unroll 1
            while (this->tile_ended()) this->end_tile();
            if (left == 0) break;
#pragma unroll 1
            do superblock();
            while (!this->tile_ended());
        }
        this->pass_slots(this->rest);
    }
};

template <int TYPE>
using Multiplier = AnyMultiplier<TYPE, false>;
template <int TYPE>
using ScaledMultiplier = AnyMultiplier<TYPE, true>;

// All parts of a run, by what multiplies one.
template <template <int> class By>
__device__ __forceinline__ void multiply_by(Block& b, const Run& run) {
    __syncwarp();  // for the compiler: descriptors of operands stay in registers of the whole warp only if its lanes
                   // are together
#pragma unroll 1
    for (Walk walk(run); walk.more(); walk.to_part(run)) {
        const int type = tile_type(run, walk.tile), count = walk.count_in_part(run);
        if (has_type(SLAB_Q4_K) && type == SLAB_Q4_K) By<SLAB_Q4_K>(b, walk, count).run();
        if (has_type(SLAB_Q5_K) && type == SLAB_Q5_K) By<SLAB_Q5_K>(b, walk, count).run();
        if (has_type(SLAB_Q6_K) && type == SLAB_Q6_K) By<SLAB_Q6_K>(b, walk, count).run();
        if (has_type(SLAB_Q8_0) && type == SLAB_Q8_0) By<SLAB_Q8_0>(b, walk, count).run();
        if (has_type(SLAB_HALF) && type == SLAB_HALF) By<SLAB_HALF>(b, walk, count).run();
    }
}
__device__ __forceinline__ void multiply(Block& b, const Run& run) { multiply_by<Multiplier>(b, run); }

// What the scratch has behind operands may be written again: those who add up have read all sums of this SM.
__device__ __forceinline__ void wait_for_empty_buffers(Block& b) {
#pragma unroll
    for (int i = 0; i < SUM_BUFFERS; i++)
        barrier_wait(Barriers(b.base).sums_empty + 8 * i, (i < b.buffer ? b.buffer_phase : b.buffer_phase ^ 1));
}
