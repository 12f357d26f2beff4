// Gated attention over any length, split by absolute position.
//
// Keys come in chunks of 16 positions; chunk c belongs to split c mod SPLITS, whatever the chip and however many nodes.
// An item is one key head and one split: it walks its chunks in order with an online softmax for the GROUP query heads
// of up to 8 nodes, and publishes unnormalised sums with their maximum and weight. A second step merges the splits in a
// fixed order, divides, and applies the output gate.
// Scores come from mma (16 queries x 8 keys x 16 dimensions, fp16 in, f32 sums): an element depends on its query and its key
// alone. A drafted key is held against all queries apart from the chunks; each node then picks its ancestors' scores, at
// their positions. From there on a key is worked on in chunk p / 16 at place p mod 16, whether it is committed or drafted,
// so plain and tree runs agree to the bit.
// Bytes: 1 KB of fp16 keys and values a position and key head, read once for 8 nodes.
// Their weighted sums come from mma as well (16 queries x 8 dimensions x 16 keys), a warp 32 dimensions; where a chunk has
// drafted keys, once a node, with that node's own values.
// Scratch: q [tiles][8 chunks][2][32 lanes] uint4 in the order of the mma's A operand, scores [queries][16], their softmax
// weights in fp16, factors that keep older sums in step [queries], scores of drafted keys [queries][nodes], drafted keys and
// values [nodes][2], the chunk's values [2][16].
#pragma once
#include "block.cuh"

static_assert(HEAD_DIM == 256 && ROTARY == 64, "a lane has eight dimensions; the rotated ones are in lanes 0 to 7");
static_assert(HEAD_DIM == 32 * WARPS, "a warp has 32 dimensions of the sums");
constexpr float ATTENTION_SCALE = 0.0625f;  // 256 ** -0.5

struct AttentionScratch {
    uint4* q;
    float* scores;
    u16* shares;
    float *factors, *fresh_scores;
    u32 *fresh, *values;

    __device__ explicit AttentionScratch(float* at)
        : q((uint4*)at), scores(at + Q_FLOATS), shares((u16*)(scores + SCORE_FLOATS)), factors(scores + SCORE_FLOATS + SHARE_FLOATS),
          fresh_scores(factors + aligned(QUERIES)), fresh((u32*)(fresh_scores + QUERY_TILES * 16 * FRESH_SCORES)),
          values(fresh + 2 * FRESH_SCORES * KV_ROW) {}
    __device__ u32* fresh_key(int node) const { return fresh + node * 2 * KV_ROW; }
    __device__ u32* fresh_value(int node) const { return fresh + (node * 2 + 1) * KV_ROW; }
};

