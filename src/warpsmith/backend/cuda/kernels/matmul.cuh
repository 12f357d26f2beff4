// Matrix products: y = W x for 1..NODES tokens, one path for any number of them.
//
// Every warp owns a fixed slice of K (see shape.cuh). A weight tile is 8 rows x 32 k, 16 bytes a lane: row l/4 and
// k = 8 (l mod 4) .. + 7. The mma (16 x 8 x 16) takes the whole tile as its A operand by stacking two k ranges: its rows
// 0-7 are the tile's rows at k = 0, 1, 4, 5 (mod 8), its rows 8-15 the same rows at k = 2, 3, 6, 7. Its 8 columns are four
// tokens, first with their values at the former k, then at the latter. Two quarters of the result are what is wanted
// and are added; the other two are ignored. So one 16-byte load and one mma a tile for four tokens, no padding.
// Each warp's partial sums go to shared memory; after one barrier four lanes add up the warps' shares of four rows in a
// fixed order. A token's bits depend neither on the other tokens nor on how many there are.
// Partial sums alternate between two halves of the scratch, so that one barrier a stage is enough.
// Bytes: each weight is read from the ring once, 128 bytes a clock of shared-memory bandwidth at most.
#pragma once
#include "block.cuh"

template <bool CONDITION, class A, class B>
struct Select {
    typedef A type;
};
template <class A, class B>
struct Select<false, A, B> {
    typedef B type;
};

// A lane's part of the mma's B operand: of token l/4 mod 4, the two pairs of k that its range (l / 16) takes.
template <int COUNT>
struct Activations {
    u32 pair[COUNT][QUADS][2];
};
__device__ __forceinline__ int lane_token(const Block& b, int quad) { return quad * 4 + (b.lane >> 2 & 3); }
__device__ __forceinline__ int lane_range(const Block& b) { return b.lane >> 4; }

// What is asked for together with a token's values: nothing, or
struct NoCompanion {
    __device__ explicit NoCompanion(int = 0) {}
    __device__ void load(const Block&, int) {}
    __device__ bool missing(u32) const { return false; }
    __device__ void finish(const Block&, int) {}
    __device__ float2 at(const Block&, int, int) const { return {1.0f, 1.0f}; }
};

// the sums of squares of the DeltaNet heads that COUNT chunks from k on belong to; then 1 / rms of each.
template <int COUNT>
struct HeadScales {
    static constexpr int N = COUNT * 32 > STATE_DIM ? COUNT * 32 / STATE_DIM : 1;
    static_assert(COUNT * 32 % STATE_DIM == 0 || STATE_DIM % (COUNT * 32) == 0, "a warp's k are whole heads, or lie in one");
    static_assert(BLOCKS_PER_HEAD == 8, "eight lanes a token, one a block");
    int first;
    Packet got[N];
    float inverse[N][QUADS];  // of this lane's token

    __device__ explicit HeadScales(int k) : first(k / STATE_DIM) {}
    __device__ void load(const Block& b, int token) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int head = min(first + i, VALUE_HEADS - 1);  // past the end the values are zero
            got[i] = load_packet(b.p.squares + (size_t)token * SQUARE_PACKETS + head * BLOCKS_PER_HEAD + lane_range(b) * 4 +
                                 (b.lane & 3));
        }
    }
    __device__ bool missing(u32 tag) const {
        bool any = false;
#pragma unroll
        for (int i = 0; i < N; i++) any |= !arrived(got[i], tag);
        return any;
    }
    __device__ void finish(const Block&, int quad) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            float sum = value(got[i], 0);
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            sum += __shfl_xor_sync(~0u, sum, 16);
            inverse[i][quad] = rsqrtf(sum / STATE_DIM + EPS);
        }
    }
    // for the two tokens whose sums this lane holds
    __device__ float2 at(const Block& b, int quad, int chunk) const {
        const float mine = inverse[N > 1 ? chunk * 32 / STATE_DIM : 0][quad];
        const int source = (b.lane & 1) * 8;
        return {__shfl_sync(~0u, mine, source), __shfl_sync(~0u, mine, source + 4)};
    }
};

