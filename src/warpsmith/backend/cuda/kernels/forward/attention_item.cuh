// One item of attention: a key head, a split and some nodes (see attention.cuh).
#pragma once
#include "forward/attention_rows.cuh"

static_assert(HEAD_DIM == 32 * WARPS, "a warp has 32 dimensions of the sums");
static_assert(SPLITS * KEYS >= MAX_NODES + KEYS, "a split has drafted keys in one chunk only");
constexpr int AHEAD = 1;  // steps that are on their way to the L2 cache

struct AttentionScratch {
    u32 *q, *fresh_keys, *fresh_values, *values;
    float* scores;
    u16* shares;
    float *factors, *inverses;

    __device__ explicit AttentionScratch(float* at)
        : q((u32*)at), fresh_keys(q + QUERY_ROWS * KEY_ROW), fresh_values(fresh_keys + FRESH_ROWS * KEY_ROW),
          values(fresh_values + FRESH_ROWS * VALUE_ROW),
          scores((float*)(values + 2 * CHUNKS_AT_ONCE * KEYS * VALUE_ROW)),
          shares((u16*)(scores + CHUNKS_AT_ONCE * QUERIES * SCORE_ROW)),
          factors((float*)(shares + CHUNKS_AT_ONCE * QUERIES * SHARE_ROW)),
          inverses(factors + CHUNKS_AT_ONCE * QUERIES) {}
};

// Where 16 bytes of a value are in its row, in words.
__device__ __forceinline__ int value_piece(int piece, int position) { return (piece ^ (position & 7)) * 4; }

// The rows a pass over nodes [first, first + count) of an item uses, and keys and values of all up to them if they are
// `fresh`: into shared memory.
__device__ __forceinline__ void fetch_rows(const Block& b, const AttentionScratch& at, int kv_head, int first,
                                           int count, bool fresh) {
    constexpr int EACH = (QUERY_TILES * TILE_NODES * GROUP + WARPS - 1) / WARPS,
                  DRAFTED = (2 * NODES + WARPS - 1) / WARPS;
    static_assert(WARPS % 2 == 0, "a warp has keys or values");
    // a warp's query i is of this node and head; its drafted row i is of node warp / 2 + i * WARPS / 2
    const auto node_of = [&](int i) {
        return WARPS % GROUP == 0 ? b.warp / GROUP + i * (WARPS / GROUP) : (b.warp + i * WARPS) / GROUP;
    };
    const auto head_of = [&](int i) { return WARPS % GROUP == 0 ? b.warp % GROUP : (b.warp + i * WARPS) % GROUP; };
    const int drafted = fresh ? first + count - (b.warp >> 1) : 0;
    const auto row_of = [&](int node, int row) {
        return load16(b.words(ATTENTION_PHASE, node, ATTENTION_ROWS_AT) + row * (HEAD_DIM / 2) + b.lane * 4);
    };
    const auto query = [&](int i) { return row_of(first + node_of(i), kv_head * GROUP + head_of(i)); };
    const auto drafted_row = [&](int i) {
        return row_of((b.warp >> 1) + i * (WARPS / 2), HEADS + (b.warp & 1) * KV_HEADS + kv_head);
    };
    Watchdog dog;
    {  // polling for all of it would fill the way it comes on: the last row first
        int last = 0;
#pragma unroll
        for (int i = 1; i < EACH; i++)
            if (node_of(i) < count) last = i;
        if (node_of(0) < count)
            while (!everywhere(came16(query(last)))) dog.check();
    }
    uint4 got[EACH], got_drafted[DRAFTED];
#pragma unroll
    for (int i = 0; i < EACH; i++) got[i] = {NOT_YET, NOT_YET, NOT_YET, NOT_YET};
#pragma unroll
    for (int i = 0; i < DRAFTED; i++) got_drafted[i] = {NOT_YET, NOT_YET, NOT_YET, NOT_YET};
    bool came;
    do {  // what has not come yet
        came = true;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (node_of(i) < count && !came16(got[i])) got[i] = query(i);
#pragma unroll
        for (int i = 0; i < DRAFTED; i++)
            if (i * (WARPS / 2) < drafted && !came16(got_drafted[i])) got_drafted[i] = drafted_row(i);
#pragma unroll
        for (int i = 0; i < EACH; i++) came &= node_of(i) >= count || came16(got[i]);
#pragma unroll
        for (int i = 0; i < DRAFTED; i++) came &= i * (WARPS / 2) >= drafted || came16(got_drafted[i]);
        dog.check();
    } while (!everywhere(came));
    b.sync();  // what the scratch holds may still be read
    u32* q = at.q + b.lane * 4;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int node = node_of(i), within = node % TILE_NODES * GROUP + head_of(i);
        const int place = 16 % GROUP == 0 ? b.warp + i * WARPS : node / TILE_NODES * 16 + within;
        if (node < count) *(uint4*)(q + place * KEY_ROW) = got[i];
    }
    if (fresh) {
#pragma unroll
        for (int i = 0; i < DRAFTED; i++)
            if (i * (WARPS / 2) < drafted) {
                const int node = (b.warp >> 1) + i * (WARPS / 2);
                u32* to = b.warp & 1
                              ? at.fresh_values + node * VALUE_ROW + value_piece(b.lane, b.length + b.s.depth[node])
                              : at.fresh_keys + node * KEY_ROW + b.lane * 4;
                *(uint4*)to = got_drafted[i];
            }
    }
}

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

