// Gated attention over any length.
//
// Maths: softmax(q k^T / 16) v, times sigmoid(gate), with norms and RoPE on q and k.
// Keys are worked on in chunks of 64 positions. A query at position p shares with the others the chunks that end before
// p - 63: no tree is that deep, so their keys are committed whoever drafts. What is left, 64 to 127 positions, is in
// two chunks that every node has of its own, gathered along its path. A chunk's result for a query depends on the query
// and its own keys alone, whatever else is in the tile: so plain and tree runs agree to the bit. Steps: rows (norm,
// RoPE, fp16; a warp a row); parts (items: a key head, and a split of the shared chunks for some tiles of 16 queries,
// or one of a node's own chunks); merge (splits in order, then own chunks; the gate). Scores: 16 queries x 8 keys x 16
// dimensions a product, a warp 8 keys of a chunk. Sums: 16 queries x 8 dimensions x 16 keys, a warp 32 dimensions.
// Bytes: 1 KB of keys and values a position and key head, once for four tiles of queries.
#pragma once
#include "large/steps.cuh"

static_assert(HEAD_DIM == 32 * WARPS && CHUNK == 8 * WARPS, "a warp has 32 dimensions, or 8 keys");
constexpr float ATTENTION_SCALE = 0.0625f * 1.44269504f;  // 256 ** -0.5, and scores are to base 2
constexpr float LARGEST_HALF = 65504.0f;
constexpr int ATTENTION_ROWS = HEADS + 2 * KV_HEADS;

// Chunks that a query at a position shares.
__device__ __forceinline__ int shared_chunks(int position) {
    return position < CHUNK - 1 ? 0 : (position - (CHUNK - 1)) / CHUNK;
}
__device__ __forceinline__ int node_position(const Block& b, int node) { return b.length + b.s.depth[node]; }
__device__ __forceinline__ int attention_index(const Block& b, int layer) { return layer - b.deltas; }

// --- rows -----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void attention_rows(Block& b, int layer) {
    const Sums<HIDDEN_GROUPS> sums(b, ATTENTION_IN_ROWS);
#pragma unroll 1
    for (int task = b.warp * SMS + b.sm; task < b.nodes * ATTENTION_ROWS; task += WARPS * SMS) {
        const int node = task / ATTENTION_ROWS, row = task % ATTENTION_ROWS, position = uniform(node_position(b, node));
        const bool is_query = row < HEADS, is_value = row >= HEADS + KV_HEADS;
        const int from = is_query   ? row * 2 * HEAD_DIM
                         : is_value ? VALUES_AT + (row - HEADS - KV_HEADS) * HEAD_DIM
                                    : KEYS_AT + (row - HEADS) * HEAD_DIM;
        const float4 v0 = sums.at(node, from + b.lane * 8), v1 = sums.at(node, from + b.lane * 8 + 4);
        float v[8] = {v0.x, v0.y, v0.z, v0.w, v1.x, v1.y, v1.z, v1.w};
        if (is_value) {
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = fminf(fmaxf(v[j], -LARGEST_HALF), LARGEST_HALF);
        } else {
            // pairs (j, j + 32): lanes 0..3 hold the first of a pair, lanes 4..7 the second
            const float4* low = (const float4*)(b.p.rope + (position & 63) * 32 + (b.lane & 3) * 8);
            const float4* high = (const float4*)(b.p.rope + (64 + (position >> 6)) * 32 + (b.lane & 3) * 8);
            const float* norm = b.vectors + (is_query ? Q_NORM_AT : K_NORM_AT) + b.lane * 8;
            float square = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++) square = fmaf(v[j], v[j], square);
            const float scale = inverse_root(warp_sum(square) / HEAD_DIM + EPS);
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] *= scale * __ldg(norm + j);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float4 l = __ldg(low + i), h = __ldg(high + i);
                const float cosine[2] = {fmaf(l.x, h.x, -(l.y * h.y)), fmaf(l.z, h.z, -(l.w * h.w))};
                const float sine[2] = {fmaf(l.y, h.x, l.x * h.y), fmaf(l.w, h.z, l.z * h.w)};
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const float own = v[2 * i + j], other = __shfl_xor_sync(~0u, own, 4);
                    const float turned = fmaf(own, cosine[j], (b.lane < 4 ? -other : other) * sine[j]);
                    v[2 * i + j] = b.lane < 8 ? turned : own;
                    if (is_query) v[2 * i + j] *= ATTENTION_SCALE;
                }
            }
        }
        const uint4 packed = {pack_half(v[0], v[1]), pack_half(v[2], v[3]), pack_half(v[4], v[5]),
                              pack_half(v[6], v[7])};
        u32* to;
        if (is_query) {
            to = b.p.queries + ((size_t)node * HEADS + row) * (HEAD_DIM / 2);
        } else {
            const size_t head = (size_t)attention_index(b, layer) * KV_HEADS + (row - HEADS) % KV_HEADS;
            to = b.decoding()
                     ? (is_value ? b.p.values : b.p.keys) + (head * b.p.context + b.length) * (HEAD_DIM / 2)
                     : (is_value ? b.p.pending_values : b.p.pending_keys) + (head * MAX_NODES + node) * (HEAD_DIM / 2);
        }
        *(uint4*)(to + b.lane * 4) = packed;
    }
}

