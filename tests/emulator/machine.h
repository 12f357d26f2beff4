// A GPU on a CPU, as much of it as the kernels use: every CUDA thread is a fiber, all in one operating-system thread.
//
// A fiber runs until it must wait for others (a shuffle, a barrier, a poll) and then hands on: to another lane of its warp that can
// go on, else to the next warp. The order of warps, when copies arrive, where a warp is interrupted and which warps or blocks
// dawdle are drawn from a seed. So what is found here is wrong logic: a wrong address, a missing barrier, a wait that never ends.
// Memory is always in order here; races that need more than that are for the GPU to show.
#pragma once
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#include <sys/mman.h>

#define EXPORTED extern "C" __attribute__((visibility("default")))  // what the host calls
#define __device__
#define __host__
#define __global__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))

struct alignas(8) int2 { int x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned min(int a, unsigned b) { return min((unsigned)a, b); }
inline unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }

namespace machine {

typedef unsigned long long u64;
struct Index { unsigned x, y = 0, z = 0; };
constexpr size_t STACK = (256 << 10) + 4096 + 448;  // no power of 2: fibers' frames would share a few sets of every cache
constexpr long PATIENCE = 2000000;  // turns of all fibers without any of them getting on: a wait that never ends

struct Warp {
    int arrived = 0, members = 0, dawdles = 0;  // turns that it lets pass
    u64 generation = 0;
    uint4 slots[2][32][2];  // what the lanes of a collective operation give, 32 bytes each
    unsigned all[2];        // what the first one that goes on has made of that for all of them, and of which operation
    u64 all_of[2] = {};
    double products[2][8][16][8];  // of the tensor core
};
// What a fiber waits for, where that can be told without running it: that these bits change.
struct Wait {
    const u64* word = nullptr;
    u64 bits = 0, value = 0;
    bool over() const { return !word || (*word & bits) != value; }
};
struct Block {
    std::vector<unsigned char> shared;
    std::vector<Warp> warps;
    int waiting[16] = {};
    u64 generation[16] = {};
};
struct Fiber {
    Fiber *next = nullptr, *warp_begin, *warp_end;  // in the order of turns; the lanes of its warp
    Warp* warp;
    Wait wait;
    bool done = false;
    void* stack_pointer = nullptr;
    Block* block;
    Index thread, block_index;
    bool can_go_on() const { return !done && wait.over(); }
    struct SmallCopy {
        void* to;
        const void* from;
        size_t bytes;
    };
    std::vector<SmallCopy> small_copies;  // on their way
    std::vector<size_t> groups;           // how many of them are in each
    const char* waits_for = "its first turn";
};

inline Fiber* current;
inline Index block_size, grid_size;
inline void* scheduler_stack;
inline long turns_without_progress;
inline u64 chance_state;
inline void (*body)(const void*);
inline const void* body_argument;

struct Copy {
    void* to;
    const void* source;
    size_t bytes;
    void (*landed)(void* barrier, int bytes);
    void* barrier;
};
inline std::vector<Copy> copies;  // on their way

inline unsigned chance(unsigned below) {  // any number less than that, by Knuth's recurrence
    chance_state = chance_state * 6364136223846793005ull + 1442695040888963407ull;
    return (unsigned)((chance_state >> 32) * below >> 32);
}

extern "C" void machine_switch(void** save, void* load);
#if defined(__x86_64__)
asm(R"(
.text
.globl machine_switch
.hidden machine_switch
machine_switch:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
)");
constexpr int SAVED_WORDS = 6;
#elif defined(__aarch64__)
asm(R"(
.text
.globl machine_switch
.hidden machine_switch
machine_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]; stp x21, x22, [sp, #16]; stp x23, x24, [sp, #32]; stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]; stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]; stp d10, d11, [sp, #112]; stp d12, d13, [sp, #128]; stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]; ldp x21, x22, [sp, #16]; ldp x23, x24, [sp, #32]; ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]; ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]; ldp d10, d11, [sp, #112]; ldp d12, d13, [sp, #128]; ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
)");
#else
#error "no fibers for this processor"
#endif

// The next fiber that can go on, from this one in the order of turns. A warp may be made to wait before its turn.
inline Fiber* runnable_from(Fiber* fiber) {
    while (fiber && (fiber->warp->dawdles > 0 || !fiber->can_go_on())) {
        if (fiber->warp->dawdles > 0) {
            fiber->warp->dawdles--;
            fiber = fiber->warp_end[-1].next;
        } else {
            fiber = fiber->next;
        }
    }
    return fiber;
}
inline void switch_to(Fiber* next) {  // null: the scheduler
    Fiber* me = current;
    current = next;
    machine_switch(&me->stack_pointer, next ? next->stack_pointer : scheduler_stack);
    current = me;
}
inline void hand_on(const char* waits_for, Wait wait = {}) {
    current->waits_for = waits_for, current->wait = wait;
    switch_to(runnable_from(current->next));
}
// First to the lanes that this one waits for.
inline void wait_for_warp() {
    Fiber* me = current;
    me->waits_for = "its warp", me->wait = {&me->warp->generation, ~0ull, me->warp->generation};
    for (Fiber* lane = me + 1; lane < me->warp_end; lane++)
        if (lane->can_go_on()) return switch_to(lane);
    for (Fiber* lane = me->warp_begin; lane < me; lane++)
        if (lane->can_go_on()) return switch_to(lane);
    switch_to(runnable_from(me->warp_end[-1].next));
}
inline void progress() { turns_without_progress = 0; }

inline void fiber_main() {
    body(body_argument);
    progress();
    current->done = true;
    Warp& warp = *current->warp;
    if (--warp.members > 0 && warp.arrived == warp.members) warp.arrived = 0, warp.generation++;  // nobody waits for who has left
    hand_on("nothing");
    std::abort();
}

// All lanes of the warp that are still there: what each gives, all get. `give` is at most 32 bytes. The last one computes what they
// all wait for.
template <class T, class Finish>
inline void collect(T give, Finish finish) {
    static_assert(sizeof(T) <= 32);
    Warp& warp = *current->warp;
    const u64 mine = warp.generation;
    auto* slots = warp.slots[mine & 1];
    std::memcpy(slots[current->thread.x & 31], &give, sizeof(T));
    if (++warp.arrived == warp.members) {
        finish();
        warp.arrived = 0, warp.generation++;
        progress();
        if (chance(16) == 0) hand_on("the others");
    } else {
        while (warp.generation == mine) wait_for_warp();
    }
}
template <class T>
inline void collect(T give) { collect(give, [] {}); }
template <class T>
inline T given(u64 generation, int lane) {
    T out;
    std::memcpy(&out, current->warp->slots[generation & 1][lane & 31], sizeof(T));
    return out;
}
template <class T, class Pick>
inline T shuffle(T give, Pick pick) {
    const u64 generation = current->warp->generation;
    collect(give);
    return given<T>(generation, pick(current->thread.x & 31));
}
// One number of those that all lanes give.
template <class Combine>
inline unsigned reduce(unsigned give, Combine combine) {
    Warp& warp = *current->warp;
    const u64 mine = warp.generation;
    collect(give);
    unsigned& all = warp.all[mine & 1];
    if (warp.all_of[mine & 1] != mine + 1) {
        warp.all_of[mine & 1] = mine + 1, all = given<unsigned>(mine, 0);
        for (int lane = 1; lane < 32; lane++) all = combine(all, given<unsigned>(mine, lane));
    }
    return all;
}
inline bool arrive(int id, int count) {  // the last one
    Block& block = *current->block;
    progress();
    if (++block.waiting[id] < count) return false;
    block.waiting[id] = 0, block.generation[id]++;
    return true;
}
inline void barrier(int id, int count) {
    Block& block = *current->block;
    const u64 mine = block.generation[id];
    if (!arrive(id, count)) {
        while (block.generation[id] == mine) hand_on(id ? "the consumers" : "its block", {&block.generation[id], ~0ull, mine});
    }
}

// Kept from launch to launch.
inline unsigned char* stacks_for(size_t fibers) {
    static unsigned char* stacks = nullptr;
    static size_t held = 0;
    if (fibers > held) {
        if (stacks) munmap(stacks, held * STACK);
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        stacks = (unsigned char*)mmap(nullptr, fibers * STACK, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (stacks == MAP_FAILED) std::perror("no memory for stacks"), std::abort();
        held = fibers;
    }
    return stacks;
}

// Run blocks of a kernel, from `first_block` on, that are all there at the same time. False: some wait never ends.
template <class Kernel>
inline bool run_blocks(int first_block, int grid, int threads, int shared_bytes, const Kernel& kernel) {
    copies.clear();
    body = [](const void* kernel) { (*(const Kernel*)kernel)(); }, body_argument = &kernel;
    std::vector<Block> blocks(grid);
    std::vector<Fiber> fibers((size_t)grid * threads);
    unsigned char* stacks = stacks_for(fibers.size());
    for (int b = 0; b < grid; b++) {
        blocks[b].shared.assign(shared_bytes + 256, 0xcd);  // nothing may count on zeros
        blocks[b].warps.resize((threads + 31) / 32);
        for (int t = 0; t < threads; t++) {
            Fiber& fiber = fibers[(size_t)b * threads + t];
            fiber.block = &blocks[b], fiber.warp = &blocks[b].warps[t / 32], fiber.warp->members++;
            fiber.thread = {(unsigned)t}, fiber.block_index = {(unsigned)(first_block + b)};
            fiber.warp_begin = &fiber - t % 32, fiber.warp_end = fiber.warp_begin + min(32, threads - t / 32 * 32);
            auto* top = (void**)(stacks + ((size_t)b * threads + t + 1) * STACK - 256);
#if defined(__x86_64__)
            top[SAVED_WORDS] = (void*)fiber_main;
#else
            top[11] = (void*)fiber_main;  // x30
#endif
            fiber.stack_pointer = top;
        }
    }
    // Lanes of a warp follow each other, warps in any order.
    std::vector<size_t> order;
    for (size_t i = 0; i < fibers.size(); i += 32) order.push_back(i);
    for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[chance((unsigned)i)]);
    Fiber *front = &fibers[order[0]], *last = nullptr;
    for (size_t warp : order)
        for (size_t i = warp; i < warp + 32 && i < fibers.size(); i++) {
            if (last) last->next = &fibers[i];
            last = &fibers[i];
        }
    turns_without_progress = 0;
    bool ended = false;
    while (!ended && turns_without_progress++ < PATIENCE / (long)fibers.size() + 2000) {
        for (size_t arrivals = min((unsigned)copies.size(), chance((unsigned)copies.size() + 2)); arrivals > 0; arrivals--) {  // of any
            std::swap(copies[chance((unsigned)copies.size())], copies.back());
            const Copy copy = copies.back();
            copies.pop_back();
            std::memcpy(copy.to, copy.source, copy.bytes);
            copy.landed(copy.barrier, (int)copy.bytes);
        }
        if (chance(4) == 0) {  // a warp falls behind
            Block& block = blocks[chance((unsigned)grid)];
            block.warps[chance((unsigned)block.warps.size())].dawdles = (int)chance(40);
        }
        if (chance(300) == 0) {  // a whole block does: others are a step ahead
            const int turns = (int)chance(1000);
            for (Warp& warp : blocks[chance((unsigned)grid)].warps) warp.dawdles = turns;
        }
        while (front && front->done) front = front->next;
        ended = !front;
        current = runnable_from(front);
        if (current) machine_switch(&scheduler_stack, current->stack_pointer);
    }
    if (!ended) {
        std::fprintf(stderr, "some threads wait for ever:\n");
        for (size_t i = 0; i < fibers.size(); i += 32) {
            std::fprintf(stderr, "block %zu warp %zu:", i / threads, i % threads / 32);
            for (size_t lane = i; lane < i + 32; lane++) std::fprintf(stderr, " %s", fibers[lane].done ? "-" : fibers[lane].waits_for);
            std::fprintf(stderr, "\n");
        }
    }
    return ended;
}

// A kernel whose blocks wait for each other, or one whose blocks may run in any order, or share static memory, of which there is one
// here: one at a time, on the same few stacks.
template <class Kernel>
inline bool run(bool together, int grid, int threads, int shared_bytes, unsigned seed, const Kernel& kernel) {
    chance_state = seed;
    grid_size = {(unsigned)grid}, block_size = {(unsigned)threads};
    if (together) return run_blocks(0, grid, threads, shared_bytes, kernel);
    std::vector<int> order;
    for (int block = 0; block < grid; block++) {
        order.push_back(block);
        std::swap(order[chance((unsigned)block + 1)], order.back());
    }
    for (int block : order)
        if (!run_blocks(block, 1, threads, shared_bytes, kernel)) return false;
    return true;
}

inline unsigned char* shared_memory() { return (unsigned char*)(((uintptr_t)current->block->shared.data() + 127) / 128 * 128); }

}  // namespace machine

