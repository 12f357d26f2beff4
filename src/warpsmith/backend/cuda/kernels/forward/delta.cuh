// The Gated DeltaNet's mixer: norms of q and k and the recurrence, spread over all SMs.
//
// Maths, per value head with state S [dk, dv] and row tile vectors q (times dk^-0.5) and k: S <- e^g S;
// S <- S + k (beta (v - k^T S))^T; o = q^T S; then o / rms(o) * weight * silu(z). Here products with q and k are taken
// before they are normalised, all of the old state, so that nothing waits for the norms: with f = e^g, rq = 1 / |q|, rk
// = 1 / |k|, write = beta (v - f rk k^T S), o = f rq q^T S + rq rk (q^T k) write and S <- f S + k (rk write). A block
// is 16 columns of S (16 of a head's 128 value channels). The sum over a column's 128 rows goes by sixteen parts (part
// p: rows 4p .. 4p+3 and 64 + 4p .. 64 + 4p+3), neighbours first; who adds them up does not matter for the bits. One
// node: a warp has two columns, a lane a part; q and k come straight into registers. A tree: two warps are a worker and
// have all columns, a lane two parts of two of them, so that q and k once taken from shared memory serve both; four
// workers walk chains of the tree at the same time, and start when the rows they need are there. A node's state comes
// from its parent's: in registers along a chain, kept where a chain branches off. The head's rms needs all 8 of its
// blocks: each publishes its sum of squares, the next stage divides. Bytes: 8 KB of state a block read and written.
// Scratch: one node: gated outputs and their squares [2][16]. A tree: a row a node (q, k, v, silu(z), write, o, gates).
#pragma once
#include "forward/block.cuh"

constexpr float QUERY_SCALE = 0.08838834764831845f;  // 128 ** -0.5
constexpr int K_ROW = STATE_DIM, V_ROW = 2 * STATE_DIM, Z_ROW = V_ROW + COLUMNS, WRITE_ROW = Z_ROW + COLUMNS,
              OUT_ROW = WRITE_ROW + COLUMNS, GATES_ROW = OUT_ROW + COLUMNS;  // fade, beta, rk, rq, rq rk q^T k

// The state's update, written once: forward and commit must agree to the bit.
__device__ __forceinline__ float4 update_state(float4 s, float fade, float4 k, float write) {
    return {fmaf(k.x, write, s.x * fade), fmaf(k.y, write, s.y * fade), fmaf(k.z, write, s.z * fade),
            fmaf(k.w, write, s.w * fade)};
}
__device__ __forceinline__ float dot4(float4 a, float4 b) {
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, a.w * b.w)));
}
__device__ __forceinline__ float inverse_norm(float square) { return inverse_root(square + 1e-6f); }

// Where a block's rows are in the projection.
struct DeltaPlaces {
    int q, k, v, z, beta, fade;
    __device__ explicit DeltaPlaces(int block) {
        const int head = block / BLOCKS_PER_HEAD, key_head = head % KEY_HEADS;
        q = key_head * STATE_DIM, k = KEY_DIM + q;
        v = 2 * KEY_DIM + block * COLUMNS, z = CONV_CHANNELS + block * COLUMNS;
        beta = CONV_CHANNELS + VALUE_DIM + head, fade = beta + VALUE_HEADS;
    }
};

// A key is the same for every block of the heads that share it: one of them keeps it for `commit`.
__device__ __forceinline__ float4* pending_key(const Block& b, int index, int block, int node) {
    if (b.decoding() || block % BLOCKS_PER_HEAD || block / BLOCKS_PER_HEAD >= KEY_HEADS) return nullptr;
    return (float4*)(b.p.pending_key +
                     (((size_t)index * KEY_HEADS + block / BLOCKS_PER_HEAD) * MAX_NODES + node) * STATE_DIM);
}

// What a column makes of its sums over the old state.
struct Outcome {
    float write, out;
    __device__ Outcome(float ks, float qs, float v, float fade, float beta, float rk, float rq, float qk)
        : write(beta * fmaf(-fade, rk * ks, v)), out(fmaf(qk, write, fade * (rq * qs))) {}
};

