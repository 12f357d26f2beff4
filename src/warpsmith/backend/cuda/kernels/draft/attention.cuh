// Attention of a draft's block over what it remembers of the text, and over itself.
//
// Maths: softmax(q k^T / sqrt(128)) v, with norms and RoPE on q and k; a row sees keys at positions less than a window
// away, and in causal layers none after its own. Keys and values of the text lie in rings, in the order they came, each
// with its position. Steps: rows (norm, RoPE, fp16; a warp a row); parts (items: a key head, 64 rows of queries, a
// split of the chunks of 64 keys; the block's own keys are the last chunk); merge (splits in order). Scores: 16 queries
// x 8 keys x 16 dimensions a product. Sums: 16 queries x 8 dimensions x 16 keys; a warp keeps both in registers. While
// a chunk is looked at the next one is on its way.
#pragma once
#include "draft/products.cuh"

static_assert(DIM == 128 && BATCH == 8 * WARPS && NODES <= 16, "two warps have 16 queries");
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
        const int node = task / EACH, row = task % EACH, of = r.context[row / KV_HEADS], head = row % KV_HEADS;
        const int layer = of >> 1;
        const bool is_value = of & 1;
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

// Sixteen bytes of a row of keys or values, moved so that neither eight rows of one of them nor two rows of four share
// banks.
__device__ __forceinline__ int unit_at(int row, int unit) {
    return row * (DIM / 2) + (unit ^ ((row & 1) << 2 | (row >> 1 & 3))) * 4;
}

// Sixteen rows of queries, two warps: each scores them against all keys of a chunk and has half of the dimensions of
// what they add up to.
struct Queries {
    uint4 rows[8];         // g and g + 8, as products take them
    int first[2], last[2];  // positions that these see
    float peak[2], weight[2];
    float sum[8][4];

    // Scores against keys 16 by 16, then their weights and what these add up to.
    __device__ __forceinline__ void see(const Block& b, const AttentionScratch& at, int buffer, int half, int groups) {
        const int g = b.lane >> 2, q = b.lane & 3;
        float s[CHUNK / 8][4] = {};
        // Products in an order in which none waits for the one before it.
#pragma unroll
        for (int c = 0; c < 4; c++)
#pragma unroll
            for (int tile = 0; tile < CHUNK / 8; tile++) {
                if (tile >= 2 * groups) continue;
                const uint4 key = *(const uint4*)(at.keys[buffer] + unit_at(tile * 8 + g, c * 4 + q));
                mma_half(s[tile], rows[c * 2], key.x, key.y);
                mma_half(s[tile], rows[c * 2 + 1], key.z, key.w);
            }
        float most[2] = {LEAST_SCORE, LEAST_SCORE};
#pragma unroll
        for (int tile = 0; tile < CHUNK / 8; tile++) {
            if (tile >= 2 * groups) continue;
            const int2 there = *(const int2*)(at.position[buffer] + tile * 8 + q * 2);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int key = i & 1 ? there.y : there.x;
                if ((key < first[i / 2]) | (key > last[i / 2])) s[tile][i] = MINUS_INFINITY;
                most[i / 2] = fmaxf(most[i / 2], s[tile][i]);
            }
        }
        float factor[2], more[2] = {};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 1));
            most[i] = fmaxf(fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 2)), peak[i]);
            factor[i] = power_of_2(peak[i] - most[i]), peak[i] = most[i];
        }
#pragma unroll
        for (int tile = 0; tile < 8; tile++)
            sum[tile][0] *= factor[0], sum[tile][1] *= factor[0], sum[tile][2] *= factor[1], sum[tile][3] *= factor[1];
#pragma unroll
        for (int group = 0; group < CHUNK / 16; group++) {
            if (group >= groups) continue;
            u32 weights[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* v = s[group * 2 + i / 2] + i % 2 * 2;
                weights[i] = pack_half(power_of_2(v[0] - peak[i % 2]), power_of_2(v[1] - peak[i % 2]));
                const float2 rounded = unpack_half(weights[i]);
                more[i % 2] += rounded.x + rounded.y;
            }
            uint4 v[4];  // of sixteen dimensions each
#pragma unroll
            for (int i = 0; i < 4; i++)
                v[i] = load_transposed(
                    at.values[buffer] + unit_at(group * 16 + (b.lane & 15), half * 8 + i * 2 + (b.lane >> 4)));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                mma_half(sum[i * 2], {weights[0], weights[1], weights[2], weights[3]}, v[i].x, v[i].y);
                mma_half(sum[i * 2 + 1], {weights[0], weights[1], weights[2], weights[3]}, v[i].z, v[i].w);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            more[i] += __shfl_xor_sync(~0u, more[i], 1);
            weight[i] = fmaf(weight[i], factor[i], more[i] + __shfl_xor_sync(~0u, more[i], 2));
        }
    }
};

