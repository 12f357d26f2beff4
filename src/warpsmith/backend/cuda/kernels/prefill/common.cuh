// What the kernels of a prompt share: how its tokens are cut and how activations lie.
//
// A piece of a prompt is some hundred or thousand tokens. Its buffers begin at a multiple of 64 positions, so that
// chunks of 64 and octets of 8 tokens sit at absolute positions: of token i of the buffers, i < `lead` was committed
// before (its activations are zeros), and lead <= i < `end` belong to the piece.
//
// Activations lie in the order of a tensor core's operand, "tiles": [k / 32][token / 8][k % 8 / 2][token % 8][k % 32 /
// 8][k % 2]. 32 k of eight tokens are 512 bytes in bf16. As an mma's accumulator a lane (g = lane / 4, q = lane % 4)
// has rows g of octets of channels 8 i + 2 q: those of one token and four octets are 16 bytes that lie together. Where
// a matrix of the packed stream reads them, the tiles are in the stream's order of k (`stream_place`).
#pragma once
#include "common/shape.cuh"

constexpr int CHUNK = 64;  // tokens of a DeltaNet chunk, keys of an attention tile

// The tokens of a launch: octets from `first` on. A tile of activations has `capacity` octets.
struct Span {
    int first, octets, capacity;
};

// The piece that is run: see above. `base` is the position of token 0.
struct Piece {
    int lead, end, base, capacity;  // capacity in octets
};

// Where a tile of 32 k lies in the stream of a matrix with `chunks` chunks of 256 k.
__host__ __device__ constexpr u32 stream_place(u32 tile, u32 chunks) { return tile % chunks * 8 + tile / chunks; }

// --- programmatic dependent launches ---------------------------------------------------------------------------------
// A kernel may start while the one before it ends: what that one has written (and all before it) is there after the
// wait.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
