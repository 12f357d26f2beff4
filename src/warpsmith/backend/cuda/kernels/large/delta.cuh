// The Gated DeltaNet's mixer.
//
// Maths, per value head with state S [dk, dv], f = e^g, rq = dk^-0.5 / |q|, rk = 1 / |k| and q, k, v after the
// convolution and silu: write = beta (v - f rk k^T S), o = f rq q^T S + rq rk (q^T k) write, S <- f S + k (rk write); y
// = o weight silu(z), and the sum of squares of o, by which the next projection divides. A unit is 8 columns of S (8 of
// a head's 128 value channels), a warp's work: lane 8 c + r has rows 4 r .. + 3 of every 32, of columns c and c + 4, in
// registers. Where an SM has more units than half of its warps and fewer than all of them, some warps have half a unit.
// An SM has units of heads that share a key head; it convolves and norms q and k itself, for all nodes. A node's state
// follows from its parent's: in registers if that is at hand, else from where a state that is needed again is kept (the
// order: `prepare_walk`). All that does not depend on the projection is asked for before its sums are waited for.
// Bytes: 4 KB of state a unit read, and written when decoding.
#pragma once
#include "large/delta_inputs.cuh"

__device__ __forceinline__ float4 update_state(float4 s, float fade, float4 k, float write) {
    return {fmaf(k.x, write, s.x * fade), fmaf(k.y, write, s.y * fade), fmaf(k.z, write, s.z * fade),
            fmaf(k.w, write, s.w * fade)};
}

// States that a warp walks: one or both halves of a unit, from half number `first` on. Eight lanes have a column each.
struct DeltaColumns {
    float4 s[2][4];
    float4* at;
    int first, count;

    __device__ __forceinline__ void load(const Block& b, const DeltaShare& share, int walker) {
        const int whole = max(2 * share.units - WARPS, 0);  // warps that have both halves, if units are split
        first = SPLIT_UNITS ? walker + min(walker, whole) : 2 * walker;
        count = !SPLIT_UNITS || walker < whole ? 2 : first < 2 * share.units;
        const int column = share.unit(first / 2) * 8 + first % 2 * 4 + (b.lane >> 3);
        at = (float4*)(b.p.delta + ((size_t)b.deltas * VALUE_DIM + column) * STATE_DIM) + (b.lane & 7);
#pragma unroll
        for (int c = 0; c < 2; c++) {
            if (c >= count) break;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float4* from = at + c * STATE_DIM + j * 8;
                s[c][j] = POLLED ? __ldcg(from) : load_once(from);  // one node exchanges little
            }
        }
    }
    __device__ __forceinline__ void store() const {
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int j = 0; j < 4; j++) at[c * STATE_DIM + j * 8] = s[c][j];
    }
    // To a place where states of branches are kept, or from there.
    template <int COUNT>
    __device__ __forceinline__ void keep(float4* place) const {
#pragma unroll
        for (int i = 0; i < COUNT * 4; i++) place[i * 32] = s[i / 4][i % 4];
    }
    template <int COUNT>
    __device__ __forceinline__ void fetch(const float4* place) {
#pragma unroll
        for (int i = 0; i < COUNT * 4; i++) s[i / 4][i % 4] = place[i * 32];
    }
};

__device__ __forceinline__ float4 float4_at(u32 at) {
    const uint4 v = load_shared16(at);
    return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
}
// A lane's sixteen rows of q or k.
__device__ __forceinline__ void load_rows(float4 (&v)[4], const Block& b, u32 row) {
#pragma unroll
    for (int j = 0; j < 4; j++) v[j] = float4_at(row + (b.lane & 7) * 16 + j * 128);
}
__device__ __forceinline__ float dot16(const float4 (&a)[4], const float4 (&b)[4]) {
    const auto more = [](float sum, float4 a, float4 b) {
        return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
    };
    return more(dot4(a[0], b[0]), a[1], b[1]) + more(dot4(a[2], b[2]), a[3], b[3]);
}
template <int DISTANCE>
__device__ __forceinline__ float add_from(float v) {
    return v + __shfl_xor_sync(~0u, v, DISTANCE);
}

