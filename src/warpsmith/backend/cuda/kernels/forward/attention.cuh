// Gated attention over any length, split by absolute position.
//
// Keys come in chunks of 16 positions; chunk c belongs to split c mod SPLITS, whatever the chip and however many nodes.
// An item is one key head, one split and some nodes: it walks its chunks in order with an online softmax for the GROUP
// query heads of its nodes, and publishes weighted means of the values with their maximum and weight. A last step
// merges the splits in a fixed order and applies the output gate. In a tree the rows of q, k and v are normed and
// rotated by one warp each first, which spreads them over all SMs, and published in fp16; one node's are made by the
// items themselves, which saves an exchange. Scores come from mma (16 queries x 8 keys x 16 dimensions, fp16 in, f32
// sums): an element depends on its query and its key alone. A drafted key is held against all queries apart from the
// chunks, and its scores are written for its descendants, at its position. From there on a key is worked on in chunk p
// / 16 at place p mod 16, whether it is committed or drafted, so plain and tree runs agree to the bit. Weighted sums
// come from mma as well (16 queries x 8 dimensions x 16 keys), a warp 32 dimensions; where a chunk has drafted keys,
// once a node, with that node's own values and the other nodes' weights zero. Bytes: 1 KB of fp16 keys and values a
// position and key head; keys come straight into the operand's registers.
#pragma once
#include "forward/attention_rows.cuh"
#include "forward/attention_scratch.cuh"

static_assert(HEAD_DIM == 32 * WARPS, "a warp has 32 dimensions of the sums");
static_assert(SPLITS * KEYS >= MAX_NODES + KEYS, "a split has drafted keys in one chunk only");
constexpr int AHEAD = 1;  // steps that are on their way to the L2 cache

// 16 queries against 8 keys: lane l has key l / 4 at dimensions 8 (l mod 4) .. of every 32. Four sums, then one; of
// rows l / 4 and + 8, columns 2 (l mod 4) and the next. Rows past one node's queries are the last again.
__device__ __forceinline__ void score_tile(const u32* q, const uint4 (&key)[8], int lane, float (&total)[4]) {
    const int row = NODES == 1 ? min(lane >> 2, QUERY_ROWS - 1) : lane >> 2;
    const uint4 *low = (const uint4*)(q + row * KEY_ROW) + (lane & 3),
                *high = NODES == 1 ? low : low + 8 * (KEY_ROW / 4);
    float sum[4][4] = {};
#pragma unroll
    for (int c = 0; c < 8; c++) {
        const uint4 a = low[c * 4], d = high[c * 4];
        mma_half(sum[c % 4], {a.x, d.x, a.y, d.y}, key[c].x, key[c].y);
        mma_half(sum[c % 4], {a.z, d.z, a.w, d.w}, key[c].z, key[c].w);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) total[i] = (sum[0][i] + sum[1][i]) + (sum[2][i] + sum[3][i]);
}

// Scores of a chunk of committed keys: two keys of two queries.
__device__ __forceinline__ void put_all(float* to, const float (&s)[4]) {
    *(float2*)to = {s[0], s[1]};
    if (TILE_ROWS > 8) *(float2*)(to + 8 * SCORE_ROW) = {s[2], s[3]};
}

// Of a chunk that has drafted keys too, the first `above` the root by so much: none past a node's own; those between
// are drafted.
__device__ __forceinline__ void put_committed(float* to, int above, const int (&depths)[2], const float (&s)[4]) {
#pragma unroll
    for (int i = 0; i < TILE_ROWS / 4; i++) {
        const int over = above + (i & 1);
        if (over < 0 || over > depths[i >> 1])
            to[(i >> 1) * 8 * SCORE_ROW + (i & 1)] = over < 0 ? s[i] : MINUS_INFINITY;
    }
}

// Of drafted keys, from node `first` on: at their positions, where they are ancestors of the query's node.
__device__ __forceinline__ void put_drafted(const Block& b, float* to, int first, int last_chunk, const int (&nodes)[2],
                                            const int (&depths)[2], const float (&s)[4]) {
#pragma unroll
    for (int i = 0; i < TILE_ROWS / 4; i++) {
        const int ancestor = first + (i & 1), depth = NODES == 1 ? 0 : b.s.depth[min(ancestor, b.nodes - 1)];
        const int at_place = b.length + depth - last_chunk * KEYS;
        const bool is =
            NODES == 1 ? ancestor == 0 : depth <= depths[i >> 1] && b.s.ancestor[nodes[i >> 1]][depth] == ancestor;
        if (is && at_place >= 0 && at_place < KEYS) to[(i >> 1) * 8 * SCORE_ROW + at_place] = s[i];
    }
}

