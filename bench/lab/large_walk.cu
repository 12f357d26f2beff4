// Clocks of the walk over a DeltaNet's states alone (see large_walk.py).
#include "large/delta.cuh"
#include "large/visits.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    walk(const int* parents, float* states, float* branches, float* rows, long long* clocks, int nodes, int rounds) {
    Shared& shared = *(Shared*)(shared_memory() + SHARED_AT);
    if (threadIdx.x == 0) {
        shared.request = {}, shared.request.nodes = nodes;
        shared.params.delta = states, shared.params.branch_state = branches;
    }
    if (threadIdx.x < nodes) shared.request.parents[threadIdx.x] = parents[threadIdx.x];
    __syncthreads();
    Block b;
    if (b.warp >= WARPS) {
        leave_registers<OTHERS_REGISTERS>();
        return;
    }
    take_registers<CONSUMER_REGISTERS>();
    prepare_tree(b);
    const DeltaShare share(b.sm);
    float* own_rows = rows + (size_t)b.sm * NODES * MIX_ROW;
#pragma unroll 1
    for (int round = 0; round < rounds; round++) {
        for (int i = threadIdx.x; i < nodes * MIX_ROW; i += CONSUMERS) ((float*)b.scratch)[i] = own_rows[i];
        DeltaColumns own = {};
        own.load(b, share, b.warp);
        b.sync();
        const long long start = clock64();
        if (own.count == 2) walk_states<2>(b, share, own);
        if (own.count == 1) walk_states<1>(b, share, own);
        b.sync();
        if (threadIdx.x == 0) clocks[round * SMS + b.sm] = clock64() - start;
    }
    for (int i = threadIdx.x; i < nodes * MIX_ROW; i += CONSUMERS) own_rows[i] = ((float*)b.scratch)[i];
}
