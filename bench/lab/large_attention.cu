// Clocks of attention's walk over shared chunks of keys and values alone (see large_attention.py).
#include "large/attention_walk.cuh"
#include "large/visits.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    walk(const u32* queries, u8* keys, u8* values, u32* parts, float2* part_stats, long long* clocks, int nodes,
         int length, int layers) {
    Shared& shared = *(Shared*)(shared_memory() + SHARED_AT);
    if (threadIdx.x == 0) {
        shared.request = {}, shared.request.nodes = nodes, shared.request.length = length;
        Params& p = shared.params;
        p.queries = (u32*)queries, p.keys = keys, p.values = values, p.parts = parts, p.part_stats = part_stats;
        p.context = length;
    }
    if (threadIdx.x < nodes) shared.request.parents[threadIdx.x] = (int)threadIdx.x - 1;
    __syncthreads();
    Block b;
    if (b.warp >= WARPS) {
        leave_registers<OTHERS_REGISTERS>();
        return;
    }
    take_registers<CONSUMER_REGISTERS>();
    prepare_tree(b);
    if (threadIdx.x == 0) b.s.items = count_items(b);
    b.sync();
    const int all = b.s.items.splits * b.s.items.batches * KV_HEADS;
#pragma unroll 1
    for (int layer = 0; layer < layers; layer++) {
        b.sync();
        const long long start = clock64();
#pragma unroll 1
        for (int item = b.sm; item < all; item += SMS) {
            KeyWalk walk(b, layer, item_of(b, b.s.items, item));
            b.sync();
            walk.begin();
            walk.take_queries();
            b.sync();
            walk.go_on();
            walk.run();
        }
        b.sync();
        if (threadIdx.x == 0) clocks[layer * SMS + b.sm] = clock64() - start;
    }
}
