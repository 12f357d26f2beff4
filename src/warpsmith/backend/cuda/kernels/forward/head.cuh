// The end of a forward pass: the LM head and the choice of the next token.
#pragma once
#include "forward/matmul.cuh"
#include "sample/ranked.cuh"

// Where a token is drawn, an SM keeps its logits (see sample.cuh).
__device__ __forceinline__ Candidates& candidates(const Block& b) { return *(Candidates*)(b.scratch + MIX_AT); }
__device__ __forceinline__ int first_logit(const Block& b) { return first_of(HEAD_TILES, b.sm) * WIDE; }
__device__ __forceinline__ int own_logits(const Block& b) {
    return min(first_of(HEAD_TILES, b.sm + 1) * WIDE, VOCAB) - first_logit(b);
}
#include "sample/penalties.cuh"

// Logits of every token, the best of which is kept; written out if asked.
//
// One node: each warp keeps its best. A tree: every lane that finishes four rows of a token keeps the best of these, in
// the place that the convolution has for them in other stages; what they have in common is found at the end.
constexpr int RANKS = 4 * (HEAD_HOLDS_NODES ? HEAD_ROW_TILES : TILES_AT_ONCE);  // of a token
static_assert(NODES == 1 || RANKS * 4 <= ROW_STRIDE, "no room for the best of every lane");
__device__ __forceinline__ u64& best_of_rank(const Block& b, int token, int rank) {
    return *(u64*)(b.scratch + KEPT_ROWS_AT + token * ROW_STRIDE + rank * 4);
}
__device__ __forceinline__ void begin_head(Block& b) {
    if constexpr (NODES == 1) {
        if (threadIdx.x < WARPS) b.s.best[threadIdx.x] = 0;
    } else {
        b.sync();  // partial sums of the stage before may lie there
        if (HEAD_HOLDS_NODES) return;
#pragma unroll 1
        for (int i = threadIdx.x; i < NODES * RANKS; i += CONSUMERS) best_of_rank(b, i / RANKS, i % RANKS) = 0;
    }
}

// The best of four rows of a token, and of an earlier one.
__device__ __forceinline__ u64 best_logit(const Block& b, bool live, int row, int token, float4 logits, u64 best) {
    const float logit[4] = {logits.x, logits.y, logits.z, logits.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (live && row + i < VOCAB) {
            best = best_of(best, ranked(logit[i], row + i));
            if (b.r.want_logits) b.p.out_logits[(size_t)token * VOCAB + row + i] = logit[i];
        }
    return best;
}
__device__ __forceinline__ void rank_logits(Block& b, bool live, int row, int token, int rank, float4 logits) {
    u64 best = best_logit(b, live, row, token, logits, 0);
    if constexpr (SAMPLES)
        if (live && b.draw->sampled) *(float4*)(candidates(b).own + (row - first_logit(b))) = logits;
    if constexpr (NODES == 1) {
        best = best_of(best, __shfl_xor_sync(~0u, best, 1));
        if (b.lane == 0) b.s.best[b.warp] = best_of(b.s.best[b.warp], best);
    } else if (live) {
        u64& kept = best_of_rank(b, token, rank);
        kept = best_of(kept, best);
    }
}

// A tree's logits where its activations stay in registers (see shared.cuh): two row tiles at a time, for all nodes. A
// thread finishes four rows of one token and keeps the best of all it has seen.
__device__ __forceinline__ void multiply_head(Block& b, const u32* x, const u32* x_squares) {
    constexpr int CHUNKS = WIDE_CHUNKS, TILES = HEAD_ROW_TILES,
                  REGISTERS = TILES * CHUNKS * HeadFormat::registers(WIDE);
    static_assert(!HEAD_HOLDS_NODES || (NODES * RANKS <= CONSUMERS && NODES % 8 == 0), "a thread finishes one token");
    b.phases ^= NORM_PHASE;
    const auto look = [&](int first) { return NodeTile<CHUNKS>::Look(b, x_squares, first).came(); };
    uint4 held[NODE_TILES][CHUNKS] = {};
#pragma unroll
    for (int i = 0; i < NODE_TILES; i++) {
        if (i * 8 >= b.nodes) break;
        NodeTile<CHUNKS> tile;
        wait_until_there(b, i * 8, look);
        tile.poll(b, x, x_squares, i * 8);
        put_squares(b, i * 8, tile.square_sum());
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) held[i][c] = tile.a[c];
    }
    all_taken(b);
    const int first = first_of(HEAD_TILES, b.sm), tiles = first_of(HEAD_TILES, b.sm + 1) - first;
    const int token = min((int)threadIdx.x / RANKS, b.nodes - 1), rank = threadIdx.x % RANKS;
    const bool finishes = threadIdx.x < b.nodes * RANKS;
    float inverse = 0.0f;
    u64 best = 0;
#pragma unroll 1
    for (int base = 0; base < tiles; base += TILES) {
        u32 w[REGISTERS];
        take_tiles<HeadFormat, CHUNKS, TILES>(b, tiles - base, w);
        float* sums = b.scratch + b.phase(HALF_PHASE) * HEAD_FLOATS;
#pragma unroll
        for (int i = 0; i < NODE_TILES; i++) {
            if (i * 8 >= b.nodes) break;
            float* mine = sums + (b.warp * NODES + i * 8 + (b.lane & 3) * 2) * HEAD_STRIDE + (b.lane >> 2);
            HeadFormat::multiply<TILES>(
                w, held[i],
                [&](int t, float4 sum) {
                    mine[t * WIDE] = sum.x, mine[t * WIDE + 8] = sum.z;
                    mine[HEAD_STRIDE + t * WIDE] = sum.y, mine[HEAD_STRIDE + t * WIDE + 8] = sum.w;
                },
                [](int) {});
        }
        b.sync();
        if (base == 0) inverse = inverse_rms(b, token);
        if (finishes) {
            const float4 sum = sum_parts<WARPS>(sums + token * HEAD_STRIDE + rank * 4, NODES * HEAD_STRIDE);
            best = best_logit(b, base + rank / 4 < tiles, (first + base) * WIDE + rank * 4, token,
                              scaled(sum, inverse), best);
        }
        b.phases ^= HALF_PHASE;
    }
    b.sync();  // sums may lie there
    if (finishes) best_of_rank(b, token, rank) = best;
}

