// One walk over chunks of keys and values, for some rows of queries of one key head.
//
// A step takes a chunk of 64 positions: scores (a warp has 8 keys), softmax so far (eight lanes have a query), sums (a
// warp has 32 dimensions). Scores of the next chunk are made beside the softmax. Keys of the chunk after that are on
// their way to registers, values of the next steps to shared memory. In long contexts (TWO_TEAMS) four warps have keys,
// 16 of a chunk each, and four have values, 64 dimensions each, a chunk later, so that either team works while the
// other waits. A query's numbers depend on it and its own keys alone, whatever else is in its tile and whoever makes
// them.
#pragma once
#include "large/attention_operands.cuh"
#include "large/attention_rows.cuh"

static_assert(HEAD_DIM == 32 * WARPS && CHUNK == 8 * WARPS, "a warp has 32 dimensions, or 8 keys");

// Chunks before the last two of a query at a position: those that end before position - 63.
__device__ __forceinline__ int early_chunks(int position) {
    return position < CHUNK - 1 ? 0 : (position - (CHUNK - 1)) / CHUNK;
}

// Steps whose values are asked for before the projection is there.
constexpr int FIRST_STEPS = larger(1, VALUE_STAGES - 1);
// Steps ahead of which keys and values are asked into the L2 cache. Fp16 rows of few nodes come as fast without that.
constexpr int EXPECTED = 4;
constexpr bool EXPECTS = !TWO_TEAMS || KEY_TYPE != CACHE_F16 || NODES > 8;

// Warps and threads of a team; groups of 8 keys, or blocks of 32 dimensions, of a warp.
constexpr int TEAM_WARPS = WARPS / TEAMS, TEAM = TEAM_WARPS * 32, EACH = TEAMS;
// One node's queries, of which a tile has half, stay in registers.
constexpr bool HELD = POLLED && TWO_TEAMS;
enum { SCORES_MADE = 8, VALUES_HERE, WEIGHTS_MADE, WEIGHTS_USED = WEIGHTS_MADE + 2 };  // barriers; the last two twice

// What there is to do for a layer, the same for all its SMs: items, each for a key head.
__device__ __forceinline__ ItemCounts count_items(const Block& b) {
    constexpr int AT_ONCE = QUERY_TILES * 16;
    const int deepest = b.length + b.s.deepest;
    ItemCounts n;
    n.committed = b.length / CHUNK, n.chunks = early_chunks(deepest), n.splits = min(n.chunks, SPLITS);
    n.batches = (b.nodes * GROUP + AT_ONCE - 1) / AT_ONCE;
    // for some nodes the last of the committed chunks is not early, but a part
    const int late = early_chunks(b.length) < n.committed;
    n.shared = (n.splits + late) * n.batches * KV_HEADS, n.whole = deepest / CHUNK - n.committed + 1;
    n.own_at = n.shared;
    // a node alone: SMs that have the late chunk have its own, too, rather than those with many chunks
    if (b.nodes == 1 && n.shared <= SMS && n.shared + KV_HEADS > SMS) n.own_at += SMS - KV_HEADS;
    n.all = n.own_at + b.nodes * n.whole * KV_HEADS;
    return n;
}
// Item number `number` of a layer: first splits of the early chunks and the late one (batches of queries for the same
// keys at the same time), then nodes' own. Some have no steps.
__device__ __forceinline__ Item item_of(const Block& b, const ItemCounts& items, int number) {
    const bool shared = number < items.shared;
    const int own = max(number - items.own_at, 0), pair = (u32)number / (u32)items.batches,
              batch = number - pair * items.batches, split = pair / KV_HEADS;
    const bool late = shared && split == items.splits;
    Item item;
    item.node = shared ? -1 : min((int)((u32)own / (u32)(KV_HEADS * items.whole)), b.nodes - 1);
    item.own_end = shared ? 0 : node_position(b, item.node) + 1;
    item.kv_head = shared ? pair % KV_HEADS : own % KV_HEADS;
    item.first_row = shared ? batch * (QUERY_TILES * 16) : item.node * GROUP;
    item.rows = shared ? min(QUERY_TILES * 16, b.nodes * GROUP - item.first_row) : GROUP;
    item.chunk = late     ? items.committed - 1
                 : shared ? split
                          : items.committed + own / KV_HEADS - item.node * items.whole;
    item.part = late ? SPLITS : shared ? split : SPLITS + item.chunk - early_chunks(item.own_end - 1);
    item.stride = late ? items.committed : SPLITS;
    item.steps = late     ? 1
                 : shared ? (items.chunks - item.chunk + SPLITS - 1) / SPLITS
                          : number >= items.own_at && item.chunk * CHUNK < item.own_end;
    return item;
}

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
// Where four keys' scores are: lanes that load together meet different banks.
__device__ __forceinline__ int score_place(int row, int four) { return row * (CHUNK * 4) + (four ^ (row & 7)) * 16; }

