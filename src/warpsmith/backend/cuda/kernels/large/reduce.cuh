// Who adds up: two warps take tiles of results from those who multiply, and write their sums to memory.
//
// Included where the pass has its own `Block`, `Params` and `Shared`, behind large/ring.cuh.
#pragma once

__device__ __forceinline__ u32 tagged(float sum, u32 tag) { return (__float_as_uint(sum) & ~SUM_TAGS) | tag; }

// Where sums of tiles go that others add up further: their last bits say of which stage they are.
struct TaggedSums {
    float* to;
    const int token, nodes;
    const u32 tag;

    __device__ __forceinline__ TaggedSums(const Block& b, int which, const Run& run, float* sums, u32 own_tag)
        : to(sums + (size_t)run.result * NODES * ROWS + (b.lane & 3) * 2 * ROWS + which * 32 + (b.lane >> 2)),
          token((b.lane & 3) * 2), nodes(b.nodes), tag(own_tag) {}
    __device__ __forceinline__ void expect() {}
    __device__ __forceinline__ void take(int octet, int i, float4 sums) const {
        float* at = to + octet * 8 * ROWS + i * 16;
        const auto store = [&](float* at, float v) { store4(at, tagged(v, tag)); };
        if (octet * 8 + token < nodes) store(at, sums.x), store(at + 8, sums.z);
        if (octet * 8 + token + 1 < nodes) store(at + ROWS, sums.y), store(at + ROWS + 8, sums.w);
    }
    __device__ __forceinline__ void next() { to += NODES * ROWS; }
};

__device__ __forceinline__ int own_sums_at(int tile, int which, int lane) {
    return (tile * 2 + which) * (OCTETS * 2 * 32) + lane;
}

// Those of the head, which goes over K in rounds, stay with the SM, as its lanes have them: [tile][which][octet][i]
// [lane]. In every round but the first what is there is asked for before the tile's products have ended. The last
// round's are given to `outcome` instead, as tiles' sums are given here.
template <class Outcome>
struct OwnSums {
    float4* at;
    const bool first, last;  // round
    Outcome outcome;
    float4 before[OCTETS * 2] = {};

    __device__ __forceinline__ OwnSums(const Block& b, int which, const Run& run, float* sums, bool first_round,
                                       bool last_round, const Outcome& of_last)
        : at((float4*)sums + own_sums_at(run.result, which, b.lane)), first(first_round), last(last_round),
          outcome(of_last) {}
    __device__ __forceinline__ void expect() {
        if (first) return;
#pragma unroll
        for (int j = 0; j < OCTETS * 2; j++) before[j] = __ldcg(at + j * 32);
    }
    __device__ __forceinline__ void take(int octet, int i, float4 sums) {
        const float4 v = before[octet * 2 + i];
        const float4 all = {v.x + sums.x, v.y + sums.y, v.z + sums.z, v.w + sums.w};
        if (last)
            outcome.take(octet, i, all);
        else
            at[(octet * 2 + i) * 32] = all;
    }
    __device__ __forceinline__ void next() { at += own_sums_at(1, 0, 0), outcome.next(); }
};

// Of every tile of results a warp has half of the rows, so that the last one takes both of them half as long. Lane
// 4 g + q: rows g, g + 8 of two quarters, tokens 2 q, 2 q + 1 of every octet: {row g, first token; second; row g + 8,
// first token; second} are given to `sums`.
template <class To>
__device__ __forceinline__ void reduce_tiles(Block& b, int which, const Run& run, u32& count, To& sums) {
    const Barriers bars(b.base);
    const int q = b.lane & 3;
#pragma unroll 1
    for (Walk walk(run); walk.more(); walk.next(), sums.next(), count++) {
        const u32 buffer = count % SUM_BUFFERS;
        sums.expect();
        barrier_wait(bars.sums_full + 8 * buffer, count / SUM_BUFFERS & 1);
        const float4* from = (const float4*)(b.scratch + SUMS_AT + buffer * SUM_BYTES) + b.lane;
#pragma unroll
        for (int o = 0; o < OCTETS; o++) {
            const int token = o * 8 + q * 2;
            const float by[2] = {b.sum_factor(which, token), b.sum_factor(which, token + 1)};
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int quarter = which * 2 + i;
                const float4 u = from[(quarter * OCTETS + o) * 32], v = from[((quarter + 4) * OCTETS + o) * 32];
                sums.take(o, i,
                          {(u.x + v.x) * by[0], (u.y + v.y) * by[1], (u.z + v.z) * by[0], (u.w + v.w) * by[1]});
            }
        }
        arrive_for_warp(bars.sums_empty + 8 * buffer, b.lane);
    }
    __syncwarp();
}