__device__ __forceinline__ void end_head(Block& b, const float* norm_weight) {
    b.sync();
    if constexpr (SAMPLES)
        if (b.draw->sampled) {
            b.begin_stage();
            const u64 best = penalise_own(b);
            if (b.lane == 0) b.s.best[b.warp] = best;
            b.sync();
        }
#pragma unroll 1
    for (int token = threadIdx.x; token < b.nodes; token += CONSUMERS) {
        u64 best = 0;
#pragma unroll
        for (int i = 0; i < (NODES == 1 ? WARPS : RANKS); i++)
            best = best_of(best, NODES == 1 ? b.s.best[i] : best_of_rank(b, token, i));
        publish8(b.words(BEST_PHASE, token, BEST_AT) + b.sm * 2, b.other(BEST_PHASE), best ? ~(u32)best : 0,
                 (u32)(best >> 32));
    }
    if (b.r.want_hidden) {  // x after the final norm: each SM its own rows
        const OwnTiles own(b.sm);
        const int rows = own.count * NARROW;
#pragma unroll 1
        for (int item = threadIdx.x; item < b.nodes * rows; item += CONSUMERS) {
            const int token = item / rows, tile = item % rows / NARROW, row = item % NARROW,
                      at = (own.first + tile) * NARROW + row;
            b.p.out_hidden[(size_t)token * HIDDEN + at] =
                b.s.residual[tile][token][row] * inverse_rms(b, token) * __ldg(norm_weight + at);
        }
    }
}

// The best of all SMs, a warp a token; known to every thread of the block afterwards (in s.token).
__device__ __forceinline__ void choose_greedy(Block& b) {
    constexpr int EACH = (SMS + 31) / 32;
#pragma unroll 1
    for (int token = b.warp; token < b.nodes; token += WARPS) {
        const u32* from = b.words(BEST_PHASE, token, BEST_AT);
        uint2 got[EACH];
        Watchdog dog;
        bool came;
        do {
            came = true;
#pragma unroll
            for (int i = 0; i < EACH; i++) got[i] = load8(from + min(i * 32 + b.lane, SMS - 1) * 2);
#pragma unroll
            for (int i = 0; i < EACH; i++) came &= got[i].x != NOT_YET;
            dog.check();
        } while (!came);
        __syncwarp();
        u64 best = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) best = best_of(best, (u64)got[i].y << 32 | (u32)~got[i].x);
#pragma unroll
        for (int step = 1; step < 32; step *= 2) best = best_of(best, __shfl_xor_sync(~0u, best, step));
        if (b.lane == 0) b.s.token[token] = token_of(best);
    }
    b.sync();
}

// All SMs' best.
__device__ __forceinline__ void hear_best(Block& b) {
    Candidates& c = candidates(b);
    const u32* from = b.words(BEST_PHASE, 0, BEST_AT);
#pragma unroll 1
    for (int sm = threadIdx.x; sm < SMS; sm += CONSUMERS) {
        uint2 got;
        Watchdog dog;
        do {
            got = load8(from + sm * 2);
            dog.check();
        } while (got.x == NOT_YET);
        c.best[sm] = (u64)got.y << 32 | (u32)~got.x;
    }
    b.sync();
}