#define threadIdx (machine::current->thread)
#define blockIdx (machine::current->block_index)
#define blockDim (machine::block_size)
#define gridDim (machine::grid_size)

// --- what the language has built in ---------------------------------------------------------------------------------

template <class T>
inline T __shfl_xor_sync(unsigned, T v, int mask) { return machine::shuffle(v, [&](int lane) { return lane ^ mask; }); }
template <class T>
inline T __shfl_sync(unsigned, T v, int source) { return machine::shuffle(v, [&](int) { return source; }); }
template <class T>
inline T __shfl_down_sync(unsigned, T v, int by) { return machine::shuffle(v, [&](int lane) { return lane + by < 32 ? lane + by : lane; }); }
template <class T>
inline T __shfl_up_sync(unsigned, T v, int by) { return machine::shuffle(v, [&](int lane) { return lane - by >= 0 ? lane - by : lane; }); }
inline bool __all_sync(unsigned, bool here) {
    return machine::reduce(here, [](unsigned a, unsigned b) { return a & b; });
}
inline unsigned __ballot_sync(unsigned, bool here) {
    const unsigned own = (unsigned)here << (machine::current->thread.x & 31);
    return machine::reduce(own, [](unsigned a, unsigned b) { return a | b; });
}
inline unsigned __reduce_max_sync(unsigned, unsigned v) {
    return machine::reduce(v, [](unsigned a, unsigned b) { return std::max(a, b); });
}
inline unsigned __reduce_min_sync(unsigned, unsigned v) {
    return machine::reduce(v, [](unsigned a, unsigned b) { return std::min(a, b); });
}
inline int __ffs(unsigned v) { return __builtin_ffs((int)v); }
inline void __syncwarp() { machine::collect(0); }
inline void __syncthreads() { machine::barrier(0, machine::block_size.x); }
inline void __threadfence_system() {}
inline void __threadfence_block() {}
inline void __threadfence() {}
inline void __trap() { std::abort(); }

