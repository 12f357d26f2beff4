// What is done with a chunk that does not depend on the state: see delta.cuh. Shared by the kernel of many chunks
// (delta_prep.cu) and that of one (delta_short.cu), whose bits are the same.
#pragma once
#include "prefill/delta.cuh"

constexpr int ROW = 136, X_ROW = 72, P_ROW = 72, Y_ROW = 36;  // elements between rows: no bank conflicts

// Of every token: of q and k squares (a tile of 32 channels each) and the factors of their norms, beta, G, and what is
// left of it at the end of the chunk.
struct Scalars {
    float squares[2][4][CHUNK];
    float rq[CHUNK], rk[CHUNK], beta[CHUNK], total[CHUNK];
    float left[CHUNK];  // of rows of K~
};

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
// Weights, which need not be waited for, inputs, and the work.
template <int COUNT>
struct Convolution {
    int tile, first;
    float taps[4][8];      // oldest first
    uint4 raw[COUNT + 1];  // and of the octet before

    __device__ __forceinline__ Convolution(const Delta& a, int head, int part, int first) : first(first) {
        const int o = threadIdx.x % 32 / 8, which = part / 4;
        const int from_head = which == 2 ? 2 * KEY_HEADS + head : which * KEY_HEADS + head % KEY_HEADS;
        tile = from_head * DELTA_TILES + part % 4;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int channel = tile * 32 + 2 * o + i / 2 * 8 + i % 2;
            const float4 w = __ldg((const float4*)(a.vectors + DELTA_MIX_CONV) + channel);
            taps[0][i] = w.x, taps[1][i] = w.y, taps[2][i] = w.z, taps[3][i] = w.w;
        }
    }
    __device__ __forceinline__ void load(const Delta& a, const Piece& p, int chunk) {
        const int lane = threadIdx.x % 32, t = lane % 8;
#pragma unroll
        for (int i = 0; i <= COUNT; i++) {
            raw[i] = {};
            if (i > 0 || t >= 5) raw[i] = raw_piece(a, p, tile, chunk * CHUNK + (first + i - 1) * 8 + t, lane / 8);
        }
    }
    // `keep` gets a token's row, the four pairs and (of all 32 channels, in every lane) the sum of their squares.
    template <class Keep>
    __device__ __forceinline__ void run(const Piece& p, int chunk, const Keep& keep) const {
        const int lane = threadIdx.x % 32, t = lane % 8;
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
                for (int i = 0; i < 8; i++)
                    sum[i] = age == 3 ? taps[0][i] * x[i] : fmaf(taps[3 - age][i], x[i], sum[i]);
            }
            float square = 0.0f;
            u32 pair[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                pair[i] = live ? pack_bf16(silu(sum[2 * i]), silu(sum[2 * i + 1])) : 0;
                square =
                    fmaf(bf16_low(pair[i]), bf16_low(pair[i]), fmaf(bf16_high(pair[i]), bf16_high(pair[i]), square));
            }
            square += __shfl_xor_sync(~0u, square, 8);
            square += __shfl_xor_sync(~0u, square, 16);
            keep(row, pair, square);
        }
    }
};

// What a lane of the warp that makes scalars reads of its two tokens.
struct Gates {
    float2 beta, alpha;
    __device__ __forceinline__ void load(const Delta& a, const Piece& p, int chunk, int head) {
        const float* from = a.gates + chunk * CHUNK + threadIdx.x % 32 * 2;
        beta = *(const float2*)(from + (size_t)head * p.capacity * 8);
        alpha = *(const float2*)(from + (size_t)(VALUE_HEADS + head) * p.capacity * 8);
    }
};
// One warp: norms' factors (of q: rows [first, first + count)), beta, and the running sum of the log decays; a lane has
// two tokens.
__device__ __forceinline__ void make_scalars(const Delta& a, const Piece& p, Scalars& s, const Gates& gates, int chunk,
                                             int head, int first, int count) {
    const int lane = threadIdx.x % 32;
    const float shift = __ldg(a.vectors + DELTA_MIX_DT + head), factor = __ldg(a.vectors + DELTA_MIX_A + head);
    float decay[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = lane * 2 + i, token = chunk * CHUNK + row;
        const bool live = token >= p.lead && token < p.end;
        const float q = (s.squares[0][0][row] + s.squares[0][1][row]) + (s.squares[0][2][row] + s.squares[0][3][row]);
        const float k = (s.squares[1][0][row] + s.squares[1][1][row]) + (s.squares[1][2][row] + s.squares[1][3][row]);
        if (row >= first && row < first + count) s.rq[row] = inverse_root(q + 1e-6f) * QUERY_SCALE;
        s.rk[row] = inverse_root(k + 1e-6f);
        s.beta[row] = live ? sigmoid(i ? gates.beta.y : gates.beta.x) : 0.0f;
        decay[i] = live ? factor * softplus((i ? gates.alpha.y : gates.alpha.x) + shift) : 0.0f;
    }
    float total = decay[0] + decay[1];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const float other = __shfl_up_sync(~0u, total, step);
        if (lane >= step) total += other;
    }
    const float before = __shfl_up_sync(~0u, total, 1);
    const float early = (lane ? before : 0.0f) + decay[0];
    const float late = early + decay[1], last = __shfl_sync(~0u, late, 31);
    *(float2*)&s.total[lane * 2] = {early, late};
    const float2 rk = *(const float2*)&s.rk[lane * 2];
    *(float2*)&s.left[lane * 2] = {rk.x * exponential(last - early), rk.y * exponential(last - late)};
}

