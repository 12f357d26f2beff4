// What queued.cuh names, on chips without wgmma: a warp copies by itself, 16 bytes a lane at a time, and multiplies at
// once (mma.sync).
#pragma once
#include "common/ptx.cuh"

constexpr bool QUEUED = false;
constexpr int SHARED_MEMORY_HERE = 101376;  // what a block may ask for on every one of them

__device__ __forceinline__ void wait_on(u32 b, u32 parity) { barrier_wait(b, parity); }

__device__ __forceinline__ int block_number() { return blockIdx.x; }

// --- copies ----------------------------------------------------------------------------------------------------------

constexpr int COPIERS = 32;
__device__ __forceinline__ void expect_copies(u32, u32) {}
__device__ __forceinline__ void copies_asked_for(u32 barrier) { arrive_with_copies(barrier); }
__device__ __forceinline__ void copy_in(u32 to, const u8* from, u32 bytes, u32) {
#pragma unroll 8
    for (u32 at = threadIdx.x % 32 * 16; at < bytes; at += 512) copy16(to + at, from + at);
}
__device__ __forceinline__ void copy_in_both(u32, const void*, u32, u32) {}  // there are no clusters
template <int COUNT>
__device__ __forceinline__ void copy_pieces(u32 to, const u8* from, u32 bytes, u32 barrier) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        copy_in(__shfl_sync(~0u, to, i), (const u8*)__shfl_sync(~0u, (u64)from, i), __shfl_sync(~0u, bytes, i),
                barrier);
}
__device__ __forceinline__ void copy_out(void*, u32, u32) {}  // results do not leave through shared memory
__device__ __forceinline__ void copied_out() {}
__device__ __forceinline__ void show_to_copies() {}
__device__ __forceinline__ void prefetch_bulk(const void* at, u32 bytes) {
    for (u32 i = 0; i < bytes; i += 128) prefetch((const u8*)at + i);
}

// --- products --------------------------------------------------------------------------------------------------------

template <class Sums>
__device__ __forceinline__ void settle(Sums&) {}
// A lane's two words of an octet of tokens are 128 bytes apart, octets 512.
template <int N>
__device__ __forceinline__ void multiply_tile(float* d, const u32* a, u32 b, bool keep) {
    const u32 mine = b + threadIdx.x % 32 * 4;
#pragma unroll
    for (int octet = 0; octet < N / 8; octet++) {
        float(&sums)[4] = *(float(*)[4])(d + octet * 4);
        if (!keep) sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
        const u32 at = mine + octet * 512;
        mma(sums, a[0], a[1], a[2], a[3], load_shared4(at), load_shared4(at + 128));
    }
}
