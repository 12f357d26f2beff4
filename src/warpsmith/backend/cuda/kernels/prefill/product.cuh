// What products over either stream of weights share: their arguments, how tiles are dealt, who brings activations and
// scales, and how results end.
#pragma once
#include "prefill/async.cuh"
#include "prefill/common.cuh"

enum Ending {
    PLAIN,  // times the token's scale, in bf16; tiles in the order of rows
    // The same, then silu(gate) up: eight rows of a unit's sixteen; tiles in the order of the next product's k.
    SILU,
    RESIDUAL,  // added to the residual stream; that times the next norm's weight in bf16; and sums of its squares
    LOGITS     // times the token's scale, in f32, row by row of tokens (slabs)
};

struct Gemm {
    const u8* stream;  // packed weights
    // Where each of the matrix begins in the stream: [row_tiles]; slabs: [row_tiles of 64 rows][superblocks of 256 k].
    const u64* start;
    const u8* x;  // tiles, K in the stream's order
    u8* out;      // tiles; RESIDUAL: of the residual times the next norm's weight
    // [HIDDEN / 64][tokens] of the residual stream that x came from: its norm is applied to the sums.
    const float* squares_in;
    float* squares_out;           // RESIDUAL: of the new one
    float* residual;              // RESIDUAL: f32 tiles, in the order of rows
    const float* norm;            // RESIDUAL: the next norm's weight
    float* gates;                 // PLAIN: rows behind the others stay in f32 [gate_rows][tokens]
    float* logits;                // LOGITS: [tokens][VOCAB]
    int row_tiles, k_tiles;       // of the matrix in the stream; K / 32
    int row_groups, next_chunks;  // groups of 32 rows of results; the next product's K / 256
    int gate_rows;
    int first_token, tokens;  // LOGITS
    // Slabs: row tiles where the matrix's second and third part begin, and types of the parts, a byte each.
    int second, third;
    u32 types;
};

// How tiles are dealt: one after another to CTAs, or to clusters of two that share a tile (PAIR) or its tokens
// (TWO_ROWS).
template <class C>
struct Work {
    int token_tiles, tiles;
    int first, step;
    __device__ Work(const Gemm& a, const Span& s)
        : token_tiles((s.octets + C::N / 8 - 1) / (C::N / 8)),
          tiles((a.row_groups + (a.gate_rows + 31) / 32 + C::ITEM_GROUPS - 1) / C::ITEM_GROUPS * token_tiles),
          first(blockIdx.x / C::CLUSTER), step(gridDim.x / C::CLUSTER) {}
    __device__ int row(int i) const { return C::TWO_ROWS ? i / token_tiles * 2 + (int)cta_rank() : i / token_tiles; }
    __device__ int token(int i) const { return i % token_tiles; }
};

struct Barriers {
    u32 full, empty, leave, scales;  // [STAGES], [STAGES], [warpgroups][2], [2][2]
};

// A stage of activations is free, for all who bring it.
template <class C>
__device__ __forceinline__ void release_stage(u32 empty) {
    if constexpr (C::TWO_ROWS) {
        if (threadIdx.x % 32 < 2 * ARRIVALS) tell_in(threadIdx.x % 2, empty);
        if (ARRIVALS > 1) tell_in(threadIdx.x % 2 ^ 1, empty);
    } else {
        if (arrives()) barrier_arrive(empty);
    }
}

// --- the warps that bring --------------------------------------------------------------------------------------------

template <class C>
__device__ __forceinline__ void bring_x(const Gemm& a, const Span& s, u32 ring, const Barriers& at) {
    const Work<C> work(a, s);
    const u64 stride = (u64)s.capacity * 512;
    StagePlace place;
    wait_for_previous();
    if (threadIdx.x % 32 >= COPIERS) return;
    for (int i = work.first; i < work.tiles; i += work.step) {
        const u8* x = a.x + (u64)(s.first + work.token(i) * (C::N / 8)) * 512;
        for (int stage = C::PAIR ? cta_rank() : 0; stage < a.k_tiles / C::TS; stage += C::PAIR ? 2 : 1) {
            wait_on(at.empty + place.slot * 8, place.parity ^ 1);
            const u32 to = ring + place.slot * C::STAGE_BYTES, sign = at.full + place.slot * 8;
            expect_copies(sign, C::X_BYTES);
#pragma unroll
            for (int j = 0; j < C::TS; j++) {
                const u8* from = x + (u64)(stage * C::TS + j) * stride;
                if constexpr (!C::TWO_ROWS)
                    copy_in(to + j * C::N * 64, from, C::N * 64, sign);
                else if (j % 2 == (int)cta_rank())  // each CTA half of it, for both
                    copy_in_both(to + j * C::N * 64, from, C::N * 64, sign);
            }
            copies_asked_for(sign);
            place.step<C::STAGES>();
        }
    }
}