// What a sum of q.k or k.k weighs: the factors of its row and column, and the decay between them.
__device__ __forceinline__ float decayed(float sum, float row, float column, float total, float before) {
    return sum * (row * column) * exponential(total - before);
}

// Of a row of e^G Q.
__device__ __forceinline__ float query_factor(const Scalars& s, int row) {
    return s.rq[row] * exponential(s.total[row]);
}

// The inverse of I + A in place of A (x), which is strictly lower triangular, by 256 threads: blocks of 16 on the
// diagonal column by column in f32, then those of 32 and of 64: the lower left block is -X22 A21 X11. For those each
// value is two in bf16, the second what the first leaves: three products of four, right to 2^-16.
struct Split {
    u32 high, low;
    __device__ __forceinline__ Split(float x, float y) : high(pack_bf16(x, y)) {
        low = pack_bf16(x - bf16_low(high), y - bf16_high(high));
    }
};
// A warp: 16 rows and 8 columns of left (rows) times right ([k][columns]).
template <int SIZE>
__device__ __forceinline__ void multiply_blocks(float* to, int to_row, const float* left, const float* right,
                                                int right_row, float sign) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    float acc[4] = {};
#pragma unroll
    for (int k = 0; k < SIZE; k += 16) {
        const auto rows = [&](int i) {
            const float2 v = *(const float2*)&left[(g + i % 2 * 8) * X_ROW + k + i / 2 * 8 + q * 2];
            return Split(v.x, v.y);
        };
        const auto columns = [&](int i) {
            const float* v = &right[(k + i * 8 + q * 2) * right_row + g];
            return Split(v[0], v[right_row]);
        };
        const Split a0 = rows(0), a1 = rows(1), a2 = rows(2), a3 = rows(3), b0 = columns(0), b1 = columns(1);
        mma(acc, a0.high, a1.high, a2.high, a3.high, b0.high, b1.high);
        mma(acc, a0.high, a1.high, a2.high, a3.high, b0.low, b1.low);
        mma(acc, a0.low, a1.low, a2.low, a3.low, b0.high, b1.high);
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
        *(float2*)&to[(g + i * 8) * to_row + q * 2] = {sign * acc[2 * i], sign * acc[2 * i + 1]};
}
__device__ __forceinline__ void invert(float* x, float* y) {
    const int thread = threadIdx.x;
    if (thread < CHUNK) {
        const int column = thread % 16;
        float* block = x + thread / 16 * 16 * (X_ROW + 1);
        float own[16];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < i; j += 4) {
                const float4 f = *(const float4*)&block[i * X_ROW + j];
                sum = fmaf(f.x, own[j], sum);
                if (j + 1 < i) sum = fmaf(f.y, own[j + 1], sum);
                if (j + 2 < i) sum = fmaf(f.z, own[j + 2], sum);
                if (j + 3 < i) sum = fmaf(f.w, own[j + 3], sum);
            }
            own[i] = i == column ? 1.0f : i < column ? 0.0f : -sum;
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 16; i++) block[i * X_ROW + column] = own[i];
    }
    __syncthreads();
    const int warp = thread / 32;
    {
        float* low = x + warp / 2 * 32 * (X_ROW + 1);  // of a block of 32; the first four warps, eight columns each
        float *a21 = low + 16 * X_ROW, *product = y + warp / 2 * 16 * Y_ROW;
        const int column = warp % 2 * 8;
        if (warp < 4) multiply_blocks<16>(product + column, Y_ROW, a21, low + column, X_ROW, 1.0f);
        __syncthreads();
        if (warp < 4) multiply_blocks<16>(a21 + column, X_ROW, a21 + 16, product + column, Y_ROW, -1.0f);
    }
    __syncthreads();
    {
        const int row = warp / 4 * 16, column = warp % 4 * 8;
        float* a21 = x + 32 * X_ROW;
        multiply_blocks<32>(y + row * Y_ROW + column, Y_ROW, a21 + row * X_ROW, x + column, X_ROW, 1.0f);
        __syncthreads();
        multiply_blocks<32>(a21 + row * X_ROW + column, X_ROW, a21 + row * X_ROW + 32, y + column, Y_ROW, -1.0f);
    }
    __syncthreads();
}

// 16 rows and 16 columns of the inverse as operand A, columns times beta, and (of W) times the factors of k.
__device__ __forceinline__ uint4 scaled_inverse(const float* x, const Scalars& s, int row_tile, int column_tile,
                                                bool of_w) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    u32 out[4];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const int column = column_tile * 16 + j * 8 + q * 2;
        float2 factor = *(const float2*)&s.beta[column];
        if (of_w) {
            const float2 rk = *(const float2*)&s.rk[column], total = *(const float2*)&s.total[column];
            factor.x *= rk.x * exponential(total.x), factor.y *= rk.y * exponential(total.y);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float2 v = *(const float2*)&x[(row_tile * 16 + g + i * 8) * X_ROW + column];
            out[j * 2 + i] = pack_bf16(v.x * factor.x, v.y * factor.y);
        }
    }
    return {out[0], out[1], out[2], out[3]};
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

// Sums of 16 rows and 16 columns in bf16, as operand A.
__device__ __forceinline__ uint4 as_operand(const float (&low)[4], const float (&high)[4]) {
    return {pack_bf16(low[0], low[1]), pack_bf16(low[2], low[3]), pack_bf16(high[0], high[1]),
            pack_bf16(high[2], high[3])};
}
