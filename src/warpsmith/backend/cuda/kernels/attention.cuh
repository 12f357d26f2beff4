// Gated attention over any length, split by absolute position.
//
// Keys come in chunks of 16 positions; chunk c belongs to split c mod SPLITS, whatever the chip and however many nodes.
// An item is one key head and one split: it walks its chunks in order with an online softmax for the GROUP query heads
// of every node, and publishes unnormalised sums with their maximum and weight. A second step merges the splits in a
// fixed order, divides, and applies the output gate. A key at position p is worked on in chunk p / 16 by warp p mod 8,
// whether it is committed or a drafted ancestor, so plain and tree runs agree to the bit.
// Bytes: 1 KB of fp16 keys and values a position and key head, read once for 4 nodes.
// Scratch: q [4 nodes][GROUP][256], scores [2][4 nodes][GROUP][16], then the factor that keeps older sums in step.
#pragma once
#include "block.cuh"

constexpr int TOGETHER_NODES = GROUP <= 4 ? 4 : 2;  // nodes that share a walk over the keys
constexpr int Q_FLOATS = TOGETHER_NODES * GROUP * HEAD_DIM, SCORE_FLOATS = TOGETHER_NODES * GROUP * KEYS;
constexpr int PAIRS = TOGETHER_NODES * GROUP;  // of a node and a query head
static_assert(PAIRS * KEYS <= CONSUMERS, "a thread a score");
static_assert((Q_FLOATS + 2 * SCORE_FLOATS + 2 * PAIRS) * 4 <= SCRATCH_BYTES, "queries of the nodes must fit in the scratch");
static_assert(HEAD_DIM == 256 && ROTARY == 64, "a lane has eight dimensions; the rotated ones are in lanes 0 to 7");
constexpr float ATTENTION_SCALE = 0.0625f;  // 256 ** -0.5

// Eight values of a head (dimensions 8 lane ..), from packets, normed and rotated. The whole warp works on one head.
__device__ __forceinline__ void normed_head(const Block& b, const Packet* row, const float* weight, int position, u32 tag,
                                            float (&v)[8]) {
    Packet got[2];
    poll(got, row + b.lane * 2, 1, tag);
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        v[i] = value(got[i / 4], i % 4);
        square = fmaf(v[i], v[i], square);
    }
    const float scale = rsqrtf(warp_sum(square) / HEAD_DIM + EPS);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] *= scale * __ldg(weight + b.lane * 8 + i);
    // pairs (j, j + 32): lanes 0..3 hold the first of a pair, lanes 4..7 the second
    const float2* low = b.p.rope + (position & 63) * 32;
    const float2* high = b.p.rope + (64 + (position >> 6)) * 32;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float other = __shfl_xor_sync(~0u, v[i], 4);
        if (b.lane < 8) {
            const int j = (b.lane & 3) * 8 + i;
            const float2 a = __ldg(low + j), c = __ldg(high + j);
            const float cosine = a.x * c.x - a.y * c.y, sine = a.y * c.x + a.x * c.y;
            v[i] = b.lane < 4 ? v[i] * cosine - other * sine : v[i] * cosine + other * sine;
        }
    }
}

// Where a node finds the key or value at a position: the cache, or one of its ancestors among the pending rows.
__device__ __forceinline__ const u32* key_row(const Block& b, const u32* cache, const u32* pending, int node, int position) {
    if (position < b.length || b.decoding()) return cache + (size_t)position * (HEAD_DIM / 2);
    return pending + (size_t)b.s.ancestor[node][position - b.length] * (HEAD_DIM / 2);
}

// Four dimensions of `count` value rows, all asked for before any is used; the rest are zero.
template <class Row>
__device__ __forceinline__ void load_values(uint2 (&packed)[KEYS], int count, Row row) {
#pragma unroll
    for (int n = 0; n < KEYS; n++) packed[n] = n < count ? __ldcg((const uint2*)row(n)) : uint2{};
}