// --- parts ----------------------------------------------------------------------------------------------------------

struct AttentionScratch {
    u32 *values, *queries;
    float* scores;
    u16* weights;
    float *peak, *weight, *factor;
    __device__ explicit AttentionScratch(u8* at)
        : values((u32*)at), queries((u32*)(at + QUERIES_AT)), scores((float*)(at + SCORES_AT)),
          weights((u16*)(at + WEIGHTS_AT)), peak((float*)(at + FACTORS_AT)), weight(peak + QUERY_TILES * 16),
          factor(weight + QUERY_TILES * 16) {}
};

// Where keys and values of a head are: committed ones by position, drafted ones by node.
struct Cache {
    const u32 *keys, *values, *drafted_keys, *drafted_values;
    __device__ Cache(const Block& b, int layer, int kv_head) {
        const size_t head = (size_t)attention_index(b, layer) * KV_HEADS + kv_head;
        keys = b.p.keys + head * b.p.context * (HEAD_DIM / 2),
        values = b.p.values + head * b.p.context * (HEAD_DIM / 2);
        drafted_keys = b.p.pending_keys + head * MAX_NODES * (HEAD_DIM / 2);
        drafted_values = b.p.pending_values + head * MAX_NODES * (HEAD_DIM / 2);
    }
};

// Rows of queries `first_row` .. of a key head, (node, head in its group) in order, against some chunks.
// `node`: the one whose own chunk it is, or -1.
__device__ __forceinline__ void attend(Block& b, const Cache& cache, int kv_head, int first_row, int rows, int chunk,
                                       int step, int end, int node, int part) {
    const AttentionScratch at(b.scratch);
    first_row = uniform(first_row), rows = uniform(rows), chunk = uniform(chunk), end = uniform(end),
    node = uniform(node + 1) - 1;
    const int tiles = (rows + 15) / 16, g = b.lane >> 2, q = b.lane & 3;
    b.sync();  // what the scratch holds may still be read
#pragma unroll 1
    for (int i = threadIdx.x; i < tiles * 16 * 32; i += CONSUMERS) {
        const int row = min(i / 32, rows - 1) + first_row, unit = i % 32;
        const u32* from =
            b.p.queries + ((size_t)(row / GROUP) * HEADS + kv_head * GROUP + row % GROUP) * (HEAD_DIM / 2);
        *(uint4*)(at.queries + i / 32 * QUERY_ROW + unit * 4) = __ldcg((const uint4*)from + unit);
    }
    if (threadIdx.x < tiles * 16) at.peak[threadIdx.x] = MINUS_INFINITY, at.weight[threadIdx.x] = 0.0f;
    float sum[QUERY_TILES][4][4] = {};
    const int own_end = node < 0 ? 0 : node_position(b, node) + 1;  // positions a node sees
    // Where the key or value at a position is. Past the end, any row does: its weight is zero.
    const auto row_at = [&](const u32* committed, const u32* drafted, int position) {
        if (node < 0) return committed + (size_t)position * (HEAD_DIM / 2);
        position = min(position, own_end - 1);
        const int ahead = b.decoding() ? -1 : position - b.length;
        return ahead < 0 ? committed + (size_t)position * (HEAD_DIM / 2)
                         : drafted + b.s.ancestor[node][ahead] * (HEAD_DIM / 2);
    };
#pragma unroll 1
    for (; chunk < end; chunk += step) {
        const int first = chunk * CHUNK;
        uint4 key[8];
        {
            const uint4* from = (const uint4*)row_at(cache.keys, cache.drafted_keys, first + b.warp * 8 + g) + q;
#pragma unroll
            for (int c = 0; c < 8; c++) key[c] = __ldcg(from + c * 4);
        }
#pragma unroll
        for (int i = 0; i < 8;
             i++) {  // a warp's eight values; 16 bytes lie (position mod 8) places apart, by exclusive or
            const int row = b.warp * 8 + i;
            copy16(at.values + row * (HEAD_DIM / 2) + (b.lane ^ (row & 7)) * 4,
                   row_at(cache.values, cache.drafted_values, first + row) + b.lane * 4);
        }
        b.sync();  // queries; the weights before have been read
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++) {
            const uint4 *low = (const uint4*)(at.queries + (tile * 16 + g) * QUERY_ROW) + q,
                        *high = low + 8 * (QUERY_ROW / 4);
            float s[4][4] = {};
#pragma unroll
            for (int c = 0; c < 8; c++) {
                const uint4 a = low[c * 4], d = high[c * 4];
                mma_half(s[c % 4], {a.x, d.x, a.y, d.y}, key[c].x, key[c].y);
                mma_half(s[c % 4], {a.z, d.z, a.w, d.w}, key[c].z, key[c].w);
            }
            float* to = at.scores + (tile * 16 + g) * SCORE_ROW + b.warp * 8 + q * 2;
            *(float2*)to = {(s[0][0] + s[1][0]) + (s[2][0] + s[3][0]), (s[0][1] + s[1][1]) + (s[2][1] + s[3][1])};
            *(float2*)(to + 8 * SCORE_ROW) = {(s[0][2] + s[1][2]) + (s[2][2] + s[3][2]),
                                              (s[0][3] + s[1][3]) + (s[2][3] + s[3][3])};
        }
        b.sync();
        // Softmax: sixteen lanes a row, four keys each.
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++) {
            const int row = tile * 16 + (threadIdx.x >> 4), keys_at = (threadIdx.x & 15) * 4;
            const float4 scores = *(const float4*)(at.scores + row * SCORE_ROW + keys_at);
            float v[4] = {scores.x, scores.y, scores.z, scores.w};
            bool sees = true;  // nodes of one tile may share different chunks
            if (node < 0) {
                sees = chunk < shared_chunks(node_position(b, min(first_row + row, first_row + rows - 1) / GROUP));
            } else {
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if (first + keys_at + j >= own_end) v[j] = MINUS_INFINITY;
            }
            float peak = fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3]));
