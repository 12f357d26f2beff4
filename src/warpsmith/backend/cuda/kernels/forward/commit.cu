// Makes a path of the last forward pass part of the committed past, by the same operations as decoding it would have.
//
// Grid: one block of 512 threads a DeltaNet block of every layer, then one a key head of every attention layer.
// DeltaNet: replay k and write of each node on the path (never the model), and keep the last convolution inputs.
// Attention: move the path's keys and values behind the committed ones.
#include "forward/delta.cuh"

struct Path {
    int count, length;
    int node[MAX_NODES];
};

extern "C" __global__ void __launch_bounds__(COLUMNS * 32)
    commit(const __grid_constant__ Params p, const __grid_constant__ Path path) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (blockIdx.x < DELTA_LAYERS * BLOCKS) {
        const size_t at = blockIdx.x;
        float4* state = (float4*)(p.delta + (at * COLUMNS + warp) * STATE_DIM) + lane;
        float4 s = *state;
        for (int i = 0; i < path.count; i++) {
            const size_t node = at * MAX_NODES + path.node[i];
            const size_t key_head = at / BLOCKS * KEY_HEADS + at % BLOCKS / BLOCKS_PER_HEAD % KEY_HEADS;
            const float4 key =
                *((const float4*)(p.pending_key + (key_head * MAX_NODES + path.node[i]) * STATE_DIM) + lane);
            s = update_state(s, p.pending_fade[node], key, p.pending_write[node * COLUMNS + warp]);
        }
        *state = s;
        for (int i = max(0, path.count - HISTORY); i < path.count; i++) {
            const float* raw = p.pending_raw + (at / BLOCKS * MAX_NODES + path.node[i]) * CONV_CHANNELS;
            float* to = p.history + (at / BLOCKS * HISTORY + (path.length + i) % HISTORY) * CONV_CHANNELS;
            for (int c = at % BLOCKS * blockDim.x + threadIdx.x; c < CONV_CHANNELS; c += BLOCKS * blockDim.x)
                to[c] = raw[c];
        }
    } else {
        const size_t head = blockIdx.x - DELTA_LAYERS * BLOCKS;
        for (int i = warp; i < path.count; i += COLUMNS) {
            const size_t from = (head * MAX_NODES + path.node[i]) * (HEAD_DIM / 2) + lane * 4;
            const size_t to = (head * p.context + path.length + i) * (HEAD_DIM / 2) + lane * 4;
            *(uint4*)(p.keys + to) = *(const uint4*)(p.pending_keys + from);
            *(uint4*)(p.values + to) = *(const uint4*)(p.pending_values + from);
        }
    }
}
