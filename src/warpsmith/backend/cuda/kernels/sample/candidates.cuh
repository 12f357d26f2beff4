// What an SM remembers while a token is sampled (see sample.cuh). It lies in the scratch of the mixers, which rest
// then.
#pragma once
#include "forward/params.cuh"

constexpr int OWN_LOGITS = (HEAD_TILES + SMS - 1) / SMS * WIDE;  // of an SM, at most
constexpr int CANDIDATES = 768;                                  // for a token, at most
constexpr int MAX_STEPS = 64;                                    // tokens of a launch that samples

// Only plain decoding draws, and only where an SM's logits are few enough to lie there.
constexpr int MAX_OWN_LOGITS = 4096;
constexpr bool SAMPLES = NODES == 1 && OWN_LOGITS <= MAX_OWN_LOGITS;

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
constexpr int SAMPLE_FLOATS = SAMPLES ? (int)(sizeof(Candidates) + 15) / 16 * 4 : 0;