template <class T>
inline T __ldg(const T* at) { return *at; }
template <class T>
inline T __ldcg(const T* at) { return *at; }
template <class T>
inline T __ldcs(const T* at) { return *at; }
template <class To, class From>
inline To as_bits(From v) {
    static_assert(sizeof(To) == sizeof(From));
    To out;
    std::memcpy(&out, &v, sizeof(out));
    return out;
}
inline float __uint_as_float(unsigned v) { return as_bits<float>(v); }
inline float __int_as_float(int v) { return as_bits<float>(v); }
inline unsigned __float_as_uint(float v) { return as_bits<unsigned>(v); }
inline double __longlong_as_double(long long v) { return as_bits<double>(v); }
inline long long __double_as_longlong(double v) { return as_bits<long long>(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned which) {
    const unsigned long long bytes = (unsigned long long)b << 32 | a;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) out |= (unsigned)(bytes >> ((which >> 4 * i & 7) * 8) & 255) << 8 * i;
    return out;
}
template <class T>
inline T atomicAdd(T* at, T v) {
    const T old = *at;
    *at += v;
    return old;
}
inline int atomicExch(int* at, int v) {
    const int old = *at;
    *at = v;
    return old;
}
template <class T>
inline T atomicMax(T* at, T v) {
    const T old = *at;
    if (v > old) *at = v;
    return old;
}
