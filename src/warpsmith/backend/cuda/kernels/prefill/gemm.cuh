// Y[rows, tokens] = W[rows, K] X[K, tokens]: weights are a product's register operand, straight from the packed stream,
// activations its shared-memory operand, a copy away from how they lie ("tiles", see common.cuh). Products are wgmma's
// on sm_90a, where they are queued, and mma.sync's elsewhere (async.cuh).
//
// A CTA: two warpgroups multiply; four more warps bring activations into a ring, weights into the ring or ahead of
// their loads into L2, the tokens' scales, and results out. A step is 32 or 64 k of a block of 64 rows: fence, wgmmas,
// commit, wait for the step before, load weights of a later step into the registers that have come free. Weights come
//     LDG   16 bytes a lane from L2, some steps ahead;
//     RING  through shared memory, with the activations of the same stage; two blocks of 64 rows a warpgroup, or few
//           tokens: most bytes on their way, and before the launch that makes the activations has ended; or blocks with
//           scales, which are widened between the loads and the products.
// Where a matrix has few rows, sums of even and of odd stages of 128 k are kept apart and added at the end. Some
// tokens: both warpgroups have the same 64 rows and take turns at stages (SPLIT). Few: so do two CTAs of a cluster,
// with one warpgroup each (PAIR). Many: each warpgroup has rows of its own, and two sets of sums (TWICE). The order of
// sums is a matrix's own and never depends on the number of tokens. Without wgmma there is no SPLIT and no PAIR, and
// results go straight to where they lie. Bytes: weights once for every tile of tokens, activations once for every tile
// of rows, mostly from L2.
//
// What ptxas wants of the consumers' code, or it gives them the launch's 168 registers (C7512, spills): no wait for
// bulk stores, no trap in a branch. The build must have neither spills nor C75xx.
#pragma once
#include "prefill/product.cuh"
#include "prefill/row_weights.cuh"

enum From { LDG, RING };

// N: tokens of a tile. MB: blocks of 64 rows of a warpgroup; 0: one block, and one warpgroup. TS: tiles of 32 k of a
// stage. G: of a step. NB: steps whose weights are in registers or on their way. TYPE: of weights.
template <int N_, int MB_, int TS_, int STAGES_, int G_, int NB_, int ENDING_, int TYPE>
struct Config {
    typedef RowWeights<TYPE> Weights;
    static constexpr int REGISTERS = 8;  // of a tile: two operands
    static constexpr int N = N_, WGS = MB_ == 0 ? 1 : 2, MB = MB_ == 0 || ENDING_ == RESIDUAL ? 1 : MB_,
                         SETS = MB_ == 0 ? 1 : MB_, TS = TS_, STAGES = STAGES_, G = G_, NB = NB_, ENDING = ENDING_;
    static constexpr int FROM = MB == 2 || WGS == 1 || Weights::SCALED ? RING : LDG;
    // SETS: of sums, a block of rows each, or TWICE.
    static constexpr bool NARROW_UNITS = ENDING == RESIDUAL, TWICE = ENDING == RESIDUAL && MB_ == 2,
                          SPLIT = ENDING == RESIDUAL && !TWICE, PAIR = SPLIT && WGS == 1;
    static_assert(!SPLIT || (QUEUED && (PAIR || FROM == LDG)), "");
    static constexpr int ROWS = 64 * MB * (SPLIT ? 1 : WGS), UNITS = ROWS / (NARROW_UNITS ? NARROW : WIDE);
    static constexpr int VALUES = Weights::values(NARROW_UNITS), SCALES_OF_TILE = Weights::scales(NARROW_UNITS),
                         TILE_BYTES = VALUES + SCALES_OF_TILE, THREADS = 128 * (WGS + 1),
                         CONSUMER_REGISTERS = WGS == 1 ? 216 : 232;
    // One warpgroup: a CTA leaves room for one of the next launch, which may begin early.
    static constexpr int CTAS = WGS == 1 ? 2 : 1;
    static constexpr int W_WARPS = MB == 2 ? 2 : 1;
    static constexpr int X_BYTES = N * 64 * TS, W_BYTES = FROM == RING ? UNITS * TILE_BYTES * TS : 0;
    static constexpr int STAGE_BYTES = X_BYTES + W_BYTES;
    static constexpr int HALF = (N / 8 + 1) / 2;  // octets that a warpgroup finishes, where both have sums of all
    static constexpr int SUMS = SPLIT ? HALF * 4 * 128 * 4 * WGS : 0;
    static constexpr int PARTIAL_SQUARES = ENDING == RESIDUAL ? (TWICE ? 2 : 1) * N * 4 * 4 : 0;
    static constexpr int GROUPS = ENDING == SILU ? ROWS / 64 : ROWS / 32;  // of 32 rows of results
    static constexpr bool SENDS = QUEUED && ENDING != RESIDUAL && MB == 1;  // results leave through shared memory
    static constexpr int OUT_GROUP = N * 64, OUT = SENDS ? GROUPS * OUT_GROUP : 0;
    static constexpr int SCALES = ENDING == RESIDUAL ? 0 : 2 * N * 4, BARRIERS = 1024;
    static constexpr int SCALES_AT = BARRIERS, RING_AT = BARRIERS + (SCALES + 127) / 128 * 128;
    static constexpr int SUMS_AT = RING_AT + STAGES * STAGE_BYTES, OUT_AT = SUMS_AT + SUMS + PARTIAL_SQUARES,
                         SHARED = OUT_AT + OUT;
    // Steps in k of a round, which the loop unrolls.
    static constexpr int U = TWICE ? 2 * TS / G : NB / MB > TS / G ? NB / MB : TS / G;
    static constexpr bool SCALED = ENDING != RESIDUAL, TWO_ROWS = false;
    static constexpr int CLUSTER = PAIR ? 2 : 1, ITEM_GROUPS = GROUPS;
    static constexpr int BATCH = NB >= 8 ? 1 : 4;  // octets of the residual that are asked for together
    static_assert(SHARED <= SHARED_MEMORY_HERE / CTAS - (CTAS - 1) * 1024, "");
    static_assert(STAGES >= (SPLIT && !PAIR ? 4 : 2) && (!TWICE || U * G % (2 * TS) == 0), "");
    static_assert(TS % G == 0 && U * G % TS == 0 && U * MB % NB == 0, "");
};

