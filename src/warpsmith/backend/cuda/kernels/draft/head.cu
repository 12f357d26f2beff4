// The target's LM head on some rows that are normed already: how a draft without a head of its own speaks.
//
// One stage of the activations-first pass (large/), and its sums as logits. Grid: one block an SM, all resident
// (cooperative launch).
#include "draft/output.cuh"

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
        const Run run = run_of(params, HEAD);
        prepare_rows(block, run, HEAD, params.waiting);
        multiply_stage(block, HEAD, run);
        block.wait_for_all();
        block.leave();
        give_out(block, 0);
    } else {
        leave_registers<OTHERS_REGISTERS>();
        const int other = block.warp - WARPS;
        if (other == 0) {
            Producer producer(block.base);
            producer.follow(params.head_stream, params.head_parcels + params.first_head_parcel[blockIdx.x]);
            producer.stage(run_of(params, HEAD));
            producer.drain();
        }
        if (other == 1 || other == 2) {
            u32 count = 0;
            barrier_wait(Barriers(block.base).begun, 0);
            measure(block, other - 1, HEAD, false);
            reduce_tiles(block, other - 1, run_of(params, HEAD), count, params.head_sums, tag_of(HEAD));
            if (block.lane == 0) add_release(params.counter, 1);
        }
    }
}
