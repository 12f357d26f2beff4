// How long partial sums take to the other SM of a pair (a cluster of two), beside a barrier inside an SM.
//
// nvcc -gencode arch=compute_90a,code=sm_90a -O3 -std=c++17 bench/lab/pairs.cu -o pairs && ./pairs
//
// Every thread of eight warps stores 8 bytes into the other SM's shared memory, which finish on an mbarrier there, and waits for
// those of the other: what a stage would add that splits K between two SMs.
#include <cstdio>
#include <cuda_runtime.h>

typedef unsigned u32;
typedef unsigned long long u64;
constexpr int ITERATIONS = 200, SMS = 132, THREADS = 256;

__device__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ u32 others(u32 address, u32 rank) {
    u32 out;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(address), "r"(rank));
    return out;
}
__device__ void cluster_barrier() { asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory"); }

__global__ void __cluster_dims__(2) __launch_bounds__(THREADS) swap_sums(long long* clocks) {
    __shared__ __align__(16) u32 sums[THREADS][2];
    __shared__ __align__(8) u64 landed;
    const int thread = threadIdx.x;
    u32 rank, got = 0;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    if (thread == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(&landed)));
        asm volatile("fence.mbarrier_init.release.cluster;");
    }
    __syncthreads();
    cluster_barrier();
    const u32 to = others(shared_address(sums[thread]), rank ^ 1), barrier = others(shared_address(&landed), rank ^ 1);
    long long remote = 0, local = 0;
    for (int i = 0; i < ITERATIONS; i++) {
        if (thread == 0)
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(&landed)), "r"(THREADS * 8) : "memory");
        __syncthreads();
        const long long start = clock64();
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to), "r"(i), "r"(thread), "r"(barrier) : "memory");
        u32 done;
        do asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                        : "=r"(done) : "r"(shared_address(&landed)), "r"(i & 1) : "memory");
        while (!done);
        got += sums[thread][0];
        const long long middle = clock64();
        sums[thread][1] = got;
        __syncthreads();
        got += sums[thread ^ 32][1];
        local += clock64() - middle, remote += middle - start;
        cluster_barrier();
    }
    if (thread == 0) clocks[blockIdx.x * 2] = remote / ITERATIONS, clocks[blockIdx.x * 2 + 1] = local / ITERATIONS;
    if (got == 0x12345678) clocks[0] = 0;
}

int main() {
    long long* clocks;
    cudaMallocManaged(&clocks, SMS * 16);
    swap_sums<<<SMS, THREADS>>>(clocks);
    printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
    for (int sm = 0; sm < 4; sm++) printf("SM %d: to the other and back %lld clocks, a barrier of its own %lld\n", sm, clocks[sm * 2], clocks[sm * 2 + 1]);
    return 0;
}
