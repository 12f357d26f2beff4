// Products of packed weights with the activations of all rows at once, as the activations-first pass makes them
// (large/products.cuh), and what becomes of their sums.
#pragma once
#include "draft/words.cuh"
#include "large/copier.cuh"
#include "large/published.cuh"
#include "large/residual.cuh"

// The group's rows of bf16 as operands. A warp has a superblock, a lane 16 k of one row in each tile of 64 k. What is
// loaded becomes operands where it lies, in loops: a launch runs this once, and code that is run once comes from the L2
// cache. With it the stage begins: the first one, so that nobody multiplies what was there.
__device__ __forceinline__ void prepare_rows(Block& b, const Run& run, int stage, const u16* rows) {
    constexpr int STEP_WORDS = STEP_BYTES / 4;
    const int q = b.lane & 3, in_octet = b.lane >> 2;
    u8* block = b.scratch + b.warp * BLOCK_BYTES;
#pragma unroll 1
    for (int octet = 0; octet < (b.warp < run.blocks ? OCTETS : 0); octet++) {
        const int row = octet * 8 + in_octet;
        u32 *own = (u32*)block + octet * 64 + in_octet * 4, *words = own + q, most = 0;
        uint4 raw[4][2] = {};
        if (row < b.nodes) {
            const int k = (run.first_block + b.warp) * BLOCK_K + q * 16;
#pragma unroll
            for (int i = 0; i < 8; i++)
                raw[i / 2][i % 2] = __ldcg((const uint4*)(rows + activation_at(row, k + i / 2 * 64)) + i % 2);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint4 v = raw[i / 2][i % 2];
            u32* to = words + i * 2 * STEP_WORDS;
            to[0] = v.x, to[32] = v.y, to[STEP_WORDS] = v.z, to[STEP_WORDS + 32] = v.w;
            most = max(most, Fours<2>{{{v.x, v.y}, {v.z, v.w}}}.largest());
        }
        most = max(most, __shfl_xor_sync(~0u, most, 1));
        most = max(most, __shfl_xor_sync(~0u, most, 2));
        const BlockScale scale(most);
#pragma unroll 1
        for (int tile = 0; tile < 4; tile++) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32* at = words + (tile * 4 + j) * STEP_WORDS;
                const OperandQuad quad(at[0], at[32], scale.full);
                at[0] = quad.low, at[32] = quad.high;
                sum += quad.sum;
            }
            sum += __shfl_xor_sync(~0u, sum, 1);
            const uint2 sums = block_sums(sum, __shfl_xor_sync(~0u, sum, 2));
            u32* to = own + 16 * STEP_WORDS + tile;
            if (q == 0) to[0] = sums.x, to[32] = sums.y;
        }
        if (q == 0) {
            *(float*)(block + BACK_AT + row * 4) = scale.back;
            if (scale.back != 1.0f) b.s.scaled = stage;
        }
    }
    show_to_products();
    b.sync();
    if (threadIdx.x < THREADS_ARRIVE) barrier_arrive(Barriers(b.base).begun);
}

#include "large/multiply.cuh"
#include "large/reduce.cuh"

__device__ __forceinline__ void multiply_stage(Block& b, int stage, const Run& run) {
    if (uniform(b.s.scaled == min(stage, HEAD)))
        multiply_by<ScaledMultiplier>(b, run);
    else
        multiply(b, run);
}

// Logits, of rows from `first_node` on.
struct Logits {
    float* to;             // those of the lane's first token
    int row;               // the lane's first one
    const int begin, end;  // tokens that are wanted, counted from the lane's first one

    __device__ __forceinline__ Logits(const Block& b, int which, const Run& run, int first_node)
        : to(b.p.out_logits + (size_t)((b.lane & 3) * 2) * VOCAB), row(run.result * ROWS + which * 32 + (b.lane >> 2)),
          begin(first_node - (b.lane & 3) * 2), end(b.nodes - (b.lane & 3) * 2) {}
    __device__ __forceinline__ void take(int octet, int i, float4 v) const {
        put(octet * 8, row + i * 16, v.x, v.z), put(octet * 8 + 1, row + i * 16, v.y, v.w);
    }
    __device__ __forceinline__ void put(int token, int early_row, float early, float late) const {
        if (token < begin || token >= end) return;
        float* at = to + (size_t)token * VOCAB + early_row;
        if (VOCAB % ROWS == 0 || early_row < VOCAB) at[0] = early;
        if (VOCAB % ROWS == 0 || early_row + 8 < VOCAB) at[8] = late;
    }
    __device__ __forceinline__ void next() { row += ROWS; }
};

// Of one of the head's rounds; the last one's are logits.
__device__ __forceinline__ void reduce_head(Block& b, int which, int stage, const Run& run, u32& count,
                                            int first_node) {
    const Logits logits(b, which, run, b.r.want_logits ? first_node : b.nodes);
    OwnSums<Logits> sums(b, which, run, b.p.head_sums, stage == HEAD, stage == LAST, logits);
    reduce_tiles(b, which, run, count, sums);
}

// A stage's sums, all of it.
__device__ __forceinline__ void reduce(Block& b, int which, int stage, u32& count) {
    const Barriers bars(b.base);
    barrier_wait(bars.begun, b.turn(stage));
    if (stage <= HEAD) measure(b, which, stage, normed(stage));
    const Run run = uniform_run(b.s.runs[b.turn(stage)]);
    if (stage != LAST) arrive_for_warp(bars.tabled, b.lane);
    if (b.lane == 0) {
        add_release(b.begun_counter(stage), 1);
        if (stage > b.first_stage() && stage < HEAD) b.wait_until_begun(stage - 1);
    }
    __syncwarp();
    if (stage < HEAD) {
        TaggedSums sums(b, which, run, sums_at(b, stage), tag_of(stage));
        reduce_tiles(b, which, run, count, sums);
    } else {
        reduce_head(b, which, stage, run, count, 1);  // nobody asks about the root
    }
    if (stage == LAST) arrive_for_warp(bars.tabled, b.lane);
}
