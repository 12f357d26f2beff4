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
// Scratch: q [tiles][8 chunks][2][32 lanes] uint4 in the order of the mma's A operand, scores [2][queries][16], factors that
// keep older sums in step [2][queries], scores of drafted keys [queries][nodes], drafted keys and values [nodes][2][256].
#pragma once
#include "block.cuh"

static_assert(HEAD_DIM == 256 && ROTARY == 64, "a lane has eight dimensions; the rotated ones are in lanes 0 to 7");
constexpr float ATTENTION_SCALE = 0.0625f;  // 256 ** -0.5

struct AttentionScratch {
    uint4* q;
    float *scores, *factors, *fresh_scores;
    u32* fresh;

    __device__ explicit AttentionScratch(float* at)
        : q((uint4*)at), scores(at + Q_FLOATS), factors(scores + 2 * SCORE_FLOATS),
          fresh_scores(factors + aligned(2 * QUERIES)), fresh((u32*)(fresh_scores + QUERY_TILES * 16 * FRESH_SCORES)) {}
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
    float cosine[8], sine[8];
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        const float4 a = __ldg(low + i / 2), c = __ldg(high + i / 2);
        cosine[i] = a.x * c.x - a.y * c.y, sine[i] = a.y * c.x + a.x * c.y;
        cosine[i + 1] = a.z * c.z - a.w * c.w, sine[i + 1] = a.w * c.z + a.z * c.w;
    }
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
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int row = first + i, over = row - GROUP;
        if (over >= 0 && !holds_new) break;
        const float4 a = floats(got[i][0]), c = floats(got[i][1]);
        float v[8] = {a.x, a.y, a.z, a.w, c.x, c.y, c.z, c.w};
        if (over < 1) {
            const float4* weight = (const float4*)(vectors + (over < 0 ? Q_NORM_AT : K_NORM_AT)) + b.lane * 2;
            const float4 w0 = __ldg(weight), w1 = __ldg(weight + 1);
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
            *(uint4*)(at.fresh + (node * 2 + over) * (HEAD_DIM / 2) + b.lane * 4) = packed;
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

    // Scores: warp w has tile w / 2 and half of the keys. Sums: a thread has four dimensions of a head, for every node.
    constexpr int SCORERS = 2 * QUERY_TILES;
    const int tile = b.warp >> 1, half = b.warp & 1;
    constexpr int QUADS = HEAD_DIM / 4, AT_ONCE = CONSUMERS / QUADS, PASSES = (GROUP + AT_ONCE - 1) / AT_ONCE;
    const int quad = threadIdx.x % QUADS, first_head = threadIdx.x / QUADS;
    uint4 key[8];
    uint2 value[KEYS];
    const auto fetch_keys = [&](int chunk) {
        const int position = chunk * KEYS + half * 8 + (b.lane >> 2);
        const uint4* row = (const uint4*)(keys + (size_t)position * (HEAD_DIM / 2)) + (b.lane & 3);
#pragma unroll
        for (int c = 0; c < 8; c++) key[c] = b.warp < SCORERS && position < b.length ? __ldcg(row + c * 4) : uint4{};
    };
    const auto fetch_values = [&](int chunk) {
#pragma unroll
        for (int n = 0; n < KEYS; n++) {
            const int position = chunk * KEYS + n;
            value[n] = uint2{};
            if (position < b.length) value[n] = __ldcg((const uint2*)(values + (size_t)position * (HEAD_DIM / 2)) + quad);
        }
    };

#pragma unroll 1
    for (int base = 0; base < b.nodes; base += TOGETHER_NODES) {
        const int count = min(TOGETHER_NODES, b.nodes - base);
        if (base > 0) b.sync();  // q of the nodes before
        fetch_keys(split);       // committed keys do not wait for anything
        fetch_values(split);
        if constexpr (NODES == 1) {
            if (b.warp < GROUP + (holds_new ? 2 : 0))
                make_rows<1>(b, at, kv_head, head_at, 0, 0, b.warp, holds_new, vectors, keys, values);
            static_assert(NODES > 1 || GROUP + 2 <= WARPS, "a warp a row");
        } else {
            if (b.warp < count)
                make_rows<GROUP + 2>(b, at, kv_head, head_at, base + b.warp, base, 0, holds_new, vectors, keys, values);
        }
        b.sync();

        float peak[(QUERIES + 15) / 16], weight[(QUERIES + 15) / 16];  // of query threadIdx / 16, and of every sixteenth on
#pragma unroll
        for (int i = 0; i < (QUERIES + 15) / 16; i++) peak[i] = MINUS_INFINITY, weight[i] = 0.0f;
        float4 sum[PASSES][TOGETHER_NODES] = {};
        int turn = 0;
#pragma unroll 1
        for (int chunk = split; chunk < chunks; chunk += SPLITS, turn ^= 1) {
            float* score = at.scores + turn * SCORE_FLOATS;
            float* factor = at.factors + turn * QUERIES;
            const bool committed = (chunk + 1) * KEYS <= b.length;  // every key of the chunk is every node's
            const auto keep = [&](float* to, int stride, float4 s) {  // rows l / 4 and + 8, columns 2 (l mod 4) and the next
                float* mine = to + (b.lane >> 2) * stride + (b.lane & 3) * 2;
                *(float2*)mine = {s.x, s.y};
                *(float2*)(mine + 8 * stride) = {s.z, s.w};
            };
            if (b.warp < SCORERS)
                keep(score + tile * 16 * KEYS + half * 8, KEYS, score_tile(at.q + tile * 512, key, b.lane));
            if (!committed) {
                const int octets = (base + count + 7) / 8;
#pragma unroll 1
                for (int task = (b.warp + WARPS - SCORERS) % WARPS; task < octets * QUERY_TILES; task += WARPS) {
                    const int octet = task / QUERY_TILES, t = task % QUERY_TILES;
                    const uint4* row = (const uint4*)(at.fresh + (octet * 8 + (b.lane >> 2)) * HEAD_DIM) + (b.lane & 3);
#pragma unroll
                    for (int c = 0; c < 8; c++) key[c] = row[c * 4];
                    keep(at.fresh_scores + t * 16 * FRESH_SCORES + octet * 8, FRESH_SCORES, score_tile(at.q + t * 512, key, b.lane));
                }
            }
            if (chunk + SPLITS < chunks) fetch_keys(chunk + SPLITS);
            b.sync();
#pragma unroll
            for (int i = 0; i < (QUERIES + 15) / 16; i++) {
                const int query = i * 16 + threadIdx.x / KEYS, place = threadIdx.x % KEYS, position = chunk * KEYS + place;
                if (i * 16 + b.warp * 2 >= count * GROUP) break;
                const int node = base + min(query, count * GROUP - 1) / GROUP;
                const int last = b.length + (NODES == 1 ? 0 : b.s.depth[node]);
                const bool live = query < count * GROUP && last >= chunk * KEYS;  // the node sees keys of this chunk
                float mine = MINUS_INFINITY;
                if (live && position <= last)
                    mine = position < b.length ? score[query * KEYS + place]
                                               : at.fresh_scores[query * FRESH_SCORES +
                                                                 (NODES == 1 ? 0 : b.s.ancestor[node][position - b.length])];
                float top = mine;
#pragma unroll
                for (int step = 1; step < KEYS; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
                top = fmaxf(top, peak[i]);
                const float p = live ? __expf(mine - top) : 0.0f;
                float total = p;
#pragma unroll
                for (int step = 1; step < KEYS; step *= 2) total += __shfl_xor_sync(~0u, total, step);
                if (live) {
                    const float kept = __expf(peak[i] - top);
                    weight[i] = fmaf(weight[i], kept, total);
                    peak[i] = top;
                    score[query * KEYS + place] = p;
                    if (place == 0) factor[query] = kept;
                }
            }
            b.sync();
#pragma unroll
            for (int i = 0; i < TOGETHER_NODES; i++) {
                const int last = i < count ? b.length + (NODES == 1 ? 0 : b.s.depth[base + i]) - chunk * KEYS : -1;
                if (last < 0) continue;
                if (!committed) {
#pragma unroll
                    for (int n = 0; n < KEYS; n++) {  // a key that is not seen has weight 0; its value must be a number
                        const int position = chunk * KEYS + n;
                        if (position < b.length) continue;
                        const int from = NODES == 1 || n > last ? 0 : b.s.ancestor[base + i][position - b.length];
                        value[n] = n <= last ? *((const uint2*)(at.fresh + (from * 2 + 1) * (HEAD_DIM / 2)) + quad) : uint2{};
                    }
                }
#pragma unroll
                for (int pass = 0; pass < PASSES; pass++) {
                    const int g = pass * AT_ONCE + first_head;
                    if (g >= GROUP) break;
                    const float4* p = (const float4*)(score + (i * GROUP + g) * KEYS);
                    const float kept = factor[i * GROUP + g];
                    float4 acc = sum[pass][i];
                    acc = {acc.x * kept, acc.y * kept, acc.z * kept, acc.w * kept};
#pragma unroll
                    for (int n4 = 0; n4 < KEYS / 4; n4++) {
                        const float4 p4 = p[n4];
#pragma unroll
                        for (int m = 0; m < 4; m++) {
                            const uint2 packed = value[n4 * 4 + m];
                            const float share = m == 0 ? p4.x : m == 1 ? p4.y : m == 2 ? p4.z : p4.w;
                            const float2 low = unpack_half(packed.x), high = unpack_half(packed.y);
                            acc.x = fmaf(share, low.x, acc.x), acc.y = fmaf(share, low.y, acc.y);
                            acc.z = fmaf(share, high.x, acc.z), acc.w = fmaf(share, high.y, acc.w);
                        }
                    }
                    sum[pass][i] = acc;
                }
            }
            if (chunk + SPLITS < chunks) fetch_values(chunk + SPLITS);
        }

#pragma unroll
        for (int i = 0; i < (QUERIES + 15) / 16; i++) {
            const int query = i * 16 + threadIdx.x / KEYS;
            if (threadIdx.x % KEYS || query >= count * GROUP) continue;
            const int node = base + query / GROUP, head = kv_head * GROUP + query % GROUP;
            if (split * KEYS <= b.length + b.s.depth[node])
                publish8(b.words(ATTENTION_TURN, node, STATS_AT) + (head * SPLITS + split) * 2, b.other(ATTENTION_TURN),
                         __float_as_uint(peak[i]), __float_as_uint(weight[i]));
        }
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            const int head = kv_head * GROUP + pass * AT_ONCE + first_head;
#pragma unroll
            for (int i = 0; i < TOGETHER_NODES; i++) {
                if (i >= count || pass * AT_ONCE + first_head >= GROUP) continue;
                if (split * KEYS > b.length + b.s.depth[base + i]) continue;
                const float4 v = sum[pass][i];
                store16(b.p.parts + (((size_t)(base + i) * HEADS + head) * SPLITS + split) * HEAD_DIM + quad * 4,
                        __float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w));
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

// Stage: merge the splits of four dimensions a warp, gate, publish.
__device__ __forceinline__ void attention_merge(Block& b) {
    constexpr int PIECES_OF_Y = ATTENTION_DIM / 4;
    const int first = first_unit(PIECES_OF_Y, b.sm), mine = first_unit(PIECES_OF_Y, b.sm + 1) - first;
#pragma unroll 1
    for (int task = b.warp; task < mine * b.nodes; task += WARPS) {
        const int node = NODES == 1 ? 0 : task / mine, at = first + (NODES == 1 ? task : task % mine);
        const int head = at / (HEAD_DIM / 4), piece = at % (HEAD_DIM / 4);
        const int splits = min(SPLITS, (b.length + b.s.depth[node]) / KEYS + 1);
        constexpr int EACH = SPLITS / 32;
        u32* part = b.p.parts + ((size_t)node * HEADS + head) * SPLITS * HEAD_DIM + piece * 4;
        const u32* stats_at = b.words(ATTENTION_TURN, node, STATS_AT) + head * SPLITS * 2;
        const u32* gate_at = b.words(ATTENTION_TURN, node, ATTENTION_IN_AT) + (head * 2 + 1) * HEAD_DIM + piece * 4;
        uint2 stats[EACH];
        uint4 sums[EACH], gates;
        Watchdog dog;
        bool came;
        do {
            gates = load16(gate_at);
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (i * 32 + b.lane < splits) {
                    stats[i] = load8(stats_at + (i * 32 + b.lane) * 2);
                    sums[i] = load16(part + (i * 32 + b.lane) * HEAD_DIM);
                }
            came = came16(gates);
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (i * 32 + b.lane < splits) came &= stats[i].x != NOT_YET & came16(sums[i]);
            dog.check();
        } while (!came);
        __syncwarp();
        float peak = MINUS_INFINITY, weight = 0.0f;
        float4 sum = {}, acc[EACH];
        float2 stat[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const bool live = i * 32 + b.lane < splits;
            stat[i] = live ? float2{__uint_as_float(stats[i].x), __uint_as_float(stats[i].y)} : float2{MINUS_INFINITY, 0};
            acc[i] = live ? floats(sums[i]) : float4{};
            peak = fmaxf(peak, stat[i].x);
            if (live) store16(part + (i * 32 + b.lane) * HEAD_DIM, NOT_YET, NOT_YET, NOT_YET, NOT_YET);
        }
        peak = warp_max(peak);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const float share = __expf(stat[i].x - peak);
            weight = fmaf(share, stat[i].y, weight);
            sum.x = fmaf(share, acc[i].x, sum.x), sum.y = fmaf(share, acc[i].y, sum.y);
            sum.z = fmaf(share, acc[i].z, sum.z), sum.w = fmaf(share, acc[i].w, sum.w);
        }
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            weight += __shfl_xor_sync(~0u, weight, step);
            sum.x += __shfl_xor_sync(~0u, sum.x, step), sum.y += __shfl_xor_sync(~0u, sum.y, step);
            sum.z += __shfl_xor_sync(~0u, sum.z, step), sum.w += __shfl_xor_sync(~0u, sum.w, step);
        }
        if (b.lane == 0) {
            const float4 gate = floats(gates);
            const float inverse = __fdividef(1.0f, weight);
            publish8(b.words(ATTENTION_TURN, node, ATTENTION_Y_AT) + at * 2, b.other(ATTENTION_TURN),
                     pack_bf16(sum.x * inverse * sigmoid(gate.x), sum.y * inverse * sigmoid(gate.y)),
                     pack_bf16(sum.z * inverse * sigmoid(gate.z), sum.w * inverse * sigmoid(gate.w)));
        }
    }
}
