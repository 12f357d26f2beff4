// A stage's products on one SM, once its operands are in shared memory: sums of every tile of rows, over this SM's K.
//
// Included where the pass has its own `Block`, `Params` and `Shared` (large/block.cuh, draft/block.cuh).
#pragma once

// --- the consumers --------------------------------------------------------------------------------------------------

template <int T, class SlabHere>
__device__ __forceinline__ void multiply_tile(const SlabHere& slab, float (&acc)[OCTETS * 4], u32 (&a)[4][4],
                                              u32 operands) {
#pragma unroll
    for (int term = 0; term < SlabHere::TERMS; term++) {
        slab.template operand<T, 0>(a[0], term);
        slab.template operand<T, 1>(a[1], term);
        slab.template operand<T, 2>(a[2], term);
        slab.template operand<T, 3>(a[3], term);
        products_begin();
#pragma unroll
        for (int j = 0; j < 4; j++)
            multiply_group(acc, a[j], matrix_at<128, 256>(operands + (T * 4 + j) * (STEP_BYTES >> 4)),
                           T + j + term > 0);
        products_queued();
        if (term + 1 < SlabHere::TERMS) products_done<0>();
    }
}

__device__ __forceinline__ void give_back(u32 empty, int lane) {
    __syncwarp();
    if (lane == 0) barrier_arrive(empty);
}

// A slot's superblocks, added to `total`. The next one is loaded while the sums of this one are still made; the slot is
// given back once its last words have been used.
template <int TYPE>
__device__ __forceinline__ void multiply_slot(u32 at, u32 operands, int blocks, u32 empty, int lane,
                                              float (&total)[OCTETS * 4]) {
    typedef Slab<TYPE> Here;
    constexpr int MOST = slot_blocks(TYPE);
    Here slab[MOST];
    slab[0].load(at, lane);
#pragma unroll
    for (int block = 0; block < MOST; block++) {
        if (block >= blocks) break;
        const bool last = block == MOST - 1 || block == blocks - 1;
        slab[block].scales();
        const u32 here = operands + block * (BLOCK_BYTES >> 4);
        float acc[OCTETS * 4], mins[OCTETS * 4];
        u32 a[2][4][4], m[4];
        if constexpr (Here::MINS) {
            slab[block].mins(m);
            products_begin();
            multiply_group(mins, m, matrix_at<128, 256>(here + 16 * (STEP_BYTES >> 4)), 0);
            products_queued();
        }
        multiply_tile<0>(slab[block], acc, a[0], here);
        multiply_tile<1>(slab[block], acc, a[1], here);
        products_done<1>();
        multiply_tile<2>(slab[block], acc, a[0], here);
        if (block + 1 < MOST && !last)
            slab[block + 1 < MOST ? block + 1 : 0].load(at + (block + 1) * 4 * slab_bytes(TYPE), lane);
        products_done<1>();
        multiply_tile<3>(slab[block], acc, a[1], here);
        // an operand below 2 has bit 30 clear: the arrival waits for it, so for the last load
        if (Here::EARLY && last) give_back(empty + (a[1][3][3] >> 30 & 1), lane);
        const float4 f = slab[block].factors();
        products_done<0>();
        if (!Here::EARLY && last) give_back(empty, lane);
#pragma unroll
        for (int i = 0; i < OCTETS * 4; i++) {
            total[i] = fmaf(i & 2 ? f.z : f.x, acc[i], total[i]);
            if (Here::MINS) total[i] = fmaf(i & 2 ? -f.w : -f.y, mins[i], total[i]);
        }
    }
}

template <int TYPE>
__device__ __forceinline__ void multiply_piece(Block& b, const Barriers& bars, const Walk& walk, int group,
                                               float (&total)[OCTETS * 4]) {
    constexpr int AT_ONCE = slot_blocks(TYPE);
    const int count = walk.count(), slots = (count + AT_ONCE - 1) / AT_ONCE, quarter = b.warp & 3;
#pragma unroll 1
    for (int i = (b.slot ^ group) & 1; i < slots; i += 2) {
        int slot = b.slot + i;
        u32 phase = b.slot_phase;
        while (slot >= SLOTS) slot -= SLOTS, phase ^= 1;
        b.begin_wait();
        barrier_wait(bars.full + 8 * slot, phase);
        b.end_wait();
        multiply_slot<TYPE>(b.base + RING_AT + slot * SLOT_BYTES + quarter * slab_bytes(TYPE),
                            (b.base >> 4) + (walk.block + i * AT_ONCE) * (BLOCK_BYTES >> 4),
                            min(AT_ONCE, count - i * AT_ONCE), bars.empty + 8 * slot, b.lane, total);
    }
    b.slot += slots;
    while (b.slot >= SLOTS) b.slot -= SLOTS, b.slot_phase ^= 1;
}

