// Machine instructions of the activations-first pass: a counter that all SMs share; products of 64 rows, by wgmma where
// the chip has it, else by mma.sync.
#pragma once
#include "common/halves.cuh"

// --- a counter that all SMs share -----------------------------------------------------------------------------------

// Everything this thread has written or seen is seen by who reads the counter afterwards.
__device__ __forceinline__ void add_release(u32* at, u32 count) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(at), "r"(count) : "memory");
}
__device__ __forceinline__ u32 load_acquire(const u32* at) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

// --- products of 64 rows, four warps with 16 each; A in registers, B in shared memory -------------------------------

// 8 x 8 matrices of 128 contiguous bytes (row: a column of B, 8 k); bytes from one to the next along k and along the
// columns. Named by where they begin, in 16 bytes; ALONG_K is below 1 MB.
template <int ALONG_K, int ALONG_N>
__device__ __forceinline__ u64 matrix_at(u32 sixteens) {
    return (u64)(ALONG_N >> 4) << 32 | (sixteens | (u32)(ALONG_K >> 4) << 16);
}
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool PRODUCTS_QUEUE = true;
// What this thread has written to shared memory is seen by products and bulk copies.
__device__ __forceinline__ void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_queued() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most so many groups are on their way.
template <int LEFT>
__device__ __forceinline__ void products_done() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// d (16 rows a warp x N) = a * b, plus d if `keep`; fp16 in, f32 sums.
__device__ __forceinline__ void multiply_group(float (&d)[4], const u32 (&a)[4], u64 b, int keep) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %9, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16"
        " {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, p, 1, 1, 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}
__device__ __forceinline__ void multiply_group(float (&d)[8], const u32 (&a)[4], u64 b, int keep) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %13, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16"
        " {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, p, 1, 1, 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}
__device__ __forceinline__ void multiply_group(float (&d)[12], const u32 (&a)[4], u64 b, int keep) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %17, 0; wgmma.mma_async.sync.aligned.m64n24k16.f32.f16.f16"
        " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11}, {%12,%13,%14,%15}, %16, p, 1, 1, 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}
#else
constexpr bool PRODUCTS_QUEUE = false;
__device__ __forceinline__ void show_to_products() {}
__device__ __forceinline__ void products_begin() {}
__device__ __forceinline__ void products_queued() {}
template <int LEFT>
__device__ __forceinline__ void products_done() {}
// A column of B is 16 bytes of each of two matrices: a lane's two words of an octet are 128 bytes apart, octets 256.
template <int SUMS>
__device__ __forceinline__ void multiply_group(float (&d)[SUMS], const u32 (&a)[4], u64 b, int keep) {
    const u32 at = ((u32)b & 0x3fff) * 16 + (threadIdx.x & 31) * 4;
    if (!keep)
#pragma unroll
        for (int i = 0; i < SUMS; i++) d[i] = 0.0f;
#pragma unroll
    for (int octet = 0; octet < SUMS / 4; octet++) {
        float(&sums)[4] = *(float(*)[4])(d + octet * 4);
        mma_half(sums, {a[0], a[1], a[2], a[3]}, load_shared4(at + octet * 256), load_shared4(at + octet * 256 + 128));
    }
}
#endif
