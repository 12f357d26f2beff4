// A tree that was made on the device, where a forward pass reads it instead of one in its request.
#pragma once

struct MadeTree {
    int nodes;
    int tokens[64], parents[64];
};