// One warp makes ROWS rows of a node, from `first` on: GROUP query heads, then the key, then the value. Eight dimensions a
// lane, normed and rotated except for the value. Keys and values only if the item has use for them.
template <int ROWS>
__device__ __forceinline__ void make_rows(const Block& b, const AttentionScratch& at, int kv_head, size_t head_at, int node,
                                          int base, int first, bool holds_new, const float* vectors, u32* keys, u32* values) {
    const int position = b.length + (NODES == 1 ? 0 : b.s.depth[node]);
    // pairs (j, j + 32): lanes 0..3 hold the first of a pair, lanes 4..7 the second
    const float4* low = (const float4*)(b.p.rope + (position & 63) * 32 + (b.lane & 3) * 8);
    const float4* high = (const float4*)(b.p.rope + (64 + (position >> 6)) * 32 + (b.lane & 3) * 8);
    float4 rope_low[4], rope_high[4];  // asked for now, used once the rows are here
#pragma unroll
    for (int i = 0; i < 4; i++) rope_low[i] = __ldg(low + i), rope_high[i] = __ldg(high + i);
    const float4 *q_norm = (const float4*)(vectors + Q_NORM_AT) + b.lane * 2, *k_norm = (const float4*)(vectors + K_NORM_AT) + b.lane * 2;
    const bool has_query = first < GROUP, has_key = first + ROWS > GROUP;
    const float4 q0 = has_query ? __ldg(q_norm) : float4{}, q1 = has_query ? __ldg(q_norm + 1) : float4{};
    const float4 k0 = has_key ? __ldg(k_norm) : float4{}, k1 = has_key ? __ldg(k_norm + 1) : float4{};
    const u32* in = b.words(ATTENTION_TURN, node, ATTENTION_IN_AT) + b.lane * 8;
    uint4 got[ROWS][2];
    Watchdog dog;
    bool came;
    do {
        came = true;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const int row = first + i, over = row - GROUP;  // 0: the key, 1: the value
            const u32* from = in + (over < 0 ? (kv_head * GROUP + row) * 2 * HEAD_DIM
                                             : 2 * ATTENTION_DIM + (over * KV_HEADS + kv_head) * HEAD_DIM);
            got[i][0] = load16(from), got[i][1] = load16(from + 4);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) came &= came16(got[i][0]) & came16(got[i][1]);
        dog.check();
    } while (!everywhere(came));
    float cosine[8], sine[8];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float4 a = rope_low[i], c = rope_high[i];
        cosine[2 * i] = a.x * c.x - a.y * c.y, sine[2 * i] = a.y * c.x + a.x * c.y;
        cosine[2 * i + 1] = a.z * c.z - a.w * c.w, sine[2 * i + 1] = a.w * c.z + a.z * c.w;
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int row = first + i, over = row - GROUP;
        if (over >= 0 && !holds_new) break;
        const float4 a = floats(got[i][0]), c = floats(got[i][1]);
        float v[8] = {a.x, a.y, a.z, a.w, c.x, c.y, c.z, c.w};
        if (over < 1) {
            const float4 w0 = over < 0 ? q0 : k0, w1 = over < 0 ? q1 : k1;
            float square = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++) square = fmaf(v[j], v[j], square);
            const float scale = rsqrtf(warp_sum(square) / HEAD_DIM + EPS);
            v[0] *= scale * w0.x, v[1] *= scale * w0.y, v[2] *= scale * w0.z, v[3] *= scale * w0.w;
            v[4] *= scale * w1.x, v[5] *= scale * w1.y, v[6] *= scale * w1.z, v[7] *= scale * w1.w;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float other = __shfl_xor_sync(~0u, v[j], 4);
                if (b.lane < 8) v[j] = b.lane < 4 ? v[j] * cosine[j] - other * sine[j] : v[j] * cosine[j] + other * sine[j];
                if (over < 0) v[j] *= ATTENTION_SCALE;
            }
        }
        const uint4 packed = {pack_half(v[0], v[1]), pack_half(v[2], v[3]), pack_half(v[4], v[5]), pack_half(v[6], v[7])};
        if (over < 0) {
            // lane 4 c + q has chunk c's dimensions 8 q ..: the first four for one mma, the last for a second
            const int query = (node - base) * GROUP + row, upper = query % 16 / 8;
            u32* to = (u32*)(at.q + (query / 16 * 8 + b.lane / 4) * 64 + query % 8 * 4 + b.lane % 4) + upper;
            to[0] = packed.x, to[2] = packed.y;
            to[128] = packed.z, to[130] = packed.w;
        } else {
            u32* to = b.decoding() ? (over ? values : keys) + (size_t)position * (HEAD_DIM / 2)
                                   : (over ? b.p.pending_values : b.p.pending_keys) + (head_at * MAX_NODES + node) * (HEAD_DIM / 2);
            *(uint4*)(to + b.lane * 4) = packed;
            *(uint4*)((over ? at.fresh_value(node) : at.fresh_key(node)) + b.lane * 4) = packed;
        }
    }
}

// 16 queries against 8 keys: lane l has key l / 4 at dimensions 8 (l mod 4) .. of every chunk of 32. Four sums, then one.
__device__ __forceinline__ float4 score_tile(const uint4* q, const uint4 (&key)[8], int lane) {
    float sum[4][4] = {};
#pragma unroll
    for (int c = 0; c < 8; c++) {
        mma_half(sum[c % 4], q[c * 64 + lane], key[c].x, key[c].y);
        mma_half(sum[c % 4], q[c * 64 + 32 + lane], key[c].z, key[c].w);
    }
    float total[4];
#pragma unroll
    for (int i = 0; i < 4; i++) total[i] = (sum[0][i] + sum[1][i]) + (sum[2][i] + sum[3][i]);
    return {total[0], total[1], total[2], total[3]};
}