__device__ __forceinline__ void attention_item(Block& b, int index, int item, const float* vectors, u32 in_tag) {
    const int kv_head = item / SPLITS, split = item % SPLITS;
    float* q = b.scratch;
    float* scores = q + Q_FLOATS;
    const size_t head_at = (size_t)index * KV_HEADS + kv_head;
    u32* keys = b.p.keys + head_at * b.p.context * (HEAD_DIM / 2);
    u32* values = b.p.values + head_at * b.p.context * (HEAD_DIM / 2);
    u32* pending_keys = b.p.pending_keys + head_at * MAX_NODES * (HEAD_DIM / 2);
    u32* pending_values = b.p.pending_values + head_at * MAX_NODES * (HEAD_DIM / 2);

    int deepest = 0;
#pragma unroll 1
    for (int node = 0; node < b.nodes; node++) deepest = max(deepest, b.s.depth[node]);
    const int end = b.length + deepest + 1, chunks = (end + KEYS - 1) / KEYS;
    if (split >= chunks) return;

    // New keys and values, by every item whose chunks need them: the same bits, so it does not matter who is last.
    const int first_new = b.length / KEYS, last_new = (end - 1) / KEYS;
    bool holds_new = false;
#pragma unroll 1
    for (int c = first_new; c <= last_new; c++) holds_new |= c % SPLITS == split;
    if (holds_new) {
#pragma unroll 1
        for (int task = b.warp; task < 2 * b.nodes; task += WARPS) {
            const int node = task / 2, position = b.length + b.s.depth[node];
            const Packet* row = b.p.in + (size_t)node * IN_PACKETS + (2 * ATTENTION_DIM + kv_head * HEAD_DIM) / 4;
            float v[8];
            if (task % 2 == 0) {
                normed_head(b, row, vectors + K_NORM_AT, position, in_tag, v);
            } else {
                Packet got[2];
                poll(got, row + KV_HEADS * HEAD_DIM / 4 + b.lane * 2, 1, in_tag);
#pragma unroll
                for (int i = 0; i < 8; i++) v[i] = value(got[i / 4], i % 4);
            }
            u32* to = b.decoding() ? (task % 2 ? values : keys) + (size_t)position * (HEAD_DIM / 2)
                                   : (task % 2 ? pending_values : pending_keys) + (size_t)node * (HEAD_DIM / 2);
            *(uint4*)(to + b.lane * 4) = {pack_half(v[0], v[1]), pack_half(v[2], v[3]), pack_half(v[4], v[5]),
                                          pack_half(v[6], v[7])};
        }
    }

#pragma unroll 1
    for (int base = 0; base < b.nodes; base += TOGETHER_NODES) {
        const int count = min(TOGETHER_NODES, b.nodes - base);
        b.sync();
#pragma unroll 1
        for (int task = b.warp; task < count * GROUP; task += WARPS) {
            const int node = base + task / GROUP, head = kv_head * GROUP + task % GROUP;
            float v[8];
            normed_head(b, b.p.in + (size_t)node * IN_PACKETS + head * 2 * HEAD_DIM / 4, vectors + Q_NORM_AT,
                        b.length + b.s.depth[node], in_tag, v);
            float* to = q + task * HEAD_DIM + b.lane * 8;
#pragma unroll
            for (int i = 0; i < 8; i++) to[i] = v[i] * ATTENTION_SCALE;
        }
        b.sync();

        // Softmax: a thread a score, sixteen a node and head. Sums: a thread four dimensions of a head, for every node.
        const int pair = threadIdx.x / KEYS;
        float peak = MINUS_INFINITY, weight = 0.0f;
        constexpr int QUADS = HEAD_DIM / 4, AT_ONCE = CONSUMERS / QUADS, PASSES = (GROUP + AT_ONCE - 1) / AT_ONCE;
        const int quad = threadIdx.x % QUADS, first_head = threadIdx.x / QUADS;
        float4 sum[PASSES][TOGETHER_NODES] = {};

        int turn = 0;
#pragma unroll 1
        for (int chunk = split; chunk < chunks; chunk += SPLITS, turn ^= 1) {
            const bool committed = (chunk + 1) * KEYS <= b.length;  // every key of the chunk is every node's
            float* score = scores + turn * SCORE_FLOATS;
            float* keep = scores + 2 * SCORE_FLOATS + turn * PAIRS;
            constexpr int EACH = KEYS / WARPS;
            uint4 packed[EACH];
            uint2 packed_values[KEYS];
#pragma unroll
            for (int h = 0; h < EACH; h++) {
                const int position = chunk * KEYS + b.warp + h * WARPS;
                packed[h] = uint4{};
                if (position < b.length) packed[h] = __ldcg((const uint4*)(keys + (size_t)position * (HEAD_DIM / 2)) + b.lane);
            }
            if (committed) load_values(packed_values, KEYS, [&](int n) {
                return values + (size_t)(chunk * KEYS + n) * (HEAD_DIM / 2) + quad * 2;
            });
#pragma unroll 1
            for (int i = 0; i < count; i++) {
                const int node = base + i;
#pragma unroll
                for (int h = 0; h < EACH; h++) {
                    const int position = chunk * KEYS + b.warp + h * WARPS;
                    const bool seen = position <= b.length + b.s.depth[node];
                    if (seen && position >= b.length)
                        packed[h] = __ldcg((const uint4*)key_row(b, keys, pending_keys, node, position) + b.lane);
                    const float2 k0 = unpack_half(packed[h].x), k1 = unpack_half(packed[h].y),
                                 k2 = unpack_half(packed[h].z), k3 = unpack_half(packed[h].w);
#pragma unroll
                    for (int g = 0; g < GROUP; g++) {
                        const float4* query = (const float4*)(q + (i * GROUP + g) * HEAD_DIM) + b.lane * 2;
                        const float4 a = query[0], c = query[1];
                        float dot = a.x * k0.x;
                        dot = fmaf(a.y, k0.y, dot), dot = fmaf(a.z, k1.x, dot), dot = fmaf(a.w, k1.y, dot);
                        dot = fmaf(c.x, k2.x, dot), dot = fmaf(c.y, k2.y, dot), dot = fmaf(c.z, k3.x, dot);
                        dot = warp_sum(fmaf(c.w, k3.y, dot));
                        if (b.lane == 0) score[(i * GROUP + g) * KEYS + b.warp + h * WARPS] = seen ? dot : MINUS_INFINITY;
                    }
                }
            }
            b.sync();
            const int last_seen = pair < count * GROUP ? b.length + b.s.depth[base + pair / GROUP] - chunk * KEYS : -1;
            {
                const float mine = last_seen >= 0 ? score[threadIdx.x] : MINUS_INFINITY;
                float top = mine;
#pragma unroll
                for (int step = 1; step < KEYS; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
                top = fmaxf(top, peak);
                const float p = last_seen >= 0 ? expf(mine - top) : 0.0f;
                float total = p;
#pragma unroll
                for (int step = 1; step < KEYS; step *= 2) total += __shfl_xor_sync(~0u, total, step);
                if (last_seen >= 0) {
                    const float kept = expf(peak - top);
                    weight = fmaf(weight, kept, total);
                    peak = top;
                    score[threadIdx.x] = p;
                    if (threadIdx.x % KEYS == 0) keep[pair] = kept;
                }
            }
            b.sync();
#pragma unroll
            for (int i = 0; i < TOGETHER_NODES; i++) {
                const int last = i < count ? b.length + b.s.depth[base + i] - chunk * KEYS : -1;
                if (last < 0) continue;
                if (!committed) load_values(packed_values, last + 1, [&](int n) {
                    return key_row(b, values, pending_values, base + i, chunk * KEYS + n) + quad * 2;
                });
#pragma unroll
                for (int pass = 0; pass < PASSES; pass++) {
                    const int g = pass * AT_ONCE + first_head;
                    if (g >= GROUP) break;
                    const float* p = score + (i * GROUP + g) * KEYS;
                    const float kept = keep[i * GROUP + g];
                    float4 acc = sum[pass][i];
                    acc = {acc.x * kept, acc.y * kept, acc.z * kept, acc.w * kept};
#pragma unroll
                    for (int n = 0; n < KEYS; n++) {  // a key that is not seen has weight 0 and value 0
                        const float2 low = unpack_half(packed_values[n].x), high = unpack_half(packed_values[n].y);
                        acc.x = fmaf(p[n], low.x, acc.x), acc.y = fmaf(p[n], low.y, acc.y);
                        acc.z = fmaf(p[n], high.x, acc.z), acc.w = fmaf(p[n], high.y, acc.w);
                    }
                    sum[pass][i] = acc;
                }
            }
        }

        Packet* part = b.p.part + (size_t)base * PART_PACKETS + (size_t)split * (QUADS + 1);
        if (threadIdx.x % KEYS == 0 && pair < count * GROUP && split * KEYS <= b.length + b.s.depth[base + pair / GROUP])
            publish(part + (size_t)(pair / GROUP) * PART_PACKETS +
                        (size_t)(kv_head * GROUP + pair % GROUP) * SPLITS * (QUADS + 1) + QUADS,
                    {peak, weight, 0, 0}, b.tag);
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            const int head = kv_head * GROUP + pass * AT_ONCE + first_head;
#pragma unroll
            for (int i = 0; i < TOGETHER_NODES; i++) {
                if (i >= count || pass * AT_ONCE + first_head >= GROUP) continue;
                if (split * KEYS > b.length + b.s.depth[base + i]) continue;
                publish(part + (size_t)i * PART_PACKETS + (size_t)head * SPLITS * (QUADS + 1) + quad, sum[pass][i], b.tag);
            }
        }
    }
}