__device__ __forceinline__ void multiply(Block& b, const Run& run) {
    const Barriers bars(b.base);
    const int group = b.warp >> 2;
    __syncwarp();  // for the compiler: descriptors of operands stay in registers of the whole warp only if its lanes
                   // are together
#pragma unroll 1
    for (Walk walk(run); walk.more(); walk.next()) {
        const int type = tile_type(run, walk.tile);
        float total[OCTETS * 4] = {};
        if (has_type(SLAB_Q4_K) && type == SLAB_Q4_K) multiply_piece<SLAB_Q4_K>(b, bars, walk, group, total);
        if (has_type(SLAB_Q5_K) && type == SLAB_Q5_K) multiply_piece<SLAB_Q5_K>(b, bars, walk, group, total);
        if (has_type(SLAB_Q6_K) && type == SLAB_Q6_K) multiply_piece<SLAB_Q6_K>(b, bars, walk, group, total);
        if (has_type(SLAB_Q8_0) && type == SLAB_Q8_0) multiply_piece<SLAB_Q8_0>(b, bars, walk, group, total);
        if (has_type(SLAB_HALF) && type == SLAB_HALF) multiply_piece<SLAB_HALF>(b, bars, walk, group, total);
        b.begin_wait();
        barrier_wait(bars.sums_empty + 8 * b.buffer, b.buffer_phase ^ 1);
        b.end_wait();
        float4* to = (float4*)(b.scratch + SUMS_AT + b.buffer * SUM_BYTES) + b.warp * OCTETS * 32 + b.lane;
#pragma unroll
        for (int o = 0; o < OCTETS; o++)
            to[o * 32] = {total[o * 4], total[o * 4 + 1], total[o * 4 + 2], total[o * 4 + 3]};
        __syncwarp();
        if (b.lane == 0) barrier_arrive(bars.sums_full + 8 * b.buffer);
        if (++b.buffer == SUM_BUFFERS) b.buffer = 0, b.buffer_phase ^= 1;
    }
}

// --- who adds up ----------------------------------------------------------------------------------------------------

// Each warp every second tile of results. Lane 4 g + q: rows g, g + 8, tokens 2 q, 2 q + 1 of every octet.
// They begin with the consumers: an SM that has nothing to do in a stage may not say so before the stage.
__device__ __forceinline__ void reduce(Block& b, int which, const Run& run, u32 phase, u32& count) {
    const Barriers bars(b.base);
    barrier_wait(bars.begun, phase);
    const int g = b.lane >> 2, q = b.lane & 3;
    int result = run.result;
#pragma unroll 1
    for (Walk walk(run); walk.more(); walk.next(), result++, count++) {
        if ((int)(count % REDUCERS) != which) continue;
        const u32 buffer = count % SUM_BUFFERS;
        barrier_wait(bars.sums_full + 8 * buffer, count / SUM_BUFFERS & 1);
        const float4* from = (const float4*)(b.scratch + SUMS_AT + buffer * SUM_BYTES) + b.lane;
        float* out = b.p.sums + (size_t)result * NODES * ROWS + g;
#pragma unroll 1
        for (int quarter = 0; quarter < 4; quarter++)
#pragma unroll
            for (int o = 0; o < OCTETS; o++) {
                const float4 x = from[(quarter * OCTETS + o) * 32], y = from[((quarter + 4) * OCTETS + o) * 32];
                const int token = o * 8 + q * 2;
                float* to = out + token * ROWS + quarter * 16;
                if (token < b.nodes) {
                    const float scale = b.s.scale[token];
                    to[0] = (x.x + y.x) * scale, to[8] = (x.z + y.z) * scale;
                }
                if (token + 1 < b.nodes) {
                    const float scale = b.s.scale[token + 1];
                    to[ROWS] = (x.y + y.y) * scale, to[ROWS + 8] = (x.w + y.w) * scale;
                }
            }
        __syncwarp();
        if (b.lane == 0) barrier_arrive(bars.sums_empty + 8 * buffer);
    }
    fence_gpu();
    __syncwarp();
    if (b.lane == 0) add_release(b.p.counter, 1);
}