__device__ __forceinline__ void attention_item(Block& b, int index, int item, const float* vectors) {
    const int kv_head = item / SPLITS, split = item % SPLITS;
    const AttentionScratch at(b.scratch + MIX_AT);
    const size_t head_at = (size_t)index * KV_HEADS + kv_head, cache_at = head_at * b.p.context * (HEAD_DIM / 2);
    u32 *keys = b.p.keys + cache_at, *values = b.p.values + cache_at;

    int deepest = 0;
    if (NODES > 1) {
#pragma unroll 1
        for (int node = 0; node < b.nodes; node++) deepest = max(deepest, b.s.depth[node]);
    }
    const int end = b.length + deepest + 1, chunks = (end + KEYS - 1) / KEYS;
    if (split >= chunks) return;
    const int first_new = b.length / KEYS, last_new = (end - 1) / KEYS;
    bool holds_new = false;
#pragma unroll 1
    for (int n = first_new; n <= last_new; n++) holds_new |= n % SPLITS == split;

    // Scores: warp w has tile w / 2 and half of the keys. Values on their way to shared memory: two pieces a thread.
    constexpr int SCORERS = 2 * QUERY_TILES;
    static_assert(SCORERS <= WARPS, "a warp half a tile");
    const int tile = b.warp >> 1, half = b.warp & 1;
    uint4 key[8], value[2];
    const auto fetch = [&](int chunk) {
        const int position = chunk * KEYS + half * 8 + (b.lane >> 2);
        const uint4* row = (const uint4*)(keys + (size_t)position * (HEAD_DIM / 2)) + (b.lane & 3);
#pragma unroll
        for (int c = 0; c < 8; c++) key[c] = b.warp < SCORERS && position < b.length ? __ldcg(row + c * 4) : uint4{};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int from = chunk * KEYS + b.warp * 2 + i;
            value[i] = from < b.length ? __ldcg((const uint4*)(values + (size_t)from * (HEAD_DIM / 2)) + b.lane) : uint4{};
        }
    };

