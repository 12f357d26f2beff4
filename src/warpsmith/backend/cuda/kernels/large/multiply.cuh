// A stage's products on one SM, once its operands are in shared memory: sums of every tile of rows, over this SM's K.
//
// Included where the pass has its own `Block`, `Params` and `Shared` (large/block.cuh, draft/block.cuh).
#pragma once

// --- the consumers --------------------------------------------------------------------------------------------------

// Where a group of warps is in a part, that is, in all tiles of rows of one type: it has every second superblock.
template <int TYPE>
struct PartWalk {
    static constexpr u32 BYTES = 4 * slab_bytes(TYPE);
    static constexpr int SUMS = OCTETS * 4, AT_ONCE = slot_blocks(TYPE);
    Block& b;
    const Barriers bars;
    const int superblocks, in_tile;  // of the part; of a tile
    int index;                       // this group's superblock
    int tile_first, tile_end;        // where its tile begins and ends
    int ended = 0;                   // tiles that end before it, and whose sums are still here
    const int lane;      // by a shuffle: else it would be asked for again and again, which takes long
    const u32 own_part;  // where this warp's words are in a slot
    int slots_seen = 0;
    u32 empty = 0;  // of its slot
    float total[SUMS] = {};

    __device__ __forceinline__ PartWalk(Block& block, const Walk& walk, int count)
        : b(block), bars(block.base), superblocks(count), in_tile(walk.blocks), index(block.warp >> 2),
          tile_first(-walk.block), tile_end(min(walk.count(), count)),
          lane(__shfl_sync(~0u, block.lane, block.lane)),
          own_part(block.base + RING_AT + (AT_ONCE == 2 ? index : 0) * BYTES + (block.warp & 3) * slab_bytes(TYPE)) {
        pass_tiles();
    }
    __device__ __forceinline__ bool more() const { return index < superblocks; }
    __device__ __forceinline__ void pass_tiles() {
        const int before = min(index, superblocks);
        while (tile_end <= before) {
            ended++;
            tile_first = tile_end;
            tile_end = tile_end == superblocks ? superblocks + in_tile : min(tile_end + in_tile, superblocks);
        }
    }
    // Wait for the next slot, and know where it lies.
    __device__ __forceinline__ u32 next_slot() {
        const u32 at = next_place(b.ring_end, AT_ONCE * BYTES);
        b.begin_wait();
        barrier_wait(bars.full + 8 * b.slot, b.slot_phase);
        b.end_wait();
        empty = bars.empty + 8 * b.slot;
        slots_seen++;
        if (++b.slot == SLOTS) b.slot = 0, b.slot_phase ^= 1;
        return at;
    }
    // Slots that have nothing for this group, or nothing more.
    __device__ __forceinline__ void pass_slots(int until) {
        while (slots_seen < until) {
            next_slot();
            arrive_for_warp(empty, lane);
        }
    }
    __device__ __forceinline__ void pass_rest() { pass_slots((superblocks + AT_ONCE - 1) / AT_ONCE); }
    __device__ __forceinline__ void load(Slab<TYPE>& slab) {
        if (AT_ONCE == 1) pass_slots(index);
        slab.load(next_slot() + own_part, lane);
        slab.scales();
    }
    __device__ __forceinline__ void store_total() {
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
    }
    __device__ __forceinline__ void store_ended(int count) {
#pragma unroll 1
        for (; count > 0; count--) store_total();
    }
};

