// A stage's products for one node, by mma.sync, which has wgmma's bits and takes fewer instructions around it: operands
// are loaded, not described, and none of them has to wait for another's registers.
//
// Two warps have a superblock of 64 rows, a warp 32 of them: two slabs, whose chains of products are independent and
// read the same activations. All eight columns of a product are the one node. Its operands of a superblock (see
// `prepare_one`): [pair of steps of 16 k][lane of four][step][half] words, then the sums of 32 k: [lane of
// four][rounded, rests] words. Sums of a superblock go to those who add up: they keep the order in which a build for
// trees adds them, even superblocks of a part and odd ones apart.
#pragma once
#include "large/multiply.cuh"
#include "large/reduce.cuh"

constexpr int ONE_GROUPS = WARPS / 2;

template <int TYPE>
struct OneMultiplier {
    typedef Slab<TYPE> Here;
    static constexpr int AT_ONCE = slot_blocks(TYPE);
    static constexpr u32 BYTES = 4 * slab_bytes(TYPE);
    Block& b;
    const Barriers bars;
    const int superblocks, in_tile;  // of the part; of a tile
    const int group, lane;           // lane: see PartWalk
    int place;                       // of the next superblock in its tile
    int slots_seen = 0;
    const u32 own, own_sums;  // this lane's words of a superblock's operands, and of their sums
    Here slab[2] = {};        // set: see Multiplier

    __device__ __forceinline__ OneMultiplier(Block& block, const Walk& walk, int count)
        : b(block), bars(block.base), superblocks(count), in_tile(walk.blocks), group(block.warp >> 1),
          lane(__shfl_sync(~0u, block.lane, block.lane)), place(walk.block + group), own(kept((lane & 3) * 16, lane)),
          own_sums(kept(512 + (lane & 3) * 8, lane)) {
        while (place >= in_tile) place -= in_tile;
    }
    // So many slots further on, of which the first has its place already.
    __device__ __forceinline__ void pass_slots(int count) {
        slots_seen += count, b.slot += count;
#pragma unroll
        for (int turn = 0; turn < (ONE_GROUPS + SLOTS - 1) / SLOTS; turn++)
            if (b.slot >= SLOTS) b.slot -= SLOTS, b.slot_phase ^= 1;
        for (int i = 1; i < count; i++) next_place(b.ring_end, AT_ONCE * BYTES);
    }
    // Slots that have nothing for this warp.
    __device__ __forceinline__ void skip_to(int slot) {
#pragma unroll 1
        while (slots_seen < slot) next_place(b.ring_end, AT_ONCE * BYTES), pass_slots(1);
    }
    // Who skips slots may be two turns ahead of a barrier, which shows only whether a turn is odd: wait until the next
    // slot's copy has been asked for. IN_ORDER: where a warp comes from its last slot it need not. The copy to that one
    // was asked for when all but MOST_ON_WAY before it had landed, and so had the next slot's last turn.
    static constexpr bool IN_ORDER = SLOTS - ONE_GROUPS / AT_ONCE >= MOST_ON_WAY;
    __device__ __forceinline__ void wait_for_issue() {
        for (Watchdog dog; (int)(b.issued - (b.slots + slots_seen)) <= 0; dog.check())
            b.issued = told(b.base + ISSUED_AT);
    }
    // All lanes say so that a slot needs of its warps.
    __device__ __forceinline__ void give_back(u32 empty, int says) const {
        __syncwarp();
        if (lane < says * LANES_ARRIVE)
            for (int i = 0; i < (LANES_ARRIVE > 1 ? says : 1); i++) barrier_arrive(empty);
    }
    template <int T>
    __device__ __forceinline__ void tile(float (&acc)[2][4], u32 operands) {
        u32 x[8];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 v = load_shared16(operands + own + (2 * T + half) * 64);
            x[half * 4] = v.x, x[half * 4 + 1] = v.y, x[half * 4 + 2] = v.z, x[half * 4 + 3] = v.w;
        }
#pragma unroll
        for (int term = 0; term < Here::TERMS; term++) {
            step<T, 0>(acc, x, term);
            step<T, 1>(acc, x, term);
            step<T, 2>(acc, x, term);
            step<T, 3>(acc, x, term);
        }
    }
    template <int T, int J>
    __device__ __forceinline__ void step(float (&acc)[2][4], const u32 (&x)[8], int term) {
#pragma unroll
        for (int s = 0; s < 2; s++) {
            u32 o[4];
            slab[s].template operand<T, J>(o, term);
            mma_half(acc[s], {o[0], o[1], o[2], o[3]}, x[J * 2], x[J * 2 + 1]);
        }
    }
    // Lane 4 g + q: row g + 8 (q mod 2) of slab q / 2.
    __device__ __forceinline__ void store(const float (&acc)[2][4], const float (&mins)[2][4], float back) {
        const bool second = lane & 2, late = lane & 1;
        const auto own = [&](float a, float b, float c, float d) { return second ? late ? d : c : late ? b : a; };
        const float2 f = Here::factor(second ? slab[1].row_word(late) : slab[0].row_word(late));
        const float4 sums = {own(acc[0][0], acc[0][2], acc[1][0], acc[1][2]),
                             own(mins[0][0], mins[0][2], mins[1][0], mins[1][2]), f.x * back, f.y * back};
        b.begin_wait();
        barrier_wait(bars.sums_empty + 8 * group, b.buffer_phase ^ 1);
        b.end_wait();
        ((float4*)(b.scratch + SUMS_AT + group * SUM_BYTES))[(b.warp & 1) * 32 + lane] = sums;
        arrive_for_warp(bars.sums_full + 8 * group, lane);
        b.buffer_phase ^= 1;
    }
    __device__ __forceinline__ void run() {
        const typename Here::Places places(b.base + RING_AT + (AT_ONCE == 2 ? group & 1 : 0) * BYTES +
                                               (b.warp & 1) * 2 * slab_bytes(TYPE),
                                           lane);
        skip_to(min(group, superblocks) / AT_ONCE);
        if (IN_ORDER && group < superblocks) wait_for_issue();
#pragma unroll 1
        for (int index = group; index < superblocks;) {
            if (!IN_ORDER) wait_for_issue();
            const u32 full = bars.full + 8 * b.slot, empty = bars.empty + 8 * b.slot, phase = b.slot_phase,
                      at = next_place(b.ring_end, AT_ONCE * BYTES), operands = b.base + place * BLOCK_BYTES;
            // a slot is empty when as many have said so as there are warps
            const int says = AT_ONCE == 2 && (index | 1) < superblocks ? WARPS / 4 : WARPS / 2;
            b.begin_wait();
            barrier_wait(full, phase);
            b.end_wait();
            slab[0].template load<true>(at, places), slab[1].template load<true>(at + slab_bytes(TYPE), places);
            place += ONE_GROUPS;
            while (place >= in_tile) place -= in_tile;
            slab[0].scales(), slab[1].scales();
            float acc[2][4] = {}, mins[2][4] = {};
            tile<0>(acc, operands);
            if constexpr (Here::EARLY) give_back(empty + zero_after(slab[1].loaded(), lane), says);
            tile<1>(acc, operands);
            tile<2>(acc, operands);
            if constexpr (Here::MINS) {
                const uint2 v = load_shared8(operands + own_sums);
#pragma unroll
                for (int s = 0; s < 2; s++) {
                    u32 m[4];
                    slab[s].mins(m);
                    mma_half(mins[s], {m[0], m[1], m[2], m[3]}, v.x, v.y);
                }
            }
            tile<3>(acc, operands);
            if constexpr (!Here::EARLY)
                give_back(empty + zero_after(slab[0].loaded() ^ slab[1].loaded(), lane), says);
            store(acc, mins, load_shared_float(operands + BACK_AT));
            index += ONE_GROUPS;
            pass_slots(index < superblocks ? ONE_GROUPS / AT_ONCE : 1);
        }
        skip_to((superblocks + AT_ONCE - 1) / AT_ONCE);
        b.slots += slots_seen;
    }
};

