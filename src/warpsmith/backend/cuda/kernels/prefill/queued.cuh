// Machine instructions of the products on sm_90a: bulk copies that one thread asks for, products in groups (wgmma).
#pragma once
#include "prefill/wgmma.cuh"

constexpr bool QUEUED = true;
constexpr int SHARED_MEMORY_HERE = 232448;  // bytes a block may ask for

// A wait that never ends would cost the whole machine. The trap is under a predicate: with one in a branch ptxas gives
// the consumers too few registers.
__device__ __forceinline__ void wait_on(u32 b, u32 parity) {
    if (barrier_done(b, parity)) return;
    const long long start = clock64();
    while (!barrier_done(b, parity))
        asm volatile("{ .reg .pred p; setp.gt.s64 p, %0, 2000000000; @p trap; }" ::"l"(clock64() - start));
}

// Asked for anew, so that nothing of it is kept in registers.
__device__ __forceinline__ int block_number() {
    int block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    return block;
}

// --- copies: one lane asks, and a barrier counts the bytes -----------------------------------------------------------

constexpr int COPIERS = 1;  // lanes of a warp that copy, each of which comes to the barrier
__device__ __forceinline__ void expect_copies(u32 b, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copies_asked_for(u32) {}
__device__ __forceinline__ void copy_in(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
// The same into both CTAs of a cluster, and onto the barrier of either.
__device__ __forceinline__ void copy_in_both(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
        "%4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "h"((u16)3)
        : "memory");
}
// A copy for each of the first COUNT lanes.
template <int COUNT>
__device__ __forceinline__ void copy_pieces(u32 to, const u8* from, u32 bytes, u32 barrier) {
    if (threadIdx.x % 32 < COUNT) copy_in(to, from, bytes, barrier);
}
__device__ __forceinline__ void copy_out(void* to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void copied_out() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void show_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void prefetch_bulk(const void* at, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(bytes) : "memory");
}

// --- products --------------------------------------------------------------------------------------------------------

// Sums are there from here on.
template <int COUNT>
__device__ __forceinline__ void settle(float (&sums)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(sums[i])::"memory");
}
template <int COUNT>
__device__ __forceinline__ void settle(float (&sums)[COUNT][4]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) settle(sums[i]);
}
// Of a B operand: unswizzled, 128 bytes between octets of k, 512 between octets of tokens.
__device__ __forceinline__ u64 descriptor(u32 at) {
    return (u64)(128 >> 4) << 16 | (u64)(512 >> 4) << 32 | (at & 0x3ffff) >> 4;
}
// d (64 x N) = (keep ? d : 0) + a (64 x 16, registers of four warps) * b (16 x N, shared memory).
template <int N>
__device__ __forceinline__ void multiply_tile(float* d, const u32* a, u32 b, bool keep) {
    Wgmma<N>::mma(d, a, descriptor(b), keep);
}