// One step of an online softmax: four scores of a query's chunk, its peak and weight so far. Weights go to `share`;
// returns by what older sums are multiplied to keep in step.
__device__ __forceinline__ float weigh(float4 s, float& peak, float& weight, u16* share) {
    float top = fmaxf(fmaxf(s.x, s.y), fmaxf(s.z, s.w));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    top = fmaxf(top, peak);
    const float p0 = power_of_2(s.x - top), p1 = power_of_2(s.y - top);
    const float p2 = power_of_2(s.z - top), p3 = power_of_2(s.w - top);
    *(uint2*)share = {pack_half(p0, p1), pack_half(p2, p3)};
    float total = (p0 + p1) + (p2 + p3);
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const float kept = power_of_2(peak - top);
    weight = fmaf(weight, kept, total);
    peak = top;
    return kept;
}

// The warp's 32 dimensions of 16 values as the B operand: lane l gives row l mod 16 of a node tile of dimensions, or of
// the next.
struct ValueTile {
    uint4 a, c;
    __device__ __forceinline__ ValueTile(const u32* row, int first, int second)
        : a(load_transposed(row + first)), c(load_transposed(row + second)) {}
    __device__ __forceinline__ void add(float (&acc)[4][4], uint4 share) const {
        mma_half(acc[0], share, a.x, a.y), mma_half(acc[1], share, a.z, a.w);
        mma_half(acc[2], share, c.x, c.y), mma_half(acc[3], share, c.z, c.w);
    }
};

// Published means: a lane's four pairs are dimensions 2 (l mod 4) and the next of its warp's four node tiles, side by
// side.
//
// One key head and split for the nodes of `all_tiles` tiles of queries from `first_tile` on.
__device__ __forceinline__ void attention_item(Block& b, int index, int kv_head, int split, int first_tile,
                                               int all_tiles, int chunks, const float* vectors) {
    const AttentionScratch at(b.scratch + MIX_AT);
    const size_t cache_at = ((size_t)index * KV_HEADS + kv_head) * b.p.context * (HEAD_DIM / 2);
    const u32 *keys = b.p.keys + cache_at, *values = b.p.values + cache_at;
    const int last_chunk = split + (chunks - 1 - split) / SPLITS * SPLITS, newest = max(b.length - 1, 0);
    const bool holds_new = last_chunk >= b.length / KEYS;  // then it is the last one, where keys are drafted

    // Scores: a warp has half the keys of a chunk, for one tile of queries.
    static_assert(QUERY_TILES <= WARPS / 2, "a warp half a tile");
    constexpr int STEP = CHUNKS_AT_ONCE * SPLITS, SCORES = QUERIES * SCORE_ROW;
    const int row = b.lane >> 2, column = b.lane & 3, half = b.warp & 1;
    const int own_chunk = CHUNKS_AT_ONCE == 1 ? 0 : b.warp / (2 * QUERY_TILES);
    const int own_tile = CHUNKS_AT_ONCE == 1 ? b.warp >> 1 : (b.warp >> 1) % QUERY_TILES;
    const bool scores = own_chunk < CHUNKS_AT_ONCE && own_tile < QUERY_TILES;
    // the lane's row of values, and where in it
    const int place = b.lane & 15, piece = b.warp * 4 + (b.lane >> 4);
    const int first_eight = value_piece(piece, place), second_eight = value_piece(piece + 2, place);
    uint4 key[8];
    const auto fetch_keys = [&](int first) {  // what is not committed is not used: any row will do
        const int position = min((first + own_chunk * SPLITS) * KEYS + half * 8 + row, newest);
        const uint4* from = (const uint4*)(keys + (size_t)position * (HEAD_DIM / 2)) + column;
#pragma unroll
        for (int c = 0; c < 8; c++) key[c] = scores ? __ldcg(from + c * 4) : uint4{};
    };
    const auto fetch_values = [&](int first, int phase) {
#pragma unroll
        for (int c = 0; c < CHUNKS_AT_ONCE; c++) {
            if (c > 0 && first + c * SPLITS >= chunks) break;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = b.warp * 2 + i, from = min((first + c * SPLITS) * KEYS + row, newest);
                copy16(at.values + ((phase * CHUNKS_AT_ONCE + c) * KEYS + row) * VALUE_ROW + value_piece(b.lane, row),
                       values + (size_t)from * (HEAD_DIM / 2) + b.lane * 4);
            }
        }
    };

    // Further chunks on their way to the L2 cache: a thread 128 bytes of the keys or values of one.
    const auto ask_for = [&](int first) {
        const int c = threadIdx.x >> 7, chunk = first + c * SPLITS;
        if (c < CHUNKS_AT_ONCE && (chunk + 1) * KEYS <= b.length)
            prefetch((threadIdx.x & 64 ? values : keys) + (size_t)chunk * KEYS * (HEAD_DIM / 2) +
                     (threadIdx.x & 63) * 32);
    };
