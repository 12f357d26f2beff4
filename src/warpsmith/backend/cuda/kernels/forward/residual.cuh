// Projections back to the residual stream: row tiles of 8 rows.
//
// Who has a row tile has those 8 rows of the residual stream. A tree goes node tile by node tile and chain by chain
// (see common/tiles.cuh): as soon as a node tile is summed its new rows are published, while the next one is
// multiplied.
#pragma once
#include "forward/matmul.cuh"

// The scales of DeltaNet outputs, 1 / rms of a head: from the sums of squares of its blocks. A chain of chunks is one
// head's or lies inside one. For HEADS_HERE heads, each by two of a token's four lanes.
template <int HEADS_HERE>
struct HeadScales {
    static_assert(BLOCKS_PER_HEAD == 8, "two groups of four words a head");
    static constexpr int EACH = (HEADS_HERE + 1) / 2;
    uint4 got[EACH];
    float inverse[EACH];

    // `sums` are the node tile's.
    __device__ void load(const Block& b, bool scaled, const u32* sums, int token, int head) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int h =
                min(head + min(i * 2 + ((b.lane & 3) >> 1), HEADS_HERE - 1), VALUE_HEADS - 1);  // past the end: zeros
            got[i] = scaled ? load16(sums + token * square_stride(BLOCKS) + h * BLOCKS_PER_HEAD + (b.lane & 1) * 4)
                            : uint4{};
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
            inverse[i] = scaled ? inverse_root(fmaf(sum, 1.0f / STATE_DIM, EPS)) : 1.0f;
        }
    }
    // for the two tokens whose sums this lane holds
    __device__ float2 at(int pair, int chain) const {
        const int source = pair * 8 + (chain & 1) * 2;
        return {__shfl_sync(~0u, inverse[chain >> 1], source), __shfl_sync(~0u, inverse[chain >> 1], source + 4)};
    }
};
struct NoScales {
    __device__ void load(const Block&, bool, const u32*, int, int) {}
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
__device__ __forceinline__ float2 multiply_one(Block& b, int format, const u32* w, const u32* from, const u32* squares,
                                               int block) {
    typename ScalesOf<SCALED, (COUNT + CHAIN - 1) / CHAIN>::type scales;
    constexpr int CHUNKS = chunks_of(K);
    const int q = b.lane & 3, k = (b.warp * CHUNKS + block) * 32 + q * 8;
    u32 x[COUNT][NARROW_WORDS];
    Watchdog dog;
    bool came;
    do {
        scales.load(b, squares, squares, 0, k / STATE_DIM);
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
        sums.add(format, w, chain, x + chain * CHAIN, smaller(CHAIN, COUNT - chain * CHAIN), q,
                 scales.at(q & 1, chain));
    return sums.total(format);
}

// The same for node tiles of a tree. All chunks of a node tile are on their way at a time; as soon as a chain of them
// is multiplied, the next node tile's may come in its place.
template <int COUNT, int K, bool SCALED>
struct NodeTileProduct {
    static constexpr int CHUNKS = chunks_of(K), CHAINS = (COUNT + CHAIN - 1) / CHAIN;
    typename ScalesOf<SCALED, CHAINS>::type scales;
    u32 x[COUNT][NARROW_WORDS];
    const u32 *values, *squares;  // the first node tile's
    int block;                    // of K

    __device__ NodeTileProduct(const u32* from, const u32* sums, int first_chunk)
        : values(from), squares(sums), block(first_chunk) {}

    __device__ static constexpr int chunks_here(int chain) { return smaller(CHAIN, COUNT - chain * CHAIN); }

    // Whether a node tile has come, by its last node's sums of squares, or by a word of every chunk.
    __device__ __forceinline__ bool look(const Block& b, int first) const {
        const int node = min(7, b.nodes - 1 - first), start = b.warp * CHUNKS + block, at = first / 8 * NODE_TILE_WORDS;
        if (SCALED && squares) {
            constexpr int BLOCKS_HERE = COUNT * 32 / COLUMNS;
            const bool live = b.lane < BLOCKS_HERE && start * (32 / COLUMNS) + b.lane < BLOCKS;
            return everywhere(!live || load4(squares + at + node * square_stride(BLOCKS) + start * (32 / COLUMNS) +
                                             b.lane) != NOT_YET);
        }
        const bool live = b.lane < COUNT && (K % CHUNK_K == 0 || (start + b.lane) * 32 < K);
        return everywhere(!live || load4(values + at +
                                         chunk_place(CHUNKS, b.warp, block + min(b.lane, COUNT - 1)) * CHUNK_WORDS +
                                         node * 16 + 12) != NOT_YET);
    }
    __device__ __forceinline__ bool is_there(const Block& b, int first) const {
        return ::is_there(b, first, [&](int node_tile) { return look(b, node_tile); });
    }
    // Asks for a chain of a node tile, and with the first for the squares.
    __device__ __forceinline__ void ask(const Block& b, int chain, int first) {
        const int q = b.lane & 3, token = min(b.lane >> 2, b.nodes - 1 - first), start = b.warp * CHUNKS + block,
                  at = first / 8 * NODE_TILE_WORDS;
        static_assert(NarrowBlocks<K>::COUNT == 1 || NarrowBlocks<K>::EACH % CHAIN == 0, "chains are whole");
#pragma unroll
        for (int c = chain * CHAIN; c < chain * CHAIN + chunks_here(chain); c++) {
            const bool live = K % CHUNK_K == 0 || (start + c) * 32 + q * 8 < K;
            const u32* from = chunk_at<NarrowFormats>(values, at, CHUNKS, b.warp, block, c, token * 16 + q * 4);
            const uint4 got = live ? load16(from) : uint4{};
            x[c][0] = got.x, x[c][1] = got.y, x[c][NARROW_WORDS - 2] = got.z, x[c][NARROW_WORDS - 1] = got.w;
        }
        if (chain == 0) scales.load(b, squares, squares + at, token, start * 32 / STATE_DIM);
    }
    __device__ __forceinline__ void ask(const Block& b, int first) {
#pragma unroll
        for (int chain = 0; chain < CHAINS; chain++) ask(b, chain, first);
    }
    __device__ __forceinline__ void wait_and_ask(const Block& b, int first) {
        wait_until_there(b, first, [&](int node_tile) { return look(b, node_tile); });
        ask(b, first);
    }
    __device__ __forceinline__ bool came() const {
        bool all = scales.came();
#pragma unroll
        for (int c = 0; c < COUNT; c++) all &= x[c][0] != NOT_YET & x[c][NARROW_WORDS - 2] != NOT_YET;
        return everywhere(all);
    }
    // Multiplies the node tile that has come, and asks for the one that begins with node `next`, if there is one.
    __device__ __forceinline__ float2 multiply(const Block& b, int format, const u32* w, int next) {
        const int q = b.lane & 3;
        scales.finish(squares);
        NarrowSums sums;
#pragma unroll
        for (int chain = 0; chain < CHAINS; chain++) {
            sums.add(format, w, chain, x + chain * CHAIN, chunks_here(chain), q, scales.at(q, chain));
            if (next > 0) ask(b, chain, next);
        }
        return sums.total(format);
    }
};

// A warp's partial sums of tokens `token` and the next; `part` counts warps and blocks of K.
__device__ __forceinline__ void put_part(const Block& b, int part, int token, float2 sum) {
    float* own = b.scratch + (NARROW_AT + (part * NODES + token) * TILE_STRIDE + (b.lane >> 2));
    if (NODES > 1 || (b.lane & 3) == 0) own[0] = sum.x;
    if (NODES > 1) own[TILE_STRIDE] = sum.y;
}
// The total of PARTS, four rows of a token.
template <int PARTS>
__device__ __forceinline__ float4 total_of(const Block& b, int token, int half) {
    return sum_parts<PARTS>(b.scratch + (NARROW_AT + token * TILE_STRIDE + half * 4), NODES * TILE_STRIDE);
}

// What a projection makes of its sums: the new residual is kept; times the next norm's weight, in bf16, it is published
// with the sum of its squares; and it is stored as a feature if asked. Two lanes a token.
struct ToResidual {
    Phase phase;
    int values_at, squares_at;
    const float* next_norm;
    float* feature;

    __device__ __forceinline__ void finish(Block& b, int tile, int rows, int token, int half, bool live, float4 norm,
                                           float4 sum) const {
        float4* own = (float4*)b.s.residual[tile][token] + half;
        const float4 x = add(live ? *own : float4{}, sum);
        float square = fmaf(x.x, x.x, fmaf(x.y, x.y, fmaf(x.z, x.z, x.w * x.w)));
        square += __shfl_xor_sync(~0u, square, 1);
        if (!live) return;
        const int row = rows * NARROW + half * 4;
        *own = x;
        publish8(b.value<Residual>(phase, token, values_at, row), b.other(phase), pack_bf16(x.x * norm.x, x.y * norm.y),
                 pack_bf16(x.z * norm.z, x.w * norm.w));
        if (half == 0)
            publish4(b.square<Residual>(phase, token, squares_at, rows), b.other(phase), __float_as_uint(square));
        if (feature) *(float4*)(feature + (size_t)token * HIDDEN + row) = x;
    }
};

// A block of K of one row tile, as the registers hold it: whose sums these are, and what becomes of them when the last
// block is done.
template <int K>
struct NarrowTile {
    typedef NarrowBlocks<K> Blocks;
    int format;
    const u32 *from, *squares;  // the first node tile's
    int tile, rows;             // which of this SM's; which of all
    float4 norm;
    const ToResidual& to;

    // One node: the first warp finishes.
    template <int COUNT, bool SCALED>
    __device__ __forceinline__ void multiply_for_one(Block& b, const u32* w, int index, u32 phase) const {
        const int half = b.lane & 1;
        put_part(b, index * WARPS + b.warp, 0,
                 multiply_one<COUNT, K, SCALED>(b, format, w, from, squares, index * Blocks::EACH));
        if (index < Blocks::COUNT - 1) return;
        arrive_for_warp(b.barriers.sums);
        b.mark();
        if (b.warp != 0) return;
        barrier_wait(b.barriers.sums, phase);
        b.mark();
        to.finish(b, tile, rows, 0, half, b.lane < 2, norm, total_of<Blocks::PARTS>(b, 0, half));
        arrive_for_warp(b.barriers.read);
    }

    // A tree: one warp after the other finishes a node tile, while the others multiply the next.
    template <int COUNT, bool SCALED>
    __device__ __forceinline__ void multiply_for_tree(Block& b, const u32* w, int index, u32 phase) const {
        const bool last = index == Blocks::COUNT - 1;
        const int part = index * WARPS + b.warp, half = b.lane & 1;
        NodeTileProduct<COUNT, K, SCALED> product(from, squares, index * Blocks::EACH);
        if (LOOKS)
            product.wait_and_ask(b, 0);
        else
            product.ask(b, 0);
#pragma unroll 1
        for (int first = 0, step = 0; first < b.nodes; first += 8, step++) {
            const int next = first + 8 < b.nodes ? first + 8 : 0;
            Watchdog dog;
            while (!product.came()) {
                product.ask(b, first);
                dog.check();
            }
            if (step == 0) b.mark();
            const bool ready = next && product.is_there(b, next);
            put_part(b, part, first + (b.lane & 3) * 2, product.multiply(b, format, w, ready ? next : 0));
            if (last) arrive_for_warp(b.barriers.sums + 8 * step);
            if (step == 0) b.mark();
            if (last && b.warp == step % WARPS) {
                barrier_wait(b.barriers.sums + 8 * step, phase);
                if (step == 0) b.mark();
                const int mine = first + (b.lane >> 1 & 7), token = min(mine, b.nodes - 1);
                to.finish(b, tile, rows, token, half, b.lane < 16 && mine < b.nodes, norm,
                          total_of<Blocks::PARTS>(b, token, half));
                arrive_for_warp(b.barriers.read);
            }
            if (next && !ready) product.wait_and_ask(b, next);
        }
    }

    template <int COUNT, bool SCALED>
    __device__ __forceinline__ void multiply(Block& b, int index) const {
        u32 w[narrow_registers(COUNT)];
        take_narrow<COUNT>(b, format, w);
        if (index == 0) b.mark();
        if (!LOOKS) b.sync();  // polling would hold up the loads of a warp that comes late
        const u32 phase = b.phase(SUMS_PHASE);
        if (index == 0) barrier_wait(b.barriers.read, phase ^ 1);  // the row tile before
        if constexpr (NODES == 1)
            multiply_for_one<COUNT, SCALED>(b, w, index, phase);
        else
            multiply_for_tree<COUNT, SCALED>(b, w, index, phase);
    }
};

// Stage: this SM's row tiles. SCALED: if there are `squares`, the inputs are DeltaNet outputs before their head norm,
// whose 1 / rms multiplies the sums over a head.
template <int K, bool SCALED>
__device__ __forceinline__ void project_to_residual(Block& b, StageParts parts, const u32* from, const u32* squares,
                                                    const ToResidual& to) {
    typedef NarrowBlocks<K> Blocks;
    static_assert(!SCALED || Blocks::CHUNKS % CHAIN == 0 || CHAIN % Blocks::CHUNKS == 0,
                  "a chain of chunks must lie in one head");
    const OwnTiles own(b.sm);
    const int format = parts.run<NarrowFormats>(0, 1).format;
#pragma unroll 1
    for (int tile = 0; tile < own.count; tile++) {
        const int rows = own.first + tile;
        const float4 norm = __ldg((const float4*)(to.next_norm + rows * NARROW + (b.lane & 1) * 4));
        const NarrowTile<K> one = {format, from, squares, tile, rows, norm, to};
#pragma unroll 1
        for (int index = 0; index < Blocks::CHUNKS / Blocks::EACH; index++)
            one.template multiply<smaller(Blocks::EACH, Blocks::CHUNKS), SCALED>(b, index);
        if constexpr (Blocks::CHUNKS % Blocks::EACH != 0)
            one.template multiply<Blocks::CHUNKS % Blocks::EACH, SCALED>(b, Blocks::COUNT - 1);
        b.phases ^= SUMS_PHASE;
    }
    if (own.count) all_taken(b);
}