#pragma unroll 1
    for (int base = 0; base < b.nodes; base += TOGETHER_NODES) {
        const int count = min(TOGETHER_NODES, b.nodes - base), queries = count * GROUP;
        if (base > 0) b.sync();  // q of the nodes before
        fetch(split);            // committed keys do not wait for anything
        if constexpr (NODES == 1) {
            static_assert(NODES > 1 || GROUP + 2 <= WARPS, "a warp a row");
            if (b.warp < GROUP + (holds_new ? 2 : 0))
                make_rows<1>(b, at, kv_head, head_at, 0, 0, b.warp, holds_new, vectors, keys, values);
        } else {
#pragma unroll 1
            for (int i = b.warp; i < count; i += WARPS)
                make_rows<GROUP + 2>(b, at, kv_head, head_at, base + i, base, 0, holds_new, vectors, keys, values);
        }
        b.sync();

        float peak[QUERY_TILES], weight[QUERY_TILES];  // of query threadIdx / 16, and of every sixteenth on
        float sum[QUERY_TILES][4][4] = {};             // rows l / 4 and + 8, dimensions 2 (l mod 4) and the next of 4 octets
#pragma unroll
        for (int t = 0; t < QUERY_TILES; t++) peak[t] = MINUS_INFINITY, weight[t] = 0.0f;
        int turn = 0;
#pragma unroll 1
        for (int chunk = split; chunk < chunks; chunk += SPLITS, turn ^= 1) {
            const bool committed = (chunk + 1) * KEYS <= b.length;  // every key of the chunk is every node's
            u32* chunk_values = at.values + turn * KEYS * KV_ROW;
            const auto keep = [&](float* to, int stride, float4 s) {  // rows l / 4 and + 8, columns 2 (l mod 4) and the next
                float* mine = to + (b.lane >> 2) * stride + (b.lane & 3) * 2;
                *(float2*)mine = {s.x, s.y};
                *(float2*)(mine + 8 * stride) = {s.z, s.w};
            };
#pragma unroll
            for (int i = 0; i < 2; i++) *(uint4*)(chunk_values + (b.warp * 2 + i) * KV_ROW + b.lane * 4) = value[i];
            if (b.warp < SCORERS)
                keep(at.scores + tile * 16 * KEYS + half * 8, KEYS, score_tile(at.q + tile * 512, key, b.lane));
            if (!committed) {
                const int octets = (base + count + 7) / 8;
#pragma unroll 1
                for (int task = (b.warp + WARPS - SCORERS) % WARPS; task < octets * QUERY_TILES; task += WARPS) {
                    const int octet = task / QUERY_TILES, t = task % QUERY_TILES;
                    const uint4* row = (const uint4*)at.fresh_key(octet * 8 + (b.lane >> 2)) + (b.lane & 3);
#pragma unroll
                    for (int c = 0; c < 8; c++) key[c] = row[c * 4];
                    keep(at.fresh_scores + t * 16 * FRESH_SCORES + octet * 8, FRESH_SCORES, score_tile(at.q + t * 512, key, b.lane));
                }
            }
            if (chunk + SPLITS < chunks) fetch(chunk + SPLITS);
            b.sync();
#pragma unroll
            for (int t = 0; t < QUERY_TILES; t++) {
                if (t * 16 + b.warp * 2 >= queries) break;
                const int query = t * 16 + threadIdx.x / KEYS, place = threadIdx.x % KEYS, position = chunk * KEYS + place;
                const int node = base + min(query, queries - 1) / GROUP;
                const int last = b.length + (NODES == 1 ? 0 : b.s.depth[node]);
                const bool live = query < queries && last >= chunk * KEYS;  // the node sees keys of this chunk
                float mine = MINUS_INFINITY;
                if (live && position <= last)
                    mine = position < b.length ? at.scores[query * KEYS + place]
                                               : at.fresh_scores[query * FRESH_SCORES +
                                                                 (NODES == 1 ? 0 : b.s.ancestor[node][position - b.length])];
                float top = mine;
#pragma unroll
                for (int step = 1; step < KEYS; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
                top = fmaxf(top, peak[t]);
                const float p = live ? __expf(mine - top) : 0.0f;
                float total = p;
#pragma unroll
                for (int step = 1; step < KEYS; step *= 2) total += __shfl_xor_sync(~0u, total, step);
                if (live) {
                    const float kept = __expf(peak[t] - top);
                    weight[t] = fmaf(weight[t], kept, total);
                    peak[t] = top;
                    at.shares[query * KEYS + place] = (u16)pack_half(p, 0.0f);
                    if (place == 0) at.factors[query] = kept;
                }
            }
            b.sync();
            // Value rows as the B operand: lane l gives row l mod 16 of an octet of dimensions, or of the next one.
            const int place = b.lane & 15, octet = b.warp * 16 + (b.lane >> 4) * 4;
#pragma unroll
            for (int t = 0; t < QUERY_TILES; t++) {
                const int row = t * 16 + (b.lane >> 2);
                const float low = at.factors[min(row, queries - 1)], high = at.factors[min(row + 8, queries - 1)];
                const uint4 share = load_matrices(at.shares + (t * 16 + place) * KEYS + (b.lane >> 4) * 8);
                const auto add_values = [&](const u32* mine, float (&acc)[4][4]) {
                    const uint4 a = load_transposed(mine + octet), c = load_transposed(mine + octet + 8);
#pragma unroll
                    for (int n = 0; n < 4; n++)
                        acc[n][0] *= low, acc[n][1] *= low, acc[n][2] *= high, acc[n][3] *= high;
                    mma_half(acc[0], share, a.x, a.y), mma_half(acc[1], share, a.z, a.w);
                    mma_half(acc[2], share, c.x, c.y), mma_half(acc[3], share, c.z, c.w);
                };
                if (committed) {
                    add_values(chunk_values + place * KV_ROW, sum[t]);
                } else {
                    constexpr int TILE_NODES = 16 / GROUP < TOGETHER_NODES ? 16 / GROUP : TOGETHER_NODES;
                    static_assert(16 % GROUP == 0 || QUERY_TILES == 1, "a node's queries lie in one tile");
#pragma unroll 1
                    for (int i = t * (16 / GROUP); i < min(count, t * (16 / GROUP) + TILE_NODES); i++) {
                        const int last = b.length + (NODES == 1 ? 0 : b.s.depth[base + i]), position = chunk * KEYS + place;
                        if (last < chunk * KEYS) continue;
                        const u32* mine = chunk_values + place * KV_ROW;  // past the last key: zeros
                        if (position >= b.length && position <= last)
                            mine = at.fresh_value(NODES == 1 ? 0 : b.s.ancestor[base + i][position - b.length]);
                        float own[4][4];
#pragma unroll
                        for (int n = 0; n < 4; n++)
#pragma unroll
                            for (int j = 0; j < 4; j++) own[n][j] = sum[t][n][j];
                        add_values(mine, own);
#pragma unroll
                        for (int n = 0; n < 4; n++)
#pragma unroll
                            for (int j = 0; j < 4; j++)
                                if ((row + (j < 2 ? 0 : 8)) / GROUP == i) sum[t][n][j] = own[n][j];
                    }
                }
            }
        }

#pragma unroll
        for (int t = 0; t < QUERY_TILES; t++) {
            const int query = t * 16 + threadIdx.x / KEYS, node = base + min(query, queries - 1) / GROUP;
            if (threadIdx.x % KEYS == 0 && query < queries && split * KEYS <= b.length + b.s.depth[node])
                publish8(b.words(ATTENTION_TURN, node, STATS_AT) + ((kv_head * GROUP + query % GROUP) * SPLITS + split) * 2,
                         b.other(ATTENTION_TURN), __float_as_uint(peak[t]), __float_as_uint(weight[t]));
#pragma unroll
            for (int upper = 0; upper < 2; upper++) {
                const int row = t * 16 + upper * 8 + (b.lane >> 2), owner = base + min(row, queries - 1) / GROUP;
                if (row >= queries || split * KEYS > b.length + b.s.depth[owner]) continue;
                u32* to = b.p.parts + (((size_t)owner * HEADS + kv_head * GROUP + row % GROUP) * SPLITS + split) * HEAD_DIM +
                          b.warp * 32 + (b.lane & 3) * 2;
#pragma unroll
                for (int n = 0; n < 4; n++)
                    store8(to + n * 8, __float_as_uint(sum[t][n][upper * 2]), __float_as_uint(sum[t][n][upper * 2 + 1]));
            }
        }
    }
}

