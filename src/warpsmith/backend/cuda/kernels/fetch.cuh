// A warp that brings a tree's activations to shared memory, so that the consumers need not poll for them.
//
// It knows the order of all stages. For every octet of nodes it polls some words of its last node: when these have come,
// probably all has. Then one bulk copy brings a piece (16 KB: the chunks of a chain for all
// warps; before an octet's first piece its sums of squares, if there are any) to a slot of the shelf. Consumers check every word they take
// and poll for themselves where something has not come yet.
// x of all octets stays on the shelf for all units of a stage; y and h are taken piece by piece.
// The shelf lies in the mixers' scratch: after the projections into a mixer it is filled again when all warps have left that.
// Bytes: 20 KB of x and 4.5 and 32 KB of y, 56 KB of h an octet (0.8B), which all SMs read at the same time: L2 serves that three
// times as fast in whole lines by the copy engine as by loads of 16 bytes.
#pragma once
#include "block.cuh"

// A consumer warp is done with the mixer's scratch.
__device__ __forceinline__ void open_shelf(const Block& b) {
#if __CUDA_ARCH__ >= 900
    before_copies();
    arrive_for_warp(b.gate);
#endif
}

struct Fetcher {
    const Params& p;
    Shelf shelf;
    u32 gate, gate_parity = 0;
    const int* stopped;
    int nodes, lane = threadIdx.x & 31, brought = 0;

    __device__ Fetcher(const Params& params, const Shelf& s, u32 gate0, const int* stop, int count)
        : p(params), shelf(s), gate(gate0), stopped(stop), nodes(count) {}

    __device__ bool wait(u32 barrier, u32 parity) const {
        Watchdog dog;
        while (!everywhere(barrier_done(barrier, parity))) {
            if (has_stopped(stopped)) return false;
            dog.check();
        }
        return true;
    }
    // Waits for an octet of an activation. Words of its last node tell: its squares, which are a word from every SM, or one of every
    // chunk. More looks, or looks at more words, would only be in the way of what is published. False: the consumers have stopped.
    template <int K, int SQUARES>
    __device__ bool wait_for(const u32* values, int octet) const {
        constexpr int COUNT = SQUARES ? SQUARES : K / 32, EACH = (COUNT + 31) / 32, STRIDE = SQUARES ? 1 : CHUNK_WORDS;
        const int node = min(7, nodes - 1 - octet * 8);
        const u32* at = values + octet * OCTET_WORDS + lane * STRIDE;
        at += SQUARES ? node * square_stride(SQUARES) - square_words(SQUARES) : node * 16 + 12;
        Watchdog dog;
        while (true) {
            u32 got[EACH];
#pragma unroll
            for (int i = 0; i < EACH; i++) got[i] = COUNT % 32 == 0 || i * 32 + lane < COUNT ? load4(at + i * 32 * STRIDE) : 0;
            bool came = true;
#pragma unroll
            for (int i = 0; i < EACH; i++) came &= got[i] != NOT_YET;
            if (everywhere(came)) return true;
            if (has_stopped(stopped)) return false;
            dog.check();
        }
    }
    // `words` of values, with `before` words of squares before them.
    __device__ bool bring(const u32* from, int words, int before) {
        if (!wait(shelf.empty + 8 * shelf.slot, shelf.parity ^ 1)) return false;  // passes in the first round
#if __CUDA_ARCH__ >= 900
        if (lane == 0) copy_slot(shelf.data(0) + (SHELF_SQUARE_WORDS - before) * 4, from - before, (before + words) * 4, shelf.full + 8 * shelf.slot);
#endif
        __syncwarp();
        shelf.advance();
        brought++;
        return true;
    }

    // An activation, from its values on. In blocks of EACH chunks, `times` over.
    template <class Activation, int EACH>
    __device__ bool activation(const u32* values, int times) {
        constexpr int K = Activation::K, SQUARES = Activation::SQUARES, CHUNKS = chunks_of(K);
        int come = 0;
#pragma unroll 1
        for (int again = 0; again < times; again++)
#pragma unroll 1
            for (int block = 0; block < CHUNKS; block += EACH)
#pragma unroll 1
                for (int octet = 0; octet * 8 < nodes; octet++) {
                    if (octet == come) {
                        if (!wait_for<K, SQUARES>(values, octet)) return false;
                        come++;
                    }
#pragma unroll 1
                    for (int c = block; c < min(block + EACH, CHUNKS); c += CHAIN) {
                        const int words = min(CHAIN, CHUNKS - c) * WARPS * CHUNK_WORDS;
                        if (!bring(values + octet * OCTET_WORDS + c * WARPS * CHUNK_WORDS, words, c == 0 ? square_words(SQUARES) : 0)) return false;
                    }
                }
        return true;
    }
    __device__ bool pass() {
        const int units = OwnUnits(blockIdx.x).count;
        int recurrent_before = 0;
#pragma unroll 1
        for (int half = 0;; half++) {  // a layer's mixer, then its MLP; at last the head
            const int layer = half >> 1, mlp = half & 1;
            const u32* copy = p.exchange + (layer & 1) * COPY_WORDS;
            if (!activation<Residual, chunks_of(HIDDEN)>(copy + (mlp ? MID_AT : X_AT), 1)) return false;
            if (layer == LAYERS) return true;
            if (mlp) {
                if (!activation<Inner, NarrowBlocks<FFN>::EACH>(copy + H_AT, units)) return false;
                continue;
            }
            if (!wait(gate, gate_parity)) return false;
            gate_parity ^= 1;
            if (is_recurrent(layer)) {
                const u32* y = p.exchange + (recurrent_before++ & 1) * COPY_WORDS + DELTA_Y_AT;
                if (!activation<DeltaOutput, NarrowBlocks<VALUE_DIM>::EACH>(y, units)) return false;
            } else {
                const u32* y = p.exchange + (layer - recurrent_before & 1) * COPY_WORDS + ATTENTION_Y_AT;
                if (!activation<AttentionOutput, NarrowBlocks<ATTENTION_DIM>::EACH>(y, units)) return false;
            }
        }
    }
    // No copy may be on its way when the block exits.
    __device__ void run() {
        pass();
#pragma unroll 1
        for (int i = 0; i < min(brought, SHELF_SLOTS); i++) {
            if (shelf.slot-- == 0) shelf.slot = SHELF_SLOTS - 1, shelf.parity ^= 1;
            barrier_wait(shelf.full + 8 * shelf.slot, shelf.parity);
        }
    }
};
