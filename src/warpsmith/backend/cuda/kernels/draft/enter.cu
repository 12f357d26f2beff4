// The entry of an MTP block: a projection of a token's embedding and the hidden row before it, both normed.
//
// Maths: out[row] = W x[row]. Given with -D: HIDDEN. Grid: HIDDEN / 8 blocks of 256 threads, a warp an output; up to
// eight rows at a time. Bytes: the weights once for eight rows.
#include "common/ptx.cuh"

struct Enter {
    const u16* weights;  // bf16 [HIDDEN][2 * HIDDEN]
    const float* rows;   // [count][2 * HIDDEN]
    u16* out;            // bf16 [count][HIDDEN]
    int count;
};

extern "C" __global__ void __launch_bounds__(256) enter(const __grid_constant__ Enter a) {
    const int lane = threadIdx.x % 32, to = blockIdx.x * 8 + threadIdx.x / 32;
    const u16* weights = a.weights + (size_t)to * 2 * HIDDEN;
    for (int first = 0; first < a.count; first += 8) {
        float sum[8] = {};
        for (int k = lane * 8; k < 2 * HIDDEN; k += 256) {
            const uint4 packed = *(const uint4*)(weights + k);
            const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
            for (int row = 0; row < 8; row++) {
                const float4* x = (const float4*)(a.rows + (size_t)min(first + row, a.count - 1) * 2 * HIDDEN + k);
                const float4 low = x[0], high = x[1];
                sum[row] = fmaf(bf16_low(words[0]), low.x, fmaf(bf16_high(words[0]), low.y, sum[row]));
                sum[row] = fmaf(bf16_low(words[1]), low.z, fmaf(bf16_high(words[1]), low.w, sum[row]));
                sum[row] = fmaf(bf16_low(words[2]), high.x, fmaf(bf16_high(words[2]), high.y, sum[row]));
                sum[row] = fmaf(bf16_low(words[3]), high.z, fmaf(bf16_high(words[3]), high.w, sum[row]));
            }
        }
#pragma unroll
        for (int row = 0; row < 8; row++) {
            const float total = warp_sum(sum[row]);
            if (lane == 0 && first + row < a.count)
                a.out[(size_t)(first + row) * HIDDEN + to] = (u16)pack_bf16(total, 0.0f);
        }
    }
}