// Row tiles lie in the SMs' streams, as the decoding kernel reads them. Past the end: the last one again.
__device__ __forceinline__ const u8* row_tile_at(const Gemm& a, int tile) {
    return a.stream + __ldg(a.start + min(tile, a.row_tiles - 1));
}

// --- the warps that bring and take -----------------------------------------------------------------------------------

// Weights into the ring, or into L2 some chunks of 256 k ahead of the loads; CTAs with the same rows share the units
// out.
template <class C>
__device__ __forceinline__ void bring_w(const Gemm& a, const Span& s, u32 ring, const Barriers& at, int part) {
    constexpr int EACH = C::UNITS / C::W_WARPS, PIECE = C::TS * C::TILE_BYTES, CHUNK_BYTES = 8 * C::TILE_BYTES;
    const int lane = threadIdx.x % 32, unit = part * EACH + lane;
    const Work<C> work(a, s);
    int ahead_tile = work.first, ahead_chunk = 0;
    const u8* ahead = nullptr;
    const auto ask = [&] {
        if (ahead_tile >= work.tiles) return;
        if (lane < EACH && unit % work.token_tiles == work.token(ahead_tile) % C::UNITS) {
            if (ahead_chunk == 0) ahead = row_tile_at(a, work.row(ahead_tile) * C::UNITS + unit);
            prefetch_bulk(ahead + ahead_chunk * CHUNK_BYTES, CHUNK_BYTES);
        }
        if (++ahead_chunk == a.k_tiles / 8) ahead_chunk = 0, ahead_tile += work.step;
    };
    // Few tokens: all of them, while the launch before still works.
    if (C::FROM == LDG || C::WGS == 1)
        for (int i = 0; i < (C::WGS == 1 ? a.k_tiles / 8 : 2); i++) ask();
    StagePlace place;
    for (int i = work.first; i < work.tiles; i += work.step) {
        const u8* from = C::FROM == RING && lane < EACH ? row_tile_at(a, work.row(i) * C::UNITS + unit) : nullptr;
        for (int stage = C::PAIR ? cta_rank() : 0; stage < a.k_tiles / C::TS; stage += C::PAIR ? 2 : 1) {
            wait_on(at.empty + place.slot * 8, place.parity ^ 1);
            const u32 to = ring + place.slot * C::STAGE_BYTES + C::X_BYTES, sign = at.full + place.slot * 8;
            if (C::FROM == RING) {
                if (lane == 0) expect_copies(sign, EACH * PIECE);
                __syncwarp();
                const int tile = stage * C::TS, values = C::TS * C::VALUES, scales = C::TS * C::SCALES_OF_TILE;
                const u8* chunk = from + (u64)(tile / 8) * CHUNK_BYTES;
                copy_pieces<EACH>(to + unit * PIECE, chunk + tile % 8 * C::VALUES, values, sign);
                if (scales)
                    copy_pieces<EACH>(to + unit * PIECE + values,
                                      chunk + 8 * C::VALUES + tile % 8 * C::SCALES_OF_TILE, scales, sign);
                copies_asked_for(sign);
            } else {
                if (lane == 0) barrier_arrive(sign);
                if (stage * C::TS % 8 == 0) ask();
            }
            __syncwarp();
            place.step<C::STAGES>();
        }
    }
}