// 1 / rms of a tile's tokens; the next tile's go to the other place.
template <class C>
__device__ __forceinline__ void bring_scales(const Gemm& a, const Span& s, u32 scales, const Barriers& at) {
    const int lane = threadIdx.x % 32;
    const Work<C> work(a, s);
    const size_t stride = (size_t)s.capacity * 8;
    StagePlace place;
    wait_for_previous();
    for (int i = work.first; i < work.tiles; i += work.step) {
        wait_on(at.scales + place.slot * 16 + 8, place.parity ^ 1);
        const float* from = a.squares_in + (s.first + work.token(i) * (C::N / 8)) * 8;
        for (int token = lane; token < C::N; token += 32) {
            float sum = 0.0f;
#pragma unroll 8
            for (int part = 0; part < HIDDEN / 64; part++) sum += from[part * stride + token];
            store_shared(scales + (place.slot * C::N + token) * 4, inverse_root(sum / HIDDEN + EPS));
        }
        __syncwarp();
        if (arrives()) barrier_arrive(at.scales + place.slot * 16);
        place.step<2>();
    }
}

// --- endings ---------------------------------------------------------------------------------------------------------

// Where a group of 32 rows of results lies.
template <class C>
__device__ __forceinline__ u8* group_at(const Gemm& a, const Span& s, int group) {
    return a.out + (u64)(C::ENDING == PLAIN ? group : stream_place(group, a.next_chunks)) * s.capacity * 512;
}

// Two rows that are neighbours for one token, of one row for two tokens: lanes trade with lane ^ 4.
__device__ __forceinline__ float2 trade_rows(float a, float b, bool odd) {
    const float other = __shfl_xor_sync(~0u, odd ? a : b, 4);
    return odd ? float2{other, b} : float2{a, other};
}
__device__ __forceinline__ u32 pack_bf16_pair(float2 v) { return pack_bf16(v.x, v.y); }
__device__ __forceinline__ float gated(float gate, float up) { return silu(gate) * up; }

// This lane's part of the residual stream of 64 rows, from an octet of tokens on; the next octet's is 64 further.
__device__ __forceinline__ float4* residual_at(const Gemm& a, const Span& s, int row_tile, int octet) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, piece = lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2;
    return (float4*)a.residual + (((u64)(row_tile * 2 + warp / 2) * s.capacity + s.first + octet) * 32 + piece) * 2 +
           warp % 2;
}

// SPLIT: a warpgroup gives the other one its sums of octets [GIVE, GIVE_END), which has the same rows. PAIR: that is
// the other CTA's; `given` is a barrier in either that its four warps come to.
template <class C, int GIVE, int GIVE_END>
__device__ __forceinline__ void give_sums(u32 base, const float* acc, u32 given) {
    const u32 thread = threadIdx.x % 128, group = C::PAIR ? cta_rank() : threadIdx.x / 128;
    const u32 mine = base + C::SUMS_AT + (C::PAIR ? 0 : group * (C::HALF * 4 * 512)) + thread * 4;
#pragma unroll
    for (int i = GIVE * 4; i < GIVE_END * 4; i++) {
        if constexpr (C::PAIR)
            store_in(group ^ 1, mine + (i - GIVE * 4) * 512, acc[i]);
        else
            store_shared(mine + (i - GIVE * 4) * 512, acc[i]);
    }
    if constexpr (C::PAIR) {
        __syncwarp();
        if (arrives()) arrive_in(group ^ 1, given);
        wait_in_cluster(given, 0);
    }
}

