// Projections back to the residual stream: units of 8 rows.
//
// Who has a unit has those 8 rows of the residual stream. A tree goes octet by octet and chain by chain (see shape.cuh): as soon
// as an octet is summed its new rows are published, while the next one is multiplied.
#pragma once
#include "matmul.cuh"

// The scales of DeltaNet outputs, 1 / rms of a head: from the sums of squares of its blocks. A chain of chunks is one
// head's or lies inside one. For HEADS_HERE heads, each by two of a token's four lanes.
template <int HEADS_HERE>
struct HeadScales {
    static_assert(BLOCKS_PER_HEAD == 8, "two groups of four words a head");
    static constexpr int EACH = (HEADS_HERE + 1) / 2;
    uint4 got[EACH];
    float inverse[EACH];

    // `sums` are the octet's, get(address) loads 16 bytes of them.
    template <class At, class Get>
    __device__ void load(const Block& b, bool scaled, At sums, int token, int head, Get get) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int h = min(head + min(i * 2 + ((b.lane & 3) >> 1), HEADS_HERE - 1), VALUE_HEADS - 1);  // past the end: zeros
            got[i] = scaled ? get(sums + token * square_stride(BLOCKS) + h * BLOCKS_PER_HEAD + (b.lane & 1) * 4) : uint4{};
        }
    }
    __device__ bool came() const {
        bool all = true;
#pragma unroll
        for (int i = 0; i < EACH; i++) all &= came4(got[i]);
        return all;
    }
    __device__ void finish(bool scaled) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const float4 v = floats(got[i]);
            float sum = (v.x + v.y) + (v.z + v.w);
            sum += __shfl_xor_sync(~0u, sum, 1);
            inverse[i] = scaled ? inverse_root(sum / STATE_DIM + EPS) : 1.0f;
        }
    }
    // for the two tokens whose sums this lane holds
    __device__ float2 at(int pair, int chain) const {
        const int source = pair * 8 + (chain & 1) * 2;
        return {__shfl_sync(~0u, inverse[chain >> 1], source), __shfl_sync(~0u, inverse[chain >> 1], source + 4)};
    }
};
struct NoScales {
    template <class At, class Get>
    __device__ void load(const Block&, bool, At, int, int, Get) {}
    __device__ bool came() const { return true; }
    __device__ void finish(bool) {}
    __device__ float2 at(int, int) const { return {1.0f, 1.0f}; }
};
template <bool SCALED, int HEADS_HERE>
struct ScalesOf {
    typedef HeadScales<HEADS_HERE> type;
};
template <int HEADS_HERE>
struct ScalesOf<false, HEADS_HERE> {
    typedef NoScales type;
};

// What a warp needs of one token for COUNT chunks: a lane has the first four k of its eight, or the last.
template <int COUNT, int K, bool SCALED>
__device__ __forceinline__ float2 multiply_one(Block& b, int type, const u32* w, const u32* from, const u32* squares, int block) {
    typename ScalesOf<SCALED, (COUNT + CHAIN - 1) / CHAIN>::type scales;
    constexpr int CHUNKS = chunks_of(K);
    const int q = b.lane & 3, k = (b.warp * CHUNKS + block) * 32 + q * 8;
    u32 x[COUNT][NARROW_WORDS];
    Watchdog dog;
    bool came;
    do {
        scales.load(b, squares, squares, 0, k / STATE_DIM, [](const u32* at) { return load16(at); });
        came = true;
#pragma unroll
        for (int c = 0; c < COUNT; c++) {
            const u32* at = from + chunk_place(CHUNKS, b.warp, block + c) * CHUNK_WORDS + q * 4 + (b.lane >> 4) * 2;
            const uint2 got = K % CHUNK_K == 0 || k + c * 32 < K ? load8(at) : uint2{};
            x[c][0] = got.x, x[c][1] = got.y;
        }
#pragma unroll
        for (int c = 0; c < COUNT; c++) came &= x[c][0] != NOT_YET;
        came &= scales.came();
        dog.check();
    } while (!everywhere(came));
    b.mark();
    scales.finish(squares);
    NarrowSums sums;
#pragma unroll
    for (int chain = 0; chain * CHAIN < COUNT; chain++)
        sums.add(type, w, chain, x + chain * CHAIN, smaller(CHAIN, COUNT - chain * CHAIN), q, scales.at(q & 1, chain));
    return sums.total(type);
}

