// All of the DeltaNet where a piece has one chunk: what delta_prep, delta_scan and delta_output do, to the bit, in one
// launch (see delta.cuh).
//
// Few heads of one chunk leave most of the chip idle, and every step waits for the one before. So four CTAs of a
// cluster share a head (of eight not all would find room at once). Each convolves two octets of tokens of k and v and
// gives them to all; what is small (k.k and the triangular inverse, U and W) each then does for itself. CTA c has rows
// 32 c of N, B and the state, and tokens 16 c of the output; a warp has 16 columns of U, W, N, B, the state and the
// output. The state is read before the launch before has ended: none but this kernel of an earlier piece has written
// it.
//
// Layout: k, v and 16 rows of q in bf16 [64][136]; W takes k's place, U v's. The state in bf16 as operand B of two
// tiles of columns. Grid: four CTAs of 256 threads a value head. Bytes: 64 KB of state and 20 KB of projections read a
// CTA, 16 KB of state and 4 KB of y written.
#include "common/cluster.cuh"
#include "prefill/delta_chunk.cuh"

constexpr int CTAS = 4;
constexpr int TILES = 10;  // of 16 x 16 in a lower triangle of 64: (row, column) is tile row (row + 1) / 2 + column

struct Shared {
    u16 k[CHUNK * ROW], v[CHUNK * ROW], q[16 * ROW], p[16 * P_ROW];
    Scalars scalars;
    uint4 states[SLICES][8][32];
    float kept[16][256];   // this CTA's rows in f32, each thread's own
    uint4 keys[4][2][32];  // K~^T of this CTA's rows, as operand A
    union {
        float x[CHUNK * X_ROW];  // A, then (I + A)^-1; then
        struct {
            uint4 n[2][8][32], q[8][32];  // tiles of 16 columns of N and Q^, as operand A
        } after;
    };
    union {
        float y[32 * Y_ROW];
        uint4 inverse[2][TILES][32];  // its tiles as operand A, scaled for U and for W; then
        float sums[16][16][8];        // the output, a tile of eight columns each
    };
};

// A tile of the lower triangle by its number; row 4: of q.
struct Place {
    int row, column;
    __device__ __forceinline__ explicit Place(int number)
        : row(number >= TILES ? 4
              : number >= 6   ? 3
              : number >= 3   ? 2
              : number >= 1   ? 1
                              : 0),
          column(number - row * (row + 1) / 2) {}
};

// Columns of a warp, all rows, in the place of what they were made from.
__device__ __forceinline__ void put_columns(u16* to, const float (&acc)[4][2][4]) {
    const int lane = threadIdx.x % 32;
    u16* mine = to + lane / 4 * ROW + threadIdx.x / 32 * 16 + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                *(u32*)(mine + (m * 16 + i * 8) * ROW + j * 8) = pack_bf16(acc[m][j][2 * i], acc[m][j][2 * i + 1]);
}

