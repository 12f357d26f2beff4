// What SMs share out in attention: items, each for a key head, of some chunks of keys for some rows of queries.
#pragma once
#include "large/attention_rows.cuh"

// Chunks before the last two of a query at a position: those that end before position - 63.
__device__ __forceinline__ int early_chunks(int position) {
    return position < CHUNK - 1 ? 0 : (position - (CHUNK - 1)) / CHUNK;
}

// What there is to do for a layer, the same for all its SMs: items, each for a key head.
__device__ __forceinline__ ItemCounts count_items(const Block& b) {
    constexpr int AT_ONCE = QUERY_TILES * 16;
    const int deepest = b.length + b.s.deepest;
    ItemCounts n;
    n.committed = b.length / CHUNK, n.chunks = early_chunks(deepest), n.splits = min(n.chunks, SPLITS);
    n.batches = (b.nodes * GROUP + AT_ONCE - 1) / AT_ONCE;
    // for some nodes the last of the committed chunks is not early, but a part
    const int late = early_chunks(b.length) < n.committed;
    n.shared = (n.splits + late) * n.batches * KV_HEADS, n.whole = deepest / CHUNK - n.committed + 1;
    n.own_at = n.shared;
    // a node alone: SMs that have the late chunk have its own, too, rather than those with many chunks
    if (b.nodes == 1 && n.shared <= SMS && n.shared + KV_HEADS > SMS) n.own_at += SMS - KV_HEADS;
    n.all = n.own_at + b.nodes * n.whole * KV_HEADS;
    return n;
}
// Item number `number` of a layer: first splits of the early chunks and the late one (batches of queries for the same
// keys at the same time), then nodes' own. Some have no steps.
__device__ __forceinline__ Item item_of(const Block& b, const ItemCounts& items, int number) {
    const bool shared = number < items.shared;
    const int own = max(number - items.own_at, 0), pair = (u32)number / (u32)items.batches,
              batch = number - pair * items.batches, split = pair / KV_HEADS;
    const bool late = shared && split == items.splits;
    Item item;
    item.node = shared ? -1 : min((int)((u32)own / (u32)(KV_HEADS * items.whole)), b.nodes - 1);
    item.own_end = shared ? 0 : node_position(b, item.node) + 1;
    item.kv_head = shared ? pair % KV_HEADS : own % KV_HEADS;
    item.first_row = shared ? batch * (QUERY_TILES * 16) : item.node * GROUP;
    item.rows = shared ? min(QUERY_TILES * 16, b.nodes * GROUP - item.first_row) : GROUP;
    item.chunk = late     ? items.committed - 1
                 : shared ? split
                          : items.committed + own / KV_HEADS - item.node * items.whole;
    item.part = late ? SPLITS : shared ? split : SPLITS + item.chunk - early_chunks(item.own_end - 1);
    item.stride = late ? items.committed : SPLITS;
    item.steps = late     ? 1
                 : shared ? (items.chunks - item.chunk + SPLITS - 1) / SPLITS
                          : number >= items.own_at && item.chunk * CHUNK < item.own_end;
    return item;
}