#pragma unroll 1
    for (int i = 1; i <= AHEAD; i++) ask_for(split + i * STEP);

    // Where no drafted keys take their room, queries of all walks are fetched for the first: the next need not wait.
    const int all_nodes = min(all_tiles * TILE_NODES, b.nodes - first_tile * TILE_NODES);
    const bool ahead = TILES_FETCHED > QUERY_TILES && !holds_new &&
                       all_nodes / TILE_NODES * 16 + all_nodes % TILE_NODES * GROUP <= ROWS_AHEAD;
#pragma unroll 1
    for (int tile0 = 0; tile0 < all_tiles; tile0 += QUERY_TILES) {
        const int tiles = min(QUERY_TILES, all_tiles - tile0), first_node = (first_tile + tile0) * TILE_NODES;
        // the nodes of a lane's two rows of a tile
        const int node_low = first_node + row / GROUP;
        const int node_high = first_node + (8 % GROUP == 0 ? row / GROUP + 8 / GROUP : (row + 8) / GROUP);
        const auto depth_of = [&](int node) { return NODES == 1 ? 0 : b.s.depth[min(node, b.nodes - 1)]; };
        fetch_keys(split);  // committed keys do not wait for anything
        if constexpr (NODES == 1) {
            fetch_values(split, 0);
            static_assert(NODES > 1 || GROUP + 2 <= WARPS, "a warp a row");
            const int over = b.warp - GROUP;  // 0: the key, 1: the value
            if (b.warp < GROUP + (holds_new ? 2 : 0)) {
                const int made = over < 0 ? kv_head * GROUP + b.warp : HEADS + over * KV_HEADS + kv_head;
                const uint4 packed = make_row(b, 0, made, vectors);
                u32* to = over < 0 ? at.q + b.warp * KEY_ROW : at.fresh_keys;
                *(uint4*)(over == 1 ? at.fresh_values + value_piece(b.lane, b.length) : to + b.lane * 4) = packed;
                if (over >= 0) keep_row(b, index, 0, made, packed);
            }
        } else {
            const bool again = tile0 > 0 && split + STEP >= chunks;  // then the values are still here
            const int here = min(tiles * TILE_NODES, b.nodes - first_node);
            if (!ahead || tile0 == 0)
                fetch_rows(b, at, kv_head, first_node, ahead ? all_nodes : here, holds_new);
            else if (!again)
                b.sync();  // values of the walk before may still be read
            if (!again) fetch_values(split, 0);
        }
        b.sync();

        const int query = b.warp * 8 + row;  // whose softmax this lane has a part in: four keys of a chunk
        float peak = MINUS_INFINITY, weight = 0.0f;
        float sum[QUERY_TILES][4][4] = {};
        int phase = 0;
#pragma unroll 1
        for (int first = split; first < chunks; first += STEP, phase ^= 1) {
            const int own = first + own_chunk * SPLITS;
            const bool drafted = holds_new && first + STEP > last_chunk;  // among this step's
            // Its own keys, then drafted ones: every second node tile of those up to the tile's last node.
            bool committed = scores && own < chunks;
            int key_tile = NODES;
            if (drafted && (NODES == 1 ? b.warp == WARPS - 1 : own == last_chunk)) key_tile = NODES == 1 ? 0 : half * 8;
            const int end = min(b.nodes, first_node + (own_tile + 1) * TILE_NODES);
            if (own_tile < tiles && (committed || key_tile < end)) {
                const int before = own_tile * TILE_NODES;
                const int nodes[2] = {min(node_low + before, b.nodes - 1), min(node_high + before, b.nodes - 1)};
                const int depths[2] = {depth_of(nodes[0]), depth_of(nodes[1])};
                float* to = at.scores + (own_tile * 16 + row) * SCORE_ROW;
#pragma unroll 1
                do {
                    if (!committed) {
                        const uint4* from =
                            (const uint4*)(at.fresh_keys + min(key_tile + row, FRESH_ROWS - 1) * KEY_ROW) + column;
#pragma unroll
                        for (int c = 0; c < 8; c++) key[c] = from[c * 4];
                    }
                    float s[4];
                    score_tile(at.q + (own_tile + (ahead ? tile0 : 0)) * 16 * KEY_ROW, key, b.lane, s);
                    if (committed && !(drafted && own == last_chunk)) {
                        put_all(to + own_chunk * SCORES + half * 8 + column * 2, s);
                        committed = false;
                    } else if (committed) {
                        const int at_column = half * 8 + column * 2,
                                  above = own * KEYS + at_column - b.length;  // the root
                        float* mine = to + own_chunk * SCORES + at_column;
                        put_committed(mine, above, depths, s);
                        committed = false;
                    } else {
                        float* mine = to + (CHUNKS_AT_ONCE == 1 ? 0 : (last_chunk - first) / SPLITS) * SCORES;
                        put_drafted(b, mine, key_tile + column * 2, last_chunk, nodes, depths, s);
                        key_tile += 16;
                    }
                } while (key_tile < end);
            }
            if (first + STEP < chunks) fetch_keys(first + STEP);
            ask_for(first + (AHEAD + 1) * STEP);
            copies_done();
            b.sync();
            if (first + STEP < chunks) fetch_values(first + STEP, phase ^ 1);
            if (b.warp * 8 < tiles * TILE_ROWS) {
#pragma unroll
                for (int c = 0; c < CHUNKS_AT_ONCE; c++) {
                    if (c > 0 && first + c * SPLITS >= chunks) break;
                    const float4 s = *(const float4*)(at.scores + c * SCORES + query * SCORE_ROW + column * 4);
                    u16* share = at.shares + (c * QUERIES + query) * SHARE_ROW + column * 4;
                    const float kept = weigh(s, peak, weight, share);
                    if (column == 0) at.factors[c * QUERIES + query] = kept;
                }
                if (first + STEP >= chunks && column == 0) at.inverses[query] = reciprocal(weight);
            }
            b.sync();
#pragma unroll
            for (int c = 0; c < CHUNKS_AT_ONCE; c++) {
                if (c > 0 && first + c * SPLITS >= chunks) break;
                uint4 share[QUERY_TILES];
#pragma unroll
                for (int t = 0; t < QUERY_TILES; t++) {
                    const float* factors = at.factors + c * QUERIES + t * 16 + row;
                    const float low = factors[0], high = factors[8];
                    share[t] =
                        load_matrices(at.shares + (c * QUERIES + t * 16 + place) * SHARE_ROW + (b.lane >> 4) * 8);
                    if (first > split || c > 0) {
#pragma unroll
                        for (int n = 0; n < 4; n++)
                            sum[t][n][0] *= low, sum[t][n][1] *= low, sum[t][n][2] *= high, sum[t][n][3] *= high;
                    }
                }
                const u32* chunk_values = at.values + ((phase * CHUNKS_AT_ONCE + c) * KEYS + place) * VALUE_ROW;
                if (!(drafted && first + c * SPLITS == last_chunk)) {
                    const ValueTile values_here(chunk_values, first_eight, second_eight);
#pragma unroll
                    for (int t = 0; t < QUERY_TILES; t++) values_here.add(sum[t], share[t]);
                    continue;
                }
                const int above = last_chunk * KEYS + place - b.length;  // the root
#pragma unroll
                for (int t = 0; t < QUERY_TILES; t++) {
                    if (t > 0 && t >= tiles) break;
#pragma unroll 2
                    for (int i = 0; i < TILE_NODES; i++) {
                        const int node = min(first_node + t * TILE_NODES + i, b.nodes - 1);
                        const int source = NODES == 1 ? 0 : b.s.ancestor[node][max(0, min(above, depth_of(node)))];
                        const u32* from = above < 0 ? chunk_values : at.fresh_values + source * VALUE_ROW;
                        const bool low = node_low - first_node == i, high = node_high - first_node == i;
                        const uint4 own = {low ? share[t].x : 0, high ? share[t].y : 0, low ? share[t].z : 0,
                                           high ? share[t].w : 0};
                        ValueTile(from, first_eight, second_eight).add(sum[t], own);
                    }
                }
            }
        }

        const auto publishes = [&](int node) {  // it sees keys of the split
            return node < b.nodes && (split * KEYS <= b.length || split * KEYS <= b.length + depth_of(node));
        };
        if (b.warp * 8 < tiles * TILE_ROWS && column == 0) {
            const int within = query % 16, node = first_node + query / 16 * TILE_NODES + within / GROUP;
            const int head = kv_head * GROUP + within % GROUP;
            if (within < TILE_NODES * GROUP && publishes(node))
                publish8(b.words(ATTENTION_PHASE, node, STATS_AT) + (head * SPLITS + split) * 2,
                         b.other(ATTENTION_PHASE), __float_as_uint(peak), __float_as_uint(weight));
        }
#pragma unroll
        for (int u = 0; u < 2; u++) {
            const int node = u == 0 ? node_low : node_high,
                      head = kv_head * GROUP + (8 % GROUP == 0 ? row : row + u * 8) % GROUP;
            u32* to = b.p.parts + (((size_t)node * HEADS + head) * SPLITS + split) * (HEAD_DIM / 2) + b.warp * 16 +
                      column * 4;
            const bool real = u * 8 + row < TILE_NODES * GROUP;
#pragma unroll
            for (int t = 0; t < QUERY_TILES; t++) {
                if (t >= tiles || !real || !publishes(node + t * TILE_NODES)) continue;
                const float inverse = at.inverses[t * 16 + u * 8 + row];
                const auto means = [&](int n) {
                    return pack_half(sum[t][n][u * 2] * inverse, sum[t][n][u * 2 + 1] * inverse);
                };
                store16(to + t * (TILE_NODES * HEADS * SPLITS * HEAD_DIM / 2), means(0), means(1), means(2), means(3));
            }
        }
    }
}