extern "C" __global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(256, 2)
    delta_short(const __grid_constant__ Delta a, const __grid_constant__ Piece p) {
    extern __shared__ __align__(128) u8 memory[];
    Shared& s = *(Shared*)memory;
    Scalars& scalars = s.scalars;
    let_next_start();
    const int head = blockIdx.x / CTAS, m = cta_rank();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;

    // The state: in bf16 all of it, a slice of columns a warp; this CTA's rows in f32.
    float* state = a.state + (size_t)head * STATE_DIM * STATE_DIM + warp * SLICE * STATE_DIM;
#pragma unroll 4
    for (int k = 0; k < 8; k++) {
        u32 pair[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 v = *(const float2*)(state + (i / 2 * 8 + g) * STATE_DIM + k * 16 + i % 2 * 8 + q * 2);
            pair[i] = pack_bf16(v.x, v.y);
        }
        s.states[warp][k][lane] = {pair[0], pair[1], pair[2], pair[3]};
    }
    float* mine = state + m * 32;
#pragma unroll 8
    for (int i = 0; i < 16; i++)  // [row tile][octet of columns][4]
        s.kept[i][threadIdx.x] = mine[(i / 4 % 2 * 8 + q * 2 + i % 2) * STATE_DIM + i / 8 * 16 + g + i / 2 % 2 * 8];
    // Other weights come from far away too.
    const int key_head = head % KEY_HEADS;
    if (warp == 0 && lane < 2) prefetch(a.vectors + (lane ? DELTA_MIX_DT : DELTA_MIX_A) + head);
    if (warp == 1 && lane < 4) prefetch(a.vectors + DELTA_MIX_NORM + lane * 32);
    Convolution<2> of_keys_or_values(a, head, 4 + warp, m * 2);
    Convolution<1> of_queries(a, head, warp % 4, m * 2 + warp / 4);
    sync_cluster();  // all of them are there, and have read the state
    wait_for_previous();

    // Two octets of k (first four warps) and v for everybody; two of q.
    of_keys_or_values.load(a, p, 0);
    of_queries.load(a, p, 0);
    Gates gates = {};
    if (warp == 0) gates.load(a, p, 0, head);
    // z of this warp's columns; the last inputs of the convolution: q and k (the first CTA) and v (the second), a
    // channel a thread.
    const size_t tile_pieces = (size_t)p.capacity * 32;
    uint2 z[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const size_t piece = (CONV_CHANNELS / 32 + head * DELTA_TILES + warp / 2) * tile_pieces + (m * 2 + i) * 32;
        z[i] = *(const uint2*)(a.raw + (piece + q * 8 + g) * 16 + warp % 2 * 8);
    }
    const bool keeps = m == 0 || (m == 1 && threadIdx.x < STATE_DIM);
    const int channels = m == 1 ? 2 * KEY_HEADS + head : threadIdx.x < STATE_DIM ? key_head : KEY_HEADS + key_head;
    const int channel = channels * STATE_DIM + (int)threadIdx.x % STATE_DIM;
    u16 inputs[HISTORY];
#pragma unroll
    for (int i = 0; i < HISTORY; i++) {
        const int token = p.end - 1 - i;
        if (!keeps || token < p.lead) continue;
        const size_t piece = ((size_t)p.capacity * (channel / 32) + token / 8) * 32 + channel % 8 / 2 * 8 + token % 8;
        inputs[i] = ((const u16*)a.raw)[piece * 8 + channel % 32 / 8 * 2 + channel % 2];
    }
    of_keys_or_values.run(p, 0, [&](int row, const u32(&pair)[4], float square) {
        const uint4 eight = pairs_of_octet(pair);
        const u32 to = shared_address((warp < 4 ? s.k : s.v) + row * ROW + warp % 4 * 32 + lane / 8 * 8);
#pragma unroll
        for (int c = 0; c < CTAS; c++) store16_in(c, to, eight);
        if (warp < 4) store_in(lane / 8, shared_address(&scalars.squares[1][warp][row]), square);
    });
    of_queries.run(p, 0, [&](int row, const u32(&pair)[4], float square) {
        *(uint4*)(s.q + (row - m * 16) * ROW + warp % 4 * 32 + lane / 8 * 8) = pairs_of_octet(pair);
        if (lane < 8) scalars.squares[0][warp % 4][row] = square;
    });
    sync_cluster();

    // Scalars (the first warp), and of k.k and q.k tiles up to the diagonal, at most two a warp: first their sums.
    if (warp == 0) {
#pragma unroll
        for (int i = 0; i < 4; i++) {  // above the diagonal of blocks of 32
            float* zeros = s.x + (i / 2 * 32 + lane / 2) * X_ROW + i / 2 * 32 + 16;
            *(float4*)(zeros + lane % 2 * 8 + i % 2 * 4) = {0.0f, 0.0f, 0.0f, 0.0f};
        }
        make_scalars(a, p, scalars, gates, 0, head, m * 16, 16);
    }
    const int tiles = TILES + 1 + m, first_tile = warp == 0 ? tiles : warp - 1;
    float products[2][2][4] = {};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const Place place(first_tile + i * 7);
        if (first_tile + i * 7 >= tiles) break;
        const u16* rows = place.row == 4 ? s.q : s.k + place.row * 16 * ROW;
        const u16* columns = s.k + place.column * 16 * ROW;
#pragma unroll 4
        for (int k = 0; k < STATE_DIM; k += 16)
            multiply(products[i][0], products[i][1], operand_a(rows + k, ROW), operand_b(columns + k));
    }
    __syncthreads();