// Walks over the chunks of one key head and split, for QUERY_TILES tiles of queries at a time. Published means: a
// lane's four pairs are dimensions 2 (l mod 4) and the next of its warp's four eights, side by side.
struct AttentionItem {
    static constexpr int STEP = CHUNKS_AT_ONCE * SPLITS, SCORES = QUERIES * SCORE_ROW;
    static_assert(QUERY_TILES <= WARPS / 2, "a warp half a tile");

    Block& b;
    const AttentionScratch at;
    const int index, kv_head, split, chunks;
    const u32 *keys, *values;  // committed ones
    const int last_chunk, newest;
    const bool holds_new;  // then it is the last chunk, where keys are drafted
    // Scores: a warp has half the keys of a chunk, for one tile of queries.
    const int row, column, half, own_chunk, own_tile;
    const bool scores;
    const int place, first_eight, second_eight;  // the lane's row of values, and where in it
    // of a walk
    int tiles, first_node;    // of queries; of the first of them
    int node_low, node_high;  // the nodes of a lane's two rows of a tile
    uint4 key[8];
    float peak, weight;  // of the query whose softmax this lane has a part in: four keys of a chunk
    float sum[QUERY_TILES][4][4];

    __device__ __forceinline__ AttentionItem(Block& block, int layer_index, int head, int which, int all_chunks)
        : b(block), at(b.scratch + MIX_AT), index(layer_index), kv_head(head), split(which), chunks(all_chunks),
          keys(b.p.keys + cache_at()), values(b.p.values + cache_at()),
          last_chunk(split + (chunks - 1 - split) / SPLITS * SPLITS), newest(max(b.length - 1, 0)),
          holds_new(last_chunk >= b.length / KEYS), row(b.lane >> 2), column(b.lane & 3), half(b.warp & 1),
          own_chunk(CHUNKS_AT_ONCE == 1 ? 0 : b.warp / (2 * QUERY_TILES)),
          own_tile(CHUNKS_AT_ONCE == 1 ? b.warp >> 1 : (b.warp >> 1) % QUERY_TILES),
          scores(own_chunk < CHUNKS_AT_ONCE && own_tile < QUERY_TILES), place(b.lane & 15),
          first_eight(value_piece(b.warp * 4 + (b.lane >> 4), place)),
          second_eight(value_piece(b.warp * 4 + (b.lane >> 4) + 2, place)) {}

    __device__ __forceinline__ size_t cache_at() const {
        return ((size_t)index * KV_HEADS + kv_head) * b.p.context * (HEAD_DIM / 2);
    }
    __device__ __forceinline__ int depth_of(int node) const {
        return NODES == 1 ? 0 : b.s.depth[min(node, b.nodes - 1)];
    }
    __device__ __forceinline__ int query() const { return b.warp * 8 + row; }

