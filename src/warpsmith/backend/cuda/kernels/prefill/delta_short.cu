// All of the DeltaNet where a piece has one chunk: what delta_prep, delta_scan and delta_output do, to the bit, in one
// launch (see delta.cuh).
//
// Few heads of one chunk leave most of the chip idle, and every step waits for the one before. So eight CTAs of a
// cluster share a head. Each convolves an octet of tokens of k and v and gives it to all; what is small (k.k and the
// triangular inverse, U and W) each then does for itself. CTA c has rows 16 c of N, B and the state, and of the output
// 16 tokens (c % 4) and 64 columns (c / 4). Of U, W, N and B a warp has 16 columns, which nobody else writes. The state
// is read before the launch before has ended: none but this kernel of an earlier piece has written it.
//
// Layout: k, v and 16 rows of q in bf16 [64][136]; W takes k's place, U v's. The state in bf16 as operand B of two
// tiles of columns. Grid: eight CTAs of 256 threads a value head. Bytes: 64 KB of state and 10 KB of projections read a
// CTA, 8 KB of state and 2 KB of y written.
#include "common/cluster.cuh"
#include "prefill/delta_chunk.cuh"

constexpr int CTAS = 8;
constexpr int TILES = 10;  // of 16 x 16 in a lower triangle of 64: (row, column) is tile row (row + 1) / 2 + column

