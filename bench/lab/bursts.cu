// How fast memory fills the rings of all SMs when weights are taken in stages, with pauses in which SMs would exchange.
//
// nvcc -arch=sm_90a -O3 -std=c++17 bench/lab/bursts.cu -o bursts && ./bursts
//
// One thread an SM copies slots of 18,944 bytes (two superblocks of Q4_K), some of them on their way at once; another
// takes them and gives them back at once, a stage of so many, then meets all SMs and waits. In the pause the ring fills
// up. `fresh` is the rate at which the rest of a stage comes. Slots lie SM after SM, or side by side: the first ones of
// all SMs, then the second ones.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <vector>

#include "../../src/warpsmith/backend/cuda/kernels/common/ptx.cuh"

constexpr u32 SLOT = 18944, MOST_SLOTS = 11;
constexpr size_t BYTES = (size_t)15 << 30;

__device__ u32 arrived;

__global__ void __launch_bounds__(64, 1)
    bursts(const u8* weights, int slots, int on_way, int in_stage, int stages, int pause, int* took, bool beside) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ __align__(8) u64 barriers[2 * MOST_SLOTS];
    const u32 ring = shared_address(memory), full = shared_address(barriers), empty = full + 8 * MOST_SLOTS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < slots; i++) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, 1);
        show_barriers();
    }
    __syncthreads();
    const int all = in_stage * stages;
    if (threadIdx.x == 0) {
        const u8* from = weights + (size_t)blockIdx.x * (beside ? 1 : all) * SLOT;
        const size_t apart = (size_t)(beside ? gridDim.x : 1) * SLOT;
        const u64 policy = evict_first();
        for (int i = 0; i < all; i++) {
            if (i >= on_way) barrier_wait(full + 8 * ((i - on_way) % slots), (i - on_way) / slots & 1);
            if (i >= slots) barrier_wait(empty + 8 * (i % slots), (i / slots & 1) ^ 1);
            copy_slot(ring + i % slots * SLOT, from + i * apart, SLOT, full + 8 * (i % slots), policy);
        }
    } else if (threadIdx.x == 32) {
        for (int stage = 0, i = 0; stage < stages; stage++) {
            atomicAdd(&arrived, 1);
            while (*(volatile u32*)&arrived < (stage + 1) * gridDim.x) {}
            const long long met = clock64();
            while (clock64() - met < pause) {}
            const long long begun = clock64();
            for (const int end = i + in_stage; i < end; i++) {
                barrier_wait(full + 8 * (i % slots), i / slots & 1);
                barrier_arrive(empty + 8 * (i % slots));
            }
            took[stage * gridDim.x + blockIdx.x] = (int)(clock64() - begun);
        }
    }
}

int main() {
    int sms;
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);
    u8* weights;
    int* took;
    cudaMalloc(&weights, BYTES), cudaMemset(weights, 1, BYTES);
    cudaMalloc(&took, (size_t)4 * sms * 1024);
    cudaFuncSetAttribute(bursts, cudaFuncAttributeMaxDynamicSharedMemorySize, MOST_SLOTS * SLOT);
    const auto run = [&](int slots, int on_way, int in_stage, int pause, bool beside = false) {
        int stages = std::min<int>(200, BYTES / sms / SLOT / in_stage);
        const u32 none = 0;
        void* arguments[] = {&weights, &slots, &on_way, &in_stage, &stages, &pause, &took, &beside};
        for (int i = 0; i < 3; i++) {
            cudaMemcpyToSymbol(arrived, &none, sizeof(none));
            cudaLaunchCooperativeKernel((void*)bursts, sms, 64, arguments, slots * SLOT);
            if (cudaDeviceSynchronize() != cudaSuccess) {
                std::printf("%s\n", cudaGetErrorString(cudaGetLastError()));
                std::exit(1);
            }
        }
        std::vector<int> clocks(sms * stages);
        cudaMemcpy(clocks.data(), took, clocks.size() * 4, cudaMemcpyDeviceToHost);
        double mean = 0, slowest = 0;
        for (int stage = 1; stage < stages; stage++) {
            const auto first = clocks.begin() + stage * sms;
            slowest += *std::max_element(first, first + sms) / (stages - 1.0);
            for (auto at = first; at != first + sms; at++) mean += *at / (stages - 1.0) / sms;
        }
        std::printf("%2d slots%s, %d on their way, %3d in a stage, pause %5d: %6.0f clocks, slowest SM %6.0f, "
                    "fresh %4.1f bytes a clock\n",
                    slots, beside ? " side by side" : "", on_way, in_stage, pause, mean, slowest,
                    (in_stage - slots) * (double)SLOT / mean);
    };
    for (int on_way = 1; on_way <= 4; on_way++) run(9, on_way, 400, 0);
    for (int in_stage : {24, 40})
        for (int pause : {0, 9000, 20000}) {
            for (int on_way : {1, 2, 3, 4, 6, 9}) run(9, on_way, in_stage, pause);
            for (int on_way : {2, 3, 4}) run(4, on_way, in_stage, pause);
            for (bool beside : {false, true}) run(9, 3, in_stage, pause, beside), run(6, 5, in_stage, pause, beside);
        }
}