// Results from shared memory to where they lie.
template <class C>
__device__ __forceinline__ void send(const Gemm& a, const Span& s, u32 out, const Barriers& at) {
    constexpr int EACH = C::GROUPS / C::WGS;  // groups of a warpgroup
    const int lane = threadIdx.x % 32;
    const Work<C> work(a, s);
    u32 parity = 0;
    wait_for_previous();
    for (int i = work.first; i < work.tiles; i += work.step, parity ^= 1) {
        const int octet = work.token(i) * (C::N / 8), octets = min(C::N / 8, s.octets - octet);
#pragma unroll
        for (int g = 0; g < C::WGS; g++) {
            wait_on(at.leave + g * 16, parity);
            if (lane < EACH) {
                const int group = work.row(i) * C::GROUPS + g * EACH + lane;
                if (group < a.row_groups)
                    copy_out(group_at<C>(a, s, group) + (u64)(s.first + octet) * 512,
                             out + (g * EACH + lane) * C::OUT_GROUP, octets * 512);
                copied_out();
            }
            __syncwarp();
            if (arrives()) barrier_arrive(at.leave + g * 16 + 8);
        }
    }
}

// --- the consumers ---------------------------------------------------------------------------------------------------

template <class C>
__device__ __forceinline__ void consume(const Gemm& a, const Span& s, u32 base, const Barriers& at) {
    constexpr int N = C::N, MB = C::MB, G = C::G, NB = C::NB, TS = C::TS, HALVES = C::NARROW_UNITS ? 2 : 1;
    constexpr int GS = TS / G, U = C::U, S = U * MB;  // steps in k of a stage, of a round; steps of a round
    constexpr int TURNS = C::SPLIT ? 2 : 1, ROUND = U * G * TURNS * C::TILE_BYTES;  // bytes of a unit
    const u32 ring = base + C::RING_AT, thread = threadIdx.x % 128, lane = thread % 32;
    const u32 group = C::PAIR ? cta_rank() : __shfl_sync(~0u, threadIdx.x / 128, 0),
              warp = __shfl_sync(~0u, thread / 32, 0);
    const Work<C> work(a, s);
    const int steps = a.k_tiles / G / TURNS;

    float acc[C::SETS][N / 2];
    u32 w[NB][G * C::REGISTERS];

    // LDG: where this warp's weights are: of the tile that is loaded, and of the next.
    const u8 *from[HALVES], *next[HALVES];
    const auto find = [&](const u8*(&to)[HALVES], int tile) {
        const int unit16 = (C::SPLIT ? 0 : group * 4) + warp, row = work.row(tile < work.tiles ? tile : work.first);
#pragma unroll
        for (int h = 0; h < HALVES; h++)
            to[h] = row_tile_at(a, row * C::UNITS + unit16 * HALVES + h) + lane * 16 +
                    (C::SPLIT ? group * TS * C::TILE_BYTES : 0);
    };
    int rounds_left = steps / U;                               // until the loads come to the next tile
    StagePlace loading;                                        // RING: the stage that is loaded from
    const auto load = [&](u32(&to)[G* C::REGISTERS], int v) {  // what step v of a round multiplies
        const int u = v / MB, b = v % MB, in_stage = u % GS;
        if constexpr (C::FROM == RING) {
            if (in_stage == 0 && b == 0) wait_on(at.full + loading.slot * 8, loading.parity);
            const u32 unit16 = ((C::PAIR ? 0 : group * 4) + warp) * MB + b,
                      units = ring + loading.slot * C::STAGE_BYTES + C::X_BYTES +
                              (C::Weights::SCALED ? 0 : lane * 16);  // where a lane's part begins
#pragma unroll
            for (int i = 0; i < G; i++) {
                const u32 tile = in_stage * G + i;
                if constexpr (C::Weights::SCALED) {
                    constexpr u32 UNIT = TS * C::TILE_BYTES;
                    const u32 unit = units + unit16 * HALVES * UNIT;
                    load_scaled<typename C::Weights, C::NARROW_UNITS>(to + i * C::REGISTERS, unit + tile * C::VALUES,
                                                                      unit + TS * C::VALUES + tile * C::SCALES_OF_TILE,
                                                                      UNIT);
                } else {
                    C::Weights::template load<C::NARROW_UNITS>(
                        to + i * C::REGISTERS, [&](u32* d, u32 offset, int half) {
                            const u32 unit = unit16 * HALVES + half;
                            load_shared_words(d, units + (unit * TS + tile) * C::TILE_BYTES + offset);
                        });
                }
            }
            if (in_stage == GS - 1 && b == MB - 1) loading.template step<C::STAGES>();
        } else {
            const int tile = u / GS * TURNS * TS + in_stage * G;
#pragma unroll
            for (int i = 0; i < G; i++)
                C::Weights::template load<C::NARROW_UNITS>(to + i * C::REGISTERS, [&](u32* d, u32 offset, int half) {
                    load_once16(d, from[half] + (tile + i) * C::TILE_BYTES + offset);
                });
            if (v == S - 1) {
                const bool wrap = --rounds_left == 0;
                if (wrap) rounds_left = steps / U;
#pragma unroll
                for (int h = 0; h < HALVES; h++) from[h] = wrap ? next[h] : from[h] + ROUND;
            }
        }
    };
    if constexpr (C::FROM == LDG) find(from, work.first);
#pragma unroll
    for (int v = 0; v < NB - 1; v++) load(w[v], v);

    StagePlace place;
    if (C::SPLIT && !C::PAIR) place.step<C::STAGES>(group);
    StagePlace scaled;
    u32 turn = 0;
    for (int t = work.first; t < work.tiles; t += work.step, turn ^= 1) {
        const int octet = work.token(t) * (N / 8), octets = min(N / 8, s.octets - octet);
        float4 early[C::SPLIT ? C::HALF : 1];
        if constexpr (C::SPLIT) {
            wait_for_previous();
            const float4* residual = residual_at(a, s, work.row(t), octet + group * C::HALF);
#pragma unroll
            for (int n = 0; n < C::HALF; n++)
                if (group * C::HALF + n < octets) early[n] = residual[n * 64];
        }
        u32 before = 0;
        const auto release = [&] { release_stage<C>(at.empty + before * 8); };
        for (int k0 = 0; k0 < steps; k0 += U) {
#pragma unroll
            for (int v = 0; v < S; v++) {
                const int u = v / MB, b = v % MB;
                if (u % GS == 0 && b == 0 && C::FROM != RING) wait_on(at.full + place.slot * 8, place.parity);
                const u32 x = ring + place.slot * C::STAGE_BYTES + u % GS * (G * N * 64);
                products_begin();
#pragma unroll
                for (int k = 0; k < 2 * G; k++)
                    multiply_tile<N>(acc[C::TWICE ? u / GS % 2 : b], w[v % NB] + k * 4,
                                     x + k / 2 * (N * 64) + k % 2 * 256,
                                     k > 0 || (C::TWICE ? u % GS > 0 || u >= 2 * GS : v >= MB) || k0 > 0);
                products_queued();
                if (C::FROM == LDG && v == 0 && k0 == 0) find(next, t + work.step);
                // The step before has ended: its operand's registers are free, and its stage if this is the next.
                products_done<1>();
                if (u % GS == 0 && b == 0 && (v > 0 || k0 > 0)) release();
                if (u % GS == GS - 1 && b == MB - 1)
                    before = place.slot, place.template step<C::STAGES>(C::PAIR ? 1 : TURNS);
                // Nothing comes into the ring after the last tile. From L2 some steps are loaded in vain then: without
                // those loads (behind a branch) the whole loop is 5% slower.
                if (C::FROM != RING || v + NB - 1 < S || k0 + U < steps || t + work.step < work.tiles)
                    load(w[(v + NB - 1) % NB], (v + NB - 1) % S);
            }
        }
        products_done<0>();
#pragma unroll
        for (int b = 0; b < C::SETS; b++) settle(acc[b]);
        release();

        const bool odd = lane & 4;
        const u32 piece = lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2;  // of a tile: which rows, which token
        if constexpr (C::ENDING != RESIDUAL) {
            while (!barrier_done(at.scales + scaled.slot * 16, scaled.parity)) {
            }
            const u32 scales = base + C::SCALES_AT + (scaled.slot * N + lane % 4 * 2) * 4;
            // Results of 16 rows and eight tokens: two words of neighbouring rows, or one where gate and up make one.
            const auto finish = [&](const float* d, int n, u32& low, u32& high) {
                const float2 scale = load_shared_float2(scales + n * 32);
                const float x[4] = {d[0] * scale.x, d[1] * scale.y, d[2] * scale.x, d[3] * scale.y};
                if constexpr (C::ENDING == SILU) {
                    low = pack_bf16_pair(trade_rows(gated(x[0], x[2]), gated(x[1], x[3]), odd));
                } else {
                    low = pack_bf16_pair(trade_rows(x[0], x[1], odd)),
                    high = pack_bf16_pair(trade_rows(x[2], x[3], odd));
                }
            };
            // Gates: rows g and g + 8 of a block of 16, two tokens.
            const auto keep_gates = [&](const float* d, int row) {
                float* to = a.gates + (s.first + octet) * 8 + lane % 4 * 2;
#pragma unroll
                for (int n = 0; n < N / 8; n++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const float2 scale = load_shared_float2(scales + n * 32);
                        if (n < octets && row + i * 8 < a.gate_rows)
                            *(float2*)(to + (u64)(row + i * 8) * s.capacity * 8 + n * 8) = {
                                d[n * 4 + i * 2] * scale.x, d[n * 4 + i * 2 + 1] * scale.y};
                    }
            };
            if constexpr (MB == 2) {
                wait_for_previous();
                const u32 unit32 = group * 4 + warp;
                const int rows = work.row(t) * C::GROUPS + (C::ENDING == SILU ? unit32 / 2 : unit32);
                if (rows < a.row_groups) {
                    u8* to = group_at<C>(a, s, rows) + (u64)(s.first + octet) * 512 + piece * 16 +
                             (C::ENDING == SILU ? unit32 % 2 * 8 : 0);
#pragma unroll
                    for (int n = 0; n < N / 8; n++) {
                        uint4 v;
                        finish(acc[0] + n * 4, n, v.x, v.y);
                        if constexpr (C::ENDING == SILU) {
                            finish(acc[1] + n * 4, n, v.y, v.z);
                            if (n < octets) *(uint2*)(to + n * 512) = {v.x, v.y};
                        } else {
                            finish(acc[1] + n * 4, n, v.z, v.w);
                            if (n < octets) *(uint4*)(to + n * 512) = v;
                        }
                    }
                } else if (C::ENDING == PLAIN) {
#pragma unroll
                    for (int b = 0; b < 2; b++) keep_gates(acc[b], (rows - a.row_groups) * 32 + b * 16 + lane / 4);
                }
            } else if constexpr (!C::SENDS) {
                wait_for_previous();
                constexpr u32 TOGETHER = C::ENDING == SILU ? 4 : 2;  // units that make a group of 32 rows
                const u32 unit = group * 4 + warp;
                const int rows = work.row(t) * C::GROUPS + unit / TOGETHER;
                if (rows < a.row_groups) {
                    u8* to = group_at<C>(a, s, rows) + (u64)(s.first + octet) * 512 + piece * 16 +
                             unit % TOGETHER * (16 / TOGETHER);
#pragma unroll
                    for (int n = 0; n < N / 8; n++) {
                        uint2 v;
                        finish(acc[0] + n * 4, n, v.x, v.y);
                        if (n >= octets) continue;
                        if constexpr (C::ENDING == SILU)
                            *(u32*)(to + n * 512) = v.x;
                        else
                            *(uint2*)(to + n * 512) = v;
                    }
                } else if (C::ENDING == PLAIN) {
                    keep_gates(acc[0], (rows - a.row_groups) * 32 + unit % TOGETHER * 16 + lane / 4);
                }
            } else {
                const u32 to = base + C::OUT_AT +
                               (C::ENDING == SILU ? group * C::OUT_GROUP + warp * 4
                                                  : (group * 2 + warp / 2) * C::OUT_GROUP + warp % 2 * 8) +
                               piece * 16;
                wait_on(at.leave + group * 16 + 8, turn ^ 1);  // the last tile's results have left
                if (C::ENDING == PLAIN) {
                    const int row = work.row(t) * C::ROWS + (group * 4 + warp) * 16 - a.row_groups * 32;
                    if (row >= 0) wait_for_previous(), keep_gates(acc[0], row + lane / 4);
                }
#pragma unroll
                for (int n = 0; n < N / 8; n++) {
                    u32 low, high;
                    finish(acc[0] + n * 4, n, low, high);
                    if constexpr (C::ENDING == SILU)
                        store_shared(to + n * 512, low);
                    else
                        store_shared(to + n * 512, uint2{low, high});
                }
                show_to_copies();
                __syncwarp();
                if (arrives()) barrier_arrive(at.leave + group * 16);
            }
            if (arrives()) barrier_arrive(at.scales + scaled.slot * 16 + 8);
            scaled.step<2>();
        } else {
            if constexpr (C::TWICE) {
#pragma unroll
                for (int i = 0; i < N / 2; i++) acc[0][i] += acc[1][i];
                end_tile<C>(a, s, base, acc[0], work.row(t) * 2 + group, octet, octets);
            } else {
                end_split_tile<C>(a, s, base, acc[0], early, work.row(t), octet, octets, at.leave, group);
            }
        }
    }
}

