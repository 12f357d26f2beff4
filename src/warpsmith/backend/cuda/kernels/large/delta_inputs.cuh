// What a DeltaNet's mixer makes of its projection: q, k and v after the convolution, silu(z), norms and gates.
//
// A row a node in shared memory. An SM has units of 8 value columns whose heads share a key head (`DeltaShare`), and
// takes the rows of the projection that these need; the convolution looks three tokens back along a node's path. With
// many nodes the SMs of a key head convolve a part of its q and k each, and exchange them. Bytes: the sums of those
// rows; 64 of weights and 48 of history four channels.
#pragma once
#include "large/steps.cuh"

constexpr float QUERY_SCALE = 0.08838834764831845f;  // 128 ** -0.5

// A node's row in shared memory: q | k | v, then o in its place | silu(z) | rk write | {rk, rq, rq rk q^T k} | {f,
// beta} of each head.
constexpr int MIX_K = STATE_DIM, MIX_V = 2 * STATE_DIM, SILU_Z = MIX_CHANNELS, WRITTEN = SILU_Z + OWN_UNITS * 8,
              NORMS = WRITTEN + OWN_UNITS * 8, GATES = NORMS + 4;

__device__ __forceinline__ float dot4(float4 a, float4 b) {
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, a.w * b.w)));
}

// A part of the units that share a key head, and which rows of the projection their channels are: q, k, then v.
struct DeltaShare {
    int key_head, part, first, units, head, heads;  // units from `first` on, in heads `head` .. of the key head's
    __device__ explicit DeltaShare(u32 item) {
        part = item % KEY_PARTS;
        key_head = min((int)(item / KEY_PARTS), KEY_HEADS - 1);
        first = (u32)(KEY_UNITS * part) / KEY_PARTS;
        units = item < KEY_HEADS * KEY_PARTS ? (u32)(KEY_UNITS * (part + 1)) / KEY_PARTS - first : 0;
        head = (u32)first / 16, heads = units ? (u32)(first + units - 1) / 16 - head + 1 : 0;
    }
    __device__ int value_head(int mine) const { return key_head + (head + mine) * KEY_HEADS; }
    __device__ int unit(int mine) const {
        const u32 in = first + mine;
        return (key_head + in / 16 * KEY_HEADS) * 16 + in % 16;
    }
    __device__ int number() const { return key_head * KEY_UNITS + first; }  // of the first unit, as units are dealt
    __device__ int row(int channel) const {
        if (channel >= MIX_V) return 2 * KEY_DIM + unit((channel - MIX_V) / 8) * 8 + channel % 8;
        return (channel < MIX_K ? 0 : KEY_DIM - STATE_DIM) + key_head * STATE_DIM + channel;
    }
    // Channels that it convolves, four by four: some or all of q and k, then v; or -1.
    __device__ int channel_of(int quad) const {
        if (quad < QK_QUADS) {
            const int channel = (QK_SHARED ? part * QK_QUADS + quad : quad) * 4;
            return units && channel < MIX_V ? channel : -1;
        }
        return quad < QK_QUADS + units * 2 ? MIX_V + (quad - QK_QUADS) * 4 : -1;
    }
    // Which row of the projection its quads begin with (gates: are); or -1.
    __device__ int input_row(int quad) const {
        if (quad < CONVOLVED_QUADS) return channel_of(quad) < 0 ? -1 : row(channel_of(quad));
        quad -= CONVOLVED_QUADS;
        if (quad < OWN_UNITS * 2) return quad < units * 2 ? Z_AT + unit(quad / 2) * 8 + quad % 2 * 4 : -1;
        quad -= OWN_UNITS * 2;
        return quad / 2 < heads ? GATES_AT + quad % 2 * VALUE_HEADS + value_head(quad / 2) : -1;
    }
};

