// Features of committed tokens, wherever a pass left them, to where a draft's launches read them: in bf16, in groups of
// rows that a launch takes together, 64 values of all its rows side by side.
//
// Given with -D: HIDDEN, FEATURES, NODES (rows of a group there is room for). Grid: a block of 128 threads a row and
// layer.
#include "common/commit.cuh"
#include "common/made_tree.cuh"
#include "draft/report.cuh"

constexpr int MOST_ROWS = 64;

struct Gather {
    u16* waiting;  // bf16 [groups][FEATURES * HIDDEN / 64][NODES][64]
    const float* from;
    int groups, rows;  // of a ring, and of a group
    int group, first;  // which row of which group the first becomes
    long long apart;   // floats from a layer's row to the next layer's
    const Path* path;  // nodes of a tree, known on the device alone; or null
    const MadeTree* tree;
    StepTimes* times;
    int offsets[MOST_ROWS];  // where a row's first HIDDEN values begin
};

extern "C" __global__ void __launch_bounds__(128) gather(const __grid_constant__ Gather a) {
    const int row = blockIdx.x / FEATURES, layer = blockIdx.x % FEATURES;
    if (a.path && blockIdx.x == 0 && threadIdx.x == 0) a.times->committed = nanoseconds();
    if (a.path && row >= a.path->count) return;
    const size_t at = a.path ? ((size_t)layer * a.tree->nodes + a.path->node[row]) * HIDDEN
                             : (size_t)(a.offsets[row] + layer * a.apart);
    const float* from = a.from + at;
    const int place = a.first + row, group = (a.group + place / a.rows) % a.groups;
    u16* waiting = a.waiting + (size_t)group * (FEATURES * HIDDEN * NODES);
    for (int i = threadIdx.x * 4; i < HIDDEN; i += 512) {
        const float4 v = *(const float4*)(from + i);
        const int k = layer * HIDDEN + i;
        u16* to = waiting + ((size_t)(k / 64) * NODES + place % a.rows) * 64 + k % 64;
        *(uint2*)to = {pack_bf16(v.x, v.y), pack_bf16(v.z, v.w)};
    }
}