// Where tokens are few the weights are all there is to wait for: SMs without a tile have them brought into L2.
template <class C>
__device__ __forceinline__ void ask_for_all(const Gemm& a, int helper, int helpers) {
    for (int unit = helper; unit < a.row_tiles; unit += helpers) {
        const u8* at = row_tile_at(a, unit);
        for (int i = threadIdx.x * 128; i < a.k_tiles * C::TILE_BYTES; i += C::THREADS * 128) prefetch(at + i);
    }
}

// The residual stream of a tile's rows and tokens and the next norm's weight, into L2 before they are needed.
template <class C>
__device__ __forceinline__ void ask_for_residual(const Gemm& a, const Span& s) {
    const Work<C> work(a, s);
    const int lane = threadIdx.x % 32;
    if (lane >= C::GROUPS) return;
    prefetch(a.norm + (work.row(work.first) * C::GROUPS + lane) * 32);
    wait_for_previous();
    for (int i = work.first; i < work.tiles; i += work.step) {
        const int octet = work.token(i) * (C::N / 8), octets = min(C::N / 8, s.octets - octet);
        const u64 at = (u64)(work.row(i) * C::GROUPS + lane) * s.capacity + s.first + octet;
        prefetch_bulk((const u8*)a.residual + at * 1024, octets * 1024);
    }
}

