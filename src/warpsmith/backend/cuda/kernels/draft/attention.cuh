// Attention of a draft's block over what it remembers of the text, and over itself.
//
// Maths: softmax(q k^T / sqrt(128)) v, with norms and RoPE on q and k; a row sees keys at positions less than a window
// away, and in causal layers none after its own. Keys and values of the text lie in rings, in the order they came, each
// with its position. Steps: rows (norm, RoPE, fp16; a warp a row); parts (items: a key head, 64 rows of queries, a
// split of the chunks of 64 keys; the block's own keys are the last chunk); merge (splits in order). Scores: 16 queries
// x 8 keys x 16 dimensions a product, a warp 8 keys of a chunk. Sums: 16 queries x 8 dimensions x 16 keys, a warp 16
// dimensions.
#pragma once
#include "draft/products.cuh"

static_assert(DIM == 16 * WARPS && CHUNK == 8 * WARPS && NODES <= CHUNK, "a warp has 16 dimensions, or 8 keys");
constexpr float DRAFT_SCALE = 0.088388347648f * 1.44269504f;  // 128 ** -0.5, and scores are to base 2
constexpr float MOST_HALF = 65504.0f, LEAST_SCORE = -1e30f;

// --- rows -----------------------------------------------------------------------------------------------------------

// What a row is multiplied with, besides its own norm, and how it is turned: nothing of it depends on the projection,
// so it is asked for before that is waited for. Pairs (j, j + 64): lanes 0..15 hold the first of a pair, lanes 16..31
// the second.
struct RowFactors {
    float norm[4], cosine[4], sine[4];
    __device__ __forceinline__ RowFactors(const Block& b, const float* weights, int position) {
        const float4* low = (const float4*)(b.p.rope + (position & 63) * (DIM / 2) + (b.lane & 15) * 4);
        const float4* high = (const float4*)(b.p.rope + (64 + (position >> 6)) * (DIM / 2) + (b.lane & 15) * 4);
        const float4 w = __ldg((const float4*)weights + b.lane);
        norm[0] = w.x, norm[1] = w.y, norm[2] = w.z, norm[3] = w.w;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float4 l = __ldg(low + i), h = __ldg(high + i);
            cosine[2 * i] = fmaf(l.x, h.x, -(l.y * h.y)), cosine[2 * i + 1] = fmaf(l.z, h.z, -(l.w * h.w));
            sine[2 * i] = fmaf(l.y, h.x, l.x * h.y), sine[2 * i + 1] = fmaf(l.w, h.z, l.z * h.w);
        }
    }
};

// Four of a row's 128 dimensions a lane: normed, turned to its position, and as fp16.
__device__ __forceinline__ uint2 turned(const Block& b, float4 row, const RowFactors& factors, float scale) {
    float v[4] = {row.x, row.y, row.z, row.w}, square = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; j++) square = fmaf(v[j], v[j], square);
    const float by = inverse_root(warp_sum(square) / DIM + EPS) * scale;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float own = v[j] * by * factors.norm[j], other = __shfl_xor_sync(~0u, own, 16);
        v[j] = fmaf(own, factors.cosine[j], (b.lane < 16 ? -other : other) * factors.sine[j]);
    }
    return {pack_half(v[0], v[1]), pack_half(v[2], v[3])};
}
__device__ __forceinline__ float within_half(float v) { return fminf(fmaxf(v, -MOST_HALF), MOST_HALF); }
__device__ __forceinline__ uint2 as_halves(float4 row) {
    return {pack_half(within_half(row.x), within_half(row.y)), pack_half(within_half(row.z), within_half(row.w))};
}

// What every layer keeps of the appended rows.
__device__ __forceinline__ void keep_context(Block& b) {
    const Params& p = b.p;
    const Request& r = b.r;
    const auto sums = sums_of<HIDDEN_GROUPS>(b, CONTEXT, CONTEXT_ROWS);
    constexpr int EACH = LAYERS * 2 * KV_HEADS;
#pragma unroll 1
    for (int task = b.warp * SMS + b.sm; task < r.rows * EACH; task += WARPS * SMS) {
        const int node = task / EACH, row = task % EACH, layer = row / (2 * KV_HEADS), head = row % KV_HEADS;
        const bool is_value = row % (2 * KV_HEADS) >= KV_HEADS;
        const int position = r.first_position + node, slot = (int)((u32)(r.appended + node) % (u32)p.capacity);
        const RowFactors factors(b, p.vectors + layer * VECTORS + K_NORM, position);
        const float4 v = sums.at(node, row * DIM + b.lane * 4);
        const uint2 kept = is_value ? as_halves(v) : turned(b, v, factors, 1.0f);
        u32* to = (is_value ? p.values : p.keys) + ((size_t)(layer * KV_HEADS + head) * p.capacity + slot) * (DIM / 2);
        *(uint2*)(to + b.lane * 2) = kept;
        if (row == 0 && b.lane == 0) p.positions[slot] = position;
    }
}

