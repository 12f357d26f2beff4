// What an SM remembers while a token is sampled (see sample.cuh). It lies in the scratch of the mixers, which rest
// then. The forward pass that includes this says how many SMS and WARPS there are, and OWN_LOGITS of an SM at most.
#pragma once
#include "common/ptx.cuh"

constexpr int CANDIDATES = 768;       // for a token, at most
constexpr int ROUNDS = 8;             // of lists for one token
constexpr int MAX_STEPS = 64;         // tokens of a launch that samples
constexpr int MAX_OWN_LOGITS = 4096;  // of an SM, so that they have room

struct Candidates {
    float own[OWN_LOGITS];  // this SM's logits, after bias and penalties
    u64 best[SMS];          // each SM's best, as `ranked`
    double sum[SMS];
    int size[SMS], start[SMS];  // of each SM's list, and where it goes
    double part[WARPS];
    double total;
    u64 floor;  // the least candidate
    float peak;
    int found;  // candidates of this SM, or of all
    union {
        int count[OWN_LOGITS];  // how often each is in the window
        struct {
            union {
                u64 key[CANDIDATES];  // as they come
                double weight[CANDIDATES];
            };
            u64 sorted[CANDIDATES];
            double heated[CANDIDATES];
        };
    };
};
