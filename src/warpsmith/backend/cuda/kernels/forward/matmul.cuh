// Matrix products: y = W x for 1..NODES tokens, one path for any number of them.
//
// Every warp owns a fixed slice of K (see common/tiles.cuh), 32 k a chunk. A lane's part of the activations is 8 bf16
// values of a token at k = 8 (l mod 4) .. + 7 of a chunk, as they come from the exchange. What is multiplied how, and
// summed in which order, depends on the weights' format only (formats/): a token's bits depend neither on the other
// tokens nor on how many there are.
//
// Weights wait for nothing: they are in registers before the activations have come, and serve all tokens in turn.
// After the mma each warp's partial sums go to shared memory; after one barrier a thread adds up four rows of a token.
// Partial sums alternate between two buffers, so that one barrier is enough.
// Bytes: each weight is read from the ring once, 128 bytes a clock of shared-memory bandwidth at most.
#pragma once
#include "forward/weights.cuh"

// Where a lane's part of chunk `block` + c of a warp's slice is, of the node tile that lies `at` words on: `lane_at`
// words into the chunk. Chunks of a chain lie behind each other, so that one address serves them all; else the compiler
// works out one for each ahead and puts them aside. Not where weights are quantised: those builds would put more aside.
template <class Held>
__device__ __forceinline__ const u32* chunk_at(const u32* values, int at, int chunks, int warp, int block, int c,
                                               int lane_at) {
    if (Held::QUANTISED) return values + at + chunk_place(chunks, warp, block + c) * CHUNK_WORDS + lane_at;
    const int begin = c / CHAIN * CHAIN, place = chunk_place(chunks, warp, block + begin) * CHUNK_WORDS;
    return values + (at + place + lane_at) + (c - begin) * CHUNK_WORDS;
}

// What a warp needs of a node tile of tokens: their values at its k, and the sums of squares of its slice of x, which a
// token's four lanes share. Columns past the last token are that one again.
template <int CHUNKS>
struct NodeTile {
    static constexpr int EACH = (CHUNKS + 3) / 4;  // groups of four row tiles
    uint4 a[CHUNKS], squares[EACH];

    // As before anything has come: a first value, or the registers would be taken all through the kernel.
    __device__ __forceinline__ void forget() {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) a[c] = {NOT_YET, NOT_YET, NOT_YET, NOT_YET};
#pragma unroll
        for (int i = 0; i < EACH; i++) squares[i] = {NOT_YET, NOT_YET, NOT_YET, NOT_YET};
    }
    // Asks for a chunk, and for the squares.
    __device__ __forceinline__ void ask(const Block& b, const u32* x, int first, int c) {
        const int token = min(b.lane >> 2, b.nodes - 1 - first), q = b.lane & 3;
        const bool live = HIDDEN % CHUNK_K == 0 || (b.warp * CHUNKS + c) * 32 + q * 8 < HIDDEN;
        a[c] = live ? load16(chunk_at<WideFormats>(x, first / 8 * NODE_TILE_WORDS, CHUNKS, b.warp, 0, c,
                                                   token * 16 + q * 4))
                    : uint4{};
    }
    __device__ __forceinline__ void ask_squares(const Block& b, const u32* x_squares, int first) {
        const int token = min(b.lane >> 2, b.nodes - 1 - first), q = b.lane & 3;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int group = i * 4 + q, tile = (b.warp * CHUNKS + group) * 4;
            const bool live = (CHUNKS % 4 == 0 || group < CHUNKS) && (HIDDEN % CHUNK_K == 0 || tile < HIDDEN_TILES);
            squares[i] =
                live ? load16(x_squares + first / 8 * NODE_TILE_WORDS + token * square_stride(HIDDEN_TILES) + tile)
                     : uint4{};
        }
    }
    __device__ __forceinline__ void ask(const Block& b, const u32* x, const u32* x_squares, int first) {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) ask(b, x, first, c);
        ask_squares(b, x_squares, first);
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
        Watchdog dog;
        do {
            ask(b, x, x_squares, first);
            dog.check();
        } while (!came());
    }
    // Whether the squares of a node tile's last node had come when this was asked for: then probably all has.
    struct Look {
        static constexpr int WORDS = (CHUNKS * 4 + 31) / 32;
        u32 word[WORDS];
        __device__ __forceinline__ Look(const Block& b, const u32* x_squares, int first) {
            const int node = min(7, b.nodes - 1 - first), start = b.warp * CHUNKS * 4;
#pragma unroll
            for (int i = 0; i < WORDS; i++) {
                const int tile = i * 32 + b.lane;
                const bool live = tile < CHUNKS * 4 && (HIDDEN % CHUNK_K == 0 || start + tile < HIDDEN_TILES);
                word[i] = live ? load4(x_squares + first / 8 * NODE_TILE_WORDS + node * square_stride(HIDDEN_TILES) +
                                       start + tile)
                               : 0;
            }
        }
        __device__ __forceinline__ bool came() const {
            bool all = true;
#pragma unroll
            for (int i = 0; i < WORDS; i++) all &= word[i] != NOT_YET;
            return everywhere(all);
        }
    };
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

