// The Gated DeltaNet's mixer: convolution, norms, gates and the recurrence, spread over all SMs.
//
// Maths, per value head with state S [dk, dv]: S <- e^g S; S <- S + k (beta (v - k^T S))^T; o = q^T S; then
// o / rms(o) * weight * silu(z). A block is 16 columns of S (16 of a head's 128 value channels), one a warp: lane l holds
// S[4l .. 4l+3][column] in registers. q and k of the head are convolved and normalised by every block that needs them.
// The head's rms needs all 8 of its blocks: each publishes its sum of squares, the next stage divides.
// A node's state comes from its parent's: kept in registers along a chain, stored only where the tree branches.
// Bytes: 8 KB of state a block read and written, 4 KB of convolution history.
// Scratch: q, k [nodes][128], v, z, o [nodes][16], fade, beta [nodes].
#pragma once
#include "block.cuh"

constexpr int DELTA_NODE_FLOATS = 2 * STATE_DIM + 3 * COLUMNS + 4;
static_assert(NODES * DELTA_NODE_FLOATS * 4 <= SCRATCH_BYTES, "DeltaNet rows must fit in the scratch");

// The state's update, written once: forward and commit must agree to the bit.
__device__ __forceinline__ float4 fade_state(float4 s, float fade) {
    return {s.x * fade, s.y * fade, s.z * fade, s.w * fade};
}
__device__ __forceinline__ float4 write_state(float4 s, float4 k, float write) {
    return {fmaf(k.x, write, s.x), fmaf(k.y, write, s.y), fmaf(k.z, write, s.z), fmaf(k.w, write, s.w)};
}
__device__ __forceinline__ float dot4(float4 a, float4 b) { return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, a.w * b.w))); }

// Four channels of a node after convolution and silu. `row` is where the channels' packet is in a node's row, `slot`
// where they are in the block's history.
__device__ __forceinline__ float4 convolve(const Block& b, int node, int row, int slot, const float* history, float* keep,
                                           const float* weight, u32 tag) {
    float4 w[4], tap[4];
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = __ldg((const float4*)weight + i);  // channel i's four taps, oldest first
#pragma unroll
    for (int age = 3; age >= 0; age--) {
        const int source = b.s.path[node][age];
        if (source < 0) {
            const int position = b.length + source;  // source is -1 for the last committed token
            tap[3 - age] = *(const float4*)(history + ((position + HISTORY) % HISTORY) * BLOCK_CHANNELS + slot);
        } else {
            tap[3 - age] = poll_one(b.p.in + (size_t)source * IN_PACKETS + row, tag);
        }
    }
    *(float4*)(keep + slot) = tap[3];
    float4 sum;
    sum.x = fmaf(w[0].w, tap[3].x, fmaf(w[0].z, tap[2].x, fmaf(w[0].y, tap[1].x, w[0].x * tap[0].x)));
    sum.y = fmaf(w[1].w, tap[3].y, fmaf(w[1].z, tap[2].y, fmaf(w[1].y, tap[1].y, w[1].x * tap[0].y)));
    sum.z = fmaf(w[2].w, tap[3].z, fmaf(w[2].z, tap[2].z, fmaf(w[2].y, tap[1].z, w[2].x * tap[0].z)));
    sum.w = fmaf(w[3].w, tap[3].w, fmaf(w[3].z, tap[2].w, fmaf(w[3].y, tap[1].w, w[3].x * tap[0].w)));
    return {silu(sum.x), silu(sum.y), silu(sum.z), silu(sum.w)};
}

