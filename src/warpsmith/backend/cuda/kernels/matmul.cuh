// Matrix products: y = W x for 1..NODES tokens, one path for any number of them.
//
// Every warp owns a fixed slice of K (see shape.cuh), 32 k a chunk. A lane's part of the activations is 8 bf16 values of a
// token at k = 8 (l mod 4) .. + 7 of a chunk, as they come from the exchange. The products of the first four of these k and
// of the last four are summed apart, each inside an mma (16 x 8 x 16) over four chunks, then added up in a fixed order.
// Units of 16 rows: one mma for the first four k, one for the last four, 8 tokens (l / 4) in the columns.
// Units of 8 rows: a mma's upper 8 rows are the same rows at the last four k. For one token one mma does both: its columns
// 0 and 4 are the token at the first four k and at the last. For a tree it takes two, for 8 tokens. Half of the result is
// not wanted.
// So a token's bits depend neither on the other tokens nor on how many there are.
//
// Weights wait for nothing: they are in registers before the activations have come, and serve all tokens in turn.
// After the mma each warp's partial sums go to shared memory; after one barrier a thread adds up four rows of a token.
// Partial sums alternate between two buffers, so that one barrier is enough.
// Bytes: each weight is read from the ring once, 128 bytes a clock of shared-memory bandwidth at most.
#pragma once
#include "block.cuh"

constexpr int CHAIN = 4;  // chunks summed inside the mma

__device__ __forceinline__ float4 add(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
__device__ __forceinline__ float4 scaled(float4 a, float s) { return {a.x * s, a.y * s, a.z * s, a.w * s}; }

// This warp's tiles: COUNT groups of 16 bytes a lane, in the order of the stream (PER_TILE of them a tile). They begin
// with a slot.
template <int PER_TILE, int COUNT>
__device__ __forceinline__ void take_tiles(Block& b, uint4 (&w)[COUNT]) {
    constexpr int SLOTS = (COUNT + SLOT_GROUPS - 1) / SLOT_GROUPS, HALF_RING = RING_SLOTS / 2;
    constexpr int SPAN = SLOTS < HALF_RING ? SLOTS : HALF_RING;  // slots given back together
    const u32 mine = b.warp * (TILE_BYTES * PER_TILE) + b.lane * 16;
#pragma unroll
    for (int s0 = 0; s0 < SLOTS; s0 += SPAN) {
        u32 last = 0;
#pragma unroll
        for (int s = 0; s < SPAN && s0 + s < SLOTS; s++) {
            b.ring.wait(s);
            const u32 data = b.ring.data(s) + mine;
#pragma unroll
            for (int i = 0; i < SLOT_GROUPS; i++) {
                const int g = (s0 + s) * SLOT_GROUPS + i;
                if (g >= COUNT) break;
                w[g] = load_shared16(data + i / PER_TILE * (GROUP_BYTES * PER_TILE) + i % PER_TILE * TILE_BYTES);
                last |= i == SLOT_GROUPS - 1 || g == COUNT - 1 ? w[g].w : 0;
            }
        }
        b.ring.release(SLOTS - s0 < SPAN ? SLOTS - s0 : SPAN, last & b.r.zero);
    }
}

__device__ __forceinline__ void multiply(float (&sum)[4], uint4 w, u32 a0, u32 a1) { mma(sum, w.x, w.y, w.z, w.w, a0, a1); }

// With many tokens, polling for all of them would fill the way they come on. So poll for one, the last to be published;
// the others are probably there then. COUNT chunks from k0 on, `BYTES` a lane.
template <int COUNT, int BYTES>
__device__ __forceinline__ void wait_for_one(const Block& b, const u32* from, int k0, int k_end, int token) {
    constexpr int LANES = 64 / BYTES;  // of a chunk
    const int k = k0 + b.lane * (BYTES / 2);
    const u32* at = from + token * NODE_WORDS + k / 2;
    Watchdog dog;
    bool came;
    do {
        came = true;
        if (b.lane < LANES) {
            u32 got[COUNT];
#pragma unroll
            for (int c = 0; c < COUNT; c++) got[c] = k + c * 32 < k_end ? load8(at + c * 16).x : 0;
#pragma unroll
            for (int c = 0; c < COUNT; c++) came &= got[c] != NOT_YET;
        }
        dog.check();
    } while (!everywhere(came));
}

// --- many units over normed x ---------------------------------------------------------------------------------------

// What a warp needs of an octet of tokens: their values at its k, and the sums of squares of its slice of x, which a
// token's four lanes share. Columns past the last token may hold anything.
template <int CHUNKS>
struct Octet {
    static constexpr int EACH = (CHUNKS + 3) / 4;  // groups of four units
    uint4 a[CHUNKS], squares[EACH];

    // As before anything has come: a first value, or the registers would be taken all through the kernel.
    __device__ __forceinline__ void forget() {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) a[c] = {NOT_YET, NOT_YET, NOT_YET, NOT_YET};
#pragma unroll
        for (int i = 0; i < EACH; i++) squares[i] = {NOT_YET, NOT_YET, NOT_YET, NOT_YET};
    }
    __device__ __forceinline__ void load(const Block& b, const u32* x, const u32* x_squares, int first) {
        const int token = min(first + (b.lane >> 2), b.nodes - 1), q = b.lane & 3, k0 = b.warp * (CHUNKS * 32) + q * 8;
        const u32* at = x + token * NODE_WORDS + k0 / 2;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) a[c] = HIDDEN % CHUNK_K == 0 || k0 + c * 32 < HIDDEN ? load16(at + c * 16) : uint4{};
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int group = i * 4 + q, unit = (b.warp * CHUNKS + group) * 4;
            const bool live = (CHUNKS % 4 == 0 || group < CHUNKS) && (HIDDEN % CHUNK_K == 0 || unit < HIDDEN_UNITS);
            squares[i] = live ? load16(x_squares + token * NODE_WORDS + unit) : uint4{};
        }
    }
    __device__ __forceinline__ bool came() const {
        bool all = true;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) all &= came8(a[c]);