// How a tree's items are dealt, once for all layers.
__device__ __forceinline__ void deal_items(Block& b) {
    const int chunks = (b.length + b.s.deepest) / KEYS + 1, splits = min(SPLITS, chunks),
              fresh = chunks - b.length / KEYS;
    const int tiles = (b.nodes + TILE_NODES - 1) / TILE_NODES;
    int fresh_groups = 1, groups = 1;
    const auto count = [&](int of_fresh, int of_others) {
        return (of_fresh * fresh + of_others * (splits - fresh)) * KV_HEADS;
    };
#pragma unroll 1
    while (fresh_groups < tiles && count(fresh_groups + 1, groups) <= SMS) fresh_groups++;
#pragma unroll 1
    while (groups < tiles && count(fresh_groups, groups + 1) <= SMS) groups++;
    b.s.items = {splits,
                 fresh,
                 fresh_groups * fresh,
                 count(fresh_groups, groups),
                 tiles,
                 (tiles + fresh_groups - 1) / fresh_groups,
                 (tiles + groups - 1) / groups};
}

// Stage: this SM's items.
__device__ __forceinline__ void attention_parts(Block& b, int index, const float* vectors) {
    const int chunks = (b.length + (NODES == 1 ? 0 : b.s.deepest)) / KEYS + 1;
    const int count = NODES == 1 ? min(SPLITS, chunks) * KV_HEADS : b.s.items.count;
#pragma unroll 1
    for (int item = b.sm; item < count; item += SMS) {
        int split = item / KV_HEADS, first_tile = 0, tiles = 1;
        if constexpr (NODES > 1) {
            const AttentionItems items = b.s.items;
            const bool fresh = split < items.fresh_items;
            const int these = fresh ? items.fresh : items.splits - items.fresh;
            tiles = fresh ? items.fresh_tiles : items.tiles;
            if (!fresh) split -= items.fresh_items;
#pragma unroll 1
            while (split >= these) split -= these, first_tile += tiles;
            split += b.length / KEYS + (fresh ? 0 : items.fresh);  // from the first one with drafted keys on
            split = items.splits == SPLITS ? split % SPLITS : split < items.splits ? split : split - items.splits;
            tiles = min(tiles, items.all_tiles - first_tile);
        } else if (item > b.sm) {
            b.sync();  // what the scratch holds may still be read
        }
        if (tiles > 0) attention_item(b, index, item % KV_HEADS, split, first_tile, tiles, chunks, vectors);
    }
    if (NODES > 1) b.sync();
}
