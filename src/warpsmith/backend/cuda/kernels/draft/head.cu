// The target's LM head on some rows that are normed already: how a draft without a head of its own speaks.
//
// The head of the activations-first pass (large/) alone: a stage for each group of K, the last one's sums as logits.
// Grid: one block an SM. Nobody waits for another.
#include "draft/products.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    head(const __grid_constant__ Params params, const __grid_constant__ Request request) {
    Shared& shared = *(Shared*)(shared_memory() + SHARED_AT);
    if (threadIdx.x == 0) {
        shared.params = params, shared.request = request, shared.scaled = NO_STAGE;
        Barriers(shared_address(shared_memory())).init();
        show_barriers();
    }
    __syncthreads();
    Block block;
    constexpr int OTHERS_REGISTERS = 80, CONSUMER_REGISTERS = 208;
    if (block.warp < WARPS) {
        take_registers<CONSUMER_REGISTERS>();
#pragma unroll 1
        for (int stage = HEAD; stage <= LAST; stage++) {
            const Run run = run_of(params, stage);
            block.sync();  // others may still multiply what is there
            prepare_rows(block, run, HEAD, params.waiting);
            multiply_stage(block, stage, run);
        }
    } else {
        leave_registers<OTHERS_REGISTERS>();
        const int other = block.warp - WARPS;
        if (other == 0) {
            Producer producer(block.base);
            producer.follow(params.head_stream, params.head_parcels + params.first_head_parcel[blockIdx.x]);
#pragma unroll 1
            for (int stage = HEAD; stage <= LAST; stage++) producer.stage(run_of(params, stage));
            producer.drain();
        }
        if (other == 1 || other == 2) {
            u32 count = 0;
            measure(block, other - 1, HEAD, false);
#pragma unroll 1
            for (int stage = HEAD; stage <= LAST; stage++)
                reduce_head(block, other - 1, stage, run_of(params, stage), count, 0);
        }
    }
}
