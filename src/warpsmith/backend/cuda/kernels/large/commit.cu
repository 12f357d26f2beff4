// Makes a path of the last forward pass part of the committed past, by the same operations as decoding it would have.
//
// Grid: one block of 256 threads for 8 value columns of every DeltaNet layer, then one a key head of every attention
// layer. DeltaNet: replay k and write of each node on the path, and keep the last convolution inputs. Attention: move
// keys and values.
#include "common/commit.cuh"
#include "large/delta.cuh"

extern "C" __global__ void __launch_bounds__(256)
    commit(const __grid_constant__ Params p, const __grid_constant__ Commit c) {
    const Path& path = c.made ? *c.made : c.path;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (blockIdx.x < DELTA_LAYERS * MIX_UNITS) {
        const size_t layer = blockIdx.x / MIX_UNITS;
        const int unit = blockIdx.x % MIX_UNITS, column = unit * 8 + warp, key_head = unit / 16 % KEY_HEADS;
        const size_t state = (layer * VALUE_DIM + column) * STATE_DIM;
        float4 s = ((const float4*)(p.delta + state))[lane];
        for (int i = 0; i < path.count; i++) {
            const size_t at = (layer * BLOCKS + column / COLUMNS) * MAX_NODES + path.node[i];
            const float4 key =
                ((const float4*)(p.pending_key +
                                 ((layer * KEY_HEADS + key_head) * MAX_NODES + path.node[i]) * STATE_DIM))[lane];
            s = update_state(s, p.pending_fade[at], key, p.pending_write[at * COLUMNS + column % COLUMNS]);
        }
        ((float4*)(c.delta + state))[lane] = s;
        for (int slot = 0; slot < HISTORY; slot++) {
            const size_t row = (layer * HISTORY + slot) * CONV_CHANNELS;
            const int last = last_in_slot(c.length, path.count, slot, HISTORY);
            const float* from =
                last < 0 ? p.history + row : p.pending_raw + (layer * MAX_NODES + path.node[last]) * CONV_CHANNELS;
            for (int i = unit * 256 + threadIdx.x; i < CONV_CHANNELS; i += MIX_UNITS * 256)
                c.history[row + i] = from[i];
        }
    } else {
        const size_t head = blockIdx.x - DELTA_LAYERS * MIX_UNITS;
        for (int i = warp; i < path.count; i += 8) {
            const size_t from = head * MAX_NODES + path.node[i], to = head * p.context + c.length + i;
            if (lane < KEY_ROW / 16)
                ((uint4*)(p.keys + to * KEY_ROW))[lane] = ((const uint4*)(p.pending_keys + from * KEY_ROW))[lane];
            if (lane < VALUE_ROW / 16)
                ((uint4*)(p.values + to * VALUE_ROW))[lane] =
                    ((const uint4*)(p.pending_values + from * VALUE_ROW))[lane];
        }
    }
}