// Stage: this SM's items.
__device__ __forceinline__ void attention_parts(Block& b, int index, const float* vectors, u32 in_tag) {
#pragma unroll 1
    for (int item = first_unit(ATTENTION_ITEMS, b.sm); item < first_unit(ATTENTION_ITEMS, b.sm + 1); item++) {
        b.sync();
        attention_item(b, index, item, vectors, in_tag);
    }
    b.sync();
}

// Stage: merge the splits of four dimensions a warp, gate, publish.
__device__ __forceinline__ void attention_merge(Block& b, u32 in_tag, u32 part_tag) {
    constexpr int PACKETS = ATTENTION_DIM / 4;
    const int first = first_unit(PACKETS, b.sm), mine = first_unit(PACKETS, b.sm + 1) - first;
#pragma unroll 1
    for (int task = b.warp; task < mine * b.nodes; task += WARPS) {
        const int packet = first + task % mine, node = task / mine;
        const int head = packet / (HEAD_DIM / 4), piece = packet % (HEAD_DIM / 4);
        const int splits = min(SPLITS, (b.length + b.s.depth[node]) / KEYS + 1);
        float4 sum = {};
        float weight = 0.0f, peak = MINUS_INFINITY;
        constexpr int EACH = SPLITS / 32;
        const Packet* part = b.p.part + (size_t)node * PART_PACKETS + (size_t)head * SPLITS * (HEAD_DIM / 4 + 1);
        const Packet* gate_at = b.p.in + (size_t)node * IN_PACKETS + (head * 2 + 1) * HEAD_DIM / 4 + piece;
        Packet stats[EACH], sums[EACH], gates;
        Watchdog dog;
        bool missing;
        do {
            missing = false;
            gates = load_packet(gate_at);
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (i * 32 + b.lane < splits) {
                    const Packet* at = part + (i * 32 + b.lane) * (HEAD_DIM / 4 + 1);
                    stats[i] = load_packet(at + HEAD_DIM / 4), sums[i] = load_packet(at + piece);
                }
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (i * 32 + b.lane < splits) missing |= !arrived(stats[i], part_tag) | !arrived(sums[i], part_tag);
            missing |= !arrived(gates, in_tag);
            dog.check();
        } while (missing);
        float4 stat[EACH], acc[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const bool live = i * 32 + b.lane < splits;
            stat[i] = live ? values(stats[i]) : float4{MINUS_INFINITY, 0, 0, 0};
            acc[i] = live ? values(sums[i]) : float4{};
            peak = fmaxf(peak, stat[i].x);
        }
        peak = warp_max(peak);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const float share = expf(stat[i].x - peak);
            weight = fmaf(share, stat[i].y, weight);
            sum.x = fmaf(share, acc[i].x, sum.x), sum.y = fmaf(share, acc[i].y, sum.y);
            sum.z = fmaf(share, acc[i].z, sum.z), sum.w = fmaf(share, acc[i].w, sum.w);
        }
        weight = warp_sum(weight);
        sum = {warp_sum(sum.x), warp_sum(sum.y), warp_sum(sum.z), warp_sum(sum.w)};
        if (b.lane == 0) {
            const float4 gate = values(gates);
            const float inverse = 1.0f / weight;
            publish(b.p.y + (size_t)node * Y_PACKETS + packet,
                    {sum.x * inverse * sigmoid(gate.x), sum.y * inverse * sigmoid(gate.y),
                     sum.z * inverse * sigmoid(gate.z), sum.w * inverse * sigmoid(gate.w)}, b.tag);
        }
    }
}