__device__ __forceinline__ void delta_block(Block& b, int index, int block, const float* vectors, u32 in_tag) {
    const int head = block / BLOCKS_PER_HEAD, key_head = head % KEY_HEADS, column0 = block * COLUMNS;
    float* q = b.scratch;
    float* k = q + b.nodes * STATE_DIM;
    float* v = k + b.nodes * STATE_DIM;
    float* z = v + b.nodes * COLUMNS;
    float* o = z + b.nodes * COLUMNS;
    float* fade = o + b.nodes * COLUMNS;
    float* beta = fade + b.nodes;

    const size_t at = (size_t)index * BLOCKS + block;
    float4* state = (float4*)(b.p.delta + (at * COLUMNS + b.warp) * STATE_DIM) + b.lane;
    const float4 committed = *state;  // asked for now, used after the exchange
    float* history = b.p.history + at * HISTORY * BLOCK_CHANNELS;
    float* pending = b.p.pending_raw + at * MAX_NODES * BLOCK_CHANNELS;

    // Rows of every node: one warp takes q, one k, one the rest.
    for (int task = b.warp; task < 3 * b.nodes; task += WARPS) {
        const int node = task / 3, kind = task % 3;
        const int position = b.length + b.s.depth[node];
        float* keep = b.decoding() ? history + position % HISTORY * BLOCK_CHANNELS : pending + node * BLOCK_CHANNELS;
        const Packet* row = b.p.in + (size_t)node * IN_PACKETS;
        if (kind < 2) {
            const int channel = kind * KEY_DIM + key_head * STATE_DIM + b.lane * 4;
            float4 c = convolve(b, node, channel / 4, kind * STATE_DIM + b.lane * 4, history, keep,
                                vectors + CONV_AT + 4 * channel, in_tag);
            const float scale = rsqrtf(warp_sum(dot4(c, c)) + 1e-6f) * (kind == 0 ? 0.08838834764831845f : 1.0f);
            c = {c.x * scale, c.y * scale, c.z * scale, c.w * scale};
            *(float4*)((kind == 0 ? q : k) + node * STATE_DIM + b.lane * 4) = c;
            if (kind == 1 && !b.decoding()) *(float4*)(b.p.pending_key + (at * MAX_NODES + node) * STATE_DIM + b.lane * 4) = c;
        } else if (b.lane < 4) {
            const int channel = 2 * KEY_DIM + column0 + b.lane * 4;
            *(float4*)(v + node * COLUMNS + b.lane * 4) = convolve(b, node, channel / 4, 2 * STATE_DIM + b.lane * 4, history,
                                                                   keep, vectors + CONV_AT + 4 * channel, in_tag);
        } else if (b.lane < 8) {
            const float4 gate = poll_one(row + (CONV_CHANNELS + column0) / 4 + b.lane - 4, in_tag);
            *(float4*)(z + node * COLUMNS + (b.lane - 4) * 4) = {silu(gate.x), silu(gate.y), silu(gate.z), silu(gate.w)};
        } else if (b.lane < 10) {
            const bool is_beta = b.lane == 8;
            const int at_row = CONV_CHANNELS + VALUE_DIM + (is_beta ? 0 : VALUE_HEADS) + head;
            const float4 four = poll_one(row + at_row / 4, in_tag);
            const int i = at_row % 4;
            const float raw = i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
            if (is_beta) {
                beta[node] = sigmoid(raw);
            } else {
                const float f = expf(__ldg(vectors + A_AT + head) * softplus(raw + __ldg(vectors + DT_AT + head)));
                fade[node] = f;
                if (!b.decoding()) b.p.pending_fade[at * MAX_NODES + node] = f;
            }
        }
    }
    b.sync();

    // The recurrence: a warp a column.
    float4* branch = (float4*)(b.p.branch_state + ((size_t)block * MAX_NODES * COLUMNS + b.warp) * STATE_DIM) + b.lane;
    float4 s = committed;
    for (int node = 0; node < b.nodes; node++) {
        const int parent = b.s.parent[node];
        if (parent != node - 1) s = parent < 0 ? committed : branch[(size_t)parent * COLUMNS * STATE_DIM / 4];
        const float4 key = *(const float4*)(k + node * STATE_DIM + b.lane * 4);
        const float4 query = *(const float4*)(q + node * STATE_DIM + b.lane * 4);
        s = fade_state(s, fade[node]);
        const float write = beta[node] * (v[node * COLUMNS + b.warp] - warp_sum(dot4(key, s)));
        s = write_state(s, key, write);
        const float out = warp_sum(dot4(query, s));
        if (b.lane == 0) {
            o[node * COLUMNS + b.warp] = out;
            if (!b.decoding()) b.p.pending_write[(at * MAX_NODES + node) * COLUMNS + b.warp] = write;
        }
        if (b.s.branches[node]) branch[(size_t)node * COLUMNS * STATE_DIM / 4] = s;
    }
    if (b.decoding()) *state = s;
    b.sync();

    // Gate and publish: four lanes a packet, sixteen a node.
    for (int first = 0; first < b.nodes * COLUMNS; first += CONSUMERS) {
        const int item = first + threadIdx.x, node = item / COLUMNS, column = item % COLUMNS;
        const bool live = node < b.nodes;
        const float out = live ? o[item] : 0.0f;
        float square = out * out;
#pragma unroll
        for (int step = 1; step < COLUMNS; step *= 2) square += __shfl_xor_sync(~0u, square, step);
        const float weight = __ldg(vectors + GATED_NORM_AT + (column0 + column) % STATE_DIM);
        float gated[4];
        gated[0] = live ? out * weight * z[item] : 0.0f;
#pragma unroll
        for (int i = 1; i < 4; i++) gated[i] = __shfl_down_sync(~0u, gated[0], i);
        if (live && column % 4 == 0)
            publish(b.p.y + (size_t)node * Y_PACKETS + (column0 + column) / 4, {gated[0], gated[1], gated[2], gated[3]}, b.tag);
        if (live && column == 1) publish(b.p.squares + (size_t)node * SQUARE_PACKETS + block, {square, 0, 0, 0}, b.tag);
    }
}

// Stage: every block of the layer that this SM has.
__device__ __forceinline__ void delta_mix(Block& b, int index, const float* vectors, u32 in_tag) {
    b.sync();  // the scratch still holds the last stage's partial sums
    for (int block = first_unit(BLOCKS, b.sm); block < first_unit(BLOCKS, b.sm + 1); block++) {
        delta_block(b, index, block, vectors, in_tag);
        b.sync();
    }
}

// 1 / rms of a head for the four lanes of each token: the scale of the output projection.
struct HeadScale {
    const Block& b;
    u32 tag;
    int head[HALVES];
    float scale[HALVES];

    __device__ HeadScale(const Block& block, u32 from_tag) : b(block), tag(from_tag) {
#pragma unroll
        for (int i = 0; i < HALVES; i++) head[i] = -1;
    }
    __device__ float operator()(int half, int k) {
        const int wanted = k / STATE_DIM;
        if (head[half] != wanted) {
            head[half] = wanted;
            const int token = half * 8 + (b.lane >> 2);
            float sum = 0.0f;
            if (token < b.nodes && wanted < VALUE_HEADS) {
                Packet got[2];
                poll(got, b.p.squares + (size_t)token * SQUARE_PACKETS + wanted * BLOCKS_PER_HEAD + (b.lane & 3) * 2, 1, tag);
                sum = value(got[0], 0) + value(got[1], 0);
            }
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            scale[half] = rsqrtf(sum / STATE_DIM + EPS);
        }
        return scale[half];
    }
};