    // What is not committed is not used: any row will do.
    __device__ __forceinline__ void fetch_keys(int first) {
        const int position = min((first + own_chunk * SPLITS) * KEYS + half * 8 + row, newest);
        const uint4* from = (const uint4*)(keys + (size_t)position * (HEAD_DIM / 2)) + column;
#pragma unroll
        for (int c = 0; c < 8; c++) key[c] = scores ? __ldcg(from + c * 4) : uint4{};
    }
    __device__ __forceinline__ void fetch_values(int first, int phase) const {
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
    }
    // Further chunks on their way to the L2 cache: a thread 128 bytes of the keys or values of one.
    __device__ __forceinline__ void ask_for(int first) const {
        const int c = threadIdx.x >> 7, chunk = first + c * SPLITS;
        if (c < CHUNKS_AT_ONCE && (chunk + 1) * KEYS <= b.length)
            prefetch((threadIdx.x & 64 ? values : keys) + (size_t)chunk * KEYS * (HEAD_DIM / 2) +
                     (threadIdx.x & 63) * 32);
    }

    // One node's rows are made here, a warp each.
    __device__ __forceinline__ void make_rows(const float* vectors) const {
        static_assert(NODES > 1 || GROUP + 2 <= WARPS, "a warp a row");
        const int over = b.warp - GROUP;  // 0: the key, 1: the value
        if (b.warp >= GROUP + (holds_new ? 2 : 0)) return;
        const int made = over < 0 ? kv_head * GROUP + b.warp : HEADS + over * KV_HEADS + kv_head;
        const uint4 packed = make_row(b, 0, made, vectors);
        u32* to = over < 0 ? at.q + b.warp * KEY_ROW : at.fresh_keys;
        *(uint4*)(over == 1 ? at.fresh_values + value_piece(b.lane, b.length) : to + b.lane * 4) = packed;
        if (over >= 0) keep_row(b, index, 0, made, packed);
    }

    // The scores of a step's chunks: this warp's committed keys, then drafted ones, every second eight of those up to
    // the tile's last node.
    __device__ __forceinline__ void score(int first, bool drafted) {
        const int own = first + own_chunk * SPLITS;
        bool committed = scores && own < chunks;
        int key_tile = NODES;
        if (drafted && (NODES == 1 ? b.warp == WARPS - 1 : own == last_chunk)) key_tile = NODES == 1 ? 0 : half * 8;
        const int end = min(b.nodes, first_node + (own_tile + 1) * TILE_NODES);
        if (own_tile >= tiles || (!committed && key_tile >= end)) return;
        const int before = own_tile * TILE_NODES;
        const int nodes[2] = {min(node_low + before, b.nodes - 1), min(node_high + before, b.nodes - 1)};
        const int depths[2] = {depth_of(nodes[0]), depth_of(nodes[1])};
        float* to = at.scores + (own_tile * 16 + row) * SCORE_ROW;
#pragma unroll 1
        do {
            if (!committed) {
                const int fresh = min(key_tile + row, FRESH_ROWS - 1);
                const uint4* from = (const uint4*)(at.fresh_keys + fresh * KEY_ROW) + column;
#pragma unroll
                for (int c = 0; c < 8; c++) key[c] = from[c * 4];
            }
            float s[4];
            score_tile(at.q + own_tile * 16 * KEY_ROW, key, b.lane, s);
            if (committed) {
                put_committed(to + own_chunk * SCORES, own, drafted && own == last_chunk, depths, s);
                committed = false;
            } else {
                float* mine = to + (CHUNKS_AT_ONCE == 1 ? 0 : (last_chunk - first) / SPLITS) * SCORES;
                put_drafted(mine, key_tile, nodes, depths, s);
                key_tile += 16;
            }
        } while (key_tile < end);
    }
    // Scores of committed keys. In a chunk that has drafted ones, none past a node's own; those between are drafted.
    __device__ __forceinline__ void put_committed(float* to, int own, bool has_drafted, const int (&depths)[2],
                                                  const float (&s)[4]) const {
        const int at_column = half * 8 + column * 2;
        float* mine = to + at_column;
        if (!has_drafted) {
            *(float2*)mine = {s[0], s[1]};
            if (TILE_ROWS > 8) *(float2*)(mine + 8 * SCORE_ROW) = {s[2], s[3]};
            return;
        }
        const int above = own * KEYS + at_column - b.length;  // the root
#pragma unroll
        for (int i = 0; i < TILE_ROWS / 4; i++) {
            const int over = above + (i & 1);
            if (over < 0 || over > depths[i >> 1])
                mine[(i >> 1) * 8 * SCORE_ROW + (i & 1)] = over < 0 ? s[i] : MINUS_INFINITY;
        }
    }
    // Scores of drafted keys, where they are ancestors of the query's node.
    __device__ __forceinline__ void put_drafted(float* to, int key_tile, const int (&nodes)[2], const int (&depths)[2],
                                                const float (&s)[4]) const {
#pragma unroll
        for (int i = 0; i < TILE_ROWS / 4; i++) {
            const int ancestor = key_tile + column * 2 + (i & 1), depth = depth_of(ancestor);
            const int at_place = b.length + depth - last_chunk * KEYS;
            const bool is =
                NODES == 1 ? ancestor == 0 : depth <= depths[i >> 1] && b.s.ancestor[nodes[i >> 1]][depth] == ancestor;
            if (is && at_place >= 0 && at_place < KEYS) to[(i >> 1) * 8 * SCORE_ROW + at_place] = s[i];
        }
    }

