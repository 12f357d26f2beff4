// Logits of some tokens: the LM head over x normed, in f32.
//
// Maths: logits = (W (x * norm)) / rms(x). A warp multiplies units of 16 rows by up to eight tokens at a time; weights
// come straight from memory into the mma's registers, activations lie in shared memory as they are in tiles
// (common.cuh). Given with -D: HEAD_OCTETS, octets of tokens a launch takes; one octet's best logits are found here
// too, which saves the next token of a prompt a launch; HEAD_TYPE, of weights. Grid: a CTA of 512 threads an SM. Bytes:
// all of the head once.
#include "prefill/common.cuh"
#include "prefill/row_weights.cuh"
#include "sample/ranked.cuh"

struct Head {
    const u8* stream;
    const u64* start;      // [HEAD_TILES] where each of the head's row tiles begins
    const u8* x;           // tiles, K in the stream's order
    const float* squares;  // [HIDDEN / 64][tokens]
    float* logits;         // [count][VOCAB]
    u64* best;             // [8 tokens of the octet], ranked; 0 when a piece begins
    int first, count;      // tokens
};

typedef RowWeights<HEAD_TYPE> Weights;
constexpr int TILES = HIDDEN / 32, BATCH = 8;  // tiles whose weights are on their way together
constexpr int VALUES = Weights::values(false), CHUNK_BYTES = 8 * (VALUES + Weights::scales(false));  // 256 k of a unit
constexpr int EARLY = 4;  // warps whose first unit is asked for before the launch before has ended

extern "C" __global__ void __launch_bounds__(512, 1)
    head(const __grid_constant__ Head a, const __grid_constant__ Piece p) {
    extern __shared__ __align__(16) u8 memory[];
    __shared__ float scales[HEAD_OCTETS * 8];
    let_next_start();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, octet = a.first / 8,
              octets = (a.first + a.count + 7) / 8 - octet;
    if (const int unit = warp * gridDim.x + blockIdx.x; warp < EARLY && unit < HEAD_TILES)
        for (int i = lane * 128; i < TILES / 8 * CHUNK_BYTES; i += 32 * 128)
            prefetch(a.stream + __ldg(a.start + unit) + i);
    wait_for_previous();
    for (int i = threadIdx.x; i < TILES * octets * 32; i += 512) {  // [tile][octet][512 bytes]
        const int tile = i / (octets * 32), inside = i % (octets * 32);
        copy16((uint4*)memory + tile * (HEAD_OCTETS * 32) + inside,
               (const uint4*)a.x + ((size_t)p.capacity * tile + octet) * 32 + inside);
    }
    if (threadIdx.x < octets * 8) {
        float square = 0.0f;
#pragma unroll 8
        for (int part = 0; part < HIDDEN / 64; part++)
            square += a.squares[(size_t)part * p.capacity * 8 + octet * 8 + threadIdx.x];
        scales[threadIdx.x] = inverse_root(square / HIDDEN + EPS);
    }
    copies_done();
    __syncthreads();
    const u32 x = shared_address(memory) + lane * 4;
    u64 best[2] = {};  // of this lane's rows, two tokens
    for (int unit = warp * gridDim.x + blockIdx.x; unit < HEAD_TILES; unit += 16 * gridDim.x) {
        const u8* from = a.stream + __ldg(a.start + unit);
        float acc[HEAD_OCTETS][4] = {};
#pragma unroll 1
        for (int first = 0; first < TILES; first += BATCH) {
            Weights::Chunk w;
            w.load(from + first / 8 * CHUNK_BYTES, lane);
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                u32 d[8];
                w.operands(d, i);
#pragma unroll
                for (int n = 0; n < HEAD_OCTETS; n++) {
                    if (n >= octets) break;
                    const u32 at = x + ((first + i) * HEAD_OCTETS + n) * 512;
                    mma(acc[n], d[0], d[1], d[2], d[3], load_shared4(at), load_shared4(at + 128));
                    mma(acc[n], d[4], d[5], d[6], d[7], load_shared4(at + 256), load_shared4(at + 384));
                }
            }
        }
#pragma unroll
        for (int n = 0; n < HEAD_OCTETS; n++) {
            if (n >= octets) break;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int token = (octet + n) * 8 + lane % 4 * 2 + i % 2 - a.first,
                          row = unit * WIDE + lane / 4 + i / 2 * 8;
                if (token >= 0 && token < a.count && row < VOCAB) {
                    const float logit = acc[n][i] * scales[n * 8 + lane % 4 * 2 + i % 2];
                    a.logits[(size_t)token * VOCAB + row] = logit;
                    if (HEAD_OCTETS == 1) best[i % 2] = best_of(best[i % 2], ranked(logit + 0.0f, row));
                }
            }
        }
    }
    if (HEAD_OCTETS > 1) return;
    __shared__ u64 of_warps[16][8];
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) best[i] = best_of(best[i], __shfl_xor_sync(~0u, best[i], step));
        if (lane < 4) of_warps[warp][lane * 2 + i] = best[i];
    }
    __syncthreads();
    if (threadIdx.x < 8) {
        u64 all = 0;
        for (int i = 0; i < 16; i++) all = best_of(all, of_warps[i][threadIdx.x]);
        atomicMax(a.best + threadIdx.x, all);
    }
}
