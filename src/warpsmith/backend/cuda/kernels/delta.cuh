// The Gated DeltaNet's mixer: convolution, norms, gates and the recurrence, spread over all SMs.
//
// Maths, per value head with state S [dk, dv]: S <- e^g S; S <- S + k (beta (v - k^T S))^T; o = q^T S; then
// o / rms(o) * weight * silu(z). Here k^T S and q^T S of the old state are taken together, which gives
// write = beta (v - f k^T S), o = f q^T S + (q^T k) write and S <- f S + k write, with f = e^g.
// A block is 16 columns of S (16 of a head's 128 value channels), two a warp: lane l holds S[4p .. 4p+3] and
// S[64 + 4p .. 64 + 4p+3] of column l / 16, p = l mod 16, in registers. q and k of the head are convolved and normalised by
// every block that needs them. The head's rms needs all 8 of its blocks: each publishes its sum of squares, the next
// stage divides. A node's state comes from its parent's: in registers along a chain, kept where the tree branches.
// Bytes: 8 KB of state a block read and written, 4 KB of convolution history.
// Scratch: rows (q, k [128], v or o, silu(z), write [16], fade, beta, q k) of every node; in a tree what came for it before that.
#pragma once
#include "block.cuh"

constexpr int K_ROW = STATE_DIM, V_ROW = 2 * STATE_DIM, Z_ROW = V_ROW + COLUMNS, WRITE_ROW = Z_ROW + COLUMNS,
              FADE_ROW = WRITE_ROW + COLUMNS;
constexpr int PIECES = RAW_FLOATS / 4;  // groups of four channels: q, k, v, z, the one with beta, the one with alpha

// The state's update, written once: forward and commit must agree to the bit.
__device__ __forceinline__ float4 update_state(float4 s, float fade, float4 k, float write) {
    return {fmaf(k.x, write, s.x * fade), fmaf(k.y, write, s.y * fade), fmaf(k.z, write, s.z * fade), fmaf(k.w, write, s.w * fade)};
}
__device__ __forceinline__ float dot4(float4 a, float4 b) { return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, a.w * b.w))); }

// Convolution and silu of four channels; `w[i]` are channel i's four taps, oldest first.
__device__ __forceinline__ float4 convolve(const float4 (&tap)[4], const float4 (&w)[4]) {
    float4 sum;
    sum.x = fmaf(w[0].w, tap[3].x, fmaf(w[0].z, tap[2].x, fmaf(w[0].y, tap[1].x, w[0].x * tap[0].x)));
    sum.y = fmaf(w[1].w, tap[3].y, fmaf(w[1].z, tap[2].y, fmaf(w[1].y, tap[1].y, w[1].x * tap[0].y)));
    sum.z = fmaf(w[2].w, tap[3].z, fmaf(w[2].z, tap[2].z, fmaf(w[2].y, tap[1].z, w[2].x * tap[0].z)));
    sum.w = fmaf(w[3].w, tap[3].w, fmaf(w[3].z, tap[2].w, fmaf(w[3].y, tap[1].w, w[3].x * tap[0].w)));
    return {silu(sum.x), silu(sum.y), silu(sum.z), silu(sum.w)};
}

