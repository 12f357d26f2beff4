// How fast the weights can be read at all: each SM's stream through shared memory, and nothing done with it.
//
// Grid: one block of one warp an SM. What the forward kernel reaches is held against this.
#include "common/ptx.cuh"

constexpr int PIECES = 3,
              PIECE_BYTES = 32 << 10;  // on their way at a time: enough for any chip, not too much for small ones

struct Stream {
    const u8* bytes;
    const u64* start;  // [blocks + 1] where each block's part begins; multiples of 16
};

extern "C" __global__ void __launch_bounds__(32) read_stream(const __grid_constant__ Stream stream) {
    extern __shared__ __align__(128) u8 pieces[];
    __shared__ u64 barriers[PIECES];
    const u32 full = shared_address(barriers), to = shared_address(pieces);
    if (threadIdx.x == 0) {
        for (int i = 0; i < PIECES; i++) barrier_init(full + 8 * i, COPY_LANES);
#if __CUDA_ARCH__ >= 900  // the copy engine must see the barriers
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    __syncwarp();
    if (threadIdx.x >= COPY_LANES) return;
    const u8* from = stream.bytes + stream.start[blockIdx.x];
    const u64 bytes = stream.start[blockIdx.x + 1] - stream.start[blockIdx.x];
    const int count = (int)((bytes + PIECE_BYTES - 1) / PIECE_BYTES);
    const u64 policy = evict_first();
    for (int i = 0; i < count + PIECES; i++) {
        const int slot = i % PIECES;
        if (i >= PIECES && i - PIECES < count) barrier_wait(full + 8 * slot, (i / PIECES - 1) & 1);
        if (i < count) {
            const u64 at = (u64)i * PIECE_BYTES;
            const u32 size = (u32)(bytes - at < PIECE_BYTES ? bytes - at : PIECE_BYTES);
            copy_slot(to + slot * PIECE_BYTES, from + at, size, full + 8 * slot, policy);
        }
    }
}