#pragma unroll
            for (int step = 1; step < 16; step *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, step));
            const float before = at.peak[row], now = fmaxf(before, peak);
            u32 packed[2];
            float weight;
            {
                const float w[4] = {power_of_2(v[0] - now), power_of_2(v[1] - now), power_of_2(v[2] - now),
                                    power_of_2(v[3] - now)};
                packed[0] = pack_half(w[0], w[1]), packed[1] = pack_half(w[2], w[3]);
                const float2 a = unpack_half(packed[0]), c = unpack_half(packed[1]);
                weight = (a.x + a.y) + (c.x + c.y);
            }
#pragma unroll
            for (int step = 1; step < 16; step *= 2) weight += __shfl_xor_sync(~0u, weight, step);
            *(uint2*)(at.weights + row * WEIGHT_ROW + keys_at) = sees ? uint2{packed[0], packed[1]} : uint2{};
            __syncwarp();
            if ((threadIdx.x & 15) == 0) {
                const float factor = power_of_2(before - now);  // 0 at first
                at.factor[row] = sees ? factor : 1.0f;
                if (sees) at.peak[row] = now, at.weight[row] = fmaf(at.weight[row], factor, weight);
            }
        }
        copies_done();
        b.sync();
        const int place = b.lane & 15, unit = b.warp * 4 + (b.lane >> 4);
#pragma unroll
        for (int tile = 0; tile < QUERY_TILES; tile++) {
            if (tile >= tiles) break;
            const float low = at.factor[tile * 16 + g], high = at.factor[tile * 16 + 8 + g];
#pragma unroll
            for (int o = 0; o < 4; o++)
                sum[tile][o][0] *= low, sum[tile][o][1] *= low, sum[tile][o][2] *= high, sum[tile][o][3] *= high;
        }
#pragma unroll
        for (int keys = 0; keys < CHUNK; keys += 16) {
            const u32* row = at.values + (keys + place) * (HEAD_DIM / 2);
            const uint4 a = load_transposed(row + (unit ^ (place & 7)) * 4),
                        c = load_transposed(row + ((unit + 2) ^ (place & 7)) * 4);
#pragma unroll
            for (int tile = 0; tile < QUERY_TILES; tile++) {
                if (tile >= tiles) break;
                const u32* w = (const u32*)(at.weights + (tile * 16 + g) * WEIGHT_ROW + keys) + q;
                const uint4 weights = {w[0], w[8 * WEIGHT_ROW / 2], w[4], w[8 * WEIGHT_ROW / 2 + 4]};
                mma_half(sum[tile][0], weights, a.x, a.y), mma_half(sum[tile][1], weights, a.z, a.w);
                mma_half(sum[tile][2], weights, c.x, c.y), mma_half(sum[tile][3], weights, c.z, c.w);
            }
        }
        b.sync();  // values have been read
    }
