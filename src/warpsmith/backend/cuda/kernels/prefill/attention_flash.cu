// Attention of some queries over a segment of keys, with an online softmax: means of the values, their maximum and
// weight.
//
// A warpgroup has 64 rows (see attention.cuh); two share the keys of a CTA where there are enough rows. Queries, a tile
// of keys and its values lie in shared memory as four blocks of 64 dimensions, a row 128 bytes, whose eight pieces of
// 16 are swapped by row (exclusive or): as wgmma reads them, keys as rows and values as k. Tiles have 64 keys, and come
// one ahead of their use; rows of blocks come as they are and are widened to fp16 just before. Without wgmma tiles have
// 32 keys and one place each: keys come while values are summed, values while scores are made; rows of blocks are
// widened on their way. Given with -D: GROUPS, warpgroups. Grid: tiles of rows x key heads x segments; those without
// keys end at once. Bytes: 1 KB a key and CTA (f16), from L2.
#include "prefill/attention.cuh"
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "prefill/wgmma_half.cuh"
#else
#include "prefill/mma_half.cuh"
#endif

constexpr int KEYS = QUEUED ? CHUNK : CHUNK / 2, PLACES = QUEUED ? 2 : 1;  // of a tile; for tiles
constexpr int ROWS = GROUPS * 64, THREADS_HERE = GROUPS * 128, TILE_BYTES = KEYS * HEAD_DIM * 2;
constexpr bool WIDENS = KEY_TYPE != CACHE_F16 || VALUE_TYPE != CACHE_F16;
constexpr int staged_bytes(int type) { return type == CACHE_F16 || !QUEUED ? 0 : KEYS * cache_row_bytes(type); }
constexpr int STAGED = staged_bytes(KEY_TYPE) + staged_bytes(VALUE_TYPE);  // a tile of rows of blocks, on their way
constexpr int SHARED_HERE = ROWS * HEAD_DIM * 2 + 2 * PLACES * TILE_BYTES + STAGED;
static_assert(SHARED_HERE <= SHARED_MEMORY_HERE, "");

// Operands in shared memory, swizzled by 128 bytes. Rows of 64 dimensions, 128 bytes each, eight of them 1 KB.
__device__ __forceinline__ u64 operand_at(u32 at, u32 next_block) {
    return 1ull << 62 | (u64)(1024 >> 4) << 32 | (u64)(next_block >> 4) << 16 | (at & 0x3ffff) >> 4;
}

