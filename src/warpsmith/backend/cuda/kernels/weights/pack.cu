// Moves rows of a matrix, as the file stores them, to their place in the SMs' streams.
//
// A thread moves 8 weights of BF16 (16 bytes), or a block of Q8_0 (a scale and 32 weights). `pattern` says which row of the
// stage a row of the tensor is: 0: row `first_row` + i;  1: gate, 2: up (a unit is eight gate rows, then their eight up rows).
// The stream is zero before: that is what rows and k past the end are.
#include "common/shape.cuh"

struct Pack {
    const u8* rows;          // [count][bytes of a row]
    u8* stream;
    const u64* part_start;   // [SMS] where the part of the stage begins in the stream
    int type;                // WeightType
    int part_unit;           // first unit of the part
    int first_row;           // stage row of the tensor's first
    int offset;              // rows of the tensor already moved
    int count;
    int k, units, unit_rows, pattern;
};

// Where a tile lies: of all the warps' tiles of a chunk of a unit.
struct Place {
    u8* chunk;
    int warp, row, quarter;  // row of the unit; which eight of the tile's 32 k
};

__device__ Place place_of(const Pack& a, int row, int k) {
    const int chunks = chunks_of(a.k), index = a.offset + row;
    const int stage_row = a.pattern == 0 ? a.first_row + index : index / 8 * 16 + (a.pattern - 1) * 8 + index % 8;
    const int unit = stage_row / a.unit_rows, sm = owner_of(a.units, unit);
    const int before = unit - max(first_unit(a.units, sm), a.part_unit);  // units of this part that the SM has before
    const size_t chunk = (size_t)before * chunks + k % (chunks * 32) / 32;
    return {a.stream + a.part_start[sm] + chunk * chunk_bytes(a.type, a.unit_rows), k / (chunks * 32), stage_row % a.unit_rows,
            k % 32 / 8};
}

__device__ void move_bf16(const Pack& a, int row, int k) {
    const Place place = place_of(a, row, k);
    const int halves = a.unit_rows / 8, lane = place.row % 8 * 4 + place.quarter;
    const uint4 v = ((const uint4*)a.rows)[((long long)row * a.k + k) / 8];
    u32* to = (u32*)(place.chunk + place.warp * 512 * halves + lane * 16);
    if (halves == 1) {  // the mma's upper eight rows are the same rows at the later four k
        *(uint4*)to = {v.x, v.z, v.y, v.w};
    } else {  // the mma's upper eight rows are the unit's; the later four k go to a second mma
        const int upper = place.row / 8;
        to[upper] = v.x, to[upper + 2] = v.y;
        to[128 + upper] = v.z, to[128 + upper + 2] = v.w;
    }
}

__device__ void move_q8_0(const Pack& a, int row, int k) {
    const Place place = place_of(a, row, k);
    const int halves = a.unit_rows / 8, upper = place.row / 8;
    const u16* block = (const u16*)(a.rows + ((long long)row * a.k + k) / 32 * 34);
    u8* tile = place.chunk + place.warp * 256 * halves + place.row % 8 * 4 * 8 * halves + upper * 8;
#pragma unroll
    for (int quarter = 0; quarter < 4; quarter++) {
        const u16* v = block + 1 + quarter * 4;
        // values + 128
        *(uint2*)(tile + quarter * 8 * halves) = {(v[0] | (u32)v[1] << 16) ^ 0x80808080u, (v[2] | (u32)v[3] << 16) ^ 0x80808080u};
    }
    u16* scales = (u16*)(place.chunk + WARPS * 256 * halves) + place.warp * 8 * halves;
    scales[place.row % 8 * halves + upper] = block[0];
}

extern "C" __global__ void pack(const __grid_constant__ Pack a) {
    const int each = a.type == Q8_0 ? 32 : 8, pieces = a.k / each;
    const long long total = (long long)a.count * pieces;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += (long long)gridDim.x * blockDim.x) {
        const int row = (int)(i / pieces), k = (int)(i % pieces) * each;
        if (a.type == Q8_0)
            move_q8_0(a, row, k);
        else
            move_bf16(a, row, k);
    }
}