// What the convolution and gates need, quads as above: [node] of the projection; weights of the convolution; [age - 1]
// its inputs before the tree; A and dt of each head; rows of the projection.
struct DeltaInputs {
    float *raw, *conv, *history, *vectors;
    int* rows;
    __device__ explicit DeltaInputs(u8* scratch)
        : raw((float*)(scratch + MIX_INPUTS_AT)), conv(raw + NODES * INPUT_QUADS * 4),
          history(conv + 4 * CONVOLVED_QUADS * 4), vectors(history + 3 * CONVOLVED_QUADS * 4),
          rows((int*)(vectors + 2 * OWN_HEADS)) {}
};

// For a commit, or a later token.
__device__ __forceinline__ void keep(float4* at, float4 v) {
    if (POLLED)
        *at = v;
    else
        store_once(at, v);
}

// What does not depend on the projection, by `threads` threads, of which this is number `thread`.
__device__ __forceinline__ void ask_inputs(const Block& b, const DeltaShare& share, int thread, int threads) {
    const DeltaInputs in(b.scratch);
    const float* history = b.p.history + (size_t)b.deltas * HISTORY * CONV_CHANNELS;
    if (thread < share.heads) {
        const int head = share.value_head(thread);
        copy4(in.vectors + 2 * thread, b.vectors + A_AT + head);
        copy4(in.vectors + 2 * thread + 1, b.vectors + DT_AT + head);
    }
#pragma unroll 1
    for (int quad = thread; quad < INPUT_QUADS; quad += threads) {
        const int row = share.input_row(quad);
        in.rows[quad] = row;
        if (row < 0 || quad >= CONVOLVED_QUADS) continue;
#pragma unroll
        for (int i = 0; i < 4; i++) copy16(in.conv + (quad * 4 + i) * 4, b.vectors + CONV_AT + (row + i) * 4);
#pragma unroll
        for (int age = 1; age < HISTORY; age++)
            copy16(in.history + ((age - 1) * CONVOLVED_QUADS + quad) * 4,
                   history + (b.length - age + HISTORY) % HISTORY * CONV_CHANNELS + row);
    }
}

// The projection. A thread has a quad of some nodes, and asks for as many of them at once as it has registers for.
__device__ __forceinline__ void delta_projections(Block& b, const DeltaShare& share, const Projection& sums) {
    constexpr int APART = larger(1, CONSUMERS / INPUT_QUADS), EACH = (NODES + APART - 1) / APART,
                  MOST = __CUDA_ARCH__ < 900 ? 2 : 4, AT_ONCE = EACH < MOST ? EACH : MOST;
    const DeltaInputs in(b.scratch);
#pragma unroll 1
    for (int at = 0; at < INPUT_QUADS * APART; at += CONSUMERS) {
        const int i = at + threadIdx.x, quad = i % INPUT_QUADS, row = in.rows[quad];
        const bool live = i < INPUT_QUADS * APART && row >= 0;  // the others ask, too: a warp waits together
        const auto place = sums.place(max(row, 0) & ~3);
        // one SM keeps a channel for later
        const bool keeps = quad < CONVOLVED_QUADS && (QK_SHARED || quad >= QK_QUADS || share.first == 0);
        float* kept = b.decoding() ? b.p.history + ((size_t)b.deltas * HISTORY + b.length % HISTORY) * CONV_CHANNELS
                                   : b.p.pending_raw + (size_t)b.deltas * MAX_NODES * CONV_CHANNELS;
#pragma unroll 1
        for (int first = 0; first < b.nodes; first += APART * AT_ONCE) {
            Projection::Asked asked[AT_ONCE];
            const auto node = [&](int j) { return first + i / INPUT_QUADS + j * APART; };
            const auto asks = [&](int j) { return min(node(j), b.nodes - 1); };
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) sums.ask(asked[j], place, asks(j));
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const float4 v = sums.total(asked[j], place, asks(j));
                if (!live || node(j) >= b.nodes) continue;
                *(float4*)(in.raw + (node(j) * INPUT_QUADS + quad) * 4) = v;
                if (keeps) keep((float4*)(kept + b.place(node(j)) * CONV_CHANNELS + row), v);
            }
        }
    }
}