// Where piece i of a block is among the rows of the projection.
__device__ __forceinline__ int piece_row(int block, int piece) {
    const int head = block / BLOCKS_PER_HEAD, key_head = head % KEY_HEADS, column0 = block * COLUMNS;
    constexpr int Q = STATE_DIM / 4, V = COLUMNS / 4;
    if (piece < Q) return key_head * STATE_DIM + piece * 4;
    if (piece < 2 * Q) return KEY_DIM + key_head * STATE_DIM + (piece - Q) * 4;
    if (piece < 2 * Q + V) return 2 * KEY_DIM + column0 + (piece - 2 * Q) * 4;
    if (piece < 2 * Q + 2 * V) return CONV_CHANNELS + column0 + (piece - 2 * Q - V) * 4;
    return CONV_CHANNELS + VALUE_DIM + ((piece == 2 * Q + 2 * V ? 0 : VALUE_HEADS) + head) / 4 * 4;
}
__device__ __forceinline__ float component(float4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// What one warp makes of the rows that came: q (warps 0 to 2), k (3 to 5) or the rest (6, 7: lanes 0-3 v, 4-7 z, 8 beta,
// 9 alpha), each of every third (second) node. What does not depend on the token is asked for before it comes.
struct DeltaRows {
    int kind, first_node, stride, piece;
    bool convolved;
    float4 w[4], past[3];  // of this lane's four channels; past[i]: i before the root
    float a, dt;           // of the head's gate

    __device__ DeltaRows(const Block& b, int block, const float* vectors, const float* history) {
        kind = b.warp / 3, stride = kind < 2 ? 3 : 2, first_node = b.warp - kind * 3;
        piece = kind * (STATE_DIM / 4) + b.lane;
        convolved = kind < 2 || b.lane < 4;
        const int head = block / BLOCKS_PER_HEAD;
        a = __ldg(vectors + A_AT + head), dt = __ldg(vectors + DT_AT + head);
        if (convolved) {
            const float* taps = vectors + CONV_AT + 4 * piece_row(block, piece);
#pragma unroll
            for (int i = 0; i < 4; i++) w[i] = __ldg((const float4*)taps + i);
#pragma unroll
            for (int i = 0; i < 3; i++)
                past[i] = *(const float4*)(history + (b.length - 1 - i + HISTORY) % HISTORY * BLOCK_CHANNELS + piece * 4);
        }
    }
    __device__ bool has_part(const Block& b) const { return first_node < b.nodes && (kind < 2 || b.lane < 10); }

    // `own` is what came for this lane's channels; `tap(age)` gives what came for the ancestor of that age; `place` is the
    // node's among everything a commit may need.
    template <class Tap>
    __device__ void make(const Block& b, int block, size_t place, float* row, float* keep, float4 own, Tap tap_of) const {
        float4 made = {};
        if (convolved) {
            const float4 tap[4] = {tap_of(3), tap_of(2), tap_of(1), own};
            made = convolve(tap, w);
            *(float4*)(keep + piece * 4) = own;
        }
        if (kind < 2) {
            const float scale = rsqrtf(warp_sum(dot4(made, made)) + 1e-6f) * (kind == 0 ? 0.08838834764831845f : 1.0f);
            made = {made.x * scale, made.y * scale, made.z * scale, made.w * scale};
            *(float4*)(row + piece * 4) = made;
            if (kind == 1 && !b.decoding()) *((float4*)(b.p.pending_key + place * STATE_DIM) + b.lane) = made;
        } else if (b.lane < 8) {
            *(float4*)(row + piece * 4) = b.lane < 4 ? made : float4{silu(own.x), silu(own.y), silu(own.z), silu(own.w)};
        } else {
            const int head = block / BLOCKS_PER_HEAD, at = (b.lane == 8 ? 0 : VALUE_HEADS) + head;
            const float raw = component(own, at % 4);
            const float gate = b.lane == 8 ? sigmoid(raw) : expf(a * softplus(raw + dt));
            row[FADE_ROW + (b.lane == 8)] = gate;
            if (b.lane == 9 && !b.decoding()) b.p.pending_fade[place] = gate;
        }
    }
};

__device__ __forceinline__ void delta_block(Block& b, int index, int block, const float* vectors) {
    float* rows = b.scratch + MIX_AT;               // [nodes][ROW_FLOATS]
    float* raw = rows + NODES * ROW_FLOATS;         // [nodes][RAW_FLOATS]
    const size_t at = (size_t)index * BLOCKS + block;
    const int column = b.warp * 2 + (b.lane >> 4), part = b.lane & 15;
    float4* state = (float4*)(b.p.delta + (at * COLUMNS + column) * STATE_DIM) + part;
    const float4 committed[2] = {state[0], state[16]};
    float* history = b.p.history + at * HISTORY * BLOCK_CHANNELS;
    float* pending = b.p.pending_raw + at * MAX_NODES * BLOCK_CHANNELS;
    const DeltaRows make(b, block, vectors, history);
    const u32* in = b.words(DELTA_TURN, 0, DELTA_IN_AT);

    if constexpr (NODES == 1) {
        if (make.has_part(b)) {
            const float4 own = poll16(in + piece_row(block, make.piece));
            float* keep = b.decoding() ? history + b.length % HISTORY * BLOCK_CHANNELS : pending;
            make.make(b, block, at * MAX_NODES, rows, keep, own, [&](int age) { return make.past[age - 1]; });
        }
    } else {
        b.sync();  // the scratch still holds partial sums
        // A warp fetches every eighth node: q, k, and the rest.
        const u32* from[3];
#pragma unroll
        for (int kind = 0; kind < 3; kind++) from[kind] = in + piece_row(block, min(kind * 32 + b.lane, PIECES - 1));
        constexpr int AT_ONCE = larger(1, smaller(4, NODES / WARPS));
#pragma unroll 1
        for (int base = b.warp; base < b.nodes; base += AT_ONCE * WARPS) {
            uint4 got[AT_ONCE][3];
            Watchdog dog;
            bool came;
            do {
                came = true;
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
                    for (int kind = 0; kind < 3; kind++)
                        got[i][kind] = load16(from[kind] + min(base + i * WARPS, b.nodes - 1) * NODE_WORDS);
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
                    for (int kind = 0; kind < 3; kind++) came &= came16(got[i][kind]);
                dog.check();
            } while (!everywhere(came));
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
                for (int kind = 0; kind < 3; kind++)
                    if (base + i * WARPS < b.nodes && kind * 32 + b.lane < PIECES)
                        *(uint4*)(raw + (base + i * WARPS) * RAW_FLOATS + (kind * 32 + b.lane) * 4) = got[i][kind];
        }
        b.sync();
        if (make.has_part(b)) {
#pragma unroll 2
            for (int node = make.first_node; node < b.nodes; node += make.stride) {
                float* keep = b.decoding() ? history + b.length % HISTORY * BLOCK_CHANNELS : pending + node * BLOCK_CHANNELS;
                const float* mine = raw + make.piece * 4;
                make.make(b, block, at * MAX_NODES + node, rows + node * ROW_FLOATS, keep, *(const float4*)(mine + node * RAW_FLOATS), [&](int age) {
                    const int source = b.s.path[node][age];
                    return source >= 0    ? *(const float4*)(mine + source * RAW_FLOATS)
                           : source == -1 ? make.past[0]
                           : source == -2 ? make.past[1]
                                          : make.past[2];
                });
            }
        }
    }
    b.mark();
    b.sync();
    b.mark();

    // q k of a node, by sixteen lanes. In a tree it is made ahead, to keep the recurrence short.
    const auto key_product = [&](float4 q0, float4 q1, float4 k0, float4 k1) {
        float qk = dot4(q0, k0) + dot4(q1, k1);
#pragma unroll
        for (int step = 1; step < 16; step *= 2) qk += __shfl_xor_sync(~0u, qk, step);
        return qk;
    };
    if (NODES > 1) {
#pragma unroll 1
        for (int first = b.warp * 2; first < b.nodes; first += 2 * WARPS) {
            float* row = rows + min(first + (b.lane >> 4), b.nodes - 1) * ROW_FLOATS;
            const float4 *q = (const float4*)row + part, *k = (const float4*)(row + K_ROW) + part;
            const float qk = key_product(q[0], q[16], k[0], k[16]);
            if (part == 0) row[FADE_ROW + 2] = qk;
        }
        b.sync();
    }

    // The recurrence. The next node's row is on its way while one is worked on (past the last it is not looked at).
    struct Row {
        float4 q0, q1, k0, k1;
        float2 gates;  // fade, beta
        float v, qk;
        int2 family;
    } next;
    float* row = rows;
    const auto fetch = [&](const float* from, int node) {
        const float4 *q = (const float4*)from + part, *k = (const float4*)(from + K_ROW) + part;
        next.q0 = q[0], next.q1 = q[16], next.k0 = k[0], next.k1 = k[16];
        next.gates = *(const float2*)(from + FADE_ROW), next.v = from[V_ROW + column];
        if (NODES > 1) next.qk = from[FADE_ROW + 2], next.family = b.s.family[node];
    };
    const float weight = __ldg(vectors + GATED_NORM_AT + (block * COLUMNS + (threadIdx.x & 15)) % STATE_DIM);
    float4 s[2] = {committed[0], committed[1]};
    fetch(row, 0);
#pragma unroll 2
    for (int node = 0; node < b.nodes; node++) {
        const Row now = next;
        float* mine = row;
        row += ROW_FLOATS;
        if (NODES > 1) fetch(row, min(node + 1, NODES - 1));
        if (NODES > 1 && now.family.x != node - 1) {
            const float4* kept = now.family.x < 0 ? nullptr : b.kept_state(b.s.family[now.family.x].y, block);
            s[0] = now.family.x < 0 ? committed[0] : kept[threadIdx.x];
            s[1] = now.family.x < 0 ? committed[1] : kept[CONSUMERS + threadIdx.x];
        }
        float ks = dot4(now.k0, s[0]) + dot4(now.k1, s[1]), qs = dot4(now.q0, s[0]) + dot4(now.q1, s[1]);
#pragma unroll
        for (int step = 1; step < 16; step *= 2) {
            ks += __shfl_xor_sync(~0u, ks, step);
            qs += __shfl_xor_sync(~0u, qs, step);
        }
        const float qk = NODES > 1 ? now.qk : key_product(now.q0, now.q1, now.k0, now.k1);
        const float fade = now.gates.x, write = now.gates.y * (now.v - fade * ks);
        s[0] = update_state(s[0], fade, now.k0, write);
        s[1] = update_state(s[1], fade, now.k1, write);
        __syncwarp();  // v has been read
        if (part == 0) mine[V_ROW + column] = fmaf(qk, write, fade * qs), mine[WRITE_ROW + column] = write;
        if (NODES > 1 && now.family.y >= 0) {
            float4* keep = b.kept_state(now.family.y, block);
            keep[threadIdx.x] = s[0], keep[CONSUMERS + threadIdx.x] = s[1];
        }
    }
    if (b.decoding()) state[0] = s[0], state[16] = s[1];
    b.mark();
    b.sync();
    b.mark();

    // Gate and publish: sixteen lanes a node.
#pragma unroll 1
    for (int first = 0; first < b.nodes; first += CONSUMERS / COLUMNS) {
        const int node = first + threadIdx.x / COLUMNS, mine = threadIdx.x & 15;
        if (first + b.warp * 2 >= b.nodes) break;
        const bool live = node < b.nodes;
        const float* made = rows + min(node, b.nodes - 1) * ROW_FLOATS;
        const float out = made[V_ROW + mine], gated = out * weight * made[Z_ROW + mine];
        if (live && !b.decoding()) b.p.pending_write[(at * MAX_NODES + node) * COLUMNS + mine] = made[WRITE_ROW + mine];
        float square = out * out;
#pragma unroll
        for (int step = 1; step < COLUMNS; step *= 2) square += __shfl_xor_sync(~0u, square, step);
        const u32 pair = pack_bf16(gated, __shfl_down_sync(~0u, gated, 1)), next = __shfl_down_sync(~0u, pair, 2);
        if (live && mine % 4 == 0)
            publish8(b.words(DELTA_TURN, node, DELTA_Y_AT) + (block * COLUMNS + mine) / 2, b.other(DELTA_TURN), pair, next);
        if (live && mine == 1)
            publish4(b.words(DELTA_TURN, node, DELTA_SQUARES_AT) + block, b.other(DELTA_TURN), __float_as_uint(square));
    }
}

// Stage: every block of the layer that this SM has.
__device__ __forceinline__ void delta_mix(Block& b, int index, const float* vectors) {
    const int first = first_unit(BLOCKS, b.sm), end = first_unit(BLOCKS, b.sm + 1);
#pragma unroll 1
    for (int block = first; block < end; block++) {
        if (NODES == 1 && block > first) b.sync();  // rows of the block before
        delta_block(b, index, block, vectors);
    }
    if (NODES > 1) b.sync();  // partial sums take the rows' place
}