// Four values of a token, rounded to bf16.
__device__ __forceinline__ uint2 round_four(float4 v) { return {pack_bf16(v.x, v.y), pack_bf16(v.z, v.w)}; }

// The tokens' inputs from packets, for COUNT chunks of a K cut in CHUNKS a warp, from `first_chunk` on. All packets of a
// token are asked for at once. `transform(values, quad, k)` is applied to four values at a time before rounding.
template <int CHUNKS, int COUNT, int K, class Companion, class Transform>
__device__ __forceinline__ void load_activations(Block& b, Activations<COUNT>& a, int first_chunk, const Packet* from,
                                                 int packets, u32 tag, Companion& companion, Transform transform) {
    const int k0 = b.warp * (CHUNKS * 32) + first_chunk * 32;
    if constexpr (NODES == 1) {
        // One token: its packets are shared out over the lanes, then gathered by those that hold it in the mma.
        constexpr int PACKETS = COUNT * 8, EACH = (PACKETS + 31) / 32;
        uint2* staged = (uint2*)(b.s.staged + b.warp * STAGED_CHUNKS * 4);
        Packet got[EACH];
        Watchdog dog;
        bool missing;
        do {
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int k = k0 + (i * 32 + b.lane) * 4;
                got[i] = load_packet(from + (i * 32 + b.lane < PACKETS && k < K ? k / 4 : 0));
            }
            companion.load(b, 0);
            missing = companion.missing(tag);
#pragma unroll
            for (int i = 0; i < EACH; i++) missing |= !arrived(got[i], tag);
            dog.check();
        } while (missing);
        __syncwarp();
        companion.finish(b, 0);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int at = i * 32 + b.lane, k = k0 + at * 4;
            if (at < PACKETS) staged[at] = k < K ? round_four(transform(values(got[i]), 0, k)) : uint2{};
        }
        __syncwarp();
#pragma unroll
        for (int c = 0; c < COUNT; c++) {
            const uint4 eight = *(const uint4*)(staged + c * 8 + (b.lane & 3) * 2);
            a.pair[c][0][0] = lane_range(b) ? eight.y : eight.x;
            a.pair[c][0][1] = lane_range(b) ? eight.w : eight.z;
        }
    } else {
#pragma unroll
        for (int quad = 0; quad < QUADS; quad++) {
            if (quad * 4 >= b.nodes) break;
            const int token = min(lane_token(b, quad), b.nodes - 1);  // a column past the last token may hold anything
            const int mine = k0 + (b.lane & 3) * 8;
            const Packet* row = from + (size_t)token * packets;
            Packet got[COUNT][2];
            Watchdog dog;
            bool missing;
            do {
#pragma unroll
                for (int c = 0; c < COUNT; c++) {
                    const int at = mine + c * 32 < K ? (mine + c * 32) / 4 : 0;  // past the end: any packet, then zero
                    got[c][0] = load_packet(row + at);
                    got[c][1] = load_packet(row + at + 1);
                }
                companion.load(b, token);
                missing = companion.missing(tag);
#pragma unroll
                for (int c = 0; c < COUNT; c++) missing |= !arrived(got[c][0], tag) | !arrived(got[c][1], tag);
                dog.check();
            } while (missing);
            __syncwarp();
            companion.finish(b, quad);
#pragma unroll
            for (int c = 0; c < COUNT; c++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int k = mine + c * 32 + i * 4;
                    const uint2 four = k < K ? round_four(transform(values(got[c][i]), quad, k)) : uint2{};
                    a.pair[c][quad][i] = lane_range(b) ? four.y : four.x;
                }
        }
    }
}

// Sums of a unit's 8 rows over a warp's k, before the two ranges are added.
struct Sums {
    float part[QUADS][4] = {};

    template <int COUNT>
    __device__ __forceinline__ void add(const Activations<COUNT>& a, int c, uint4 w) {
#pragma unroll
        for (int quad = 0; quad < QUADS; quad++) mma(part[quad], w.x, w.y, w.z, w.w, a.pair[c][quad][0], a.pair[c][quad][1]);
    }
};

