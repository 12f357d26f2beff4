// What one thread block (one SM) knows while it runs, and how SMs hand on what they have computed.
//
// Activations and sums cross as words that a reader polls (common/exchange.cuh): there is no barrier between steps.
// Weights do not wait at all: their ring fills on through every step. Copies of an exchange may be written again because
// who reads a word publishes something that everybody's next but one stage needs: the sums of a stage need all of its
// activations, and activations all groups of K. Where that does not hold (rows of attention, the choice of a token), a
// counter in memory, to which each SM adds, tells that all have come.
#pragma once
#include "large/shape.cuh"

constexpr int ARRIVALS = REDUCERS * SMS;  // of a step

struct Block {
    const Params& p;
    const Request& r;
    Shared& s;
    u8* scratch;
    u32 base;  // address of the shared memory
    int sm = blockIdx.x, warp = uniform(threadIdx.x >> 5), lane = threadIdx.x & 31;
    int nodes, length;
    u32 steps_done = 0;
    // the consumers' places in the ring and in the buffers of sums
    int slot = 0, buffer = 0;
    u32 slot_phase = 0, buffer_phase = 0;
    int deltas = 0;  // DeltaNet layers before this one
    u32 token = 0;   // decoded before in this launch
    const float* vectors;
    const struct Draw* draw = nullptr;  // of a build that samples

    __device__ Block(const Params& params, const Request& request, u8* memory)
        : p(params), r(request), s(*(Shared*)(memory + SHARED_AT)), scratch(memory), base(shared_address(memory)),
          nodes(request.nodes), length(request.length), vectors(params.vectors) {}

    __device__ bool decoding() const { return r.steps > 0; }
    __device__ void sync() const { sync_threads<CONSUMERS>(); }

    // All SMs have done what came before.
    __device__ void wait_for_all() {
        steps_done++;
        if (threadIdx.x == 0) {
            Watchdog dog;
            while ((int)(load_acquire(p.exchange) + 1 - steps_done * ARRIVALS) < 0) dog.check();  // from -1 on
        }
        __syncwarp();
        sync();
    }
    // This SM is done with a step that its consumers do.
    __device__ void step_done() {
        sync();
        if (threadIdx.x == 0) {
            fence_gpu();
            add_release(p.exchange, REDUCERS);
        }
    }
    __device__ void mark() {
#ifdef PROFILE
        if (threadIdx.x == 0 && marks < PROFILE) p.profile[sm * PROFILE + marks++] = clock64();
#endif
    }
#ifdef PROFILE
    int marks = 0;
#endif
};

// Where a node's activation k lies among those that a projection reads: 64 k of all nodes side by side, so that a warp
// takes whole lines.
__device__ __forceinline__ size_t activation_at(int node, int k) {
    return ((size_t)(k / 64) * NODES + node) * 64 + k % 64;
}

// One of an exchange's two copies, and how many words away the other one is.
struct Copy {
    u32* words;
    int other;
    __device__ Copy(const Params& p, int at, int count, u32 use)
        : words(p.exchange + at + (use & 1 ? count : 0)), other(use & 1 ? -count : count) {}
};
// The residual stream's for a stage, and those of a layer's mixer and MLP.
__device__ __forceinline__ Copy x_copy(const Block& b, int stage) {
    return Copy(b.p, X_AT, X_WORDS, b.token + (stage >> 1));
}
__device__ __forceinline__ Copy squares_copy(const Params& p, u32 token, int stage) {
    return Copy(p, X_SQUARES_AT, X_SQUARES, token + (stage >> 1));
}
__device__ __forceinline__ int mixed_copy(const Block& b, int layer, bool recurrent) {
    return (int)(recurrent ? b.token * DELTA_LAYERS + b.deltas : b.token * (LAYERS - DELTA_LAYERS) + layer - b.deltas) &
           1;
}
__device__ __forceinline__ Copy delta_copy(const Block& b) { return Copy(b.p, DELTA_AT, DELTA_WORDS, b.s.mixed); }
__device__ __forceinline__ Copy attention_copy(const Block& b) {
    return Copy(b.p, ATTENTION_AT, ATTENTION_WORDS, b.s.mixed);
}
__device__ __forceinline__ Copy h_copy(const Block& b, int layer) {
    return Copy(b.p, H_AT, H_WORDS, b.token * LAYERS + layer);
}