struct KeyWalk : Item {
    Block& b;
    const AttentionScratch at;
    const u8 *keys, *values, *drafted_keys, *drafted_values;  // of this key head
    // Set, since registers that are set on some paths only are live in the whole kernel.
    KeyWords<KEY_TYPE> next[EACH] = {};

    __device__ __forceinline__ KeyWalk(Block& block, int layer, const Item& item)
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

    // Of the keys that have come; the next are asked for. A warp's groups of keys share what is loaded of a query.
    typedef uint2 Held[HELD ? HEAD_DIM / 16 : 1];
    __device__ __forceinline__ void scores(int step, int tiles, const Held& held = {}) {
        const int g = b.lane >> 2, q = b.lane & 3;
        uint4 key[EACH][8];
        if (b.warp * (EACH * 8) >= positions()) return;
#pragma unroll
        for (int i = 0; i < EACH; i++) next[i].operands(key[i], q);
        if (KEY_TYPE != CACHE_F16 && step + 1 < steps) ask_keys(step + 1);
#pragma unroll 1
        for (int tile = 0; tile < (QUERY_TILES == 1 ? 1 : tiles); tile++) {
            const auto query = [&](int i) -> uint4 {
                if constexpr (HELD) return {held[i].x, 0, held[i].y, 0};
                return *(const uint4*)(at.queries + tile * QUERY_TILE + b.lane * 16 + i * OPERAND);
            };
            float s[EACH][4][4] = {};
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const uint4 even = query(2 * j), odd = query(2 * j + 1);
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    mma_half(s[i][j % 4], even, key[i][j].x, key[i][j].y);
                    mma_half(s[i][j % 4], odd, key[i][j].z, key[i][j].w);
                }
            }
            u8* to = at.scores + (tile * 2 + (step & 1)) * SCORE_TILE + q % 2 * 8;
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const auto all = [&](int k) { return (s[i][0][k] + s[i][1][k]) + (s[i][2][k] + s[i][3][k]); };
                u8* here = to + score_place(g, (b.warp * EACH + i) * 2 + q / 2);
                *(float2*)here = {all(0), all(1)}, *(float2*)(here + 8 * CHUNK * 4) = {all(2), all(3)};
            }
        }
        if (KEY_TYPE == CACHE_F16 && step + 1 < steps) ask_keys(step + 1);  // the operands are the words
    }

    // Scores become weights. Lane 4 u + r has row r of its warp's four, keys 4 u .. + 3 of every 32. A warp has every
    // TEAM_WARPS-th four of COUNT rounds, all at once, since each is little but waiting.
    template <int COUNT>
    __device__ __forceinline__ void soften(int step) const {
        const int u = b.lane >> 2, here = chunk + step * stride, first = here * CHUNK, turn = step % TEAMS;
        int row[COUNT];
        float v[COUNT][2][4], peak[COUNT], weight[COUNT], before[COUNT], now[COUNT];
#pragma unroll
        for (int p = 0; p < COUNT; p++) {
            row[p] = min((b.warp + p * TEAM_WARPS) * 4 + (b.lane & 3), QUERY_TILES * 16 - 1);
            const u8* scores = at.scores + (row[p] / 16 * 2 + (step & 1)) * SCORE_TILE;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float4 four = *(const float4*)(scores + score_place(row[p] % 16, u + 8 * i));
                v[p][i][0] = four.x, v[p][i][1] = four.y, v[p][i][2] = four.z, v[p][i][3] = four.w;
            }
            before[p] = at.peak[row[p]];
        }
        if (node >= 0)
#pragma unroll
            for (int p = 0; p < COUNT; p++)
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        if (first + (u + 8 * i) * 4 + j >= own_end) v[p][i][j] = MINUS_INFINITY;
#pragma unroll
        for (int p = 0; p < COUNT; p++)
            peak[p] = fmaxf(fmaxf(fmaxf(v[p][0][0], v[p][0][1]), fmaxf(v[p][0][2], v[p][0][3])),
                            fmaxf(fmaxf(v[p][1][0], v[p][1][1]), fmaxf(v[p][1][2], v[p][1][3])));
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2)
#pragma unroll
            for (int p = 0; p < COUNT; p++) peak[p] = fmaxf(peak[p], __shfl_xor_sync(~0u, peak[p], lanes));
        uint2 packed[COUNT][2];