// Queries, keys and values of the block.
__device__ __forceinline__ void block_rows(Block& b, int stage) {
    const auto sums = sums_of<HIDDEN_GROUPS>(b, stage, IN_ROWS);
#pragma unroll 1
    for (int task = b.warp * SMS + b.sm; task < b.nodes * NODE_ROWS; task += WARPS * SMS) {
        const int node = task / NODE_ROWS, row = task % NODE_ROWS;
        const bool is_query = row < HEADS, is_value = row >= HEADS + KV_HEADS;
        const RowFactors factors(b, b.vectors + (is_query ? Q_NORM : K_NORM), b.r.position + node);
        const float4 v = sums.at(node, row * DIM + b.lane * 4);
        const uint2 packed = is_value ? as_halves(v) : turned(b, v, factors, is_query ? DRAFT_SCALE : 1.0f);
        store8(row_words(b, stage >> 2, node, row) + b.lane * 2, packed.x, packed.y);
    }
}

// --- parts ----------------------------------------------------------------------------------------------------------

// Rows of queries `first_row` .. of a key head, (node, head in its group) in order, against every SPLITS-th
// chunk.
__device__ __forceinline__ void attend(Block& b, int layer, int window, bool causal, int kv_head, int first_row,
                                       int rows, int remembered, int split) {
    const Params& p = b.p;
    AttentionScratch& at = *(AttentionScratch*)b.scratch;
    first_row = uniform(first_row), rows = uniform(rows);
    const int tiles = (rows + 15) / 16, g = b.lane >> 2, q = b.lane & 3;
    const int past = (remembered + CHUNK - 1) / CHUNK;
    const size_t head = (size_t)((layer * KV_HEADS + kv_head) * (int)p.capacity) * (DIM / 2);
    b.sync();  // what the scratch holds may still be read
    const int unit = threadIdx.x & 15;  // sixteen bytes of a query or a value
    const auto query_at = [&](int tile) {
        const u32 row = min(tile * 16 + (int)(threadIdx.x >> 4), rows - 1) + first_row;
        return row_words(b, layer, row / GROUP, kv_head * GROUP + row % GROUP) + unit * 4;
    };
    bool waiting = true;  // for queries
    if (threadIdx.x < BATCH) at.peak[threadIdx.x] = LEAST_SCORE, at.weight[threadIdx.x] = 0.0f;
    float sum[BATCH / 16][2][4] = {};
#pragma unroll 1
    for (int chunk = split; chunk <= past; chunk += SPLITS) {
        const bool own = chunk == past;
        const int first = chunk * CHUNK, last = own ? b.nodes - 1 : remembered - 1;  // keys there are
        const u32 *keys = own ? row_words(b, layer, 0, HEADS + kv_head) : p.keys + head,
                  *values = own ? row_words(b, layer, 0, HEADS + KV_HEADS + kv_head) : p.values + head;
        const u32 apart = (own ? NODE_ROWS : 1) * (DIM / 2);
        // Past the end, any row does: nobody sees it.
        const auto place = [&](int key) { return (u32)min(own ? key : first + key, last) * apart; };
        const auto position_of = [&](int key) {
            const int at = own ? key : first + key;
            return at > last ? -1 : own ? b.r.position + at : __ldcg(p.positions + at);
        };
        if (window && !own) {  // all of it may be out of sight, even to the first row
            const float newest = warp_max(fmaxf((float)position_of(b.lane), (float)position_of(b.lane + 32)));
            if (uniform((int)newest + window <= b.r.position ? 1 : 0)) continue;
        }
        const u32* key_at = keys + place(b.warp * 8 + g) + q * 4;
        const auto value_row = [&](int i) { return b.warp * 8 + i * 2 + (b.lane >> 4); };  // a warp has eight
        const auto value_at = [&](int i) { return values + place(value_row(i)) + unit * 4; };
        // Sixteen bytes lie (key mod 8) places apart, by exclusive or.
        const auto value_to = [&](int i) { return at.values[value_row(i)] + (unit ^ (value_row(i) & 7)) * 4; };
        // Queries, a row in each tile; keys; values. The block's own are exchanged, as all queries are.
        constexpr int KEYS = BATCH / 16, VALUES = KEYS + 4, ALL = VALUES + 4;
        const auto load = [&](int i) {
            return load16(i < KEYS ? query_at(i) : i < VALUES ? key_at + (i - KEYS) * 16 : value_at(i - VALUES));
        };
        uint4 got[ALL];
        if (own) {
            take<ALL>(got, load);
#pragma unroll
            for (int i = 0; i < 4; i++) *(uint4*)value_to(i) = got[VALUES + i];
        } else {
#pragma unroll
            for (int i = KEYS; i < VALUES; i++) got[i] = load(i);
#pragma unroll
            for (int i = 0; i < 4; i++) copy16(value_to(i), value_at(i));
            if (waiting) take<KEYS>(got, load);
        }
        if (waiting) {
#pragma unroll
            for (int tile = 0; tile < KEYS; tile++)
                *(uint4*)(at.queries[tile * 16 + (threadIdx.x >> 4)] + unit * 4) = got[tile];
            waiting = false;
        }
        if (threadIdx.x < CHUNK) at.position[threadIdx.x] = position_of(threadIdx.x);
        b.sync();  // queries; the weights before have been read
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++) {
            const uint4 *low = (const uint4*)at.queries[tile * 16 + g] + q,
                        *high = (const uint4*)at.queries[tile * 16 + 8 + g] + q;
            float s[4][4] = {};
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const uint4 a = low[c * 4], d = high[c * 4];
                mma_half(s[c], {a.x, d.x, a.y, d.y}, got[KEYS + c].x, got[KEYS + c].y);
                mma_half(s[c], {a.z, d.z, a.w, d.w}, got[KEYS + c].z, got[KEYS + c].w);
            }
            float* to = at.scores[tile * 16 + g] + b.warp * 8 + q * 2;
            *(float2*)to = {(s[0][0] + s[1][0]) + (s[2][0] + s[3][0]), (s[0][1] + s[1][1]) + (s[2][1] + s[3][1])};
            *(float2*)(to + 8 * SCORE_ROW) = {(s[0][2] + s[1][2]) + (s[2][2] + s[3][2]),
                                              (s[0][3] + s[1][3]) + (s[2][3] + s[3][3])};
        }
        b.sync();
        // Softmax: sixteen lanes a row, four keys each.
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++) {
            const int row = tile * 16 + (threadIdx.x >> 4), keys_at = (threadIdx.x & 15) * 4;
            const float4 scores = *(const float4*)(at.scores[row] + keys_at);
            const int here = b.r.position + min(first_row + row, first_row + rows - 1) / GROUP;
            float v[4] = {scores.x, scores.y, scores.z, scores.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int there = at.position[keys_at + j], ahead = there - here;
                const bool seen = there >= 0 && (!window || abs(ahead) < window) && (!causal || ahead <= 0);
                if (!seen) v[j] = MINUS_INFINITY;
            }
            float peak = fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3]));