// --- one node -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void delta_one(Block& b, int index, int block, const float* vectors) {
    const size_t at = (size_t)index * BLOCKS + block;
    const int column = b.warp * 2 + (b.lane >> 4), part = b.lane & 15;
    float4* state = (float4*)(b.p.delta + (at * COLUMNS + column) * STATE_DIM) + part;
    float4 s0 = state[0], s1 = state[16];
    const float weight = __ldg(vectors + DELTA_MIX_NORM + (block * COLUMNS + column) % STATE_DIM);
    const u32* in = b.words(DELTA_PHASE, 0, DELTA_IN_AT);
    const DeltaPlaces places(block);
    uint4 got[4];  // q and k of this part
    u32 v, z, beta, fade;
    Watchdog dog;
    bool came;
    do {
        got[0] = load16(in + places.q + part * 4), got[1] = load16(in + places.q + 64 + part * 4);
        got[2] = load16(in + places.k + part * 4), got[3] = load16(in + places.k + 64 + part * 4);
        v = load4(in + places.v + column), z = load4(in + places.z + column);
        beta = load4(in + places.beta), fade = load4(in + places.fade);
        came = v != NOT_YET & z != NOT_YET & beta != NOT_YET & fade != NOT_YET;
#pragma unroll
        for (int i = 0; i < 4; i++) came &= came16(got[i]);
        dog.check();
    } while (!everywhere(came));
    b.mark();
    const float4 q0 = floats(got[0]), q1 = floats(got[1]), k0 = floats(got[2]), k1 = floats(got[3]);
    float sum[5] = {dot4(k0, s0) + dot4(k1, s1), dot4(k0, k0) + dot4(k1, k1), dot4(q0, s0) + dot4(q1, s1),
                    dot4(q0, q0) + dot4(q1, q1), dot4(q0, k0) + dot4(q1, k1)};
#pragma unroll
    for (int step = 1; step < 16; step *= 2)
#pragma unroll
        for (int i = 0; i < 5; i++) sum[i] += __shfl_xor_sync(~0u, sum[i], step);
    const float f = __uint_as_float(fade), rk = inverse_norm(sum[1]), rq = inverse_norm(sum[3]) * QUERY_SCALE;
    const Outcome made(sum[0], sum[2], __uint_as_float(v), f, __uint_as_float(beta), rk, rq, sum[4] * rq * rk);
    const float write = made.write * rk;
    float* outs = b.scratch + MIX_AT;
    if (part == 0) outs[column] = made.out * weight * __uint_as_float(z), outs[COLUMNS + column] = made.out * made.out;
    b.mark();
    b.sync();
    b.mark();
    if (b.warp == 0) {
        const int mine = b.lane & 15;
        const float gated = outs[mine];
        float square = outs[COLUMNS + mine];
#pragma unroll
        for (int step = 1; step < COLUMNS; step *= 2) square += __shfl_xor_sync(~0u, square, step);
        const u32 pair = pack_bf16(gated, __shfl_down_sync(~0u, gated, 1)), next = __shfl_down_sync(~0u, pair, 2);
        if (b.lane < COLUMNS && mine % 4 == 0)
            publish8(b.value<DeltaOutput>(DELTA_PHASE, 0, DELTA_VALUES_AT, block * COLUMNS + mine),
                     b.other(DELTA_PHASE), pair, next);
        if (b.lane == 1)
            publish4(b.square<DeltaOutput>(DELTA_PHASE, 0, DELTA_SQUARES_AT, block), b.other(DELTA_PHASE),
                     __float_as_uint(square));
    }
    // What nobody waits for comes last.
    if (b.decoding()) {
        state[0] = update_state(s0, f, k0, write), state[16] = update_state(s1, f, k1, write);
    } else {
        if (float4* key = pending_key(b, index, block, 0); key && b.warp == 0 && b.lane < 16)
            key[part] = k0, key[part + 16] = k1;
        if (part == 0) b.p.pending_write[at * MAX_NODES * COLUMNS + column] = write;
        if (column == 0 && part == 0) b.p.pending_fade[at * MAX_NODES] = f;
    }
}

// --- a tree ---------------------------------------------------------------------------------------------------------

