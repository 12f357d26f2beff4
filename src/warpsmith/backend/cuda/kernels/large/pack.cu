// Moves rows of a matrix, as the file stores them, to their place in the stream: slabs of 16 rows x 256 k (see
// slab.cuh).
//
// Grid: a warp a slab. `offsets` says where the 64-row tiles of the stage lie, superblock by superblock; a tile's four
// slabs lie one behind the other. `pattern`: 0: the tensor's row i is row `first_row` + i of the stage; 1: gate, 2: up
// (eight gate rows, then their eight up rows). Rows past the tensor's end were zero before and stay so. Source types:
// those of slabs, and what is exactly one of them: BF16 and F16 are HALF; Q4_0, Q5_0 and IQ4_NL are Q8_0. BF16 and F16
// can be rounded to Q8_0 too.
#include "large/slab.cuh"

enum SourceType {
    FROM_Q4_K, FROM_Q5_K, FROM_Q6_K, FROM_Q8_0, FROM_F16, FROM_BF16, FROM_Q4_0, FROM_Q5_0, FROM_IQ4_NL,
    F16_TO_Q8_0, BF16_TO_Q8_0
};

struct Pack {
    const u8* rows;  // [count][row_bytes]
    u8* stream;
    const u64* offsets;  // [tile of rows][superblock] of the stage
    int source;
    int first_row, offset;  // stage row of the tensor's first; rows of the tensor moved before
    int count;              // rows here
    int blocks;             // superblocks of a row
    int row_bytes;
    int pattern;
};

__device__ __forceinline__ int stage_row(const Pack& a, int row) {
    const int i = a.offset + row;
    return a.pattern == 0 ? a.first_row + i : i / 8 * 16 + (a.pattern - 1) * 8 + i % 8;
}
__device__ __forceinline__ u32 u16_at(const u8* at) { return at[0] | (u32)at[1] << 8; }
__device__ __forceinline__ u32 six_bits(const u8* packed, int block, bool min) {
    const u8* own = packed + (min ? 4 : 0);
    if (block < 4) return own[block] & 63;
    return (min ? packed[4 + block] >> 4 : packed[4 + block] & 15) | own[block - 4] >> 6 << 4;
}

// One file row's superblock of a slab: `row` 0..15; a thread of 4, q, takes k = 16 q .. of every tile.
__device__ void move_k(const Pack& a, const u8* block, u8* slab, int row, int q) {
    const bool five = a.source == FROM_Q5_K;
    const int g = row % 8, upper = row / 8, lane = 4 * g + q;
    const u8 *quants = block + (five ? 48 : 16), *fifth = block + 16, *packed = block + 4;
    for (int t = 0; t < 4; t++) {
        u32 words[2] = {}, high = 0;
        for (int in = 0; in < 16; in++) {
            const int k = t * 64 + 16 * q + in, sub = k / 32, j = in / 4, h = in / 2 % 2, i = in % 2;
            const u8 byte = quants[k / 64 * 32 + k % 32];
            words[j / 2] |= (u32)(sub & 1 ? byte >> 4 : byte & 15) << (8 * (j & 1) + 4 * h + 16 * i);
            if (five) high |= (u32)(fifth[k % 32] >> sub & 1) << (2 * j + h + 16 * i);
        }
        u32* to = (u32*)(slab + t * 512 + lane * 16) + upper * 2;
        to[0] = words[0], to[1] = words[1];
        if (five) {
            u8* bits = slab + 2368 + t * 128 + lane * 4 + upper;
            bits[0] = (u8)high, bits[2] = (u8)(high >> 16);
        }
        if (q % 2 == 0) slab[2048 + (g * 2 + q / 2) * 8 + upper * 4 + t] = (u8)six_bits(packed, 2 * t + q / 2, false);
    }
    u8* mins = slab + 2176 + lane * 4 + upper * 2;
    mins[0] = (u8)six_bits(packed, 2 * q, true), mins[1] = (u8)six_bits(packed, 2 * q + 1, true);
    if (q == 0)
        ((u16*)(slab + 2304))[g * 4 + upper * 2] = (u16)u16_at(block),
                                              ((u16*)(slab + 2304))[g * 4 + upper * 2 + 1] = (u16)u16_at(block + 2);
}