// Sums of octets [LOW, HIGH) are added to the residual. SPLIT: with the other warpgroup's; `early` is the residual of
// those octets, asked for before the sums were made.
template <class C, int LOW, int HIGH>
__device__ __forceinline__ void add_to_residual(const Gemm& a, const Span& s, u32 base, const float* acc,
                                                const float4* early, int row_tile, int octet, int octets) {
    const u32 thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32,
              group = C::PAIR ? cta_rank() : threadIdx.x / 128;
    const u32 others = base + C::SUMS_AT + (C::PAIR ? 0 : (group ^ 1) * (C::HALF * 4 * 512)) + thread * 4;
    const u32 squares = base + C::SUMS_AT + C::SUMS + (C::SPLIT ? 0 : group * (C::N * 16));  // [octet][warp][8 tokens]
    const u32 piece = lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2;
    const bool odd = lane & 4;
    wait_for_previous();
    const int tile = row_tile * 2 + warp / 2, row = tile * 32 + warp % 2 * 16 + lane / 8 * 2;  // a tile has 32 rows
    const float2 n0 = __ldg((const float2*)(a.norm + row)), n1 = __ldg((const float2*)(a.norm + row + 8));
    float4* residual = residual_at(a, s, row_tile, octet);
    u8* to = (SLABS ? a.out + (u64)row_tile * 2 * s.capacity * 512 : group_at<C>(a, s, tile)) +
             (u64)(s.first + octet) * 512 + piece * 16 + (SLABS ? warp * 4 : warp % 2 * 8);
    constexpr int BATCH = C::SPLIT ? HIGH - LOW : C::BATCH;  // octets whose residual is on its way together
#pragma unroll
    for (int first = LOW; first < HIGH; first += BATCH) {
        float4 kept[BATCH];
#pragma unroll
        for (int i = 0; i < smaller(BATCH, HIGH - first); i++)
            if (first + i < octets) kept[i] = C::SPLIT ? early[i] : residual[(first + i) * 64];
#pragma unroll
        for (int n = first; n < smaller(first + BATCH, HIGH); n++) {
            float d[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                d[i] = acc[n * 4 + i];
                if (C::SPLIT) d[i] += load_shared_float(others + (n * 4 + i - LOW * 4) * 512);
            }
            const float2 x0 = trade_rows(d[0], d[1], odd), x1 = trade_rows(d[2], d[3], odd);
            float square = 0.0f;
            if (n < octets) {
                float4 r = kept[n - first];
                r.x += x0.x, r.y += x0.y, r.z += x1.x, r.w += x1.y;
                residual[n * 64] = r;
                const uint2 x = {pack_bf16(r.x * n0.x, r.y * n0.y), pack_bf16(r.z * n1.x, r.w * n1.y)};
                if constexpr (SLABS)
                    *(u32*)(to + n * 512) = x.x, *(u32*)(to + ((u64)s.capacity + n) * 512) = x.y;
                else
                    *(uint2*)(to + n * 512) = x;
                square = fmaf(r.x, r.x, fmaf(r.y, r.y, fmaf(r.z, r.z, r.w * r.w)));
            }
            square += __shfl_xor_sync(~0u, square, 8);
            square += __shfl_xor_sync(~0u, square, 16);
            if (lane < 8) store_shared(squares + (n * 32 + warp * 8 + piece) * 4, square);
        }
    }
}

// Squares of four warps, when all have put them down: of octets [low, high).
template <class C>
__device__ __forceinline__ void sum_squares(const Gemm& a, const Span& s, u32 base, int row_tile, int octet, int low,
                                            int high) {
    const u32 thread = threadIdx.x % 128,
              squares = base + C::SUMS_AT + C::SUMS + (C::SPLIT ? 0 : threadIdx.x / 128 * (C::N * 16));
    for (int token = thread + low * 8; token < high * 8; token += 128) {
        const u32 from = squares + (token / 8 * 32 + token % 8) * 4;
        const float first = load_shared_float(from) + load_shared_float(from + 32);
        a.squares_out[(size_t)row_tile * s.capacity * 8 + (s.first + octet) * 8 + token] =
            first + load_shared_float(from + 64) + load_shared_float(from + 96);
    }
}

// All sums of a tile of a warpgroup that has rows of its own.
template <class C>
__device__ __forceinline__ void end_tile(const Gemm& a, const Span& s, u32 base, const float* acc, int row_tile,
                                         int octet, int octets) {
    const int meeting = 6 + threadIdx.x / 128;
    sync_some<128>(meeting);  // all have read the last tile's squares
    add_to_residual<C, 0, C::N / 8>(a, s, base, acc, nullptr, row_tile, octet, octets);
    sync_some<128>(meeting);
    sum_squares<C>(a, s, base, row_tile, octet, 0, octets);
}

// The same where two have the same rows: each finishes half of the tokens. Barriers of both are one instruction, or
// synccheck takes them for two.
template <class C>
__device__ __forceinline__ void end_split_tile(const Gemm& a, const Span& s, u32 base, const float* acc,
                                               const float4* early, int row_tile, int octet, int octets, u32 given,
                                               u32 group) {
    constexpr int HALF = C::HALF, ALL = C::N / 8;
    const auto together = [] {
        if constexpr (C::PAIR)
            sync_some<128>(6);
        else
            sync_some<256>(5);
    };
    if (group == 0)
        give_sums<C, HALF, ALL>(base, acc, given);
    else
        give_sums<C, 0, HALF>(base, acc, given);
    if (!C::PAIR) together();
    if (group == 0)
        add_to_residual<C, 0, HALF>(a, s, base, acc, early, row_tile, octet, octets);
    else
        add_to_residual<C, HALF, ALL>(a, s, base, acc, early, row_tile, octet, octets);
    together();
    sum_squares<C>(a, s, base, row_tile, octet, group ? HALF : 0, min(group ? ALL : HALF, octets));
}