// The same for an octet: from the shelf, a slot a chain, or from where it comes. A chain is multiplied while the next is on its way.
template <int COUNT, int K, bool SCALED>
struct OctetProduct {
    static constexpr int CHUNKS = chunks_of(K), CHAINS = (COUNT + CHAIN - 1) / CHAIN;
    typename ScalesOf<SCALED, CHAINS>::type scales;
    u32 x[CHAIN][NARROW_WORDS];

    __device__ static constexpr int chunks_here(int chain) { return smaller(CHAIN, COUNT - chain * CHAIN); }

    // A chain's values, and with the first the squares; get(address) loads 16 bytes. Whether all had come.
    template <class At, class Get>
    __device__ __forceinline__ bool load(const Block& b, int chain, At piece, At squares, bool scaled, int block, int first, Get get) {
        const int q = b.lane & 3, token = min(b.lane >> 2, b.nodes - 1 - first), start = b.warp * CHUNKS + block;
        bool came = true;
#pragma unroll
        for (int i = 0; i < CHAIN; i++) {
            const int c = chain * CHAIN + i;
            if (c >= COUNT) break;
            const bool live = K % CHUNK_K == 0 || (start + c) * 32 + q * 8 < K;
            const uint4 got = live ? get(piece + ((b.warp * chunks_here(chain) + i) * CHUNK_WORDS + token * 16 + q * 4)) : uint4{};
            x[i][0] = got.x, x[i][1] = got.y, x[i][NARROW_WORDS - 2] = got.z, x[i][NARROW_WORDS - 1] = got.w;
            came &= came8(got);
        }
        if (chain == 0) {
            scales.load(b, scaled, squares, token, start * 32 / STATE_DIM, get);
            came &= scales.came();
        }
        return everywhere(came);
    }
    __device__ __forceinline__ float2 multiply(Block& b, int type, const u32* w, const u32* from, const u32* squares, int block, int first) {
        const auto get_shared = [](SharedWords at) { return load_shared16(at.address); };
        const auto get_global = [](const u32* at) { return load16(at); };
        const int q = b.lane & 3;
        NarrowSums sums;
#pragma unroll
        for (int chain = 0; chain < CHAINS; chain++) {
            bool there = false;
            if constexpr (FETCHES) {
                b.shelf.wait(0);
                const SharedWords values = SharedWords{b.shelf.data(0)} + SHELF_SQUARE_WORDS;
                there = load(b, chain, values, values + -DeltaOutput::VALUES_AT, squares, block, first, get_shared);
                b.shelf.release(1, 0);
            }
            Watchdog dog;
            while (!there) {
                there = load(b, chain, from + (block + chain * CHAIN) * WARPS * CHUNK_WORDS, squares, squares, block, first, get_global);
                dog.check();
            }
            if (chain == 0) scales.finish(squares);
            if (first == 0 && chain == CHAINS - 1) b.mark();
            sums.add(type, w, chain, x, chunks_here(chain), q, scales.at(q, chain));
        }
        return sums.total(type);
    }
};

// A warp's partial sums of tokens `token` and the next; `part` counts warps and blocks of K.
__device__ __forceinline__ void put_sums(const Block& b, int part, int token, float2 sum) {
    float* own = b.scratch + ((part * NODES + token) * UNIT_STRIDE + (b.lane >> 2));
    if (NODES > 1 || (b.lane & 3) == 0) own[0] = sum.x;
    if (NODES > 1) own[UNIT_STRIDE] = sum.y;
}
// The total of PARTS, four rows of a token.
template <int PARTS>
__device__ __forceinline__ float4 total_of(const Block& b, int token, int half) {
    return sum_parts<PARTS>(b.scratch + (token * UNIT_STRIDE + half * 4), NODES * UNIT_STRIDE);
}

// What a projection makes of its sums: the new residual is kept; times the next norm's weight, in bf16, it is published with the
// sum of its squares; and it is stored as a feature if asked. Two lanes a token.
struct ToResidual {
    Turn turn;
    int values_at, squares_at;
    const float* next_norm;
    float* feature;

