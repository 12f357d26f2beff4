// Convolution, norms and all of a chunk that does not depend on the state: see delta.cuh.
//
// Layout: q, k (before their norms, whose factors are applied in f32) and v in bf16 [64][136] in shared memory; the
// triangular inverse in f32. U takes v's place, K~ takes k's. Grid: a CTA of 256 threads a chunk and value head. Bytes:
// 48 KB of projections read, 96 KB written.
#include "prefill/delta.cuh"

constexpr int ROW = 136, X_ROW = 72, P_ROW = 72;  // elements between rows: no bank conflicts
struct Shared {
    u16 q[CHUNK * ROW], k[CHUNK * ROW], v[CHUNK * ROW], w[CHUNK * ROW];
    float x[CHUNK * X_ROW];  // A, then (I + A)^-1
    float y[16 * 52];        // a row of blocks on its way
    u16 p[CHUNK * P_ROW];
    float squares[2][4][CHUNK];                             // of q and k, a tile of 32 channels each
    float rq[CHUNK], rk[CHUNK], beta[CHUNK], total[CHUNK];  // total: G
};

__device__ __forceinline__ u32 shared_pair(const u16* row, int column) { return *(const u32*)(row + column); }

__device__ __forceinline__ void widen(uint4 v, float (&x)[8]) {
    x[0] = bf16_low(v.x), x[1] = bf16_high(v.x), x[2] = bf16_low(v.y), x[3] = bf16_high(v.y);
    x[4] = bf16_low(v.z), x[5] = bf16_high(v.z), x[6] = bf16_low(v.w), x[7] = bf16_high(v.w);
}
// Of a tile of raw projections, eight channels of a token: of this piece, or one of the last inputs before it.
__device__ __forceinline__ uint4 raw_piece(const Delta& a, const Piece& p, int tile, int token, int o) {
    if (token >= p.lead)
        return *(const uint4*)(a.raw + (((size_t)tile * p.capacity + token / 8) * 32 + o * 8 + token % 8) * 16);
    if (token < p.lead - 3) return {};
    const float* from = a.history + (size_t)((p.base + token) & (HISTORY - 1)) * CONV_CHANNELS + tile * 32 + 2 * o;
    return {pack_bf16(from[0], from[1]), pack_bf16(from[8], from[9]), pack_bf16(from[16], from[17]),
            pack_bf16(from[24], from[25])};
}
__device__ __forceinline__ uint4 chosen(bool first, uint4 a, uint4 b) {
    return {first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w};
}
__device__ __forceinline__ uint4 from_lane(uint4 v, int lane) {
    return {__shfl_sync(~0u, v.x, lane), __shfl_sync(~0u, v.y, lane), __shfl_sync(~0u, v.z, lane),
            __shfl_sync(~0u, v.w, lane)};
}

// Convolution and silu of 32 channels, COUNT octets of the chunk; a lane has eight channels of a token of each.
template <int COUNT>
__device__ __forceinline__ void convolve(const Delta& a, const Piece& p, Shared& s, int chunk, int head, int part,
                                         int first) {
    const int lane = threadIdx.x % 32, o = lane / 8, t = lane % 8, which = part / 4;
    const int from_head = which == 2 ? 2 * KEY_HEADS + head : which * KEY_HEADS + head % KEY_HEADS;
    const int tile = from_head * DELTA_TILES + part % 4, channel = tile * 32 + 2 * o;
    u16* to = (which == 0 ? s.q : which == 1 ? s.k : s.v) + part % 4 * 32 + 2 * o;
    uint4 raw[COUNT + 1];  // and of the octet before
#pragma unroll
    for (int i = 0; i <= COUNT; i++) {
        raw[i] = {};
        if (i > 0 || t >= 5) raw[i] = raw_piece(a, p, tile, chunk * CHUNK + (first + i - 1) * 8 + t, o);
    }
    float taps[4][8];  // oldest first
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float4 w = __ldg((const float4*)(a.vectors + DELTA_MIX_CONV) + channel + i / 2 * 8 + i % 2);
        taps[0][i] = w.x, taps[1][i] = w.y, taps[2][i] = w.z, taps[3][i] = w.w;
    }
#pragma unroll
    for (int octet = 0; octet < COUNT; octet++) {
        const int row = (first + octet) * 8 + t, token = chunk * CHUNK + row;
        const bool live = token >= p.lead && token < p.end;
        float sum[8], x[8];
#pragma unroll
        for (int age = 3; age >= 0; age--) {
            // A lane gives its token to the one `age` tokens later: of this octet, or of the last one.
            const uint4 given = age == 0 ? raw[octet + 1] : chosen(t + age < 8, raw[octet + 1], raw[octet]);
            widen(age == 0 ? given : from_lane(given, lane - t + ((t - age) & 7)), x);
#pragma unroll
            for (int i = 0; i < 8; i++) sum[i] = age == 3 ? taps[0][i] * x[i] : fmaf(taps[3 - age][i], x[i], sum[i]);
        }
        float square = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 pair = live ? pack_bf16(silu(sum[2 * i]), silu(sum[2 * i + 1])) : 0;
            *(u32*)(to + row * ROW + 8 * i) = pair;
            square = fmaf(bf16_low(pair), bf16_low(pair), fmaf(bf16_high(pair), bf16_high(pair), square));
        }
        square += __shfl_xor_sync(~0u, square, 8);
        square += __shfl_xor_sync(~0u, square, 16);
        if (which < 2 && o == 0) s.squares[which][part % 4][row] = square;
    }
}

