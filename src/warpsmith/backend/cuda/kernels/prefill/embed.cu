// The beginning of a piece: the residual stream starts as the tokens' embeddings, exactly as the file has them.
//
// Maths: x = E[id]; x times the first norm's weight in bf16, and sums of squares of every 64 channels, for the first
// product. Layout: f32 and bf16 tiles (common.cuh). Tokens before the piece and behind it, up to a multiple of eight,
// are zeros. Grid: a CTA of 128 threads a token; a thread has eight channels at a time. Bytes: 2 read and 6 written a
// channel.
#include "embedding_format.cuh"
#include "prefill/common.cuh"
// after the model's numbers
#include "large/embedding.cuh"

struct Embed {
    const int* ids;         // of tokens lead .. end; null: they are `few`
    const u8* stream;       // row tiles and tied: the LM head's rows are the table
    const u64* head_start;  // [HEAD_TILES] where each of the head's row tiles begins
    const u8* table;        // else its own rows
    const float* norm;
    float* residual;
    u8* out;
    float* squares;  // [HIDDEN / 64][tokens]
    u64* best;       // [8] of the head, which begin anew
    int few[CHUNK];
};

// Eight channels from k on, a multiple of 8.
__device__ __forceinline__ void embedding(const Embed& a, int id, int k, float (&x)[8]) {
    if constexpr (SLABS) {
        const u8* row = a.table + id * embedding_row_bytes();
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = embedding_value(row, k + i);
    } else {
        typedef EmbeddingFormat Format;
        Eight v;
        if constexpr (TIED) {
            constexpr int CHUNKS = chunks_of(HIDDEN);
            const int lane = id % 8 * 4 + k % 32 / 8, warp = k / (CHUNKS * 32), chunk = k % (CHUNKS * 32) / 32;
            const u8* row_tile = a.stream + __ldg(a.head_start + id / WIDE);
            v = Format::embed(row_tile + chunk * Format::chunk_bytes(WIDE), warp, lane, id % WIDE / 8);
        } else {
            v = Format::look_up(a.table, (size_t)id * HIDDEN + k);
        }
        *(float4*)x = v.low, *(float4*)(x + 4) = v.high;
    }
}

extern "C" __global__ void __launch_bounds__(128)
    embed(const __grid_constant__ Embed a, const __grid_constant__ Piece p) {
    let_next_start();
    wait_for_previous();
    const int token = blockIdx.x;
    if (token == 0 && threadIdx.x < 8) a.best[threadIdx.x] = 0;
    const bool live = token >= p.lead && token < p.end;
    const int id = !live ? 0 : a.ids ? a.ids[token - p.lead] : a.few[token - p.lead];
    for (int k = threadIdx.x * 8; k < HIDDEN; k += 1024) {
        __align__(16) float v[8] = {};
        if (live) embedding(a, id, k, v);
        float square = 0.0f;
#pragma unroll
        for (int o = 0; o < 4; o++) {
            const float x = v[2 * o], y = v[2 * o + 1];
            const float2 n = __ldg((const float2*)(a.norm + k) + o);
            const size_t piece = ((size_t)p.capacity * (k / 32) + token / 8) * 32 + o * 8 + token % 8;
            ((float2*)a.residual)[piece * 4 + k % 32 / 8] = {x, y};
            const OperandPlace place(k, chunks_of(HIDDEN));
            const size_t to = ((size_t)p.capacity * place.tile + token / 8) * 32 + o * 8 + token % 8;
            ((u32*)a.out)[to * 4 + place.word] = pack_bf16(x * n.x, y * n.y);
            square = fmaf(x, x, fmaf(y, y, square));
        }
#pragma unroll
        for (int step = 1; step < 8; step *= 2) square += __shfl_xor_sync(~0u, square, step);
        if (threadIdx.x % 8 == 0) a.squares[(size_t)(k / 64) * p.capacity * 8 + token] = square;
    }
}
