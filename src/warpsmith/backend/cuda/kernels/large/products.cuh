// Products of packed weights with the activations of all nodes at once.
//
// Maths: sums[row][node] = sum over k of W[row][k] a[node][k], for the rows and the superblocks of K that are this
// SM's. K is cut into groups of at most GROUP_BLOCKS superblocks. A group's (tile of 64 rows, superblock) pairs, tile
// by tile, are dealt to SMs by their bytes; where an SM begins or ends inside a tile, its results are parts of that
// tile. Activations of the group are in shared memory in fp16, times a power of two that is the token's own (of its
// largest value in the group), so nothing overflows and a token's numbers depend on it alone. They stay there while the
// weights pass by. Eight warps are two groups of four: a slot of the ring (64 rows x 1 or 2 superblocks) is one
// group's, in turn; a warp has 16 rows. Sums of a tile stay in registers, then two further warps add both groups' up
// and write them to memory. Bytes: the weights, once; 10 bytes a k and node (read 2, write and read 4); 4 a result.
#pragma once
#include "large/block.cuh"

struct Barriers {
    u32 full, empty, sums_full, sums_empty, begun;
    __device__ explicit Barriers(u32 base)
        : full(base + BARRIERS_AT), empty(full + 8 * SLOTS), sums_full(empty + 8 * SLOTS),
          sums_empty(sums_full + 8 * SUM_BUFFERS), begun(sums_empty + 8 * SUM_BUFFERS) {}
    __device__ void init() const {
        for (int i = 0; i < SLOTS; i++) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, 4);
        for (int i = 0; i < SUM_BUFFERS; i++)
            barrier_init(sums_full + 8 * i, WARPS), barrier_init(sums_empty + 8 * i, 1);
        barrier_init(begun, 1);
    }
};

// An SM's run of a stage, the same for all its threads.
__device__ __forceinline__ Run run_of(const Params& p, int stage) {
    const Run& at = p.runs[stage * SMS + blockIdx.x];
    return {uniform(at.first_block), uniform(at.blocks), uniform(at.tile),
            uniform(at.block),       uniform(at.count),  uniform(at.result),
            uniform(at.second),      uniform(at.third),  (u32)uniform((int)at.types)};
}

// The pieces of a run: all superblocks of a tile of rows that are this SM's.
struct Walk {
    int tile, block, blocks, left;
    __device__ explicit Walk(const Run& run) : tile(run.tile), block(run.block), blocks(run.blocks), left(run.count) {}
    __device__ bool more() const { return left > 0; }
    __device__ int count() const { return min(blocks - block, left); }
    __device__ void next() { left -= count(), block = 0, tile++; }
};
__device__ __forceinline__ int tile_type(const Run& run, int tile) {
    return run.types >> (tile < run.second ? 0 : tile < run.third ? 8 : 16) & 255;
}
__device__ __forceinline__ int slot_blocks_of(int type) { return has_type(SLAB_Q4_K) && type == SLAB_Q4_K ? 2 : 1; }
__device__ __forceinline__ int slab_bytes_of(int type) {
    int bytes = 0;
#pragma unroll
    for (int t = 0; t < SLAB_TYPES; t++)
        if (has_type(t) && t == type) bytes = slab_bytes(t);
    return bytes;
}

// --- the ring's warp ------------------------------------------------------------------------------------------------

constexpr int MOST_ON_WAY = IN_FLIGHT < SLOTS ? IN_FLIGHT : SLOTS;  // what is waited for must be the ring's last round

struct Producer {
    Barriers bars;
    const u8* source;
    u32 base;
    int slot = 0, oldest = 0, on_way = 0;
    u32 phase = 0, oldest_phase = 0;
    volatile int* stopped;
    const u64 policy = evict_first();