__device__ void move_q6(const u8* block, u8* slab, int row, int q) {
    const int g = row % 8, upper = row / 8, lane = 4 * g + q;
    for (int t = 0; t < 4; t++) {
        u32 words[3] = {};
        for (int in = 0; in < 16; in++) {
            const int k = t * 64 + 16 * q + in, part = k % 128 / 32, at = k % 32;
            const u8 low = block[k / 128 * 64 + part % 2 * 32 + at], high = block[128 + k / 128 * 32 + at];
            const u32 n = (part < 2 ? low & 15 : low >> 4) | (high >> 2 * part & 3) << 4;
            const int j = in / 4, h = in / 2 % 2, side = in % 2 * 16;
            if (j < 3)
                words[j] |= n << (6 * h + side);
            else
                words[h] |= (n & 15) << (12 + side), words[2] |= n >> 4 << (12 + 2 * h + side);
        }
        for (int i = 0; i < 3; i++) {
            const int word = 6 * t + 3 * upper + i;
            ((u32*)(slab + word / 4 * 512 + lane * 16))[word % 4] = words[i];
        }
        slab[3072 + lane * 8 + upper * 4 + t] = (u8)(block[192 + (t * 64 + 16 * q) / 16] + 128);
    }
    if (q == 0) ((u16*)(slab + 3328))[g * 2 + upper] = (u16)u16_at(block + 208);
}

// Types of blocks of 32: signed bytes and an fp16 scale each.
__device__ int small_value(int source, const u8* block, int k) {
    if (source == FROM_Q8_0) return (signed char)block[2 + k];
    if (source == FROM_Q5_0) {
        const u8 byte = block[6 + k % 16];
        return (int)((k < 16 ? byte & 15 : byte >> 4) | (block[2 + k / 8] >> k % 8 & 1) << 4) - 16;
    }
    const u8 byte = block[2 + k % 16];
    const int n = k < 16 ? byte & 15 : byte >> 4;
    if (source == FROM_Q4_0) return n - 8;
    const signed char levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    return levels[n];
}
// Eight blocks of a row: their scales, and their values in these.
struct SmallBlocks {
    int source;
    const u8* at;
    float scale[8];

    __device__ SmallBlocks(int from, const u8* blocks) : source(from), at(blocks) {
        for (int i = 0; i < 8; i++) {
            if (source < F16_TO_Q8_0) {
                scale[i] = unpack_half(u16_at(at + i * bytes())).x;
            } else {
                float largest = 0.0f;
                for (int k = 0; k < 32; k++) largest = fmaxf(largest, fabsf(whole(i * 32 + k)));
                scale[i] = unpack_half(pack_half(largest / 127.0f, 0.0f)).x;
            }
        }
    }
    __device__ int bytes() const { return source == FROM_Q8_0 ? 34 : source == FROM_Q5_0 ? 22 : 18; }
    __device__ float whole(int k) const {
        const u32 bits = u16_at(at + 2 * k);
        return source == BF16_TO_Q8_0 ? bf16_low(bits) : unpack_half(bits).x;
    }
    __device__ int value(int block, int k) const {
        if (source < F16_TO_Q8_0) return small_value(source, at + block * bytes(), k);
        if (!(scale[block] > 0.0f)) return 0;
        return (int)fminf(fmaxf(rintf(whole(block * 32 + k) / scale[block]), -127.0f), 127.0f);
    }
};
__device__ void move_q8(const Pack& a, const u8* from, u8* slab, int row, int q) {
    const int g = row % 8, upper = row / 8, lane = 4 * g + q;
    const SmallBlocks blocks(a.source, from);
    // Scales times a power of two, so that the largest is below 16: products with 128 and 16 stay in range.
    float largest = 0.0f;
    for (int i = 0; i < 8; i++) largest = fmaxf(largest, fabsf(blocks.scale[i]));
    const int exponent = largest > 0.0f ? (int)(__float_as_uint(largest) >> 23) - 127 : 3;
    const float by = __uint_as_float((u32)(127 + 3 - exponent) << 23);  // the largest becomes 8 to 16
    for (int t = 0; t < 4; t++) {
        u32 words[4] = {};
        for (int in = 0; in < 16; in++) {
            const int k = 16 * q + in;
            words[in / 4] |= (u32)(blocks.value(2 * t + k / 32, k % 32) + 128) << (in % 4 * 8);
        }
        *(uint4*)(slab + (t * 2 + upper) * 512 + lane * 16) = {words[0], words[1], words[2], words[3]};
        if (q % 2 == 0)
            ((u16*)(slab + 4096))[(g * 2 + q / 2) * 8 + upper * 4 + t] =
                (u16)pack_half(blocks.scale[2 * t + q / 2] * by, 0.0f);
    }
    if (q == 0) ((float*)(slab + 4352))[g * 2 + upper] = 0x1p-24f / by;
}

