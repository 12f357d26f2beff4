// Makes a path of the last forward pass part of the committed past, by the same operations as decoding it would have.
//
// Grid: one block of 256 threads for 64 value columns of every DeltaNet layer, then one a key head of every attention
// layer. DeltaNet: replay k and write of each node on the path, which the block's warps share, and keep the last
// convolution inputs. Attention: move keys and values. Bytes: the DeltaNet states twice.
#include "common/commit.cuh"
#include "large/delta.cuh"

constexpr int OWN = 8, SHARE = 8 * OWN, SHARES = VALUE_DIM / SHARE;  // columns of a warp and a block, blocks of a layer
constexpr int AT_ONCE = 16;  // nodes
static_assert(CONV_CHANNELS <= SHARES * 256, "a thread has one channel of the convolution");
static_assert(STATE_DIM % SHARE == 0 && COLUMNS % OWN == 0, "a block has one key head, a warp one fade");

// What some nodes wrote to a block's columns; and a channel of the convolution a thread, as it will be looked back at.
struct Written {
    float4 key[AT_ONCE][STATE_DIM / 4];
    float4 write[AT_ONCE][SHARE / 4];
    float fade[AT_ONCE][SHARE / COLUMNS];
    float input[HISTORY][256];
};

extern "C" __global__ void __launch_bounds__(256, 4)
    commit(const __grid_constant__ Params p, const __grid_constant__ Commit c) {
    __shared__ Written written;
    const Path& path = c.made ? *c.made : c.path;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, count = path.count;
    if (blockIdx.x < DELTA_LAYERS * SHARES) {
        const size_t layer = blockIdx.x / SHARES;
        const int share = blockIdx.x % SHARES, first_column = share * SHARE, own = warp * OWN,
                  key_head = first_column / STATE_DIM % KEY_HEADS;
        const size_t state = (layer * VALUE_DIM + first_column + own) * STATE_DIM,
                     block = layer * BLOCKS + first_column / COLUMNS;
        float4 s[OWN];
#pragma unroll
        for (int i = 0; i < OWN; i++) s[i] = ((const float4*)(p.delta + state))[i * 32 + lane];
        // One after another, and last, these would be what a block waits for at its end.
        const int channel = share * 256 + (int)threadIdx.x;
        if (channel < CONV_CHANNELS)
#pragma unroll
            for (int slot = 0; slot < HISTORY; slot++) {
                const int last = last_in_slot(c.length, count, slot, HISTORY);
                const float* from =
                    last < 0 ? p.history + (layer * HISTORY + slot) * CONV_CHANNELS
                             : p.pending_raw + (layer * MAX_NODES + path.node[last]) * CONV_CHANNELS;
                copy4(&written.input[slot][threadIdx.x], from + channel);
            }
        const float* keys = p.pending_key + (layer * KEY_HEADS + key_head) * MAX_NODES * STATE_DIM;
#pragma unroll 1
        for (int first = 0; first < count; first += AT_ONCE) {
            const int nodes = min(count - first, AT_ONCE);
            if (first > 0) __syncthreads();
            for (int i = warp; i < nodes; i += 8) {
                const int node = path.node[first + i];
                copy16(&written.key[i][lane], keys + node * STATE_DIM + lane * 4);
                const size_t at = (block + lane / 4) * MAX_NODES + node;
                if (lane < SHARE / 4) copy16(&written.write[i][lane], p.pending_write + at * COLUMNS + lane % 4 * 4);
                if (lane < SHARE / 4 && lane % 4 == 0) copy4(&written.fade[i][lane / 4], p.pending_fade + at);
            }
            copies_done();
            __syncthreads();
#pragma unroll 1
            for (int i = 0; i < nodes; i++) {
                const float4 key = written.key[i][lane];
                const float fade = written.fade[i][own / COLUMNS];
#pragma unroll
                for (int j = 0; j < OWN / 4; j++) {
                    const float4 write = written.write[i][own / 4 + j];
                    s[j * 4] = update_state(s[j * 4], fade, key, write.x);
                    s[j * 4 + 1] = update_state(s[j * 4 + 1], fade, key, write.y);
                    s[j * 4 + 2] = update_state(s[j * 4 + 2], fade, key, write.z);
                    s[j * 4 + 3] = update_state(s[j * 4 + 3], fade, key, write.w);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < OWN; i++) ((float4*)(c.delta + state))[i * 32 + lane] = s[i];
        if (channel < CONV_CHANNELS)
#pragma unroll
            for (int slot = 0; slot < HISTORY; slot++)
                c.history[(layer * HISTORY + slot) * CONV_CHANNELS + channel] = written.input[slot][threadIdx.x];
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
