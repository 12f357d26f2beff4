// Gated attention over any length, split by absolute position.
//
// Keys come in chunks of 16 positions; chunk c belongs to split c mod SPLITS, whatever the chip and however many nodes.
// An item is one key head and one split: it walks its chunks in order with an online softmax for the GROUP query heads
// of every node, and publishes unnormalised sums with their maximum and weight. A second step merges the splits in a
// fixed order, divides, and applies the output gate. A key at position p is worked on in chunk p / 16 by warp p mod 8,
// whether it is committed or a drafted ancestor, so plain and tree runs agree to the bit.
// Bytes: 1 KB of fp16 keys and values a position and key head, read once for 4 nodes.
// Scratch: q [4 nodes][GROUP][256], scores [2][4 nodes][GROUP][16], then the factor that keeps older sums in step, then
// the new keys and values [nodes][2][256] in fp16.
#pragma once
#include "block.cuh"

static_assert(PAIRS * KEYS <= CONSUMERS, "a thread a score");
static_assert(HEAD_DIM == 256 && ROTARY == 64, "a lane has eight dimensions; the rotated ones are in lanes 0 to 7");
constexpr float ATTENTION_SCALE = 0.0625f;  // 256 ** -0.5

// Eight values of a head (dimensions 8 lane ..) at a position, normed and rotated. The whole warp works on one head.
__device__ __forceinline__ void normed_head(const Block& b, const u32* head, const float* weight, int position, float (&v)[8]) {
    // pairs (j, j + 32): lanes 0..3 hold the first of a pair, lanes 4..7 the second
    const float4* low = (const float4*)(b.p.rope + (position & 63) * 32 + (b.lane & 3) * 8);
    const float4* high = (const float4*)(b.p.rope + (64 + (position >> 6)) * 32 + (b.lane & 3) * 8);
    const float4 w0 = __ldg((const float4*)weight + b.lane * 2), w1 = __ldg((const float4*)weight + b.lane * 2 + 1);
    float cosine[8], sine[8];
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        const float4 a = __ldg(low + i / 2), c = __ldg(high + i / 2);
        cosine[i] = a.x * c.x - a.y * c.y, sine[i] = a.y * c.x + a.x * c.y;
        cosine[i + 1] = a.z * c.z - a.w * c.w, sine[i + 1] = a.w * c.z + a.z * c.w;
    }
    uint4 got[2];
    Watchdog dog;
    do {
        got[0] = load16(head + b.lane * 8), got[1] = load16(head + b.lane * 8 + 4);
        dog.check();
    } while (!(came16(got[0]) & came16(got[1])));
    __syncwarp();
    const float4 low4 = floats(got[0]), high4 = floats(got[1]);
    v[0] = low4.x, v[1] = low4.y, v[2] = low4.z, v[3] = low4.w, v[4] = high4.x, v[5] = high4.y, v[6] = high4.z, v[7] = high4.w;
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) square = fmaf(v[i], v[i], square);
    const float scale = rsqrtf(warp_sum(square) / HEAD_DIM + EPS);
    v[0] *= scale * w0.x, v[1] *= scale * w0.y, v[2] *= scale * w0.z, v[3] *= scale * w0.w;
    v[4] *= scale * w1.x, v[5] *= scale * w1.y, v[6] *= scale * w1.z, v[7] *= scale * w1.w;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float other = __shfl_xor_sync(~0u, v[i], 4);
        if (b.lane < 8) v[i] = b.lane < 4 ? v[i] * cosine[i] - other * sine[i] : v[i] * cosine[i] + other * sine[i];
    }
}

struct Cache {
    u32 *keys, *values;  // fp16 pairs of this layer and key head, [context][HEAD_DIM / 2]
    u32* fresh;          // of the tree's nodes, in shared memory [nodes][2][HEAD_DIM / 2]
};

// The new key and value of a node: into the scratch, and to where they will be looked for later.
__device__ __forceinline__ void make_fresh(const Block& b, const Cache& c, size_t head_at, int kv_head, int node, bool is_value,
                                           const float* vectors) {
    const int position = b.length + b.s.depth[node];
    const u32* row = b.words(ATTENTION_TURN, node, ATTENTION_IN_AT) + 2 * ATTENTION_DIM + kv_head * HEAD_DIM;
    float v[8];
    if (!is_value) {
        normed_head(b, row, vectors + K_NORM_AT, position, v);
    } else {
        const u32* at = row + KV_HEADS * HEAD_DIM + b.lane * 8;
        const float4 low = poll16(at), high = poll16(at + 4);
        v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w, v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
    }
    const uint4 packed = {pack_half(v[0], v[1]), pack_half(v[2], v[3]), pack_half(v[4], v[5]), pack_half(v[6], v[7])};
    u32* to = b.decoding() ? (is_value ? c.values : c.keys) + (size_t)position * (HEAD_DIM / 2)
                           : (is_value ? b.p.pending_values : b.p.pending_keys) + (head_at * MAX_NODES + node) * (HEAD_DIM / 2);
    *(uint4*)(to + b.lane * 4) = packed;
    *(uint4*)(c.fresh + (node * 2 + is_value) * (HEAD_DIM / 2) + b.lane * 4) = packed;
}

