// Matrix products: y = W x for 1..NODES tokens, one path for any number of them.
//
// Every warp owns a fixed slice of K (see shape.cuh), 32 k a chunk. A lane's part of the activations is 8 bf16 values of a
// token at k = 8 (l mod 4) .. + 7 of a chunk, as they come from the exchange. What is multiplied how, and summed in which
// order, depends on the weights' type only (weights.cuh): a token's bits depend neither on the other tokens nor on how many
// there are.
//
// Weights wait for nothing: they are in registers before the activations have come, and serve all tokens in turn.
// After the mma each warp's partial sums go to shared memory; after one barrier a thread adds up four rows of a token.
// Partial sums alternate between two buffers, so that one barrier is enough.
// Bytes: each weight is read from the ring once, 128 bytes a clock of shared-memory bandwidth at most.
#pragma once
#include "weights.cuh"

// What a warp needs of an octet of tokens: their values at its k, and the sums of squares of its slice of x, which a
// token's four lanes share. Columns past the last token are that one again.
template <int CHUNKS>
struct Octet {
    static constexpr int EACH = (CHUNKS + 3) / 4;  // groups of four units
    uint4 a[CHUNKS], squares[EACH];

    // As before anything has come: a first value, or the registers would be taken all through the kernel.
    __device__ __forceinline__ void forget() {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) a[c] = {NOT_YET, NOT_YET, NOT_YET, NOT_YET};
    }
    // `values` and `sums` are the octet's; get(address) loads 16 bytes.
    template <class At, class Get>
    __device__ __forceinline__ void load(const Block& b, int first, At values, At sums, Get get) {
        const int token = min(b.lane >> 2, b.nodes - 1 - first), q = b.lane & 3;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const bool live = HIDDEN % CHUNK_K == 0 || (b.warp * CHUNKS + c) * 32 + q * 8 < HIDDEN;
            a[c] = live ? get(values + chunk_place(CHUNKS, b.warp, c) * CHUNK_WORDS + token * 16 + q * 4) : uint4{};
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int group = i * 4 + q, unit = (b.warp * CHUNKS + group) * 4;
            const bool live = (CHUNKS % 4 == 0 || group < CHUNKS) && (HIDDEN % CHUNK_K == 0 || unit < HIDDEN_UNITS);
            squares[i] = live ? get(sums + token * square_stride(HIDDEN_UNITS) + unit) : uint4{};
        }
    }
    __device__ __forceinline__ bool came() const {
        bool all = true;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) all &= came8(a[c]);
#pragma unroll
        for (int i = 0; i < EACH; i++) all &= came4(squares[i]);
        return everywhere(all);
    }
    __device__ __forceinline__ void poll(const Block& b, const u32* x, const u32* x_squares, int first) {
        const int at = first / 8 * OCTET_WORDS;
        Watchdog dog;
        do {
            load(b, first, x + at, x_squares + at, [](const u32* from) { return load16(from); });
            dog.check();
        } while (!came());
    }
    // From the shelf's slot `ahead`; or, if it was fetched too early, from where it comes.
    __device__ __forceinline__ void take(const Block& b, int ahead, const u32* x, const u32* x_squares, int first) {
        b.shelf.wait(ahead);
        const SharedWords slot = {b.shelf.data(ahead)};
        load(b, first, slot + SHELF_SQUARE_WORDS, slot + (SHELF_SQUARE_WORDS - square_words(HIDDEN_UNITS)),
             [](SharedWords from) { return load_shared16(from.address); });
        if (!came()) poll(b, x, x_squares, first);
    }
    // Of the squares of a lane's token, over this warp's slice.
    __device__ __forceinline__ float square_sum() const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const float4 v = floats(squares[i]);
            sum += (v.x + v.y) + (v.z + v.w);
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        return sum + __shfl_xor_sync(~0u, sum, 2);
    }
};