// Stage: this SM's items.
__device__ __forceinline__ void attention_parts(Block& b, int index, const float* vectors) {
    const int first = first_unit(ATTENTION_ITEMS, b.sm), end = first_unit(ATTENTION_ITEMS, b.sm + 1);
#pragma unroll 1
    for (int item = first; item < end; item++) {
        if (NODES > 1 || item > first) b.sync();  // what the scratch holds may still be read
        attention_item(b, index, item, vectors);
    }
    if (NODES > 1) b.sync();
}

// Stage: merge the splits in their order, gate, publish. A warp takes a piece of a node's head, a lane WIDTH dimensions.
__device__ __forceinline__ void attention_merge(Block& b) {
    constexpr int WIDTH = NODES == 1 ? 1 : 2, PIECES = HEAD_DIM / (32 * WIDTH), AT_ONCE = 32, EACH = SPLITS / 32;
    static_assert(SPLITS % AT_ONCE == 0, "whole groups of splits");
    const int tasks = b.nodes * HEADS * PIECES;
#pragma unroll 1
    for (int task = b.warp * SMS + b.sm; task < tasks; task += WARPS * SMS) {
        const int node = task / (HEADS * PIECES), head = task / PIECES % HEADS, dim = task % PIECES * (32 * WIDTH) + b.lane * WIDTH;
        const int splits = min(SPLITS, (b.length + (NODES == 1 ? 0 : b.s.depth[node])) / KEYS + 1);
        const u32* stats_at = b.words(ATTENTION_TURN, node, STATS_AT) + head * SPLITS * 2;
        const u32* gate_at = b.words(ATTENTION_TURN, node, ATTENTION_IN_AT) + (head * 2 + 1) * HEAD_DIM + dim;
        u32* part = b.p.parts + ((size_t)node * HEADS + head) * SPLITS * HEAD_DIM + dim;
        float share[EACH] = {}, weight = 0.0f, sum[WIDTH] = {};
        uint2 stats[EACH] = {};
        u32 gates[WIDTH] = {};
#pragma unroll 1
        for (int first = 0; first < splits; first += AT_ONCE) {
            u32 got[AT_ONCE][WIDTH];
            Watchdog dog;
            bool came;
            do {  // the group's sums; with the first everything else
                came = true;
                if (first == 0) {
#pragma unroll
                    for (int i = 0; i < EACH; i++) stats[i] = load8(stats_at + min(i * 32 + b.lane, splits - 1) * 2);
#pragma unroll
                    for (int w = 0; w < WIDTH; w++) gates[w] = load4(gate_at + w);
                }
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++) {
                    const u32* at = part + min(first + i, splits - 1) * HEAD_DIM;
                    if constexpr (WIDTH == 1) {
                        got[i][0] = load4(at);
                    } else {
                        const uint2 two = load8(at);
                        got[i][0] = two.x, got[i][WIDTH - 1] = two.y;
                    }
                }
                if (first == 0) {
#pragma unroll
                    for (int i = 0; i < EACH; i++) came &= stats[i].x != NOT_YET;
#pragma unroll
                    for (int w = 0; w < WIDTH; w++) came &= gates[w] != NOT_YET;
                }
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++) came &= got[i][0] != NOT_YET;
                dog.check();
            } while (!everywhere(came));
            if (first == 0) {
                float peak = MINUS_INFINITY;
#pragma unroll
                for (int i = 0; i < EACH; i++)
                    if (i * 32 + b.lane < splits) peak = fmaxf(peak, __uint_as_float(stats[i].x));
                peak = warp_max(peak);
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    share[i] = i * 32 + b.lane < splits ? __expf(__uint_as_float(stats[i].x) - peak) : 0.0f;
                    weight = fmaf(share[i], __uint_as_float(stats[i].y), weight);
                }
                weight = warp_sum(weight);
            }
            float shares = share[0];