    __device__ Producer(u32 at, const Shared& s)
        : bars(at), source(nullptr), base(at), stopped((volatile int*)&s.stopped) {}
    __device__ void land_one() {
        barrier_wait(bars.full + 8 * oldest, oldest_phase);
        if (++oldest == SLOTS) oldest = 0, oldest_phase ^= 1;
        on_way--;
    }
    // False when the consumers have stopped.
    __device__ bool stage(const Run& run) {
#pragma unroll 1
        for (Walk walk(run); walk.more(); walk.next()) {
            const int type = tile_type(run, walk.tile), at_once = slot_blocks_of(type),
                      block_bytes = 4 * slab_bytes_of(type);
#pragma unroll 1
            for (int left = walk.count(); left > 0; left -= at_once) {
                if (on_way >= MOST_ON_WAY) land_one();
                Watchdog dog;
                while (!barrier_done(bars.empty + 8 * slot, phase ^ 1)) {
                    if (*stopped) return false;
                    dog.check();
                }
                const u32 bytes = min(left, at_once) * block_bytes;
                copy_slot(base + RING_AT + slot * SLOT_BYTES, source, bytes, bars.full + 8 * slot, policy);
                source += bytes;
                on_way++;
                if (++slot == SLOTS) slot = 0, phase ^= 1;
            }
        }
        return true;
    }
    __device__ void run(const Params& p, int steps) {
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            source = p.stream + p.stream_start[blockIdx.x];
#pragma unroll 1
            for (int i = 0; i <= 4 * LAYERS; i++) {
                if (!stage(p.runs[i * SMS + blockIdx.x])) {
                    drain();
                    return;
                }
            }
        }
        drain();
    }
    // No copy may be on its way when the block exits.
    __device__ void drain() {
        while (on_way > 0) land_one();
    }
};

// --- activations ----------------------------------------------------------------------------------------------------

// Where a stage's activations come from; DeltaNet outputs have a factor a head.
struct Source {
    const u16* rows;
    bool normed;  // times 1 / rms of the residual stream
    bool heads;   // times 1 / rms of a DeltaNet head
};

// 1 / rms of every node's residual stream.
__device__ __forceinline__ void measure_residual(Block& b) {
#pragma unroll
    for (int i = 0; i < OCTETS; i++) {
        const int node = i * WARPS + b.warp;
        if (node >= b.nodes) break;
        constexpr int EACH = (SMS + 31) / 32;
        float got[EACH], square = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            got[i] = i * 32 + b.lane < SMS ? __ldcg(b.p.x_squares + node * SMS + i * 32 + b.lane) : 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++) square += got[i];
        const float inverse = inverse_root(warp_sum(square) / HIDDEN + EPS);
        if (b.lane == 0) b.s.inverse[node] = inverse;
    }
}

// The group's activations as fp16 operands. A lane has 16 k of one token in a tile of 64 k.
__device__ __forceinline__ void prepare_operands(Block& b, const Run& run, Source from) {
    constexpr int EACH = GROUP_BLOCKS * 4 * OCTETS / WARPS;
    static_assert(GROUP_BLOCKS % 2 == 0, "a warp has as many tiles as any other");
    const int first = run.first_block, tiles = run.blocks * 4;
    const int q = b.lane & 3, in_octet = b.lane >> 2;
    uint4 raw[EACH][2];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int token = i % OCTETS * 8 + in_octet, tile = i / OCTETS * WARPS + b.warp;
        const uint4* at = (const uint4*)(from.rows + activation_at(token, first * BLOCK_K + tile * 64 + q * 16));
        const bool live = tile < tiles && token < b.nodes;
        raw[i][0] = live ? __ldcg(at) : uint4{}, raw[i][1] = live ? __ldcg(at + 1) : uint4{};
    }
    if (from.normed) measure_residual(b);
    float* head_scale =
        (float*)(b.scratch + OPERAND_BYTES - GROUP_BLOCKS * 2 * NODES * 4);  // read before operands are written
    if (from.heads) {
#pragma unroll 1
        for (int i = threadIdx.x; i < tiles / 2 * b.nodes; i += CONSUMERS) {
            const int node = i % b.nodes, head = first * 2 + i / b.nodes;
            const float4* at = (const float4*)(b.p.y_squares + (size_t)node * (VALUE_DIM / 8) + head * 16);
            float square = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float4 v = __ldcg(at + j);
                square += (v.x + v.y) + (v.z + v.w);
            }
            head_scale[i / b.nodes * NODES + node] = inverse_root(square / STATE_DIM + EPS);
        }
        b.sync();
    }
    float by[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int token = i % OCTETS * 8 + in_octet, tile = i / OCTETS * WARPS + b.warp;
        by[i] = from.heads && tile < tiles && token < b.nodes ? head_scale[tile / 2 * NODES + token] : 1.0f;
    }
    // the largest value's exponent
