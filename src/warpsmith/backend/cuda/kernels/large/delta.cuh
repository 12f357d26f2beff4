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
#include "large/delta_inputs.cuh"

__device__ __forceinline__ float4 update_state(float4 s, float fade, float4 k, float write) {
    return {fmaf(k.x, write, s.x * fade), fmaf(k.y, write, s.y * fade), fmaf(k.z, write, s.z * fade),
            fmaf(k.w, write, s.w * fade)};
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

// What a lane needs for a node: sixteen rows of q and k, two columns' values, numbers of its head.
struct DeltaTurn {
    float4 q[4], k[4], norms;
    float2 v, gates;
    u32 row;  // where the node's is
    __device__ __forceinline__ void load(const Block& b, u32 from, int own, int head) {
        row = from;
        const u32 at = row + (b.lane & 7) * 16;
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
    const int head = (share.first + mine) / 16 - share.head, own = mine * 8 + (b.lane >> 3) * 2;
    float4* near = (float4*)(b.scratch + MIX_ROWS_BYTES + mine * UNIT_BYTES) + b.lane;
    float4* far = (float4*)(b.p.branch_state + (size_t)share.unit(mine) * KEPT_STATES * 8 * STATE_DIM) + b.lane;
    const auto place = [&](int i) {
        return i < MIX_PLACES ? near + i * (OWN_UNITS * UNIT_BYTES / 16) : far + i * (UNIT_BYTES / 16);
    };
    // Once, else they are worked out again and again: where rows and visits are, and which visits, a bit each, begin
    // with a state that is fetched or end with one that is kept.
    const u32 rows_at = (u32)uniform((int)shared_address(b.scratch)),
              visits_at = (u32)uniform((int)shared_address(b.s.visits));
    const auto visit = [&](int i) { return load_shared4(visits_at + min(i, b.nodes - 1) * 4); };
    const auto row_of = [&](int i) { return rows_at + (visit(i) & 255) * (MIX_ROW * 4); };
    const u32 fetched = __ballot_sync(~0u, (signed char)(visit(b.lane) >> 8) != HERE),
              kept = __ballot_sync(~0u, (signed char)(visit(b.lane) >> 16) != NOWHERE);
    u32 after = row_of(1);  // of the next node
    const auto step = [&](int i, const DeltaTurn& now, DeltaTurn& next) {
        if (fetched >> i & 1) unit.fetch(place(visit(i) >> 8 & 255));
        const float ks[2] = {dot16(now.k, unit.s[0]), dot16(now.k, unit.s[1])},
                    qs[2] = {dot16(now.q, unit.s[0]), dot16(now.q, unit.s[1])};
        next.load(b, after, own, head);
        after = row_of(i + 2);
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
        if (kept >> i & 1) unit.keep(place(visit(i) >> 16 & 255));
        if (LANES_ARRIVE > 1) __syncwarp();  // for the race checker: all have read v before the sums above
        if ((b.lane & 7) == 0) {
            store_shared(now.row + (MIX_V + own) * 4, uint2{__float_as_uint(out[0]), __float_as_uint(out[1])});
            store_shared(now.row + (WRITTEN + own) * 4, uint2{__float_as_uint(scaled[0]), __float_as_uint(scaled[1])});
        }
    };
    DeltaTurn even, odd;
    even.load(b, row_of(0), own, head);
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
    store16(head_words(b, stage + 1, node) + unit * 4, y.x, y.y, y.z, y.w);
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
            share_convolutions(b, stage + 1, share);
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
    if constexpr (!POLLED) {
        b.sync();  // who is done with its units does not poll beside those who are not
        norm_heads(b, stage + 1);
    }
    return b.steps_done;
}
