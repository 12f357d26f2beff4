// The residual stream of some tokens, row by row in f32: as it is (features), or normed (the hidden that MTP heads
// read).
//
// Grid: a CTA of 256 threads a token. Bytes: 4 read and 4 written a channel.
#include "prefill/common.cuh"

struct Rows {
    const float* residual;  // tiles
    const float* squares;   // [HIDDEN / 64][tokens]
    const float* norm;      // or null
    float* out;             // [tokens][stride]
    int first, stride;
};

extern "C" __global__ void __launch_bounds__(256)
    rows(const __grid_constant__ Rows a, const __grid_constant__ Piece p) {
    let_next_start();
    wait_for_previous();
    const int token = a.first + blockIdx.x;
    float scale = 1.0f;
    if (a.norm) {
        float square = 0.0f;
#pragma unroll 8
        for (int part = 0; part < HIDDEN / 64; part++) square += a.squares[(size_t)part * p.capacity * 8 + token];
        scale = inverse_root(square / HIDDEN + EPS);
    }
    for (int k = threadIdx.x * 2; k < HIDDEN; k += 512) {
        const size_t piece = ((size_t)p.capacity * (k / 32) + token / 8) * 32 + k % 8 / 2 * 8 + token % 8;
        float2 v = ((const float2*)a.residual)[piece * 4 + k % 32 / 8];
        if (a.norm) v.x *= scale * __ldg(a.norm + k), v.y *= scale * __ldg(a.norm + k + 1);
        *(float2*)(a.out + (size_t)blockIdx.x * a.stride + k) = v;
    }
}
