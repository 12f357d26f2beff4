// The beginning of a forward pass: the residual stream starts as the token's embedding, exactly as the file has it.
//
// Tied: the table is the LM head's own stream, row `id` being a row of unit id / 16. Else it is a table of its own, the
// file's rows as they are.
#pragma once
#include "forward/matmul.cuh"

struct Eight {
    float4 low, high;
};
__device__ __forceinline__ Eight from_bf16(uint4 v) {
    return {{bf16_low(v.x), bf16_high(v.x), bf16_low(v.y), bf16_high(v.y)}, {bf16_low(v.z), bf16_high(v.z), bf16_low(v.w), bf16_high(v.w)}};
}
// Bytes, `bias` more than the values they stand for, and an fp16 scale.
__device__ __forceinline__ Eight from_bytes(u32 early, u32 late, u32 scale, int bias) {
    const auto four = [&](u32 w) -> float4 {
        return {(float)((int)(w & 255) - bias), (float)((int)(w >> 8 & 255) - bias), (float)((int)(w >> 16 & 255) - bias),
                (float)((int)(w >> 24) - bias)};
    };
    const float d = unpack_half(scale).x;
    return {scaled(four(early), d), scaled(four(late), d)};
}

// Eight values of a row from k on, a multiple of 8 (see pack.cu).
__device__ __forceinline__ Eight embedding_piece(const Block& b, int id, int k) {
    if constexpr (TIED) {
        constexpr int CHUNKS = chunks_of(HIDDEN), CHUNK_BYTES = chunk_bytes(HEAD_TYPE, WIDE);
        const int unit = id / WIDE, sm = owner_of(HEAD_UNITS, unit), lane = id % 8 * 4 + k % 32 / 8, upper = id % WIDE / 8;
        const int warp = k / (CHUNKS * 32), chunk = k % (CHUNKS * 32) / 32;
        const u8* at = b.p.stream + b.p.head_start[sm] + (size_t)((unit - first_unit(HEAD_UNITS, sm)) * CHUNKS + chunk) * CHUNK_BYTES;
        if constexpr (HEAD_TYPE == Q8_0) {
            const uint2 v = __ldg((const uint2*)(at + (warp * 32 + lane) * WIDE) + upper);
            const u32 scales = __ldg((const u32*)(at + WARPS * 32 * WIDE) + warp * 8 + id % 8);
            return from_bytes(v.x, v.y, upper ? scales >> 16 : scales, 128);
        }
        const uint4* tile = (const uint4*)(at + warp * 64 * WIDE) + lane;
        const uint4 early = __ldg(tile), late = __ldg(tile + 32);
        return from_bf16(upper ? uint4{early.y, early.w, late.y, late.w} : uint4{early.x, early.z, late.x, late.z});
    }
    if constexpr (EMBEDDING_TYPE == Q8_0) {  // blocks of a scale and 32 values: 34 bytes
        const u16* block = (const u16*)(b.p.embedding + ((size_t)id * HIDDEN + k) / 32 * 34);
        const u16* v = block + 1 + k % 32 / 2;
        
        return from_bytes((__ldg(v) | __ldg(v + 1) << 16) ^ 0x80808080, (__ldg(v + 2) | __ldg(v + 3) << 16) ^ 0x80808080, __ldg(block), 128);
    }
    return from_bf16(__ldg((const uint4*)(b.p.embedding + ((size_t)id * HIDDEN + k) * 2)));
}

__device__ __forceinline__ void embed(Block& b, const float* norm) {
    const OwnUnits own(b.sm);
#pragma unroll 1
    for (int item = threadIdx.x; item < own.count * b.nodes; item += CONSUMERS) {
        const int unit = item / b.nodes, token = item % b.nodes, k = (own.first + unit) * NARROW;
        const float4 n0 = __ldg((const float4*)(norm + k)), n1 = __ldg((const float4*)(norm + k) + 1);
        const Eight row = embedding_piece(b, b.s.token[token], k);
        const float4 x0 = row.low, x1 = row.high;
        ((float4*)b.s.residual[unit][token])[0] = x0;
        ((float4*)b.s.residual[unit][token])[1] = x1;
        u32* to = b.value<Residual>(X_TURN, token, X_AT, k);
        publish8(to, b.other(X_TURN), pack_bf16(x0.x * n0.x, x0.y * n0.y), pack_bf16(x0.z * n0.z, x0.w * n0.w));
        publish8(to + 2, b.other(X_TURN), pack_bf16(x1.x * n1.x, x1.y * n1.y), pack_bf16(x1.z * n1.z, x1.w * n1.w));
        const float low = fmaf(x0.x, x0.x, fmaf(x0.y, x0.y, fmaf(x0.z, x0.z, x0.w * x0.w)));
        const float high = fmaf(x1.x, x1.x, fmaf(x1.y, x1.y, fmaf(x1.z, x1.z, x1.w * x1.w)));
        publish4(b.square<Residual>(X_TURN, token, X_SQUARES_AT, own.first + unit), b.other(X_TURN), __float_as_uint(low + high));
    }
}