// Rows of queries `first_row` .. of a key head, (node, head in its group) in order, against every SPLITS-th
// chunk.
__device__ __forceinline__ void attend(Block& b, int layer, int window, bool causal, int kv_head, int first_row,
                                       int rows, int remembered, int split) {
    const Params& p = b.p;
    AttentionScratch& at = *(AttentionScratch*)b.scratch;
    const int past = (remembered + CHUNK - 1) / CHUNK, unit = threadIdx.x & 15;
    const u32* keys = p.keys + (size_t)((layer * KV_HEADS + kv_head) * (int)p.capacity) * (DIM / 2) + unit * 4;
    const u32* values = p.values + (keys - p.keys);
    const auto position_of = [&](int key) { return key < remembered ? __ldcg(p.positions + key) : -1; };
    // The next chunk, or the one after it: all of one may be out of sight, even to the first row.
    const auto seen_from = [&](int chunk) {
        for (; window && chunk < past; chunk += SPLITS) {
            const int key = chunk * CHUNK + b.lane;
            const float newest = warp_max(fmaxf((float)position_of(key), (float)position_of(key + 32)));
            if (uniform((int)newest + window > b.r.position ? 1 : 0)) break;
        }
        return chunk;
    };
    // A chunk's keys and values, a thread sixteen bytes of four rows each, and their positions. The block's own are
    // exchanged, as all queries are, and no more than sixteen. Past the end any row does: nobody sees it.
    const auto ask = [&](int chunk, int buffer) {
        if (chunk == past) {
            const int row = threadIdx.x >> 4, node = min(row, b.nodes - 1);
            uint4 got[2];
            take<2>(got, [&](int i) {
                return load16(row_words(b, layer, node, HEADS + i * KV_HEADS + kv_head) + unit * 4);
            });
            *(uint4*)(at.keys[buffer] + unit_at(row, unit)) = got[0];
            *(uint4*)(at.values[buffer] + unit_at(row, unit)) = got[1];
            if (unit == 0) at.position[buffer][row] = row < b.nodes ? b.r.position + row : -1;
            return;
        }
#pragma unroll
        for (int i = 0; i < CHUNK / 16; i++) {
            const int row = i * 16 + (int)(threadIdx.x >> 4);
            const u32 from = (u32)min(chunk * CHUNK + row, remembered - 1) * (DIM / 2);
            copy16(at.keys[buffer] + unit_at(row, unit), keys + from);
            copy16(at.values[buffer] + unit_at(row, unit), values + from);
        }
        if (threadIdx.x < CHUNK) at.position[buffer][threadIdx.x] = position_of(chunk * CHUNK + (int)threadIdx.x);
    };

    b.sync();  // what the scratch holds may still be read
    const int g = b.lane >> 2, q = b.lane & 3, tile = b.warp >> 1, half = b.warp & 1;
    const bool mine = tile * 16 < rows;
    const auto row_of = [&](int upper) { return first_row + min(tile * 16 + upper * 8 + g, rows - 1); };
    int chunk = seen_from(split);
    if (chunk <= past) ask(chunk, 0);
    Queries own = {};
    own.peak[0] = own.peak[1] = LEAST_SCORE;
    if (mine) {
        uint4 got[8];
        take<8>(got, [&](int i) {
            const u32 row = row_of(i / 4);
            return load16(row_words(b, layer, row / GROUP, kv_head * GROUP + row % GROUP) + i % 4 * 16 + q * 4);
        });
#pragma unroll
        for (int c = 0; c < 4; c++) {
            own.rows[c * 2] = {got[c].x, got[4 + c].x, got[c].y, got[4 + c].y};
            own.rows[c * 2 + 1] = {got[c].z, got[4 + c].z, got[c].w, got[4 + c].w};
        }
#pragma unroll
        for (int upper = 0; upper < 2; upper++) {
            const int here = b.r.position + row_of(upper) / GROUP;
            own.first[upper] = window ? max(here - window + 1, 0) : 0;
            own.last[upper] = causal ? here : window ? here + window - 1 : 0x7fffffff;
        }
    }
#pragma unroll 1
    for (int buffer = 0; chunk <= past; buffer ^= 1) {
        const int next = chunk == past ? past + 1 : seen_from(chunk + SPLITS);
        copies_done();
        b.sync();  // the chunk is there; the one before is done with
        if (next <= past) ask(next, buffer ^ 1);
        if (mine) own.see(b, at, buffer, half, chunk == past ? 1 : CHUNK / 16);
        chunk = next;
    }
    if (!mine) return;
#pragma unroll
    for (int upper = 0; upper < 2; upper++) {
        if (tile * 16 + upper * 8 + g >= rows) continue;
        const u32 row = row_of(upper), of = kv_head * GROUP + row % GROUP;
        const u32 to = (row / GROUP * HEADS + of) * SPLITS + split;
        u32* part = b.p.parts + to * (DIM / 2) + half * 32 + q;
        const float inverse = reciprocal(fmaxf(own.weight[upper], 1e-30f));
#pragma unroll
        for (int i = 0; i < 8; i++)
            store4(part + i * 4, pack_half(own.sum[i][upper * 2] * inverse, own.sum[i][upper * 2 + 1] * inverse));
        if (half == 0 && q == 0)
            store8(b.p.part_stats + to * 2, __float_as_uint(own.peak[upper]), __float_as_uint(own.weight[upper]));
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