#pragma unroll
        for (int p = 0; p < COUNT; p++) {
            now[p] = fmaxf(before[p], peak[p]), weight[p] = 0.0f;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                packed[p][i] = {pack_half(power_of_2(v[p][i][0] - now[p]), power_of_2(v[p][i][1] - now[p])),
                                pack_half(power_of_2(v[p][i][2] - now[p]), power_of_2(v[p][i][3] - now[p]))};
                const float2 a = unpack_half(packed[p][i].x), c = unpack_half(packed[p][i].y);
                weight[p] += (a.x + a.y) + (c.x + c.y);
            }
        }
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2)
#pragma unroll
            for (int p = 0; p < COUNT; p++) weight[p] += __shfl_xor_sync(~0u, weight[p], lanes);
        __syncwarp();  // all have read the peak
#pragma unroll
        for (int p = 0; p < COUNT; p++) {
            if ((b.warp + p * TEAM_WARPS) * 4 >= rows) break;
            bool sees = true;  // nodes of one tile may share different chunks
            if (node < 0) {
                const int early =
                    early_chunks(node_position(b, min(first_row + row[p], first_row + rows - 1) / GROUP));
                sees = part == SPLITS ? here == early : here < early;
            }
#pragma unroll
            for (int i = 0; i < 2;
                 i++) {  // keys 4 (u + 8 i): product (u + 8 i) / 4, half u / 2 % 2, lanes u % 2 * 2, + 1
                u8* to = at.weights + (row[p] / 16 * TEAMS + turn) * WEIGHT_TILE + (u / 4 + 2 * i) * OPERAND +
                         operand_place(row[p], u % 2 * 2, u / 2 % 2);
                *(u32*)to = sees ? packed[p][i].x : 0, *(u32*)(to + 16) = sees ? packed[p][i].y : 0;
            }
            if (u == 0) {
                const float factor = power_of_2(before[p] - now[p]);  // 0 at first
                at.factor[turn * (QUERY_TILES * 16) + row[p]] = sees ? factor : 1.0f;
                if (sees)
                    at.peak[row[p]] = now[p], at.weight[row[p]] = fmaf(at.weight[row[p]], factor, weight[p]);
            }
        }
    }
    __device__ __forceinline__ void softmax(int step) const {
        constexpr int AT_ONCE = TEAM_WARPS * 4, ROUNDS = (QUERY_TILES * 16 + AT_ONCE - 1) / AT_ONCE;
        if (ROUNDS > 1 && (TWO_TEAMS || rows > AT_ONCE))
            soften<ROUNDS>(step);
        else if (b.warp * 4 < rows)
            soften<1>(step);
    }

    typedef float SumOf[QUERY_TILES][EACH][4][4];
    // The first of this warp's blocks of 32 dimensions.
    __device__ __forceinline__ int first_block() const { return (b.warp - (WARPS - TEAM_WARPS)) * EACH; }

    // WHOLE: of all tiles, and all positions count, so that nothing is asked in between.
    template <bool WHOLE>
    __device__ __forceinline__ void add_values(SumOf& sum, int step, int tiles) const {
        const int g = b.lane >> 2, turn = step % TEAMS;
        const u8* rows_at = at.values + step % VALUE_STAGES * VALUE_BYTES;
        const float* factors = at.factor + turn * (QUERY_TILES * 16) + g;
        u32 scales[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) scales[i] = value_scales<VALUE_TYPE>(rows_at, first_block() + i, b.lane);
#pragma unroll
        for (int tile = 0; tile < QUERY_TILES; tile++) {
            if (!WHOLE && tile >= tiles) break;
            const float low = factors[tile * 16], high = factors[tile * 16 + 8];
#pragma unroll
            for (int i = 0; i < EACH; i++)
#pragma unroll
                for (int o = 0; o < 4; o++) {
                    float(&v)[4] = sum[tile][i][o];
                    v[0] *= low, v[1] *= low, v[2] *= high, v[3] *= high;
                }
        }
#pragma unroll(WHOLE ? 4 : 1)
        for (int from = 0; from < (WHOLE ? CHUNK : positions()); from += 16) {
            u32 v[EACH][4][2];
#pragma unroll
            for (int i = 0; i < EACH; i++)
                value_operands<VALUE_TYPE>(v[i], rows_at, scales[i], from, first_block() + i, b.lane);
#pragma unroll
            for (int tile = 0; tile < QUERY_TILES; tile++) {
                if (!WHOLE && tile >= tiles) break;
                const uint4 weights = *(const uint4*)(at.weights + (tile * TEAMS + turn) * WEIGHT_TILE +
                                                      from / 16 * OPERAND + b.lane * 16);
#pragma unroll
                for (int i = 0; i < EACH; i++)
#pragma unroll
                    for (int o = 0; o < 4; o++) mma_half(sum[tile][i][o], weights, v[i][o][0], v[i][o][1]);
            }
        }
    }
    __device__ __forceinline__ void add_values(SumOf& sum, int step, int tiles) const {
        if (node < 0 && tiles == QUERY_TILES)
            add_values<true>(sum, step, tiles);
        else
            add_values<false>(sum, step, tiles);
    }

    __device__ __forceinline__ void write_sums(const SumOf& sum, int tiles) const {
        const int g = b.lane >> 2, q = b.lane & 3;
#pragma unroll
        for (int tile = 0; tile < QUERY_TILES; tile++) {
            if (tile >= tiles) break;
#pragma unroll
            for (int upper = 0; upper < 2; upper++) {
                const int row = tile * 16 + upper * 8 + g;
                if (row >= rows || at.weight[row] == 0.0f) continue;  // none of its positions
                const size_t to = (size_t)query_at(row) * PARTS + part;
                const float inverse = reciprocal(fmaxf(at.weight[row], 1e-30f));
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    float first[4], second[4];
#pragma unroll
                    for (int o = 0; o < 4; o++)
                        first[o] = sum[tile][i][o][upper * 2] * inverse,
                        second[o] = sum[tile][i][o][upper * 2 + 1] * inverse;
                    u32* block = b.p.parts + to * (HEAD_DIM / 2) + (first_block() + i) * 16;
                    store_sums<VALUE_TYPE>(block, first, second, q);
                }
            }
        }
    }
    __device__ __forceinline__ void write_stats() const {
        const int row = threadIdx.x;
        if (row < rows && at.weight[row] != 0.0f)
            b.p.part_stats[(size_t)query_at(row) * PARTS + part] = {at.peak[row], at.weight[row]};
    }

    // After `go_on`, when the queries are there.
    __device__ __forceinline__ void run() {
        const int tiles = (rows + 15) / 16;
        if (threadIdx.x < tiles * 16) at.peak[threadIdx.x] = MINUS_INFINITY, at.weight[threadIdx.x] = 0.0f;
        if constexpr (TWO_TEAMS) {
            if (has_keys())
                weigh(tiles);
            else
                add_up(tiles);
        } else {
            walk(tiles);
        }
    }
    __device__ __forceinline__ void walk(int tiles) {
        SumOf sum = {};
        scores(0, tiles);
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            b.sync();
            if (step + VALUE_STAGES > FIRST_STEPS) ask_values(step + VALUE_STAGES - 1);
            copies_queued();
            expect(step + EXPECTED);
            softmax(step);
            if (step + 1 < steps) scores(step + 1, tiles);
            copies_left<VALUE_STAGES - 1>();
            b.sync();
            add_values(sum, step, tiles);
        }
        write_sums(sum, tiles);
        write_stats();
        copies_done();
    }
    // The teams. Weights of two chunks are kept, and so are scores: whoever makes some has waited for all others of the
    // team since those two steps before were used.
    __device__ __forceinline__ void weigh(int tiles) {
        Held held = {};
        if constexpr (HELD)
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 16; i++) {
                const u32* query = (const u32*)(at.queries + i * OPERAND) + b.lane * 4;
                held[i] = {query[0], query[2]};
            }
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            scores(step, tiles, held);
            if (EXPECTS) expect(step + EXPECTED);
            sync_some<TEAM>(SCORES_MADE);
            if (step >= 2) sync_some<CONSUMERS>(WEIGHTS_USED + (step & 1));
            softmax(step);
            arrive_some<CONSUMERS>(WEIGHTS_MADE + (step & 1));
        }
        sync_some<TEAM>(SCORES_MADE);
        write_stats();
    }
    __device__ __forceinline__ void add_up(int tiles) {
        SumOf sum = {};
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            copies_left<VALUE_STAGES < 2 ? 0 : VALUE_STAGES - 2>();
            sync_some<TEAM>(VALUES_HERE);  // and those of the step before are done with
            ask_values(step + VALUE_STAGES - 1);
            copies_queued();
            if (EXPECTS) expect(step + EXPECTED);
            sync_some<CONSUMERS>(WEIGHTS_MADE + (step & 1));
            add_values(sum, step, tiles);
            if (step + 2 < steps) arrive_some<CONSUMERS>(WEIGHTS_USED + (step & 1));
        }
        write_sums(sum, tiles);
        copies_done();
    }
};