// Partial sums of a batch of units: [warp][unit][token][8 rows].
constexpr int PARTIAL_FLOATS = SCRATCH_BYTES / 8;  // half of the scratch, in floats
static_assert(PARTIAL_FLOATS >= WARPS * 8 * NODES, "the scratch must hold one unit of every token");
__device__ __forceinline__ int batch_units(const Block& b) { return PARTIAL_FLOATS / (WARPS * 8 * b.nodes); }

__device__ __forceinline__ void store_partial(const Block& b, int unit, int units, const Sums& sums) {
    const int row = b.lane >> 2, q = b.lane & 3;
    float* mine = b.scratch + b.buffer * PARTIAL_FLOATS + (b.warp * units + unit) * b.nodes * 8 + row;
#pragma unroll
    for (int quad = 0; quad < QUADS; quad++) {
        // lanes 0, 1 hold the first range of tokens 0-1, 2-3; lanes 2, 3 the second
        float first = q < 2 ? sums.part[quad][0] : sums.part[quad][2];
        first += __shfl_xor_sync(~0u, first, 2);
        const int token = quad * 4 + q * 2;
        if (q < 2 && token < b.nodes) mine[token * 8] = first;
        if constexpr (NODES > 1) {
            float second = q < 2 ? sums.part[quad][1] : sums.part[quad][3];
            second += __shfl_xor_sync(~0u, second, 2);
            if (q < 2 && token + 1 < b.nodes) mine[token * 8 + 8] = second;
        }
    }
}

// The sum over the warps, the same in all four lanes of a group.
__device__ __forceinline__ float4 sum_partials(const Block& b, int offset, int stride) {
    constexpr int EACH = WARPS / 4;
    const float* at = b.scratch + b.buffer * PARTIAL_FLOATS + offset + (b.lane & 3) * EACH * stride;
    float4 sum = *(const float4*)at;
#pragma unroll
    for (int w = 1; w < EACH; w++) {
        const float4 more = *(const float4*)(at + w * stride);
        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        sum.x += __shfl_xor_sync(~0u, sum.x, step);
        sum.y += __shfl_xor_sync(~0u, sum.y, step);
        sum.z += __shfl_xor_sync(~0u, sum.z, step);
        sum.w += __shfl_xor_sync(~0u, sum.w, step);
    }
    return sum;
}

// 1 / rms of a token, from the warps' shares of its sum of squares; the same in all four lanes of a group.
__device__ __forceinline__ float inverse_rms(const Block& b, int token) {
    constexpr int EACH = WARPS / 4;
    const int first = (b.lane & 3) * EACH;
    float sum = b.s.squares[b.norm][first][token];
#pragma unroll
    for (int w = 1; w < EACH; w++) sum += b.s.squares[b.norm][first + w][token];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    return rsqrtf(sum / HIDDEN + EPS);
}

// After the barrier: `finish(live, unit, token, quarter, sum)` for every group of four rows, by four lanes together.
// Gate and up rows of an MLP unit are the two quarters, in neighbouring groups. Every lane of a warp calls, live or not.
template <class Finish>
__device__ __forceinline__ void finish_batch(Block& b, int units, Finish finish) {
    const int items = units * b.nodes * 2, stride = units * b.nodes * 8;
#pragma unroll 1
    for (int first = b.warp * 8; first < items; first += WARPS * 8) {
        const int item = first + (b.lane >> 2);
        const bool live = item < items;
        const int at = live ? item : item & 1;
        const float4 sum = sum_partials(b, at * 4, stride);
        finish(live, (at >> 1) / b.nodes, (at >> 1) % b.nodes, at & 1, sum);
    }
    b.buffer ^= 1;
}

// Chunk j of a stage of `chunks`: this lane's 16 bytes.
__device__ __forceinline__ uint4 take_chunk(Block& b, int j, int chunks) {
    const int part = j % SLOT_CHUNKS;
    if (part == 0) b.ring.wait();
    const uint4 w = load_shared16(b.ring.data() + part * CHUNK_BYTES + b.warp * 512 + b.lane * 16);
    if (part == SLOT_CHUNKS - 1 || j == chunks - 1) b.ring.release();
    return w;
}