// The phase of the barriers for this block.
__device__ __forceinline__ u32 block_phase(const Block& b) { return b.phase(BLOCK_PHASE) ^ 1; }

// Rows, node tile by node tile, a warp two nodes: the first four warps have the first node tile and can start with it,
// the others the rest. In registers: q, k, and in lanes 0-3 v, 4-7 z, 8 the group with beta, 9 the one with fade.
__device__ __forceinline__ void fetch_rows(Block& b, int index, int block, float* rows) {
    constexpr int AT_ONCE = 8 / FETCHERS;
    const DeltaPlaces places(block);
    const int lane = min(b.lane, 9), last = lane < 4    ? places.v + lane * 4
                                            : lane < 8  ? places.z + (lane - 4) * 4
                                            : lane == 8 ? places.beta / 4 * 4
                                                        : places.fade / 4 * 4;
    const int from[3] = {places.q + b.lane * 4, places.k + b.lane * 4, last};
    const int team = b.warp / FETCHERS, mine = b.warp % FETCHERS, end = team == 0 ? min(8, b.nodes) : b.nodes;
#pragma unroll 1
    for (int first = team * 8; first < end; first += 8) {
        uint4 got[AT_ONCE][3];
        Watchdog dog;
        bool came;
        do {
            came = true;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
                for (int kind = 0; kind < 3; kind++)
                    got[i][kind] = load16(
                        b.words(DELTA_PHASE, min(first + mine + i * FETCHERS, b.nodes - 1), DELTA_IN_AT + from[kind]));
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
                for (int kind = 0; kind < 3; kind++) came &= came16(got[i][kind]);
            dog.check();
        } while (!everywhere(came));
        float kk[AT_ONCE], qq[AT_ONCE], qk[AT_ONCE], value[AT_ONCE];  // lane 8: beta, 9: fade
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const float4 q = floats(got[i][0]), k = floats(got[i][1]);
            kk[i] = dot4(k, k), qq[i] = dot4(q, q), qk[i] = dot4(q, k);
        }
#pragma unroll
        for (int step = 16, n = 0; n < 5; n++, step = step == 16 ? 1 : 2 * step)
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                kk[i] += __shfl_xor_sync(~0u, kk[i], step);
                qq[i] += __shfl_xor_sync(~0u, qq[i], step);
                qk[i] += __shfl_xor_sync(~0u, qk[i], step);
            }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int node = first + mine + i * FETCHERS;
            if (node >= b.nodes) break;
            const float4 q = floats(got[i][0]), k = floats(got[i][1]), rest = floats(got[i][2]);
            const float rk = inverse_norm(kk[i]), rq = inverse_norm(qq[i]) * QUERY_SCALE;
            float* row = rows + node * ROW_FLOATS;
            ((float4*)row)[b.lane] = q;
            ((float4*)(row + K_ROW))[b.lane] = k;
            if (b.lane < 8) ((float4*)(row + V_ROW))[b.lane] = rest;
            const int gate = (b.lane == 8 ? places.beta : places.fade) % 4;
            value[i] = gate == 0 ? rest.x : gate == 1 ? rest.y : gate == 2 ? rest.z : rest.w;
            if (b.lane == 8) row[GATES_ROW + 1] = value[i], row[GATES_ROW + 2] = rk;
            if (b.lane == 9) row[GATES_ROW] = value[i], row[GATES_ROW + 3] = rq, row[GATES_ROW + 4] = qk[i] * rq * rk;
        }
        arrive_for_warp(b.barriers.rows + first);  // eight bytes a node tile
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {  // for `commit`
            const int node = first + mine + i * FETCHERS;
            if (node >= b.nodes) break;
            if (float4* key = pending_key(b, index, block, node)) key[b.lane] = floats(got[i][1]);
            if (b.lane == 9) b.p.pending_fade[((size_t)index * BLOCKS + block) * MAX_NODES + node] = value[i];
        }
    }
}

