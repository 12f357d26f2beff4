// Y[rows, tokens] = W[rows, K] X[K, tokens] over slabs: weights are widened to bf16 in registers, a product's register
// operand; activations are its shared-memory operand, a copy away from how they lie (common.cuh). Products are wgmma's
// on sm_90a, where they are queued, and mma.sync's elsewhere (async.cuh).
//
// A CTA: two warpgroups multiply, 64 rows each, a slab of 16 rows a warp; more warps bring activations (stages of 64
// k), weights (slots of 256 k of 128 rows, as they lie in the stream) and the tokens' scales. A step is 32 k: widen,
// fence, two products, commit, wait for the step before, whose registers and, if it ended one, stage are free then.
// Sums run along K in one order, whatever the number of tokens. A matrix may have parts of several types: a warpgroup's
// 64 rows are of one. Bytes: weights once for every tile of tokens, activations once for every tile of rows, mostly
// from L2. TWO_ROWS: two CTAs of a cluster have the same tokens and bring half of their activations each, for both:
// fewer bytes from L2 leave power for the tensor cores. The second warpgroup follows the first at a distance, so that
// one multiplies while the other ends a tile.
#pragma once
#include "prefill/product.cuh"
#include "prefill/slabs.cuh"

// N: tokens of a tile. STAGES: of activations. SLOTS: of weights. TYPES: a bit for each that a matrix may have.
template <int N_, int STAGES_, int SLOTS_, int ENDING_, int TYPES_, int CLUSTER_>
struct SlabConfig {
    static constexpr int N = N_, STAGES = STAGES_, SLOTS = SLOTS_, ENDING = ENDING_, TYPES = TYPES_, TS = 2, BATCH = 4;
    static constexpr bool SPLIT = false, PAIR = false, TWO_ROWS = CLUSTER_ == 2;
    static constexpr int ROWS = 128, GROUPS = ENDING == SILU ? 2 : 4;  // groups of 32 rows of results
    static constexpr int CLUSTER = CLUSTER_, ITEM_GROUPS = CLUSTER * GROUPS;
    static constexpr int DISTANCE = 2;  // stages between the warpgroups
    static_assert(DISTANCE < STAGES_ && DISTANCE <= 4, "");
    static constexpr int THREADS = 384, CONSUMER_REGISTERS = 232;
    static constexpr int X_BYTES = N * 64 * TS, STAGE_BYTES = X_BYTES;
    static __host__ __device__ constexpr bool has(int type) { return TYPES >> type & 1; }
    static __host__ __device__ constexpr int largest() {
        int most = 0;
        for (int type = 0; type < SLAB_TYPES; type++)
            if (has(type)) most = larger(most, 4 * slab_bytes(type));
        return most;
    }
    static constexpr int BLOCK_BYTES = largest(), SLOT_BYTES = 2 * BLOCK_BYTES;
    static constexpr int BARRIERS = 1024, SCALES = ENDING == RESIDUAL ? 0 : 2 * N * 4;
    static constexpr int SCALES_AT = BARRIERS, RING_AT = BARRIERS + (SCALES + 127) / 128 * 128,
                         SLABS_AT = RING_AT + STAGES * STAGE_BYTES, SUMS_AT = SLABS_AT + SLOTS * SLOT_BYTES;
    static constexpr int HALF = 0, SUMS = 0, PARTIAL_SQUARES = ENDING == RESIDUAL ? 2 * N * 16 : 0,
                         SHARED = SUMS_AT + PARTIAL_SQUARES;
    static_assert(SHARED <= SHARED_MEMORY_HERE && STAGES <= 16 && SLOTS <= 16, "");
};

struct SlabBarriers {
    u32 full, empty;  // [SLOTS]
};

// A row tile's number, and its type; past the end: the last one again.
__device__ __forceinline__ int row_tile(const Gemm& a, int tile) { return min(tile, a.row_tiles - 1); }
__device__ __forceinline__ int type_of(const Gemm& a, int tile) {
    return a.types >> (tile < a.second ? 0 : tile < a.third ? 8 : 16) & 255;
}
__device__ __forceinline__ u32 block_bytes(int type) { return 4 * slab_bytes(type); }

template <class C>
__device__ __forceinline__ void bring_slabs(const Gemm& a, const Span& s, u32 slabs, const SlabBarriers& at) {
    const int lane = threadIdx.x % 32, blocks = a.k_tiles / 8;
    const Work<C> work(a, s);
    StagePlace place;
    for (int i = work.first; i < work.tiles; i += work.step) {
        const int tile = row_tile(a, work.row(i) * 2 + lane % 2);  // a lane a warpgroup
        const u32 bytes = block_bytes(type_of(a, tile)), both = bytes + __shfl_xor_sync(~0u, bytes, 1);
        const u64* from = a.start + (size_t)tile * blocks;
        u64 next = __ldg(from);
        for (int block = 0; block < blocks; block++) {
            const u8* here = a.stream + next;
            next = __ldg(from + min(block + 1, blocks - 1));
            wait_on(at.empty + place.slot * 8, place.parity ^ 1);
            const u32 sign = at.full + place.slot * 8;
            if (lane == 0) expect_copies(sign, both);
            __syncwarp();
            copy_pieces<2>(slabs + place.slot * C::SLOT_BYTES + lane * C::BLOCK_BYTES, here, bytes, sign);
            copies_asked_for(sign);
            __syncwarp();
            place.step<C::SLOTS>();
        }
    }
}

