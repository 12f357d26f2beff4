// The Gated DeltaNet's mixer.
//
// Maths, per value head with state S [dk, dv], f = e^g, rq = dk^-0.5 / |q|, rk = 1 / |k| and q, k, v after the
// convolution and silu: write = beta (v - f rk k^T S), o = f rq q^T S + rq rk (q^T k) write, S <- f S + k (rk write); y
// = o weight silu(z), and the sum of squares of o, by which the next projection divides. A unit is 8 columns of S (8 of
// a head's 128 value channels), a warp's work: a lane has four rows of them in registers. Units are dealt to SMs in
// order, so an SM has units of few heads; it convolves and norms their q and k itself, for all nodes. A node's state
// follows from its parent's: in registers if that was the last one walked, else from memory, where a state that is
// needed again is kept (the order: `prepare_walk`). Bytes: 4 KB of state a unit read, and written when decoding.
#pragma once
#include "large/steps.cuh"

constexpr float QUERY_SCALE = 0.08838834764831845f;  // 128 ** -0.5

// Shared memory: rows [node][MIX_ROW]: inputs before the convolution | after it | silu(z) | gates of each head.
constexpr int AFTER = MIX_CHANNELS, SILU_Z = 2 * MIX_CHANNELS, GATES = SILU_Z + OWN_UNITS * 8;
enum Gate { FADE, BETA, RK, RQ, QK };

__device__ __forceinline__ float4 update_state(float4 s, float fade, float4 k, float write) {
    return {fmaf(k.x, write, s.x * fade), fmaf(k.y, write, s.y * fade), fmaf(k.z, write, s.z * fade),
            fmaf(k.w, write, s.w * fade)};
}
__device__ __forceinline__ float dot4(float4 a, float4 b) {
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, a.w * b.w)));
}

// Which rows of the projection this SM's channels are: q and k of every head it has a unit of, then v of its units.
struct DeltaShare {
    int first, units, head, heads;
    __device__ explicit DeltaShare(int sm) {
        first = first_of(MIX_UNITS, sm), units = first_of(MIX_UNITS, sm + 1) - first;
        head = first / 16, heads = units ? (first + units - 1) / 16 - head + 1 : 0;
    }
    __device__ int channels() const { return heads * 2 * STATE_DIM + units * 8; }
    __device__ int row(int channel) const {
        const int in_heads = heads * 2 * STATE_DIM;
        if (channel >= in_heads) return 2 * KEY_DIM + first * 8 + channel - in_heads;
        const int key_head = (head + channel / (2 * STATE_DIM)) % KEY_HEADS, in = channel % (2 * STATE_DIM);
        return (in < STATE_DIM ? 0 : KEY_DIM - STATE_DIM) + key_head * STATE_DIM + in;
    }
    // One SM keeps a channel for later: v belongs to who has it, q and k to who has the first unit of the first head
    // that reads them.
    __device__ bool keeps(int channel) const {
        if (channel >= heads * 2 * STATE_DIM) return true;
        const int mine = head + channel / (2 * STATE_DIM);
        return mine < KEY_HEADS && mine * 16 >= first;
    }
};