// Rows of 512 bytes into shared memory, 16 bytes a thread at a time; those from `count` on are zeros, and nothing is
// read. A warp copies 128 bytes of four rows at a time.
template <int COUNT>
__device__ __forceinline__ void fetch_rows(u32 to, const u16* from, int count) {
    constexpr int STEP = THREADS_HERE / 128 * 4;  // rows
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, block = warp % 4, first = warp / 4 * 4 + lane / 8;
    const u16* mine = from + first * HEAD_DIM + block * 64 + lane % 8 * 8;
    to += block * (COUNT * 128) + first * 128;
#pragma unroll
    for (int i = 0; i < COUNT / STEP; i++) {
        const int piece = lane % 8 ^ (first + i * STEP) % 8;
        copy16(to + i * STEP * 128 + piece * 16, mine + i * STEP * HEAD_DIM, first + i * STEP < count);
    }
}
// A tile of rows of blocks, as it is.
template <int TYPE>
__device__ __forceinline__ void stage_rows(u32 to, const u8* from, int count) {
    constexpr int PIECES = cache_row_bytes(TYPE) / 16;
#pragma unroll 1
    for (int i = threadIdx.x; i < KEYS * PIECES; i += THREADS_HERE)
        copy16(to + i * 16, from + i * 16, i / PIECES < count);
}
// Eight dimensions a lane, in fp16 where a product reads them.
template <int TYPE>
__device__ __forceinline__ void put_widened(u32 to, int row, uint2 words, u32 scale) {
    const int lane = threadIdx.x % 32;
    store_shared(to + lane / 8 * (KEYS * 128) + row * 128 + (lane % 8 ^ row % 8) * 16,
                 eight_values<TYPE>(words, scale | scale << 16));
}
// All of a staged tile: a warp a row.
template <int TYPE>
__device__ __forceinline__ void widen_rows(u32 to, u32 from) {
    const int lane = threadIdx.x % 32;
#pragma unroll 2
    for (int row = threadIdx.x / 32; row < KEYS; row += THREADS_HERE / 32) {
        const u32 at = from + row * cache_row_bytes(TYPE);
        const u32 d = load_shared2(at + cache_scales_at(TYPE) + 2 * (lane / 4));
        put_widened<TYPE>(
            to, row, TYPE == CACHE_Q8_0 ? load_shared8(at + 8 * lane) : uint2{load_shared4(at + 4 * lane), 0}, d);
    }
}
// The same straight from the cache; rows from `count` on are zeros.
template <int TYPE>
__device__ __forceinline__ void fetch_widened(u32 to, const u8* from, int count) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int row = threadIdx.x / 32; row < KEYS; row += THREADS_HERE / 32) {
        const u8* at = from + row * cache_row_bytes(TYPE);
        uint2 words = {};
        u32 d = 0;
        if (row < count) {
            d = *(const u16*)(at + cache_scales_at(TYPE) + 2 * (lane / 4));
            words = TYPE == CACHE_Q8_0 ? *(const uint2*)(at + 8 * lane) : uint2{*(const u32*)(at + 4 * lane), 0};
        }
        put_widened<TYPE>(to, row, words, d);
    }
}
// A tile of rows of the cache on its way to where a product reads it, or to `staged`.
template <int TYPE>
__device__ __forceinline__ void fetch_tile(u32 to, u32 staged, const u8* from, int count) {
    if constexpr (TYPE == CACHE_F16)
        fetch_rows<KEYS>(to, (const u16*)from, count);
    else if constexpr (QUEUED)
        stage_rows<TYPE>(staged, from, count);
    else
        fetch_widened<TYPE>(to, from, count);
}

// What a CTA has: 64 or 128 rows of a key head, and a segment; long segments come first, and one that has begun but
// lately comes last.
struct Item {
    int kv_head, segment, row0, last_row;
    __device__ __forceinline__ Item(const Queries& s, const Piece& p) {
        const int block = block_number();
        const int tiles = (s.count * GROUP + ROWS - 1) / ROWS;
        kv_head = block / tiles % KV_HEADS;
        const int newest = (int)(gridDim.x - 1) / tiles / KV_HEADS, before = block / tiles / KV_HEADS;
        const bool begun = p.base + p.end - segment_start(newest) < SHORT;
        segment = !begun ? newest - before : before == newest ? newest : newest - 1 - before;
        row0 = s.first * GROUP + block % tiles * ROWS, last_row = min(row0 + ROWS, (s.first + s.count) * GROUP) - 1;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS_HERE, 1)
    attention_flash(const __grid_constant__ Attention a, const __grid_constant__ Piece p,
                    const __grid_constant__ Queries s) {
    extern __shared__ __align__(1024) u8 memory[];
    let_next_start();
    const Item item(s, p);
    const int kv_head = item.kv_head, segment = item.segment, row0 = item.row0, last_row = item.last_row;
    const int first_key = segment_start(segment), newest = p.base + min(last_row / GROUP, p.end - 1);  // positions
    if (first_key > newest) return;
    const int key_tiles = min(segment_start(segment + 1) - first_key, newest + 1 - first_key + KEYS - 1) / KEYS;
    const int whole_tiles = max(p.base + row0 / GROUP - first_key + 1, 0) / KEYS;  // that every query sees all of
    const u32 queries = shared_address(memory), keys = queries + ROWS * HEAD_DIM * 2,
              values = keys + PLACES * TILE_BYTES;
    const u32 first_row = (u32)kv_head * a.context + first_key;  // of the cache
    const int known = p.base + p.end - first_key;                // keys from there on are not
    const u32 staged_keys = values + PLACES * TILE_BYTES, staged_values = staged_keys + staged_bytes(KEY_TYPE);
    const auto fetch_keys = [&](int t) {
        if (t >= key_tiles) return;
        fetch_tile<KEY_TYPE>(keys + t % PLACES * TILE_BYTES, staged_keys,
                             a.keys + (size_t)(first_row + t * KEYS) * KEY_ROW, known - t * KEYS);
    };
    const auto fetch_values = [&](int t) {
        if (t >= key_tiles) return;
        fetch_tile<VALUE_TYPE>(values + t % PLACES * TILE_BYTES, staged_values,
                               a.values + (size_t)(first_row + t * KEYS) * VALUE_ROW, known - t * KEYS);
    };
    const auto fetch_queries = [&] {
        fetch_rows<ROWS>(queries, a.queries + ((size_t)kv_head * p.capacity * 8 * GROUP + row0) * HEAD_DIM,
                         last_row + 1 - row0);
    };
    const int lane = threadIdx.x % 32, group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4,
              g = lane / 4, q = lane % 4;
    const int row = row0 + group * 64 + warp * 16 + g;  // and + 8
    // In the segment.
    const int position[2] = {p.base + row / GROUP - first_key, p.base + (row + 8) / GROUP - first_key};
    float out[HEAD_DIM / 8][4], score[KEYS / 8][4];
    float peak[2] = {MINUS_INFINITY, MINUS_INFINITY}, weight[2] = {0.0f, 0.0f}, factor[2];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) out[i / 4][i % 4] = 0.0f;