// WIDTH units side by side, so that their mma chains overlap.
template <int CHUNKS, int WIDTH>
struct Units {
    uint4 w[WIDTH][CHUNKS];

    // Weights wait for nothing: they are in registers before the activations have come.
    __device__ __forceinline__ void take(Block& b, int first, int units) {
        if constexpr (CHUNKS % SLOT_CHUNKS == 0) {  // whole slots
            constexpr int SLOTS = WIDTH * CHUNKS / SLOT_CHUNKS;
            const u32 mine = b.warp * 512 + b.lane * 16;
#pragma unroll
            for (int i = 0; i < SLOTS; i++) b.ring.wait(i);
#pragma unroll
            for (int u = 0; u < WIDTH; u++)
#pragma unroll
                for (int c = 0; c < CHUNKS; c++)
                    w[u][c] = load_shared16(b.ring.data((u * CHUNKS + c) / SLOT_CHUNKS) + c % SLOT_CHUNKS * CHUNK_BYTES + mine);
            b.ring.release(SLOTS);
        } else {
#pragma unroll
            for (int u = 0; u < WIDTH; u++)
#pragma unroll
                for (int c = 0; c < CHUNKS; c++) w[u][c] = take_chunk(b, (first + u) * CHUNKS + c, units * CHUNKS);
        }
    }
    __device__ __forceinline__ void multiply(Block& b, const Activations<CHUNKS>& a, int unit, int count) const {
        Sums sums[WIDTH];
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int u = 0; u < WIDTH; u++) sums[u].add(a, c, w[u][c]);
#pragma unroll
        for (int u = 0; u < WIDTH; u++) store_partial(b, unit + u, count, sums[u]);
    }
};

// Many units over activations that stay in registers. `load(activations)` fetches those once the first weights are here,
// if every SM has enough units (FEWEST of the stage, over all SMs) to take some before.
template <int CHUNKS, int FEWEST, class Load, class Finish>
__device__ __forceinline__ void multiply_resident(Block& b, int units, Load load, Finish finish) {
    constexpr int WIDTH = CHUNKS * QUADS <= 8 ? 2 : 1;
    static_assert(WIDTH * CHUNKS <= RING_SLOTS * SLOT_CHUNKS, "the ring must hold what is taken at once");
    const int batch = batch_units(b);
    Activations<CHUNKS> a;
    int unit = 0;
    if constexpr (FEWEST / SMS >= WIDTH && PARTIAL_FLOATS / (WARPS * 8 * NODES) >= WIDTH) {
        Units<CHUNKS, WIDTH> many;
        many.take(b, 0, units);
        load(a);
        b.mark();
        many.multiply(b, a, 0, min(batch, units));
        unit = WIDTH;
    } else {
        load(a);
        b.mark();
    }
#pragma unroll 1
    for (int base = 0; base < units; base += batch, unit = 0) {
        const int count = min(batch, units - base);
#pragma unroll 1
        for (; unit + WIDTH <= count; unit += WIDTH) {
            Units<CHUNKS, WIDTH> many;
            many.take(b, base + unit, units);
            many.multiply(b, a, unit, count);
        }
        if constexpr (WIDTH > 1) {
#pragma unroll 1
            for (; unit < count; unit++) {
                Units<CHUNKS, 1> one;
                one.take(b, base + unit, units);
                one.multiply(b, a, unit, count);
            }
        }
        b.mark();
        b.sync();
        b.mark();
        finish_batch(b, count, [&](bool live, int u, int token, int quarter, float4 sum) {
            finish(live, base + u, token, quarter, sum);
        });
    }
}

// Inputs of a stage that starts with an RMS norm: x times the norm's weight, rounded to bf16. The norm's scale is one
// number a token and is applied to the finished sums, so that nobody waits for it.
template <int CHUNKS>
__device__ __forceinline__ void load_normed(Block& b, Activations<CHUNKS>& a, const Packet* x, u32 tag, const float* weight) {
    NoCompanion none;
    float squares[QUADS] = {};
    load_activations<CHUNKS, CHUNKS, HIDDEN>(b, a, 0, x, X_PACKETS, tag, none, [&](float4 v, int quad, int k) {
        const float4 w = __ldg((const float4*)(weight + k));
        squares[quad] += fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, v.w * v.w)));
        return float4{v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w};
    });
    b.norm ^= 1;
