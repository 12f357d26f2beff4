// Embedding at one end of a forward pass, the LM head and the choice of the next token at the other.
#pragma once
#include "matmul.cuh"

// The residual stream starts as the token's embedding. The table is the LM head's own stream (tied embeddings): row `id`
// is a row of unit id / 8, spread over that unit's chunks in pieces of 32 k.
__device__ __forceinline__ uint4 embedding_piece(const Block& b, int id, int k) {
    constexpr int CHUNKS = chunks_of(HIDDEN);
    const int unit = id / 8, sm = owner_of(HEAD_UNITS, unit);
    const int warp = k / (CHUNKS * 32), chunk = k % (CHUNKS * 32) / 32;
    const u8* at = b.p.stream + b.p.head_start[sm] + (size_t)(unit - first_unit(HEAD_UNITS, sm)) * CHUNKS * CHUNK_BYTES;
    return __ldg((const uint4*)(at + chunk * CHUNK_BYTES + warp * 512 + id % 8 * 64 + k % 32 * 2));
}

__device__ __forceinline__ void embed(Block& b) {
    const int first = first_unit(HIDDEN_UNITS, b.sm), units = first_unit(HIDDEN_UNITS, b.sm + 1) - first;
#pragma unroll 1
    for (int item = threadIdx.x; item < units * b.nodes; item += CONSUMERS) {
        const int unit = item / b.nodes, token = item % b.nodes, k = (first + unit) * 8;
        const uint4 row = embedding_piece(b, b.s.token[token], k);
        const float4 low = {bf16_low(row.x), bf16_high(row.x), bf16_low(row.y), bf16_high(row.y)};
        const float4 high = {bf16_low(row.z), bf16_high(row.z), bf16_low(row.w), bf16_high(row.w)};
        ((float4*)b.s.residual[unit][token])[0] = low;
        ((float4*)b.s.residual[unit][token])[1] = high;
        Packet* to = b.p.x + (size_t)token * X_PACKETS + k / 4;
        publish(to, low, b.tag);
        publish(to + 1, high, b.tag);
    }
}

// A logit and its id as one number that orders by value, then by lowest id.
__device__ __forceinline__ u64 ranked(float logit, int id) {
    const u32 bits = __float_as_uint(logit);
    const u32 ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (u64)ordered << 32 | (u32)~id;
}

// Stage: logits of every token, the best of which is kept; written out if asked.
__device__ __forceinline__ void lm_head(Block& b, const float* norm_weight, u32 x_tag) {
    constexpr int CHUNKS = chunks_of(HIDDEN);
    const int first = first_unit(HEAD_UNITS, b.sm), units = first_unit(HEAD_UNITS, b.sm + 1) - first;
#pragma unroll 1
    for (int token = threadIdx.x; token < b.nodes; token += CONSUMERS) b.s.best[token] = 0;
    const auto load = [&](Activations<CHUNKS>& a) { load_normed<CHUNKS>(b, a, b.p.x, x_tag, norm_weight); };
    multiply_resident<CHUNKS, HEAD_UNITS>(b, units, load, [&](bool live, int unit, int token, int quarter, float4 sum) {
        const float scale = inverse_rms(b, token);
        const int row = (first + unit) * 8 + quarter * 4;
        u64 best = 0;
        if (live && (b.lane & 3) == 0) {
            const float logit[4] = {sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (row + i >= VOCAB) break;
                best = max(best, ranked(logit[i], row + i));
                if (b.r.want_logits) b.p.out_logits[(size_t)token * VOCAB + row + i] = logit[i];
            }
            atomicMax((unsigned long long*)&b.s.best[token], best);  // a maximum does not depend on the order
        }
    });
    b.sync();
#pragma unroll 1
    for (int token = threadIdx.x; token < b.nodes; token += CONSUMERS) {
        const u64 best = b.s.best[token];
        const u32 high = (u32)(best >> 32), id = ~(u32)best;
        // 32 bits of value and 24 of id, around the tag's nibbles
        store_packet(b.p.best + (size_t)token * SMS + b.sm, tagged(high, b.tag, 0), tagged(high << 28 | id << 4, b.tag, 1),
                     tagged(0, b.tag, 2), tagged(0, b.tag, 3));
    }
    if (b.r.want_hidden && b.sm == 0) {  // x after the final norm, from the packets everybody read
#pragma unroll 1
        for (int item = threadIdx.x; item < b.nodes * X_PACKETS; item += CONSUMERS) {
            const int token = item / X_PACKETS, packet = item % X_PACKETS;
            const float4 x = poll_one(b.p.x + (size_t)token * X_PACKETS + packet, x_tag);
            float sum = 0.0f;
#pragma unroll 1
            for (int w = 0; w < WARPS; w++) sum += b.s.squares[b.norm][w][token];
            const float scale = rsqrtf(sum / HIDDEN + EPS);
            const float4 weight = __ldg((const float4*)norm_weight + packet);
            ((float4*)b.p.out_hidden)[(size_t)token * X_PACKETS + packet] = {x.x * scale * weight.x, x.y * scale * weight.y,
                                                                              x.z * scale * weight.z, x.w * scale * weight.w};
        }
    }
}

// The best of all SMs, known to every thread of every SM afterwards (in s.token).
__device__ __forceinline__ void choose_greedy(Block& b, u32 best_tag) {
    b.sync();
#pragma unroll 1
    for (int token = threadIdx.x; token < b.nodes; token += CONSUMERS) b.s.best[token] = 0;
    b.sync();
#pragma unroll 1
    for (int item = threadIdx.x; item < b.nodes * SMS; item += CONSUMERS) {
        Packet got[1];
        poll(got, b.p.best + item, 0, best_tag);
        const u32 high = (got[0].word[0] & ~15u) | got[0].word[1] >> 28, id = got[0].word[1] << 4 >> 8;
        atomicMax((unsigned long long*)&b.s.best[item / SMS], (u64)high << 32 | (u32)~id);
    }
    b.sync();
#pragma unroll 1
    for (int token = threadIdx.x; token < b.nodes; token += CONSUMERS) b.s.token[token] = (int)~(u32)b.s.best[token];
    b.sync();
}