// 1 / rms of a token.
__device__ __forceinline__ float inverse_rms(const Block& b, int token) {
    const float4* at = (const float4*)b.s.squares[b.norm][token];
    const float4 low = at[0], high = at[1];
    const float sum = ((low.x + low.y) + (low.z + low.w)) + ((high.x + high.y) + (high.z + high.w));
    return inverse_root(sum / HIDDEN + EPS);
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

// Stage: units of `types` from `first_unit` on. `finish(live, unit, token, quarter, place, v, kept)` for four rows of a token at a time,
// all lanes of a warp, `live` or not; `unit` counts from 0; quarters 0 and 2 of a unit are in neighbouring lanes, and 1 and 3;
// `place` is what `where(unit, quarter)` said while there was time.
// A `gather` in a tree first writes them to `kept`, where a token's ancestors are then found ROW_STRIDE floats a token apart.
//
// A tree goes octet by octet; when one or two have been summed (STEP_TOKENS) the warps finish them, and their nodes are with the next
// stage before the last are done with this one.
template <class Where, class Finish>
__device__ __forceinline__ void multiply_normed(Block& b, StageTypes types, int first_unit, int units, const u32* x,
                                                const u32* squares, bool gather, Where where, Finish finish) {
    constexpr int CHUNKS = chunks_of(HIDDEN), AT_ONCE = UNITS_AT_ONCE;
    static_assert(CHUNKS <= MAX_CHUNKS, "a unit must fit in the registers");
    b.norm ^= 1;
    Octet<CHUNKS> octet;
    octet.forget();
    int step = 0;
#pragma unroll 1
    for (int base = 0, count; base < units; base += count) {
        const Run run = types.run<WIDE_TYPES>(first_unit + base, first_unit + units);
        count = min(units_at_once(run.type), run.units);
        const bool last = base + count == units;
        u32 w[wide_registers(CHUNKS)];
        take_wide<CHUNKS>(b, run, w);
        // What a lane finishes. One node: every warp has half a unit, two lanes. A tree: a few lanes have a token.
        const int quarter = NODES == 1 ? (b.warp & 1) + 2 * (b.lane & 1) : (b.lane >> 1 & 1) + 2 * (b.lane & 1);
        const int unit = NODES == 1 ? b.warp >> 1 : b.lane / 4 % AT_ONCE;
        int place = where(base + unit, quarter);
        asm volatile("" : "+r"(place));  // now
        if (base == 0) {
            copies_done();               // what the last step of the stage needs
            if (!FETCHES) b.sync();      // polling would hold up the loads of a warp that comes late
        }
#pragma unroll 1
        for (int start = 0; start < b.nodes; start += STEP_TOKENS, step++) {
            float* partial = b.scratch + (WIDE_BUFFERS == 1 ? 0 : b.buffer * WIDE_FLOATS);
#pragma unroll 1
            for (int first = start; first < min(start + STEP_TOKENS, b.nodes); first += 8) {
                if constexpr (FETCHES) {
                    octet.take(b, last ? 0 : first / 8, x, squares, first);
                    if (last) b.shelf.release(1, 0);
                } else if (base == 0 || NODES > 8) {
                    octet.poll(b, x, squares, first);
                }
                if (step == 0 && first == 0) b.mark();
                if (WIDE_BUFFERS == 1 && first == start) b.sync();  // the sums before have been read
                float* mine = partial + (b.warp * STEP_TOKENS + first - start + (b.lane & 3) * 2) * ROW_STRIDE + (b.lane >> 2);
                const int tokens = b.nodes - first - (b.lane & 3) * 2;  // of this lane's two
                multiply_wide<CHUNKS>(run.type, w, octet.a, [&](int u, float4 sum) {
                    if (tokens > 0) mine[u * WIDE] = sum.x, mine[u * WIDE + 8] = sum.z;
                    if (NODES > 1 && tokens > 1) mine[ROW_STRIDE + u * WIDE] = sum.y, mine[ROW_STRIDE + u * WIDE + 8] = sum.w;
                });
                const float squares_here = octet.square_sum();
                const int token = first + (b.lane >> 2);
                if (base == 0 && (b.lane & 3) == 0 && token < b.nodes) b.s.squares[b.norm][token][b.warp] = squares_here;
            }
            if (step == 0) b.mark();
            b.sync();
            if (step == 0) b.mark();
            constexpr int WARP_STRIDE = STEP_TOKENS * ROW_STRIDE;
            if constexpr (NODES == 1) {
                if (b.warp < 2 * count) {
                    const float4 sum = sum_parts<WARPS>(partial + unit * WIDE + quarter * 4, WARP_STRIDE);
                    finish(b.lane < 2, base + unit, 0, quarter, place, scaled(sum, inverse_rms(b, 0)), nullptr);
                }
            } else {  // if there are more warps than it takes, they take turns
                constexpr int LANES = 4 * AT_ONCE, TOKENS = 32 / LANES, WORKERS_HERE = STEP_TOKENS / TOKENS;
                const int worker = (b.warp + step * WORKERS_HERE) % WARPS, mine = start + worker * TOKENS + b.lane / LANES;
                const bool works = worker < WORKERS_HERE && start + worker * TOKENS < b.nodes, live = unit < count && mine < b.nodes;
                const int token = min(mine, b.nodes - 1);
                float* kept = b.scratch + KEPT_ROWS_AT + unit * WIDE + quarter * 4;
                float4 v = {};
                if (works) {
                    const float4 sum = sum_parts<WARPS>(partial + (token - start) * ROW_STRIDE + unit * WIDE + quarter * 4, WARP_STRIDE);
                    v = scaled(sum, inverse_rms(b, token));
                    if (gather) *(float4*)(kept + token * ROW_STRIDE) = v;
                }
                if (gather) b.sync();
                if (works) finish(live, base + unit, token, quarter, place, v, kept);
            }
            b.buffer ^= 1;
        }
    }
}
