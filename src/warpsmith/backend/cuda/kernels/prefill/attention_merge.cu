// The segments of attention joined in order, times the gate: y = sigmoid(gate) sum_s w_s mean_s / sum_s w_s, where
// w_s = weight_s 2^(maximum_s - maximum).
//
// Grid: an octet of tokens and a quarter of the dimensions a CTA, a warp a query head; a lane has 8 dimensions of every
// 32 of one token. Bytes: 512 a segment and row, and 512 of gates, read; 512 written.
#include "prefill/attention.cuh"

constexpr int EACH = DIM_TILES / 4;  // tiles of 32 dimensions: two, which are operands together
static_assert(EACH == 2, "");
constexpr int BATCH = 8;  // segments that are on their way together

extern "C" __global__ void __launch_bounds__(HEADS * 32)
    attention_merge(const __grid_constant__ Attention a, const __grid_constant__ Piece p,
                    const __grid_constant__ Queries s) {
    let_next_start();
    const int head = threadIdx.x / 32, lane = threadIdx.x % 32, o = lane / 8, first_tile = blockIdx.x % 4 * EACH;
    const int octet = s.first / 8 + blockIdx.x / 4, token = octet * 8 + lane % 8;
    const int all = segment_of(p.base + min(token, p.end - 1)) + 1;
    const size_t stride = (size_t)KV_HEADS * s.count * GROUP;
    const size_t row = ((size_t)(head / GROUP) * s.count + token - s.first) * GROUP + head % GROUP;
    // Few tokens: at first with whatever is there, for the sake of the instructions, which come from far away; the
    // launch before still works meanwhile. Nothing of what is read stays in L1.
#pragma unroll 1
    for (bool real = p.end > CHUNK;; real = true) {
        if (real) wait_for_previous();
        const int segments = real ? all : min(all, 2 * BATCH - 1);
        float peak = MINUS_INFINITY;
#pragma unroll BATCH
        for (int i = 0; i < segments; i++) peak = fmaxf(peak, __ldcg(a.stats + i * stride + row).x);
        float sum[EACH][8] = {}, weight = 0.0f;
#pragma unroll BATCH
        for (int i = 0; i < segments; i++) {
            const float2 stats = __ldcg(a.stats + i * stride + row);
            const float share = stats.y * power_of_2(stats.x - peak);
            weight += share;
            const uint4* part = a.parts + ((i * stride + row) * DIM_TILES + first_tile) * 4 + o;
#pragma unroll
            for (int d = 0; d < EACH; d++) {
                const uint4 v = __ldcg(part + d * 4);
                const u32 pair[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float2 mean = unpack_half(pair[j]);
                    sum[d][2 * j] = fmaf(share, mean.x, sum[d][2 * j]);
                    sum[d][2 * j + 1] = fmaf(share, mean.y, sum[d][2 * j + 1]);
                }
            }
        }
        const float inverse = 1.0f / weight;
        uint4 out[EACH];
#pragma unroll
        for (int d = 0; d < EACH; d++) {
            const int gate_tile = (head * 2 + 1) * DIM_TILES + first_tile + d;
            const uint4 v = __ldcg((const uint4*)a.raw + ((size_t)p.capacity * gate_tile + octet) * 32 + lane);
            const u32 gate[4] = {v.x, v.y, v.z, v.w};
            u32 y[4];
#pragma unroll
            for (int j = 0; j < 4; j++)
                y[j] = pack_bf16(sum[d][2 * j] * inverse * sigmoid(bf16_low(gate[j])),
                                 sum[d][2 * j + 1] * inverse * sigmoid(bf16_high(gate[j])));
            out[d] = {y[0], y[1], y[2], y[3]};
        }
        if (!real) continue;
        store_operands(a.y, (head * DIM_TILES + first_tile) / 2, chunks_of(ATTENTION_DIM), (size_t)p.capacity * 32,
                       (size_t)octet * 32 + lane, out[0], out[1]);
        return;
    }
}