#pragma unroll 1
    for (int tile = first_tile; tile < tiles; tile += 7) {
        const Place place(tile);
        const bool of_q = place.row == 4;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int inside = g + r * 8, token = (of_q ? m : place.row) * 16 + inside;
            const int last = of_q ? token : token - 1;
            const float total = scalars.total[token],
                        factor = of_q ? scalars.rq[token] : scalars.beta[token] * scalars.rk[token];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int at = place.column * 16 + j * 8 + q * 2;
                const float2 rk = *(const float2*)&scalars.rk[at], before = *(const float2*)&scalars.total[at];
                const float* sum = &products[0][j][2 * r];
                const float x = at <= last ? decayed(sum[0], factor, rk.x, total, before.x) : 0.0f;
                const float y = at + 1 <= last ? decayed(sum[1], factor, rk.y, total, before.y) : 0.0f;
                if (of_q)
                    *(u32*)&s.p[inside * P_ROW + at] = pack_bf16(x, y);
                else
                    *(float2*)&s.x[token * X_ROW + at] = {x, y};
            }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) products[0][i / 4][i % 4] = products[1][i / 4][i % 4];
    }
    __syncthreads();
    invert(s.x, s.y);

    // The inverse as operands; K~^T of this CTA's rows, a tile a warp.
#pragma unroll 1
    for (int i = warp; i < 2 * TILES; i += 8) {
        const Place place(i % TILES);
        s.inverse[i / TILES][i % TILES][lane] = scaled_inverse(s.x, scalars, place.row, place.column, i / TILES);
    }
    {
        const int k = warp / 2, token = k * 16 + q * 2;
        const uint4 v = operand_a_transposed(s.k + k * 16 * ROW + m * 32 + warp % 2 * 16);
        const float2 low = *(const float2*)&scalars.left[token], high = *(const float2*)&scalars.left[token + 8];
        s.keys[k][warp % 2][lane] = {pack_bf16(bf16_low(v.x) * low.x, bf16_high(v.x) * low.y),
                                     pack_bf16(bf16_low(v.y) * low.x, bf16_high(v.y) * low.y),
                                     pack_bf16(bf16_low(v.z) * high.x, bf16_high(v.z) * high.y),
                                     pack_bf16(bf16_low(v.w) * high.x, bf16_high(v.w) * high.y)};
    }
    __syncthreads();

    // U and W.
    {
        float u[4][2][4] = {}, w[4][2][4] = {};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint4 of_v = operand_b_transposed(s.v + k * 16 * ROW + warp * 16),
                        of_k = operand_b_transposed(s.k + k * 16 * ROW + warp * 16);
#pragma unroll
            for (int rows = k; rows < 4; rows++) {
                const int number = rows * (rows + 1) / 2 + k;
                multiply(u[rows][0], u[rows][1], s.inverse[0][number][lane], of_v);
                multiply(w[rows][0], w[rows][1], s.inverse[1][number][lane], of_k);
            }
        }
        __syncwarp();
        put_columns(s.v, u);
        put_columns(s.k, w);
        __syncwarp();
    }
    // N, B, Q^ and O0 of this warp's columns.
    float added[2][2][4] = {}, out[2][4] = {};
    {
        float n[2][2][4] = {}, query[2][4] = {};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint4 w = operand_b_transposed(s.k + k * 16 * ROW + warp * 16),
                        u = operand_b_transposed(s.v + k * 16 * ROW + warp * 16);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const uint4 keys = s.keys[k][r][lane];
                multiply(n[r][0], n[r][1], keys, w);
                multiply(added[r][0], added[r][1], keys, u);
            }
            if (k > m) continue;
            const uint4 rows = operand_a(s.p + k * 16, P_ROW);
            multiply(query[0], query[1], rows, w);
            multiply(out[0], out[1], rows, u);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) s.after.n[r][warp][lane] = as_operand(n[r][0], n[r][1]);
        u32 x[4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float factor = query_factor(scalars, m * 16 + g + i * 8);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const u32 pair = *(const u32*)(s.q + (g + i * 8) * ROW + warp * 16 + j * 8 + q * 2);
                const float* sum = &query[j][2 * i];
                x[j * 2 + i] = pack_bf16(fmaf(factor, bf16_low(pair), -sum[0]), fmaf(factor, bf16_high(pair), -sum[1]));
            }
        }
        s.after.q[warp][lane] = {x[0], x[1], x[2], x[3]};
    }