// Projections, convolution, gates. A thread has four channels at a time.
__device__ __forceinline__ void delta_inputs(Block& b, const DeltaShare& share) {
    float* rows = (float*)b.scratch;
    const Sums<HIDDEN_GROUPS> sums(b, DELTA_ROWS);
    const int quads = share.channels() / 4, z_quads = share.units * 2;
    const float* history = b.p.history + (size_t)b.deltas * HISTORY * CONV_CHANNELS;
#pragma unroll 4
    for (int i = threadIdx.x; i < (quads + z_quads) * b.nodes; i += CONSUMERS) {
        const int node = i / (quads + z_quads), quad = i - node * (quads + z_quads), channel = quad * 4;
        const bool is_z = quad >= quads;
        const int row = is_z ? Z_AT + share.first * 8 + (quad - quads) * 4 : share.row(channel);
        const float4 raw = sums.at(node, row);
        float* own = rows + node * MIX_ROW;
        if (is_z) {
            *(float4*)(own + SILU_Z + (quad - quads) * 4) = {silu(raw.x), silu(raw.y), silu(raw.z), silu(raw.w)};
        } else {
            *(float4*)(own + channel) = raw;
            if (share.keeps(channel)) {
                float* to = b.decoding()
                                ? b.p.history + ((size_t)b.deltas * HISTORY + b.length % HISTORY) * CONV_CHANNELS
                                : b.p.pending_raw + ((size_t)b.deltas * MAX_NODES + node) * CONV_CHANNELS;
                *(float4*)(to + row) = raw;
            }
        }
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < share.heads * b.nodes; i += CONSUMERS) {
        const int mine = i % share.heads, node = i / share.heads, head = share.head + mine;
        float* gates = rows + node * MIX_ROW + GATES + mine * 8;
        const auto one = [&](int row) {
            const float4 v = sums.at(node, row / 4 * 4);
            return row % 4 == 0 ? v.x : row % 4 == 1 ? v.y : row % 4 == 2 ? v.z : v.w;
        };
        const float beta = one(GATES_AT + head),
                    alpha = one(GATES_AT + VALUE_HEADS + head) + __ldg(b.vectors + DT_AT + head);
        gates[BETA] = sigmoid(beta);
        gates[FADE] = exponential(__ldg(b.vectors + A_AT + head) * softplus(alpha));
    }
    b.sync();
#pragma unroll 2
    for (int i = threadIdx.x; i < quads * b.nodes; i += CONSUMERS) {
        const int node = i / quads, channel = (i - node * quads) * 4, row = share.row(channel);
        const float4* conv = (const float4*)(b.vectors + CONV_AT) + row;
        const float4 w[4] = {__ldg(conv), __ldg(conv + 1), __ldg(conv + 2), __ldg(conv + 3)};
        float4 x[4];
#pragma unroll
        for (int age = 0; age < 4; age++) {
            const int source = b.s.path[node][age];
            x[age] =
                source >= 0
                    ? *(const float4*)(rows + source * MIX_ROW + channel)
                    : __ldcg((const float4*)(history + (b.length + source + HISTORY) % HISTORY * CONV_CHANNELS + row));
        }
        const auto mixed = [&](float4 w, float x0, float x1, float x2, float x3) {
            return silu(fmaf(w.w, x0, fmaf(w.z, x1, fmaf(w.y, x2, w.x * x3))));
        };
        *(float4*)(rows + node * MIX_ROW + AFTER + channel) = {
            mixed(w[0], x[0].x, x[1].x, x[2].x, x[3].x), mixed(w[1], x[0].y, x[1].y, x[2].y, x[3].y),
            mixed(w[2], x[0].z, x[1].z, x[2].z, x[3].z), mixed(w[3], x[0].w, x[1].w, x[2].w, x[3].w)};
    }
    b.sync();
#pragma unroll 1
    for (int i = b.warp; i < share.heads * b.nodes; i += WARPS) {
        const int mine = i % share.heads, node = i / share.heads;
        float* row = rows + node * MIX_ROW;
        const float4 q = ((const float4*)(row + AFTER + mine * 2 * STATE_DIM))[b.lane];
        const float4 k = ((const float4*)(row + AFTER + mine * 2 * STATE_DIM + STATE_DIM))[b.lane];
        const float qq = warp_sum(dot4(q, q)), kk = warp_sum(dot4(k, k)), qk = warp_sum(dot4(q, k));
        const float rq = inverse_root(qq + 1e-6f) * QUERY_SCALE, rk = inverse_root(kk + 1e-6f);
        if (b.lane == 0) {
            float* gates = row + GATES + mine * 8;
            gates[RK] = rk, gates[RQ] = rq, gates[QK] = qk * rq * rk;
        }
        if (!b.decoding() && share.keeps(mine * 2 * STATE_DIM)) {
            const size_t at = ((size_t)b.deltas * KEY_HEADS + share.head + mine) * MAX_NODES + node;
            ((float4*)(b.p.pending_key + at * STATE_DIM))[b.lane] = k;
        }
    }
    b.sync();
}

// Sums over the 32 lanes of 2 COUNT numbers each: a lane keeps half of them and gives the others away, and so on.
template <int COUNT>
__device__ __forceinline__ void keep_half(float (&v)[16], int lane) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const bool upper = lane & 2 * COUNT;
        const float give = upper ? v[i] : v[i + COUNT], keep = upper ? v[i + COUNT] : v[i];
        v[i] = keep + __shfl_xor_sync(~0u, give, 2 * COUNT);
    }
}
// Of sixteen numbers; lane l gets the one with index l / 2.
__device__ __forceinline__ float sum_sixteen(float (&v)[16], int lane) {
    keep_half<8>(v, lane);
    keep_half<4>(v, lane);
    keep_half<2>(v, lane);
    keep_half<1>(v, lane);
    return v[0] + __shfl_xor_sync(~0u, v[0], 1);
}