    // Softmax weights of a step's scores, and by what older sums are multiplied to keep in step.
    __device__ __forceinline__ void weigh(int first) {
        if (b.warp * 8 >= tiles * TILE_ROWS) return;
#pragma unroll
        for (int c = 0; c < CHUNKS_AT_ONCE; c++) {
            if (c > 0 && first + c * SPLITS >= chunks) break;
            const float4 s = *(const float4*)(at.scores + c * SCORES + query() * SCORE_ROW + column * 4);
            float top = fmaxf(fmaxf(s.x, s.y), fmaxf(s.z, s.w));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            top = fmaxf(top, peak);
            const float p0 = power_of_2(s.x - top), p1 = power_of_2(s.y - top);
            const float p2 = power_of_2(s.z - top), p3 = power_of_2(s.w - top);
            u16* share = at.shares + (c * QUERIES + query()) * SHARE_ROW + column * 4;
            *(uint2*)share = {pack_half(p0, p1), pack_half(p2, p3)};
            float total = (p0 + p1) + (p2 + p3);
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            const float kept = power_of_2(peak - top);
            weight = fmaf(weight, kept, total);
            peak = top;
            if (column == 0) at.factors[c * QUERIES + query()] = kept;
        }
        if (first + STEP >= chunks && column == 0) at.inverses[query()] = reciprocal(weight);
    }

