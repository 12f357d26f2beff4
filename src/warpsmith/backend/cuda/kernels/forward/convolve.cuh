// What follows the projections into a DeltaNet layer, channel by channel: the causal convolution with silu for q, k and
// v, silu for z, and the gates beta = sigmoid(.) and fade = exp(a softplus(. + dt)).
//
// Maths: y_t = silu(w0 x_{t-3} + w1 x_{t-2} + w2 x_{t-1} + w3 x_t), along a node's own path. The SM that has a
// channel's row of the projection has it for every node, so it convolves as well: once, and what is published is ready
// for use. Layout: convolution weights and the inputs of the last three committed tokens of this SM's channels come to
// shared memory while the weights do; a tree's own inputs go there once they are summed (behind the partial sums).
// Bytes: 16 of convolution weights and 12 of history a channel; a node's inputs are kept for `commit`.
#pragma once
#include "forward/block.cuh"

// Four channels; `w[i]` are channel i's convolution weights, oldest first.
__device__ __forceinline__ float4 convolve(const float4 (&x)[4], const float4 (&w)[4]) {
    float4 sum;
    sum.x = fmaf(w[0].w, x[3].x, fmaf(w[0].z, x[2].x, fmaf(w[0].y, x[1].x, w[0].x * x[0].x)));
    sum.y = fmaf(w[1].w, x[3].y, fmaf(w[1].z, x[2].y, fmaf(w[1].y, x[1].y, w[1].x * x[0].y)));
    sum.z = fmaf(w[2].w, x[3].z, fmaf(w[2].z, x[2].z, fmaf(w[2].y, x[1].z, w[2].x * x[0].z)));
    sum.w = fmaf(w[3].w, x[3].w, fmaf(w[3].z, x[2].w, fmaf(w[3].y, x[1].w, w[3].x * x[0].w)));
    return {silu(sum.x), silu(sum.y), silu(sum.z), silu(sum.w)};
}

// This SM's first row tile of the projection.
__device__ __forceinline__ int first_channel_tile(const Block& b) {
    return first_tile<StageOf<MIX_IN>>(b.layer(), true, b.sm);
}

// Ask for what this SM's channels need. It is there after `copies_done` and a barrier.
__device__ __forceinline__ void ask_for_conv_weights(Block& b, int index, const float* vectors) {
    const int first = first_channel_tile(b) * WIDE;
    const int channels = min(first_tile<StageOf<MIX_IN>>(b.layer(), true, b.sm + 1) * WIDE, CONV_CHANNELS) - first,
              pieces = channels / 4;
    const float* history = b.p.history + (size_t)index * HISTORY * CONV_CHANNELS + first;
#pragma unroll 1
    for (int i = threadIdx.x; i < channels; i += CONSUMERS)
        copy16(&b.s.conv_weights[i], vectors + DELTA_MIX_CONV + (first + i) * 4);
#pragma unroll 1
    for (int i = threadIdx.x; i < (HISTORY - 1) * pieces; i += CONSUMERS) {
        const int age = i / pieces, piece = i % pieces;
        copy16(&b.s.past[age][piece * 4],
               history + (b.length - 1 - age + HISTORY) % HISTORY * CONV_CHANNELS + piece * 4);
    }
    static_assert(VALUE_HEADS % 2 == 0, "dt and a of the heads are copied four at a time");
    for (int i = threadIdx.x; i < VALUE_HEADS / 2; i += CONSUMERS)
        copy16(&b.s.gate_weights[i * 4], vectors + DELTA_MIX_DT + i * 4);
}

// Four rows of the projection as the mixer wants them; `own` is what was summed for this node, `before(age)` for its
// ancestors.
template <class Before>
__device__ __forceinline__ float4 after_projection(const Block& b, int row, float4 own, Before before) {
    if (row < CONV_CHANNELS) {
        const int mine = row - first_channel_tile(b) * WIDE;
        const float4 x[4] = {before(3), before(2), before(1), own};
        const float4 w[4] = {b.s.conv_weights[mine], b.s.conv_weights[mine + 1], b.s.conv_weights[mine + 2],
                             b.s.conv_weights[mine + 3]};
        return convolve(x, w);
    }
    if (row < CONV_CHANNELS + VALUE_DIM) return {silu(own.x), silu(own.y), silu(own.z), silu(own.w)};
    const auto gate = [&](int at, float raw) {  // every mixer waits for these: both kinds at once
        const int head = min(max(at - VALUE_HEADS, 0), VALUE_HEADS - 1);  // a row tile may be longer than the rows
        const float fade = exponential(b.s.gate_weights[VALUE_HEADS + head] * softplus(raw + b.s.gate_weights[head]));
        return at < VALUE_HEADS ? sigmoid(raw) : fade;
    };
    const int at = row - CONV_CHANNELS - VALUE_DIM;
    return {gate(at, own.x), gate(at + 1, own.y), gate(at + 2, own.z), gate(at + 3, own.w)};
}

// Inputs of the last committed tokens.
__device__ __forceinline__ float4 past_input(const Block& b, int row, int age) {
    return *(const float4*)&b.s.past[age - 1][row - first_channel_tile(b) * WIDE];
}

// What the next tokens' convolutions will need of this node.
__device__ __forceinline__ void keep_input(const Block& b, int index, int node, int row, float4 own) {
    if (row >= CONV_CHANNELS) return;
    float* to = b.decoding() ? b.p.history + ((size_t)index * HISTORY + b.length % HISTORY) * CONV_CHANNELS
                             : b.p.pending_raw + ((size_t)index * MAX_NODES + node) * CONV_CHANNELS;
    *(float4*)(to + row) = own;
}