// A quad of a node after the convolution.
__device__ __forceinline__ float4 convolve(const Block& b, const DeltaInputs& in, int node, int quad) {
    const float4* conv = (const float4*)in.conv + quad * 4;
    const float4 w[4] = {conv[0], conv[1], conv[2], conv[3]};
    float4 x[4];
#pragma unroll
    for (int age = 0; age < 4; age++) {
        const int source = b.s.path[node][age];
        x[age] = ((const float4*)(source >= 0 ? in.raw + source * INPUT_QUADS * 4
                                              : in.history + (-1 - source) * CONVOLVED_QUADS * 4))[quad];
    }
    const auto mixed = [&](float4 w, float x0, float x1, float x2, float x3) {
        return silu(fmaf(w.w, x0, fmaf(w.z, x1, fmaf(w.y, x2, w.x * x3))));
    };
    return {mixed(w[0], x[0].x, x[1].x, x[2].x, x[3].x), mixed(w[1], x[0].y, x[1].y, x[2].y, x[3].y),
            mixed(w[2], x[0].z, x[1].z, x[2].z, x[3].z), mixed(w[3], x[0].w, x[1].w, x[2].w, x[3].w)};
}
// A quad of z, or a gate, of a node.
__device__ __forceinline__ void gate_quad(const Block& b, const DeltaInputs& in, int node, int quad) {
    float* row = (float*)b.scratch + node * MIX_ROW;
    const float* raw = in.raw + (node * INPUT_QUADS + quad) * 4;
    const int gate = quad - CONVOLVED_QUADS - OWN_UNITS * 2;
    if (gate < 0) {
        const float4 v = *(const float4*)raw;
        ((float4*)(row + SILU_Z))[quad - CONVOLVED_QUADS] = {silu(v.x), silu(v.y), silu(v.z), silu(v.w)};
    } else {
        const float x = raw[in.rows[quad] & 3];
        row[GATES + (gate ^ 1)] =
            gate & 1 ? exponential(in.vectors[gate - 1] * softplus(x + in.vectors[gate])) : sigmoid(x);
    }
}

// Norms of q and k of some nodes, of which a lane has four channels each: their sums at the same time. `row(i)` is the
// i-th node's row; there are `live` of them.
template <int COUNT, class Row>
__device__ __forceinline__ void norm_nodes(const Block& b, const float4 (&q)[COUNT], const float4 (&k)[COUNT], int live,
                                           Row row) {
    float sums[COUNT][3];
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        sums[i][0] = dot4(q[i], q[i]), sums[i][1] = dot4(k[i], k[i]), sums[i][2] = dot4(q[i], k[i]);
#pragma unroll
    for (int step = 1; step < 32; step *= 2)  // as `warp_sum`
#pragma unroll
        for (int i = 0; i < COUNT; i++)
#pragma unroll
            for (int j = 0; j < 3; j++) sums[i][j] += __shfl_xor_sync(~0u, sums[i][j], step);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        if (i >= live) break;
        const float rq = inverse_root(sums[i][0] + 1e-6f) * QUERY_SCALE, rk = inverse_root(sums[i][1] + 1e-6f);
        ((float4*)row(i))[b.lane] = q[i], ((float4*)(row(i) + MIX_K))[b.lane] = k[i];
        if (b.lane == 0) *(float4*)(row(i) + NORMS) = {rk, rq, sums[i][2] * rq * rk, 0.0f};
    }
}
__device__ __forceinline__ float* pending_key_at(const Block& b, const DeltaShare& share, int node) {
    return b.p.pending_key + (((size_t)b.deltas * KEY_HEADS + share.key_head) * MAX_NODES + b.place(node)) * STATE_DIM;
}

