// One walk over chunks of keys and values, for some rows of queries of one key head.
//
// A step takes a chunk of 64 positions: scores (a warp has 8 keys), softmax so far (eight lanes have a query), sums (a
// warp has 32 dimensions). Scores of the next chunk are made beside the softmax, for which few warps are needed. Keys
// of the chunk after that are on their way to registers, values of the next steps to shared memory. A query's numbers
// depend on it and its own keys alone, whatever else is in its tile.
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
constexpr int EXPECTED = 4;  // steps ahead of which keys and values are asked into the L2 cache

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
    KeyWords<KEY_TYPE> next = {};  // set, since registers that are set on some paths only are live in the whole kernel

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

    // Where the row at a position is. Past the end, any does: its weight is zero.
    template <int ROW>
    __device__ __forceinline__ const u8* row_at(const u8* committed, const u8* drafted, int position) const {
        if (node < 0) return committed + (size_t)position * ROW;
        position = min(position, own_end - 1);
        const int ahead = b.decoding() ? -1 : position - b.length;
        return ahead < 0 ? committed + (size_t)position * ROW : drafted + b.place(b.s.ancestor[node][ahead]) * ROW;
    }
    // How many positions of the chunk count: all 64, but for a node's own.
    __device__ __forceinline__ int positions() const { return node < 0 ? CHUNK : min(CHUNK, own_end - chunk * CHUNK); }
    __device__ __forceinline__ void ask_keys(int step, int first = 0) {
        const int position = (chunk + step * stride) * CHUNK + b.warp * 8 + (b.lane >> 2);
        if (b.warp * 8 < positions() && position >= first)
            next.load(row_at<KEY_ROW>(keys, drafted_keys, position), b.lane & 3);
    }
    // Keys and values of a step that is not asked for yet, on their way to the L2 cache.
    __device__ __forceinline__ void expect(int step) const {
        if (step >= steps) return;
        const int position = (chunk + step * stride) * CHUNK;
        const int bytes_of_keys = min(CHUNK, b.length - position) * KEY_ROW,
                  bytes_of_values = min(CHUNK, b.length - position) * VALUE_ROW;
        for (int i = threadIdx.x * 128; i < bytes_of_keys; i += CONSUMERS * 128)
            prefetch(keys + (size_t)position * KEY_ROW + i);
        for (int i = threadIdx.x * 128; i < bytes_of_values; i += CONSUMERS * 128)
            prefetch(values + (size_t)position * VALUE_ROW + i);
    }
    // Values of a step: shared chunks are copied as they lie; a node's own, those of positions from `first` up to
    // `end`, row by row.
    __device__ __forceinline__ void ask_values(int step, int first, int end) const {
        constexpr int UNITS = VALUE_ROW / 16, AT_ONCE = CONSUMERS * 16, EACH = (VALUE_BYTES + AT_ONCE - 1) / AT_ONCE;
        if (step >= steps) return;
        const int position = (chunk + step * stride) * CHUNK;
        u8* to = at.values + step % VALUE_STAGES * VALUE_BYTES;
        if (node < 0) {
            const u8* from = values + (size_t)position * VALUE_ROW + threadIdx.x * 16;
            to += VALUE_TYPE == CACHE_F16 ? value_place<CACHE_F16>(threadIdx.x / 32, threadIdx.x % 32)
                                          : threadIdx.x * 16;
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (VALUE_BYTES % AT_ONCE == 0 || i < EACH - 1 || threadIdx.x < VALUE_BYTES % AT_ONCE / 16)
                    copy16(to + i * AT_ONCE, from + i * AT_ONCE);
        } else {
#pragma unroll 1
            for (int i = threadIdx.x; i < up(positions(), 16) * UNITS; i += CONSUMERS)
                if (position + i / UNITS >= first && position + i / UNITS < end)
                    copy16(to + value_place<VALUE_TYPE>(i / UNITS, i % UNITS),
                           row_at<VALUE_ROW>(values, drafted_values, position + i / UNITS) + i % UNITS * 16);
        }
    }
    // Ask for what comes first and is committed. The scratch is free.
    __device__ __forceinline__ void begin() {
        ask_keys(0);
#pragma unroll
        for (int step = 0; step < FIRST_STEPS; step++) ask_values(step, 0, b.length);
#pragma unroll 1
        for (int step = 1; step < EXPECTED; step++) expect(step);
    }
    // And for what was not there yet: rows of the tree, in memory now.
    __device__ __forceinline__ void go_on() {
        constexpr int ALL = 0x7fffffff;
        if (node >= 0) ask_keys(0, b.length);
#pragma unroll
        for (int step = 0; step < FIRST_STEPS; step++) {
            if (node >= 0) ask_values(step, b.length, ALL);
            copies_queued();
        }
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

    // Of the keys that have come; the next are asked for.
    __device__ __forceinline__ void scores(int step, int tiles) {
        const int g = b.lane >> 2, q = b.lane & 3;
        uint4 key[8];
        if (b.warp * 8 >= positions()) return;
        next.operands(key, q);
        if (KEY_TYPE != CACHE_F16 && step + 1 < steps) ask_keys(step + 1);
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++) {
            const u8* queries = at.queries + tile * QUERY_TILE + b.lane * 16;
            float s[4][4] = {};
#pragma unroll
            for (int i = 0; i < 8; i++) {
                mma_half(s[i % 4], *(const uint4*)(queries + 2 * i * OPERAND), key[i].x, key[i].y);
                mma_half(s[i % 4], *(const uint4*)(queries + (2 * i + 1) * OPERAND), key[i].z, key[i].w);
            }
            u8* to = at.scores + (tile * 2 + (step & 1)) * SCORE_TILE + score_place(g, b.warp * 2 + q / 2) + q % 2 * 8;
            *(float2*)to = {(s[0][0] + s[1][0]) + (s[2][0] + s[3][0]), (s[0][1] + s[1][1]) + (s[2][1] + s[3][1])};
            *(float2*)(to + 8 * CHUNK * 4) = {(s[0][2] + s[1][2]) + (s[2][2] + s[3][2]),
                                              (s[0][3] + s[1][3]) + (s[2][3] + s[3][3])};
        }
        if (KEY_TYPE == CACHE_F16 && step + 1 < steps) ask_keys(step + 1);  // the operands are the words
    }

    // Scores become weights. Lane 4 u + r has row r of its warp's four, keys 4 u .. + 3 of every 32.
    __device__ __forceinline__ void softmax(int step) const {
        const int u = b.lane >> 2, here = chunk + step * stride, first = here * CHUNK;
#pragma unroll 1
        for (int pass = b.warp * 4; pass < rows; pass += WARPS * 4) {
            const int row = pass + (b.lane & 3);
            const u8* scores = at.scores + (row / 16 * 2 + (step & 1)) * SCORE_TILE;
            float v[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float4 four = *(const float4*)(scores + score_place(row % 16, u + 8 * i));
                v[i][0] = four.x, v[i][1] = four.y, v[i][2] = four.z, v[i][3] = four.w;
            }
            bool sees = true;  // nodes of one tile may share different chunks
            if (node < 0) {
                const int early =
                    early_chunks(node_position(b, min(first_row + row, first_row + rows - 1) / GROUP));
                sees = part == SPLITS ? here == early : here < early;
            } else {
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        if (first + (u + 8 * i) * 4 + j >= own_end) v[i][j] = MINUS_INFINITY;
            }
            float peak = fmaxf(fmaxf(fmaxf(v[0][0], v[0][1]), fmaxf(v[0][2], v[0][3])),
                               fmaxf(fmaxf(v[1][0], v[1][1]), fmaxf(v[1][2], v[1][3])));
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, lanes));
            const float before = at.peak[row], now = fmaxf(before, peak);
            uint2 packed[2];
            float weight = 0.0f;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                packed[i] = {pack_half(power_of_2(v[i][0] - now), power_of_2(v[i][1] - now)),
                             pack_half(power_of_2(v[i][2] - now), power_of_2(v[i][3] - now))};
                const float2 a = unpack_half(packed[i].x), c = unpack_half(packed[i].y);
                weight += (a.x + a.y) + (c.x + c.y);
            }
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2) weight += __shfl_xor_sync(~0u, weight, lanes);
#pragma unroll
            for (int i = 0; i < 2;
                 i++) {  // keys 4 (u + 8 i): product (u + 8 i) / 4, half u / 2 % 2, lanes u % 2 * 2, + 1
                u8* to = at.weights + row / 16 * WEIGHT_TILE + (u / 4 + 2 * i) * OPERAND +
                         operand_place(row, u % 2 * 2, u / 2 % 2);
                *(u32*)to = sees ? packed[i].x : 0, *(u32*)(to + 16) = sees ? packed[i].y : 0;
            }
            __syncwarp();  // all have read the peak
            if (u == 0) {
                const float factor = power_of_2(before - now);  // 0 at first
                at.factor[row] = sees ? factor : 1.0f;
                if (sees) at.peak[row] = now, at.weight[row] = fmaf(at.weight[row], factor, weight);
            }
        }
    }

    __device__ __forceinline__ void add_values(float (&sum)[QUERY_TILES][4][4], const u8* rows_at, int tiles) const {
        const int g = b.lane >> 2;
        const u32 scales = value_scales<VALUE_TYPE>(rows_at, b.warp, b.lane);
#pragma unroll
        for (int tile = 0; tile < QUERY_TILES; tile++) {
            if (tile >= tiles) break;
            const float low = at.factor[tile * 16 + g], high = at.factor[tile * 16 + 8 + g];
#pragma unroll
            for (int o = 0; o < 4; o++)
                sum[tile][o][0] *= low, sum[tile][o][1] *= low, sum[tile][o][2] *= high, sum[tile][o][3] *= high;
        }
#pragma unroll
        for (int from = 0; from < CHUNK; from += 16) {
            if (from >= positions()) break;
            u32 v[4][2];
            value_operands<VALUE_TYPE>(v, rows_at, scales, from, b.warp, b.lane);
#pragma unroll
            for (int tile = 0; tile < QUERY_TILES; tile++) {
                if (tile >= tiles) break;
                const uint4 weights =
                    *(const uint4*)(at.weights + tile * WEIGHT_TILE + from / 16 * OPERAND + b.lane * 16);
#pragma unroll
                for (int o = 0; o < 4; o++) mma_half(sum[tile][o], weights, v[o][0], v[o][1]);
            }
        }
    }

    __device__ __forceinline__ void write(const float (&sum)[QUERY_TILES][4][4], int tiles) const {
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
                float first[4], second[4];
#pragma unroll
                for (int o = 0; o < 4; o++)
                    first[o] = sum[tile][o][upper * 2] * inverse, second[o] = sum[tile][o][upper * 2 + 1] * inverse;
                store_sums<VALUE_TYPE>(b.p.parts + to * (HEAD_DIM / 2) + b.warp * 16, first, second, q);
            }
        }
        const int row = threadIdx.x;
        if (row < rows && at.weight[row] != 0.0f)
            b.p.part_stats[(size_t)query_at(row) * PARTS + part] = {at.peak[row], at.weight[row]};
    }

    // After `go_on`, when the queries are there.
    __device__ __forceinline__ void run() {
        const int tiles = (rows + 15) / 16;
        float sum[QUERY_TILES][4][4] = {};
        if (threadIdx.x < tiles * 16) at.peak[threadIdx.x] = MINUS_INFINITY, at.weight[threadIdx.x] = 0.0f;
        scores(0, tiles);
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            b.sync();
            if (step + VALUE_STAGES > FIRST_STEPS) ask_values(step + VALUE_STAGES - 1, 0, 0x7fffffff);
            copies_queued();
            expect(step + EXPECTED);
            softmax(step);
            if (step + 1 < steps) scores(step + 1, tiles);
            copies_left<VALUE_STAGES - 1>();
            b.sync();
            add_values(sum, at.values + step % VALUE_STAGES * VALUE_BYTES, tiles);
        }
        write(sum, tiles);
        copies_done();
    }
};
