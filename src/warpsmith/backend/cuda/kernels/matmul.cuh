// Matrix products: y = W x for 1..NODES tokens, one path for any number of them.
//
// Every warp owns a fixed slice of K (see shape.cuh) and holds its slice of the activations in registers as bf16, in
// the exact layout the mma wants: lane l has token l/4 and k = 8 * (l mod 4) .. + 7 of each chunk, which is also how its
// 16 bytes of a weight tile are ordered. Tokens are the 16 rows of the mma, a unit's 8 weight rows its 8 columns.
// Each warp's partial sums go to shared memory; after one barrier four lanes add up the sixteen warps' shares of four
// rows in a fixed order. A token's bits depend neither on the other tokens nor on how many there are.
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

template <int CHUNKS>
struct Activations {
    u32 pair[CHUNKS][HALVES][4];  // [chunk][token / 8][pair of k]
};

// What is asked for together with a token's values: nothing, or
struct NoCompanion {
    __device__ explicit NoCompanion(int = 0) {}
    __device__ float at(int, int) const { return 1.0f; }
    __device__ void load(const Block&, int) {}
    __device__ bool missing(u32) const { return false; }
    __device__ void finish(const Block&, int) {}
};

// the sums of squares of the DeltaNet heads that COUNT chunks from k on belong to; then 1 / rms of each, per half.
template <int COUNT>
struct HeadScales {
    static constexpr int N = COUNT * 32 > STATE_DIM ? COUNT * 32 / STATE_DIM : 1;
    static_assert(COUNT * 32 % STATE_DIM == 0 || STATE_DIM % (COUNT * 32) == 0, "a warp's k are whole heads, or lie in one");
    int first;
    Packet got[N][2];
    float inverse[N][HALVES];

    __device__ explicit HeadScales(int k) : first(k / STATE_DIM) {}
    __device__ void load(const Block& b, int token) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int head = min(first + i, VALUE_HEADS - 1);  // past the end the values are zero
            const Packet* at = b.p.squares + (size_t)token * SQUARE_PACKETS + head * BLOCKS_PER_HEAD + (b.lane & 3) * 2;
            got[i][0] = load_packet(at), got[i][1] = load_packet(at + 1);
        }
    }
    __device__ bool missing(u32 tag) const {
        bool any = false;
#pragma unroll
        for (int i = 0; i < N; i++) any |= !arrived(got[i][0], tag) | !arrived(got[i][1], tag);
        return any;
    }
    __device__ void finish(const Block& b, int half) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            float sum = half * 8 + (b.lane >> 2) < b.nodes ? value(got[i][0], 0) + value(got[i][1], 0) : 0.0f;
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            inverse[i][half] = rsqrtf(sum / STATE_DIM + EPS);
        }
    }
    __device__ float at(int half, int chunk) const { return inverse[N > 1 ? chunk * 32 / STATE_DIM : 0][half]; }
};

// The tokens' inputs from packets, for COUNT chunks of a K cut in CHUNKS a warp. All packets of a token are asked for at
// once. `transform(value, half, chunk, i)` is applied to the i-th of a lane's eight values before rounding to bf16.
template <int CHUNKS, int COUNT, int K, class Companion, class Transform>
__device__ __forceinline__ void load_activations(const Block& b, Activations<COUNT>& a, int first_chunk, const Packet* from,
                                                 int packets, u32 tag, Companion& companion, Transform transform) {
    const int k0 = b.warp * (CHUNKS * 32) + first_chunk * 32 + (b.lane & 3) * 8;
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
        const int token = half * 8 + (b.lane >> 2);
        Packet got[COUNT][2] = {};
        if (token < b.nodes) {
            const Packet* row = from + (size_t)token * packets;
            Watchdog dog;
            bool missing;
            do {
#pragma unroll
                for (int c = 0; c < COUNT; c++) {
                    const int at = k0 + c * 32 < K ? (k0 + c * 32) / 4 : 0;  // past the end: any packet, then zero
                    got[c][0] = load_packet(row + at);
                    got[c][1] = load_packet(row + at + 1);
                }
                companion.load(b, token);
                missing = companion.missing(tag);
#pragma unroll
                for (int c = 0; c < COUNT; c++) missing |= !arrived(got[c][0], tag) | !arrived(got[c][1], tag);
                dog.check();
            } while (missing);
        }
        companion.finish(b, half);
#pragma unroll
        for (int c = 0; c < COUNT; c++) {
            float v[8];
#pragma unroll
            for (int i = 0; i < 8; i++)
                v[i] = token < b.nodes && k0 + c * 32 < K ? transform(value(got[c][i / 4], i % 4), half, c, i) : 0.0f;
#pragma unroll
            for (int i = 0; i < 4; i++) a.pair[c][half][i] = pack_bf16(v[2 * i], v[2 * i + 1]);
        }
    }
}

