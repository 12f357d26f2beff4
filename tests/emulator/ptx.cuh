// What kernels/ptx.cuh names, on the emulated machine.
#pragma once
#include "machine.h"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// A poll that found nothing: let the others go on.
struct Watchdog {
    void check() const { machine::hand_on("words"); }
};

template <int TIME>
inline void rest() {}
inline u64 nanoseconds() { return (u64)std::chrono::steady_clock::now().time_since_epoch().count(); }

inline u32 shared_address(const void* p) { return (u32)((const u8*)p - machine::shared_memory()); }
inline u8* shared_pointer(u32 address) { return machine::shared_memory() + address; }
template <class T>
inline const T& shared_at(u32 address) {
    return *(const T*)shared_pointer(address);
}

// --- mbarriers ------------------------------------------------------------------------------------------------------

struct Barrier {
    u32 expected : 12, pending : 12, phase : 8;
    int bytes;  // still to come
    void advance() {
        machine::progress();
        if (pending == 0 && bytes == 0) pending = expected, phase++;
    }
};
static_assert(sizeof(Barrier) == 8);
inline Barrier& barrier_at(u32 address) { return *(Barrier*)shared_pointer(address); }
inline void barrier_init(u32 barrier, u32 arrivals) {
    Barrier& b = barrier_at(barrier);
    b.expected = b.pending = arrivals, b.phase = 0, b.bytes = 0;
}
inline void show_barriers() {}
inline void arrive(u32 barrier, int bytes) {
    Barrier& b = barrier_at(barrier);
    if (b.pending == 0) std::fprintf(stderr, "an arrival too many\n"), std::abort();
    b.pending--, b.bytes += bytes;
    b.advance();
}
inline void barrier_arrive(u32 barrier) { arrive(barrier, 0); }
inline bool barrier_done(u32 barrier, u32 parity) {
    if ((barrier_at(barrier).phase & 1) != parity) return true;
    machine::hand_on("a barrier");
    return (barrier_at(barrier).phase & 1) != parity;
}
inline bool barrier_seen(u32 barrier, u32 parity) { return (barrier_at(barrier).phase & 1) != parity; }
inline void barrier_wait(u32 barrier, u32 parity) {
    const u64 phase = 1ull << 24;  // its lowest bit
    while (!barrier_seen(barrier, parity)) machine::hand_on("a barrier", {(const u64*)&barrier_at(barrier), phase, parity ? phase : 0});
}

// --- copies ---------------------------------------------------------------------------------------------------------

inline u64 evict_first() { return 0; }
inline float4 load_once(const float4* at) { return *at; }
inline void store_once(float4* at, float4 v) { *at = v; }
#if __CUDA_ARCH__ >= 900
inline void copy_slot(u32 dst, const void* src, u32 bytes, u32 barrier, u64) {
    if (dst % 16 || (uintptr_t)src % 16 || bytes % 16) std::fprintf(stderr, "a bulk copy that is not aligned\n"), std::abort();
    arrive(barrier, (int)bytes);
    const auto landed = [](void* barrier, int bytes) {
        ((Barrier*)barrier)->bytes -= bytes;
        ((Barrier*)barrier)->advance();
    };
    machine::copies.push_back({shared_pointer(dst), src, bytes, landed, &barrier_at(barrier)});
}
constexpr u32 COPY_LANES = 1;
#else
inline void copy_slot(u32 dst, const void* src, u32 bytes, u32 barrier, u64) {
    for (u32 at = (threadIdx.x & 31) * 16; at < bytes; at += 512) std::memcpy(shared_pointer(dst + at), (const u8*)src + at, 16);
    arrive(barrier, 0);
}
constexpr u32 COPY_LANES = 32;
#endif
inline void copy16(void* dst, const void* src) { machine::current->small_copies.push_back({dst, src, 16}); }
inline void copy4(void* dst, const void* src) { machine::current->small_copies.push_back({dst, src, 4}); }
inline void copy16(u32 to, const void* from, bool there = true) {
    static const uint4 zeros = {};
    copy16(shared_pointer(to), there ? from : &zeros);
}
inline void land_copies(size_t from, size_t count) {
    auto& copies = machine::current->small_copies;
    for (size_t i = from; i < from + count; i++) std::memcpy(copies[i].to, copies[i].from, copies[i].bytes);
    copies.erase(copies.begin() + from, copies.begin() + from + count);
}
inline void copies_done() { land_copies(0, machine::current->small_copies.size()), machine::current->groups.clear(); }
inline void arrive_with_copies(u32 barrier) { copies_done(), arrive(barrier, 0); }
inline void copies_queued() {
    size_t queued = 0;
    for (size_t each : machine::current->groups) queued += each;
    machine::current->groups.push_back(machine::current->small_copies.size() - queued);
}
template <int LEFT>
inline void copies_left() {
    auto& groups = machine::current->groups;
    for (; groups.size() > LEFT; groups.erase(groups.begin())) land_copies(0, groups.front());
}
inline void prefetch(const void*) {}
template <int COUNT>
inline void take_registers() {}
template <int COUNT>
inline void leave_registers() {}

