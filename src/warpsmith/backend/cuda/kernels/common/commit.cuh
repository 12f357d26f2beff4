// A path, and what a commit is asked for. The host builds the same structs field by field (see structures.py).
#pragma once

struct Path {
    int count;
    int node[64];
    int last;  // the token that was decided at its end
};

// The state before is left as it is: until the host takes the new one, nothing has happened.
struct Commit {
    float* delta;     // where the new state goes
    float* history;
    const Path* made;  // a path that was made on the device, or null
    int length;        // tokens committed before
    Path path;
};

// Which of the path's nodes is the last with a position that is `slot` modulo `slots`; negative: none of them.
__device__ __forceinline__ int last_in_slot(int length, int count, int slot, int slots) {
    const int last = length + count - 1;
    return count - 1 - (last - slot + slots) % slots;
}
