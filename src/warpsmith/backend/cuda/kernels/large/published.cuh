// Activations and squares that other SMs have published, for those who multiply and for those who add up.
//
// Included where the pass has its own `Block` and words (large/products.cuh, draft/products.cuh).
#pragma once
#include "large/ring.cuh"

// A tree's group of K as it was published. A warp has a superblock, a lane 64 k of one token of every octet.
__device__ __forceinline__ void prepare_operands(Block& b, const Run& run, int stage) {
    static_assert(GROUP_BLOCKS <= WARPS, "a warp a superblock");
    constexpr int SUMS = OCTETS * 16, EACH_SUMS = (SUMS + 31) / 32;  // of sixteen bytes
    const bool mine = b.warp < run.blocks;
    const u8* block = (const u8*)(operand_words(b, stage) + (run.first_block + b.warp) * BLOCK_WORDS);
    const u32 to = b.base + b.warp * BLOCK_BYTES;
    const int lane_at = (b.lane >> 3) * 4 * STEP_BYTES + (b.lane & 7) * 16;
    const u8* from = block + lane_at;
    // Sixteen bytes of a lane: i / 2 of four steps, one of its halves.
    const auto place = [](int octet, int i) { return i / 2 * STEP_BYTES + octet * 256 + i % 2 * 128; };
    const auto sums_place = [&](int i) { return 16 * STEP_BYTES + (i * 32 + b.lane) * 16; };
    const auto live = [&](int octet) { return mine && octet * 8 + (b.lane & 7) < b.nodes; };
    const auto has_sums = [&](int i) {
        const int at = i * 32 + b.lane;
        return mine && at < SUMS && at / 16 * 8 + at % 8 < b.nodes;
    };
    const bool has_back = mine && b.lane < b.nodes;
    const u32* back_at = (const u32*)(block + BACK_AT) + b.lane;
    uint4 raw[OCTETS][8], sums[EACH_SUMS] = {};
    u32 back = __float_as_uint(1.0f);
    // The few first: registers of their addresses would be waited for behind many loads.
#pragma unroll
    for (int i = 0; i < EACH_SUMS; i++)
        if (has_sums(i)) sums[i] = load16(block + sums_place(i));
    if (has_back) back = load4(back_at);
#pragma unroll
    for (int octet = 0; octet < OCTETS; octet++)
#pragma unroll
        for (int i = 0; i < 8; i++)
            raw[octet][i] = live(octet) ? __ldcg((const uint4*)(from + place(octet, i))) : uint4{};
#pragma unroll
    for (int octet = 0; octet < OCTETS; octet++) {
        for (Watchdog dog;; dog.check()) {
            u32 most = 0;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const uint4 v = raw[octet][i];
                most = max(max(max(most, v.x), max(v.y, v.z)), v.w);
            }
            if (everywhere(most != NOT_YET)) break;
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (!came4(raw[octet][i])) raw[octet][i] = load16(from + place(octet, i));
        }
        if (mine)
#pragma unroll
            for (int i = 0; i < 8; i++) store_shared(to + lane_at + place(octet, i), raw[octet][i]);
    }
#pragma unroll
    for (int i = 0; i < EACH_SUMS; i++) {
        for (Watchdog dog; !everywhere(came4(sums[i])); dog.check())
            if (has_sums(i)) sums[i] = load16(block + sums_place(i));
        if (mine && i * 32 + b.lane < SUMS) store_shared(to + sums_place(i), sums[i]);
    }
    for (Watchdog dog; !everywhere(back != NOT_YET); dog.check())
        if (has_back) back = load4(back_at);
    if (mine && b.lane < NODES) {
        store_shared(to + BACK_AT + b.lane * 4, back);
        if (back != __float_as_uint(1.0f)) b.s.scaled = stage;
    }
    show_to_products();
    b.sync();
    if (threadIdx.x < THREADS_ARRIVE) barrier_arrive(Barriers(b.base).begun);
}

// The sum of squares of one node's residual stream, once all have come: a lane has some of them.
__device__ __forceinline__ float square_of_one(const u32* words) {
    constexpr int EACH = (SQUARES + 31) / 32;
    const int lane = threadIdx.x & 31;
    u32 got[EACH];
    for (Watchdog dog;; dog.check()) {
        u32 most = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) got[i] = i * 32 + lane < SQUARES ? load4(words + i * 32 + lane) : 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) most = max(most, got[i]);
        if (everywhere(most != NOT_YET)) break;
    }
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++) square += __uint_as_float(got[i]);
    return warp_sum(square);
}
// Of every node of a tree, a lane one: the same sums in the same order, as many asked for at once as there is room for.
__device__ __forceinline__ float square_of_each(const u32* words) {
    constexpr int AT_ONCE = SQUARES <= 48 ? SQUARES : 32;
    float square[32] = {};
#pragma unroll
    for (int first = 0; first < SQUARES; first += AT_ONCE) {
        u32 got[AT_ONCE];
        for (Watchdog dog;; dog.check()) {
            u32 most = 0;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) got[i] = first + i < SQUARES ? load4(words + (first + i) * NODES) : 0;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) most = max(most, got[i]);
            if (everywhere(most != NOT_YET)) break;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) square[i % 32] += __uint_as_float(got[i]);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2)
#pragma unroll
        for (int i = 0; i < 32; i += 2 * step) square[i] += square[i + step];
    return square[0];
}
// 1 / rms of every node's residual stream, or 1 where activations are not of that (`normed`).
__device__ __forceinline__ void measure(Block& b, int which, int stage, bool normed) {
    float inverse = 1.0f;
    if (normed) {
        const u32* words = square_words(b, stage, min(b.lane, b.nodes - 1));
        inverse = inverse_root((POLLED ? square_of_one(words) : square_of_each(words)) / HIDDEN + EPS);
    }
    if (b.lane < NODES) b.s.inverse[which][b.lane] = inverse;
    __syncwarp();
}
