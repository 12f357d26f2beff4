// How fast every SM can have the same activations: 132 blocks read the same rows at the same time, after a grid barrier.
//
// nvcc -arch=sm_90a -O3 -std=c++17 bench/lab/exchange.cu -o exchange && ./exchange
//
// Loads: each of eight warps reads its slice of K of eight rows at a time as mma operands (16 bytes a lane, 64 a row).
// Bulk copies: one copy a row into shared memory. Pairs: two SMs of a cluster read half of each row and multicast it.
// `stride` is how far rows lie apart, in words: 512 words of 19,880, or one behind the other.
#include <algorithm>
#include <cstdio>
#include <cuda_runtime.h>
#include <vector>

#include "../../src/warpsmith/backend/cuda/kernels/common/ptx.cuh"

constexpr int SMS = 132, THREADS = 256, ITERATIONS = 60, WARM_UP = 10, SHARED = 200 << 10;
enum Way { LOADS, BULK, PAIRS };

__device__ unsigned arrived;

__device__ void grid_barrier(unsigned target) {
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(&arrived) : "memory");
        unsigned v;
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(&arrived) : "memory");
        while (v < target);
    }
    __syncthreads();
}
__device__ void cluster_barrier() { asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory"); }

template <Way WAY>
__global__ void __launch_bounds__(THREADS, 1) read_rows(const u32* data, int rows, int words, int stride, long long* clocks, u32* sink) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ __align__(8) u64 landed;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(&landed)));
        asm volatile("fence.mbarrier_init.release.cluster;");
    }
    __syncthreads();
    if (WAY == PAIRS) cluster_barrier();
    u32 sum = 0, parity = 0, rank = 0;
    if (WAY == PAIRS) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    for (int i = 0; i < ITERATIONS; i++) {
        if (WAY != LOADS && threadIdx.x == 0)
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(&landed)), "r"(rows * words * 4) : "memory");
        grid_barrier((i + 1) * SMS);
        const long long start = clock64();
        if (WAY == LOADS) {
            const int chunks = words / 128;  // a warp's, 16 words of a row each
            for (int first = 0; first < rows; first += 8) {
                const u32* at = data + (size_t)min(first + lane / 4, rows - 1) * stride + warp * chunks * 16 + lane % 4 * 4;
                uint4 v[8];
#pragma unroll
                for (int c = 0; c < 8; c++)
                    if (c < chunks) v[c] = load16(at + c * 16);
#pragma unroll
                for (int c = 0; c < 8; c++)
                    if (c < chunks) sum += v[c].x + v[c].y + v[c].z + v[c].w;
            }
        } else {
            const int part = WAY == PAIRS ? words / 2 : words, at = rank * part;
            for (int row = lane; warp == 0 && row < rows; row += 32) {
                const u32 to = shared_address(memory) + (row * words + at) * 4;
                const u32* from = data + (size_t)row * stride + at;
                if (WAY == BULK)
                    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                                 ::"r"(to), "l"(from), "r"(part * 4), "r"(shared_address(&landed)) : "memory");
                else
                    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
                                 ::"r"(to), "l"(from), "r"(part * 4), "r"(shared_address(&landed)), "h"((unsigned short)3) : "memory");
            }
            u32 done;
            do asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                            : "=r"(done) : "r"(shared_address(&landed)), "r"(parity) : "memory");
            while (!done);
            parity ^= 1;
            sum += *(u32*)(memory + threadIdx.x * 16);
        }
        if (sum == 0x12345) *sink = sum;
        __syncthreads();
        if (threadIdx.x == 0) clocks[i * SMS + blockIdx.x] = clock64() - start;
    }
    if (WAY == PAIRS) cluster_barrier();
}

template <Way WAY>
void measure(const char* name, const u32* data, int rows, int words, int stride) {
    long long* clocks;
    u32* sink;
    cudaMalloc(&clocks, ITERATIONS * SMS * 8);
    cudaMalloc(&sink, 4);
    const unsigned zero = 0;
    cudaMemcpyToSymbol(arrived, &zero, 4);
    cudaFuncSetAttribute(read_rows<WAY>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {WAY == PAIRS ? 2u : 1u, 1, 1};
    attributes[1].id = cudaLaunchAttributeCooperative;
    attributes[1].val.cooperative = 1;
    cudaLaunchConfig_t launch = {};
    launch.gridDim = SMS, launch.blockDim = THREADS, launch.dynamicSmemBytes = SHARED, launch.attrs = attributes, launch.numAttrs = 2;
    cudaError_t error = cudaLaunchKernelEx(&launch, read_rows<WAY>, data, rows, words, stride, clocks, sink);
    if (error == cudaSuccess) error = cudaDeviceSynchronize();
    if (error != cudaSuccess) {
        printf("%s: %s\n", name, cudaGetErrorString(error));
        return;
    }
    std::vector<long long> host(ITERATIONS * SMS);
    cudaMemcpy(host.data(), clocks, host.size() * 8, cudaMemcpyDeviceToHost);
    std::vector<double> means, slowest;
    for (int i = WARM_UP; i < ITERATIONS; i++) {
        double sum = 0, most = 0;
        for (int sm = 0; sm < SMS; sm++) sum += host[i * SMS + sm], most = std::max(most, (double)host[i * SMS + sm]);
        means.push_back(sum / SMS), slowest.push_back(most);
    }
    std::sort(means.begin(), means.end());
    std::sort(slowest.begin(), slowest.end());
    printf("%-12s %2d rows of %5d bytes, %5d words apart: mean %5.0f clocks, slowest SM %5.0f\n", name, rows, words * 4, stride,
           means[means.size() / 2], slowest[slowest.size() / 2]);
    cudaFree(clocks);
    cudaFree(sink);
}

int main() {
    u32* data;
    cudaMalloc(&data, 64ull << 20);
    cudaMemset(data, 1, 64ull << 20);
    for (int words : {512, 1024, 1792})
        for (int stride : {19880, words})
            for (int rows : {1, 8, 22}) {
                if (words <= 1024) measure<LOADS>("loads", data, rows, words, stride);
                measure<BULK>("bulk copies", data, rows, words, stride);
                measure<PAIRS>("pairs", data, rows, words, stride);
            }
    return 0;
}
