// What a format of weights is to the kernels.
//
// A struct with
//   NUMBER                       its type's number in a file
//   QUANTISED                    numbers are blocks of small whole ones and their scales
//   chunk_bytes(rows)            of a chunk of a row tile: the fragments of all warps
//   slot_chunks(rows)            chunks of a row tile in a slot of the ring
//   registers(rows)              that a lane's part of a fragment takes
//   load<ROWS>(at, warp, lane, w)      a lane's part, from the chunk at shared address `at`; returns a word of the last
//   load multiply<TILES>(w, x, each, done)  wide row tiles with a node tile: see below chain<WORDS>(w, x, chunks, q) a
//   chain of chunks of a narrow row tile: see below LOWER                        by which the sums of narrow row tiles
//   are multiplied in the end embed(chunk, warp, lane, upper)    eight values of a row in the stream look_up(table, at)
//   eight values of a table of the file's rows, from value `at` on PACKED, pack(place, rows, at)      moves so many
//   values of a row, from value `at` on, to their fragment
// It knows nothing of stages, and what includes it names no format.
#pragma once
#include "common/tiles.cuh"

// The formats that a build has code for. Where there is one, nothing is looked up.
template <class First, class... Others>
struct Formats {
    static constexpr bool SEVERAL = sizeof...(Others) > 0;
    static constexpr bool QUANTISED = First::QUANTISED || (Others::QUANTISED || ...);  // some of them

    // use(format) with the one that has this number.
    template <class Use>
    static __device__ __forceinline__ void with(int number, Use use) {
        if constexpr (SEVERAL) {
            if (number == First::NUMBER)
                use(First());
            else
                Formats<Others...>::with(number, use);
        } else {
            use(First());
        }
    }
    static __host__ __device__ constexpr int most_registers(int rows) {
        int most = First::registers(rows);
        if constexpr (SEVERAL) most = larger(most, Formats<Others...>::most_registers(rows));
        return most;
    }
    static __host__ __device__ constexpr int least_registers(int rows) {
        int least = First::registers(rows);
        if constexpr (SEVERAL) least = smaller(least, Formats<Others...>::least_registers(rows));
        return least;
    }
    static __host__ __device__ constexpr int slot_chunks(int rows) {
        int most = First::slot_chunks(rows);
        if constexpr (SEVERAL) most = larger(most, Formats<Others...>::slot_chunks(rows));
        return most;
    }
    static __host__ __device__ constexpr int slot_bytes() {
        int most = First::slot_chunks(WIDE) * First::chunk_bytes(WIDE);
        if constexpr (SEVERAL) most = larger(most, Formats<Others...>::slot_bytes());
        return most;
    }
};

// --- products -------------------------------------------------------------------------------------------------------
// The products of the first four of a lane's eight k and of the last four are summed apart.
// Wide: one mma (16 x 8 x 16) for the first four k, one for the last four, 8 nodes (l / 4) in the columns.
// multiply(): each(t, sums of rows l / 4 and l / 4 + 8 for two nodes), done(c) when a chunk's activations are not
// needed any more.
//
// Narrow: a mma's upper 8 rows are the same rows at the last four k. For one node one mma does both: its columns 0 to 3
// are the node at the first four k, 4 to 7 at the last. For a tree it takes two, for 8 nodes. Half of the result is not
// wanted. A lane has WORDS of a chunk's activations: of one node its first four k or its last, of eight nodes both.
constexpr int ONE_NODE = 2, NODE_TILE = 4;

// A chain's sums of row l / 4 for two nodes: over the first four k, and over the last.
struct ChainSums {
    float2 first, last;
};
// Where a mma's result is: for one node in lanes 0 and 1 of four at the first four k, in 2 and 3 at the last.
template <int WORDS>
__device__ __forceinline__ float2 at_first(const float (&sum)[4], int q) {
    return {WORDS > ONE_NODE || q < 2 ? sum[0] : sum[2], sum[1]};
}
__device__ __forceinline__ float2 at_last(const float (&sum)[4]) { return {sum[2], sum[3]}; }

// --- embedding and packing ------------------------------------------------------------------------------------------

struct Eight {
    float4 low, high;
};

// Where a row's weights go: the chunk of its row tile, whose fragment, which row of the tile, which eight of the
// fragment's 32 k.
struct Place {
    u8* chunk;
    int warp, row, quarter;
    int halves;  // of eight rows in a row tile
};
