// Convolution, norms and all of a chunk that does not depend on the state: see delta.cuh.
//
// Layout: q, k (before their norms, whose factors are applied in f32) and v in bf16 [64][136] in shared memory; the
// triangular inverse in f32. U takes v's place, K~ takes k's. Grid: a CTA of 256 threads a chunk and value head. Bytes:
// 48 KB of projections read, 96 KB written.
#include "prefill/delta_chunk.cuh"

struct Shared {
    u16 q[CHUNK * ROW], k[CHUNK * ROW], v[CHUNK * ROW];
    union {
        u16 w[CHUNK * ROW];
        float y[32 * Y_ROW];  // before: blocks of the inverse on their way
    };
    float x[CHUNK * X_ROW];  // A, then (I + A)^-1
    u16 p[CHUNK * P_ROW];
    Scalars scalars;
};

__device__ __forceinline__ u32 shared_pair(const u16* row, int column) { return *(const u32*)(row + column); }

// Sums of 16 rows and 128 columns.
__device__ __forceinline__ void keep(uint4* to, const float (&acc)[16][4]) {
#pragma unroll
    for (int k = 0; k < 8; k++) to[k * 32] = as_operand(acc[2 * k], acc[2 * k + 1]);
}

extern "C" __global__ void __launch_bounds__(256, 2)
    delta_prep(const __grid_constant__ Delta a, const __grid_constant__ Piece p) {
    extern __shared__ __align__(128) u8 memory[];
    Shared& s = *(Shared*)memory;
    let_next_start();
    wait_for_previous();
    const int chunk = blockIdx.x / VALUE_HEADS, head = blockIdx.x % VALUE_HEADS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    Scalars& scalars = s.scalars;
    const auto rows_of = [&](u16* rows, int tile, float* squares) {
        return [=](int row, const u32(&pair)[4], float square) {
#pragma unroll
            for (int i = 0; i < 4; i++) *(u32*)(rows + row * ROW + tile * 32 + i * 8 + lane / 8 * 2) = pair[i];
            if (squares && lane < 8) squares[row] = square;
        };
    };
    {  // q and k: a tile a warp
        Convolution<8> all(a, head, warp, 0);
        all.load(a, p, chunk);
        all.run(p, chunk, rows_of(warp < 4 ? s.q : s.k, warp % 4, scalars.squares[warp / 4][warp % 4]));
    }
    {  // v: half a tile
        Convolution<4> half_of_v(a, head, 8 + warp / 2, warp % 2 * 4);
        half_of_v.load(a, p, chunk);
        half_of_v.run(p, chunk, rows_of(s.v, warp / 2, nullptr));
    }
    Gates gates = {};
    if (warp == 0) gates.load(a, p, chunk, head);
    __syncthreads();
    if (warp == 0) make_scalars(a, p, scalars, gates, chunk, head, 0, CHUNK);

    // K K^T by the first four warps, Q K^T by the others: 16 rows each, columns up to the diagonal.
    const int m = warp % 4, half = warp / 4;
    {
        float acc[8][4] = {};
#pragma unroll
        for (int k = 0; k < STATE_DIM; k += 16) {
            const uint4 rows = operand_a((half ? s.q : s.k) + m * 16 * ROW + k, ROW);
#pragma unroll
            for (int n = 0; n < 4; n++)
                if (n <= m) multiply(acc[2 * n], acc[2 * n + 1], rows, operand_b(s.k + n * 16 * ROW + k));
        }
        __syncthreads();  // scalars
        const int row0 = m * 16 + g;
        const float total[2] = {scalars.total[row0], scalars.total[row0 + 8]};
        const float factor[2] = {half ? scalars.rq[row0] : scalars.beta[row0] * scalars.rk[row0],
                                 half ? scalars.rq[row0 + 8] : scalars.beta[row0 + 8] * scalars.rk[row0 + 8]};
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const int column = n * 8 + q * 2;
            const float2 rk = *(const float2*)&scalars.rk[column], before = *(const float2*)&scalars.total[column];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = row0 + i * 8, last = half ? row : row - 1;
                const float x = column <= last ? decayed(acc[n][2 * i], factor[i], rk.x, total[i], before.x) : 0.0f;
                const float y =
                    column + 1 <= last ? decayed(acc[n][2 * i + 1], factor[i], rk.y, total[i], before.y) : 0.0f;
                if (half)
                    *(u32*)&s.p[row * P_ROW + column] = pack_bf16(x, y);
                else
                    *(float2*)&s.x[row * X_ROW + column] = {x, y};
            }
        }
    }
    __syncthreads();
    invert(s.x, s.y);

    // U (first four warps) and W: the inverse times v and k, their factors in its columns.
    float acc[16][4] = {};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (k > m) break;
        const uint4 x = scaled_inverse(s.x, scalars, m, k, half);
