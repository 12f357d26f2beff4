// Moves rows of a matrix, as the file stores them, to their place in the SMs' streams.
//
// A thread moves 8 weights (16 bytes of bf16). `pattern` says which row of the stage a row of the tensor is:
// 0: row `first_row` + i;  1: gate, 2: up (a unit is four gate rows, then their four up rows).
#include "shape.cuh"

struct Pack {
    const uint4* rows;       // bf16 [count][k]
    u8* stream;
    const u64* stage_start;  // [SMS] where the stage begins in the stream
    int first_row;           // stage row of the tensor's first
    int offset;              // rows of the tensor already moved
    int count;
    int k, units, pattern;
};

extern "C" __global__ void pack(const __grid_constant__ Pack a) {
    const int chunks = (a.k + CHUNK_K - 1) / CHUNK_K, pieces = chunks * CHUNK_K / 8;
    const long long total = (long long)a.count * pieces;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += (long long)gridDim.x * blockDim.x) {
        const int row = (int)(i / pieces), k = (int)(i % pieces) * 8, index = a.offset + row;
        const int stage_row = a.pattern == 0 ? a.first_row + index : index / 4 * 8 + (a.pattern - 1) * 4 + index % 4;
        const int unit = stage_row / 8, sm = owner_of(a.units, unit);
        const int warp = k / (chunks * 32), chunk = k % (chunks * 32) / 32;
        u8* to = a.stream + a.stage_start[sm] + (size_t)((unit - first_unit(a.units, sm)) * chunks + chunk) * CHUNK_BYTES +
                 warp * 512 + stage_row % 8 * 64 + k % 32 * 2;
        *(uint4*)to = k < a.k ? a.rows[(long long)row * (a.k / 8) + k / 8] : uint4{};
    }
}
