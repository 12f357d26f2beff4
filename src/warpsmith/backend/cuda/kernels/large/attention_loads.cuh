// What an item of attention has on its way: keys to registers, values and queries to shared memory.
//
// Keys of a step are asked for when those before have been taken, values some steps early. Shared chunks are copied as
// they lie; a node's own rows one by one, since some are drafted. Of two teams (attention_walk.cuh) one has keys, the
// other values.
#pragma once
#include "large/attention_items.cuh"
#include "large/attention_operands.cuh"

// Steps whose values are asked for before the projection is there.
constexpr int FIRST_STEPS = larger(1, VALUE_STAGES - 1);
// Steps ahead of which keys and values are asked into the L2 cache. Fp16 rows of few nodes come as fast without that.
constexpr int EXPECTED = 4;
constexpr bool EXPECTS = !TWO_TEAMS || KEY_TYPE != CACHE_F16 || NODES > 8;

// Warps and threads of a team; groups of 8 keys, or blocks of 32 dimensions, of a warp.
constexpr int TEAM_WARPS = WARPS / TEAMS, TEAM = TEAM_WARPS * 32, EACH = TEAMS;

struct AttentionScratch {
    u8 *values, *queries, *scores, *weights;
    float *peak, *weight, *factor;
    __device__ explicit AttentionScratch(u8* at)
        : values(at), queries(at + QUERIES_AT), scores(at + SCORES_AT), weights(at + WEIGHTS_AT),
          peak((float*)(at + FACTORS_AT)), weight(peak + QUERY_TILES * 16), factor(weight + QUERY_TILES * 16) {}
};

// Queries and weights lie as operands: sixteen bytes of every lane of a product, product after product. Where the pair
// of values is that row `row` of a tile gives to lane q of its four, in the first or second half of K.
constexpr int OPERAND = 512, QUERY_TILE = HEAD_DIM / 16 * OPERAND, WEIGHT_TILE = CHUNK / 16 * OPERAND;
__host__ __device__ constexpr int operand_place(int row, int q, int half) {
    return (row % 8 * 4 + q) * 16 + (half * 2 + row / 8 % 2) * 4;
}

struct AttentionLoads : Item {
    Block& b;
    const AttentionScratch at;
    const u8 *keys, *values, *drafted_keys, *drafted_values;  // of this key head
    // Set, since registers that are set on some paths only are live in the whole kernel.
    KeyWords<KEY_TYPE> next[EACH] = {};

    __device__ __forceinline__ AttentionLoads(Block& block, int layer, const Item& item)
        : Item{uniform(item.kv_head), uniform(item.first_row), uniform(item.rows), uniform(item.part),
               uniform(item.chunk),   uniform(item.stride),    uniform(item.steps), uniform(item.node),
               uniform(item.own_end)},
          b(block), at(block.scratch) {
        const size_t cache = cache_index(b, layer, kv_head);
        keys = b.p.keys + cache * b.p.context * KEY_ROW, values = b.p.values + cache * b.p.context * VALUE_ROW;
        drafted_keys = b.p.pending_keys + cache * MAX_NODES * KEY_ROW;
        drafted_values = b.p.pending_values + cache * MAX_NODES * VALUE_ROW;
    }

