// What kernels/common/cluster.cuh names, on the emulated machine: the blocks of a launch are one cluster.
#pragma once
#include "common/ptx.cuh"

inline u32 cta_rank() { return blockIdx.x % gridDim.x; }
inline void sync_cluster() {
    static u32 waiting = 0, generation = 0;
    const u32 mine = generation;
    if (++waiting == gridDim.x * blockDim.x) {
        waiting = 0, generation++;
        machine::progress();
    } else {
        while (generation == mine) machine::hand_on("its cluster");
    }
}
inline u8* shared_pointer_in(u32 cta, u32 address) {
    machine::Block* block = machine::current->block + ((int)cta - (int)cta_rank());
    return (u8*)(((uintptr_t)block->shared.data() + 127) / 128 * 128) + address;
}
// Not emulated.
void leave_cluster(), arrive_in(u32 cta, u32 barrier), tell_in(u32 cta, u32 barrier), wait_in_cluster(u32, u32);
inline void store_in(u32 cta, u32 at, float v) { *(float*)shared_pointer_in(cta, at) = v; }
inline void store16_in(u32 cta, u32 at, uint4 v) { *(uint4*)shared_pointer_in(cta, at) = v; }
