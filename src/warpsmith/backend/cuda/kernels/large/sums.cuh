// Sums of a stage's products, polled for where they are used: their last bits say of which stage they are. And how
// words that SMs poll for are set back.
//
// Included where the pass has its own `Block` and `Stage` (large/block.cuh, draft/block.cuh).
#pragma once
#include "common/exchange.cuh"

// What a tile of results has been summed to: all groups of K, and where SMs share a group's tile, all its parts, in
// order. The stage's table of tiles is in shared memory, where `load_table` put it. GROUPS: as many groups as K has at
// most. `tag`: what the last bits of sums are that have come.
template <int GROUPS>
struct Sums {
    const float* sums;
    const u16* tiles;
    int stride;
    u32 tag;

    __device__ Sums(const float* from, const u16* table, int rows, u32 own_tag)
        : sums(from), tiles(table), stride(rows / ROWS + 1), tag(own_tag) {}

    // Where rows `row` .. + 3, a multiple of 4, of the first node are: a group's first part, and how many parts it has.
    struct Place {
        u32 at[GROUPS];
        int parts[GROUPS];
    };
    struct Asked {
        uint4 v[GROUPS][2];
    };
    __device__ __forceinline__ Place place(u32 row) const {
        const u16* from = tiles + row / ROWS;
        Place place;
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const int tile = from[g * stride];
            place.parts[g] = from[g * stride + 1] - tile;
            place.at[g] = tile * (NODES * ROWS) + row % ROWS;
        }
        return place;
    }
    __device__ __forceinline__ const float* part(const Place& place, int g, int i, int node, int on) const {
        return sums + (place.at[g] + (i * NODES + node) * ROWS) + on;
    }
    __device__ __forceinline__ bool come(uint4 v) const {
        return (((v.x ^ tag) | (v.y ^ tag) | (v.z ^ tag) | (v.w ^ tag)) & SUM_TAGS) == 0;
    }
    // A node's rows, or those `on` of the same tile further on: the first two parts of every group, asked for at once.
    __device__ __forceinline__ void ask(Asked& a, const Place& place, int node, int on = 0) const {
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            a.v[g][0] = __ldcg((const uint4*)part(place, g, 0, node, on));
            a.v[g][1] = place.parts[g] > 1 ? __ldcg((const uint4*)part(place, g, 1, node, on)) : uint4{};
        }
    }
    // Until they have come, in all lanes of the warp.
    __device__ __forceinline__ void wait(Asked& a, const Place& place, int node, int on = 0) const {
        for (Watchdog dog;; dog.check()) {
            bool all = true;
#pragma unroll
            for (int g = 0; g < GROUPS; g++) {
                const bool first = come(a.v[g][0]), second = place.parts[g] < 2 || come(a.v[g][1]);
                if (!first) a.v[g][0] = load16(part(place, g, 0, node, on));
                if (!second) a.v[g][1] = load16(part(place, g, 1, node, on));
                all &= first & second;
            }
            if (everywhere(all)) break;
        }
    }
    // What has come.
    __device__ __forceinline__ float4 sum(const Asked& a, const Place& place, int node, int on = 0) const {
        float4 total = {};
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            total = add(add(total, floats(a.v[g][0])), floats(a.v[g][1]));
#pragma unroll 1
            for (int i = 2; MOST_PARTS > 2 && i < place.parts[g]; i++) {
                uint4 more = load16(part(place, g, i, node, on));
                for (Watchdog dog; !come(more); more = load16(part(place, g, i, node, on))) dog.check();
                total = add(total, floats(more));
            }
        }
        return total;
    }
    __device__ __forceinline__ float4 total(Asked& a, const Place& place, int node, int on = 0) const {
        wait(a, place, node, on);
        return sum(a, place, node, on);
    }
    __device__ __forceinline__ float4 at(int node, int row) const {
        const Place where = place(row);
        Asked a;
        ask(a, where, node);
        return total(a, where, node);
    }
    static __device__ __forceinline__ float4 add(float4 a, float4 b) {
        return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
    }
};

// The stage's table of tiles to shared memory, by one warp; it is there after `copies_done` and a barrier.
__device__ __forceinline__ void load_table(Block& b, const Stage& stage) {
    const u16* from = b.p.tiles + stage.tiles_at;
    const int entries = stage.groups * (stage.tile_rows + 1);
#pragma unroll 4
    for (int i = b.lane * 8; i < entries; i += 256) copy16(b.s.tiles + i, from + i);
}

// Words are NOT_YET again: every SM has some of them, by `threads` threads, of which this is number `thread`.
__device__ __forceinline__ void reset_words(const Block& b, u32* words, int count, int thread, int threads) {
    const int end = first_of(count / 4, b.sm + 1);
#pragma unroll 1
    for (int i = first_of(count / 4, b.sm) + thread; i < end; i += threads)
        store16(words + i * 4, NOT_YET, NOT_YET, NOT_YET, NOT_YET);
}
