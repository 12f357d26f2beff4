// The Gated DeltaNet's mixer.
//
// Maths, per value head with state S [dk, dv], f = e^g, rq = dk^-0.5 / |q|, rk = 1 / |k| and q, k, v after the
// convolution and silu: write = beta (v - f rk k^T S), o = f rq q^T S + rq rk (q^T k) write, S <- f S + k (rk write); y
// = o weight silu(z), and the sum of squares of o, by which the next projection divides. A unit is 8 columns of S (8 of
// a head's 128 value channels), a warp's work: lane 8 c + r has rows 4 r .. + 3 of every 32, of columns 2 c, 2 c + 1,
// in registers. An SM has units of heads that share a key head; it convolves and norms q and k itself, for all nodes. A
// node's state follows from its parent's: in registers if that was the last one walked, else from where a state that is
// needed again is kept (the order: `prepare_walk`). All that does not depend on the projection is asked for before its
// sums are waited for. Bytes: 4 KB of state a unit read, and written when decoding.
#pragma once
#include "large/steps.cuh"

constexpr float QUERY_SCALE = 0.08838834764831845f;  // 128 ** -0.5

// A node's row in shared memory: q | k | v, then o in its place | silu(z) | rk write | {rk, rq, rq rk q^T k} | {f,
// beta} of each head.
constexpr int MIX_K = STATE_DIM, MIX_V = 2 * STATE_DIM, SILU_Z = MIX_CHANNELS, WRITTEN = SILU_Z + OWN_UNITS * 8,
              NORMS = WRITTEN + OWN_UNITS * 8, GATES = NORMS + 4;

__device__ __forceinline__ float4 update_state(float4 s, float fade, float4 k, float write) {
    return {fmaf(k.x, write, s.x * fade), fmaf(k.y, write, s.y * fade), fmaf(k.z, write, s.z * fade),
            fmaf(k.w, write, s.w * fade)};
}
__device__ __forceinline__ float dot4(float4 a, float4 b) {
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, a.w * b.w)));
}