#pragma unroll
            for (int i = 1; i < EACH; i++) shares = first == i * 32 ? share[i] : shares;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const float mine = __shfl_sync(~0u, shares, i);  // 0 past the last split
#pragma unroll
                for (int w = 0; w < WIDTH; w++) sum[w] = fmaf(mine, __uint_as_float(got[i][w]), sum[w]);
                if (first + i < splits) {
                    u32* at = part + (first + i) * HEAD_DIM;
                    if constexpr (WIDTH == 1)
                        store4(at, NOT_YET);
                    else
                        store8(at, NOT_YET, NOT_YET);
                }
            }
        }
        const float inverse = __fdividef(1.0f, weight);
        float y[WIDTH];
#pragma unroll
        for (int w = 0; w < WIDTH; w++) y[w] = sum[w] * inverse * sigmoid(__uint_as_float(gates[w]));
        const float after = WIDTH == 1 ? __shfl_down_sync(~0u, y[0], 1) : y[WIDTH - 1];
        const u32 pair = pack_bf16(y[0], after), next = __shfl_down_sync(~0u, pair, 2 / WIDTH);
        if (b.lane % (4 / WIDTH) == 0)
            publish8(b.values<ATTENTION_DIM>(ATTENTION_TURN, node, ATTENTION_Y_AT, head * HEAD_DIM + dim), b.other(ATTENTION_TURN), pair, next);
    }
}
