// The sampler's rules on the device: what backend/sampling.py says, for one token.
//
// Its sums are made in another order here, with another exp, so they differ in the last bits. Where such a difference
// could change the token the answer is "undecided", and the host decides. Nothing in this file needs a GPU: a test
// compiles it alone.
#pragma once

// What is asked of a launch that samples. The host builds the same struct field by field (see structures.py).
struct Draw {
    const int* window;           // the text's end that the penalties look at, when the launch begins
    const int2* biases;          // {token, bias as float bits}
    unsigned* lists;             // see sample.cuh
    double inverse_temperature;  // 0: the largest logit wins
    double top_p;                // 1: off
    double log_min_p;            // 1: off
    unsigned long long seed;     // after the first round of mixing
    unsigned serial;             // first tag of this launch: none was used before
    int sampled;                 // false: this launch does nothing of all this
    int top_k;                   // 0: off
    int windowed;                // tokens in `window`
    int last_n;                  // tokens the penalties look back on; -1: all; 0: no penalties
    int biased;                  // entries of `biases`
    float repeat, frequency, presence;
};

// Undecided: two sums are closer than their errors; or more candidates are needed.
constexpr int TOO_CLOSE = -1, TOO_FEW = -2;
// Part of a total. Errors are below 1e-12 of it: exp within an ulp or two, exponents within 1e-13, sums of a few
// hundred thousand terms, and terms left out (see NEGLIGIBLE).
constexpr double MARGIN = 1e-9;
// Exponents below this add less than 1e-12 to a total of at least 1, however many there are.
constexpr double NEGLIGIBLE = -40.0;

__device__ __forceinline__ unsigned long long mixed(unsigned long long z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// The draw's number in [0, 1) at an absolute position.
__device__ __forceinline__ double uniform_at(const Draw& d, int position) {
    const unsigned long long bits = mixed(d.seed + (position + 1ull) * 0x9e3779b97f4a7c15ull);
    return (double)(long long)(bits >> 11) * (1.0 / 9007199254740992.0);
}

// A logit whose token is in the window `count` times. Each operation rounds by itself, as numpy's do.
__device__ __forceinline__ float penalised(const Draw& d, float logit, int count) {
    logit = logit > 0 ? logit / d.repeat : logit * d.repeat;
    logit = logit - (float)count * d.frequency;
    return logit - d.presence;
}

__device__ __forceinline__ bool uses_min_p(const Draw& d) { return d.log_min_p <= 0; }
// Without top-k, a sum over the whole vocabulary is needed: at temperature 1 for top-p, else heated unless min-p cuts.
__device__ __forceinline__ bool needs_total(const Draw& d) { return d.top_k == 0 && (d.top_p < 1 || !uses_min_p(d)); }
__device__ __forceinline__ double total_scale(const Draw& d) { return d.top_p < 1 ? 1.0 : d.inverse_temperature; }

// Which of `n` candidates is drawn; best first, none missing between them. With top-k: at least k of them. Without: all
// that min-p leaves, or a beginning of the order where it is off. `weight` is exp(logit - best) (used by top-p only),
// `heated` the same with the logits divided by the temperature, `total` the sum over the vocabulary where it is needed.
template <class Logit>
__device__ __forceinline__ int decide(const Draw& d, int n, Logit logit, const double* weight, const double* heated,
                                      double total, double fraction) {
    const bool complete = d.top_k > 0 || uses_min_p(d);
    bool cut = d.top_k > 0;
    int count = n;
    if (d.top_k > 0) {
        if (n < d.top_k) return TOO_FEW;
        count = d.top_k;
    }
    if (d.top_p < 1) {
        if (d.top_k > 0) {
            total = 0;
            for (int i = 0; i < count; i++) total += weight[i];
        }
        const double enough = d.top_p * total, close = MARGIN * total;
        double running = 0;
        int i = 0;
        for (; i < count; i++) {
            running += weight[i];
            const double over = running - enough;
            // where nothing follows, there is nothing to cut off
            if (over <= close && over >= -close && !(complete && i == count - 1)) return TOO_CLOSE;
            if (over >= 0) break;
        }
        if (i == count && !complete) return TOO_FEW;
        count = i < count ? i + 1 : count;
        cut = true;
    }
    if (uses_min_p(d)) {
        const double least = (double)logit(0) + d.log_min_p;
        while (count > 1 && (double)logit(count - 1) < least) count--;
        cut = true;
    }
    if (cut) {
        total = 0;
        for (int i = 0; i < count; i++) total += heated[i];
    }
    const double target = fraction * total, close = MARGIN * total;
    double running = 0;
    for (int i = 0; i < (cut ? count - 1 : count); i++) {
        running += heated[i];
        const double over = running - target;
        if (over <= close && over >= -close) return TOO_CLOSE;
        if (over > 0) return i;
    }
    return cut ? count - 1 : TOO_FEW;
}