#pragma unroll
    for (int i = 0; i < 8; i += 2) {  // O0 in bf16
        float* pair = &out[i / 4][i % 4];
        const u32 rounded = pack_bf16(pair[0], pair[1]);
        pair[0] = bf16_low(rounded), pair[1] = bf16_high(rounded);
    }
    __syncthreads();

    // O = Q^ S + O0, and N S of two tiles of rows.
    float product[2][4][4] = {};
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const uint4 x = s.after.q[k][lane], old = s.states[warp][k][lane];
        multiply(out[0], out[1], x, old);
#pragma unroll
        for (int r = 0; r < 2; r++)
            multiply(product[r][k % 2 * 2], product[r][k % 2 * 2 + 1], s.after.n[r][k][lane], old);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        *(float2*)&s.sums[warp * 2 + i / 2][g + i % 2 * 8][q * 2] = {out[i / 2][i % 2 * 2], out[i / 2][i % 2 * 2 + 1]};
    __syncthreads();

    // The output, normed and gated; squares are summed in the order of delta_output.
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float square[2] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const float2 v = *(const float2*)&s.sums[half * 8 + n][g + i * 8][q * 2];
                square[half] = fmaf(v.y, v.y, fmaf(v.x, v.x, square[half]));
            }
            square[half] += __shfl_xor_sync(~0u, square[half], 1);
            square[half] += __shfl_xor_sync(~0u, square[half], 2);
        }
        const float scale = inverse_root((square[0] + square[1]) / STATE_DIM + EPS);
        const int octet = m * 2 + i;
        if (octet * 8 >= p.end) continue;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float2 weight = __ldg((const float2*)(a.vectors + DELTA_MIX_NORM + warp * 16 + j * 8 + q * 2));
            const u32 gate = j ? z[i].y : z[i].x;
            const OperandPlace place(head * STATE_DIM + warp * 16 + j * 8, chunks_of(VALUE_DIM));
            ((u32*)a.y)[(place.tile * tile_pieces + octet * 32 + q * 8 + g) * 4 + place.word] =
                pack_bf16(out[j][2 * i] * scale * weight.x * silu(bf16_low(gate)),
                          out[j][2 * i + 1] * scale * weight.y * silu(bf16_high(gate)));
        }
    }

    // S' = e^(G_last) S + B - N S; B in bf16.
    const float fade = exponential(scalars.total[CHUNK - 1]);
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        const int r = i / 8, j = i / 4 % 2, c = i % 4;
        const u32 b = pack_bf16(added[r][j][c], added[r][j][c + 1]);
        float* to = mine + (j * 8 + q * 2) * STATE_DIM + r * 16 + g + c / 2 * 8;
        to[0] = fmaf(fade, s.kept[i][threadIdx.x], bf16_low(b) - (product[r][j][c] + product[r][j + 2][c]));
        to[STATE_DIM] =
            fmaf(fade, s.kept[i + 1][threadIdx.x], bf16_high(b) - (product[r][j][c + 1] + product[r][j + 2][c + 1]));
    }

    // Heads that have the same q and k share their history: who comes last writes it, when all have read it.
    if (m == 0 && VALUE_HEADS > KEY_HEADS) {
        __shared__ bool last;
        if (threadIdx.x == 0) {
            __threadfence();
            last = atomicAdd(a.arrived + key_head, 1u) == VALUE_HEADS / KEY_HEADS - 1;
            if (last) a.arrived[key_head] = 0;
        }
        __syncthreads();
        if (!last) return;
    }
    if (!keeps) return;
#pragma unroll
    for (int i = 0; i < HISTORY; i++)
        if (p.end - 1 - i >= p.lead)
            a.history[(size_t)((p.base + p.end - 1 - i) & (HISTORY - 1)) * CONV_CHANNELS + channel] =
                __uint_as_float((u32)inputs[i] << 16);
}