// --- the consumers ---------------------------------------------------------------------------------------------------

// Where a warp is in both rings.
struct SlabPlace {
    StagePlace stage, slot;
    u32 before;  // the stage of the last step
};

template <class C, int T, class Weights>
__device__ __forceinline__ void multiply_slab_tile(float (&acc)[C::N / 2], Weights& weights, u32 (&w)[2][8],
                                                   SlabPlace& place, u32 ring, const Barriers& at, bool begun,
                                                   bool lead) {
    weights.template tile<T>();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (half == 0) {
            weights.template operand<T, 0>(w[0]), weights.template operand<T, 1>(w[0] + 4);
            wait_on(at.full + place.stage.slot * 8, place.stage.parity);
        } else {
            weights.template operand<T, 2>(w[1]), weights.template operand<T, 3>(w[1] + 4);
        }
        const u32 x = ring + place.stage.slot * C::STAGE_BYTES + half * (C::N * 64);
        products_begin();
        multiply_tile<C::N>(acc, w[half], x, T > 0 || half > 0 || begun);
        multiply_tile<C::N>(acc, w[half] + 4, x + 256, true);
        products_queued();
        products_done<1>();
        if (half == 0 && (T > 0 || begun)) release_stage<C>(at.empty + place.before * 8);
    }
    if (T == C::DISTANCE - 1 && lead) arrive_some<256>(4);
    place.before = place.stage.slot;
    place.stage.template step<C::STAGES>();
}

template <class C, int TYPE>
__device__ __forceinline__ void multiply_slabs(float (&acc)[C::N / 2], SlabPlace& place, u32 base, const Barriers& at,
                                               const SlabBarriers& slabs_at, int blocks, u32 group, u32 warp, int lane,
                                               bool first) {
    SlabWeights<TYPE> weights;
    u32 w[2][8];
    const u32 ring = base + C::RING_AT, mine = base + C::SLABS_AT + group * C::BLOCK_BYTES + warp * slab_bytes(TYPE);
#pragma unroll 1
    for (int block = 0; block < blocks; block++) {
        wait_on(slabs_at.full + place.slot.slot * 8, place.slot.parity);
        weights.load(mine + place.slot.slot * C::SLOT_BYTES, lane);
        const bool lead = first && group == 0 && block == 0;
        multiply_slab_tile<C, 0>(acc, weights, w, place, ring, at, block > 0, lead);
        multiply_slab_tile<C, 1>(acc, weights, w, place, ring, at, true, lead);
        multiply_slab_tile<C, 2>(acc, weights, w, place, ring, at, true, lead);
        multiply_slab_tile<C, 3>(acc, weights, w, place, ring, at, true, lead);
        if (arrives()) barrier_arrive(slabs_at.empty + place.slot.slot * 8);  // all of it has been in a product
        place.slot.template step<C::SLOTS>();
    }
    products_done<0>();
    settle(acc);
    release_stage<C>(at.empty + place.before * 8);
}

