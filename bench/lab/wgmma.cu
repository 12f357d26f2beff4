// Does wgmma give mma.sync's bits, and how long does it take with few columns?
//
// nvcc -gencode arch=compute_90a,code=sm_90a -O3 -std=c++17 bench/lab/wgmma.cu -o wgmma && ./wgmma
//
// Two groups of four warps multiply 64 rows by 24 columns over 1,024 k, half of the k each: weights from registers, activations from
// shared memory in matrices of 8 columns by 8 k. The same sums are then made by mma.sync, eight columns at a time. Both go through
// chains of four products, two at a time, that are added in one order. Values have random signs and mantissas, and exponents over
// `spread` powers of two; with `cancel` the second half of the k nearly takes the first half back.
#include <cstdio>
#include <cuda_runtime.h>

typedef unsigned u32;
typedef unsigned long long u64;
constexpr int OCTET_BYTES = 21104, SEEDS = 40, SMS = 132;

__device__ void mma(float (&d)[4], const u32* a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The second 8 k lie 128 bytes after the first, the next 8 columns OCTET_BYTES after.
__device__ void wgmma(float (&d)[12], const u32* a, u32 b) {
    const u64 operand = (u64)(b >> 4) | (u64)(128 >> 4) << 16 | (u64)(OCTET_BYTES >> 4) << 32;
    asm volatile("wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11},"
                 " {%12,%13,%14,%15}, %16, 1, 1, 1, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]),
                   "+f"(d[10]), "+f"(d[11])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(operand));
}
__device__ u32 hash(u32 x) {
    x ^= x >> 16, x *= 0x7feb352d, x ^= x >> 15, x *= 0x846ca68b;
    return x ^ x >> 16;
}
__device__ u32 value(u32 seed, int spread) {
    const u32 h = hash(seed);
    return (h & 0x8000) | (127 - hash(h) % spread) << 7 | (h >> 17 & 0x7f);
}
__device__ u32 pair(u32 seed, int spread) { return value(seed * 2, spread) | value(seed * 2 + 1, spread) << 16; }

__global__ void __launch_bounds__(256, 1) compare(int seed, int spread, bool cancel, u32* different, long long* clocks) {
    extern __shared__ __align__(128) unsigned char memory[];
    const int thread = threadIdx.x, lane = thread % 32, group = thread / 128;
    for (int i = thread; i < 3 * OCTET_BYTES / 4; i += 256) ((u32*)memory)[i] = pair(seed * 977 + i, spread);
    u32 a[128];  // [slice][chunk][8]
#pragma unroll
    for (int i = 0; i < 128; i++) a[i] = pair(seed * 7919 + blockIdx.x * 524288 + thread * 128 + i + 0x10000000, spread);
    if (cancel)
#pragma unroll
        for (int i = 64; i < 128; i++) a[i] = a[i - 64] ^ 0x80008000;
#pragma unroll
    for (int i = 0; i < 128; i++) asm volatile("" : "+r"(a[i]));  // made before the clock starts
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    const u32 base = (u32)__cvta_generic_to_shared(memory) + group * 16 * 512;
    const long long start = clock64();
    float slices[4][12];
#pragma unroll
    for (int slice = 0; slice < 4; slice++) {
        float low[12] = {}, high[12] = {};
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int c = 0; c < 4; c++) {
            wgmma(low, a + (slice * 4 + c) * 8, base + (slice * 4 + c) * 512);
            wgmma(high, a + (slice * 4 + c) * 8 + 4, base + (slice * 4 + c) * 512 + 256);
        }
        asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (int i = 0; i < 12; i++) slices[slice][i] = low[i] + high[i];
    }
    const long long end = clock64();
    u32 wrong = 0;
#pragma unroll
    for (int octet = 0; octet < 3; octet++) {
        float expected[4][4];
#pragma unroll
        for (int slice = 0; slice < 4; slice++) {
            float low[4] = {}, high[4] = {};
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const u32* b = (const u32*)(memory + octet * OCTET_BYTES + (group * 16 + slice * 4 + c) * 512) + lane;
                mma(low, a + (slice * 4 + c) * 8, b[0], b[32]);
                mma(high, a + (slice * 4 + c) * 8 + 4, b[64], b[96]);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) expected[slice][i] = low[i] + high[i];
        }
#pragma unroll
        for (int slice = 0; slice < 4; slice++)
#pragma unroll
            for (int i = 0; i < 4; i++) wrong += __float_as_uint(expected[slice][i]) != __float_as_uint(slices[slice][octet * 4 + i]);
    }
    if (wrong) atomicAdd(different, wrong);
    if (blockIdx.x == 0 && thread == 0) *clocks = end - start;
}

int main() {
    u32* different;
    long long* clocks;
    cudaMallocManaged(&different, 4);
    cudaMallocManaged(&clocks, 8);
    cudaFuncSetAttribute(compare, cudaFuncAttributeMaxDynamicSharedMemorySize, 100000);
    for (int spread : {1, 4, 16, 60, 120})
        for (bool cancel : {false, true}) {
            *different = 0;
            for (int seed = 0; seed < SEEDS; seed++) compare<<<SMS, 256, 3 * OCTET_BYTES + 64>>>(seed, spread, cancel, different, clocks);
            const cudaError_t error = cudaDeviceSynchronize();
            printf("spread %3d%s: %s, %u of %d sums differ; 64 products of 64 x 24 x 16 in %lld clocks\n", spread, cancel ? ", cancelling" : "",
                   cudaGetErrorString(error), *different, SEEDS * SMS * 256 * 48, *clocks);
        }
    return 0;
}
