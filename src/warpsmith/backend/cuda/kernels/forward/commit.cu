// Makes a path of the last forward pass part of the committed past, by the same operations as decoding it would have.
//
// Grid: one block of 512 threads a DeltaNet block of every layer, then one a key head of every attention layer.
// DeltaNet: replay k and write of each node on the path (never the model), and keep the last convolution inputs.
// Attention: move the path's keys and values behind the committed ones.
#include "common/commit.cuh"
#include "forward/delta.cuh"

extern "C" __global__ void __launch_bounds__(COLUMNS * 32)
    commit(const __grid_constant__ Params p, const __grid_constant__ Commit c) {
    const Path& path = c.made ? *c.made : c.path;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (blockIdx.x < DELTA_LAYERS * BLOCKS) {
        const size_t at = blockIdx.x;
        const size_t column = (at * COLUMNS + warp) * STATE_DIM;
        float4 s = ((const float4*)(p.delta + column))[lane];
        for (int i = 0; i < path.count; i++) {
            const size_t node = at * MAX_NODES + path.node[i];
            const size_t key_head = at / BLOCKS * KEY_HEADS + at % BLOCKS / BLOCKS_PER_HEAD % KEY_HEADS;
            const float4 key =
                *((const float4*)(p.pending_key + (key_head * MAX_NODES + path.node[i]) * STATE_DIM) + lane);
            s = update_state(s, p.pending_fade[node], key, p.pending_write[node * COLUMNS + warp]);
        }
        ((float4*)(c.delta + column))[lane] = s;
        for (int slot = 0; slot < HISTORY; slot++) {
            const size_t row = (at / BLOCKS * HISTORY + slot) * CONV_CHANNELS;
            const int last = last_in_slot(c.length, path.count, slot, HISTORY);
            const float* from = last < 0 ? p.history + row
                                         : p.pending_raw + (at / BLOCKS * MAX_NODES + path.node[last]) * CONV_CHANNELS;
            for (int i = at % BLOCKS * blockDim.x + threadIdx.x; i < CONV_CHANNELS; i += BLOCKS * blockDim.x)
                c.history[row + i] = from[i];
        }
    } else {
        const size_t head = blockIdx.x - DELTA_LAYERS * BLOCKS;
        for (int i = warp; i < path.count; i += COLUMNS) {
            const size_t from = (head * MAX_NODES + path.node[i]) * (HEAD_DIM / 2) + lane * 4;
            const size_t to = (head * p.context + c.length + i) * (HEAD_DIM / 2) + lane * 4;
            *(uint4*)(p.keys + to) = *(const uint4*)(p.pending_keys + from);
            *(uint4*)(p.values + to) = *(const uint4*)(p.pending_values + from);
        }
    }
}