// A stage's sums, of one node: each warp half of a superblock's rows, as the warp that multiplied them has them. A
// superblock is multiplied in 400 clocks, and beside products one instruction that waits for another costs ten or more:
// groups of warps are known where the code is, and nothing is worked out between two superblocks.
// `turns`: whether a group's next superblock is an odd one. `outcome`: one of these, as in a tree.
struct TaggedSum {
    const u32 tag;
    __device__ __forceinline__ void expect(float*) {}
    __device__ __forceinline__ void put(float* to, float sum) const { store4(to, tagged(sum, tag)); }
};
struct OwnSum {
    const bool first;
    float before = 0.0f;
    __device__ __forceinline__ void expect(float* at) {
        if (!first) before = __ldcg(at);
    }
    __device__ __forceinline__ void put(float* to, float sum) const { *to = before + sum; }
};
template <class Outcome>
__device__ __forceinline__ void reduce_one(Block& b, int which, const Run& run, u32 (&turns)[ONE_GROUPS], float by,
                                           float* sums, Outcome outcome) {
    const Barriers bars(b.base);
    const u32 from = b.base + SUMS_AT + (which * 32 + b.lane) * 16;
    float* to = sums + (size_t)run.result * ROWS + which * 32 + (b.lane & 3) * 8 + (b.lane >> 2);
#pragma unroll 1
    for (Walk walk(run); walk.more(); walk.to_part(run)) {
        int left = walk.count_in_part(run), in_tile = min(walk.blocks - walk.block, left);
        float sum[2] = {};  // of even superblocks of the part, and of odd ones
        outcome.expect(to);
#pragma unroll 1
        while (left > 0) {
#pragma unroll
            for (int group = 0; group < ONE_GROUPS; group++) {
                if (left == 0) break;
                barrier_wait(bars.sums_full + 8 * group, turns[group]);
                turns[group] ^= 1;
                const uint4 v = load_shared16(from + group * SUM_BYTES);
                float& total = sum[group % 2];
                total = fmaf(__uint_as_float(v.z), __uint_as_float(v.x), total);
                total = fmaf(-__uint_as_float(v.w), __uint_as_float(v.y), total);
                arrive_for_warp(bars.sums_empty + 8 * group, b.lane);
                left--;
                if (--in_tile == 0) {
                    outcome.put(to, (sum[0] + sum[1]) * by);
                    sum[0] = sum[1] = 0.0f, to += ROWS, in_tile = min(walk.blocks, left);
                    if (left > 0) outcome.expect(to);
                }
            }
        }
    }
    __syncwarp();
}