// One warp: norms' factors, beta, and the running sum of the log decays; a lane has two tokens.
__device__ __forceinline__ void make_scalars(const Delta& a, const Piece& p, Shared& s, int chunk, int head) {
    const int lane = threadIdx.x % 32;
    const float shift = __ldg(a.vectors + DELTA_MIX_DT + head), factor = __ldg(a.vectors + DELTA_MIX_A + head);
    float decay[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = lane * 2 + i, token = chunk * CHUNK + row;
        const bool live = token >= p.lead && token < p.end;
        const float q = (s.squares[0][0][row] + s.squares[0][1][row]) + (s.squares[0][2][row] + s.squares[0][3][row]);
        const float k = (s.squares[1][0][row] + s.squares[1][1][row]) + (s.squares[1][2][row] + s.squares[1][3][row]);
        s.rq[row] = inverse_root(q + 1e-6f) * QUERY_SCALE;
        s.rk[row] = inverse_root(k + 1e-6f);
        s.beta[row] = live ? sigmoid(a.gates[(size_t)head * p.capacity * 8 + token]) : 0.0f;
        decay[i] =
            live ? factor * softplus(a.gates[(size_t)(VALUE_HEADS + head) * p.capacity * 8 + token] + shift) : 0.0f;
    }
    float total = decay[0] + decay[1];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const float other = __shfl_up_sync(~0u, total, step);
        if (lane >= step) total += other;
    }
    const float before = __shfl_up_sync(~0u, total, 1);
    const float first = (lane ? before : 0.0f) + decay[0];
    s.total[lane * 2] = first, s.total[lane * 2 + 1] = first + decay[1];
}

// The inverse of I + A in place of A, which is strictly lower triangular: blocks of 16 on the diagonal column by
// column, the rest a row of blocks after the other.
__device__ __forceinline__ void invert(Shared& s) {
    const int thread = threadIdx.x;
    if (thread < CHUNK) {
        const int block = thread / 16 * 16, column = thread % 16;
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < i; j++) sum = fmaf(s.x[(block + i) * X_ROW + block + j], x[j], sum);
            x[i] = i == column ? 1.0f : i < column ? 0.0f : -sum;
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 16; i++) s.x[(block + i) * X_ROW + block + column] = x[i];
    }
    __syncthreads();
#pragma unroll 1
    for (int block = 1; block < 4; block++) {
        // y = A X of this row of blocks, four columns a thread
        const int row = thread / 16, column = thread % 16 * 4, width = block * 16;
        float4 sum = {};
        if (column < width) {
#pragma unroll 4
            for (int k = column / 16 * 16; k < width; k += 4) {
                const float4 f = *(const float4*)&s.x[(width + row) * X_ROW + k];
                const float factor[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float4 x = *(const float4*)&s.x[(k + i) * X_ROW + column];
                    sum = {fmaf(factor[i], x.x, sum.x), fmaf(factor[i], x.y, sum.y), fmaf(factor[i], x.z, sum.z),
                           fmaf(factor[i], x.w, sum.w)};
                }
            }
            *(float4*)&s.y[row * 52 + column] = sum;
        }
        __syncthreads();
        if (column < width) {
            sum = {};
#pragma unroll
            for (int k = 0; k < 16; k++) {
                const float factor = -s.x[(width + row) * X_ROW + width + k];
                const float4 x = *(const float4*)&s.y[k * 52 + column];
                sum = {fmaf(factor, x.x, sum.x), fmaf(factor, x.y, sum.y), fmaf(factor, x.z, sum.z),
                       fmaf(factor, x.w, sum.w)};
            }
            *(float4*)&s.x[(width + row) * X_ROW + column] = sum;
        }
        __syncthreads();
    }
}