#pragma unroll
        for (int i = 0; i < EACH; i++) all &= came4(squares[i]);
        return all;
    }
    __device__ __forceinline__ void keep_squares(Block& b, int first) const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const float4 v = floats(squares[i]);
            sum += (v.x + v.y) + (v.z + v.w);
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const int token = first + (b.lane >> 2);
        if ((b.lane & 3) == 0 && token < b.nodes) b.s.squares[b.norm][token][b.warp] = sum;
    }
};

// 1 / rms of a token.
__device__ __forceinline__ float inverse_rms(const Block& b, int token) {
    const float4* at = (const float4*)b.s.squares[b.norm][token];
    const float4 low = at[0], high = at[1];
    const float sum = ((low.x + low.y) + (low.z + low.w)) + ((high.x + high.y) + (high.z + high.w));
    return rsqrtf(sum / HIDDEN + EPS);
}

// The sum over the warps' shares: PARTS of them, `stride` floats apart.
template <int PARTS>
__device__ __forceinline__ float4 sum_parts(const float* at, int stride) {
    float4 part[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; i++) part[i] = *(const float4*)(at + i * stride);
#pragma unroll
    for (int step = 1; step < PARTS; step *= 2)
#pragma unroll
        for (int i = 0; i + step < PARTS; i += 2 * step) part[i] = add(part[i], part[i + step]);
    return part[0];
}

// UNITS_AT_ONCE units from `base` on; past the last they are zero, since leaving them as they are would keep their
// registers taken all through the kernel.
template <int CHUNKS>
__device__ __forceinline__ void take_units(Block& b, uint4 (&w)[UNITS_AT_ONCE][2 * CHUNKS], int base, int units) {
#pragma unroll
    for (int u = 0; u < UNITS_AT_ONCE; u++) {
        if (base + u < units) {
            take_tiles<2>(b, w[u]);
        } else {
#pragma unroll
            for (int g = 0; g < 2 * CHUNKS; g++) w[u][g] = uint4{};
        }
    }
}

