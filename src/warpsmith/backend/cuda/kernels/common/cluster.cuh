// CTAs of a cluster: who is who, waiting for each other, and writing into another one's shared memory (sm_90).
#pragma once
#include "common/ptx.cuh"

__device__ __forceinline__ u32 cta_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}
// For threads that come one by one.
__device__ __forceinline__ void leave_cluster() {
    asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
}
// At the same place of another CTA's shared memory.
__device__ __forceinline__ void store_in(u32 cta, u32 at, float v) {
    asm volatile("{ .reg .b32 r; mapa.shared::cluster.u32 r, %0, %1; st.shared::cluster.f32 [r], %2; }" ::"r"(at),
                 "r"(cta), "f"(v)
                 : "memory");
}
__device__ __forceinline__ void store16_in(u32 cta, u32 at, uint4 v) {
    asm volatile(
        "{ .reg .b32 r; mapa.shared::cluster.u32 r, %0, %1; st.shared::cluster.v4.u32 [r], {%2, %3, %4, %5}; }" ::"r"(
            at),
        "r"(cta), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
        : "memory");
}
// Who waits there sees what this warp has stored before.
__device__ __forceinline__ void arrive_in(u32 cta, u32 barrier) {
    asm volatile(
        "{ .reg .b32 r; mapa.shared::cluster.u32 r, %0, %1;"
        " mbarrier.arrive.release.cluster.shared::cluster.b64 _, [r]; }" ::"r"(barrier),
        "r"(cta)
        : "memory");
}
// The same where nothing was stored: it does not wait for loads that are on their way.
__device__ __forceinline__ void tell_in(u32 cta, u32 barrier) {
    asm volatile(
        "{ .reg .b32 r; mapa.shared::cluster.u32 r, %0, %1;"
        " mbarrier.arrive.shared::cluster.b64 _, [r]; }" ::"r"(barrier),
        "r"(cta)
        : "memory");
}
__device__ __forceinline__ void wait_in_cluster(u32 barrier, u32 parity) {
    const long long start = clock64();
    u32 done = 0;
    while (!done) {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;"
            " selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
        asm volatile("{ .reg .pred p; setp.gt.s64 p, %0, 2000000000; @p trap; }" ::"l"(clock64() - start));
    }
}
