// Makes a path of the last forward pass part of the committed past, by the same operations as decoding it would have.
//
// Grid: one block of 256 threads for 64 value columns of every DeltaNet layer, then one a key head of every attention
// layer. DeltaNet: replay k and write of each node on the path, four nodes asked for at once, and keep the last
// convolution inputs. Attention: move keys and values. Bytes: the DeltaNet states twice.
#include "common/commit.cuh"
#include "large/delta.cuh"

constexpr int OWN = 8, SHARES = VALUE_DIM / (8 * OWN);  // columns of a warp, blocks of a layer
constexpr int AT_ONCE = 4;                              // nodes
static_assert(STATE_DIM % (8 * OWN) == 0 && COLUMNS % OWN == 0, "a block has one key head, a warp one fade");

extern "C" __global__ void __launch_bounds__(256, 2)
    commit(const __grid_constant__ Params p, const __grid_constant__ Commit c) {
    const Path& path = c.made ? *c.made : c.path;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, count = path.count;
    if (blockIdx.x < DELTA_LAYERS * SHARES) {
        const size_t layer = blockIdx.x / SHARES;
        const int share = blockIdx.x % SHARES, column = (share * 8 + warp) * OWN,
                  key_head = column / STATE_DIM % KEY_HEADS;
        const size_t state = (layer * VALUE_DIM + column) * STATE_DIM, block = layer * BLOCKS + column / COLUMNS;
        const int nodes[2] = {path.node[lane], path.node[lane + 32]};
        float4 s[OWN];
#pragma unroll
        for (int i = 0; i < OWN; i++) s[i] = ((const float4*)(p.delta + state))[i * 32 + lane];
        const float* keys = p.pending_key + (layer * KEY_HEADS + key_head) * MAX_NODES * STATE_DIM;
#pragma unroll 1
        for (int first = 0; first < count; first += AT_ONCE) {
            float4 key[AT_ONCE], write[AT_ONCE][OWN / 4];
            float fade[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int at = min(first + i, count - 1),
                          node = __shfl_sync(~0u, at < 32 ? nodes[0] : nodes[1], at % 32);
                key[i] = ((const float4*)(keys + node * STATE_DIM))[lane];
                fade[i] = p.pending_fade[block * MAX_NODES + node];
                const float* writes = p.pending_write + (block * MAX_NODES + node) * COLUMNS + column % COLUMNS;
#pragma unroll
                for (int j = 0; j < OWN / 4; j++) write[i][j] = ((const float4*)writes)[j];
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                if (first + i >= count) break;
#pragma unroll
                for (int j = 0; j < OWN / 4; j++) {
                    s[j * 4] = update_state(s[j * 4], fade[i], key[i], write[i][j].x);
                    s[j * 4 + 1] = update_state(s[j * 4 + 1], fade[i], key[i], write[i][j].y);
                    s[j * 4 + 2] = update_state(s[j * 4 + 2], fade[i], key[i], write[i][j].z);
                    s[j * 4 + 3] = update_state(s[j * 4 + 3], fade[i], key[i], write[i][j].w);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < OWN; i++) ((float4*)(c.delta + state))[i * 32 + lane] = s[i];
        for (int slot = 0; slot < HISTORY; slot++) {
            const size_t row = (layer * HISTORY + slot) * CONV_CHANNELS;
            const int last = last_in_slot(c.length, count, slot, HISTORY);
            const float* from =
                last < 0 ? p.history + row : p.pending_raw + (layer * MAX_NODES + path.node[last]) * CONV_CHANNELS;
            for (int i = share * 256 + threadIdx.x; i < CONV_CHANNELS; i += SHARES * 256) c.history[row + i] = from[i];
        }
    } else {
        const size_t head = blockIdx.x - DELTA_LAYERS * SHARES;
        for (int i = warp; i < count; i += 8) {
            const size_t from = head * MAX_NODES + path.node[i], to = head * p.context + c.length + i;
            if (lane < KEY_ROW / 16)
                ((uint4*)(p.keys + to * KEY_ROW))[lane] = ((const uint4*)(p.pending_keys + from * KEY_ROW))[lane];
            if (lane < VALUE_ROW / 16)
                ((uint4*)(p.values + to * VALUE_ROW))[lane] =
                    ((const uint4*)(p.pending_values + from * VALUE_ROW))[lane];
        }
    }
}