// Stage: `finish(live, unit, token, quarter, v, kept)` for four rows of a token at a time, all lanes of a warp, `live` or not;
// quarters 0 and 2 of a unit are in neighbouring lanes, and 1 and 3. A `gather` in a tree first writes them to `kept`, where a
// token's ancestors are then found ROW_STRIDE floats a token apart.
template <class Finish>
__device__ __forceinline__ void multiply_normed(Block& b, int units, const u32* x, const u32* squares, bool gather, Finish finish) {
    constexpr int CHUNKS = chunks_of(HIDDEN), AT_ONCE = UNITS_AT_ONCE;
    static_assert(CHUNKS <= MAX_CHUNKS, "a unit must fit in the registers");
    b.norm ^= 1;
    Octet<CHUNKS> octet[OCTETS];
#pragma unroll
    for (int o = 0; o < OCTETS; o++) octet[o].forget();
#pragma unroll 1
    for (int base = 0; base < units; base += AT_ONCE) {
        uint4 w[AT_ONCE][2 * CHUNKS];
        take_units<CHUNKS>(b, w, base, units);
        if (base == 0) {
            copies_done();  // what the last step of the stage needs
            b.sync();       // polling would hold up the loads of a warp that comes late
        }
#pragma unroll 1
        for (int first = 0; first < b.nodes; first += TOKENS_AT_ONCE) {
            if (base == 0 || NODES > TOKENS_AT_ONCE) {
                if (NODES > 8 && b.nodes > 8 && base == 0) wait_for_one<CHUNKS, 16>(b, x, b.warp * (CHUNKS * 32), HIDDEN, min(first + TOKENS_AT_ONCE, b.nodes) - 1);
                Watchdog dog;
                bool came;
                do {
                    came = true;
#pragma unroll
                    for (int o = 0; o < OCTETS; o++)
                        if (o == 0 || first + o * 8 < b.nodes) octet[o].load(b, x, squares, first + o * 8);
#pragma unroll
                    for (int o = 0; o < OCTETS; o++)
                        if (o == 0 || first + o * 8 < b.nodes) came &= octet[o].came();
                    dog.check();
                } while (!everywhere(came));
                if (base == 0) {
#pragma unroll
                    for (int o = 0; o < OCTETS; o++)
                        if (o == 0 || first + o * 8 < b.nodes) octet[o].keep_squares(b, first + o * 8);
                }
            }
            if (first == 0 && base == 0) b.mark();
            float* partial = b.scratch + b.buffer * PARTIAL_FLOATS;
#pragma unroll
            for (int o = 0; o < OCTETS; o++) {
                if (o > 0 && first + o * 8 >= b.nodes) break;
                float* mine = partial + (b.warp * TOKENS_AT_ONCE + o * 8 + (b.lane & 3) * 2) * ROW_STRIDE + (b.lane >> 2);
                const int tokens = b.nodes - first - o * 8 - (b.lane & 3) * 2;  // of this lane's two
#pragma unroll
                for (int u = 0; u < AT_ONCE; u++) {
                    float4 sum = {};
#pragma unroll
                    for (int c0 = 0; c0 < CHUNKS; c0 += CHAIN) {
                        float low[4] = {}, high[4] = {};
#pragma unroll
                        for (int c = c0; c < c0 + CHAIN && c < CHUNKS; c++) {
                            multiply(low, w[u][2 * c], octet[o].a[c].x, octet[o].a[c].y);
                            multiply(high, w[u][2 * c + 1], octet[o].a[c].z, octet[o].a[c].w);
                        }
                        sum = add(sum, {low[0] + high[0], low[1] + high[1], low[2] + high[2], low[3] + high[3]});
                    }
                    if (tokens > 0) mine[u * WIDE] = sum.x, mine[u * WIDE + 8] = sum.z;
                    if (NODES > 1 && tokens > 1) mine[ROW_STRIDE + u * WIDE] = sum.y, mine[ROW_STRIDE + u * WIDE + 8] = sum.w;
                }
            }
            if (first == 0 && base == 0) b.mark();
            b.sync();
            if (first == 0 && base == 0) b.mark();
            const int count = min(AT_ONCE, units - base);
            constexpr int WARP_STRIDE = TOKENS_AT_ONCE * ROW_STRIDE;
            if constexpr (NODES == 1) {  // every warp has half a unit, two lanes
                if (b.warp < 2 * count) {
                    const int quarter = (b.warp & 1) + 2 * (b.lane & 1), unit = b.warp >> 1;
                    const float4 sum = sum_parts<WARPS>(partial + unit * WIDE + quarter * 4, WARP_STRIDE);
                    finish(b.lane < 2, base + unit, 0, quarter, scaled(sum, inverse_rms(b, 0)), nullptr);
                }
                b.buffer ^= 1;
            } else {  // a few lanes a token
                constexpr int LANES = 4 * AT_ONCE, TOKENS = 32 / LANES;
                const int quarter = (b.lane >> 1 & 1) + 2 * (b.lane & 1), unit = b.lane / 4 % AT_ONCE, here = min(TOKENS_AT_ONCE, b.nodes - first);
                static_assert(NODES * ROW_STRIDE <= PARTIAL_FLOATS, "the half of the partial sums that is not in use keeps a row a token");
                float* kept = b.scratch + (b.buffer ^ 1) * PARTIAL_FLOATS + unit * WIDE + quarter * 4;
#pragma unroll 1
                for (int round = gather ? 0 : 1; round < 2; round++) {
#pragma unroll 1
                    for (int t0 = b.warp * TOKENS; t0 < here; t0 += WARPS * TOKENS) {
                        const int token = min(t0 + b.lane / LANES, here - 1);
                        float4* mine = (float4*)(kept + (first + token) * ROW_STRIDE);
                        if (round == 1 && gather) {
                            finish(unit < count && t0 + b.lane / LANES < here, base + unit, first + token, quarter, *mine, kept);
                            continue;
                        }
                        const float4 sum = sum_parts<WARPS>(partial + token * ROW_STRIDE + unit * WIDE + quarter * 4, WARP_STRIDE);
                        const float4 v = scaled(sum, inverse_rms(b, first + token));
                        if (round == 0)
                            *mine = v;
                        else
                            finish(unit < count && t0 + b.lane / LANES < here, base + unit, first + token, quarter, v, kept);
                    }
                    if (round == 0) b.sync();
                }
                if (!gather) b.buffer ^= 1;  // else the barrier has freed this half already
            }
        }
    }
}