#pragma unroll
    for (int quad = 0; quad < QUADS; quad++) {
        float sum = squares[quad];
        if constexpr (NODES == 1) {
            sum = warp_sum(sum);
            if (b.lane == 0) b.s.squares[b.norm][b.warp][0] = sum;
        } else {
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const int token = lane_token(b, quad);
            if ((b.lane & 19) == 0 && token < b.nodes) b.s.squares[b.norm][b.warp][token] = sum;
        }
    }
}

// A projection back to the residual stream: few units an SM and K large, so activations are fetched a few chunks at a
// time. SCALED: the inputs are DeltaNet outputs before their head norm, whose 1 / rms multiplies the sums over a head.
// The new residual is kept, published to `out`, and stored as a feature if asked.
template <int K, bool SCALED>
__device__ __forceinline__ void project_to_residual(Block& b, const Packet* from, int packets, u32 from_tag, Packet* out,
                                                    float* feature) {
    constexpr int CHUNKS = chunks_of(K);
    constexpr int LIMIT = NODES == 1 ? 16 : QUADS <= 2 ? 8 : QUADS <= 8 ? 4 : 2;
    constexpr int TOGETHER = CHUNKS < LIMIT ? CHUNKS : LIMIT;
    const int first = first_unit(HIDDEN_UNITS, b.sm), units = first_unit(HIDDEN_UNITS, b.sm + 1) - first;
    const int batch = batch_units(b);
#pragma unroll 1
    for (int base = 0; base < units; base += batch) {
        const int count = min(batch, units - base);
#pragma unroll 1
        for (int unit = 0; unit < count; unit++) {
            Sums total;
#pragma unroll
            for (int c0 = 0; c0 < CHUNKS; c0 += TOGETHER) {
                Activations<TOGETHER> a;
                typename Select<SCALED, HeadScales<TOGETHER>, NoCompanion>::type scales(b.warp * (CHUNKS * 32) + c0 * 32);
                load_activations<CHUNKS, TOGETHER, K>(b, a, c0, from, packets, from_tag, scales,
                                                      [](float4 v, int, int) { return v; });
                if (c0 == 0) b.mark();
                // every two chunks have sums of their own: short chains, and never more than one head
#pragma unroll
                for (int c = 0; c < TOGETHER && c0 + c < CHUNKS; c += 2) {
                    const int j = (base + unit) * CHUNKS + c0 + c;
                    Sums sums;
                    sums.add(a, c, take_chunk(b, j, units * CHUNKS));
                    if (c + 1 < TOGETHER && c0 + c + 1 < CHUNKS) sums.add(a, c + 1, take_chunk(b, j + 1, units * CHUNKS));
#pragma unroll
                    for (int quad = 0; quad < QUADS; quad++) {
                        const float2 scale = scales.at(b, quad, c);
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            total.part[quad][i] = fmaf(i % 2 ? scale.y : scale.x, sums.part[quad][i], total.part[quad][i]);
                    }
                }
            }
            store_partial(b, unit, count, total);
        }
        b.mark();
        b.sync();
        b.mark();
        finish_batch(b, count, [&](bool live, int unit, int token, int quarter, float4 sum) {
            if (!live || (b.lane & 3)) return;
            float4* own = (float4*)b.s.residual[base + unit][token] + quarter;
            const float4 old = *own;
            const float4 x = {old.x + sum.x, old.y + sum.y, old.z + sum.z, old.w + sum.w};
            *own = x;
            const int row = (first + base + unit) * 8 + quarter * 4;
            publish(out + (size_t)token * X_PACKETS + row / 4, x, b.tag);
            if (feature) *(float4*)(feature + (size_t)token * HIDDEN + row) = x;
        });
    }
}
