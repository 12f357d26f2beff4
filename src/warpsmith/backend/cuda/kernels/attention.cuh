// Gated attention over any length, split by absolute position.
//
// Keys come in chunks of 16 positions; chunk c belongs to split c mod SPLITS, whatever the chip and however many nodes.
// An item is one key head and one split: it walks its chunks in order with an online softmax for the GROUP query heads
// of some nodes, and publishes unnormalised sums with their maximum and weight. A second step merges the splits in their
// order, divides, and applies the output gate.
// A tile is 16 queries: those of whole nodes. One or more warps have a tile, each all scores of a chunk and a share of the 256
// dimensions of the sums: scores by mma (16 queries x 8 keys x 16 dimensions, fp16 in, f32 sums), softmax in registers, whose
// weights are the next mma's operand (16 queries x 8 dimensions x 16 keys). An element of the scores depends on its query and
// its key alone. A drafted key is held against all queries apart from the chunks; each node then picks its ancestors' scores,
// at their positions, and its own row of values for every place of the chunk. So a key is worked on in chunk p / 16 at place
// p mod 16, whether it is committed or drafted, and plain and tree runs agree to the bit.
// Bytes: 1 KB of fp16 keys and values a position and key head, read once for the nodes of up to TILES tiles.
// Scratch: q [tiles][16], scores of drafted keys [tiles][16][nodes], drafted keys and values [nodes][2], chunks of keys and
// values on their way [KV_STAGES][2][16]; rows of 256 fp16 and some room that keeps the banks apart.
#pragma once
#include "block.cuh"

static_assert(HEAD_DIM == 256 && ROTARY == 64, "a lane has eight dimensions; the rotated ones are in lanes 0 to 7");
constexpr float ATTENTION_SCALE = 0.0625f;  // 256 ** -0.5

struct AttentionScratch {
    u32* q;
    float* fresh_scores;
    u32 *fresh, *chunks;

    __device__ explicit AttentionScratch(float* at)
        : q((u32*)at), fresh_scores(at + Q_FLOATS), fresh((u32*)fresh_scores + TILES * 16 * FRESH_SCORES),
          chunks(fresh + 2 * NODES * KV_ROW) {}
    __device__ u32* fresh_key(int node) const { return fresh + node * KV_ROW; }
    __device__ u32* fresh_value(int node) const { return fresh + (NODES + node) * KV_ROW; }
    __device__ u32* keys(int stage) const { return chunks + stage * 2 * KEYS * KV_ROW; }
    __device__ u32* values(int stage) const { return keys(stage) + KEYS * KV_ROW; }
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
            const int here = node - base, query = here / TILE_NODES * 16 + here % TILE_NODES * GROUP + row;
            *(uint4*)(at.q + query * KV_ROW + b.lane * 4) = packed;
        } else {
            u32* to = b.decoding() ? (over ? values : keys) + (size_t)position * (HEAD_DIM / 2)
                                   : (over ? b.p.pending_values : b.p.pending_keys) + (head_at * MAX_NODES + node) * (HEAD_DIM / 2);
            *(uint4*)(to + b.lane * 4) = packed;
            *(uint4*)((over ? at.fresh_value(node) : at.fresh_key(node)) + b.lane * 4) = packed;
        }
    }
}

// A tile's queries as the mma's A operand: 16 of their dimensions.
__device__ __forceinline__ uint4 query_piece(const u32* tile, int step, int lane) {
    const int row = NODES == 1 ? min(lane & 15, GROUP - 1) : lane & 15;  // there are no more queries than that
    return load_matrices(tile + row * KV_ROW + step * 8 + (lane >> 4) * 4);
}

// Scores of 16 queries against 16 keys, `limit` of which there are: octets of keys; in each, rows l / 4 and + 8, keys
// 2 (l mod 4) and the next.
template <class Query>
__device__ __forceinline__ void score(float (&out)[2][4], Query query, const u32* keys, int limit, int lane) {
    const u32* row = keys + min((lane & 7) + (lane >> 4) * 8, limit - 1) * KV_ROW + (lane >> 3 & 1) * 4;
    float sum[2][2][4] = {};
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++) {
        const uint4 a = query(step), k = load_matrices(row + step * 8);
        mma_half(sum[step & 1][0], a, k.x, k.y), mma_half(sum[step & 1][1], a, k.z, k.w);
    }
#pragma unroll
    for (int octet = 0; octet < 2; octet++)
