// Gated attention over any length, split by absolute position.
//
// Keys come in chunks of 16 positions; chunk c belongs to split c mod SPLITS, whatever the chip and however many nodes.
// An item is one key head, one split and some nodes: it walks its chunks in order with an online softmax for the GROUP
// query heads of its nodes, and publishes weighted means of the values with their maximum and weight. A last step
// merges the splits in a fixed order and applies the output gate. In a tree the rows of q, k and v are normed and
// rotated by one warp each first, which spreads them over all SMs, and published in fp16; one node's are made by the
// items themselves, which saves an exchange. Scores come from mma (16 queries x 8 keys x 16 dimensions, fp16 in, f32
// sums): an element depends on its query and its key alone. A drafted key is held against all queries apart from the
// chunks, and its scores are written for its descendants, at its position. From there on a key is worked on in chunk p
// / 16 at place p mod 16, whether it is committed or drafted, so plain and tree runs agree to the bit. Weighted sums
// come from mma as well (16 queries x 8 dimensions x 16 keys), a warp 32 dimensions; where a chunk has drafted keys,
// once a node, with that node's own values and the other nodes' weights zero. Bytes: 1 KB of fp16 keys and values a
// position and key head; keys come straight into the operand's registers. Scratch: rows of q [tiles][16], drafted keys
// [nodes], drafted values [nodes], values of the chunks at work and of the next [2][chunks][16]; then for every chunk
// at work scores [tiles][16][16], their softmax weights in fp16, and factors that keep older sums in step [tiles][16];
// last what makes means of the sums. Sixteen bytes of a value at position p lie p mod 8 places apart (exclusive or)
// from where they would, so that rows of any positions that follow each other are in different banks.
#pragma once
#include "forward/attention_item.cuh"

// How a tree's items are dealt, once for all layers.
__device__ __forceinline__ void deal_items(Block& b) {
    const int chunks = (b.length + b.s.deepest) / KEYS + 1, splits = min(SPLITS, chunks),
              fresh = chunks - b.length / KEYS;
    const int tiles = (b.nodes + TILE_NODES - 1) / TILE_NODES;
    int fresh_groups = 1, groups = 1;
    const auto count = [&](int of_fresh, int of_others) {
        return (of_fresh * fresh + of_others * (splits - fresh)) * KV_HEADS;
    };
#pragma unroll 1
    while (fresh_groups < tiles && count(fresh_groups + 1, groups) <= SMS) fresh_groups++;
#pragma unroll 1
    while (groups < tiles && count(fresh_groups, groups + 1) <= SMS) groups++;
    b.s.items = {splits,
                 fresh,
                 fresh_groups * fresh,
                 count(fresh_groups, groups),
                 tiles,
                 (tiles + fresh_groups - 1) / fresh_groups,
                 (tiles + groups - 1) / groups};
}

// Stage: this SM's items.
__device__ __forceinline__ void attention_parts(Block& b, int index, const float* vectors) {
    const int chunks = (b.length + (NODES == 1 ? 0 : b.s.deepest)) / KEYS + 1;
    const int count = NODES == 1 ? min(SPLITS, chunks) * KV_HEADS : b.s.items.count;
#pragma unroll 1
    for (int item = b.sm; item < count; item += SMS) {
        int split = item / KV_HEADS, first_tile = 0, tiles = 1;
        if constexpr (NODES > 1) {
            const AttentionItems items = b.s.items;
            const bool fresh = split < items.fresh_items;
            const int these = fresh ? items.fresh : items.splits - items.fresh;
            tiles = fresh ? items.fresh_tiles : items.tiles;
            if (!fresh) split -= items.fresh_items;
#pragma unroll 1
            while (split >= these) split -= these, first_tile += tiles;
            split += b.length / KEYS + (fresh ? 0 : items.fresh);  // from the first one with drafted keys on
            split = items.splits == SPLITS ? split % SPLITS : split < items.splits ? split : split - items.splits;
            tiles = min(tiles, items.all_tiles - first_tile);
        } else if (item > b.sm) {
            b.sync();  // what the scratch holds may still be read
        }
        if (tiles > 0) AttentionItem(b, index, item % KV_HEADS, split, chunks).run(first_tile, tiles, vectors);
    }
    if (NODES > 1) b.sync();
}