// One chunk of one unit: acc += tokens * weights over this warp's 32 k.
template <int COUNT>
__device__ __forceinline__ void multiply_chunk(float (&acc)[TILES][4], const Activations<COUNT>& a, int c, uint4 w) {
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        const u32(&low)[4] = a.pair[c][2 * t];
        if constexpr (HALVES > 1) {
            const u32(&high)[4] = a.pair[c][2 * t + 1];
            mma(acc[t], low[0], high[0], low[1], high[1], w.x, w.y);
            mma(acc[t], low[2], high[2], low[3], high[3], w.z, w.w);
        } else {  // with at most 8 tokens the tile's upper rows are zero
            mma(acc[t], low[0], 0, low[1], 0, w.x, w.y);
            mma(acc[t], low[2], 0, low[3], 0, w.z, w.w);
        }
    }
}

// Partial sums of a batch of units: [warp][unit][token][8 rows].
constexpr int PARTIAL_FLOATS = SCRATCH_BYTES / 8;  // half of the scratch, in floats
static_assert(PARTIAL_FLOATS >= WARPS * 8 * NODES, "the scratch must hold one unit of every token");
__device__ __forceinline__ int batch_units(const Block& b) { return PARTIAL_FLOATS / (WARPS * 8 * b.nodes); }

__device__ __forceinline__ void store_partial(const Block& b, int unit, int units, const float (&acc)[TILES][4]) {
    float* mine = b.scratch + b.buffer * PARTIAL_FLOATS + (b.warp * units + unit) * b.nodes * 8 + (b.lane & 3) * 2;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        const int token = t * 16 + (b.lane >> 2);
        if (token < b.nodes) *(float2*)(mine + token * 8) = {acc[t][0], acc[t][1]};
        if (HALVES > 1 && token + 8 < b.nodes) *(float2*)(mine + (token + 8) * 8) = {acc[t][2], acc[t][3]};
    }
}

// The sum over the sixteen warps, the same in all four lanes of a group.
__device__ __forceinline__ float4 sum_partials(const Block& b, int offset, int stride) {
    const float* at = b.scratch + b.buffer * PARTIAL_FLOATS + offset + (b.lane & 3) * 4 * stride;
    float4 sum = *(const float4*)at;
#pragma unroll
    for (int w = 1; w < 4; w++) {
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
    const int first = (b.lane & 3) * 4;
    float sum = b.s.squares[b.norm][first][token];
#pragma unroll
    for (int w = 1; w < 4; w++) sum += b.s.squares[b.norm][first + w][token];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    return rsqrtf(sum / HIDDEN + EPS);
}

// After the barrier: `finish(live, unit, token, quarter, sum)` for every group of four rows, by four lanes together.
// Gate and up rows of an MLP unit are the two quarters, in neighbouring groups. Every lane calls, live or not.
template <class Finish>
__device__ __forceinline__ void finish_batch(Block& b, int units, Finish finish) {
    const int items = units * b.nodes * 2, stride = units * b.nodes * 8;
    for (int first = 0; first < items; first += CONSUMERS / 4) {
        const int item = first + (threadIdx.x >> 2);
        const bool live = item < items;
        const int at = live ? item : item & 1;
        const float4 sum = sum_partials(b, at * 4, stride);
        finish(live, (at >> 1) / b.nodes, (at >> 1) % b.nodes, at & 1, sum);
    }
    b.buffer ^= 1;
}

// Chunk j of a stage of `chunks`: this lane's 16 bytes. Two chunks share a slot.
__device__ __forceinline__ uint4 take_chunk(Block& b, int j, int chunks) {
    if (j % 2 == 0) b.ring.wait();
    const uint4 w = load_shared16(b.ring.data() + (j % 2) * CHUNK_BYTES + b.warp * 512 + b.lane * 16);
    if (j % 2 == 1 || j == chunks - 1) b.ring.release();
    return w;
}

// WIDTH units side by side, so that their mma chains overlap. `unit` counts in the batch, `base + unit` in the stage.
template <int CHUNKS, int WIDTH>
__device__ __forceinline__ void multiply_units(Block& b, const Activations<CHUNKS>& a, int base, int unit, int count, int units) {
    uint4 w[WIDTH][CHUNKS];
#pragma unroll
    for (int u = 0; u < WIDTH; u++)
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) w[u][c] = take_chunk(b, (base + unit + u) * CHUNKS + c, units * CHUNKS);
    float acc[WIDTH][TILES][4] = {};
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
        for (int u = 0; u < WIDTH; u++) multiply_chunk<CHUNKS>(acc[u], a, c, w[u][c]);
#pragma unroll
    for (int u = 0; u < WIDTH; u++) store_partial(b, unit + u, count, acc[u]);
}