#pragma unroll
        for (int i = 0; i < 4; i++) out[octet][i] = sum[0][octet][i] + sum[1][octet][i];
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

    // A warp copies two rows of keys and of values; what is not committed yet is zeros.
    const auto ask_for = [&](int chunk, int stage) {
#pragma unroll
        for (int i = 0; i < 2 && chunk < chunks; i++) {
            const int row = b.warp * 2 + i, position = chunk * KEYS + row;
            const bool live = position < b.length;
            const size_t from = live ? (size_t)position * (HEAD_DIM / 2) + b.lane * 4 : 0;
            copy16_or_zero(at.keys(stage) + row * KV_ROW + b.lane * 4, keys + from, live);
            copy16_or_zero(at.values(stage) + row * KV_ROW + b.lane * 4, values + from, live);
        }
        copies_follow();
    };

    const int tile = b.warp / TILE_WARPS, share = b.warp % TILE_WARPS, row = b.lane >> 2, column = (b.lane & 3) * 2;
    constexpr int OCTETS_EACH = HEAD_DIM / TILE_WARPS / 8;  // octets of dimensions a warp sums
    const u32* q = at.q + tile * 16 * KV_ROW;
#pragma unroll 1
    for (int base = 0; base < b.nodes; base += TOGETHER_NODES) {
        const int count = min(TOGETHER_NODES, b.nodes - base);
        if (base > 0) b.sync();  // q of the nodes before
#pragma unroll
        for (int i = 0; i < KV_STAGES - 1; i++) ask_for(split + i * SPLITS, i);  // committed keys do not wait for anything
        if constexpr (NODES == 1) {
            static_assert(NODES > 1 || GROUP + 2 <= WARPS, "a warp a row");
            if (b.warp < GROUP + (holds_new ? 2 : 0))
                make_rows<1>(b, at, kv_head, head_at, 0, 0, b.warp, holds_new, vectors, keys, values);
        } else {
#pragma unroll 1
            for (int i = b.warp; i < count; i += WARPS)
                make_rows<GROUP + 2>(b, at, kv_head, head_at, base + i, base, 0, holds_new, vectors, keys, values);
        }

        // The nodes of this lane's two rows, and the last position each sees (before any: there is no such query).
        const int first_node = base + tile * TILE_NODES, nodes_here = min(TILE_NODES, base + count - first_node);
        int mine[2], last[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int which = (row + i * 8) / GROUP;
            const bool live = tile < TILES && which < nodes_here;
            mine[i] = live ? first_node + which : 0;
            last[i] = live ? b.length + (NODES == 1 ? 0 : b.s.depth[mine[i]]) : -1;
        }
        float peak[2] = {MINUS_INFINITY, MINUS_INFINITY}, weight[2] = {}, sum[OCTETS_EACH][4] = {};
        int stage = 0;
        b.sync();
        uint4 held[NODES == 1 ? HEAD_DIM / 16 : 1] = {};  // one node's queries fit in the registers
        if (NODES == 1) {
#pragma unroll
            for (int step = 0; step < HEAD_DIM / 16; step++) held[NODES == 1 ? step : 0] = query_piece(q, step, b.lane);
        }
#pragma unroll 1
        for (int chunk = split; chunk < chunks; chunk += SPLITS) {
            if (KV_STAGES == 1) {
                if (chunk > split) b.sync();  // the chunk before
                ask_for(chunk, 0);
                copies_done();
            } else {
                copies_done_but<larger(0, KV_STAGES - 2)>();
            }
            b.sync();
            if (KV_STAGES > 1) ask_for(chunk + (KV_STAGES - 1) * SPLITS, stage == 0 ? KV_STAGES - 1 : stage - 1);
            const u32 *chunk_keys = at.keys(stage), *chunk_values = at.values(stage);
            stage = stage == KV_STAGES - 1 ? 0 : stage + 1;
            if (tile >= TILES || nodes_here <= 0) continue;

            const auto query = [&](int step) { return NODES == 1 ? held[NODES == 1 ? step : 0] : query_piece(q, step, b.lane); };
            float p[2][4];
            score(p, query, chunk_keys, KEYS, b.lane);
            const bool committed = (chunk + 1) * KEYS <= b.length;  // every key of the chunk is every node's
            if (!committed) {
                float* scores = at.fresh_scores + tile * 16 * FRESH_SCORES;  // a tile's warps write the same
#pragma unroll 1
                for (int first = 0; first < b.nodes; first += 16) {
                    float fresh[2][4];
                    score(fresh, query, at.fresh_key(first), min(16, NODES - first), b.lane);
#pragma unroll
                    for (int octet = 0; octet < 2; octet++)
#pragma unroll
                        for (int i = 0; i < 2; i++)
                            *(float2*)(scores + (row + i * 8) * FRESH_SCORES + first + octet * 8 + column) = {
                                fresh[octet][i * 2], fresh[octet][i * 2 + 1]};
                }
                __syncwarp();
#pragma unroll
                for (int octet = 0; octet < 2; octet++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int position = chunk * KEYS + octet * 8 + column + (i & 1), r = i >> 1;
                        if (position > last[r])
                            p[octet][i] = MINUS_INFINITY;
                        else if (position >= b.length)
                            p[octet][i] = scores[(row + r * 8) * FRESH_SCORES +
                                                 (NODES == 1 ? 0 : b.s.ancestor[mine[r]][position - b.length])];
                    }
                __syncwarp();
            }
            float kept[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float top = fmaxf(fmaxf(p[0][2 * r], p[0][2 * r + 1]), fmaxf(p[1][2 * r], p[1][2 * r + 1]));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
                top = fmaxf(top, peak[r]);
                const bool live = last[r] >= chunk * KEYS;  // the node sees keys of this chunk
#pragma unroll
                for (int octet = 0; octet < 2; octet++)
#pragma unroll
                    for (int i = 2 * r; i < 2 * r + 2; i++) p[octet][i] = live ? __expf(p[octet][i] - top) : 0.0f;
                float total = (p[0][2 * r] + p[0][2 * r + 1]) + (p[1][2 * r] + p[1][2 * r + 1]);
                total += __shfl_xor_sync(~0u, total, 1);
                total += __shfl_xor_sync(~0u, total, 2);
                kept[r] = live ? __expf(peak[r] - top) : 1.0f;
                weight[r] = live ? fmaf(weight[r], kept[r], total) : weight[r];
                peak[r] = live ? top : peak[r];
            }
#pragma unroll
            for (int n = 0; n < OCTETS_EACH; n++)
                sum[n][0] *= kept[0], sum[n][1] *= kept[0], sum[n][2] *= kept[1], sum[n][3] *= kept[1];
            // rows l / 4 and + 8 at keys 2 (l mod 4) and the next, then the same at the later eight keys
            const uint4 shares = {pack_half(p[0][0], p[0][1]), pack_half(p[0][2], p[0][3]), pack_half(p[1][0], p[1][1]),
                                  pack_half(p[1][2], p[1][3])};
            // Value rows as the B operand: lane l gives row l mod 16 of an octet of dimensions, or of the next one. Where there
            // are drafted ones every node has its own, and the other nodes' weights are zeros.
            const int place = b.lane & 15;
#pragma unroll 1
            for (int which = 0; which < (committed ? 1 : nodes_here); which++) {
                const u32* own = chunk_values + place * KV_ROW;
                uint4 a = shares;
                if (!committed) {
                    const int node = first_node + which, position = chunk * KEYS + place;
                    if (position >= b.length && position <= b.length + (NODES == 1 ? 0 : b.s.depth[node]))
                        own = at.fresh_value(NODES == 1 ? 0 : b.s.ancestor[node][position - b.length]);
                    if (row / GROUP != which) a.x = a.z = 0;
                    if ((row + 8) / GROUP != which) a.y = a.w = 0;
                }
                own += share * (OCTETS_EACH * 4) + (b.lane >> 4) * 4;
#pragma unroll
                for (int n = 0; n < OCTETS_EACH; n += 2) {
                    const uint4 v = load_transposed(own + n * 4);
                    mma_half(sum[n], a, v.x, v.y), mma_half(sum[n + 1], a, v.z, v.w);
                }
            }
        }

#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (last[r] < split * KEYS) continue;
            const int head = kv_head * GROUP + (row + r * 8) % GROUP;
            if (column == 0 && share == 0)
                publish8(b.words(ATTENTION_TURN, mine[r], STATS_AT) + (head * SPLITS + split) * 2, b.other(ATTENTION_TURN),
                         __float_as_uint(peak[r]), __float_as_uint(weight[r]));
            u32* to = b.p.parts + (((size_t)mine[r] * HEADS + head) * SPLITS + split) * HEAD_DIM + share * (OCTETS_EACH * 8) + column;
#pragma unroll
            for (int n = 0; n < OCTETS_EACH; n++)
                store8(to + n * 8, __float_as_uint(sum[n][r * 2]), __float_as_uint(sum[n][r * 2 + 1]));
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
            publish8(b.words(ATTENTION_TURN, node, ATTENTION_Y_AT) + (head * HEAD_DIM + dim) / 2, b.other(ATTENTION_TURN), pair, next);
    }
}
