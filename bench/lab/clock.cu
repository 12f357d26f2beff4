// At which rate the chip runs while all SMs do one kind of work: clocks of an SM over nanoseconds of the timer.
//
// nvcc -arch=sm_90a -O3 -o clock bench/lab/clock.cu && ./clock
#include <cstdio>

#include "../../src/warpsmith/backend/cuda/kernels/common/ptx.cuh"

enum Work { SLEEP, ADD, STREAM, POLL, MULTIPLY_MATRICES };

__global__ void work(Work kind, const uint4* memory, size_t count, u64 duration, double* mhz, u32* sink) {
    const u64 start = nanoseconds();
    const long long first = clock64();
    const size_t threads = (size_t)gridDim.x * blockDim.x;
    size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    u32 sum = 0;
    float f = threadIdx.x;
    u64 now = start;
    while (now - start < duration) {
        if (kind == SLEEP) asm volatile("nanosleep.u32 1000;");
        if (kind == ADD)
            for (int i = 0; i < 64; i++) f = fmaf(f, 1.0001f, 0.5f);
        if (kind == STREAM) {
            uint4 v[8];
            for (int i = 0; i < 8; i++) v[i] = __ldcs(memory + (at + i * threads) % count);
            for (int i = 0; i < 8; i++) sum += v[i].x ^ v[i].w;
            at = (at + 8 * threads) % count;
        }
        if (kind == POLL) sum += load4((const u32*)memory + threadIdx.x % 256);
        if (kind == MULTIPLY_MATRICES) {
            float d[4] = {f, f, f, f};
            for (int i = 0; i < 64; i++) mma(d, sum, sum, sum, sum, sum, sum);
            f = d[0];
        }
        now = nanoseconds();
    }
    if (threadIdx.x == 0) mhz[blockIdx.x] = (double)(clock64() - first) / (now - start) * 1e3;
    if (sum == 0x12345 || f == 0.12345f) *sink = sum;  // so that nothing is left out
}

int main() {
    int sms;
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);
    const size_t bytes = (size_t)4 << 30;
    uint4* memory;
    double* mhz;
    u32* sink;
    cudaMalloc(&memory, bytes), cudaMallocManaged(&mhz, sms * sizeof(double)), cudaMalloc(&sink, 4);
    cudaMemset(memory, 3, bytes);
    const char* names[] = {"asleep", "adding", "streaming", "polling", "multiplying matrices"};
    for (int threads : {32, 256, 1024})
        for (int kind = SLEEP; kind <= MULTIPLY_MATRICES; kind++) {
            work<<<sms, threads>>>((Work)kind, memory, bytes / 16, 20000000, mhz, sink);
            if (cudaDeviceSynchronize() != cudaSuccess) return puts(cudaGetErrorString(cudaGetLastError())), 1;
            double sum = 0;
            for (int i = 0; i < sms; i++) sum += mhz[i];
            printf("%4d threads an SM, %s: %.0f MHz\n", threads, names[kind], sum / sms);
        }
}
