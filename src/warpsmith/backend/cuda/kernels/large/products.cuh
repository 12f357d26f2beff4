// Products of packed weights with the activations of all nodes at once.
//
// Maths: sums[row][node] = sum over k of W[row][k] a[node][k], for the rows and the superblocks of K that are this
// SM's. K is cut into groups of at most GROUP_BLOCKS superblocks. A group's (tile of 64 rows, superblock) pairs, tile
// by tile, are dealt to SMs by their bytes; where an SM begins or ends inside a tile, its results are parts of that
// tile. Activations of the group are in shared memory in fp16, times a power of two that is the token's own (of its
// largest value in the group), so nothing overflows and a token's numbers depend on it alone. They stay there while the
// weights pass by. Eight warps are two groups of four: a group has every second superblock of 64 rows, a warp 16 of the
// rows. Sums of a tile stay in registers, then two further warps add both groups' up and write them to memory. Bytes:
// the weights, once; 10 bytes a k and node (read 2, write and read 4); 4 a result.
#pragma once
#include "large/words.cuh"
#include "large/ring.cuh"

// --- activations ----------------------------------------------------------------------------------------------------

// A stage's activations are multiplied with 1 / rms of the residual stream where they are that (`normed`), and where
// they are a DeltaNet's output with 1 / rms of its head (`heads`).
__device__ __forceinline__ bool normed(int stage) { return (stage & 1) == 0; }

// Of one node: a thread has eight k. The same operations in the same order.
__device__ __forceinline__ void prepare_one(Block& b, const Run& run, int stage, bool heads) {
    const int k = threadIdx.x * 8, head = run.first_block * 2 + k / 128;
    const bool live = k < run.blocks * BLOCK_K;
    uint4 raw = {};
    float by = 1.0f;
    if (live) {
        const u32* at = operand_words(b, stage) + (run.first_block * BLOCK_K + k) / 2;
        raw = load16(at);
        if (heads) {
            const u32* squares = head_square_words(b, stage, head, 0);
            uint4 v[4] = {load16(squares), load16(squares + 4), load16(squares + 8), load16(squares + 12)};
            for (Watchdog dog; !(came4(v[0]) & came4(v[1]) & came4(v[2]) & came4(v[3])); dog.check())
#pragma unroll
                for (int j = 0; j < 4; j++) v[j] = load16(squares + j * 4);
            float square = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float4 f = floats(v[j]);
                square += (f.x + f.y) + (f.z + f.w);
            }
            by = inverse_root(square / STATE_DIM + EPS);
        }
        for (Watchdog dog; !came4(raw); raw = load16(at)) dog.check();
    }
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
    u32 top = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) top = max(top, max(words[j] & 0x7fffu, words[j] >> 16 & 0x7fffu));
    top = __reduce_max_sync(~0u, __float_as_uint(__uint_as_float(top << 16) * by));
    if (b.lane == 0) b.s.exponent[b.warp][0] = (u8)(top >> 23);
    b.sync();
    u32 exponent = 10;
#pragma unroll
    for (int w = 0; w < WARPS; w++) exponent = max(exponent, (u32)b.s.exponent[w][0]);
    const float to_half = __uint_as_float((263 - exponent) << 23);  // the largest becomes 512 to 1024
    if (threadIdx.x == 0) b.s.scale[0] = __uint_as_float((exponent + 15) << 23);
    const float full = to_half * by, part = full * 0.0625f;
    const int tile = k / 64, q = k % 64 / 16, odd = k / 8 & 1;
    uint4 out;
    float sum[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const u32 early = words[2 * j], late = words[2 * j + 1];
        const float2 a = {bf16_low(early) * full, bf16_high(early) * full},
                     c = {bf16_low(late) * part, bf16_high(late) * part};
        const u32 low = pack_half(a.x, a.y), high = pack_half(c.x, c.y);
        if (j == 0)
            out.x = low, out.y = high;
        else
            out.z = low, out.w = high;
        sum[j] = fmaf(16.0f, c.x + c.y, a.x + a.y);
    }
    u8* to = b.scratch + tile / 4 * BLOCK_BYTES;
    if (live) *(uint4*)(to + (tile % 4 * 2 + odd) * 64 + q * 16) = out;
    float total = 0.0f + sum[0] + sum[1];  // the first eight k of sixteen
    total = __shfl_xor_sync(~0u, total, 1) + sum[0] + sum[1];
    total += __shfl_xor_sync(~0u, total, 2);
    if (live && (threadIdx.x & 3) == 1) {  // block 2 (tile mod 4) + q / 2 of the superblock
        u16* sums = (u16*)(to + 512 + tile % 4 * 8) + q / 2;
        const u32 rounded = pack_half(total, 0.0f);
        sums[0] = (u16)rounded, sums[2] = (u16)pack_half(total - unpack_half(rounded).x, 0.0f);
    }
    b.sync();
    if (threadIdx.x < THREADS_ARRIVE) barrier_arrive(Barriers(b.base).begun);
}