template <class C>
__device__ __forceinline__ void consume_slabs(const Gemm& a, const Span& s, u32 base, const Barriers& at,
                                              const SlabBarriers& slabs_at) {
    constexpr int N = C::N;
    const u32 lane = threadIdx.x % 32, group = __shfl_sync(~0u, threadIdx.x / 128, 0),
              warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
    const Work<C> work(a, s);
    const int blocks = a.k_tiles / 8;
    SlabPlace place = {};
    StagePlace scaled;
    float acc[N / 2];
    if (group == 1) sync_some<256>(4);
    for (int t = work.first; t < work.tiles; t += work.step) {
        const int octet = work.token(t) * (N / 8), octets = min(N / 8, s.octets - octet);
        const int tile = work.row(t) * 2 + group, type = type_of(a, row_tile(a, tile));
        if (C::has(SLAB_Q4_K) && type == SLAB_Q4_K)
            multiply_slabs<C, SLAB_Q4_K>(acc, place, base, at, slabs_at, blocks, group, warp, lane, t == work.first);
        if (C::has(SLAB_Q5_K) && type == SLAB_Q5_K)
            multiply_slabs<C, SLAB_Q5_K>(acc, place, base, at, slabs_at, blocks, group, warp, lane, t == work.first);
        if (C::has(SLAB_Q6_K) && type == SLAB_Q6_K)
            multiply_slabs<C, SLAB_Q6_K>(acc, place, base, at, slabs_at, blocks, group, warp, lane, t == work.first);
        if (C::has(SLAB_Q8_0) && type == SLAB_Q8_0)
            multiply_slabs<C, SLAB_Q8_0>(acc, place, base, at, slabs_at, blocks, group, warp, lane, t == work.first);
        if (C::has(SLAB_HALF) && type == SLAB_HALF)
            multiply_slabs<C, SLAB_HALF>(acc, place, base, at, slabs_at, blocks, group, warp, lane, t == work.first);

        const bool odd = lane & 4;
        const u32 piece = lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2;  // of a tile: which rows, which token
        if constexpr (C::ENDING == RESIDUAL) {
            end_tile<C>(a, s, base, acc, tile, octet, octets);
        } else {
            while (!barrier_done(at.scales + scaled.slot * 16, scaled.parity)) {
            }
            wait_for_previous();
            const u32 scales = base + C::SCALES_AT + (scaled.slot * N + lane % 4 * 2) * 4;
            const int row = (C::ENDING == SILU ? 0 : tile * 64 + (int)warp * 16 - a.row_groups * 32) + (int)lane / 4;
            u8* to = a.out + (u64)(s.first + octet) * 512 + piece * 16;
            if (C::ENDING == SILU)
                to += (u64)(tile / 2 * 2 + warp % 2) * s.capacity * 512 + (tile % 2 * 2 + warp / 2) * 4;
            else
                to += (u64)(tile * 2 + warp / 2) * s.capacity * 512 + warp % 2 * 8;
            const bool rows_here = C::ENDING == SILU ? tile < a.row_groups : row < 0;
#pragma unroll
            for (int n = 0; n < N / 8; n++) {
                const float2 scale = load_shared_float2(scales + n * 32);
                const float* d = acc + n * 4;
                const float x[4] = {d[0] * scale.x, d[1] * scale.y, d[2] * scale.x, d[3] * scale.y};
                if constexpr (C::ENDING == SILU) {
                    const u32 pair = pack_bf16_pair(trade_rows(gated(x[0], x[2]), gated(x[1], x[3]), odd));
                    if (n < octets && rows_here) *(u32*)(to + n * 512) = pair;
                } else if constexpr (C::ENDING == PLAIN) {
                    const uint2 pairs = {pack_bf16_pair(trade_rows(x[0], x[1], odd)),
                                         pack_bf16_pair(trade_rows(x[2], x[3], odd))};
                    if (n < octets && rows_here) *(uint2*)(to + n * 512) = pairs;
                    if (n < octets && !rows_here) {  // gates: rows g and g + 8, two tokens
                        float* gates = a.gates + (s.first + octet + n) * 8 + lane % 4 * 2;
#pragma unroll
                        for (int i = 0; i < 2; i++)
                            if (row + i * 8 < a.gate_rows)
                                *(float2*)(gates + (u64)(row + i * 8) * s.capacity * 8) = {x[2 * i], x[2 * i + 1]};
                    }
                } else {
                    const int first = (s.first + octet + n) * 8 + (int)lane % 4 * 2 - a.first_token;
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int token = first + i % 2, logit = tile * 64 + (int)warp * 16 + (int)lane / 4 + i / 2 * 8;
                        if (token >= 0 && token < a.tokens && logit < VOCAB)
                            a.logits[(size_t)token * VOCAB + logit] = x[i];
                    }
                }
            }
            if (arrives()) barrier_arrive(at.scales + scaled.slot * 16 + 8);
            scaled.step<2>();
        }
    }
}

template <class C>
__device__ __forceinline__ void multiply_slab_matrix(const Gemm& a, const Span& s) {
    let_next_start();
    extern __shared__ __align__(1024) u8 memory[];
    const u32 base = shared_address(memory);
    const Barriers at = {base, base + 128, 0, base + 256};
    const SlabBarriers slabs_at = {base + 512, base + 640};
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::STAGES; i++)
            barrier_init(at.full + i * 8, COPIERS), barrier_init(at.empty + i * 8, 8 * C::CLUSTER * ARRIVALS);
        for (int i = 0; i < C::SLOTS; i++)
            barrier_init(slabs_at.full + i * 8, COPIERS), barrier_init(slabs_at.empty + i * 8, 8 * ARRIVALS);
        for (int i = 0; i < 2; i++)
            barrier_init(at.scales + i * 16, ARRIVALS), barrier_init(at.scales + i * 16 + 8, 8 * ARRIVALS);
        show_barriers();
    }
    if (C::TWO_ROWS)
        sync_cluster();
    else
        __syncthreads();
    if (threadIdx.x >= 256) {
        leave_registers<40>();
        const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0) - 8;
        if (warp == 0)
            bring_x<C>(a, s, base + C::RING_AT, at);
        else if (warp == 1)
            bring_slabs<C>(a, s, base + C::SLABS_AT, slabs_at);
        else if (warp == 2 && C::ENDING != RESIDUAL)
            bring_scales<C>(a, s, base + C::SCALES_AT, at);
    } else {
        take_registers<C::CONSUMER_REGISTERS>();
        consume_slabs<C>(a, s, base, at, slabs_at);
    }
    if (C::TWO_ROWS) leave_cluster();  // nobody writes to this one's memory any more
}
