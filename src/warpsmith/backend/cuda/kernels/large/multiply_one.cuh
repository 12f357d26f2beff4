// A stage's products for one node, by mma.sync, which has wgmma's bits and takes fewer instructions around it: operands
// are loaded, not described, and none of them has to wait for another's registers.
//
// All eight columns of a product are the one node. Its operands of a superblock (see `prepare_one`): [pair of steps of
// 16 k][lane of four][step][half] words, then the sums of 32 k: [lane of four][rounded, rests] words.
#pragma once
#include "large/multiply.cuh"

template <int TYPE>
struct OneMultiplier : PartWalk<TYPE> {
    typedef Slab<TYPE> Here;
    typedef PartWalk<TYPE> Part;
    using Part::b, Part::index, Part::lane, Part::empty, Part::total, Part::ended, Part::Part;
    // Two superblocks at a time, whose chains of products are independent, where words do not stay in the ring.
    static constexpr int MOST = Here::EARLY ? 2 : 1;
    Here slab[MOST] = {};  // set: see Multiplier
    u32 operands[MOST] = {};
    int ends[MOST] = {};  // tiles that end with a superblock

    __device__ __forceinline__ void take(int which) {
        this->load(slab[which]);
        operands[which] = b.base + (index - this->tile_first) * BLOCK_BYTES;
        if constexpr (Here::EARLY) give_back(empty + slab[which].landed(), lane);
        index += 2;
        this->pass_tiles();
        ends[which] = ended, ended = 0;
    }
    template <int COUNT, int T>
    __device__ __forceinline__ void tile(float (&acc)[COUNT][4]) {
        u32 x[COUNT][8];
#pragma unroll
        for (int s = 0; s < COUNT; s++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint4 v = load_shared16(operands[s] + (2 * T + half) * 64 + (lane & 3) * 16);
                x[s][half * 4] = v.x, x[s][half * 4 + 1] = v.y, x[s][half * 4 + 2] = v.z, x[s][half * 4 + 3] = v.w;
            }
#pragma unroll
        for (int term = 0; term < Here::TERMS; term++) {
            step<COUNT, T, 0>(acc, x, term);
            step<COUNT, T, 1>(acc, x, term);
            step<COUNT, T, 2>(acc, x, term);
            step<COUNT, T, 3>(acc, x, term);
        }
    }
    template <int COUNT, int T, int J>
    __device__ __forceinline__ void step(float (&acc)[COUNT][4], const u32 (&x)[COUNT][8], int term) {
#pragma unroll
        for (int s = 0; s < COUNT; s++) {
            u32 o[4];
            slab[s].template operand<T, J>(o, term);
            mma_half(acc[s], {o[0], o[1], o[2], o[3]}, x[s][J * 2], x[s][J * 2 + 1]);
        }
    }
    template <int COUNT>
    __device__ __forceinline__ void superblocks() {
        float acc[COUNT][4] = {}, mins[COUNT][4] = {};
        if constexpr (Here::MINS) {
#pragma unroll
            for (int s = 0; s < COUNT; s++) {
                u32 m[4];
                slab[s].mins(m);
                const uint2 v = load_shared8(operands[s] + 512 + (lane & 3) * 8);
                mma_half(mins[s], {m[0], m[1], m[2], m[3]}, v.x, v.y);
            }
        }
        tile<COUNT, 0>(acc);
        tile<COUNT, 1>(acc);
        tile<COUNT, 2>(acc);
        tile<COUNT, 3>(acc);
        if constexpr (!Here::EARLY) give_back(empty, lane);
#pragma unroll
        for (int s = 0; s < COUNT; s++) {
            const float4 f = slab[s].factors();
#pragma unroll
            for (int i = 0; i < 4; i += 2) {  // the other columns are the same
                total[i] = fmaf(i & 2 ? f.z : f.x, acc[s][i], total[i]);
                if (Here::MINS) total[i] = fmaf(i & 2 ? -f.w : -f.y, mins[s][i], total[i]);
            }
            this->store_ended(ends[s]);
        }
    }
    __device__ __forceinline__ void run() {
        this->store_ended(ended);
        ended = 0;
#pragma unroll 1
        while (this->more()) {
            take(0);
            if (MOST == 2 && this->more()) {
                take(MOST - 1);
                superblocks<MOST>();
            } else {
                superblocks<1>();
            }
        }
        this->pass_rest();
    }
};
