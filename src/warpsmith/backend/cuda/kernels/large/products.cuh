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
    const u32* words;
    const u32* squares;  // of DeltaNet heads, if not null
};

// Items of a warp, eight lots of four lanes each: tokens of a tile of 64 k, or tiles if there is one token.
struct Item {
    int tile, token, octet;
    __device__ Item(const Block& b, int i) {
        const int lot = b.lane >> 2;
        if (NODES == 1)
            tile = b.warp * 8 + lot, token = octet = 0;
        else
            tile = i / OCTETS * WARPS + b.warp, octet = i % OCTETS, token = octet * 8 + lot;
    }
};

// The group's activations as fp16 operands, when they have come. A lane has 16 k of one token in a tile of 64 k.
// `odd`: of every second stage.
__device__ __forceinline__ void prepare_operands(Block& b, const Run& run, Source from, int odd) {
    constexpr int EACH = NODES == 1 ? 1 : GROUP_BLOCKS * 4 * OCTETS / WARPS;
    static_assert(GROUP_BLOCKS % 2 == 0 && GROUP_BLOCKS <= 16, "a warp has as many tiles as any other");
    const int first = run.first_block, tiles = run.blocks * 4;
    const int q = b.lane & 3, column = NODES == 1 ? 0 : b.lane >> 2;
    if (run.count == 0) {  // nothing is read that others would wait for
        if (threadIdx.x == 0) barrier_arrive(Barriers(b.base).begun);
        return;
    }
    if (NODES > 8) {  // most likely all have come when the last node's have
        const u32* last = from.words + activation_at(b.nodes - 1, first * BLOCK_K + min((int)threadIdx.x, tiles * 8 - 1) * 8) / 2;
        for (Watchdog dog; !everywhere(came4(load16(last)));) dog.check();
    }
    uint4 raw[EACH][2];
    for (Watchdog dog;; dog.check()) {
        bool all = true;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const Item item(b, i);
            const u32* at = from.words + activation_at(item.token, first * BLOCK_K + item.tile * 64 + q * 16) / 2;
            const bool live = item.tile < tiles && item.token < b.nodes;
            raw[i][0] = raw[i][1] = uint4{};
            if (live) raw[i][0] = load16(at), raw[i][1] = load16(at + 4);
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) all &= came4(raw[i][0]) & came4(raw[i][1]);
        if (everywhere(all)) break;
    }
    float* head_scale =
        (float*)(b.scratch + OPERAND_BYTES - GROUP_BLOCKS * 2 * NODES * 4);  // read before operands are written
    if (from.squares) {
        const int count = tiles / 2 * b.nodes;
#pragma unroll 1
        for (int at = 0; at < count; at += CONSUMERS) {
            const int i = min(at + (int)threadIdx.x, count - 1), node = i % b.nodes, head = first * 2 + i / b.nodes;
            const u32* words = from.squares + (size_t)node * (VALUE_DIM / 8) + head * 16;
            uint4 v[4];
            for (Watchdog dog;; dog.check()) {
#pragma unroll
                for (int j = 0; j < 4; j++) v[j] = load16(words + j * 4);
                if (everywhere(came4(v[0]) & came4(v[1]) & came4(v[2]) & came4(v[3]))) break;
            }
            float square = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float4 f = floats(v[j]);
                square += (f.x + f.y) + (f.z + f.w);
            }
            head_scale[i / b.nodes * NODES + node] = inverse_root(square / STATE_DIM + EPS);
        }
        b.sync();
    }
    float by[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const Item item(b, i);
        const bool live = item.tile < tiles && item.token < b.nodes;
        by[i] = from.squares && live ? head_scale[item.tile / 2 * NODES + item.token] : 1.0f;
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
#pragma unroll
        for (int step = 1; step < (NODES == 1 ? 32 : 4); step *= 2) most = max(most, __shfl_xor_sync(~0u, most, step));
        if (q == 0) b.s.exponent[b.warp][octet * 8 + column] = most >> 23;
    }
    b.sync();
