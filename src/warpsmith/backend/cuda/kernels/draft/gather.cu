// Features of committed tokens, wherever a pass left them, to where a draft's next launch reads them: in bf16, 64
// values of all rows side by side.
//
// Given with -D: HIDDEN, FEATURES, NODES (rows that wait at most). Grid: a block of 128 threads a row and layer.
#include "common/commit.cuh"
#include "common/made_tree.cuh"
#include "common/ptx.cuh"

constexpr int MAX_FEATURES = 8;

struct Gather {
    u16* waiting;  // bf16 [FEATURES * HIDDEN / 64][NODES][64]
    const float* from;
    int first;  // row that the first becomes
    int pad;
    const Path* path;  // nodes of a tree, known on the device alone; or null
    const MadeTree* tree;
    long long offsets[NODES * MAX_FEATURES];  // [row][FEATURES]: where HIDDEN values of each begin
};

extern "C" __global__ void __launch_bounds__(128) gather(const __grid_constant__ Gather a) {
    const int row = blockIdx.x / FEATURES, layer = blockIdx.x % FEATURES;
    if (a.path && row >= a.path->count) return;
    const size_t at = a.path ? ((size_t)layer * a.tree->nodes + a.path->node[row]) * HIDDEN
                             : (size_t)a.offsets[row * FEATURES + layer];
    const float* from = a.from + at;
    for (int i = threadIdx.x * 4; i < HIDDEN; i += 512) {
        const float4 v = *(const float4*)(from + i);
        const int k = layer * HIDDEN + i;
        u16* to = a.waiting + ((size_t)(k / 64) * NODES + a.first + row) * 64 + k % 64;
        *(uint2*)to = {pack_bf16(v.x, v.y), pack_bf16(v.z, v.w)};
    }
}
