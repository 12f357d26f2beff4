// Moves rows of a matrix, as the file stores them, to their place in the SMs' streams.
//
// A thread moves 8 weights (16 bytes of bf16). `pattern` says which row of the stage a row of the tensor is:
// 0: row `first_row` + i;  1: gate, 2: up (a unit is eight gate rows, then their eight up rows).
#include "shape.cuh"

struct Pack {
    const uint4* rows;       // bf16 [count][k]
    u8* stream;
    const u64* stage_start;  // [SMS] where the stage begins in the stream
    int first_row;           // stage row of the tensor's first
    int offset;              // rows of the tensor already moved
    int count;
    int k, units, unit_rows, pattern;
};

extern "C" __global__ void pack(const __grid_constant__ Pack a) {
    const int chunks = chunks_of(a.k), pieces = chunks * CHUNK_K / 8;
    const long long total = (long long)a.count * pieces;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += (long long)gridDim.x * blockDim.x) {
        const int row = (int)(i / pieces), k = (int)(i % pieces) * 8, index = a.offset + row;
        const int stage_row = a.pattern == 0 ? a.first_row + index : index / 8 * 16 + (a.pattern - 1) * 8 + index % 8;
        const int unit = stage_row / a.unit_rows, in_unit = stage_row % a.unit_rows, sm = owner_of(a.units, unit);
        const int warp = k / (chunks * 32), chunk = k % (chunks * 32) / 32, lane = in_unit % 8 * 4 + k % 32 / 8;
        const int groups = a.unit_rows / 8;  // of 16 bytes a lane, a chunk
        u32* to = (u32*)(a.stream + a.stage_start[sm] +
                         (size_t)((unit - first_unit(a.units, sm)) * chunks + chunk) * groups * GROUP_BYTES +
                         warp * TILE_BYTES * groups + lane * 16);
        const uint4 v = k < a.k ? a.rows[(long long)row * (a.k / 8) + k / 8] : uint4{};
        if (a.unit_rows == NARROW) {  // the mma's upper eight rows are the same rows at the later four k
            *(uint4*)to = {v.x, v.z, v.y, v.w};
        } else {  // the mma's upper eight rows are the unit's; the later four k go to a second mma
            const int upper = in_unit / 8;
            to[upper] = v.x, to[upper + 2] = v.y;
            to += TILE_BYTES / 4;
            to[upper] = v.z, to[upper + 2] = v.w;
        }
    }
}
