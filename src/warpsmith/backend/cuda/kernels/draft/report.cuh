// What a step that runs on the device tells the host, in the host's memory (see structures.py).
#pragma once
#include "common/ptx.cuh"

constexpr int MOST_NODES = 64;

struct Report {
    u32 serial;               // of the step that is done: written last
    int grown, verified;      // nodes of the tree, and of them those that the forward pass ran
    int decided;              // tokens, one for each node of the path
    int token[MOST_NODES];    // that were decided
    int path[MOST_NODES];
    int tree_tokens[MOST_NODES], tree_parents[MOST_NODES];
    double scores[MOST_NODES];
    u64 began, grew, ran, walked;  // nanoseconds: the tree begun and made, the pass ended, the walk ended
    u64 committing, committed;     // how long the last step's commit took, and when it ended
};
// Nanoseconds at which a step's walk and its commit ended, in the device's memory.
struct StepTimes {
    u64 walked, committed;
};