    // Adds a step's values, weighted.
    __device__ __forceinline__ void add_values(int first, int phase, bool drafted) {
#pragma unroll
        for (int c = 0; c < CHUNKS_AT_ONCE; c++) {
            if (c > 0 && first + c * SPLITS >= chunks) break;
            uint4 share[QUERY_TILES];
#pragma unroll
            for (int t = 0; t < QUERY_TILES; t++) {
                const float* factors = at.factors + c * QUERIES + t * 16 + row;
                const float low = factors[0], high = factors[8];
                share[t] = load_matrices(at.shares + (c * QUERIES + t * 16 + place) * SHARE_ROW + (b.lane >> 4) * 8);
                if (first > split || c > 0) {
#pragma unroll
                    for (int n = 0; n < 4; n++)
                        sum[t][n][0] *= low, sum[t][n][1] *= low, sum[t][n][2] *= high, sum[t][n][3] *= high;
                }
            }
            const u32* chunk_values = at.values + ((phase * CHUNKS_AT_ONCE + c) * KEYS + place) * VALUE_ROW;
            if (drafted && first + c * SPLITS == last_chunk) {
                add_drafted(chunk_values, share);
            } else {
                const ValueTile values_here(chunk_values, first_eight, second_eight);
#pragma unroll
                for (int t = 0; t < QUERY_TILES; t++) values_here.add(sum[t], share[t]);
            }
        }
    }
    // Of a chunk that has drafted keys: once a node, with that node's own values and the other nodes' weights zero.
    __device__ __forceinline__ void add_drafted(const u32* chunk_values, const uint4 (&share)[QUERY_TILES]) {
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

    // Whether a node sees keys of the split.
    __device__ __forceinline__ bool publishes(int node) const {
        return node < b.nodes && (split * KEYS <= b.length || split * KEYS <= b.length + depth_of(node));
    }
    __device__ __forceinline__ void publish() const {
        if (b.warp * 8 < tiles * TILE_ROWS && column == 0) {
            const int within = query() % 16, node = first_node + query() / 16 * TILE_NODES + within / GROUP;
            const int head = kv_head * GROUP + within % GROUP;
            if (within < TILE_NODES * GROUP && publishes(node))
                publish8(b.words(ATTENTION_PHASE, node, STATS_AT) + (head * SPLITS + split) * 2,
                         b.other(ATTENTION_PHASE), __float_as_uint(peak), __float_as_uint(weight));
        }
#pragma unroll
        for (int u = 0; u < 2; u++) {
            const int node = u == 0 ? node_low : node_high;
            const int head = kv_head * GROUP + (8 % GROUP == 0 ? row : row + u * 8) % GROUP;
            const size_t part = ((size_t)node * HEADS + head) * SPLITS + split;
            u32* to = b.p.parts + part * (HEAD_DIM / 2) + b.warp * 16 + column * 4;
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

    // One walk over the chunks, for `count` tiles of queries from `first_tile` on.
    __device__ __forceinline__ void walk(int first_tile, int count, bool first_walk, const float* vectors) {
        tiles = count, first_node = first_tile * TILE_NODES;
        node_low = first_node + row / GROUP;
        node_high = first_node + (8 % GROUP == 0 ? row / GROUP + 8 / GROUP : (row + 8) / GROUP);
        fetch_keys(split);  // committed keys do not wait for anything
        if constexpr (NODES == 1) {
            fetch_values(split, 0);
            make_rows(vectors);
        } else {
            fetch_rows(b, at, kv_head, first_node, min(tiles * TILE_NODES, b.nodes - first_node), holds_new);
            if (first_walk || split + STEP < chunks) fetch_values(split, 0);  // else they are still here
        }
        b.sync();
        peak = MINUS_INFINITY, weight = 0.0f;
#pragma unroll
        for (int t = 0; t < QUERY_TILES; t++)
#pragma unroll
            for (int n = 0; n < 4; n++) sum[t][n][0] = sum[t][n][1] = sum[t][n][2] = sum[t][n][3] = 0.0f;
        int phase = 0;
#pragma unroll 1
        for (int first = split; first < chunks; first += STEP, phase ^= 1) {
            const bool drafted = holds_new && first + STEP > last_chunk;  // among this step's
            score(first, drafted);
            if (first + STEP < chunks) fetch_keys(first + STEP);
            ask_for(first + (AHEAD + 1) * STEP);
            copies_done();
            b.sync();
            if (first + STEP < chunks) fetch_values(first + STEP, phase ^ 1);
            weigh(first);
            b.sync();
            add_values(first, phase, drafted);
        }
        publish();
    }
    // For the nodes of `count` tiles of queries from `first_tile` on.
    __device__ __forceinline__ void run(int first_tile, int count, const float* vectors) {
#pragma unroll 1
        for (int i = 1; i <= AHEAD; i++) ask_for(split + i * STEP);
#pragma unroll 1
        for (int tile = 0; tile < count; tile += QUERY_TILES)
            walk(first_tile + tile, min(QUERY_TILES, count - tile), tile == 0, vectors);
    }
};