#pragma unroll
    for (int octet = 0; octet < OCTETS; octet++) {
        const int token = octet * 8 + column;
        u32 exponent = 10;
#pragma unroll
        for (int w = 0; w < WARPS; w++) exponent = max(exponent, b.s.exponent[w][token]);
        const float to_half = __uint_as_float((263 - exponent) << 23);  // the largest becomes 512 to 1024
        if (b.warp == 0 && q == 0 && token < b.nodes) b.s.scale[odd][token] = __uint_as_float((exponent + 15) << 23);
#pragma unroll
        for (int i = octet; i < EACH; i += OCTETS) {
            const int tile = Item(b, i).tile;
            const bool live = tile < tiles;
            if (NODES > 1 && !live) continue;  // all of a warp's lanes, then
            const float full = to_half * by[i], part = full * 0.0625f;
            u8* to = b.scratch + (tile / 4 * 17 + tile % 4 * 4) * STEP_BYTES + octet * 256 + column * 16 + q * 4;
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint4 v = raw[i][j / 2];
                const u32 early = j & 1 ? v.z : v.x, late = j & 1 ? v.w : v.y;
                const u32 low = pack_half(bf16_low(early) * full, bf16_high(early) * full);
                const u32 high = pack_half(bf16_low(late) * part, bf16_high(late) * part);
                if (live) *(u32*)(to + j * STEP_BYTES) = low, *(u32*)(to + j * STEP_BYTES + 128) = high;
                const float2 a = unpack_half(low), c = unpack_half(high);
                sum += fmaf(16.0f, c.x + c.y, a.x + a.y);
            }
            sum += __shfl_xor_sync(~0u, sum, 1);
            if (live && (q & 1) == 0) {  // block 2 (tile mod 4) + q / 2 of the superblock
                u16* sums = (u16*)(b.scratch + (tile / 4 * 17 + 16) * STEP_BYTES + octet * 256 + column * 16) +
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
        barrier_wait(bars.full + 8 * slot, phase);
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
        barrier_wait(bars.sums_empty + 8 * b.buffer, b.buffer_phase ^ 1);
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

// 1 / rms of every node's residual stream, when all SMs have told their part of it.
__device__ __forceinline__ void measure_residual(Block& b, const u32* squares) {
    constexpr int EACH = (SMS + 31) / 32, AT_ONCE = NODES < 8 ? NODES : 8;
#pragma unroll 1
    for (int first = 0; first < b.nodes; first += AT_ONCE) {
        u32 got[AT_ONCE][EACH];
        for (Watchdog dog;; dog.check()) {
            bool all = true;
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++)
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    got[n][i] = 0;
                    if (first + n < b.nodes && i * 32 + b.lane < SMS)
                        got[n][i] = load4(squares + (first + n) * SMS + i * 32 + b.lane);
                }
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++)
#pragma unroll
                for (int i = 0; i < EACH; i++) all &= got[n][i] != NOT_YET;
            if (everywhere(all)) break;
        }
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            float square = 0.0f;
#pragma unroll
            for (int i = 0; i < EACH; i++) square += __uint_as_float(got[n][i]);
            const float inverse = inverse_root(warp_sum(square) / HIDDEN + EPS);
            if (b.lane == 0 && first + n < b.nodes) b.s.inverse[first + n] = inverse;
        }
    }
    __syncwarp();
}

// Each warp every second tile of results; a lane four rows of a token at a time. `squares`: of the residual stream, if
// it is what was multiplied. They begin with the consumers, who know the tokens' scales.
__device__ __forceinline__ void reduce(Block& b, int which, const Run& run, u32& count, u32* sums, u32 tag,
                                       const u32* squares) {
    const Barriers bars(b.base);
    const int odd = tag & 1;
    barrier_wait(bars.begun, odd);
    if (run.count > 0 && squares) measure_residual(b, squares);
    // of sixteen rows' sums, as the products left them: rows g and g + 8 with tokens 2 q, 2 q + 1 are lane 4 g + q's
    const int four = NODES == 1 ? b.lane & 3 : b.lane >> 3, column = NODES == 1 ? 0 : b.lane & 7;
    const int place = (four & 1) * 64 + (four >> 1) * 2 + (column >> 1) * 4 + (column & 1);
    int result = run.result;
#pragma unroll 1
    for (Walk walk(run); walk.more(); walk.next(), result++, count++) {
        if ((int)(count % REDUCERS) != which) continue;
        const u32 buffer = count % SUM_BUFFERS;
        barrier_wait(bars.sums_full + 8 * buffer, count / SUM_BUFFERS & 1);
        const float* from = (const float*)(b.scratch + SUMS_AT + buffer * SUM_BYTES) + place;
        u32* out = sums + (size_t)result * NODES * ROWS + four * 4;
        const auto one = [&](int quarter, int octet) {
            const int token = octet * 8 + column;
            const float scale = token >= b.nodes ? 0.0f : b.s.scale[odd][token] * (squares ? b.s.inverse[token] : 1.0f);
            const float *x = from + (quarter * OCTETS + octet) * 128, *y = x + 4 * OCTETS * 128;
            const float4 v = {(x[0] + y[0]) * scale, (x[16] + y[16]) * scale, (x[32] + y[32]) * scale,
                              (x[48] + y[48]) * scale};
            if (token < b.nodes) publish_sums(out + token * ROWS + quarter * 16, v, tag);
        };
        if (NODES == 1) {
            if (b.lane < 16) one(b.lane >> 2, 0);
        } else {
#pragma unroll 1
            for (int quarter = 0; quarter < 4; quarter++)
#pragma unroll
                for (int octet = 0; octet < OCTETS; octet++) one(quarter, octet);
        }
        __syncwarp();
        if (b.lane == 0) barrier_arrive(bars.sums_empty + 8 * buffer);
    }
}

// All sums of this SM can be seen by who waits for all.
__device__ __forceinline__ void sums_done(Block& b) {
    fence_gpu();
    __syncwarp();
    if (b.lane == 0) add_release(b.p.exchange, 1);
}