__device__ __forceinline__ void delta_unit(Block& b, const DeltaShare& share, int mine) {
    float* rows = (float*)b.scratch;
    const int unit = share.first + mine, head = unit / 16, in_heads = head - share.head,
              column = unit * 8;  // of VALUE_DIM
    float4* state = (float4*)(b.p.delta + ((size_t)b.deltas * VALUE_DIM + column) * STATE_DIM) + b.lane;
    float4* kept = (float4*)(b.p.branch_state + (size_t)unit * KEPT_STATES * 8 * STATE_DIM) + b.lane;
    float4 s[8];
#pragma unroll
    for (int c = 0; c < 8; c++) s[c] = __ldcg(state + c * (STATE_DIM / 4));
    const int own = b.lane >> 1 & 7;
    const float weight = __ldg(b.vectors + GATED_NORM_AT + (column + own) % STATE_DIM);
#pragma unroll 1
    for (int i = 0; i < b.nodes; i++) {
        const Visit visit = b.s.visits[i];
        const int node = visit.node, from = uniform(visit.from + 1) - 1, to = uniform(visit.to + 1) - 1;
        if (from != HERE) {
#pragma unroll
            for (int c = 0; c < 8; c++) s[c] = kept[(from * 8 + c) * (STATE_DIM / 4)];
        }
        const float* row = rows + node * MIX_ROW;
        const float4 q = ((const float4*)(row + AFTER + in_heads * 2 * STATE_DIM))[b.lane];
        const float4 k = ((const float4*)(row + AFTER + in_heads * 2 * STATE_DIM + STATE_DIM))[b.lane];
        const float* gates = row + GATES + in_heads * 8;
        const float fade = gates[FADE], rk = gates[RK];
        const float v = row[AFTER + share.heads * 2 * STATE_DIM + mine * 8 + own], z = row[SILU_Z + mine * 8 + own];
        float sums[16];
#pragma unroll
        for (int c = 0; c < 8; c++) sums[c] = dot4(k, s[c]), sums[c + 8] = dot4(q, s[c]);
        const float sum = sum_sixteen(sums, b.lane), other = __shfl_xor_sync(~0u, sum, 16);
        const float ks = b.lane & 16 ? other : sum, qs = b.lane & 16 ? sum : other;
        const float write = gates[BETA] * fmaf(-fade, rk * ks, v);
        const float out = fmaf(gates[QK], write, fade * (gates[RQ] * qs)), scaled = write * rk;
#pragma unroll
        for (int c = 0; c < 8; c++) s[c] = update_state(s[c], fade, k, __shfl_sync(~0u, scaled, c * 2));
        if (to != NOWHERE) {
#pragma unroll
            for (int c = 0; c < 8; c++) kept[(to * 8 + c) * (STATE_DIM / 4)] = s[c];
        }
        float square = out * out;
        square += __shfl_xor_sync(~0u, square, 2), square += __shfl_xor_sync(~0u, square, 4),
            square += __shfl_xor_sync(~0u, square, 8);
        if (b.lane < 16 && (b.lane & 1) == 0) {
            b.p.y[activation_at(node, column + own)] = (u16)pack_bf16(out * weight * z, 0.0f);
            if (!b.decoding()) {
                const size_t at = ((size_t)b.deltas * BLOCKS + unit / 2) * MAX_NODES + node;
                b.p.pending_write[at * COLUMNS + unit % 2 * 8 + own] = scaled;
                if (own == 0 && unit % 2 == 0) b.p.pending_fade[at] = fade;
            }
        }
        if (b.lane == 0) b.p.y_squares[(size_t)node * (VALUE_DIM / 8) + unit] = square;
    }
    if (b.decoding()) {
#pragma unroll
        for (int c = 0; c < 8; c++) state[c * (STATE_DIM / 4)] = s[c];
    }
}

// States of this SM's units, weights and inputs of the convolution: a line of 128 bytes a thread and time.
__device__ __forceinline__ void prefetch_mix(const Block& b) {
    const DeltaShare share(b.sm);
    const float* state = b.p.delta + ((size_t)b.deltas * VALUE_DIM + share.first * 8) * STATE_DIM;
    for (int i = threadIdx.x; i < share.units * 8 * STATE_DIM / 32; i += CONSUMERS) prefetch(state + i * 32);
    const float* history = b.p.history + (size_t)b.deltas * HISTORY * CONV_CHANNELS;
    for (int i = threadIdx.x; i < share.channels() / 8; i += CONSUMERS) {
        const int row = share.row(i * 8);
        prefetch(b.vectors + CONV_AT + row * 4);
        if (i % 4 == 0)
            for (int age = 0; age < HISTORY; age++) prefetch(history + age * CONV_CHANNELS + row);
    }
}

__device__ __forceinline__ void delta_mix(Block& b) {
    const DeltaShare share(b.sm);
    delta_inputs(b, share);
#pragma unroll 1
    for (int mine = b.warp; mine < share.units; mine += WARPS) delta_unit(b, share, mine);
}
