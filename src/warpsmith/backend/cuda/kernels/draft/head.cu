// The target's LM head on some rows that are normed already: how a draft without a head of its own speaks.
//
// One stage of the activations-first pass (large/), and its sums as logits. Grid: one block an SM, all resident
// (cooperative launch).
#include "draft/output.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    head(const __grid_constant__ Params params, const __grid_constant__ Request request) {
    extern __shared__ __align__(128) u8 memory[];
    Block block(params, request, memory);
    if (threadIdx.x == 0) {
        Barriers(block.base).init();
        show_barriers();
    }
    __syncthreads();
    constexpr int OTHERS_REGISTERS = 80, CONSUMER_REGISTERS = 208;
    if (block.warp < WARPS) {
        take_registers<CONSUMER_REGISTERS>();
        const Run run = run_of(params, HEAD);
        prepare_operands(block, run, Source{params.waiting, false});
        multiply(block, run);
        block.wait_for_all();
        block.leave();
        give_out(block, 0);
    } else {
        leave_registers<OTHERS_REGISTERS>();
        const int other = block.warp - WARPS;
        if (other == 0) {
            Producer producer(shared_address(memory));
            producer.read_from(params.head_stream + params.head_start[blockIdx.x]);
            producer.stage(run_of(params, HEAD));
            producer.drain();
        }
        if (other == 1 || other == 2) {
            u32 count = 0;
            reduce(block, other - 1, run_of(params, HEAD), 0, count);
        }
    }
}
