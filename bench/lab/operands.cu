// How fast 132 SMs load the same activations of a tree at the same time, each warp its slice in the order of the mma's operands: 512
// bytes a load, all chunks of an octet on their way, the next octet's in their place as they are used.
//
// nvcc -arch=sm_90a -O3 -o operands bench/lab/operands.cu && ./operands
#include <algorithm>
#include <cstdio>
#include <vector>

#include "../../src/warpsmith/backend/cuda/kernels/common/ptx.cuh"

constexpr int OCTET_WORDS = 171904, OCTETS = 3, ROUNDS = 20, RING_BYTES = 200 << 10;  // as in the forward kernel

template <int CHUNKS>
__global__ void load(const u32* x, u32* arrived, long long* clocks, u32* sink) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    u32 sum = 0;
    for (int round = 0; round < ROUNDS; round++) {
        __syncthreads();
        if (threadIdx.x == 0) {
            atomicAdd(arrived, 1);
            while (*(volatile u32*)arrived < (round + 1) * gridDim.x) {}
        }
        __syncthreads();
        const long long start = clock64();
        const u32* mine = x + (round & 1) * OCTETS * OCTET_WORDS + warp * CHUNKS * 128 + lane * 4;
        uint4 v[CHUNKS];
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) v[c] = load16(mine + c * 128);
#pragma unroll
        for (int octet = 1; octet <= OCTETS; octet++)
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                sum += v[c].x ^ v[c].y ^ v[c].z ^ v[c].w;
                if (octet < OCTETS) v[c] = load16(mine + octet * OCTET_WORDS + c * 128);
            }
        asm volatile("" ::"r"(sum));
        __syncthreads();
        if (threadIdx.x == 0) clocks[blockIdx.x * ROUNDS + round] = clock64() - start;
    }
    if (sum == 0x12345) *sink = sum;  // so that nothing is left out
}

template <int CHUNKS>
void measure(const char* what, int sms, const u32* x, u32* arrived, long long* clocks, u32* sink) {
    cudaMemset(arrived, 0, 4);
    cudaFuncSetAttribute(load<CHUNKS>, cudaFuncAttributeMaxDynamicSharedMemorySize, RING_BYTES);
    load<CHUNKS><<<sms, 256, RING_BYTES>>>(x, arrived, clocks, sink);
    if (cudaDeviceSynchronize() != cudaSuccess) return (void)puts(cudaGetErrorString(cudaGetLastError()));
    std::vector<long long> slowest;
    for (int round = 2; round < ROUNDS; round++) {
        long long most = 0;
        for (int sm = 0; sm < sms; sm++) most = std::max(most, clocks[sm * ROUNDS + round]);
        slowest.push_back(most);
    }
    std::sort(slowest.begin(), slowest.end());
    printf("%s, %d KB an SM: the slowest SM takes %lld clocks\n", what, CHUNKS * OCTETS * 4, slowest[slowest.size() / 2]);
}

int main() {
    int sms;
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);
    u32 *x, *arrived, *sink;
    long long* clocks;
    cudaMalloc(&x, 2 * OCTETS * OCTET_WORDS * 4), cudaMalloc(&arrived, 4), cudaMalloc(&sink, 4);
    cudaMallocManaged(&clocks, sms * ROUNDS * sizeof(long long));
    cudaMemset(x, 1, 2 * OCTETS * OCTET_WORDS * 4);
    measure<4>("x", sms, x, arrived, clocks, sink);
    measure<8>("y", sms, x, arrived, clocks, sink);
    measure<14>("h", sms, x, arrived, clocks, sink);
}
