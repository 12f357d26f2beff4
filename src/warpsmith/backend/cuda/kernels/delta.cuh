// The Gated DeltaNet's mixer: convolution, norms, gates and the recurrence, spread over all SMs.
//
// Maths, per value head with state S [dk, dv]: S <- e^g S; S <- S + k (beta (v - k^T S))^T; o = q^T S; then
// o / rms(o) * weight * silu(z). A block is 16 columns of S (16 of a head's 128 value channels), two a warp: lane l holds
// S[4l .. 4l+3][column] of both in registers. q and k of the head are convolved and normalised by every block that needs them.
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

// Four channels of a node and of its three predecessors, oldest first: from packets where the predecessor is in the
// tree, from the block's history where it is committed. `row` is the channels' packet, `slot` their place in the history.
__device__ __forceinline__ void load_taps(const Block& b, float4 (&tap)[4], int node, int row, int slot, const float* history,
                                          bool convolved, u32 tag) {
    const Packet* from[4];
#pragma unroll
    for (int age = 3; age >= 0; age--) {
        const int source = b.s.path[node][age];
        from[age] = nullptr;
        if (source >= 0) {
            if (convolved || age == 0) from[age] = b.p.in + (size_t)source * IN_PACKETS + row;
        } else if (convolved) {  // source is -1 for the last committed token
            tap[3 - age] = *(const float4*)(history + (b.length + source + HISTORY) % HISTORY * BLOCK_CHANNELS + slot);
        }
    }
    Watchdog dog;
    bool missing;
    Packet got[4];
    do {
        missing = false;
#pragma unroll
        for (int age = 0; age < 4; age++)
            if (from[age]) got[age] = load_packet(from[age]);
#pragma unroll
        for (int age = 0; age < 4; age++)
            if (from[age]) missing |= !arrived(got[age], tag);
        dog.check();
    } while (missing);
#pragma unroll
    for (int age = 0; age < 4; age++)
        if (from[age]) tap[3 - age] = values(got[age]);
}