// Operands from shared memory. A [16 rows][16 k] of rows that lie along k, or (transposed) of rows that lie along the
// rows; B of two tiles of eight columns.
__device__ __forceinline__ uint4 operand_a(const u16* from, int stride) {
    const int lane = threadIdx.x % 32;
    return load_matrices(from + (lane % 16) * stride + lane / 16 * 8);
}
__device__ __forceinline__ uint4 operand_a_transposed(const u16* from) {  // [k][rows]
    const int lane = threadIdx.x % 32;
    return load_transposed(from + (lane / 16 * 8 + lane % 8) * ROW + lane / 8 % 2 * 8);
}
__device__ __forceinline__ uint4 operand_b(const u16* from) {  // [columns][k]
    const int lane = threadIdx.x % 32;
    return load_matrices(from + (lane / 16 * 8 + lane % 8) * ROW + lane / 8 % 2 * 8);
}
__device__ __forceinline__ uint4 operand_b_transposed(const u16* from) {  // [k][columns]
    const int lane = threadIdx.x % 32;
    return load_transposed(from + (lane % 16) * ROW + lane / 16 * 8);
}
__device__ __forceinline__ void multiply(float (&low)[4], float (&high)[4], uint4 a, uint4 b) {
    mma(low, a.x, a.y, a.z, a.w, b.x, b.y);
    mma(high, a.x, a.y, a.z, a.w, b.z, b.w);
}

// Sums of 16 rows and 128 columns in bf16: 16 rows by 16 columns are an operand A.
__device__ __forceinline__ void keep(uint4* to, const float (&acc)[16][4]) {
#pragma unroll
    for (int k = 0; k < 8; k++)
        to[k * 32] = {pack_bf16(acc[2 * k][0], acc[2 * k][1]), pack_bf16(acc[2 * k][2], acc[2 * k][3]),
                      pack_bf16(acc[2 * k + 1][0], acc[2 * k + 1][1]), pack_bf16(acc[2 * k + 1][2], acc[2 * k + 1][3])};
}

extern "C" __global__ void __launch_bounds__(256, 2)
    delta_prep(const __grid_constant__ Delta a, const __grid_constant__ Piece p) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& s = *(Shared*)memory;
    let_next_start();
    wait_for_previous();
    const int chunk = blockIdx.x / VALUE_HEADS, head = blockIdx.x % VALUE_HEADS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    convolve<8>(a, p, s, chunk, head, warp, 0);                     // q and k: a tile a warp
    convolve<4>(a, p, s, chunk, head, 8 + warp / 2, warp % 2 * 4);  // v: half a tile
    __syncthreads();
    if (warp == 0) make_scalars(a, p, s, chunk, head);

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
        const float total[2] = {s.total[row0], s.total[row0 + 8]};
        const float factor[2] = {half ? s.rq[row0] : s.beta[row0] * s.rk[row0],
                                 half ? s.rq[row0 + 8] : s.beta[row0 + 8] * s.rk[row0 + 8]};
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const int column = n * 8 + q * 2;
            const float2 rk = *(const float2*)&s.rk[column], before = *(const float2*)&s.total[column];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = row0 + i * 8, last = half ? row : row - 1;
                const float x =
                    column <= last ? acc[n][2 * i] * (factor[i] * rk.x) * exponential(total[i] - before.x) : 0.0f;
                const float y = column + 1 <= last
                                    ? acc[n][2 * i + 1] * (factor[i] * rk.y) * exponential(total[i] - before.y)
                                    : 0.0f;
                if (half)
                    *(u32*)&s.p[row * P_ROW + column] = pack_bf16(x, y);
                else
                    *(float2*)&s.x[row * X_ROW + column] = {x, y};
            }
        }
    }
    __syncthreads();
    invert(s);

    // U (first four warps) and W: the inverse times v and k, their factors in its columns.
    float acc[16][4] = {};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (k > m) break;
        u32 x[4];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int column = k * 16 + j * 8 + q * 2;
            float2 factor = *(const float2*)&s.beta[column];
            if (half) {
                const float2 rk = *(const float2*)&s.rk[column], total = *(const float2*)&s.total[column];
                factor.x *= rk.x * exponential(total.x), factor.y *= rk.y * exponential(total.y);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float2 v = *(const float2*)&s.x[(m * 16 + g + i * 8) * X_ROW + column];
                x[j * 2 + i] = pack_bf16(v.x * factor.x, v.y * factor.y);
            }
        }
#pragma unroll
        for (int n = 0; n < 8; n++)
            multiply(acc[2 * n], acc[2 * n + 1], {x[0], x[1], x[2], x[3]},
                     operand_b_transposed((half ? s.k : s.v) + k * 16 * ROW + n * 16));
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 16; n++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            *(u32*)((half ? s.w : s.v) + (m * 16 + g + i * 8) * ROW + n * 8 + q * 2) =
                pack_bf16(acc[n][2 * i], acc[n][2 * i + 1]);
    const float last = s.total[CHUNK - 1];
    for (int i = threadIdx.x; i < CHUNK * STATE_DIM / 2; i += 256) {
        const int row = i / (STATE_DIM / 2);
        u32* at = (u32*)(s.k + row * ROW) + i % (STATE_DIM / 2);
        const float left = s.rk[row] * exponential(last - s.total[row]);
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
        for (int i = 0; i < 2; i++) factor[i] = s.rq[m * 16 + g + i * 8] * exponential(s.total[m * 16 + g + i * 8]);
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