// Where a node finds its drafted ancestor at a position.
__device__ __forceinline__ int fresh_row(const Block& b, int node, int position) {
    return (NODES == 1 ? 0 : b.s.ancestor[node][position - b.length]) * HEAD_DIM;
}

__device__ __forceinline__ void attention_item(Block& b, int index, int item, const float* vectors) {
    const int kv_head = item / SPLITS, split = item % SPLITS;
    float* q = b.scratch + MIX_AT;
    float* scores = q + Q_FLOATS;
    const size_t head_at = (size_t)index * KV_HEADS + kv_head, cache_at = head_at * b.p.context * (HEAD_DIM / 2);
    const Cache c = {b.p.keys + cache_at, b.p.values + cache_at, (u32*)(scores + 2 * SCORE_FLOATS + 2 * PAIRS)};

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

    // Softmax: a thread a score, sixteen a node and head. Sums: a thread four dimensions of a head, for every node.
    const int pair = threadIdx.x / KEYS;
    constexpr int QUADS = HEAD_DIM / 4, AT_ONCE = CONSUMERS / QUADS, PASSES = (GROUP + AT_ONCE - 1) / AT_ONCE;
    const int quad = threadIdx.x % QUADS, first_head = threadIdx.x / QUADS;
    constexpr int EACH = KEYS / WARPS;
    uint4 packed[EACH];         // this warp's keys of a chunk
    uint2 packed_values[KEYS];  // four dimensions of the chunk's values
    const auto fetch = [&](int chunk) {
#pragma unroll
        for (int h = 0; h < EACH; h++) {
            const int position = chunk * KEYS + b.warp + h * WARPS;
            packed[h] = uint4{};
            if (position < b.length) packed[h] = __ldcg((const uint4*)(c.keys + (size_t)position * (HEAD_DIM / 2)) + b.lane);
        }
#pragma unroll
        for (int n = 0; n < KEYS; n++) {
            const int position = chunk * KEYS + n;
            packed_values[n] = uint2{};
            if (position < b.length)
                packed_values[n] = __ldcg((const uint2*)(c.values + (size_t)position * (HEAD_DIM / 2)) + quad);
        }
    };

#pragma unroll 1
    for (int base = 0; base < b.nodes; base += TOGETHER_NODES) {
        const int count = min(TOGETHER_NODES, b.nodes - base);
        if (base > 0) b.sync();  // q of the nodes before
        fetch(split);            // committed keys do not wait for anything
        const int queries = count * GROUP, rows = base == 0 && holds_new ? 2 * b.nodes : 0;
#pragma unroll 1
        for (int task = b.warp; task < queries + rows; task += WARPS) {
            if (task >= queries) {
                const int row = task - queries;
                make_fresh(b, c, head_at, kv_head, row / 2, row % 2, vectors);
                continue;
            }
            const int node = base + task / GROUP, head = kv_head * GROUP + task % GROUP;
            float v[8];
            normed_head(b, b.words(ATTENTION_TURN, node, ATTENTION_IN_AT) + head * 2 * HEAD_DIM, vectors + Q_NORM_AT,
                        b.length + (NODES == 1 ? 0 : b.s.depth[node]), v);
            float4* to = (float4*)(q + task * HEAD_DIM + b.lane * 8);
            to[0] = {v[0] * ATTENTION_SCALE, v[1] * ATTENTION_SCALE, v[2] * ATTENTION_SCALE, v[3] * ATTENTION_SCALE};
            to[1] = {v[4] * ATTENTION_SCALE, v[5] * ATTENTION_SCALE, v[6] * ATTENTION_SCALE, v[7] * ATTENTION_SCALE};
        }
        b.sync();

        float peak = MINUS_INFINITY, weight = 0.0f;
        float4 sum[PASSES][TOGETHER_NODES] = {};
        int turn = 0;
#pragma unroll 1
        for (int chunk = split; chunk < chunks; chunk += SPLITS, turn ^= 1) {
            float* score = scores + turn * SCORE_FLOATS;
            float* keep = scores + 2 * SCORE_FLOATS + turn * PAIRS;
#pragma unroll 1
            for (int i = 0; i < count; i++) {
                const int last = b.length + (NODES == 1 ? 0 : b.s.depth[base + i]);
#pragma unroll
                for (int h = 0; h < EACH; h++) {
                    const int position = chunk * KEYS + b.warp + h * WARPS;
                    const bool seen = position <= last;
                    if (seen && position >= b.length)
                        packed[h] = *((const uint4*)(c.fresh + fresh_row(b, base + i, position)) + b.lane);
                    const float2 k0 = unpack_half(packed[h].x), k1 = unpack_half(packed[h].y),
                                 k2 = unpack_half(packed[h].z), k3 = unpack_half(packed[h].w);
                    float dot[GROUP];
#pragma unroll
                    for (int g = 0; g < GROUP; g++) {
                        const float4* query = (const float4*)(q + (i * GROUP + g) * HEAD_DIM) + b.lane * 2;
                        const float4 a = query[0], e = query[1];
                        dot[g] = a.x * k0.x;
                        dot[g] = fmaf(a.y, k0.y, dot[g]), dot[g] = fmaf(a.z, k1.x, dot[g]), dot[g] = fmaf(a.w, k1.y, dot[g]);
                        dot[g] = fmaf(e.x, k2.x, dot[g]), dot[g] = fmaf(e.y, k2.y, dot[g]), dot[g] = fmaf(e.z, k3.x, dot[g]);
                        dot[g] = fmaf(e.w, k3.y, dot[g]);
                    }
#pragma unroll
                    for (int g = 0; g < GROUP; g++) dot[g] = warp_sum(dot[g]);
                    float mine = dot[0];
#pragma unroll
                    for (int g = 1; g < GROUP; g++) mine = b.lane == g ? dot[g] : mine;
                    if (b.lane < GROUP)
                        score[(i * GROUP + b.lane) * KEYS + b.warp + h * WARPS] = seen ? mine : MINUS_INFINITY;
                }
            }
            b.sync();
            const int last_seen =
                pair < count * GROUP ? b.length + (NODES == 1 ? 0 : b.s.depth[base + pair / GROUP]) - chunk * KEYS : -1;
            if (b.warp * 2 < PAIRS) {
                const float mine = last_seen >= 0 ? score[threadIdx.x] : MINUS_INFINITY;
                float top = mine;
#pragma unroll
                for (int step = 1; step < KEYS; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
                top = fmaxf(top, peak);
                const float p = last_seen >= 0 ? __expf(mine - top) : 0.0f;
                float total = p;
#pragma unroll
                for (int step = 1; step < KEYS; step *= 2) total += __shfl_xor_sync(~0u, total, step);
                if (last_seen >= 0) {
                    const float kept = __expf(peak - top);
                    weight = fmaf(weight, kept, total);
                    peak = top;
                    score[threadIdx.x] = p;
                    if (threadIdx.x % KEYS == 0) keep[pair] = kept;
                }
            }
            b.sync();
            const bool committed = (chunk + 1) * KEYS <= b.length;  // every key of the chunk is every node's
#pragma unroll
            for (int i = 0; i < TOGETHER_NODES; i++) {
                const int last = i < count ? b.length + (NODES == 1 ? 0 : b.s.depth[base + i]) - chunk * KEYS : -1;
                if (last < 0) continue;
                if (!committed) {
#pragma unroll
                    for (int n = 0; n < KEYS; n++) {  // a key that is not seen has weight 0; its value must be a number
                        const int position = chunk * KEYS + n;
                        if (position >= b.length)
                            packed_values[n] = n <= last ? *((const uint2*)(c.fresh + fresh_row(b, base + i, position) + HEAD_DIM / 2) + quad)
                                                         : uint2{};
                    }
                }
#pragma unroll
                for (int pass = 0; pass < PASSES; pass++) {
                    const int g = pass * AT_ONCE + first_head;
                    if (g >= GROUP) break;
                    const float4* p = (const float4*)(score + (i * GROUP + g) * KEYS);
                    const float kept = keep[i * GROUP + g];
                    float4 acc = sum[pass][i];
                    acc = {acc.x * kept, acc.y * kept, acc.z * kept, acc.w * kept};
#pragma unroll
                    for (int n4 = 0; n4 < KEYS / 4; n4++) {
                        const float4 p4 = p[n4];
#pragma unroll
                        for (int m = 0; m < 4; m++) {
                            const uint2 value = packed_values[n4 * 4 + m];
                            const float share = m == 0 ? p4.x : m == 1 ? p4.y : m == 2 ? p4.z : p4.w;
                            const float2 low = unpack_half(value.x), high = unpack_half(value.y);
                            acc.x = fmaf(share, low.x, acc.x), acc.y = fmaf(share, low.y, acc.y);
                            acc.z = fmaf(share, high.x, acc.z), acc.w = fmaf(share, high.y, acc.w);
                        }
                    }
                    sum[pass][i] = acc;
                }
            }
            if (chunk + SPLITS < chunks) fetch(chunk + SPLITS);
        }

        if (threadIdx.x % KEYS == 0 && pair < count * GROUP) {
            const int node = base + pair / GROUP, head = kv_head * GROUP + pair % GROUP;
            if (split * KEYS <= b.length + b.s.depth[node])
                publish8(b.words(ATTENTION_TURN, node, STATS_AT) + (head * SPLITS + split) * 2, b.other(ATTENTION_TURN),
                         __float_as_uint(peak), __float_as_uint(weight));
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