// Convolution and silu; `w[i]` are channel i's four taps, oldest first.
__device__ __forceinline__ float4 convolve(const float4 (&tap)[4], const float4 (&w)[4]) {
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
    constexpr int EACH = COLUMNS / WARPS;  // columns of a warp: EACH * warp onwards
    float4* state = (float4*)(b.p.delta + (at * COLUMNS + b.warp * EACH) * STATE_DIM) + b.lane;
    float4 committed[EACH];  // asked for now, used after the exchange
#pragma unroll
    for (int i = 0; i < EACH; i++) committed[i] = state[i * STATE_DIM / 4];
    float* history = b.p.history + at * HISTORY * BLOCK_CHANNELS;
    float* pending = b.p.pending_raw + at * MAX_NODES * BLOCK_CHANNELS;

    // Rows of every node: one warp takes q, one k, one the rest (lanes 0-3 v, 4-7 z, 8 beta, 9 alpha).
#pragma unroll 1
    for (int task = b.warp; task < 3 * b.nodes; task += WARPS) {
        const int node = task / 3, kind = task % 3;
        const int position = b.length + b.s.depth[node];
        float* keep = b.decoding() ? history + position % HISTORY * BLOCK_CHANNELS : pending + node * BLOCK_CHANNELS;
        const int gate_row = CONV_CHANNELS + VALUE_DIM + (b.lane == 8 ? 0 : VALUE_HEADS) + head;
        const bool convolved = kind < 2 || b.lane < 4;
        const int channel = kind < 2     ? kind * KEY_DIM + key_head * STATE_DIM + b.lane * 4
                            : b.lane < 4 ? 2 * KEY_DIM + column0 + b.lane * 4
                            : b.lane < 8 ? CONV_CHANNELS + column0 + (b.lane - 4) * 4
                                         : gate_row / 4 * 4;
        const int slot = kind * STATE_DIM + b.lane * 4;
        if (kind == 2 && b.lane > 9) continue;
        float4 w[4] = {}, tap[4];
        if (convolved) {
#pragma unroll
            for (int i = 0; i < 4; i++) w[i] = __ldg((const float4*)(vectors + CONV_AT + 4 * channel) + i);
        }
        load_taps(b, tap, node, channel / 4, slot, history, convolved, in_tag);
        if (convolved) *(float4*)(keep + slot) = tap[3];
        if (kind < 2) {
            float4 c = convolve(tap, w);
            const float scale = rsqrtf(warp_sum(dot4(c, c)) + 1e-6f) * (kind == 0 ? 0.08838834764831845f : 1.0f);
            c = {c.x * scale, c.y * scale, c.z * scale, c.w * scale};
            *(float4*)((kind == 0 ? q : k) + node * STATE_DIM + b.lane * 4) = c;
            if (kind == 1 && !b.decoding()) *(float4*)(b.p.pending_key + (at * MAX_NODES + node) * STATE_DIM + b.lane * 4) = c;
        } else if (b.lane < 4) {
            *(float4*)(v + node * COLUMNS + b.lane * 4) = convolve(tap, w);
        } else if (b.lane < 8) {
            const float4 g = tap[3];
            *(float4*)(z + node * COLUMNS + (b.lane - 4) * 4) = {silu(g.x), silu(g.y), silu(g.z), silu(g.w)};
        } else {
            const int i = gate_row % 4;
            const float raw = i == 0 ? tap[3].x : i == 1 ? tap[3].y : i == 2 ? tap[3].z : tap[3].w;
            if (b.lane == 8) {
                beta[node] = sigmoid(raw);
            } else {
                const float f = expf(__ldg(vectors + A_AT + head) * softplus(raw + __ldg(vectors + DT_AT + head)));
                fade[node] = f;
                if (!b.decoding()) b.p.pending_fade[at * MAX_NODES + node] = f;
            }
        }
    }
    b.mark();
    b.sync();
    b.mark();

    // The recurrence.
    float4* branch = (float4*)(b.p.branch_state + ((size_t)block * MAX_NODES * COLUMNS + b.warp * EACH) * STATE_DIM) + b.lane;
    float4 s[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) s[i] = committed[i];
#pragma unroll 1
    for (int node = 0; node < b.nodes; node++) {
        const int parent = b.s.parent[node];
        if (parent != node - 1) {
#pragma unroll
            for (int i = 0; i < EACH; i++)
                s[i] = parent < 0 ? committed[i] : branch[((size_t)parent * COLUMNS + i) * STATE_DIM / 4];
        }
        const float4 key = *(const float4*)(k + node * STATE_DIM + b.lane * 4);
        const float4 query = *(const float4*)(q + node * STATE_DIM + b.lane * 4);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int column = b.warp * EACH + i;
            s[i] = fade_state(s[i], fade[node]);
            const float write = beta[node] * (v[node * COLUMNS + column] - warp_sum(dot4(key, s[i])));
            s[i] = write_state(s[i], key, write);
            const float out = warp_sum(dot4(query, s[i]));
            if (b.lane == 0) {
                o[node * COLUMNS + column] = out;
                if (!b.decoding()) b.p.pending_write[(at * MAX_NODES + node) * COLUMNS + column] = write;
            }
            if (b.s.branches[node]) branch[((size_t)node * COLUMNS + i) * STATE_DIM / 4] = s[i];
        }
    }
    if (b.decoding()) {
#pragma unroll
        for (int i = 0; i < EACH; i++) state[i * STATE_DIM / 4] = s[i];
    }
    b.mark();
    b.sync();
    b.mark();

    // Gate and publish: four lanes a packet, sixteen a node.
#pragma unroll 1
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
#pragma unroll 1
    for (int block = first_unit(BLOCKS, b.sm); block < first_unit(BLOCKS, b.sm + 1); block++) {
        delta_block(b, index, block, vectors, in_tag);
        b.sync();
    }
}