// A warp q and k of a node, and their norms, or v, z and gates of a few nodes.
__device__ __forceinline__ void delta_convolutions(Block& b, const DeltaShare& share) {
    constexpr int OTHERS = INPUT_QUADS - QK_QUADS;
    float* rows = (float*)b.scratch;
    const DeltaInputs in(b.scratch);
    const int tasks = share.units ? b.nodes + (OTHERS * b.nodes + 31) / 32 : 0;
#pragma unroll 1
    for (int task = b.warp; task < tasks; task += WARPS) {
        if (task < b.nodes) {
            const float4 q[1] = {convolve(b, in, task, b.lane)}, k[1] = {convolve(b, in, task, MIX_K / 4 + b.lane)};
            norm_nodes(b, q, k, 1, [&](int) { return rows + task * MIX_ROW; });
            if (!b.decoding() && share.first == 0) keep((float4*)pending_key_at(b, share, task) + b.lane, k[0]);
        } else {
            const int i = (task - b.nodes) * 32 + b.lane, node = i / OTHERS, quad = QK_QUADS + i % OTHERS;
            if (node >= b.nodes || in.rows[quad] < 0) continue;
            if (quad < CONVOLVED_QUADS)
                ((float4*)(rows + node * MIX_ROW + MIX_V))[quad - QK_QUADS] = convolve(b, in, node, quad);
            else
                gate_quad(b, in, node, quad);
        }
    }
}

// The same where SMs share the work: a thread four channels of a node; then all SMs of the key head have its q and k.
// What others do not wait for is made while they are waited for.
__device__ __forceinline__ void share_convolutions(Block& b, int stage, const DeltaShare& share) {
    constexpr int VALUE_QUADS = CONVOLVED_QUADS - QK_QUADS, GATED = INPUT_QUADS - CONVOLVED_QUADS;
    float* rows = (float*)b.scratch;
    const DeltaInputs in(b.scratch);
    if (!share.units) return;
#pragma unroll 1
    for (int i = threadIdx.x; i < QK_QUADS * b.nodes; i += CONSUMERS) {
        const int node = i / QK_QUADS, quad = i % QK_QUADS, channel = share.channel_of(quad);
        if (channel < 0) continue;
        const float4 v = convolve(b, in, node, quad);
        store16(qk_words(b, stage, share.key_head, node) + channel, __float_as_uint(v.x), __float_as_uint(v.y),
                __float_as_uint(v.z), __float_as_uint(v.w));
    }
#pragma unroll 1
    for (int i = CONSUMERS - 1 - threadIdx.x; i < VALUE_QUADS * b.nodes; i += CONSUMERS) {
        const int node = i / VALUE_QUADS, quad = QK_QUADS + i % VALUE_QUADS;
        if (in.rows[quad] >= 0)
            ((float4*)(rows + node * MIX_ROW + MIX_V))[quad - QK_QUADS] = convolve(b, in, node, quad);
    }
#pragma unroll 1
    for (int i = CONSUMERS - 1 - threadIdx.x; i < GATED * b.nodes; i += CONSUMERS) {
        const int node = i / GATED, quad = CONVOLVED_QUADS + i % GATED;
        if (in.rows[quad] >= 0) gate_quad(b, in, node, quad);
    }
    b.sync();  // who has nothing more to do does not poll beside the others
    constexpr int EACH = (NODES + WARPS - 1) / WARPS;
    uint4 got[2][EACH];
    for (Watchdog dog;; dog.check()) {
        bool all = true;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const u32* from = qk_words(b, stage, share.key_head, min(b.warp + i * WARPS, b.nodes - 1)) + b.lane * 4;
            got[0][i] = load16(from), got[1][i] = load16(from + MIX_K);
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) all = all & came4(got[0][i]) & came4(got[1][i]);
        if (everywhere(all)) break;
    }
    float4 q[EACH], k[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) q[i] = floats(got[0][i]), k[i] = floats(got[1][i]);
    const int live = (b.nodes - b.warp + WARPS - 1) / WARPS;
    norm_nodes(b, q, k, live, [&](int i) { return rows + (b.warp + i * WARPS) * MIX_ROW; });
    if (!b.decoding())
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int node = b.warp + i * WARPS;
            if (i < live && node % KEY_PARTS == share.part)
                keep((float4*)pending_key_at(b, share, node) + b.lane, k[i]);
        }
}
