// A warp that looks out for a tree's activations, so that the consumers need not: they ask for a node tile when it is
// there, and often while they still multiply the one before.
//
// It knows the order of all stages. For every node tile of nodes it polls some words of the last node: when these have
// come, probably all has, and it arrives at a barrier. That is a hint and no more: consumers check every word they
// take. Bytes: 512 of squares, or a word of every chunk, a look.
#pragma once
#include "forward/block.cuh"

struct Lookout {
    const Params& p;
    const Barriers& barriers;
    const int* stopped;
    int nodes, lane = threadIdx.x & 31, seen = 0;

    __device__ Lookout(const Params& params, const Barriers& s, const int* stop, int count)
        : p(params), barriers(s), stopped(stop), nodes(count) {}

    // What a look sees of a node tile's last node: its squares, which are a word from every SM, or one of every chunk.
    // More looks, or looks at more words, would only be in the way of what is published.
    template <class Activation>
    struct Look {
        static constexpr int SQUARES = Activation::SQUARES, COUNT = SQUARES ? SQUARES : Activation::K / 32;
        static constexpr int WIDTH = SQUARES ? 4 : 1, EACH = (COUNT + 32 * WIDTH - 1) / (32 * WIDTH);
        uint4 got[EACH];
        __device__ __forceinline__ void take(const Lookout& l, int values_at, int node_tile) {
            const int node = min(7, l.nodes - 1 - node_tile * 8);
            const u32* at =
                l.p.exchange + (values_at + node_tile * NODE_TILE_WORDS +
                                (SQUARES ? node * square_stride(SQUARES) - square_words(SQUARES) : node * 16 + 12));
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int first = (i * 32 + l.lane) * WIDTH;
                got[i] = uint4{};
                if (COUNT % (32 * WIDTH) != 0 && first >= COUNT) continue;
                if (SQUARES)
                    got[i] = load16(at + first);
                else
                    got[i].x = load4(at + first * CHUNK_WORDS);
            }
        }
        __device__ __forceinline__ bool came(int lane) const {
            bool all = true;
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int first = (i * 32 + lane) * WIDTH;
                const u32 words[4] = {got[i].x, got[i].y, got[i].z, got[i].w};
#pragma unroll
                for (int j = 0; j < WIDTH; j++) all &= words[j] != NOT_YET || first + j >= COUNT;
            }
            return everywhere(all);
        }
    };
    // For an activation's node tiles, from its values on. False: the consumers have stopped.
    template <class Activation>
    __device__ bool look_for(int values_at) {
        asm volatile(""
                     : "+r"(lane), "+r"(nodes),
                       "+r"(values_at));  // addresses of all stages at once are more than there are registers for
        Watchdog dog;
        while (seen > 0 &&
               !everywhere(barrier_done(barriers.taken, seen - 1 & 1))) {  // a barrier has one phase at a time
            if (has_stopped(stopped)) return false;
            dog.check();
        }
        seen++;
#pragma unroll 1
        for (int node_tile = 0; node_tile * 8 < nodes; node_tile++) {
            Look<Activation> look;
            while (true) {
                look.take(*this, values_at, node_tile);
                if (look.came(lane)) break;
                if (has_stopped(stopped)) return false;
                dog.check();
            }
            arrive_for_warp(barriers.there + 8 * node_tile);
        }
        return true;
    }
    template <class Taken>
    __device__ bool look_for_taken(int layer) {
        const int deltas = Taken::USED == IN_EVERY_LAYER ? 0 : recurrent_before(layer);
        const int use = Taken::USED == IN_DELTA_LAYERS ? deltas : layer - deltas;
        return look_for<Activation<Taken::K, Taken::SQUARES>>((use & 1) * COPY_WORDS + Taken::PLACE);
    }
    __device__ void run() {
        const bool projects = OwnTiles(blockIdx.x).count > 0;
        every_weight_stage([&](auto stage, int layer) {
            typedef decltype(stage) Stage;
            if (Stage::TILE_ROWS == NARROW && !projects) return true;
            const bool recurrent = Stage::SLOT != HEAD && is_recurrent(layer);
            if (Stage::InDelta::PLACE == Stage::InAttention::PLACE || recurrent)
                return look_for_taken<typename Stage::InDelta>(layer);
            return look_for_taken<typename Stage::InAttention>(layer);
        });
    }
};
