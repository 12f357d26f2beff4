// Clocks of the activations-first pass's products alone (see large_products.py). Without COPIES nothing is copied: slots
// of the ring are full as soon as they are asked for.
#include "common/ptx.cuh"
#ifndef COPIES
__device__ __forceinline__ void no_copy(u32, const void*, u32, u32 barrier, u64) { barrier_arrive(barrier); }
#define copy_slot no_copy
#endif
#include "large/products.cuh"

// Every SM multiplies `count` superblocks of a type, `blocks` a tile of rows, so many `rounds`. `parcels`: where they
// lie in an eighth of an SM's weights.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    products(const u8* stream, const u32* parcels, size_t bytes, float* sums, long long* clocks, int count, int type,
             int blocks, int rounds) {
    Shared& shared = *(Shared*)(shared_memory() + SHARED_AT);
    for (int i = threadIdx.x; i < SHARED_AT / 4; i += THREADS) ((u32*)shared_memory())[i] = 0x01020304u * (i & 15);
    if (threadIdx.x == 0) shared.request.nodes = NODES, shared.request.length = 0;
    if (threadIdx.x < NODES)
        shared.inverse[0][threadIdx.x] = shared.inverse[1][threadIdx.x] = 1.0f;
    __syncthreads();
    Block block;
    if (threadIdx.x == 0) {
        Barriers(block.base).init();
        *(u32*)(block.scratch + ISSUED_AT) = 0;
        show_barriers();
    }
    show_to_products();
    __syncthreads();
    const Run run = {0, blocks, 0, 0, count, 0, 1 << 20, 1 << 30, (u32)type, {}};
    sums += (size_t)blockIdx.x * 128 * NODES * ROWS;
    if (block.warp < WARPS) {
        take_registers<CONSUMER_REGISTERS>();
        block.sync();
        const long long start = clock64();
#pragma unroll 1
        for (int i = 0; i < rounds; i++) {
            if constexpr (POLLED)
                multiply_by<OneMultiplier>(block, run);
            else
                multiply(block, run);
        }
        block.sync();
        if (threadIdx.x == 0) clocks[blockIdx.x] = clock64() - start;
    } else {
        leave_registers<OTHERS_REGISTERS>();
        const int other = block.warp - WARPS;
        if (other == 0) {
            Producer producer(block.base);
            for (int i = 0; i < rounds; i++) {
                producer.follow(stream + blockIdx.x * bytes + (i & 7) * (bytes >> 3), parcels);
                producer.stage(run);
            }
            producer.drain();
        }
        if (other == 1 || other == 2) {
            u32 number = 0, turns[ONE_GROUPS] = {};
            for (int i = 0; i < rounds; i++) {
                if constexpr (POLLED) {
                    reduce_one(block, other - 1, run, turns, 1.0f, sums, TaggedSum{0});
                } else {
                    TaggedSums to(block, other - 1, run, sums, 0);
                    reduce_tiles(block, other - 1, run, number, to);
                }
            }
        }
    }
}