#define MINUS_INFINITY (-INFINITY)

// --- words ----------------------------------------------------------------------------------------------------------

inline void store16(void* at, u32 a, u32 b, u32 c, u32 d) { *(uint4*)at = {a, b, c, d}, machine::progress(); }
inline void store8(void* at, u32 a, u32 b) { *(uint2*)at = {a, b}, machine::progress(); }
inline void store4(void* at, u32 a) { *(u32*)at = a, machine::progress(); }
inline uint4 load16(const void* at) { return *(const uint4*)at; }
inline uint2 load8(const void* at) { return *(const uint2*)at; }
inline u32 load4(const void* at) { return *(const u32*)at; }

inline void fence_gpu() {}
template <int COUNT>
inline void sync_threads() { machine::barrier(1, COUNT); }
template <int COUNT>
inline void sync_some(int id) { machine::barrier(id, COUNT); }
template <int COUNT>
inline void arrive_some(int id) { machine::arrive(id, COUNT); }

// Launches follow one another here.
inline void let_next_start() {}
inline void wait_for_previous() {}

// --- arithmetic -----------------------------------------------------------------------------------------------------

inline float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
inline float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
inline float2 unpack_bf16(u32 pair) { return {bf16_low(pair), bf16_high(pair)}; }
// fp16 by hand: compilers do not agree on its name.
inline float from_half(u32 half) {
    const u32 magnitude = half & 0x7fff, sign = (half & 0x8000) << 16;
    const float v = magnitude >= 0x7c00 ? __uint_as_float(0x7f800000 | (magnitude & 0x3ff) << 13) : __uint_as_float(magnitude << 13) * 0x1p112f;
    return __uint_as_float(__float_as_uint(v) | sign);
}
inline u32 half_of(float v) {
    const u32 bits = __float_as_uint(v), sign = bits >> 16 & 0x8000;
    const float magnitude = std::fabs(v);
    u32 half;
    if (v != v)
        half = 0x7e00;
    else if (magnitude >= 65520.0f)
        half = 0x7c00;
    else if (magnitude < 0x1p-14f)  // the sum is rounded as a subnormal half is
        half = __float_as_uint(magnitude + 0.5f) - 0x3f000000;
    else
        half = ((bits & 0x7fffffff) + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13;
    return half | sign;
}
#ifdef __F16C__
typedef int Words __attribute__((vector_size(16)));
typedef short Shorts __attribute__((vector_size(16)));
typedef float Floats __attribute__((vector_size(16)));
inline float2 unpack_half(u32 pair) {
    const Words floats = (Words)__builtin_ia32_vcvtph2ps((Shorts)Words{(int)pair});
    return {__int_as_float(floats[0]), __int_as_float(floats[1])};
}
inline u32 pack_half(float low, float high) { return (u32)((Words)__builtin_ia32_vcvtps2ph(Floats{low, high}, 0))[0]; }
#else
inline std::vector<float> all_halves() {
    std::vector<float> values(65536);
    for (u32 half = 0; half < 65536; half++) values[half] = from_half(half);
    return values;
}
inline const std::vector<float> halves = all_halves();
inline float2 unpack_half(u32 pair) { return {halves[pair & 0xffff], halves[pair >> 16]}; }
inline u32 pack_half(float low, float high) { return half_of(low) | half_of(high) << 16; }
#endif
inline u32 bf16_of(float v) {
    const u32 bits = __float_as_uint(v);
    return v != v ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 pack_bf16(float low, float high) { return bf16_of(low) | bf16_of(high) << 16; }
inline u32 multiply_bf16(u32 a, u32 b) { return pack_bf16(bf16_low(a) * bf16_low(b), bf16_high(a) * bf16_high(b)); }

// acc (16 x 8) += a (16 x 16) * b (16 x 8): lane l gives rows l / 4 and + 8, k 2 (l mod 4), + 1, + 8, + 9; column l / 4.
struct Operands { u32 a[4], b[2]; };
typedef double Columns __attribute__((vector_size(64)));
template <class Unpack, class Column>
__attribute__((optimize("O3"))) void multiply_rows(double (&sums)[16][8], u64 generation, Unpack unpack, Column column) {
    double b[16][8];
    for (int c = 0; c < 8; c++)
        for (int q = 0; q < 4; q++)
            for (int half = 0; half < 2; half++) {
                const float2 y = unpack(column(c, q, half));
                b[4 * q + 2 * half][c] = y.x, b[4 * q + 2 * half + 1][c] = y.y;
            }
    for (int row = 0; row < 16; row++) {
        Columns sum = {};
        for (int q = 0; q < 4; q++) {
            const auto given = machine::given<Operands>(generation, row % 8 * 4 + q);
            for (int half = 0; half < 2; half++) {
                const float2 x = unpack(given.a[row / 8 + 2 * half]);
                Columns low, high;
                std::memcpy(&low, b[4 * q + 2 * half], 64), std::memcpy(&high, b[4 * q + 2 * half + 1], 64);
                sum += (double)x.x * low + (double)x.y * high;
            }
        }
        std::memcpy(sums[row], &sum, 64);
    }
}
inline double product(u64 generation, int octet, int i) {  // the lane's
    const int lane = threadIdx.x & 31;
    return machine::current->warp->products[generation & 1][octet][lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
}
template <class Unpack>
inline void multiply_tiles(float (&acc)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, Unpack unpack) {
    const u64 generation = machine::current->warp->generation;
    machine::collect(Operands{{a0, a1, a2, a3}, {b0, b1}}, [&] {
        const auto column = [&](int c, int q, int half) { return machine::given<Operands>(generation, c * 4 + q).b[half]; };
        multiply_rows(machine::current->warp->products[generation & 1][0], generation, unpack, column);
    });
    for (int i = 0; i < 4; i++) acc[i] = (float)(acc[i] + product(generation, 0, i));
}
inline void mma(float (&acc)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { multiply_tiles(acc, a0, a1, a2, a3, b0, b1, [](u32 v) { return unpack_bf16(v); }); }
inline void mma_half(float (&acc)[4], uint4 a, u32 b0, u32 b1) { multiply_tiles(acc, a.x, a.y, a.z, a.w, b0, b1, [](u32 v) { return unpack_half(v); }); }

inline uint4 load_matrices(const void* row) {
    const u64 generation = machine::current->warp->generation;
    machine::collect(row);
    const int lane = threadIdx.x & 31;
    u32 out[4];
    for (int i = 0; i < 4; i++) out[i] = ((const u32*)machine::given<const void*>(generation, i * 8 + lane / 4))[lane % 4];
    return {out[0], out[1], out[2], out[3]};
}
inline uint4 load_transposed(const void* row) {
    const u64 generation = machine::current->warp->generation;
    machine::collect(row);
    const int lane = threadIdx.x & 31;
    u32 out[4];
    for (int i = 0; i < 4; i++) {
        const auto at = [&](int r) { return (u32)((const u16*)machine::given<const void*>(generation, i * 8 + r))[lane / 4]; };
        out[i] = at(lane % 4 * 2) | at(lane % 4 * 2 + 1) << 16;
    }
    return {out[0], out[1], out[2], out[3]};
}

inline uint4 load_shared16(u32 address) { return *(const uint4*)shared_pointer(address); }
inline uint2 load_shared8(u32 address) { return *(const uint2*)shared_pointer(address); }
inline u32 load_shared4(u32 address) { return *(const u32*)shared_pointer(address); }
inline u32 poll_shared(u32 address) { return *(const volatile u32*)shared_pointer(address); }
inline u32 load_shared2(u32 address) { return *(const u16*)shared_pointer(address); }
inline void load_shared_words(u32* v, u32 at) { std::memcpy(v, shared_pointer(at), 16); }
inline float load_shared_float(u32 at) { return *(const float*)shared_pointer(at); }
inline float2 load_shared_float2(u32 at) { return *(const float2*)shared_pointer(at); }
template <class T>
inline void store_shared(u32 at, T v) { *(T*)shared_pointer(at) = v; }
inline void load_once16(u32* v, const u8* at) { std::memcpy(v, at, 16); }

inline int uniform(int v) { return __shfl_sync(~0u, v, 0); }
inline bool everywhere(bool here) { return __all_sync(~0u, here); }
inline float warp_sum(float v) {
    for (int step = 1; step < 32; step *= 2) v += __shfl_xor_sync(~0u, v, step);
    return v;
}
inline float warp_max(float v) {
    for (int step = 1; step < 32; step *= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, step));
    return v;
}
inline float power_of_2(float x) { return std::exp2(x); }
inline float reciprocal(float x) { return 1.0f / x; }
inline float inverse_root(float x) { return 1.0f / std::sqrt(x); }
inline float exponential(float x) { return std::exp(x); }
inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
inline float silu(float x) { return x * sigmoid(x); }
inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