    // Weights of a tile's keys, and what keeps the older sums in step.
    const auto soften = [&](int t, u32(&weights)[KEYS / 4]) {
        settle(score);
        if (t >= whole_tiles) {
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++)
                if (t * KEYS + i / 4 * 8 + q * 2 + i % 2 > position[i / 2 % 2]) score[i / 4][i % 4] = MINUS_INFINITY;
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float top = peak[r];
#pragma unroll
            for (int i = 0; i < KEYS / 4; i++) top = fmaxf(top, score[i / 2][r * 2 + i % 2]);
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            const float base = top == MINUS_INFINITY ? 0.0f : top;
            factor[r] = power_of_2(peak[r] - base);
            peak[r] = top;
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < KEYS / 8; i++) {  // of an octet of keys
                const float x = power_of_2(score[i][r * 2] - base), y = power_of_2(score[i][r * 2 + 1] - base);
                sum += x + y;
                weights[i / 2 * 4 + i % 2 * 2 + r] = pack_half(x, y);
            }
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            weight[r] = fmaf(weight[r], factor[r], sum);
        }
    };
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    // The past of a piece is there before the launch before has ended.
    const bool early = first_key + 2 * CHUNK <= p.base + p.lead;
    const auto fetch_first = [&] {
        fetch_keys(0);
        if (!WIDENS) fetch_values(0), fetch_keys(1);
    };
    if (early) fetch_first();
    // Few queries wait for memory: CTAs with the same keys share them.
    if (early && p.end <= CHUNK && threadIdx.x == 0) {
        const int tiles = (s.count * GROUP + ROWS - 1) / ROWS, mine = (row0 - s.first * GROUP) / ROWS;
        const int past = min(segment_start(segment + 1), p.base + p.lead) - first_key;
        const int low = past * mine / tiles, count = past * (mine + 1) / tiles - low;
        prefetch_bulk(a.keys + (size_t)(first_row + low) * KEY_ROW, count * KEY_ROW);
        prefetch_bulk(a.values + (size_t)(first_row + low) * VALUE_ROW, count * VALUE_ROW);
    }
    wait_for_previous();
    fetch_queries();
    if (!early) fetch_first();
    copies_queued();

    // What was fetched is there for wgmma: values of tile `v`, keys of tile `k`.
    const auto have = [&](int v, int k) {
        copies_left<0>();
        if constexpr (WIDENS) {
            __syncthreads();
            if constexpr (VALUE_TYPE != CACHE_F16)
                if (v >= 0) widen_rows<VALUE_TYPE>(values + v % 2 * TILE_BYTES, staged_values);
            if constexpr (KEY_TYPE != CACHE_F16)
                if (k < key_tiles) widen_rows<KEY_TYPE>(keys + k % 2 * TILE_BYTES, staged_keys);
        }
        show_to_copies();
        __syncthreads();
    };
    const auto ask_scores = [&](int t) {
        const u32 tile = keys + t % 2 * TILE_BYTES;
        products_begin();
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++)
            wgmma_scores(score[0], operand_at(queries + k / 4 * (ROWS * 128) + group * 8192 + k % 4 * 32, 16),
                         operand_at(tile + k / 4 * 8192 + k % 4 * 32, 16), k > 0);
        products_queued();
    };
    const auto ask_values = [&](int t, const u32(&weights)[16]) {
        const u32 tile = values + t % 2 * TILE_BYTES;
        products_begin();
#pragma unroll
        for (int k = 0; k < 4; k++) wgmma_values(out[0], weights + k * 4, operand_at(tile + k * 2048, 8192));
        products_queued();
    };
    have(-1, 0);
    if (WIDENS) {
        fetch_values(0), fetch_keys(1);
        copies_queued();
    }
    ask_scores(0);
    products_done<0>();
    u32 share[2][16];  // weights of this tile's keys and of the next one's
    soften(0, share[0]);
    const auto step = [&](int t, const u32(&weights)[16], u32(&next)[16]) {
        have(t, t + 1);
        fetch_values(t + 1), fetch_keys(t + 2);
        copies_queued();
        ask_scores(t + 1);
        ask_values(t, weights);
        products_done<1>();
        soften(t + 1, next);  // while the values are summed
        // Never true. Without a way out here that depends on the weights, ptxas moves all of the softmax behind the
        // wait.
        asm volatile("{ .reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p trap; }" ::"f"(weight[0] + weight[1])
                     : "memory");
        products_done<0>();
        settle(out);
#pragma unroll
        for (int i = 0; i < 128; i++) out[i / 4][i % 4] *= factor[i / 2 % 2];
    };
    const auto last_step = [&](int t, const u32(&weights)[16]) {
        have(t, key_tiles);
        ask_values(t, weights);
        products_done<0>();
        settle(out);
    };