// A row as a lane needs it: q and k of its two parts (their first halves, then their second), the gates, v of its
// column.
struct Row {
    float4 q[4], k[4], gates;
    float qk, v;
    __device__ __forceinline__ Row(const float* row, int parts, int column) {
        const float4 *q_row = (const float4*)row + parts, *k_row = (const float4*)(row + K_ROW) + parts;
#pragma unroll
        for (int i = 0; i < 4; i++) k[i] = k_row[place(i)], q[i] = q_row[place(i)];
        gates = *(const float4*)(row + GATES_ROW), qk = row[GATES_ROW + 4], v = row[V_ROW + column];
    }
    static __device__ constexpr int place(int i) { return i % 2 + i / 2 * 16; }
};
// A lane's share of a column's sum.
__device__ __forceinline__ float two_parts(const float4 (&a)[4], const float4 (&s)[4]) {
    return (dot4(a[0], s[0]) + dot4(a[2], s[2])) + (dot4(a[1], s[1]) + dot4(a[3], s[3]));
}

// A lane's part, every 64, of the state a node keeps for its children: in shared memory as long as there is room. `use`
// is compiled for both kinds of memory.
template <class Use>
__device__ __forceinline__ void with_kept_state(const Block& b, int place, int block, Use use) {
    const int mine = b.warp % 2 * 32 + b.lane;
    if (place < KEPT_STATES)
        use((float4*)(b.scratch + (MIX_AT + DELTA_FLOATS) + place * STATE_FLOATS) + mine);
    else
        use((float4*)(b.p.branch_state + ((size_t)block * MAX_NODES + place) * STATE_FLOATS) + mine);
}

// Of a lane's two columns.
__device__ __forceinline__ float2 gated_norm(int block, const float* vectors) {
    return __ldg((const float2*)(vectors + DELTA_MIX_NORM + block * COLUMNS % STATE_DIM) + threadIdx.x % 8);
}
// Gate and publish four nodes: eight lanes a node, two columns each.
__device__ __forceinline__ void publish_nodes(const Block& b, int index, int block, const float* rows, int first,
                                              float2 weight) {
    const int node = first + b.lane / 8, mine = b.lane % 8;
    const bool live = node < b.nodes;
    const float* made = rows + min(node, b.nodes - 1) * ROW_FLOATS + mine * 2;
    const float2 out = *(const float2*)(made + OUT_ROW), z = *(const float2*)(made + Z_ROW);
    const float2 write = *(const float2*)(made + WRITE_ROW);
    const u32 pair = pack_bf16(out.x * weight.x * z.x, out.y * weight.y * z.y), after = __shfl_down_sync(~0u, pair, 1);
    float square = out.x * out.x + out.y * out.y;  // not fused: one node's are not
#pragma unroll
    for (int step = 1; step < 8; step *= 2) square += __shfl_xor_sync(~0u, square, step);
    if (live && mine % 2 == 0)
        publish8(b.value<DeltaOutput>(DELTA_PHASE, node, DELTA_VALUES_AT, block * COLUMNS + mine * 2),
                 b.other(DELTA_PHASE), pair, after);
    if (live && mine == 1)
        publish4(b.square<DeltaOutput>(DELTA_PHASE, node, DELTA_SQUARES_AT, block), b.other(DELTA_PHASE),
                 __float_as_uint(square));
    const size_t at = (size_t)index * BLOCKS + block;
    if (live) ((float2*)b.p.pending_write)[(at * MAX_NODES + node) * (COLUMNS / 2) + mine] = write;
}