#pragma unroll
            for (int step = 1; step < 16; step *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, step));
            const float before = at.peak[row], now = fmaxf(before, peak);
            const u32 packed[2] = {pack_half(power_of_2(v[0] - now), power_of_2(v[1] - now)),
                                   pack_half(power_of_2(v[2] - now), power_of_2(v[3] - now))};
            const float2 a = unpack_half(packed[0]), c = unpack_half(packed[1]);
            float weight = (a.x + a.y) + (c.x + c.y);
#pragma unroll
            for (int step = 1; step < 16; step *= 2) weight += __shfl_xor_sync(~0u, weight, step);
            *(uint2*)(at.weights[row] + keys_at) = {packed[0], packed[1]};
            __syncwarp();
            if ((threadIdx.x & 15) == 0) {
                const float factor = power_of_2(before - now);
                at.factor[row] = factor, at.peak[row] = now, at.weight[row] = fmaf(at.weight[row], factor, weight);
            }
        }
        copies_done();
        b.sync();
        const int place_here = b.lane & 15, sixteen = b.warp * 2 + (b.lane >> 4);
#pragma unroll
        for (int tile = 0; tile < BATCH / 16; tile++) {
            if (tile >= tiles) break;
            const float low = at.factor[tile * 16 + g], high = at.factor[tile * 16 + 8 + g];
#pragma unroll
            for (int o = 0; o < 2; o++)
                sum[tile][o][0] *= low, sum[tile][o][1] *= low, sum[tile][o][2] *= high, sum[tile][o][3] *= high;
        }
#pragma unroll
        for (int keys_at = 0; keys_at < CHUNK; keys_at += 16) {
            const uint4 a = load_transposed(at.values[keys_at + place_here] + (sixteen ^ (place_here & 7)) * 4);
#pragma unroll
            for (int tile = 0; tile < BATCH / 16; tile++) {
                if (tile >= tiles) break;
                const u32* w = (const u32*)(at.weights[tile * 16 + g] + keys_at) + q;
                const uint4 weights = {w[0], w[8 * WEIGHT_ROW / 2], w[4], w[8 * WEIGHT_ROW / 2 + 4]};
                mma_half(sum[tile][0], weights, a.x, a.y), mma_half(sum[tile][1], weights, a.z, a.w);
            }
        }
        b.sync();  // values have been read
    }
    b.sync();