template <bool VALUE>
struct Is {
    static constexpr bool value = VALUE;
};

// All nodes, one after the other: o and what is written to their rows. C: columns that a lane has.
template <int C>
__device__ __forceinline__ void walk_states(const Block& b, const DeltaShare& share, DeltaColumns& own) {
    // of (unit, half), KEPT_STATES in memory
    float4* near = (float4*)(b.scratch + MIX_ROWS_BYTES + own.first * (UNIT_BYTES / 2)) + b.lane;
    float4* far = (float4*)b.p.branch_state +
                  (share.number() * 2 + own.first) * (KEPT_STATES * UNIT_BYTES / 32) + b.lane;
    const auto place = [&](int i) {
        return i < MIX_PLACES ? near + i * (OWN_UNITS * UNIT_BYTES / 16) : far + i * (C * UNIT_BYTES / 32);
    };
    // Once, else they are worked out again and again: where rows and visits are, and which visits, a bit each, are of
    // leaves, or end with a state that is kept, or one that is fetched for the next.
    const u32 rows_at = (u32)uniform((int)shared_address(b.scratch)),
              visits_at = (u32)uniform((int)shared_address(b.s.visits));
    const auto visit = [&](int i) { return POLLED ? 0 : load_shared4(visits_at + min(i, b.nodes - 1) * 4); };
    const auto row_of = [&](u32 visit) { return rows_at + (visit & 255) * (MIX_ROW * 4); };
    const auto visits_that = [&](bool is_one) { return POLLED ? 0 : __ballot_sync(~0u, b.lane < b.nodes && is_one); };
    const u32 leaves = visits_that(visit(b.lane) >> 24),
              kept = visits_that((signed char)(visit(b.lane) >> 16) != NOWHERE),
              fetched = visits_that((signed char)(visit(b.lane) >> 8) != HERE) >> 1,
              followed = leaves >> 1 | kept | fetched;
    // In a row: a column's value, its gates; what a lane stores, one of the results of its eight lanes.
    const int own_column = own.first * 4 + (b.lane >> 3), head = (share.first * 2 + own.first) / 32 - share.head;
    const u32 values_at = (MIX_V + own_column) * 4, gates_at = (GATES + head * 2) * 4;
    const int result = b.lane & 7;
    const u32 to = ((result < C ? MIX_V : WRITTEN) + own_column + result % C * 4) * 4;
    u32 row = row_of(visit(0)), after = visit(1);
    float4 q[4], k[4];
    load_rows(k, b, row + MIX_K * 4);
    // The compiler moves no load across `__syncwarp`, which is no instruction; without it, all loads would be last.
    // A node; from a leaf no state follows.
    const auto take = [&](int i, auto leaf) {
        const u32 next = row_of(after);
        float ks[C], qs[C], v[C], results[2 * C];
#pragma unroll
        for (int c = 0; c < C; c++) ks[c] = add_from<4>(dot16(k, own.s[c]));
        __syncwarp();
        const uint2 gates = load_shared8(row + gates_at);
        const float4 norms = float4_at(row + NORMS * 4);
        const float fade = __uint_as_float(gates.x), beta = __uint_as_float(gates.y), rk = norms.x;
        load_rows(q, b, row);
#pragma unroll
        for (int c = 0; c < C; c++) v[c] = load_shared_float(row + values_at + c * 16);
        after = visit(i + 2);
        __syncwarp();
#pragma unroll
        for (int c = 0; c < C; c++) ks[c] = add_from<1>(add_from<2>(ks[c])), qs[c] = dot16(q, own.s[c]);
#pragma unroll
        for (int c = 0; c < C; c++) {
            results[c] = beta * fmaf(-fade, rk * ks[c], v[c]);
            results[C + c] = results[c] * rk;
        }
        if constexpr (!leaf.value)
#pragma unroll
            for (int c = 0; c < C; c++)
#pragma unroll
                for (int j = 0; j < 4; j++) own.s[c][j] = update_state(own.s[c][j], fade, k[j], results[C + c]);
        load_rows(k, b, next + MIX_K * 4);
        __syncwarp();
#pragma unroll
        for (int c = 0; c < C; c++)
            results[c] = fmaf(norms.z, results[c], fade * (norms.y * add_from<1>(add_from<2>(add_from<4>(qs[c])))));
        float mine = results[0];
#pragma unroll
        for (int c = 1; c < 2 * C; c++)
            if (result == c) mine = results[c];
        if (LANES_ARRIVE > 1) __syncwarp();  // for the race checker: all have read v before the sums above
        if (result < 2 * C) store_shared(row + to, __float_as_uint(mine));
        row = next;
    };
#pragma unroll 1
    for (int i = 0; i < b.nodes; i++) {
        take(i, Is<false>());
        if (followed >> i & 1) {
#pragma unroll 1
            while (leaves >> i >> 1 & 1) take(++i, Is<true>());
            if (kept >> i & 1) own.keep<C>(place(visit(i) >> 16 & 255));
            if (fetched >> i & 1) own.fetch<C>(place(visit(i + 1) >> 8 & 255));
        }
    }
}

