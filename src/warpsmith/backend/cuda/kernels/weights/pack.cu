// Moves rows of a matrix, in the blocks of the format they are held in, to their place in the SMs' streams.
//
// A thread moves as many values of a row as the format packs at a time. `weave` says which row of the stage a row of
// the tensor is: 0: row `first_row` + i;  1, 2: one of two matrices whose rows share row tiles, eight of the first,
// then eight of the second. The stream is zero before: that is what rows and k past the end are.
#include "common/shape.cuh"
#include "stream.cuh"

struct Pack {
    const u8* rows;  // [count][bytes of a row]
    u8* stream;
    const u64* part_start;   // [SMS] where the part of the stage begins in the stream
    const int* first_tiles;  // [SMS + 1] of the stage
    int format;              // its number
    int part_tile;           // first row tile of the part
    int first_row;           // stage row of the tensor's first
    int offset;              // rows of the tensor already moved
    int count;
    int k, tile_rows, weave;
};

template <class Format>
__device__ Place place_of(const Pack& a, int row, int k) {
    const int chunks = chunks_of(a.k), index = a.offset + row;
    const int stage_row = a.weave == 0 ? a.first_row + index : index / 8 * 16 + (a.weave - 1) * 8 + index % 8;
    const int tile = stage_row / a.tile_rows;
    int sm = 0;  // the last one whose first row tile is not behind it
    for (int step = 1 << 10; step > 0; step /= 2)
        if (sm + step < SMS && a.first_tiles[sm + step] <= tile) sm += step;
    const int before = tile - max(a.first_tiles[sm], a.part_tile);  // row tiles of this part that the SM has before
    const size_t chunk = (size_t)before * chunks + k % (chunks * 32) / 32;
    return {a.stream + a.part_start[sm] + chunk * Format::chunk_bytes(a.tile_rows), k / (chunks * 32),
            stage_row % a.tile_rows, k % 32 / 8, a.tile_rows / 8};
}

extern "C" __global__ void pack(const __grid_constant__ Pack a) {
    AllFormats::with(a.format, [&](auto format) {
        typedef decltype(format) Format;
        const int pieces = a.k / Format::PACKED;
        const long long total = (long long)a.count * pieces, step = (long long)gridDim.x * blockDim.x;
        for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += step) {
            const int row = (int)(i / pieces), k = (int)(i % pieces) * Format::PACKED;
            Format::pack(place_of<Format>(a, row, k), a.rows, (long long)row * a.k + k);
        }
    });
}
