// The state along the chunks: S' = e^(G_last) S + B - N S (see delta.cuh).
//
// Grid: a CTA of 256 threads a value head and 16 columns of its state; a warp has 16 rows, in f32 registers. S in bf16
// goes through shared memory as the product's operand, and out for the output. N and B come ahead through a ring: a
// thread copies what it will itself use, so nobody waits for anybody. Bytes: 36 KB read and 4 KB written a chunk and
// CTA. Given with -D: AHEAD, chunks on their way.
#include "prefill/delta.cuh"

constexpr int PIECES = 9;             // of 16 bytes, a thread's
constexpr int S_ROW = 24;             // elements between rows of the operand
constexpr int MAX_CHUNKS_HERE = 64;   // of a piece
constexpr int SCAN_SHARED = AHEAD * PIECES * 256 * 16 + 2 * STATE_DIM * S_ROW * 2 + MAX_CHUNKS_HERE * 4;
static_assert(SCAN_SHARED <= 232448, "");

extern "C" __global__ void __launch_bounds__(256, 1)
    delta_scan(const __grid_constant__ Delta a, const __grid_constant__ Piece p) {
    extern __shared__ __align__(128) u8 memory[];
    uint4* ring = (uint4*)memory + threadIdx.x;                 // [AHEAD][PIECES][256]
    u16* operand = (u16*)(memory + AHEAD * PIECES * 256 * 16);  // [2][128][S_ROW]
    let_next_start();
    const int head = blockIdx.x / SLICES, slice = blockIdx.x % SLICES, chunks = chunks_in(p);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    float* state = a.state + ((size_t)head * STATE_DIM + slice * SLICE) * STATE_DIM + warp * 16;
    float* fades = (float*)(operand + 2 * STATE_DIM * S_ROW);
    wait_for_previous();
    if (threadIdx.x < chunks) fades[threadIdx.x] = a.fade[threadIdx.x * VALUE_HEADS + head];

    const auto fetch = [&](int chunk) {
        const size_t at = (size_t)min(chunk, chunks - 1) * VALUE_HEADS + head;
        const uint4* n = a.n + (at * 8 + warp) * 8 * 32 + lane;
        const uint4* b = a.b + ((at * 8 + warp) * 8 + slice) * 32 + lane;
        uint4* to = ring + chunk % AHEAD * (PIECES * 256);
#pragma unroll
        for (int i = 0; i < 8; i++) copy16(to + i * 256, n + i * 32);
        copy16(to + 8 * 256, b);
        copies_queued();
    };
#pragma unroll
    for (int i = 0; i < AHEAD - 1; i++) fetch(i);
    float sum[2][4];  // the state: rows g and g + 8, columns 2 q and the next of two octets
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum[j][i] = state[(j * 8 + q * 2 + i % 2) * STATE_DIM + g + i / 2 * 8];

#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++) {
        const size_t at = (size_t)chunk * VALUE_HEADS + head;
        u16* mine = operand + chunk % 2 * (STATE_DIM * S_ROW);
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                *(u32*)(mine + (warp * 16 + g + i * 8) * S_ROW + j * 8 + q * 2) =
                    pack_bf16(sum[j][2 * i], sum[j][2 * i + 1]);
        __syncthreads();
        fetch(chunk + AHEAD - 1);
        copies_left<AHEAD - 1>();
        const u16* rows = mine + (lane % 16) * S_ROW + lane / 16 * 8;
        a.states[((at * SLICES + slice) * 8 + warp) * 32 + lane] = load_transposed(rows + warp * 16 * S_ROW);
        const uint4* n = ring + chunk % AHEAD * (PIECES * 256);
        float product[4][4] = {};
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const uint4 x = n[k * 256], y = load_transposed(rows + k * 16 * S_ROW);
            mma(product[k % 2 * 2], x.x, x.y, x.z, x.w, y.x, y.y);
            mma(product[k % 2 * 2 + 1], x.x, x.y, x.z, x.w, y.z, y.w);
        }
        const uint4 b = n[8 * 256];
        const float added[2][4] = {{bf16_low(b.x), bf16_high(b.x), bf16_low(b.y), bf16_high(b.y)},
                                   {bf16_low(b.z), bf16_high(b.z), bf16_low(b.w), bf16_high(b.w)}};
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                sum[j][i] = fmaf(fades[chunk], sum[j][i], added[j][i] - (product[j][i] + product[j + 2][i]));
    }
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) state[(j * 8 + q * 2 + i % 2) * STATE_DIM + g + i / 2 * 8] = sum[j][i];
}
