// The DeltaNet's output: O = Q^ S + O0, normed by head and gated, y = O / rms(O) weight silu(z) (see delta.cuh).
//
// Grid: a CTA of 256 threads a chunk and value head; a warp has 16 tokens and 64 columns. The last chunk's CTAs also
// keep the last inputs of the convolution, by position modulo 4. Bytes: 64 KB and 16 KB of z read, 16 KB of y written.
#include "prefill/delta.cuh"

extern "C" __global__ void __launch_bounds__(256, 2)
    delta_output(const __grid_constant__ Delta a, const __grid_constant__ Piece p) {
    __shared__ float squares[2][CHUNK];
    let_next_start();
    wait_for_previous();
    const int chunk = blockIdx.x / VALUE_HEADS, head = blockIdx.x % VALUE_HEADS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, m = warp % 4,
              half = warp / 4;
    float acc[8][4];
    const uint4* o = a.o + (((size_t)blockIdx.x * 4 + m) * 8 + half * 4) * 32 + lane;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const uint4 v = o[n * 32];
        acc[2 * n][0] = bf16_low(v.x), acc[2 * n][1] = bf16_high(v.x), acc[2 * n][2] = bf16_low(v.y),
                acc[2 * n][3] = bf16_high(v.y);
        acc[2 * n + 1][0] = bf16_low(v.z), acc[2 * n + 1][1] = bf16_high(v.z), acc[2 * n + 1][2] = bf16_low(v.w),
                    acc[2 * n + 1][3] = bf16_high(v.w);
    }
    const uint4* rows = a.q + ((size_t)blockIdx.x * 4 + m) * 8 * 32 + lane;
    const uint4* states = a.states + ((size_t)blockIdx.x * SLICES + half * 4) * 8 * 32 + lane;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const uint4 x = rows[k * 32];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const uint4 y = states[(n * 8 + k) * 32];
            mma(acc[2 * n], x.x, x.y, x.z, x.w, y.x, y.y);
            mma(acc[2 * n + 1], x.x, x.y, x.z, x.w, y.z, y.w);
        }
    }
    float square[2] = {};
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) square[i / 2] = fmaf(acc[n][i], acc[n][i], square[i / 2]);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        square[i] += __shfl_xor_sync(~0u, square[i], 1);
        square[i] += __shfl_xor_sync(~0u, square[i], 2);
        if (q == 0) squares[half][m * 16 + g + i * 8] = square[i];
    }
    __syncthreads();
    const float* weight = a.vectors + DELTA_MIX_NORM + half * 64 + q * 2;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = m * 16 + g + i * 8, octet = chunk * 8 + m * 2 + i;
        const float scale = inverse_root((squares[0][row] + squares[1][row]) / STATE_DIM + EPS);
        if (octet * 8 < p.end) {
            const size_t inside = (size_t)octet * 32 + q * 8 + g, tile_pieces = (size_t)p.capacity * 32;
            const int pair = head * (DELTA_TILES / 2) + half;
            uint4 out[2];
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
                const uint4 z = ((const uint4*)a.raw)[(CONV_CHANNELS / 32 + pair * 2 + tile) * tile_pieces + inside];
                const u32 gate[4] = {z.x, z.y, z.z, z.w};
                u32 y[4];
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    const float2 w = __ldg((const float2*)(weight + (tile * 4 + n) * 8));
                    const float* x = &acc[tile * 4 + n][2 * i];
                    y[n] = pack_bf16(x[0] * scale * w.x * silu(bf16_low(gate[n])),
                                     x[1] * scale * w.y * silu(bf16_high(gate[n])));
                }
                out[tile] = {y[0], y[1], y[2], y[3]};
            }
            store_operands(a.y, pair, chunks_of(VALUE_DIM), tile_pieces, inside, out[0], out[1]);
        }
    }
    if (chunk == chunks_in(p) - 1) {
        const int low = CONV_CHANNELS * head / VALUE_HEADS, each = CONV_CHANNELS * (head + 1) / VALUE_HEADS - low;
        for (int i = threadIdx.x; i < HISTORY * each; i += 256) {
            const int token = p.end - 1 - i / each, channel = low + i % each;
            if (token < p.lead) break;
            const size_t piece =
                ((size_t)p.capacity * (channel / 32) + token / 8) * 32 + channel % 8 / 2 * 8 + token % 8;
            const u16 v = ((const u16*)a.raw)[piece * 8 + channel % 32 / 8 * 2 + channel % 2];
            a.history[(size_t)((p.base + token) & (HISTORY - 1)) * CONV_CHANNELS + channel] =
                __uint_as_float((u32)v << 16);
        }
    }
}