#pragma unroll
    for (int tile = 0; tile < QUERY_TILES; tile++) {
        if (tile >= tiles) break;
#pragma unroll
        for (int upper = 0; upper < 2; upper++) {
            const int row = tile * 16 + upper * 8 + g;
            if (row >= rows) continue;
            const int query = first_row + row, head = kv_head * GROUP + query % GROUP;
            const size_t to = ((size_t)(query / GROUP) * HEADS + head) * PARTS + part;
            const float inverse = reciprocal(fmaxf(at.weight[row], 1e-30f));
#pragma unroll
            for (int o = 0; o < 4; o++)
                b.p.parts[to * (HEAD_DIM / 2) + b.warp * 16 + o * 4 + q] =
                    pack_half(sum[tile][o][upper * 2] * inverse, sum[tile][o][upper * 2 + 1] * inverse);
            if (b.warp == 0 && q == 0) b.p.part_stats[to] = {at.peak[row], at.weight[row]};
        }
    }
}

// Every SM some items: shared chunks first, then nodes' own.
__device__ __forceinline__ void attention_parts(Block& b, int layer) {
    const int most = shared_chunks(b.length + uniform(b.s.deepest)), splits = min(most, SPLITS),
              all_rows = b.nodes * GROUP;
    constexpr int AT_ONCE = QUERY_TILES * 16;
    const int batches = (all_rows + AT_ONCE - 1) / AT_ONCE, shared_items = splits * batches * KV_HEADS;
#pragma unroll 1
    for (int item = b.sm; item < shared_items + b.nodes * TAILS * KV_HEADS; item += SMS) {
        const int kv_head = item % KV_HEADS;
        const Cache cache(b, layer, kv_head);
        if (item < shared_items) {
            const int split = item / KV_HEADS % splits, first = item / KV_HEADS / splits * AT_ONCE;
            attend(b, cache, kv_head, first, min(AT_ONCE, all_rows - first), split, SPLITS, most, -1, split);
        } else {
            const int own = (item - shared_items) / KV_HEADS, node = own / TAILS, tail = own % TAILS,
                      position = uniform(node_position(b, node));
            const int chunk = shared_chunks(position) + tail;
            if (chunk * CHUNK <= position)
                attend(b, cache, kv_head, node * GROUP, GROUP, chunk, 1, chunk + 1, node, SPLITS + tail);
        }
    }
}

// --- merge ----------------------------------------------------------------------------------------------------------

// A warp a node's head, a lane eight dimensions.
__device__ __forceinline__ void attention_merge(Block& b) {
    const Sums<HIDDEN_GROUPS> sums(b, ATTENTION_IN_ROWS);
    const Copy to = attention_copy(b);
#pragma unroll 1
    for (int task = b.warp * SMS + b.sm; task < b.nodes * HEADS; task += WARPS * SMS) {
        const int node = task / HEADS, head = task % HEADS, position = uniform(node_position(b, node)),
                  common = shared_chunks(position);
        const int splits = min(common, SPLITS), tails = (common + 1) * CHUNK <= position ? 2 : 1,
                  count = splits + tails;
        const size_t at = (size_t)task * PARTS;
        const int gate_row = head * 2 * HEAD_DIM + HEAD_DIM + b.lane * 8;
        const float4 gate0 = sums.at(node, gate_row), gate1 = sums.at(node, gate_row + 4);
        const auto place = [&](int i) { return i < splits ? i : SPLITS + i - splits; };
        float peak = MINUS_INFINITY;
#pragma unroll 1
        for (int i = b.lane; i < count; i += 32) peak = fmaxf(peak, __ldcg(b.p.part_stats + at + place(i)).x);
        peak = warp_max(peak);
        float sum[8] = {}, weight = 0.0f;
#pragma unroll 4
        for (int i = 0; i < count; i++) {
            const float2 stats = __ldcg(b.p.part_stats + at + place(i));
            const uint4 v = __ldcg((const uint4*)(b.p.parts + (at + place(i)) * (HEAD_DIM / 2)) + b.lane);
            const float share = power_of_2(stats.x - peak) * stats.y;
            weight += share;
            const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float2 two = unpack_half(words[j]);
                sum[2 * j] = fmaf(share, two.x, sum[2 * j]), sum[2 * j + 1] = fmaf(share, two.y, sum[2 * j + 1]);
            }
        }
        const float inverse = reciprocal(weight);
        u32 out[4];
        const float gates[8] = {gate0.x, gate0.y, gate0.z, gate0.w, gate1.x, gate1.y, gate1.z, gate1.w};
#pragma unroll
        for (int j = 0; j < 4; j++)
            out[j] = pack_bf16(sum[2 * j] * inverse * sigmoid(gates[2 * j]),
                               sum[2 * j + 1] * inverse * sigmoid(gates[2 * j + 1]));
        publish16(to.words + activation_at(node, head * HEAD_DIM + b.lane * 8) / 2, to.other,
                  uint4{out[0], out[1], out[2], out[3]});
    }
}