struct Shared {
    u16 k[CHUNK * ROW], v[CHUNK * ROW], q[16 * ROW], p[16 * P_ROW];
    Scalars scalars;
    float out_squares[2][16];  // of either half of the columns; the other CTA may be ahead of this one
    uint4 states[SLICES][8][32];
    float kept[8][256];  // this CTA's rows in f32, each thread's own
    union {
        float x[CHUNK * X_ROW];  // A, then (I + A)^-1; then
        struct {
            uint4 n[8][32], q[8][32];  // tiles of 16 columns of N and Q^, as operand A
            float sums[8][16][8];      // of the output, a tile of eight columns a warp
        } after;
    };
    union {
        float y[32 * Y_ROW];
        uint4 inverse[2][TILES][32];  // its tiles as operand A, scaled for U and for W
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
    delta_short(const __grid_constant__ Delta a, const __grid_constant__ Piece given) {
    extern __shared__ __align__(128) u8 memory[];
    Shared& s = *(Shared*)memory;
    Scalars& scalars = s.scalars;
    let_next_start();
    const int head = blockIdx.x / CTAS, cta = cta_rank(), m = cta % 4, half = cta / 4;
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
    float* mine = state + cta * 16;
#pragma unroll
    for (int i = 0; i < 8; i++)
        s.kept[i][threadIdx.x] = mine[(i / 4 * 8 + q * 2 + i % 2) * STATE_DIM + g + i / 2 % 2 * 8];
    // Weights come from far away: into L2, the last ones into registers.
    const int key_head = head % KEY_HEADS;
    if (lane < 8) {
        const int from = lane < 4 ? (warp < 4 ? KEY_HEADS + key_head : 2 * KEY_HEADS + head) : key_head;
        prefetch(a.vectors + DELTA_MIX_CONV + (from * STATE_DIM + warp % 4 * 32 + lane % 4 * 8) * 4);
    } else if (lane < 10 && warp == 0) {
        prefetch(a.vectors + (lane == 8 ? DELTA_MIX_DT : DELTA_MIX_A) + head);
    }
    const float2 weight = __ldg((const float2*)(a.vectors + DELTA_MIX_NORM + half * 64 + warp * 8 + q * 2));
    sync_cluster();  // all of them are there, and have read the state
    // Instructions come from far away too, and each is run once: so at first all of it is gone through with a chunk
    // without tokens, while the launch before still works.
    Piece p = given;
    p.lead = p.end = CHUNK;
#pragma unroll 1
    for (bool real = false;; real = true) {
        if (real) {
            wait_for_previous();
            p = given;
        }
        // An octet of k (first four warps) or v for everybody, then one of q.
#pragma unroll 1
        for (int part = 4 + warp, octet = cta; part >= 0; part = part >= 4 ? warp % 4 : -1, octet = m * 2 + warp / 4)
            convolve<1>(a, p, 0, head, part, octet, [&](int row, const u32(&pair)[4], float square) {
                const uint4 eight = pairs_of_octet(pair);
                if (part < 4) {
                    *(uint4*)(s.q + (row - m * 16) * ROW + part * 32 + lane / 8 * 8) = eight;
                    if (lane < 8) scalars.squares[0][part][row] = square;
                    return;
                }
                const u32 to = shared_address((part < 8 ? s.k : s.v) + row * ROW + part % 4 * 32 + lane / 8 * 8);
#pragma unroll
                for (int c = 0; c < CTAS; c++) store16_in(c, to, eight);
                if (part >= 8) return;
                const u32 place = shared_address(&scalars.squares[1][part % 4][row]);
#pragma unroll
                for (int i = 0; i < 2; i++) store_in(lane / 8 * 2 + i, place, square);
            });
        // z of this warp's columns; the last inputs of the convolution.
        const size_t tile_pieces = (size_t)p.capacity * 32;
        const int pair_of_tiles = head * (DELTA_TILES / 2) + half;
        u32 z[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const size_t piece = (CONV_CHANNELS / 32 + pair_of_tiles * 2 + warp / 4) * tile_pieces + (m * 2 + i) * 32;
            z[i] = real ? ((const u32*)a.raw)[(piece + q * 8 + g) * 4 + warp % 4] : 0;
        }
        // q and k (the first CTA) and v (the second), a channel a thread.
        const bool keeps = cta == 0 || (cta == 1 && threadIdx.x < STATE_DIM);
        const int channel = (cta == 1                  ? 2 * KEY_HEADS + head
                             : threadIdx.x < STATE_DIM ? key_head
                                                       : KEY_HEADS + key_head) *
                                STATE_DIM +
                            (int)threadIdx.x % STATE_DIM;
        u16 inputs[HISTORY];
#pragma unroll
        for (int i = 0; i < HISTORY; i++) {
            const int token = p.end - 1 - i;
            if (!real || !keeps || token < p.lead) continue;
            const size_t piece =
                ((size_t)p.capacity * (channel / 32) + token / 8) * 32 + channel % 8 / 2 * 8 + token % 8;
            inputs[i] = ((const u16*)a.raw)[piece * 8 + channel % 32 / 8 * 2 + channel % 2];
        }
        sync_cluster();

        // Scalars (the first warp), and of k.k and q.k tiles up to the diagonal, at most two a warp: at first their
        // sums.
        if (warp == 0) {
#pragma unroll
            for (int i = 0; i < 4; i++) {  // above the diagonal of blocks of 32
                float* zeros = s.x + (i / 2 * 32 + lane / 2) * X_ROW + i / 2 * 32 + 16;
                *(float4*)(zeros + lane % 2 * 8 + i % 2 * 4) = {0.0f, 0.0f, 0.0f, 0.0f};
            }
            make_scalars(a, p, scalars, 0, head, m * 16, 16);
        }
        const int tiles = TILES + 1 + m, first_tile = warp == 0 ? tiles : warp - 1;
        float products[2][2][4] = {};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const Place place(first_tile + i * 7);
            if (first_tile + i * 7 >= tiles) break;
            const u16 *rows = place.row == 4 ? s.q : s.k + place.row * 16 * ROW,
                      *columns = s.k + place.column * 16 * ROW;
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
                const int inside = g + r * 8, token = (of_q ? m : place.row) * 16 + inside,
                          last = of_q ? token : token - 1;
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

        // The inverse as operands; K~^T of this CTA's rows.
#pragma unroll 1
        for (int i = warp; i < 2 * TILES; i += 8) {
            const Place place(i % TILES);
            s.inverse[i / TILES][i % TILES][lane] = scaled_inverse(s.x, scalars, place.row, place.column, i / TILES);
        }
        uint4 keys[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint4 v = operand_a_transposed(s.k + k * 16 * ROW + cta * 16);
            const int token = k * 16 + q * 2;
            const float2 low = *(const float2*)&scalars.left[token], high = *(const float2*)&scalars.left[token + 8];
            const float left[4] = {low.x, low.y, high.x, high.y};
            keys[k] = {pack_bf16(bf16_low(v.x) * left[0], bf16_high(v.x) * left[1]),
                       pack_bf16(bf16_low(v.y) * left[0], bf16_high(v.y) * left[1]),
                       pack_bf16(bf16_low(v.z) * left[2], bf16_high(v.z) * left[3]),
                       pack_bf16(bf16_low(v.w) * left[2], bf16_high(v.w) * left[3])};
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
        // N, B and Q^ of this warp's columns.
        float added[2][4] = {};
        {
            float n[2][4] = {}, query[2][4] = {};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const uint4 w = operand_b_transposed(s.k + k * 16 * ROW + warp * 16);
                multiply(n[0], n[1], keys[k], w);
                multiply(added[0], added[1], keys[k], operand_b_transposed(s.v + k * 16 * ROW + warp * 16));
                if (k <= m) multiply(query[0], query[1], operand_a(s.p + k * 16, P_ROW), w);
            }
            s.after.n[warp][lane] = as_operand(n[0], n[1]);
            u32 x[4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float factor = query_factor(scalars, m * 16 + g + i * 8);
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const u32 pair = *(const u32*)(s.q + (g + i * 8) * ROW + warp * 16 + j * 8 + q * 2);
                    const float* sum = &query[j][2 * i];
                    x[j * 2 + i] =
                        pack_bf16(fmaf(factor, bf16_low(pair), -sum[0]), fmaf(factor, bf16_high(pair), -sum[1]));
                }
            }
            s.after.q[warp][lane] = {x[0], x[1], x[2], x[3]};
        }
        __syncthreads();

        // The output's eight columns of this warp: O0 in bf16, and Q^ S on it.
        const int slice = half * 4 + warp / 2;
        const bool upper = warp % 2;
        float out[4] = {};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (k > m) break;
            const uint4 rows = operand_a(s.p + k * 16, P_ROW),
                        u = operand_b_transposed(s.v + k * 16 * ROW + slice * 16);
            mma(out, rows.x, rows.y, rows.z, rows.w, upper ? u.z : u.x, upper ? u.w : u.y);
        }
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const u32 pair = pack_bf16(out[i], out[i + 1]);
            out[i] = bf16_low(pair), out[i + 1] = bf16_high(pair);
        }
        float product[4][4] = {};
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const uint4 x = s.after.q[k][lane], y = s.states[slice][k][lane];
            mma(out, x.x, x.y, x.z, x.w, upper ? y.z : y.x, upper ? y.w : y.y);
            const uint4 n = s.after.n[k][lane], old = s.states[warp][k][lane];
            mma(product[k % 2 * 2], n.x, n.y, n.z, n.w, old.x, old.y);
            mma(product[k % 2 * 2 + 1], n.x, n.y, n.z, n.w, old.z, old.w);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) *(float2*)&s.after.sums[warp][g + i * 8][q * 2] = {out[2 * i], out[2 * i + 1]};
        // Q^ is there for all, and so is this: the order in which delta_output sums squares.
        __syncthreads();
        float square[2] = {};
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const float2 v = *(const float2*)&s.after.sums[n][g + i * 8][q * 2];
                square[i] = fmaf(v.y, v.y, fmaf(v.x, v.x, square[i]));
            }
            square[i] += __shfl_xor_sync(~0u, square[i], 1);
            square[i] += __shfl_xor_sync(~0u, square[i], 2);
            if (warp < 2 && q == 0)  // one warp for this CTA, one for that with the other half of the columns
                store_in(warp ? cta ^ 4 : cta, shared_address(&s.out_squares[half][g + i * 8]), square[i]);
        }
        sync_cluster();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int octet = m * 2 + i;
            if (!real || octet * 8 >= p.end) continue;
            const float scale =
                inverse_root((s.out_squares[0][g + i * 8] + s.out_squares[1][g + i * 8]) / STATE_DIM + EPS);
            const OperandPlace place(pair_of_tiles * 64 + warp * 8, chunks_of(VALUE_DIM));
            ((u32*)a.y)[(place.tile * tile_pieces + octet * 32 + q * 8 + g) * 4 + place.word] =
                pack_bf16(out[2 * i] * scale * weight.x * silu(bf16_low(z[i])),
                          out[2 * i + 1] * scale * weight.y * silu(bf16_high(z[i])));
        }

        if (!real) continue;

        // S' = e^(G_last) S + B - N S; B in bf16.
        const float fade = exponential(scalars.total[CHUNK - 1]);
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const u32 b = pack_bf16(added[j][i], added[j][i + 1]);
                float* to = mine + (j * 8 + q * 2) * STATE_DIM + g + i / 2 * 8;
                to[0] = fmaf(fade, s.kept[j * 4 + i][threadIdx.x], bf16_low(b) - (product[j][i] + product[j + 2][i]));
                to[STATE_DIM] = fmaf(fade, s.kept[j * 4 + i + 1][threadIdx.x],
                                     bf16_high(b) - (product[j][i + 1] + product[j + 2][i + 1]));
            }

        // Heads that have the same q and k share their history: who comes last writes it, when all have read it.
        if (cta == 0 && VALUE_HEADS > KEY_HEADS) {
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
        return;
    }
}