// --- one unit of a projection back to the residual stream -----------------------------------------------------------

// The scales of DeltaNet outputs, 1 / rms of a head: from the sums of squares of its blocks. A chain of chunks is one
// head's or lies inside one. For HEADS_HERE heads, each by two of a token's four lanes.
template <int HEADS_HERE>
struct HeadScales {
    static_assert(BLOCKS_PER_HEAD == 8, "two groups of four words a head");
    static constexpr int EACH = (HEADS_HERE + 1) / 2;
    uint4 got[EACH];
    float inverse[EACH];

    // `squares` is null where nothing is to be scaled.
    __device__ void load(const Block& b, const u32* squares, int token, int head) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int h = min(head + min(i * 2 + ((b.lane & 3) >> 1), HEADS_HERE - 1), VALUE_HEADS - 1);  // past the end: zeros
            got[i] = squares ? load16(squares + token * NODE_WORDS + h * BLOCKS_PER_HEAD + (b.lane & 1) * 4) : uint4{};
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
            inverse[i] = scaled ? rsqrtf(sum / STATE_DIM + EPS) : 1.0f;
        }
    }
    // for the two tokens whose sums this lane holds
    __device__ float2 at(int pair, int chain) const {
        const int source = pair * 8 + (chain & 1) * 2;
        return {__shfl_sync(~0u, inverse[chain >> 1], source), __shfl_sync(~0u, inverse[chain >> 1], source + 4)};
    }
};
struct NoScales {
    __device__ void load(const Block&, const u32*, int, int) {}
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

// What a warp needs of some tokens for COUNT chunks from k0 on. One token is one of a mma's columns at the first four k and
// another at the last four. A tree's tokens are taken eight at a time, the first four k and the last in a mma each.
template <int COUNT, int K, bool SCALED>
struct Inputs {
    static constexpr int EACH = NODES == 1 ? 2 : 4;  // words a chunk
    u32 a[COUNT][EACH];
    typename ScalesOf<SCALED, (COUNT + CHAIN - 1) / CHAIN>::type scales;

