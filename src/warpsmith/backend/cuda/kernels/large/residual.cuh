// The residual stream and the MLP's inner activation: from sums of products to what the next ones multiply.
//
// Included where the pass has its own `Block`, words and `tell_square` (large/steps.cuh, draft/products.cuh).
#pragma once
#include "large/embedding.cuh"
#include "large/operands.cuh"

// --- the residual stream --------------------------------------------------------------------------------------------

// Activations of so many k, or the residual stream, dealt to SMs in spans (see SPAN) and to warps: 128 k of a node, a
// lane four, from `k` on. `slot`: how many spans this SM has before.
template <int K>
struct Spans {
    static constexpr int AT_ONCE = WARPS * 128 / SPAN;
    const Block& b;
    const u32 half_by_nodes;  // loaded once: behind loads of sums, it would come as late as they do
    int slot, number;
    __device__ __forceinline__ explicit Spans(const Block& block)
        : b(block), half_by_nodes(block.s.half_by_nodes), slot(block.warp * 128 / SPAN),
          number(slot * SMS + block.sm) {}
    __device__ __forceinline__ bool more() const { return number < K / SPAN * b.nodes; }
    __device__ __forceinline__ void next() { slot += AT_ONCE, number += AT_ONCE * SMS; }
    __device__ __forceinline__ int span() const { return Block::over_nodes(number, half_by_nodes); }
    __device__ __forceinline__ int node() const { return number - span() * b.nodes; }
    __device__ __forceinline__ int in_span() const { return b.warp * 128 % SPAN + b.lane * 4; }
    __device__ __forceinline__ int k() const { return span() * SPAN + in_span(); }
};

// Warps 2 i and 2 i + 1 wait for each other. The race checker loses the block's barrier where pairs have one like it:
// in its build they meet at an mbarrier.
__device__ __forceinline__ void sync_pair(Block& b) {
#ifdef EVERY_LANE_ARRIVES
    const u32 barrier = shared_address(&b.s.pairs[b.warp / 2]), turn = b.s.meetings[b.warp] & 1;
    barrier_arrive(barrier);
    barrier_wait(barrier, turn);
    __syncwarp();
    if (b.lane == 0) b.s.meetings[b.warp]++;
    __syncwarp();
#else
    sync_some<64>(4 + b.warp / 2);
#endif
}

// Half of a superblock of a node, by one of two warps, which tell each other their largest value.
__device__ __forceinline__ void publish_half(Block& b, u32* words, int node, int k, uint2 four, int turn,
                                             float by = 1.0f) {
    const Fours<1> fours = {{{four.x, four.y}}};
    const u32 most = __reduce_max_sync(~0u, __float_as_uint(__uint_as_float(fours.largest()) * by));
    if (b.lane == 0) b.s.largest[turn][b.warp] = most;
    sync_pair(b);
    publish_operands(words, node, k, fours, by, max(most, b.s.largest[turn][b.warp ^ 1]));
}

// Publish what the next projection reads: rows times the next norm's weight, and sums of squares. `update` gives four
// rows' new values for a node, from the old ones; `next` is that projection's stage.
template <class Update>
__device__ __forceinline__ void update_residual(Block& b, int next, const float* norm, float* feature, Update update) {
    u32* words = x_words(b, next);
    int turn = 0;
#pragma unroll 1
    for (Spans<HIDDEN> own(b); own.more(); own.next(), turn ^= 1) {
        const int node = own.node(), k = own.k();
        const float4 w = __ldg((const float4*)(norm + k));
        float4* kept = (float4*)&b.s.residual[own.slot][own.in_span()];
        const float4 x = update(*kept, node, k);
        *kept = x;
        if (feature) *(float4*)(feature + (size_t)b.place(node) * HIDDEN + k) = x;
        const uint2 out = {pack_bf16(x.x * w.x, x.y * w.y), pack_bf16(x.z * w.z, x.w * w.w)};
        if constexpr (POLLED)
            store8(words + k / 2, out.x, out.y);
        else
            publish_half(b, words, node, k, out, turn);
        const float square = warp_sum(fmaf(x.x, x.x, fmaf(x.y, x.y, fmaf(x.z, x.z, x.w * x.w))));
        tell_square(b, next, node, k / 128, square);
    }
    if (POLLED && b.warp == 0 && b.sm >= SPANS) tell_square(b, next, 0, b.sm, 0.0f);
}

// --- the embedding ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ void embed(Block& b) {
    update_residual(b, 0, b.p.vectors + MIX_NORM, nullptr, [&](float4, int node, int k) -> float4 {
        const u8* row = b.p.embedding + b.s.token[node] * embedding_row_bytes();
        return {embedding_value(row, k), embedding_value(row, k + 1), embedding_value(row, k + 2),
                embedding_value(row, k + 3)};
    });
}

// --- the MLP's inner activation: silu(gate) * up. Rows come eight of the gate, then their eight of up ---------------

struct InnerSums {
    const Projection from;
    __device__ __forceinline__ InnerSums(const Block& b, int stage)
        : from(sums_of<HIDDEN_GROUPS>(b, stage, MLP_ROWS)) {}

    struct Asked {
        Projection::Place place;  // of gates
        Projection::Asked gate, up;
    };
    // Of k .. k + 3.
    __device__ __forceinline__ void ask(Asked& a, int node, u32 k) const {
        a.place = from.place(k / 8 * 16 + k % 8);
        from.ask(a.gate, a.place, node), from.ask(a.up, a.place, node, 8);
    }
    __device__ __forceinline__ uint2 activation(Asked& a, int node) const {
        const float4 gate = from.total(a.gate, a.place, node), up = from.total(a.up, a.place, node, 8);
        return {pack_bf16(silu(gate.x) * up.x, silu(gate.y) * up.y),
                pack_bf16(silu(gate.z) * up.z, silu(gate.w) * up.w)};
    }
};

// Sums of the next span are on their way while this one is published.
__device__ __forceinline__ void activate(Block& b, int stage) {
    const InnerSums sums(b, stage);
    u32* words = operand_words(b, stage + 1);
    InnerSums::Asked asked = {};  // set, as `KeyWalk::next` is
    Spans<FFN> own(b);
    if (own.more()) sums.ask(asked, own.node(), own.k());
    int turn = 0;
#pragma unroll 1
    for (; own.more(); turn ^= 1) {
        const int node = own.node(), k = own.k();
        const uint2 out = sums.activation(asked, node);
        own.next();
        if (own.more()) sums.ask(asked, own.node(), own.k());
        publish_half(b, words, node, k, out, turn);
    }
}

// The residual stream, normed: what the head was given.
__device__ __forceinline__ void give_hidden(const Block& b) {
#pragma unroll 1
    for (Spans<HIDDEN> own(b); own.more(); own.next()) {
        const float4 x = *(const float4*)&b.s.residual[own.slot][own.in_span()],
                     w = __ldg((const float4*)(b.vectors + own.k()));
        const float by = b.s.inverse[0][own.node()];
        *(float4*)(b.p.out_hidden + (size_t)b.place(own.node()) * HIDDEN + own.k()) = {
            x.x * by * w.x, x.y * by * w.y, x.z * by * w.z, x.w * by * w.w};
    }
}