// Many units over activations that stay in registers.
template <int CHUNKS, class Finish>
__device__ __forceinline__ void multiply_resident(Block& b, const Activations<CHUNKS>& a, int units, Finish finish) {
    constexpr int WIDTH = CHUNKS * HALVES <= 4 ? 4 : CHUNKS * HALVES <= 8 ? 2 : 1;
    const int batch = batch_units(b);
    for (int base = 0; base < units; base += batch) {
        const int count = min(batch, units - base);
        int unit = 0;
        for (; unit + WIDTH <= count; unit += WIDTH) multiply_units<CHUNKS, WIDTH>(b, a, base, unit, count, units);
        for (; unit < count; unit++) multiply_units<CHUNKS, 1>(b, a, base, unit, count, units);
        b.sync();
        finish_batch(b, count, [&](bool live, int u, int token, int quarter, float4 sum) {
            finish(live, base + u, token, quarter, sum);
        });
    }
}

// Inputs of a stage that starts with an RMS norm: x times the norm's weight, rounded to bf16. The norm's scale is one
// number a token and is applied to the finished sums, so that nobody waits for it.
template <int CHUNKS>
__device__ __forceinline__ void load_normed(Block& b, Activations<CHUNKS>& a, const Packet* x, u32 tag, const float* weight) {
    float w[CHUNKS][8];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const int k = b.warp * (CHUNKS * 32) + c * 32 + (b.lane & 3) * 8;
#pragma unroll
        for (int i = 0; i < 8; i += 4) *(float4*)&w[c][i] = k < HIDDEN ? __ldg((const float4*)(weight + k + i)) : float4{};
    }
    float squares[HALVES] = {};
    NoCompanion none;
    load_activations<CHUNKS, CHUNKS, HIDDEN>(b, a, 0, x, X_PACKETS, tag, none, [&](float v, int half, int c, int i) {
        squares[half] += v * v;
        return v * w[c][i];
    });
    b.norm ^= 1;
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
        float sum = squares[half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const int token = half * 8 + (b.lane >> 2);
        if ((b.lane & 3) == 0 && token < b.nodes) b.s.squares[b.norm][b.warp][token] = sum;
    }
}

// A projection back to the residual stream: few units an SM and K large, so activations are fetched a few chunks at a
// time. SCALED: the inputs are DeltaNet outputs before their head norm, whose 1 / rms multiplies the sums over a head; its
// sum of squares comes in packets beside the values and is asked for together with them.
// The new residual is kept, published to `out`, and stored as a feature if asked.
template <int K, bool SCALED>
__device__ __forceinline__ void project_to_residual(Block& b, const Packet* from, int packets, u32 from_tag, Packet* out,
                                                    float* feature) {
    constexpr int CHUNKS = chunks_of(K), TOGETHER = HALVES == 1 ? CHUNKS : HALVES == 2 ? 4 : HALVES == 4 ? 2 : 1;
    const int first = first_unit(HIDDEN_UNITS, b.sm), units = first_unit(HIDDEN_UNITS, b.sm + 1) - first;
    const int batch = batch_units(b);
    for (int base = 0; base < units; base += batch) {
        const int count = min(batch, units - base);
        for (int unit = 0; unit < count; unit++) {
            float total[TILES][4] = {};
#pragma unroll
            for (int c0 = 0; c0 < CHUNKS; c0 += TOGETHER) {
                Activations<TOGETHER> a;
                typename Select<SCALED, HeadScales<TOGETHER>, NoCompanion>::type scales(b.warp * (CHUNKS * 32) + c0 * 32);
                load_activations<CHUNKS, TOGETHER, K>(b, a, c0, from, packets, from_tag, scales,
                                                      [](float v, int, int, int) { return v; });
#pragma unroll
                for (int c = c0; c < c0 + TOGETHER && c < CHUNKS; c++) {
                    const uint4 w = take_chunk(b, (base + unit) * CHUNKS + c, units * CHUNKS);
                    float acc[TILES][4] = {};
                    multiply_chunk<TOGETHER>(acc, a, c - c0, w);
#pragma unroll
                    for (int t = 0; t < TILES; t++) {
                        const float low = scales.at(2 * t, c - c0), high = scales.at(HALVES > 1 ? 2 * t + 1 : 0, c - c0);
                        total[t][0] = fmaf(low, acc[t][0], total[t][0]);
                        total[t][1] = fmaf(low, acc[t][1], total[t][1]);
                        total[t][2] = fmaf(high, acc[t][2], total[t][2]);
                        total[t][3] = fmaf(high, acc[t][3], total[t][3]);
                    }
                }
            }
            store_partial(b, unit, count, total);
        }
        b.sync();
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