    __device__ __forceinline__ void load(const Block& b, const u32* from, const u32* squares, int k0, int first) {
        const int token = NODES == 1 ? 0 : min(first + (b.lane >> 2), b.nodes - 1), k = k0 + (b.lane & 3) * 8;
        const u32* at = from + token * NODE_WORDS + (k + (NODES == 1 ? (b.lane >> 4) * 4 : 0)) / 2;
#pragma unroll
        for (int c = 0; c < COUNT; c++) {
            const bool live = K % CHUNK_K == 0 || k + c * 32 < K;
            if constexpr (NODES == 1) {
                const uint2 got = live ? load8(at + c * 16) : uint2{};
                a[c][0] = got.x, a[c][1] = got.y;
            } else {
                const uint4 got = live ? load16(at + c * 16) : uint4{};
                a[c][0] = got.x, a[c][1] = got.y, a[c][EACH - 2] = got.z, a[c][EACH - 1] = got.w;
            }
        }
        scales.load(b, squares, token, k0 / STATE_DIM);
    }
    __device__ __forceinline__ bool came() const {
        bool all = scales.came();
#pragma unroll
        for (int c = 0; c < COUNT; c++) all &= a[c][0] != NOT_YET & a[c][EACH - 2] != NOT_YET;
        return all;
    }
    // Sums of this lane's two tokens for row lane / 4, at the first four k and at the last apart.
    __device__ __forceinline__ float2 multiply_by(const Block& b, const uint4 (&w)[COUNT]) const {
        const int q = b.lane & 3;
        float2 early = {}, late = {};
#pragma unroll
        for (int chain = 0; chain * CHAIN < COUNT; chain++) {
            const float2 scale = scales.at(NODES == 1 ? q & 1 : q, chain);
            float low[4] = {}, high[4] = {};
#pragma unroll
            for (int c = chain * CHAIN; c < chain * CHAIN + CHAIN && c < COUNT; c++) {
                multiply(low, w[c], a[c][0], a[c][1]);
                if (NODES > 1) multiply(high, w[c], a[c][EACH - 2], a[c][EACH - 1]);
            }
            if (NODES == 1) {  // lanes 0 and 1 of four have the first four k, 2 and 3 the last
                early.x = fmaf(scale.x, q < 2 ? low[0] : low[2], early.x);
            } else {
                early.x = fmaf(scale.x, low[0], early.x), early.y = fmaf(scale.y, low[1], early.y);
                late.x = fmaf(scale.x, high[2], late.x), late.y = fmaf(scale.y, high[3], late.y);
            }
        }
        if (NODES == 1) late.x = __shfl_xor_sync(~0u, early.x, 2);
        return {early.x + late.x, early.y + late.y};
    }
};

// COUNT chunks of one unit for all tokens, some octets at a time; the sums are part `part` of the unit's.
template <int COUNT, int K, bool SCALED>
__device__ __forceinline__ void multiply_unit(Block& b, const u32* from, const u32* squares, int k0, int part) {
    constexpr int AT_ONCE = octets_at_once(COUNT);
    uint4 w[COUNT];
    take_tiles<1>(b, w);
    b.sync();  // polling would hold up the loads of a warp that comes late
    float* partial = b.scratch + b.buffer * PARTIAL_FLOATS + part * NODES * UNIT_STRIDE;
#pragma unroll 1
    for (int first = 0; first < b.nodes; first += 8 * AT_ONCE) {
        Inputs<COUNT, K, SCALED> inputs[AT_ONCE];
        if (NODES > 8 && b.nodes > 8) wait_for_one<COUNT, 8>(b, from, k0, K, min(first + 8 * AT_ONCE, b.nodes) - 1);
        Watchdog dog;
        bool came;
        do {
            came = true;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)  // past the last token: that one again
                inputs[i].load(b, from, squares, k0, first + i * 8);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) came &= inputs[i].came();
            dog.check();
        } while (!everywhere(came));
        if (first == 0) b.mark();
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (i > 0 && first + i * 8 >= b.nodes) break;
            inputs[i].scales.finish(squares);
            const float2 total = inputs[i].multiply_by(b, w);
            const int token = first + i * 8 + (b.lane & 3) * 2;
            float* mine = partial + token * UNIT_STRIDE + (b.lane >> 2);
            if (token < b.nodes) mine[0] = total.x;
            if (NODES > 1 && token + 1 < b.nodes) mine[UNIT_STRIDE] = total.y;
        }
    }
}