// Sums of squares of some nodes' residual streams, once they have come: a lane those of some SMs.
template <int EACH_NODES>
__device__ __forceinline__ void await_squares(const Block& b, int stage, float (&square)[EACH_NODES]) {
    constexpr int EACH_SMS = (SMS + 31) / 32;
    u32 squares[EACH_NODES][EACH_SMS];
    for (Watchdog dog;; dog.check()) {
        bool all = true;
#pragma unroll
        for (int n = 0; n < EACH_NODES; n++)
#pragma unroll
            for (int i = 0; i < EACH_SMS; i++) {
                const int node = n * WARPS + b.warp, sm = i * 32 + b.lane;
                squares[n][i] = node < b.nodes && sm < SMS ? load4(square_words(b, stage, node) + sm) : 0;
            }
#pragma unroll
        for (int n = 0; n < EACH_NODES; n++)
#pragma unroll
            for (int i = 0; i < EACH_SMS; i++) all = all & squares[n][i] != NOT_YET;
        if (everywhere(all)) break;
    }
#pragma unroll
    for (int n = 0; n < EACH_NODES; n++)
#pragma unroll
        for (int i = 0; i < EACH_SMS; i++) square[n] += __uint_as_float(squares[n][i]);
}

// Half of a DeltaNet head's, of a token of every octet: eight, in two sums. `live(octet)`: whether there is one.
template <class Live>
__device__ __forceinline__ void await_head_squares(const u32* at, Live live, float (&square)[OCTETS][2]) {
    uint4 v[OCTETS][2] = {};
    for (Watchdog dog;; dog.check()) {
        bool all = true;
#pragma unroll
        for (int octet = 0; octet < OCTETS; octet++)
            if (live(octet)) v[octet][0] = load16(at + octet * 128), v[octet][1] = load16(at + octet * 128 + 4);
#pragma unroll
        for (int octet = 0; octet < OCTETS; octet++) all = all & came4(v[octet][0]) & came4(v[octet][1]);
        if (everywhere(all)) break;
    }
#pragma unroll
    for (int octet = 0; octet < OCTETS; octet++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float4 f = floats(v[octet][i]);
            square[octet][i] = (f.x + f.y) + (f.z + f.w);
        }
}

// The group's activations as fp16 operands. A thread has 64 k of one token of every octet, which lie in memory as they
// will in shared memory. They are multiplied with 1 / rms of the residual stream (a warp some nodes) or of a DeltaNet
// head (two threads have 64 k each, and half of its sums of squares). Squares are published after what they are of: who
// has them first need not ask for everything again and again.
__device__ __forceinline__ void prepare_operands(Block& b, const Run& run, int stage, bool heads) {
    static_assert(GROUP_BLOCKS * 4 * 8 <= CONSUMERS, "a thread a tile of 64 k and token of an octet");
    constexpr int EACH_NODES = OCTETS * 8 / WARPS;
    const int in_octet = b.lane & 7, tile = b.warp * 4 + (b.lane >> 3);
    const auto live = [&](int octet) { return tile < run.blocks * 4 && octet * 8 + in_octet < b.nodes; };
    float square[EACH_NODES] = {}, head_square[OCTETS][2] = {};
    if (normed(stage)) await_squares(b, stage, square);
    if (heads)
        await_head_squares(head_square_words(b, stage, run.first_block * 2 + tile / 2, in_octet) + (tile & 1) * 8, live,
                           head_square);
    uint4 raw[OCTETS][8];  // [step, half]
    const u8* rows =
        (const u8*)operand_words(b, stage) + (run.first_block * 4 + tile) * (4 * STEP_BYTES) + in_octet * 16;
    const auto ask = [&](int octet, int i) { return load16(rows + i / 2 * STEP_BYTES + octet * 256 + i % 2 * 128); };
#pragma unroll
    for (int octet = 0; octet < OCTETS; octet++)
#pragma unroll
        for (int i = 0; i < 8; i++) raw[octet][i] = live(octet) ? ask(octet, i) : uint4{};
#pragma unroll
    for (int n = 0; n < EACH_NODES; n++) {
        const float inverse = normed(stage) ? inverse_root(warp_sum(square[n]) / HIDDEN + EPS) : 1.0f;
        if (b.lane < REDUCERS) b.s.inverse[b.lane][n * WARPS + b.warp] = inverse;
    }
    float by[OCTETS];
#pragma unroll
    for (int octet = 0; octet < OCTETS; octet++) {
        by[octet] = 1.0f;
        if (heads) {
            const float first = head_square[octet][0], second = head_square[octet][1];
            // in order: the second thread goes on where the first ended, and tells it the sum
            const float all = __shfl_xor_sync(~0u, first + second, 8) + first + second,
                        of_other = __shfl_xor_sync(~0u, all, 8);
            by[octet] = inverse_root((tile & 1 ? all : of_other) / STATE_DIM + EPS);
        }
        u32 pairs, top;
        for (Watchdog dog;; dog.check()) {
            pairs = 0;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const uint4 v = raw[octet][i];
                pairs = largest_bf16(largest_bf16(largest_bf16(largest_bf16(pairs, v.x), v.y), v.z), v.w);
            }
            if (everywhere((pairs & 0x7fffu) <= 0x7f80u && pairs >> 16 <= 0x7f80u)) break;
            // what has not come is a NaN, but not every NaN has not come
            bool all = true;
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (!came4(raw[octet][i])) all = false, raw[octet][i] = ask(octet, i);
            if (everywhere(all)) break;
        }
        top = __float_as_uint(__uint_as_float(max(pairs << 16, pairs & 0xffff0000u)) * by[octet]);
        top = max(top, __shfl_xor_sync(~0u, top, 8));
        top = max(top, __shfl_xor_sync(~0u, top, 16));
        if (b.lane < 8) b.s.exponent[b.warp][octet * 8 + in_octet] = (u8)(top >> 23);
    }
    b.sync();
