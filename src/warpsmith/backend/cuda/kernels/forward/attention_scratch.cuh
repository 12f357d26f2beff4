// What attention has in shared memory, and the rows of a tree that come into it.
//
// Rows of q [tiles][16], drafted keys [nodes], drafted values [nodes], values of the chunks at work and of the next
// [2][chunks][16]; then for every chunk at work scores [tiles][16][16], their softmax weights in fp16, and factors that
// keep older sums in step [tiles][16]; last what makes means of the sums. Sixteen bytes of a value at position p lie p
// mod 8 places apart (exclusive or) from where they would, so that rows of any positions that follow each other are in
// different banks. Where all queries of an item are fetched at once they take the room of drafted keys and values too.
// Bytes: 512 of fp16 a row, from L2.
#pragma once
#include "forward/block.cuh"

struct AttentionScratch {
    u32 *q, *fresh_keys, *fresh_values, *values;
    float* scores;
    u16* shares;
    float *factors, *inverses;

    __device__ explicit AttentionScratch(float* at)
        : q((u32*)at), fresh_keys(q + QUERY_ROWS * KEY_ROW), fresh_values(fresh_keys + FRESH_ROWS * KEY_ROW),
          values(fresh_values + FRESH_ROWS * VALUE_ROW),
          scores((float*)(values + 2 * CHUNKS_AT_ONCE * KEYS * VALUE_ROW)),
          shares((u16*)(scores + CHUNKS_AT_ONCE * QUERIES * SCORE_ROW)),
          factors((float*)(shares + CHUNKS_AT_ONCE * QUERIES * SHARE_ROW)),
          inverses(factors + CHUNKS_AT_ONCE * QUERIES) {}
};

// Where 16 bytes of a value are in its row, in words.
__device__ __forceinline__ int value_piece(int piece, int position) { return (piece ^ (position & 7)) * 4; }

// The rows a pass over nodes [first, first + count) of an item uses, and keys and values of all up to them if they are
// `fresh`: into shared memory.
__device__ __forceinline__ void fetch_rows(const Block& b, const AttentionScratch& at, int kv_head, int first,
                                           int count, bool fresh) {
    constexpr int EACH = (TILES_FETCHED * TILE_NODES * GROUP + WARPS - 1) / WARPS,
                  DRAFTED = (2 * NODES + WARPS - 1) / WARPS;
    static_assert(WARPS % 2 == 0, "a warp has keys or values");
    // a warp's query i is of this node and head; its drafted row i is of node warp / 2 + i * WARPS / 2
    const auto node_of = [&](int i) {
        return WARPS % GROUP == 0 ? b.warp / GROUP + i * (WARPS / GROUP) : (b.warp + i * WARPS) / GROUP;
    };
    const auto head_of = [&](int i) { return WARPS % GROUP == 0 ? b.warp % GROUP : (b.warp + i * WARPS) % GROUP; };
    const int drafted = fresh ? first + count - (b.warp >> 1) : 0;
    const auto row_of = [&](int node, int row) {
        return load16(b.words(ATTENTION_PHASE, node, ATTENTION_ROWS_AT) + row * (HEAD_DIM / 2) + b.lane * 4);
    };
    const auto query = [&](int i) { return row_of(first + node_of(i), kv_head * GROUP + head_of(i)); };
    const auto drafted_row = [&](int i) {
        return row_of((b.warp >> 1) + i * (WARPS / 2), HEADS + (b.warp & 1) * KV_HEADS + kv_head);
    };
    Watchdog dog;
    {  // polling for all of it would fill the way it comes on: the last row first
        int last = 0;
#pragma unroll
        for (int i = 1; i < EACH; i++)
            if (node_of(i) < count) last = i;
        if (node_of(0) < count)
            while (!everywhere(came16(query(last)))) dog.check();
    }
    uint4 got[EACH], got_drafted[DRAFTED];
#pragma unroll
    for (int i = 0; i < EACH; i++) got[i] = {NOT_YET, NOT_YET, NOT_YET, NOT_YET};
#pragma unroll
    for (int i = 0; i < DRAFTED; i++) got_drafted[i] = {NOT_YET, NOT_YET, NOT_YET, NOT_YET};
    bool came;
    do {  // what has not come yet
        came = true;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (node_of(i) < count && !came16(got[i])) got[i] = query(i);
#pragma unroll
        for (int i = 0; i < DRAFTED; i++)
            if (i * (WARPS / 2) < drafted && !came16(got_drafted[i])) got_drafted[i] = drafted_row(i);
#pragma unroll
        for (int i = 0; i < EACH; i++) came &= node_of(i) >= count || came16(got[i]);
#pragma unroll
        for (int i = 0; i < DRAFTED; i++) came &= i * (WARPS / 2) >= drafted || came16(got_drafted[i]);
        dog.check();
    } while (!everywhere(came));
    b.sync();  // what the scratch holds may still be read
    u32* q = at.q + b.lane * 4;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int node = node_of(i), within = node % TILE_NODES * GROUP + head_of(i);
        const int place = 16 % GROUP == 0 ? b.warp + i * WARPS : node / TILE_NODES * 16 + within;
        if (node < count) *(uint4*)(q + place * KEY_ROW) = got[i];
    }
    if (fresh) {
#pragma unroll
        for (int i = 0; i < DRAFTED; i++)
            if (i * (WARPS / 2) < drafted) {
                const int node = (b.warp >> 1) + i * (WARPS / 2);
                u32* to = b.warp & 1
                              ? at.fresh_values + node * VALUE_ROW + value_piece(b.lane, b.length + b.s.depth[node])
                              : at.fresh_keys + node * KEY_ROW + b.lane * 4;
                *(uint4*)to = got_drafted[i];
            }
    }
}