    // How many positions of the chunk count: all 64, but for a node's own.
    __device__ __forceinline__ int positions() const { return node < 0 ? CHUNK : min(CHUNK, own_end - chunk * CHUNK); }
    // Of two teams the first has keys, the second values.
    __device__ __forceinline__ bool has_keys() const { return !TWO_TEAMS || b.warp < TEAM_WARPS; }
    __device__ __forceinline__ bool has_values() const { return !TWO_TEAMS || b.warp >= TEAM_WARPS; }
    static __device__ __forceinline__ int in_team() { return threadIdx.x % TEAM; }
    // Where a row of a node's own chunk is. Past the end, any does: its weight is zero.
    template <int ROW>
    __device__ __forceinline__ const u8* own_row(const u8* committed, const u8* drafted, int position) const {
        position = min(position, own_end - 1);
        const int ahead = b.decoding() ? -1 : position - b.length;
        return ahead < 0 ? committed + (size_t)position * ROW : drafted + b.place(b.s.ancestor[node][ahead]) * ROW;
    }
    // Of the i-th of this warp's groups of keys, a lane's position in the chunk.
    __device__ __forceinline__ int key_of(int i) const { return (b.warp * EACH + i) * 8 + (b.lane >> 2); }
    // Keys of a step. Shared chunks are as they lie; a node's own, of which it has one, those of positions from `first`
    // on.
    __device__ __forceinline__ void ask_keys(int step) {
        if (!has_keys()) return;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            next[i].load(keys + (size_t)((chunk + step * stride) * CHUNK + key_of(i)) * KEY_ROW, b.lane & 3);
    }
    __device__ __forceinline__ void ask_own_keys(int first) {
        if (!has_keys()) return;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int position = chunk * CHUNK + key_of(i);
            if (key_of(i) - (b.lane >> 2) < positions() && position >= first)
                next[i].load(own_row<KEY_ROW>(keys, drafted_keys, position), b.lane & 3);
        }
    }
    // Keys and values of a step that is not asked for yet, on their way to the L2 cache.
    __device__ __forceinline__ void expect(int step) const {
        if (step >= steps) return;
        const size_t position = (chunk + step * stride) * CHUNK;  // a chunk that is shared, whole
        const auto each_line = [](const u8* from, int bytes) {
#pragma unroll
            for (int i = 0; i < bytes; i += TEAM * 128)
                if (i + in_team() * 128 < bytes) prefetch(from + i + in_team() * 128);
        };
        if (has_keys()) each_line(keys + position * KEY_ROW, CHUNK * KEY_ROW);
        if (has_values()) each_line(values + position * VALUE_ROW, CHUNK * VALUE_ROW);
    }
    // Values of a step, likewise; a node's own those of positions up to `end`, too, row by row.
    __device__ __forceinline__ void ask_values(int step) const {
        constexpr int AT_ONCE = TEAM * 16, COPIES = (VALUE_BYTES + AT_ONCE - 1) / AT_ONCE;
        if (step >= steps || !has_values()) return;
        const int thread = in_team();
        const u8* from = values + (size_t)((chunk + step * stride) * CHUNK) * VALUE_ROW + thread * 16;
        u8* to = at.values + step % VALUE_STAGES * VALUE_BYTES;
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const int place = VALUE_TYPE == CACHE_F16
                                  ? value_place<CACHE_F16>(thread / 32 + i * TEAM_WARPS, thread % 32)
                                  : (i * TEAM + thread) * 16;
            if (VALUE_BYTES % AT_ONCE == 0 || i < COPIES - 1 || thread < VALUE_BYTES % AT_ONCE / 16)
                copy16(to + place, from + i * AT_ONCE);
        }
    }
    __device__ __forceinline__ void ask_own_values(int first, int end) const {
        constexpr int UNITS = VALUE_ROW / 16;
        if (!has_values()) return;
#pragma unroll 1
        for (int i = in_team(); i < up(positions(), 16) * UNITS; i += TEAM) {
            const int position = chunk * CHUNK + i / UNITS;
            if (position >= first && position < end)
                copy16(at.values + value_place<VALUE_TYPE>(i / UNITS, i % UNITS),
                       own_row<VALUE_ROW>(values, drafted_values, position) + i % UNITS * 16);
        }
    }
    // Ask for what comes first and is committed. The scratch is free.
    __device__ __forceinline__ void begin() {
        if (node < 0) {
            ask_keys(0);
#pragma unroll
            for (int step = 0; step < FIRST_STEPS; step++) ask_values(step);
#pragma unroll 1
            for (int step = 1; step < EXPECTED; step++) expect(step);
        } else if (!TWO_TEAMS) {
            ask_own_keys(0), ask_own_values(0, b.length);
        }
    }
    // And for what was not there yet: rows of the tree, in memory now. In long contexts nobody waits for a node's own.
    __device__ __forceinline__ void go_on() {
        const int first = TWO_TEAMS ? 0 : b.length;
        if (node >= 0) ask_own_keys(first), ask_own_values(first, 0x7fffffff);
#pragma unroll
        for (int step = 0; step < FIRST_STEPS; step++) copies_queued();
    }

    // Of one node every SM makes the queries that it needs itself, and where these positions are the node's own its key
    // and value.
    __device__ __forceinline__ void make_rows(int layer, const Projection& sums) const {
#pragma unroll 1
        for (int task = b.warp; task < GROUP + (node < 0 ? 0 : 2); task += WARPS) {
            const int row = task < GROUP ? kv_head * GROUP + task : HEADS + (task - GROUP) * KV_HEADS + kv_head;
            float v[8];
            make_row(b, sums, 0, row, v);
            if (row >= HEADS)
                keep_row(b, layer, 0, row, v);
            else
                place_query(query_place(task), {pack_half(v[0], v[1]), pack_half(v[2], v[3]), pack_half(v[4], v[5]),
                                                pack_half(v[6], v[7])});
        }
    }
    // Where this lane's eight dimensions of one of a tile's first eight queries are.
    __device__ __forceinline__ u8* query_place(int row) const {
        return at.queries + KeyWords<KEY_TYPE>::operand_of(b.lane) * (2 * OPERAND) +
               operand_place(row, KeyWords<KEY_TYPE>::lane_of(b.lane), 0);
    }
    __device__ __forceinline__ void place_query(u8* to, uint4 v) const {
        constexpr int HALF = operand_place(0, 0, 1);
        *(u32*)to = v.x, *(u32*)(to + HALF) = v.y, *(u32*)(to + OPERAND) = v.z, *(u32*)(to + OPERAND + HALF) = v.w;
    }
    // Of nodes' queries in order, those of this key head: which of all nodes' and heads' it is.
    __device__ __forceinline__ u32 query_at(int row) const {
        const u32 query = first_row + row;
        return query + query / GROUP * (HEADS - GROUP) + kv_head * GROUP;
    }
    // A warp every eighth row, all at once.
    __device__ __forceinline__ void take_queries() const {
        uint4 v[QUERY_TILES * 2] = {};  // set, as `next` is
        u8* to = query_place(b.warp);
#pragma unroll
        for (int i = 0; i < QUERY_TILES * 2; i++)
            if (i / 2 * 16 < rows)
                v[i] = __ldcg((const uint4*)b.p.queries + query_at(min(b.warp + i * WARPS, rows - 1)) * (HEAD_DIM / 8) +
                              b.lane);
#pragma unroll
        for (int i = 0; i < QUERY_TILES * 2; i++)
            if (i / 2 * 16 < rows) place_query(to + i / 2 * QUERY_TILE + operand_place(i % 2 * WARPS, 0, 0), v[i]);
    }
};