    __device__ __forceinline__ void finish(Block& b, int unit, int rows, int token, int half, bool live, float4 norm, float4 sum) const {
        float4* own = (float4*)b.s.residual[unit][token] + half;
        const float4 x = add(live ? *own : float4{}, sum);
        float square = fmaf(x.x, x.x, fmaf(x.y, x.y, fmaf(x.z, x.z, x.w * x.w)));
        square += __shfl_xor_sync(~0u, square, 1);
        if (!live) return;
        const int row = rows * NARROW + half * 4;
        *own = x;
        publish8(b.value<Residual>(turn, token, values_at, row), b.other(turn), pack_bf16(x.x * norm.x, x.y * norm.y),
                 pack_bf16(x.z * norm.z, x.w * norm.w));
        if (half == 0) publish4(b.square<Residual>(turn, token, squares_at, rows), b.other(turn), __float_as_uint(square));
        if (feature) *(float4*)(feature + (size_t)token * HIDDEN + row) = x;
    }
};

template <int COUNT, int K, bool SCALED>
__device__ __forceinline__ void multiply_block(Block& b, int type, const u32* from, const u32* squares, int index, int unit, int rows,
                                               float4 norm, const ToResidual& to) {
    typedef NarrowBlocks<K> Blocks;
    u32 w[narrow_registers(COUNT)];
    take_narrow<COUNT>(b, type, w);
    if (!FETCHES) b.sync();  // polling would hold up the loads of a warp that comes late
    const bool last = index == Blocks::COUNT - 1;
    const int part = index * WARPS + b.warp, half = b.lane & 1;
    const u32 turn = b.summed & 1;
    if (index == 0) barrier_wait(b.signs.read, turn ^ 1);  // the unit before
    if constexpr (NODES == 1) {
        put_sums(b, part, 0, multiply_one<COUNT, K, SCALED>(b, type, w, from, squares, index * Blocks::EACH));
        if (!last) return;
        arrive_for_warp(b.signs.sums);
        b.mark();
        if (b.warp != 0) return;
        barrier_wait(b.signs.sums, turn);
        b.mark();
        to.finish(b, unit, rows, 0, half, b.lane < 2, norm, total_of<Blocks::PARTS>(b, 0, half));
        arrive_for_warp(b.signs.read);
    } else {
#pragma unroll 1
        for (int first = 0, step = 0; first < b.nodes; first += 8, step++) {
            OctetProduct<COUNT, K, SCALED> product;
            const int at = first / 8 * OCTET_WORDS;
            put_sums(b, part, first + (b.lane & 3) * 2,
                     product.multiply(b, type, w, from + at, squares ? squares + at : nullptr, index * Blocks::EACH, first));
            if (!last) continue;
            arrive_for_warp(b.signs.sums + 8 * step);
            if (step == 0) b.mark();
            if (b.warp == step % WARPS) {
                barrier_wait(b.signs.sums + 8 * step, turn);
                if (step == 0) b.mark();
                const int mine = first + (b.lane >> 1 & 7), token = min(mine, b.nodes - 1);
                to.finish(b, unit, rows, token, half, b.lane < 16 && mine < b.nodes, norm, total_of<Blocks::PARTS>(b, token, half));
                arrive_for_warp(b.signs.read);
            }
        }
    }
}

// Stage: this SM's units. SCALED: if there are `squares`, the inputs are DeltaNet outputs before their head norm, whose 1 / rms
// multiplies the sums over a head.
template <int K, bool SCALED>
__device__ __forceinline__ void project_to_residual(Block& b, StageTypes types, const u32* from, const u32* squares, const ToResidual& to) {
    typedef NarrowBlocks<K> Blocks;
    static_assert(!SCALED || Blocks::CHUNKS % CHAIN == 0 || CHAIN % Blocks::CHUNKS == 0, "a chain of chunks must lie in one head");
    const OwnUnits own(b.sm);
    const int type = types.run<NARROW_TYPES>(0, 1).type;
    if (WIDE_BUFFERS == 1) b.sync();  // sums of the stage before may still be read
#pragma unroll 1
    for (int unit = 0; unit < own.count; unit++) {
        const float4 norm = __ldg((const float4*)(to.next_norm + (own.first + unit) * NARROW + (b.lane & 1) * 4));
#pragma unroll 1
        for (int index = 0; index < Blocks::CHUNKS / Blocks::EACH; index++)
            multiply_block<smaller(Blocks::EACH, Blocks::CHUNKS), K, SCALED>(b, type, from, squares, index, unit, own.first + unit, norm, to);
        if constexpr (Blocks::CHUNKS % Blocks::EACH != 0)
            multiply_block<Blocks::CHUNKS % Blocks::EACH, K, SCALED>(b, type, from, squares, Blocks::COUNT - 1, unit, own.first + unit, norm, to);
        b.summed++;
    }
}