// Sums have the number of their stage in the low three bits of every four: all ones before a launch, an earlier stage's
// until they come. A stage's place among two follows from it, so their count is even.
constexpr u32 TAGS = 4094;
__device__ __forceinline__ u32 tag_of(u32 token, int stage) { return (token * (4 * LAYERS + 1) + stage) % TAGS; }
__device__ __forceinline__ u32* sums_of(const Params& p, u32 tag, bool head) {
    return p.exchange + (head ? HEAD_SUMS_AT : TAGGED_AT + (tag & 1 ? SUM_WORDS : 0));
}
__device__ __forceinline__ u32 tagged(float v, u32 tag) { return (__float_as_uint(v) & ~7u) | (tag & 7); }
__device__ __forceinline__ void publish_sums(u32* at, float4 v, u32 tag) {
    store16(at, tagged(v.x, tag), tagged(v.y, tag >> 3), tagged(v.z, tag >> 6), tagged(v.w, tag >> 9));
}
__device__ __forceinline__ bool has_tag(uint4 v, u32 tag) {
    return (((v.x ^ tag) | (v.y ^ tag >> 3) | (v.z ^ tag >> 6) | (v.w ^ tag >> 9)) & 7) == 0;
}
__device__ __forceinline__ float4 without_tag(uint4 v) {
    return {__uint_as_float(v.x & ~7u), __uint_as_float(v.y & ~7u), __uint_as_float(v.z & ~7u),
            __uint_as_float(v.w & ~7u)};
}

// What a tile of results has been summed to: all groups of K, and where SMs share a group's tile, all its parts, in
// order. The stage's table of tiles is in shared memory, where `load_table` put it. GROUPS: as many groups as K has at
// most.
template <int GROUPS>
struct Sums {
    const u32* sums;
    const u16* tiles;
    int stride;
    u32 tag;

    __device__ Sums(const Block& b, const u16* table, const Stage& stage)
        : sums(sums_of(b.p, b.s.tag, true)), tiles(table), stride(stage.tile_rows + 1), tag(b.s.tag) {}
    __device__ Sums(const Block& b, int rows)
        : sums(sums_of(b.p, b.s.tag, false)), tiles(b.s.tiles), stride(rows / ROWS + 1), tag(b.s.tag) {}

    // Rows `row` .. + 3, a multiple of 4, as soon as they have come: every part is asked for at once.
    __device__ float4 at(int node, int row) const {
        const u16* from = tiles + row / ROWS;
        const u32* first = sums + node * ROWS + row % ROWS;
        int tile[GROUPS], end[GROUPS];
        uint4 v[GROUPS][2];
#pragma unroll
        for (int g = 0; g < GROUPS; g++) tile[g] = from[g * stride], end[g] = from[g * stride + 1];
        for (Watchdog dog;; dog.check()) {
            bool all = true;
#pragma unroll
            for (int g = 0; g < GROUPS; g++) {
                v[g][0] = load16(first + (size_t)tile[g] * (NODES * ROWS));
                if (tile[g] + 1 < end[g]) v[g][1] = load16(first + (size_t)(tile[g] + 1) * (NODES * ROWS));
            }
#pragma unroll
            for (int g = 0; g < GROUPS; g++)
                all &= has_tag(v[g][0], tag) & (tile[g] + 1 >= end[g] | has_tag(v[g][1], tag));
            if (all) break;
        }
        float4 total = {};
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            total = add(total, without_tag(v[g][0]));
            if (tile[g] + 1 < end[g]) total = add(total, without_tag(v[g][1]));
#pragma unroll 1
            for (int i = tile[g] + 2; i < end[g]; i++) {
                const u32* at = first + (size_t)i * (NODES * ROWS);
                uint4 more = load16(at);
                for (Watchdog dog; !has_tag(more, tag); more = load16(at)) dog.check();
                total = add(total, without_tag(more));
            }
        }
        return total;
    }
    static __device__ __forceinline__ float4 add(float4 a, float4 b) {
        return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
    }
};

// What the sums of a stage are found by, to shared memory; it is there after the next barrier.
__device__ __forceinline__ void load_table(Block& b, int stage_index, u32 tag, int mixed) {
    if (threadIdx.x == 0) b.s.tag = tag, b.s.mixed = mixed;
    if (stage_index == 4 * LAYERS) return;  // the head's is long, and looked up where it is
    const Stage stage = b.p.stages[stage_index];
    const u32* from = (const u32*)(b.p.tiles + stage.tiles_at);
    const int words = (stage.groups * (stage.tile_rows + 1) + 1) / 2;
#pragma unroll 4
    for (int i = threadIdx.x; i < words; i += CONSUMERS) ((u32*)b.s.tiles)[i] = __ldg(from + i);
}
