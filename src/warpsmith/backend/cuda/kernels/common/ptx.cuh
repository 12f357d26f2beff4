// Thin names for the machine instructions the kernels are built from.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// A spin loop that never ends costs the whole machine: while developing it traps instead.
#ifdef WATCHDOG_CYCLES
struct Watchdog {
    long long start = clock64();
    __device__ void check() const {
        if (clock64() - start > WATCHDOG_CYCLES) __trap();
    }
};
#else
struct Watchdog {
    __device__ void check() const {}
};
#endif

// For about so many nanoseconds.
template <int TIME>
__device__ __forceinline__ void rest() {
    asm volatile("nanosleep.u32 %0;" ::"n"(TIME));
}

__device__ __forceinline__ u64 nanoseconds() {
    u64 time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
template <class T>
__device__ __forceinline__ const T& shared_at(u32 address) {
    return *(const T*)__cvta_shared_to_generic(address);
}

// --- mbarriers ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// The copy engine must see the barriers this thread has made.
__device__ __forceinline__ void show_barriers() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ bool barrier_done(u32 barrier, u32 parity) {
    u32 done;
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#else
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#endif
    return done;
}

// The same, at once.
__device__ __forceinline__ bool barrier_seen(u32 barrier, u32 parity) {
    u32 done;
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done;
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    Watchdog dog;
    while (!barrier_done(barrier, parity)) dog.check();
}

// --- copies from global to shared memory that finish on an mbarrier -------------------------------------------------

// Weights are read once a token: they must not push states, vectors and packets out of the L2 cache.
__device__ __forceinline__ u64 evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
    return policy;
}

// What a pass reads or writes once is to leave the L2 cache first: what SMs exchange has little room there beside the
// weights that pass.
__device__ __forceinline__ float4 load_once(const float4* at) {
    float4 v;
    asm volatile("ld.global.cg.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(at), "l"(evict_first()));
    return v;
}
__device__ __forceinline__ void store_once(float4* at, float4 v) {
    asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(at), "f"(v.x), "f"(v.y), "f"(v.z),
                 "f"(v.w), "l"(evict_first())
                 : "memory");
}

#if __CUDA_ARCH__ >= 900
// One thread copies `bytes` (a multiple of 16).
__device__ __forceinline__ void copy_slot(u32 dst, const void* src, u32 bytes, u32 barrier, u64 policy) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(dst),
        "l"(src), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}
constexpr u32 COPY_LANES = 1;
#else
// A whole warp copies, 16 bytes a lane at a time.
__device__ __forceinline__ void copy_slot(u32 dst, const void* src, u32 bytes, u32 barrier, u64 policy) {
    const u32 lane = threadIdx.x & 31;
    for (u32 at = lane * 16; at < bytes; at += 512)
        asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(dst + at),
                     "l"((const u8*)src + at), "l"(policy)
                     : "memory");
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
constexpr u32 COPY_LANES = 32;
#endif

// A small copy that is there after `copies_done` (or `copies_left`, for those of all groups but the last few) and a
// barrier.
__device__ __forceinline__ void copy16(void* dst, const void* src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(dst)), "l"(src) : "memory");
}
__device__ __forceinline__ void copy4(void* dst, const void* src) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(dst)), "l"(src) : "memory");
}
// The same by a shared address; zeros, and nothing is read, where it is not `there`.
__device__ __forceinline__ void copy16(u32 to, const void* from, bool there = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
// This thread comes to a barrier when all of its copies so far have ended.
__device__ __forceinline__ void arrive_with_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Those since the last call are a group.
__device__ __forceinline__ void copies_queued() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void copies_left() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// A line of global memory on its way to the L2 cache.
__device__ __forceinline__ void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// A group of four warps takes more registers, or leaves them to others.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <int COUNT>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void leave_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
#else
template <int COUNT>
__device__ __forceinline__ void take_registers() {}
template <int COUNT>
__device__ __forceinline__ void leave_registers() {}
#endif

#define MINUS_INFINITY __int_as_float(0xff800000)

// --- words that other SMs write while they are read: whole, though in no order (see exchange.cuh) -------------------

__device__ __forceinline__ void store16(void* at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile(
        "{ .reg .b128 v; .reg .b64 l, h; mov.b64 l, {%1, %2}; mov.b64 h, {%3, %4}; mov.b128 v, {l, h};"
        " st.relaxed.gpu.global.b128 [%0], v; }" ::"l"(at),
        "r"(a), "r"(b), "r"(c), "r"(d)
        : "memory");
}
__device__ __forceinline__ void store8(void* at, u32 a, u32 b) {
    asm volatile("{ .reg .b64 v; mov.b64 v, {%1, %2}; st.relaxed.gpu.global.b64 [%0], v; }" ::"l"(at), "r"(a), "r"(b)
                 : "memory");
}
__device__ __forceinline__ void store4(void* at, u32 a) {
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(at), "r"(a) : "memory");
}
__device__ __forceinline__ uint4 load16(const void* at) {
    uint4 v;
    asm volatile(
        "{ .reg .b128 v; .reg .b64 l, h; ld.relaxed.gpu.global.b128 v, [%4]; mov.b128 {l, h}, v;"
        " mov.b64 {%0, %1}, l; mov.b64 {%2, %3}, h; }"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(at)
        : "memory");
    return v;
}
__device__ __forceinline__ uint2 load8(const void* at) {
    uint2 v;
    asm volatile("{ .reg .b64 v; ld.relaxed.gpu.global.b64 v, [%2]; mov.b64 {%0, %1}, v; }"
                 : "=r"(v.x), "=r"(v.y)
                 : "l"(at)
                 : "memory");
    return v;
}
__device__ __forceinline__ u32 load4(const void* at) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

