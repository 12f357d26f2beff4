// What enters an MTP block after itself: the embedding of the token that it thinks likeliest, and its own hidden row,
// both normed.
//
// Maths: x / sqrt(mean(x^2) + EPS) * weight. Given with -D: HIDDEN EPS EMBEDDING_TYPE. Grid: two blocks of 256 threads,
// one for either.
#include "large/embedding.cuh"

constexpr int FOLLOWERS = 256, EACH = (HIDDEN + FOLLOWERS - 1) / FOLLOWERS;

struct Follow {
    const u8* embedding;  // the file's rows
    const u32* token;
    const float* hidden;
    const float* norms;  // of the embedding, of the hidden row
    float* out;          // [2 * HIDDEN]
};

extern "C" __global__ void __launch_bounds__(FOLLOWERS) follow(const __grid_constant__ Follow a) {
    __shared__ float squares[FOLLOWERS / 32];
    const int which = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u8* row = a.embedding + *a.token * embedding_row_bytes();
    float own[EACH], square = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int k = i * FOLLOWERS + threadIdx.x;
        own[i] = k >= HIDDEN ? 0.0f : which ? a.hidden[k] : embedding_value(row, k);
        square = fmaf(own[i], own[i], square);
    }
    square = warp_sum(square);
    if (lane == 0) squares[warp] = square;
    __syncthreads();
    square = 0.0f;
    for (int w = 0; w < FOLLOWERS / 32; w++) square += squares[w];
    const float by = inverse_root(square / HIDDEN + EPS);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int k = i * FOLLOWERS + threadIdx.x;
        if (k < HIDDEN) a.out[which * HIDDEN + k] = own[i] * by * a.norms[which * HIDDEN + k];
    }
}