#pragma unroll 1
    for (int t = 0; t < key_tiles; t += 2) {
        if (t + 1 == key_tiles) {
            last_step(t, share[0]);
            break;
        }
        step(t, share[0], share[1]);
        if (t + 2 == key_tiles) {
            last_step(t + 1, share[1]);
            break;
        }
        step(t + 1, share[1], share[0]);
    }
#else
    wait_for_previous();
    fetch_queries(), fetch_keys(0);
    copies_done();
    __syncthreads();
    fetch_values(0);
#pragma unroll 1
    for (int t = 0; t < key_tiles; t++) {
        u32 share[KEYS / 4];
        mma_scores<ROWS, KEYS, HEAD_DIM>(score, memory, group * 64 + warp * 16, memory + ROWS * HEAD_DIM * 2);
        soften(t, share);
        copies_done();
        __syncthreads();  // values are there, and all have read the keys
        fetch_keys(t + 1);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) out[i / 4][i % 4] *= factor[i / 2 % 2];
        mma_values<KEYS, HEAD_DIM>(out, share, memory + ROWS * HEAD_DIM * 2 + TILE_BYTES);
        copies_done();
        __syncthreads();
        fetch_values(t + 1);
    }
#endif
    const Item done(s, p);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int mine = done.row0 + group * 64 + warp * 16 + g + r * 8;
        if (mine > done.last_row) continue;
        const size_t at = (((size_t)done.segment * KV_HEADS + done.kv_head) * s.count - s.first) * GROUP + mine;
        if (q == 0) a.stats[at] = {peak[r], weight[r]};
        const float inverse = weight[r] > 0.0f ? 1.0f / weight[r] : 0.0f;
#pragma unroll
        for (int d = 0; d < DIM_TILES; d++) {
            u32 pair[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                pair[i] = pack_half(out[d * 4 + i][r * 2] * inverse, out[d * 4 + i][r * 2 + 1] * inverse);
            a.parts[(at * DIM_TILES + d) * 4 + q] = {pair[0], pair[1], pair[2], pair[3]};
        }
    }
}