__device__ void move_half(const Pack& a, const u8* values, u8* slab, int row, int q) {
    const int g = row % 8, upper = row / 8, lane = 4 * g + q;
    const auto value = [&](int k) {
        const u32 bits = u16_at(values + 2 * k);
        return a.source == FROM_BF16 ? bf16_low(bits) : unpack_half(bits).x;
    };
    float largest = 0.0f;
    for (int k = 0; k < 256; k++) largest = fmaxf(largest, fabsf(value(k)));
    const int exponent = largest > 0.0f ? (int)(__float_as_uint(largest) >> 23) - 127 : 0;
    const float by =
        __uint_as_float((u32)min(max(127 + 10 - exponent, 1), 254) << 23);  // the largest becomes 1024 to 2048
    for (int t = 0; t < 4; t++)
        for (int j = 0; j < 4; j++) {
            u32* to = (u32*)(slab + ((t * 2 + upper) * 2 + j / 2) * 512 + lane * 16) + (j & 1) * 2;
            const int k = t * 64 + 16 * q + 4 * j;
            to[0] = pack_half(value(k) * by, value(k + 1) * by);
            to[1] = pack_half(value(k + 2) * by * 16.0f, value(k + 3) * by * 16.0f);
        }
    if (q == 0) ((float*)(slab + 8192))[g * 2 + upper] = 0x1p-24f / by;
}

extern "C" __global__ void pack(const __grid_constant__ Pack a) {
    // A thread has a row's superblock and one q.
    const long long total = (long long)a.count * a.blocks * 4;
    const int kind = a.source <= FROM_Q8_0   ? a.source
                     : a.source <= FROM_BF16 ? (int)SLAB_HALF
                                             : (int)SLAB_Q8_0,
              bytes = slab_bytes(kind);
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < total;
         i += (long long)gridDim.x * blockDim.x) {
        const int q = (int)(i & 3), block = (int)(i / 4 % a.blocks), row = (int)(i / 4 / a.blocks);
        const int to_row = stage_row(a, row);
        u8* slab = a.stream + a.offsets[(size_t)(to_row / 64) * a.blocks + block] + to_row % 64 / 16 * bytes;
        const u8* from = a.rows + (size_t)row * a.row_bytes + (size_t)block * (a.row_bytes / a.blocks);
        if (kind == SLAB_Q4_K || kind == SLAB_Q5_K)
            move_k(a, from, slab, to_row % 16, q);
        else if (kind == SLAB_Q6_K)
            move_q6(from, slab, to_row % 16, q);
        else if (kind == SLAB_Q8_0)
            move_q8(a, from, slab, to_row % 16, q);
        else
            move_half(a, from, slab, to_row % 16, q);
    }
}