#pragma unroll
    for (int octet = 0; octet < OCTETS; octet++) {
        u32 most = 0;
#pragma unroll
        for (int i = octet; i < EACH; i += OCTETS) {
            u32 top = 0;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const u32 words[4] = {raw[i][half].x, raw[i][half].y, raw[i][half].z, raw[i][half].w};
#pragma unroll
                for (int j = 0; j < 4; j++) top = max(top, max(words[j] & 0x7fffu, words[j] >> 16 & 0x7fffu));
            }
            most = max(most, __float_as_uint(__uint_as_float(top << 16) * by[i]));
        }
        most = max(most, __shfl_xor_sync(~0u, most, 1));
        most = max(most, __shfl_xor_sync(~0u, most, 2));
        if (q == 0) b.s.exponent[b.warp][octet * 8 + in_octet] = most >> 23;
    }
    b.sync();
#pragma unroll
    for (int octet = 0; octet < OCTETS; octet++) {
        const int token = octet * 8 + in_octet;
        u32 exponent = 10;
#pragma unroll
        for (int w = 0; w < WARPS; w++) exponent = max(exponent, b.s.exponent[w][token]);
        const float to_half = __uint_as_float((263 - exponent) << 23);  // the largest becomes 512 to 1024
        if (b.warp == 0 && q == 0 && token < b.nodes)
            b.s.scale[token] = __uint_as_float((exponent + 15) << 23) * (from.normed ? b.s.inverse[token] : 1.0f);
#pragma unroll
        for (int i = octet; i < EACH; i += OCTETS) {
            const int tile = i / OCTETS * WARPS + b.warp;
            if (tile >= tiles) continue;
            const float full = to_half * by[i], part = full * 0.0625f;
            u8* to = b.scratch + (tile / 4 * 17 + tile % 4 * 4) * STEP_BYTES + octet * 256 + in_octet * 16 + q * 4;
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint4 v = raw[i][j / 2];
                const u32 early = j & 1 ? v.z : v.x, late = j & 1 ? v.w : v.y;
                const u32 low = pack_half(bf16_low(early) * full, bf16_high(early) * full);
                const u32 high = pack_half(bf16_low(late) * part, bf16_high(late) * part);
                *(u32*)(to + j * STEP_BYTES) = low, *(u32*)(to + j * STEP_BYTES + 128) = high;
                const float2 a = unpack_half(low), c = unpack_half(high);
                sum += fmaf(16.0f, c.x + c.y, a.x + a.y);
            }
            sum += __shfl_xor_sync(~0u, sum, 1);
            if ((q & 1) == 0) {  // block 2 (tile mod 4) + q / 2 of the superblock
                u16* sums = (u16*)(b.scratch + (tile / 4 * 17 + 16) * STEP_BYTES + octet * 256 + in_octet * 16) +
                            tile % 4 * 2 + q / 2;
                const u32 rounded = pack_half(sum, 0.0f);
                sums[0] = (u16)rounded, sums[64] = (u16)pack_half(sum - unpack_half(rounded).x, 0.0f);
            }
        }
    }
    show_to_products();
    b.sync();
    if (threadIdx.x == 0) barrier_arrive(Barriers(b.base).begun);
}

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