template <class C>
__device__ __forceinline__ void multiply(const Gemm& a, const Span& s) {
    let_next_start();
    const int busy = Work<C>(a, s).tiles;
    if (!C::PAIR && (int)blockIdx.x >= busy) {
        ask_for_all<C>(a, blockIdx.x - busy, gridDim.x - busy);
        return;
    }
    extern __shared__ __align__(1024) u8 memory[];
    const u32 base = shared_address(memory), ring = base + C::RING_AT;
    const Barriers at = {base, base + C::STAGES * 8, base + 512, base + 768};
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::STAGES; i++) {
            barrier_init(at.full + i * 8, COPIERS + C::W_WARPS * (C::FROM == RING ? COPIERS : 1));
            barrier_init(at.empty + i * 8, (C::SPLIT ? 4 : 4 * C::WGS) * ARRIVALS);
        }
        for (int i = 0; i < 2; i++) {
            barrier_init(at.leave + i * 16, 4 * ARRIVALS), barrier_init(at.leave + i * 16 + 8, ARRIVALS);
            barrier_init(at.scales + i * 16, ARRIVALS);
            barrier_init(at.scales + i * 16 + 8, 4 * C::WGS * ARRIVALS);
        }
        show_barriers();
    }
    if (C::PAIR)
        sync_cluster();
    else
        __syncthreads();
    if (threadIdx.x >= C::WGS * 128) {
        leave_registers<40>();
        const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0) - 4 * C::WGS;
        if (warp == 0) {
            bring_x<C>(a, s, ring, at);
        } else if (warp == (C::W_WARPS == 2 ? 1 : 3)) {
            if (C::SCALED) bring_scales<C>(a, s, base + C::SCALES_AT, at);
        } else if (warp == 1) {
            if (C::SENDS) send<C>(a, s, base + C::OUT_AT, at);
            if (C::TWICE || C::PAIR) ask_for_residual<C>(a, s);
        } else {
            bring_w<C>(a, s, ring, at, warp - 2);
        }
    } else {
        take_registers<C::CONSUMER_REGISTERS>();
        consume<C>(a, s, base, at);
    }
    // Each has waited for what the other one stores into it, but racecheck wants to see both end together.
    if (C::PAIR && ARRIVALS > 1) leave_cluster();
}
