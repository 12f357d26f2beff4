// Machine instructions of the products on sm_90a: barriers with a predicated trap, bulk copies, groups of wgmma.
#pragma once
#include "common/cluster.cuh"
#include "prefill/wgmma.cuh"

__device__ __forceinline__ void barrier_expect(u32 b, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
// A wait that never ends would cost the whole machine. The trap is under a predicate: with one in a branch ptxas gives
// the consumers too few registers.
__device__ __forceinline__ void wait_on(u32 b, u32 parity) {
    if (barrier_done(b, parity)) return;
    const long long start = clock64();
    while (!barrier_done(b, parity))
        asm volatile("{ .reg .pred p; setp.gt.s64 p, %0, 2000000000; @p trap; }" ::"l"(clock64() - start));
}
// Lanes of a warp that come to a barrier for all of it, when all have done their part: one. Racecheck follows only what
// each of them does for itself.
#ifdef EVERY_LANE_ARRIVES
constexpr int ARRIVALS = 32;
#else
constexpr int ARRIVALS = 1;
#endif
__device__ __forceinline__ bool arrives() { return threadIdx.x % 32 < ARRIVALS; }

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
__device__ __forceinline__ void load_once16(u32* v, const u8* at) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "l"(at));
}
__device__ __forceinline__ void load_shared_words(u32* v, u32 at) {
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(at)
                 : "memory");
}
__device__ __forceinline__ float load_shared_float(u32 at) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ float2 load_shared_float2(u32 at) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ void store_shared(u32 at, float v) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
}

template <int LEFT>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int COUNT>
__device__ __forceinline__ void sync_some(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(COUNT) : "memory");
}
// The others need not be waited for.
template <int COUNT>
__device__ __forceinline__ void arrive_some(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(COUNT) : "memory");
}

// Of a B operand: unswizzled, 128 bytes between octets of k, 512 between octets of tokens.
__device__ __forceinline__ u64 descriptor(u32 at) {
    return (u64)(128 >> 4) << 16 | (u64)(512 >> 4) << 32 | (at & 0x3ffff) >> 4;
}

// A place in a ring of STAGES.
struct StagePlace {
    u32 slot = 0, parity = 0;
    template <int STAGES>
    __device__ __forceinline__ void step(u32 by = 1) {
        slot += by;
        if (slot >= STAGES) slot -= STAGES, parity ^= 1;
    }
};