// A part of the units that share a key head, and which rows of the projection their channels are: q, k, then v.
struct DeltaShare {
    int key_head, part, first, units, head, heads;  // units from `first` on, in heads `head` .. of the key head's
    __device__ explicit DeltaShare(int item) {
        part = item % KEY_PARTS;
        key_head = min(item / KEY_PARTS, KEY_HEADS - 1);
        first = KEY_UNITS * part / KEY_PARTS;
        units = item < KEY_HEADS * KEY_PARTS ? KEY_UNITS * (part + 1) / KEY_PARTS - first : 0;
        head = first / 16, heads = units ? (first + units - 1) / 16 - head + 1 : 0;
    }
    __device__ int value_head(int mine) const { return key_head + (head + mine) * KEY_HEADS; }
    __device__ int unit(int mine) const {
        const int in = first + mine;
        return (key_head + in / 16 * KEY_HEADS) * 16 + in % 16;
    }
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
    const bool has_head = thread < share.heads;
    float a = 0.0f, dt = 0.0f;
    if (has_head) {
        const int head = share.value_head(thread);
        a = __ldg(b.vectors + A_AT + head), dt = __ldg(b.vectors + DT_AT + head);
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
    if (has_head) in.vectors[2 * thread] = a, in.vectors[2 * thread + 1] = dt;
}

// The projection. A thread has a quad of some nodes, and asks for all of them at once.
template <class Projection>
__device__ __forceinline__ void delta_projections(Block& b, const DeltaShare& share, const Projection& sums) {
    constexpr int APART = larger(1, CONSUMERS / INPUT_QUADS), EACH = (NODES + APART - 1) / APART,
                  AT_ONCE = EACH < 4 ? EACH : 4;
    const DeltaInputs in(b.scratch);
#pragma unroll 1
    for (int i = threadIdx.x; i < INPUT_QUADS * APART; i += CONSUMERS) {
        const int quad = i % INPUT_QUADS, row = in.rows[quad];
        if (row < 0) continue;
        const auto place = sums.place(row & ~3);
        // one SM keeps a channel for later
        const bool keeps = quad < CONVOLVED_QUADS && (QK_SHARED || quad >= QK_QUADS || share.first == 0);
        float* kept = b.decoding() ? b.p.history + ((size_t)b.deltas * HISTORY + b.length % HISTORY) * CONV_CHANNELS
                                   : b.p.pending_raw + (size_t)b.deltas * MAX_NODES * CONV_CHANNELS;
#pragma unroll 1
        for (int first = i / INPUT_QUADS; first < b.nodes; first += APART * AT_ONCE) {
            typename Projection::Asked asked[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) sums.ask(asked[j], place, min(first + j * APART, b.nodes - 1));
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const int node = first + j * APART;
                if (node >= b.nodes) break;
                const float4 v = sums.total(asked[j], place, node);
                *(float4*)(in.raw + (node * INPUT_QUADS + quad) * 4) = v;
                if (keeps) keep((float4*)(kept + b.place(node) * CONV_CHANNELS + row), v);
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
__device__ __forceinline__ void share_convolutions(Block& b, const DeltaShare& share) {
    static_assert(KEY_HEADS < 32, "counters");
    constexpr int VALUE_QUADS = CONVOLVED_QUADS - QK_QUADS, GATED = INPUT_QUADS - CONVOLVED_QUADS;
    float* rows = (float*)b.scratch;
    float* mixed = (float*)b.p.parts + (size_t)share.key_head * NODES * MIX_V;
    const DeltaInputs in(b.scratch);
    if (!share.units) return;
#pragma unroll 1
    for (int i = threadIdx.x; i < QK_QUADS * b.nodes; i += CONSUMERS) {
        const int node = i / QK_QUADS, quad = i % QK_QUADS, channel = share.channel_of(quad);
        if (channel >= 0) *(float4*)(mixed + node * MIX_V + channel) = convolve(b, in, node, quad);
    }
    b.sync();
    u32* counter = b.p.counter + 32 * (1 + share.key_head);
    if (threadIdx.x == 0) add_release(counter, 1);
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
    if (threadIdx.x == 0) {
        const u32 all = ((b.length - b.r.length) * DELTA_LAYERS + b.deltas + 1) * KEY_PARTS;
        Watchdog dog;
        while ((int)(load_acquire(counter) - all) < 0) dog.check();
    }
    __syncwarp();
    b.sync();
    constexpr int EACH = (NODES + WARPS - 1) / WARPS;
    float4 q[EACH], k[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const float4* from = (const float4*)(mixed + min(b.warp + i * WARPS, b.nodes - 1) * MIX_V) + b.lane;
        q[i] = __ldcg(from), k[i] = __ldcg(from + MIX_K / 4);
    }
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

// A unit's state, a lane's part of it, and where that lies.
struct DeltaUnit {
    float4 s[2][4], weight[2];  // weights of the norm: of all eight columns
    float4* at;
    bool changed = false;

    __device__ __forceinline__ void load(const Block& b, const DeltaShare& share, int mine) {
        const int column = share.unit(mine) * 8 + (b.lane >> 3) * 2;
        at = (float4*)(b.p.delta + ((size_t)b.deltas * VALUE_DIM + column) * STATE_DIM) + (b.lane & 7);
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float4* from = at + c * (STATE_DIM / 4) + j * 8;
                s[c][j] = POLLED ? __ldcg(from) : load_once(from);  // one node exchanges little
            }
        const float4* norm = (const float4*)(b.vectors + GATED_NORM_AT) + share.unit(mine) % 16 * 2;
        weight[0] = __ldg(norm), weight[1] = __ldg(norm + 1);
    }
    __device__ __forceinline__ void store() {
        if (!changed) return;
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int j = 0; j < 4; j++) at[c * (STATE_DIM / 4) + j * 8] = s[c][j];
        changed = false;
    }
    // To a place where states of branches are kept, or from there.
    __device__ __forceinline__ void keep(float4* place) const {
#pragma unroll
        for (int i = 0; i < 8; i++) place[i * 32] = s[i / 4][i % 4];
    }
    __device__ __forceinline__ void fetch(const float4* place) {
#pragma unroll
        for (int i = 0; i < 8; i++) s[i / 4][i % 4] = place[i * 32];
    }
};

// What a lane needs for a node: sixteen rows of q and k, two columns' values, numbers of its head, and where the states
// before and after it are kept.
struct DeltaTurn {
    float4 q[4], k[4], norms;
    float2 v, gates;
    int node, from, to;
    __device__ __forceinline__ void load(const Block& b, u32 rows, int i, int own, int head) {
        const Visit visit = b.s.visits[min(i, b.nodes - 1)];
        from = uniform(visit.from + 1) - 1, to = uniform(visit.to + 1) - 1;
        node = visit.node;
        const u32 row = rows + node * (MIX_ROW * 4), at = row + (b.lane & 7) * 16;
#pragma unroll
        for (int j = 0; j < 4; j++) k[j] = float4_at(at + MIX_K * 4 + j * 128), q[j] = float4_at(at + j * 128);
        norms = float4_at(row + NORMS * 4);
        gates = float2_at(row + (GATES + head * 2) * 4), v = float2_at(row + (MIX_V + own) * 4);
    }
    static __device__ __forceinline__ float4 float4_at(u32 at) {
        const uint4 v = load_shared16(at);
        return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
    }
    static __device__ __forceinline__ float2 float2_at(u32 at) {
        const uint2 v = load_shared8(at);
        return {__uint_as_float(v.x), __uint_as_float(v.y)};
    }
};
__device__ __forceinline__ float dot16(const float4 (&a)[4], const float4 (&b)[4]) {
    const auto more = [](float sum, float4 a, float4 b) {
        return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
    };
    return more(dot4(a[0], b[0]), a[1], b[1]) + more(dot4(a[2], b[2]), a[3], b[3]);
}
__device__ __forceinline__ float sum_of_eight(float v) {
    v += __shfl_xor_sync(~0u, v, 4);
    v += __shfl_xor_sync(~0u, v, 2);
    return v + __shfl_xor_sync(~0u, v, 1);
}

// All nodes of a unit, one after the other: o and what is written to their rows.
__device__ __forceinline__ void walk_states(const Block& b, const DeltaShare& share, int mine, DeltaUnit& unit) {
    float* rows = (float*)b.scratch;
    const int head = (share.first + mine) / 16 - share.head, own = mine * 8 + (b.lane >> 3) * 2;
    float4* near = (float4*)(b.scratch + MIX_ROWS_BYTES + mine * UNIT_BYTES) + b.lane;
    float4* far = (float4*)(b.p.branch_state + (size_t)share.unit(mine) * KEPT_STATES * 8 * STATE_DIM) + b.lane;
    const auto place = [&](int i) {
        return i < MIX_PLACES ? near + i * (OWN_UNITS * UNIT_BYTES / 16) : far + i * (UNIT_BYTES / 16);
    };
    const u32 rows_at = (u32)uniform((int)shared_address(rows));  // once: else it is worked out again and again
    const auto step = [&](int i, const DeltaTurn& now, DeltaTurn& next) {
        if (now.from != HERE) unit.fetch(place(now.from));
        const float ks[2] = {dot16(now.k, unit.s[0]), dot16(now.k, unit.s[1])},
                    qs[2] = {dot16(now.q, unit.s[0]), dot16(now.q, unit.s[1])};
        next.load(b, rows_at, i + 1, own, head);
        const float fade = now.gates.x, beta = now.gates.y, rk = now.norms.x, value[2] = {now.v.x, now.v.y};
        float out[2], scaled[2];
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const float write = beta * fmaf(-fade, rk * sum_of_eight(ks[c]), value[c]);
            scaled[c] = write * rk;
            out[c] = fmaf(now.norms.z, write, fade * (now.norms.y * sum_of_eight(qs[c])));
        }
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int j = 0; j < 4; j++) unit.s[c][j] = update_state(unit.s[c][j], fade, now.k[j], scaled[c]);
        if (now.to != NOWHERE) unit.keep(place(now.to));
        if (LANES_ARRIVE > 1) __syncwarp();  // for the race checker: all have read v before the sums above
        if ((b.lane & 7) == 0) {
            float* row = rows + now.node * MIX_ROW;
            *(float2*)(row + MIX_V + own) = {out[0], out[1]}, *(float2*)(row + WRITTEN + own) = {scaled[0], scaled[1]};
        }
    };
    DeltaTurn even, odd;
    even.load(b, rows_at, 0, own, head);
#pragma unroll 1
    for (int i = 0; i < b.nodes; i += 2) {
        step(i, even, odd);
        if (i + 1 < b.nodes) step(i + 1, odd, even);
    }
}

// The unit's results, a lane a node.
__device__ __forceinline__ void write_results(const Block& b, int stage, const DeltaShare& share, int mine,
                                              const float4 (&weight)[2]) {
    __syncwarp();
    if (b.lane >= b.nodes) return;
    const int node = b.lane, unit = share.unit(mine), head = (share.first + mine) / 16 - share.head;
    const float* row = (const float*)b.scratch + node * MIX_ROW;
    const float4 *o = (const float4*)(row + MIX_V) + mine * 2, *z = (const float4*)(row + SILU_Z) + mine * 2,
                 *written = (const float4*)(row + WRITTEN) + mine * 2;
    const float4 o0 = o[0], o1 = o[1], z0 = z[0], z1 = z[1];
    const uint4 y = {pack_bf16(o0.x * weight[0].x * z0.x, o0.y * weight[0].y * z0.y),
                     pack_bf16(o0.z * weight[0].z * z0.z, o0.w * weight[0].w * z0.w),
                     pack_bf16(o1.x * weight[1].x * z1.x, o1.y * weight[1].y * z1.y),
                     pack_bf16(o1.z * weight[1].z * z1.z, o1.w * weight[1].w * z1.w)};
    const float square = dot4(o0, o0) + dot4(o1, o1);
    store_activations(operand_words(b, stage + 1), node, unit * 8, y);
    store4(head_square_words(b, stage + 1, unit / 16, node) + unit % 16, __float_as_uint(square));
    if (!b.decoding()) {
        const size_t at = ((size_t)b.deltas * BLOCKS + unit / 2) * MAX_NODES + b.place(node);
        float4* to = (float4*)(b.p.pending_write + at * COLUMNS) + unit % 2 * 2;
        keep(to, written[0]), keep(to + 1, written[1]);
        if (unit % 2 == 0) b.p.pending_fade[at] = row[GATES + head * 2];
    }
}

// A DeltaNet layer's mixer. It waits for the projection's sums; states are stored when others need not wait for it.
// Returns the steps done so far.
__device__ __noinline__ u32 delta_mix(int stage, int deltas, int length, const float* vectors, u32 steps_done) {
    Block b;
    b.deltas = deltas, b.length = length, b.vectors = vectors, b.steps_done = steps_done;
    DeltaUnit unit = {};  // set: registers that are set on some paths only are live in the whole kernel
#pragma unroll 1
    for (int item = b.sm; item < KEY_HEADS * KEY_PARTS || item == b.sm; item += SMS) {
        const DeltaShare share(item);
        b.sync();  // what the scratch holds may still be read
        const bool asked = POLLED && item == b.sm;  // by another warp, while the projection was made
        if (!asked) ask_inputs(b, share, threadIdx.x, CONSUMERS);
        unit.store();
        unit.load(b, share, b.warp < share.units ? b.warp : 0);
        if (!asked) copies_done();
        if (!POLLED && item == b.sm)
            b.wait_for_all();
        else if (!asked)
            b.sync();
        if (item == b.sm) b.mark();
        delta_projections(b, share, sums_of<HIDDEN_GROUPS>(b, stage, DELTA_ROWS));
        b.sync();
        if (item == b.sm) b.mark();
        if constexpr (QK_SHARED)
            share_convolutions(b, share);
        else
            delta_convolutions(b, share);
        b.sync();
        if (item == b.sm) b.mark();
#pragma unroll 1
        for (int mine = b.warp; mine < share.units; mine += WARPS) {
            if (mine != b.warp) {
                unit.store();
                unit.load(b, share, mine);
            }
            walk_states(b, share, mine, unit);
            write_results(b, stage, share, mine, unit.weight);
            unit.changed = b.decoding();
        }
    }
    b.mark();
    unit.store();
    return b.steps_done;
}