// Weights of the norm: of a unit's eight columns.
struct UnitWeights {
    float4 v[2];
    __device__ __forceinline__ void load(const Block& b, const DeltaShare& share, int mine) {
        const float4* norm = (const float4*)(b.vectors + GATED_NORM_AT) + share.unit(mine) % 16 * 2;
        v[0] = __ldg(norm), v[1] = __ldg(norm + 1);
    }
};
// The unit's results, a lane a node.
__device__ __forceinline__ void write_results(const Block& b, int stage, const DeltaShare& share, int mine,
                                              const UnitWeights& weights) {
    __syncwarp();
    if (b.lane >= b.nodes) return;
    const int node = b.lane, unit = share.unit(mine), head = (share.first + mine) / 16 - share.head;
    const float* row = (const float*)b.scratch + node * MIX_ROW;
    const float4 *o = (const float4*)(row + MIX_V) + mine * 2, *z = (const float4*)(row + SILU_Z) + mine * 2,
                 *written = (const float4*)(row + WRITTEN) + mine * 2;
    const float4 o0 = o[0], o1 = o[1], z0 = z[0], z1 = z[1], weight[2] = {weights.v[0], weights.v[1]};
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
    DeltaColumns own = {};  // set: registers that are set on some paths only are live in the whole kernel
    UnitWeights weights = {};
#pragma unroll 1
    for (int item = b.sm; item < KEY_HEADS * KEY_PARTS || item == b.sm; item += SMS) {
        const DeltaShare share(item);
        b.sync();  // what the scratch holds may still be read
        const bool asked = POLLED && item == b.sm;  // by another warp, while the projection was made
        if (!asked) ask_inputs(b, share, threadIdx.x, CONSUMERS);
        own.load(b, share, SPLIT_UNITS || b.warp < share.units ? b.warp : 0);
        weights.load(b, share, b.warp < share.units ? b.warp : 0);
        if (!asked) b.sync();
        if (item == b.sm) b.mark();
        delta_projections(b, share, sums_of<HIDDEN_GROUPS>(b, stage, DELTA_ROWS));
        if (!asked) copies_done();
        b.sync();
        if (item == b.sm) b.mark();
        if constexpr (QK_SHARED)
            share_convolutions(b, stage + 1, share);
        else
            delta_convolutions(b, share);
        b.sync();
        if (item == b.sm) b.mark();
        if constexpr (SPLIT_UNITS) {
            if (own.count == 2) walk_states<2>(b, share, own);
            if (own.count == 1) walk_states<1>(b, share, own);
            b.sync();  // a unit may be two warps'
            if (b.warp < share.units) write_results(b, stage, share, b.warp, weights);
        } else {
#pragma unroll 1
            for (int mine = b.warp; mine < share.units; mine += WARPS) {
                if (mine != b.warp) own.load(b, share, mine), weights.load(b, share, mine);
                walk_states<2>(b, share, own);
                write_results(b, stage, share, mine, weights);
                if (b.decoding()) own.store();  // now that others need not wait for it
            }
        }
    }
    b.mark();
    if constexpr (!POLLED) {
        b.sync();  // who is done with its units does not poll beside those who are not
        norm_heads(b, stage + 1);
    }
    return b.steps_done;
}