__device__ __forceinline__ void delta_tree(Block& b, int index, int block, const float* vectors) {
    float* rows = b.scratch + MIX_AT;  // [nodes][ROW_FLOATS]
    const size_t at = (size_t)index * BLOCKS + block;
    // A lane has two columns, its own and its neighbour's across four lanes, which has them the other way round.
    const int worker = b.warp / 2, half = b.warp % 2, parts = b.lane / 4 * 2;
    const int column = half * 8 + b.lane % 4 * 2 + (b.lane >> 2 & 1);
    float4 s[2][4];
#pragma unroll
    for (int c = 0; c < 2; c++) {
        const float4* committed = (const float4*)(b.p.delta + (at * COLUMNS + (column ^ c)) * STATE_DIM) + parts;
#pragma unroll
        for (int i = 0; i < 4; i++) s[c][i] = worker == 0 ? committed[Row::place(i)] : float4{};  // the root's
    }
    const float2 weight = HELPED ? float2{} : gated_norm(block, vectors);
    b.sync();  // the scratch held partial sums
    b.phases ^= BLOCK_PHASE;
    fetch_rows(b, index, block, rows);
    b.mark();
    int node = b.s.first[worker], come = 0;
    const auto wait_for_row = [&](int wanted) {
        if (wanted < come) return;
        barrier_wait(b.barriers.rows + wanted / 8 * 8, block_phase(b));
        come = wanted / 8 * 8 + 8;
    };
    Step next = b.s.steps[max(node, 0)];
    wait_for_row(max(node, 0));
    b.mark();
    Row coming(rows + max(node, 0) * ROW_FLOATS, parts, column);
#pragma unroll 2
    while (node >= 0) {
        const Step step = next;
        const Row row = coming;
        const int done = node;
        float* mine = rows + done * ROW_FLOATS;
        node = step.next;
        next = b.s.steps[max(node, 0)];
        wait_for_row(node);
        if (step.source >= 0) {  // a chain branches off, perhaps from another worker's
            barrier_wait(b.barriers.kept + 8 * (step.source * WORKER_WARPS + half), block_phase(b));
            with_kept_state(b, step.source, block, [&](const float4* from) {
#pragma unroll
                for (int i = 0; i < 4; i++) s[0][i] = from[i * 64], s[1][i] = from[(i + 4) * 64];
            });
        }
        float ks = two_parts(row.k, s[0]), qs = two_parts(row.q, s[0]);
        ks += __shfl_xor_sync(~0u, two_parts(row.k, s[1]), 4), qs += __shfl_xor_sync(~0u, two_parts(row.q, s[1]), 4);
        ks += __shfl_xor_sync(~0u, ks, 8), qs += __shfl_xor_sync(~0u, qs, 8);
        ks += __shfl_xor_sync(~0u, ks, 16), qs += __shfl_xor_sync(~0u, qs, 16);
        const float fade = row.gates.x, rk = row.gates.z;
        const Outcome made(ks, qs, row.v, fade, row.gates.y, rk, row.gates.w, row.qk);
        const float write[2] = {made.write * rk, __shfl_xor_sync(~0u, made.write * rk, 4)};
        // The next node's row comes while the state is updated. Asked for before the products, it would be waited for
        // there.
        coming = Row(rows + max(node, 0) * ROW_FLOATS, parts, column);
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[c][i] = update_state(s[c][i], fade, row.k[i], write[c]);
        if (step.keep >= 0) {
            with_kept_state(b, step.keep, block, [&](float4* to) {
#pragma unroll
                for (int i = 0; i < 4; i++) to[i * 64] = s[0][i], to[(i + 4) * 64] = s[1][i];
            });
            arrive_for_warp(b.barriers.kept + 8 * (step.keep * WORKER_WARPS + half));
        }
        if (b.lane < 8) mine[OUT_ROW + column] = made.out, mine[WRITE_ROW + column] = write[0];
        if (HELPED) arrive_for_warp(b.barriers.nodes + 8 * (done / 4));
    }
    b.mark();
    if constexpr (HELPED) {  // partial sums take the rows' place
        barrier_wait(b.barriers.published, block_phase(b));
        b.mark();
        return;
    }
    b.sync();
    b.mark();
#pragma unroll 1
    for (int first = b.warp * 4; first < b.nodes; first += WARPS * 4)
        publish_nodes(b, index, block, rows, first, weight);
}

// Stage: every block of the layer that this SM has.
__device__ __forceinline__ void delta_mix(Block& b, int index, const float* vectors) {
    const int first = first_of(BLOCKS, b.sm), end = first_of(BLOCKS, b.sm + 1);
#pragma unroll 1
    for (int block = first; block < end; block++) {
        if (block > first) b.sync();  // outputs of the block before
        if constexpr (NODES == 1)
            delta_one(b, index, block, vectors);
        else
            delta_tree(b, index, block, vectors);
    }
    if (NODES > 1 && !HELPED) b.sync();  // partial sums take the rows' place
}