// Has a node tile of the activation at hand come, as far as can be seen? look(first) where nobody looks out.
template <class LookFor>
__device__ __forceinline__ bool is_there(const Block& b, int first, LookFor look) {
    return HELPED ? everywhere(barrier_seen(b.barriers.there + first, b.phase(THERE_PHASE)))
                  : look(first);  // eight bytes a node tile
}
template <class LookFor>
__device__ __forceinline__ void wait_until_there(const Block& b, int first, LookFor look) {
    Watchdog dog;
    if constexpr (HELPED)
        barrier_wait(b.barriers.there + first, b.phase(THERE_PHASE));
    else
        while (!look(first)) dog.check();
}
// This warp needs no more of it.
__device__ __forceinline__ void all_taken(Block& b) {
    if (!HELPED) return;
    arrive_for_warp(b.barriers.taken);
    b.phases ^= THERE_PHASE;
}

// 1 / rms of a token.
__device__ __forceinline__ float inverse_rms(const Block& b, int token) {
    const float4* at = (const float4*)b.s.squares[b.phase(NORM_PHASE)][token];
    const float4 low = at[0], high = at[1];
    const float sum = ((low.x + low.y) + (low.z + low.w)) + ((high.x + high.y) + (high.z + high.w));
    return inverse_root(fmaf(sum, 1.0f / HIDDEN, EPS));
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

// --- wide stages ----------------------------------------------------------------------------------------------------
// Row tiles of `parts` from `first_tile` on, times x / rms(x).
// finish(live, tile, token, quarter, place, v, kept) for four rows of a token at a time, all lanes of a warp, `live` or
// not; `tile` counts from 0; quarters 0 and 2 of a row tile are in neighbouring lanes, and 1 and 3; `place` is what
// where(tile, quarter) said while there was time.
struct WideRows {
    StageParts parts;
    int first_tile, tiles;
    const u32 *x, *squares;  // the first node tile's

    // Row tiles from `base` on that are multiplied together, and how many.
    __device__ __forceinline__ Run run(int base, int& count) const {
        const Run run = parts.run<WideFormats>(first_tile + base, first_tile + tiles);
        WideFormats::with(run.format, [&](auto format) { count = min(tiles_at_once<decltype(format)>(), run.tiles); });
        return run;
    }
};

// This warp's share of a node tile's sums, to shared memory. Partial sums alternate between two buffers.
constexpr int WIDE_CHUNKS = chunks_of(HIDDEN), WARP_STRIDE = TOKENS_AT_ONCE * ROW_STRIDE;
static_assert(WIDE_CHUNKS <= MAX_CHUNKS, "a row tile must fit in the registers");
__device__ __forceinline__ float* partial_sums(const Block& b) { return b.scratch + b.phase(HALF_PHASE) * WIDE_FLOATS; }

template <class Done>
__device__ __forceinline__ void put_sums(Block& b, int format, const u32 (&w)[wide_registers(WIDE_CHUNKS)],
                                         const uint4 (&x)[WIDE_CHUNKS], int first, Done done) {
    float* mine = partial_sums(b) + (b.warp * TOKENS_AT_ONCE + (b.lane & 3) * 2) * ROW_STRIDE + (b.lane >> 2);
    const int tokens = b.nodes - first - (b.lane & 3) * 2;  // of this lane's two
    const auto store = [&](int t, float4 sum) {
        if (tokens > 0) mine[t * WIDE] = sum.x, mine[t * WIDE + 8] = sum.z;
        if (NODES > 1 && tokens > 1) mine[ROW_STRIDE + t * WIDE] = sum.y, mine[ROW_STRIDE + t * WIDE + 8] = sum.w;
    };
    multiply_wide<WIDE_CHUNKS>(format, w, x, store, done);
}
// This warp's share of a node tile's sums of squares.
__device__ __forceinline__ void put_squares(const Block& b, int first, float squares) {
    const int token = first + (b.lane >> 2);
    if ((b.lane & 3) == 0 && token < b.nodes) b.s.squares[b.phase(NORM_PHASE)][token][b.warp] = squares;
}

// One node: every warp finishes half a row tile, two lanes.
template <class Where, class Finish>
__device__ __forceinline__ void multiply_normed_one(Block& b, const WideRows& rows, Where where, Finish finish) {
    const int quarter = (b.warp & 1) + 2 * (b.lane & 1), tile = b.warp >> 1;
    b.phases ^= NORM_PHASE;
    NodeTile<WIDE_CHUNKS> node;
    node.forget();
#pragma unroll 1
    for (int base = 0, count; base < rows.tiles; base += count) {
        const Run run = rows.run(base, count);
        u32 w[wide_registers(WIDE_CHUNKS)];
        take_wide<WIDE_CHUNKS>(b, run, w);
        int place = where(base + tile, quarter);
        asm volatile("" : "+r"(place));  // now
        if (base == 0) {
            b.mark();
            b.sync();  // polling would hold up the loads of a warp that comes late
            node.poll(b, rows.x, rows.squares, 0);
            b.mark();
        }
        put_sums(b, run.format, w, node.a, 0, [](int) {});
        const float squares = node.square_sum();
        if (base == 0) {
            put_squares(b, 0, squares);
            copies_done();  // convolution weights and history, which `finish` needs
            b.mark();
        }
        b.sync();
        if (base == 0) b.mark();
        if (b.warp < 2 * count) {
            const float4 sum = sum_parts<WARPS>(partial_sums(b) + tile * WIDE + quarter * 4, WARP_STRIDE);
            finish(b.lane < 2, base + tile, 0, quarter, place, scaled(sum, inverse_rms(b, 0)), nullptr);
        }
        b.phases ^= HALF_PHASE;
    }
}

// A tree goes node tile by node tile. Asking for all of one again and again would be in the way of what is published,
// so it is asked for when it seems to be there; if the next one is already, that is asked for as the mma are done with
// this one's registers.
struct TreeInput {
    NodeTile<WIDE_CHUNKS> tile;
    bool asked = false;

    template <class Look>
    __device__ __forceinline__ void wait_for(const Block& b, const WideRows& rows, int first, Look look) {
        if (!asked) {
            wait_until_there(b, first, look);
            tile.ask(b, rows.x, rows.squares, first);
        }
        if (!tile.came()) tile.poll(b, rows.x, rows.squares, first);
    }
};

// What this warp finishes of a node tile that is summed: some of its tokens. If there are more warps than it takes,
// they take turns. A `gather` first writes what was summed to `kept`, where a token's ancestors are then found
// ROW_STRIDE floats a token apart: those of this node tile once all who finish it have written, the others since a
// barrier of everybody.
constexpr int FINISHING = 4;  // their barrier's number
template <class Finish>
__device__ __forceinline__ void finish_node_tile(Block& b, int first, int step, int base, int count, int tile,
                                                 int quarter, int place, bool gather, Finish finish) {
    constexpr int LANES = 4 * TILES_AT_ONCE, TOKENS = 32 / LANES, WORKERS_HERE = TOKENS_AT_ONCE / TOKENS;
    const int worker = (b.warp + step * WORKERS_HERE) % WARPS, mine = first + worker * TOKENS + b.lane / LANES;
    const bool works = worker < WORKERS_HERE && first + worker * TOKENS < b.nodes,
               live = tile < count && mine < b.nodes;
    const int token = min(mine, b.nodes - 1);
    float* kept = b.scratch + KEPT_ROWS_AT + tile * WIDE + quarter * 4;
    float4 v = {};
    if (works) {
        const float* at = partial_sums(b) + (token - first) * ROW_STRIDE + tile * WIDE + quarter * 4;
        v = scaled(sum_parts<WARPS>(at, WARP_STRIDE), inverse_rms(b, token));
        if (gather) *(float4*)(kept + token * ROW_STRIDE) = v;
    }
    if (gather && worker < WORKERS_HERE) sync_some<WORKERS_HERE * 32>(FINISHING);
    if (works) finish(live, base + tile, token, quarter, place, v, kept);
}

// A tree: a few lanes finish a token.
template <class Where, class Finish>
__device__ __forceinline__ void multiply_normed_tree(Block& b, const WideRows& rows, bool gather, Where where,
                                                     Finish finish) {
    const auto look = [&](int first) { return NodeTile<WIDE_CHUNKS>::Look(b, rows.squares, first).came(); };
    b.phases ^= NORM_PHASE;
    TreeInput input;
    input.tile.forget();
    int step = 0;
#pragma unroll 1
    for (int base = 0, count; base < rows.tiles; base += count) {
        const Run run = rows.run(base, count);
        const bool last = base + count == rows.tiles;
        u32 w[wide_registers(WIDE_CHUNKS)];
        take_wide<WIDE_CHUNKS>(b, run, w);
        const int quarter = (b.lane >> 1 & 1) + 2 * (b.lane & 1), tile = b.lane / 4 % TILES_AT_ONCE;
        int place = where(base + tile, quarter);
        asm volatile("" : "+r"(place));  // now
        if (base == 0) {
            b.mark();
            if (!LOOKS) b.sync();  // polling would hold up the loads of a warp that comes late
        }
#pragma unroll 1
        for (int first = 0; first < b.nodes; first += TOKENS_AT_ONCE, step++) {
            const int next = first + 8 < b.nodes ? first + 8 : 0;  // the first again, for other row tiles
            if constexpr (LOOKS) {
                input.wait_for(b, rows, first, look);
                input.asked = (next > 0 || !last) && is_there(b, next, look);
            } else if (base == 0) {
                input.tile.poll(b, rows.x, rows.squares, first);
            }
            if (step == 0) b.mark();
            put_sums(b, run.format, w, input.tile.a, first, [&](int c) {
                if (LOOKS && input.asked) input.tile.ask(b, rows.x, next, c);
            });
            if (base == 0) {
                put_squares(b, first, input.tile.square_sum());
                if (LOOKS && input.asked) input.tile.ask_squares(b, rows.squares, next);
            }
            if (step == 0) copies_done();  // convolution weights and history, which `finish` needs
            if (step == 0) b.mark();
            b.sync();
            if (step == 0) b.mark();
            finish_node_tile(b, first, step, base, count, tile, quarter, place, gather, finish);
            b.phases ^= HALF_PHASE;
        }
    }
    all_taken(b);
}
