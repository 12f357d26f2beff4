// Makes a path of the last forward pass part of the committed past, by the same operations as decoding it would have.
//
// Grid: one block of 256 threads for 8 value columns of every DeltaNet layer, then one a key head of every attention
// layer. DeltaNet: replay k and write of each node on the path, and keep the last convolution inputs. Attention: move
// keys and values.
#include "large/delta.cuh"

struct Path {
    int count, length;
    int node[MAX_NODES];
};

extern "C" __global__ void __launch_bounds__(256)
    commit(const __grid_constant__ Params p, const __grid_constant__ Path path) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (blockIdx.x < DELTA_LAYERS * MIX_UNITS) {
        const size_t layer = blockIdx.x / MIX_UNITS;
        const int unit = blockIdx.x % MIX_UNITS, column = unit * 8 + warp, key_head = unit / 16 % KEY_HEADS;
        float4* state = (float4*)(p.delta + (layer * VALUE_DIM + column) * STATE_DIM) + lane;
        float4 s = *state;
        for (int i = 0; i < path.count; i++) {
            const size_t at = (layer * BLOCKS + column / COLUMNS) * MAX_NODES + path.node[i];
            const float4 key =
                ((const float4*)(p.pending_key +
                                 ((layer * KEY_HEADS + key_head) * MAX_NODES + path.node[i]) * STATE_DIM))[lane];
            s = update_state(s, p.pending_fade[at], key, p.pending_write[at * COLUMNS + column % COLUMNS]);
        }
        *state = s;
        for (int i = max(0, path.count - HISTORY); i < path.count; i++) {
            const float* raw = p.pending_raw + (layer * MAX_NODES + path.node[i]) * CONV_CHANNELS;
            float* to = p.history + (layer * HISTORY + (path.length + i) % HISTORY) * CONV_CHANNELS;
            for (int c = unit * 256 + threadIdx.x; c < CONV_CHANNELS; c += MIX_UNITS * 256) to[c] = raw[c];
        }
    } else {
        const size_t head = blockIdx.x - DELTA_LAYERS * MIX_UNITS;
        for (int i = warp; i < path.count; i += 8) {
            const size_t from = head * MAX_NODES + path.node[i], to = head * p.context + path.length + i;
            if (lane < KEY_ROW / 16)
                ((uint4*)(p.keys + to * KEY_ROW))[lane] = ((const uint4*)(p.pending_keys + from * KEY_ROW))[lane];
            if (lane < VALUE_ROW / 16)
                ((uint4*)(p.values + to * VALUE_ROW))[lane] =
                    ((const uint4*)(p.pending_values + from * VALUE_ROW))[lane];
        }
    }
}