// A projection back to the residual stream. SCALED: if there are `squares`, the inputs are DeltaNet outputs before their head
// norm, whose 1 / rms multiplies the sums over a head. The new residual is kept; times the next norm's weight, in bf16, it is published with
// the sum of its squares; and it is stored as a feature if asked.
template <int K, bool SCALED>
__device__ __forceinline__ void project_to_residual(Block& b, const u32* from, const u32* squares, u32* out, u32* out_squares,
                                                    int other, const float* next_norm, float* feature) {
    constexpr int CHUNKS = chunks_of(K), PARTS = parts_of(K);
    constexpr int BLOCK = (CHUNKS + PARTS / WARPS - 1) / (PARTS / WARPS) + 3 & ~3;  // whole slots
    const int first = first_unit(HIDDEN_UNITS, b.sm), units = first_unit(HIDDEN_UNITS, b.sm + 1) - first;
    static_assert((CHUNKS + BLOCK - 1) / BLOCK == PARTS / WARPS, "every part must be written");
    static_assert(!SCALED || CHUNKS % CHAIN == 0 || CHAIN % CHUNKS == 0, "a chain of chunks must lie in one head");
    const int k0 = b.warp * (CHUNKS * 32);
#pragma unroll 1
    for (int unit = 0; unit < units; unit++) {
        const int half = b.lane & 1, row = (first + unit) * 8 + half * 4;
        const float4 norm = __ldg((const float4*)(next_norm + row));
#pragma unroll 1
        for (int block = 0; block < CHUNKS / BLOCK; block++)
            multiply_unit<BLOCK < CHUNKS ? BLOCK : CHUNKS, K, SCALED>(b, from, squares, k0 + block * BLOCK * 32,
                                                                      block * WARPS + b.warp);
        if constexpr (CHUNKS % BLOCK != 0)
            multiply_unit<CHUNKS % BLOCK, K, SCALED>(b, from, squares, k0 + CHUNKS / BLOCK * BLOCK * 32,
                                                     CHUNKS / BLOCK * WARPS + b.warp);
        b.mark();
        b.sync();
        b.mark();
        const float* partial = b.scratch + b.buffer * PARTIAL_FLOATS;
        if (b.warp * 16 < b.nodes) {  // two lanes a token
            const int token = min((int)threadIdx.x >> 1, b.nodes - 1);
            const bool live = (int)threadIdx.x < 2 * b.nodes;
            const float4 sum = sum_parts<PARTS>(partial + token * UNIT_STRIDE + half * 4, NODES * UNIT_STRIDE);
            float4* own = (float4*)b.s.residual[unit][token] + half;
            const float4 x = add(*own, sum);
            float square = fmaf(x.x, x.x, fmaf(x.y, x.y, fmaf(x.z, x.z, x.w * x.w)));
            square += __shfl_xor_sync(~0u, square, 1);
            if (live) {
                *own = x;
                publish8(out + token * NODE_WORDS + row / 2, other, pack_bf16(x.x * norm.x, x.y * norm.y),
                         pack_bf16(x.z * norm.z, x.w * norm.w));
                if (half == 0) publish4(out_squares + token * NODE_WORDS + first + unit, other, __float_as_uint(square));
                if (feature) *(float4*)(feature + (size_t)token * HIDDEN + row) = x;
            }
        }
        b.buffer ^= 1;
    }
}