#pragma unroll
        for (int n = 0; n < 8; n++)
            multiply(acc[2 * n], acc[2 * n + 1], x, operand_b_transposed((half ? s.k : s.v) + k * 16 * ROW + n * 16));
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 16; n++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            *(u32*)((half ? s.w : s.v) + (m * 16 + g + i * 8) * ROW + n * 8 + q * 2) =
                pack_bf16(acc[n][2 * i], acc[n][2 * i + 1]);
    const float last = scalars.total[CHUNK - 1];
    for (int i = threadIdx.x; i < CHUNK * STATE_DIM / 2; i += 256) {
        const int row = i / (STATE_DIM / 2);
        u32* at = (u32*)(s.k + row * ROW) + i % (STATE_DIM / 2);
        const float left = scalars.left[row];
        *at = pack_bf16(bf16_low(*at) * left, bf16_high(*at) * left);
    }
    __syncthreads();
    if (threadIdx.x == 0) a.fade[blockIdx.x] = exponential(last);

    // O0 = P U (first four warps), Q^ = e^G Q - P W.
#pragma unroll
    for (int n = 0; n < 16; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[n][i] = 0.0f;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (k > m) break;
        const uint4 rows = operand_a(s.p + m * 16 * P_ROW + k * 16, P_ROW);
#pragma unroll
        for (int n = 0; n < 8; n++)
            multiply(acc[2 * n], acc[2 * n + 1], rows,
                     operand_b_transposed((half ? s.w : s.v) + k * 16 * ROW + n * 16));
    }
    if (half) {
        uint4* to = a.q + ((size_t)blockIdx.x * 4 + m) * 8 * 32 + lane;
        float factor[2];
#pragma unroll
        for (int i = 0; i < 2; i++) factor[i] = query_factor(scalars, m * 16 + g + i * 8);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            u32 x[4];
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const u32 pair = shared_pair(s.q + (m * 16 + g + i * 8) * ROW, k * 16 + j * 8 + q * 2);
                    const float* sum = &acc[2 * k + j][2 * i];
                    x[j * 2 + i] =
                        pack_bf16(fmaf(factor[i], bf16_low(pair), -sum[0]), fmaf(factor[i], bf16_high(pair), -sum[1]));
                }
            to[k * 32] = {x[0], x[1], x[2], x[3]};
        }
    } else {
        keep(a.o + ((size_t)blockIdx.x * 4 + m) * 8 * 32 + lane, acc);
    }

    // N = K~^T W and B = K~^T U: 16 rows a warp.
#pragma unroll 1
    for (int which = 0; which < 2; which++) {
#pragma unroll
        for (int n = 0; n < 16; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[n][i] = 0.0f;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint4 rows = operand_a_transposed(s.k + k * 16 * ROW + warp * 16);
#pragma unroll
            for (int n = 0; n < 8; n++)
                multiply(acc[2 * n], acc[2 * n + 1], rows,
                         operand_b_transposed((which ? s.v : s.w) + k * 16 * ROW + n * 16));
        }
        keep((which ? a.b : a.n) + ((size_t)blockIdx.x * 8 + warp) * 8 * 32 + lane, acc);
    }
}