#pragma unroll
    for (int tile = 0; tile < BATCH / 16; tile++) {
        if (tile >= tiles) break;
#pragma unroll
        for (int upper = 0; upper < 2; upper++) {
            const int row = tile * 16 + upper * 8 + g;
            if (row >= rows) continue;
            const u32 query = first_row + row, of = kv_head * GROUP + query % GROUP;
            const u32 to = (query / GROUP * HEADS + of) * SPLITS + split;
            u32* part = b.p.parts + to * (DIM / 2) + b.warp * 8 + q;
            const float inverse = reciprocal(fmaxf(at.weight[row], 1e-30f));
#pragma unroll
            for (int o = 0; o < 2; o++)
                store4(part + o * 4,
                       pack_half(sum[tile][o][upper * 2] * inverse, sum[tile][o][upper * 2 + 1] * inverse));
            if (b.warp == 0 && q == 0)
                store8(b.p.part_stats + to * 2, __float_as_uint(at.peak[row]), __float_as_uint(at.weight[row]));
        }
    }
}

__device__ __forceinline__ int remembered_rows(const Block& b) {
    return min(b.r.appended + b.r.rows, (int)b.p.capacity);
}
__device__ __forceinline__ int splits_of(int remembered) {
    return min((remembered + CHUNK - 1) / CHUNK + 1, SPLITS);
}

__device__ __forceinline__ void draft_parts(Block& b, int layer) {
    const int remembered = uniform(remembered_rows(b)), splits = splits_of(remembered), all_rows = b.nodes * GROUP;
    const int batches = (all_rows + BATCH - 1) / BATCH;
#pragma unroll 1
    for (int item = b.sm; item < splits * batches * KV_HEADS; item += SMS) {
        const int kv_head = item % KV_HEADS, split = item / KV_HEADS % splits, first = item / KV_HEADS / splits * BATCH;
        attend(b, layer, b.r.window[layer], b.r.causal[layer], kv_head, first, min(BATCH, all_rows - first), remembered,
               split);
    }
}

// --- merge ----------------------------------------------------------------------------------------------------------

// A warp a row's head, a lane four dimensions of every part, and one part's share. Who has merged parts sets them back.
__device__ __forceinline__ void draft_merge(Block& b, int stage) {
    constexpr int AT_ONCE = 8, STATS = AT_ONCE;  // parts that are asked for, the first ones beside the shares
    const int splits = splits_of(uniform(remembered_rows(b)));
    u32* words = operand_words(b, stage + 1);
    int turn = 0;
#pragma unroll 1
    for (Spans<DRAFT_DIM> own(b); own.more(); own.next(), turn ^= 1) {
        const int node = own.node(), k = own.k();
        const size_t at = (size_t)(node * HEADS + k / DIM) * SPLITS;
        u32 *parts = b.p.parts + at * (DIM / 2), *stats = b.p.part_stats + at * 2;
        float sum[4] = {}, weight = 0.0f;
#pragma unroll 1
        for (int first = 0; first < splits; first += AT_ONCE) {
            uint2 got[AT_ONCE + 1];
            take<AT_ONCE + 1>(got, [&](int i) {
                return load8(i == STATS ? stats + min(b.lane, splits - 1) * 2
                                        : parts + min(first + i, splits - 1) * (DIM / 2) + b.lane * 2);
            });
            const float peak = __uint_as_float(got[STATS].x);
            const float own_share = power_of_2(peak - warp_max(peak)) * __uint_as_float(got[STATS].y);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const float share = __shfl_sync(~0u, own_share, first + i);
                if (first + i >= splits) break;
                weight += share;
                const float2 low = unpack_half(got[i].x), high = unpack_half(got[i].y);
                sum[0] = fmaf(share, low.x, sum[0]), sum[1] = fmaf(share, low.y, sum[1]);
                sum[2] = fmaf(share, high.x, sum[2]), sum[3] = fmaf(share, high.y, sum[3]);
            }
        }
        const float inverse = reciprocal(weight);
        const uint2 out = {pack_bf16(sum[0] * inverse, sum[1] * inverse),
                           pack_bf16(sum[2] * inverse, sum[3] * inverse)};
        publish_half(b, words, node, k, out, turn);
#pragma unroll 1
        for (int i = b.lane * 4; i < splits * (DIM / 2); i += 128)
            store16(parts + i, NOT_YET, NOT_YET, NOT_YET, NOT_YET);
        if (b.lane < splits) store8(stats + b.lane * 2, NOT_YET, NOT_YET);
    }
}