#pragma unroll
    for (int octet = 0; octet < OCTETS; octet++) {
        const int token = octet * 8 + in_octet;
        u32 exponent = 10;
#pragma unroll
        for (int w = 0; w < WARPS; w++) exponent = max(exponent, (u32)b.s.exponent[w][token]);
        const float to_half = __uint_as_float((263 - exponent) << 23);  // the largest becomes 512 to 1024
        if (threadIdx.x < 8) b.s.scale[token] = __uint_as_float((exponent + 15) << 23);
        const float full = to_half * by[octet], part = full * 0.0625f;
        u8* to = b.scratch + (tile / 4 * 17 + tile % 4 * 4) * STEP_BYTES + octet * 256 + in_octet * 16;
        float sum[4] = {};
#pragma unroll
        for (int step = 0; step < 4; step++) {
            const uint4 u = raw[octet][step * 2], v = raw[octet][step * 2 + 1];
            const u32 early[4] = {u.x, u.y, u.z, u.w}, late[4] = {v.x, v.y, v.z, v.w};
            u32 low[4], high[4];
#pragma unroll
            for (int q = 0; q < 4; q++) {
                // exact but for numbers that become subnormal: their sums may be taken before
                const float2 a = {bf16_low(early[q]) * full, bf16_high(early[q]) * full},
                             c = {bf16_low(late[q]) * part, bf16_high(late[q]) * part};
                low[q] = pack_half(a.x, a.y), high[q] = pack_half(c.x, c.y);
                sum[q] += fmaf(16.0f, c.x + c.y, a.x + a.y);
            }
            if (tile < run.blocks * 4) {
                *(uint4*)(to + step * STEP_BYTES) = {low[0], low[1], low[2], low[3]};
                *(uint4*)(to + step * STEP_BYTES + 128) = {high[0], high[1], high[2], high[3]};
            }
        }
        if (tile < run.blocks * 4) {  // both blocks of 32
            const float even = sum[0] + sum[1], odd = sum[2] + sum[3];
            const u32 rounded = pack_half(even, odd);
            const float2 back = unpack_half(rounded);
            u32* sums = (u32*)(b.scratch + (tile / 4 * 17 + 16) * STEP_BYTES + octet * 256 + in_octet * 16) + tile % 4;
            sums[0] = rounded, sums[32] = pack_half(even - back.x, odd - back.y);
        }
    }
    show_to_products();
    b.sync();
    if (threadIdx.x < THREADS_ARRIVE) barrier_arrive(Barriers(b.base).begun);
}

#include "large/multiply_one.cuh"

// 1 / rms of the one node's residual stream, as `measure_residual`.
__device__ __forceinline__ void measure_words(Block& b, int which, int stage) {
    float inverse = 1.0f;
    if (normed(stage)) {
        constexpr int EACH = (SMS + 31) / 32;
        const u32* words = square_words(b, stage, 0);
        u32 got[EACH];
        for (Watchdog dog;; dog.check()) {
            bool all = true;
#pragma unroll
            for (int i = 0; i < EACH; i++) got[i] = i * 32 + b.lane < SMS ? load4(words + i * 32 + b.lane) : 0;
#pragma unroll
            for (int i = 0; i < EACH; i++) all = all & got[i] != NOT_YET;
            if (everywhere(all)) break;
        }
        float square = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++) square += __uint_as_float(got[i]);
        inverse = inverse_root(warp_sum(square) / HIDDEN + EPS);
    }
    if (b.lane == 0) b.s.inverse[which][0] = inverse;
    __syncwarp();
}