// Products are queued and end in order. Four sets of registers hold operands, each of 64 k: those of a superblock are
// made while products of it are on their way; where products do not queue, one set does. The next superblock is loaded
// before the sums of this one are waited for. SCALED: superblocks have scales of their own (see large/operands.cuh).
template <int TYPE, bool SCALED>
struct AnyMultiplier : PartWalk<TYPE> {
    typedef Slab<TYPE> Here;
    typedef PartWalk<TYPE> Part;
    using Part::b, Part::SUMS, Part::index, Part::lane, Part::empty, Part::total, Part::ended;
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
    template <int NUMBER>
    __device__ __forceinline__ void make_and_queue(float (&acc)[SUMS], u64 operands) {
        if constexpr (NUMBER < 4 * Here::TERMS) {
            constexpr int T = NUMBER / Here::TERMS;
            if constexpr (NUMBER >= SETS) products_done<SETS - 1>();
            make<NUMBER>();
            products_begin();
#pragma unroll
            for (int j = 0; j < 4; j++)
                multiply_group(acc, a[NUMBER % SETS][j], operands + (T * 4 + j) * (STEP_BYTES >> 4), NUMBER + j > 0);
            products_queued();
            make_and_queue<NUMBER + 1>(acc, operands);
        }
    }
    // By powers of two.
    __device__ __forceinline__ void scale_back(float (&acc)[SUMS], float (&mins)[SUMS], int place) const {
        const u32 at = b.back_at(place) + (lane & 3) * 8;
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            const float by = load_shared_float(at + i / 4 * 32 + (i & 1) * 4);
            acc[i] *= by;
            if (Here::MINS) mins[i] *= by;
        }
    }
    // A superblock whose words are loaded. Its slot is given back once they have landed, or, where words are loaded one
    // after another, after the last one.
    __device__ __forceinline__ void superblock() {
        const u64 operands = matrix_at<128, 256>((b.base >> 4) + (index - this->tile_first) * (BLOCK_BYTES >> 4));
        float acc[SUMS], mins[SUMS];
        u32 m[4];
        if constexpr (Here::MINS) {
            slab.mins(m);
            products_begin();
            multiply_group(mins, m, operands + 16 * (STEP_BYTES >> 4), 0);
        }
        if constexpr (Here::EARLY) arrive_for_warp(empty + slab.landed(), lane);
        make_and_queue<0>(acc, operands);
        if constexpr (!Here::EARLY) arrive_for_warp(empty, lane);
        const float4 f = slab.factors();
        const int place = index - this->tile_first;
        index += 2;
        if (this->more()) this->load(slab);
        this->pass_tiles();
        products_done<0>();
        if constexpr (SCALED) scale_back(acc, mins, place);
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            total[i] = fmaf(i & 2 ? f.z : f.x, acc[i], total[i]);
            if (Here::MINS) total[i] = fmaf(i & 2 ? -f.w : -f.y, mins[i], total[i]);
        }
    }
    __device__ __forceinline__ void run() {
        if (this->more()) this->load(slab);
#pragma unroll 1
        while (true) {
            this->store_ended(ended);
            ended = 0;
            if (!this->more()) break;
            superblock();
        }
        this->pass_rest();
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

// --- who adds up ----------------------------------------------------------------------------------------------------

// Each warp every second tile of results. Lane 4 g + q: rows g, g + 8, tokens 2 q, 2 q + 1 of every octet.
// WORDS: what they write is polled for.
template <bool WORDS>
__device__ __forceinline__ void reduce_tiles(Block& b, int which, const Run& run, u32& count, float* sums) {
    const Barriers bars(b.base);
    const auto store = [](float* to, float v) {
        if (WORDS)
            store4(to, __float_as_uint(v));
        else
            *to = v;
    };
    const int g = b.lane >> 2, q = b.lane & 3;
    int result = run.result;
#pragma unroll 1
    for (Walk walk(run); walk.more(); walk.next(), result++, count++) {
        if ((int)(count % REDUCERS) != which) continue;
        const u32 buffer = count % SUM_BUFFERS;
        barrier_wait(bars.sums_full + 8 * buffer, count / SUM_BUFFERS & 1);
        const float4* from = (const float4*)(b.scratch + SUMS_AT + buffer * SUM_BYTES) + b.lane;
        float* out = sums + (size_t)result * NODES * ROWS + g;
#pragma unroll
        for (int o = 0; o < OCTETS; o++) {
            const int token = o * 8 + q * 2;
            const bool first = token < b.nodes, second = token + 1 < b.nodes;
            float by[2] = {};
            if (first) by[0] = b.sum_factor(which, token);
            if (second) by[1] = b.sum_factor(which, token + 1);
            float4 x[4], y[4];
#pragma unroll
            for (int quarter = 0; quarter < 4; quarter++)
                x[quarter] = from[(quarter * OCTETS + o) * 32], y[quarter] = from[((quarter + 4) * OCTETS + o) * 32];
#pragma unroll
            for (int quarter = 0; quarter < 4; quarter++) {
                float* to = out + token * ROWS + quarter * 16;
                const float4 u = x[quarter], v = y[quarter];
                if (first) store(to, (u.x + v.x) * by[0]), store(to + 8, (u.z + v.z) * by[0]);
                if (second) store(to + ROWS, (u.y + v.y) * by[1]), store(to + ROWS + 8, (u.w + v.w) * by[1]);
            }
        }
        arrive_for_warp(bars.sums_empty + 8 * buffer, b.lane);
    }
    __syncwarp();
}