// --- programmatic dependent launches ---------------------------------------------------------------------------------
// A kernel may start while the one before it ends: what that one has written (and all before it) is there after the
// wait.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// --- threads of a block ---------------------------------------------------------------------------------------------

// COUNT of them wait for each other.
template <int COUNT>
__device__ __forceinline__ void sync_threads() {
    asm volatile("bar.sync 1, %0;" ::"n"(COUNT) : "memory");
}

// COUNT threads at one of 16 barriers, whose first four others have.
template <int COUNT>
__device__ __forceinline__ void sync_some(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(COUNT) : "memory");
}
// The others need not be waited for.
template <int COUNT>
__device__ __forceinline__ void arrive_some(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(COUNT) : "memory");
}

// What this thread has written before is seen by other SMs before what it writes afterwards.
__device__ __forceinline__ void fence_gpu() { __threadfence(); }

// --- arithmetic -----------------------------------------------------------------------------------------------------

// acc (16 x 8) += a (16 x 16, bf16) * b (16 x 8, bf16).
__device__ __forceinline__ void mma(float (&acc)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same for fp16.
__device__ __forceinline__ void mma_half(float (&acc)[4], uint4 a, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of 16-bit values from shared memory, lane l giving the address of row l mod 8 of matrix l / 8.
__device__ __forceinline__ uint4 load_matrices(const void* row) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(shared_address(row))
                 : "memory");
    return v;
}
__device__ __forceinline__ uint4 load_transposed(const void* row) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(shared_address(row))
                 : "memory");
    return v;
}

// Two floats to bf16, rounded to nearest even; `low` lands in the lower half.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

__device__ __forceinline__ u32 pack_half(float low, float high) {
    u32 out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

__device__ __forceinline__ float2 unpack_half(u32 pair) {
    float2 out;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
        : "=f"(out.x), "=f"(out.y)
        : "r"(pair));
    return out;
}

// Two bf16 products.
__device__ __forceinline__ u32 multiply_bf16(u32 a, u32 b) {
    u32 out;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(0x80008000u));  // -0 changes no sign
    return out;
}

__device__ __forceinline__ float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ uint4 load_shared16(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}

__device__ __forceinline__ uint2 load_shared8(u32 address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
    return v;
}
__device__ __forceinline__ u32 load_shared4(u32 address) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}
// A word that others write meanwhile. Without `volatile` in PTX, a loop may read it once only, before it begins.
__device__ __forceinline__ u32 poll_shared(u32 address) {
    u32 v;
    asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}
__device__ __forceinline__ u32 load_shared2(u32 address) {
    u32 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}

// The same where others write between one load and the next.
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
__device__ __forceinline__ void store_shared(u32 at, u32 v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}
__device__ __forceinline__ void store_shared(u32 at, uint2 v) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(v.x), "r"(v.y) : "memory");
}
__device__ __forceinline__ void store_shared(u32 at, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
// Weights, which stay in the L2 cache alone.
__device__ __forceinline__ void load_once16(u32* v, const u8* at) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "l"(at));
}

// The same number in every lane, which the compiler then knows: it may keep it in a register of the whole warp. Not for
// one side of a conditional expression: ptxas 13.0 has put it under a predicate that it had not set.
__device__ __forceinline__ int uniform(int v) { return (int)__reduce_max_sync(~0u, (unsigned)v); }

// True when it is in every lane. Polling until then keeps the warp together.
__device__ __forceinline__ bool everywhere(bool here) { return __all_sync(~0u, here); }

// The same sum, to the bit, in every lane: neighbours first.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) v += __shfl_xor_sync(~0u, v, step);
    return v;
}

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, step));
    return v;
}

// Within a few row tiles in the last place, and without branches, so that several are on their way at a time. Results
// below 2^-126 are 0.
__device__ __forceinline__ float power_of_2(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}
__device__ __forceinline__ float logarithm_to_2(float x) {
    float out;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}
__device__ __forceinline__ float reciprocal(float x) {
    float out;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}
__device__ __forceinline__ float inverse_root(float x) {
    float out;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}
constexpr float LOG2_E = 1.44269504f, LN_2 = 0.69314718f;
__device__ __forceinline__ float exponential(float x) { return power_of_2(LOG2_E * x); }
__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.0f + exponential(-x)); }
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }
// ln(1 + e^x), within 4e-7.
__device__ __forceinline__ float softplus(float x) {
    return fmaf(LN_2, logarithm_to_2(1.0f + exponential(-fabsf(x))), fmaxf(x, 0.0f));
}
