// The device sampler: it chooses a token where its logits are.
//
// 1. Every SM applies bias and penalties to its own logits and publishes its best, as for greedy decoding.
// 2. Every SM knows all of these then, and takes the m-th best of them for a floor. Each SM lists its logits from there
// up,
//    and with them its share of the sum over the vocabulary, if that is needed. With m = k, the k best tokens are among
//    them for sure; fewer do where likely tokens crowd in few SMs, as in a vocabulary that begins with frequent tokens.
//    Without top-k a few hundred candidates are wanted, and those below are hoped not to matter. With min-p and without
//    top-k, the floor follows from the best.
// 3. SM 0 sorts the candidates by counting who is better, decides, and tells everybody: the token, or to list again
// with
//    another m, or that it is left undecided. Then the launch ends, and the host decides from the logits.
//
// Lists are read by SM 0 only, after which everybody hears from it: so one copy of them is enough, and instead of being
// reset, each record of 16 bytes carries a tag that no other round has.
//
// The forward pass that includes this has: candidates(b), where an SM remembers them; first_logit(b) and own_logits(b),
// which are its; hear_best(b), which gets all SMs' best; b.draw; and in b.s token, drawn and reach.
#pragma once
#include "sample/penalties.cuh"

constexpr int RECORD = 4;                                       // words
constexpr int AGAIN = -2;                                       // instead of a token, as UNDECIDED
constexpr int FEW = CANDIDATES / 2, MANY = CANDIDATES * 5 / 6;  // m is changed outside of these

__device__ __forceinline__ u32* list_of(const Block& b, int sm) {
    return b.draw->lists + RECORD * (1 + sm * (1 + CANDIDATES));
}
// The largest m.
__device__ __forceinline__ int reach_limit(const Draw& d) { return d.top_k > 0 ? min(d.top_k, SMS) : SMS; }
__device__ __forceinline__ int first_reach(const Block& b) {
    return b.draw->top_k > 0 ? reach_limit(*b.draw) : (SMS + 1) / 2;
}
__device__ __forceinline__ bool floored_by_min_p(const Draw& d) { return d.top_k == 0 && uses_min_p(d); }

__device__ __forceinline__ uint4 poll_tagged(const u32* at, u32 tag) {
    uint4 v;
    Watchdog dog;
    do {
        v = load16(at);
        dog.check();
    } while (v.x != tag);
    return v;
}

__device__ __forceinline__ u64 words_of(uint2 words) { return (u64)words.y << 32 | words.x; }

__device__ __forceinline__ void find_floor(Block& b, int m) {
    Candidates& c = candidates(b);
#pragma unroll 1
    for (int sm = threadIdx.x; sm < SMS; sm += CONSUMERS) {
        const u64 mine = c.best[sm];
        int better = 0;
#pragma unroll 4
        for (int other = 0; other < SMS; other++) better += c.best[other] > mine | (c.best[other] == mine & other < sm);
        if (better == 0) c.peak = logit_of(mine);
        if (better == m - 1) c.floor = floored_by_min_p(*b.draw) ? 0 : mine;
    }
    if (threadIdx.x == 0) c.found = 0;
    b.sync();
}

__device__ __forceinline__ void list_candidates(Block& b, u32 tag) {
    Candidates& c = candidates(b);
    const Draw& d = *b.draw;
    const int first = first_logit(b), count = own_logits(b);
    const bool by_min_p = floored_by_min_p(d), summed = needs_total(d);
    const double peak = c.peak, least = peak + d.log_min_p, scale = total_scale(d);
    const u64 floor = c.floor;
    u32* list = list_of(b, b.sm);
    double sum = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += CONSUMERS) {
        const float logit = c.own[i];
        const u64 key = ranked(logit, first + i);
        if (key >= floor && (!by_min_p || (double)logit >= least)) {
            const int at = atomicAdd(&c.found, 1);
            if (at < CANDIDATES) store16(list + RECORD * (1 + at), tag, (u32)key, (u32)(key >> 32), 0);
        }
        const double exponent = ((double)logit - peak) * scale;
        if (summed && exponent > NEGLIGIBLE) sum += exp(exponent);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (b.lane == 0) c.part[b.warp] = sum;
    b.sync();
    if (threadIdx.x == 0) {
        sum = c.part[0];
#pragma unroll 1
        for (int w = 1; w < WARPS; w++) sum += c.part[w];
        const u64 bits = (u64)__double_as_longlong(sum);
        store16(list, tag, (u32)c.found, (u32)bits, (u32)(bits >> 32));
    }
    b.sync();
}

// SM 0: all candidates into shared memory, in any order. Their number is c.found then, too large if there is no room.
__device__ __forceinline__ void gather(Block& b, u32 tag) {
    Candidates& c = candidates(b);
#pragma unroll 1
    for (int sm = threadIdx.x; sm < SMS; sm += CONSUMERS) {
        const uint4 got = poll_tagged(list_of(b, sm), tag);
        c.size[sm] = (int)got.y;
        c.sum[sm] = __longlong_as_double((long long)words_of({got.z, got.w}));
    }
    b.sync();
    if (b.warp == 0) {  // each lane some SMs
        constexpr int EACH = (SMS + 31) / 32;
        int size = 0;
        double sum = 0;
#pragma unroll 1
        for (int sm = b.lane * EACH; sm < min((b.lane + 1) * EACH, SMS); sm++) size += c.size[sm], sum += c.sum[sm];
        int end = size;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int before = __shfl_up_sync(~0u, end, step);
            if (b.lane >= step) end += before;
            sum += __shfl_xor_sync(~0u, sum, step);
        }
        int at = end - size;
#pragma unroll 1
        for (int sm = b.lane * EACH; sm < min((b.lane + 1) * EACH, SMS); sm++) c.start[sm] = at, at += c.size[sm];
        if (b.lane == 31) c.total = sum, c.found = end;
    }
    b.sync();
    if (c.found > CANDIDATES) return;
#pragma unroll 1
    for (int i = threadIdx.x; i < c.found; i += CONSUMERS) {
        int sm = 0, after = SMS;  // the last one that starts at i or before
#pragma unroll 1
        while (after - sm > 1) {
            const int middle = (sm + after) / 2;
            if (c.start[middle] <= i)
                sm = middle;
            else
                after = middle;
        }
        const uint4 got = poll_tagged(list_of(b, sm) + RECORD * (1 + i - c.start[sm]), tag);
        c.key[i] = words_of({got.y, got.z});
    }
    b.sync();
}

// SM 0: best first, with what each weighs. `weight` takes the place of the unsorted.
__device__ __forceinline__ void sort_and_weigh(Block& b) {
    Candidates& c = candidates(b);
    const Draw& d = *b.draw;
    const int n = c.found;
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += CONSUMERS) {
        const u64 mine = c.key[i];
        int better = 0;
#pragma unroll 8
        for (int other = 0; other < n; other++) better += c.key[other] > mine;
        c.sorted[better] = mine;
    }
    b.sync();
    const double peak = c.peak;
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += CONSUMERS) {
        const double below = (double)logit_of(c.sorted[i]) - peak;
        double scale = d.inverse_temperature;
#pragma unroll 1
        for (int heated = 1; heated >= 0; heated--, scale = 1.0) (heated ? c.heated : c.weight)[i] = exp(below * scale);
    }
    b.sync();
}

// The next token into s.token[0], or UNDECIDED. `step` of the launch.
__device__ __forceinline__ void draw_token(Block& b, int step) {
    Candidates& c = candidates(b);
    const Draw& d = *b.draw;
    hear_best(b);
    u32 tag = d.serial + step * ROUNDS;
#pragma unroll 1
    for (int round = 0; round < ROUNDS; round++, tag++) {
        const int reach = b.s.reach;
        find_floor(b, reach);
        list_candidates(b, tag);
        if (b.sm == 0) {
            gather(b, tag);
            const int n = c.found;
            if (n <= CANDIDATES) sort_and_weigh(b);
            if (threadIdx.x == 0) {
                const int limit = reach_limit(d);
                int token = UNDECIDED, next = reach;
                if (n > CANDIDATES) {
                    next = max(1, reach / 2);
                } else {
                    const int index = decide(
                        d, n, [&](int i) { return logit_of(c.sorted[i]); }, c.weight, c.heated, c.total,
                        uniform_at(d, b.length + 1));
                    if (index >= 0) token = id_of(c.sorted[index]);
                    const int step = index == TOO_FEW ? 2 : 8;
                    if (n < (d.top_k > 0 ? d.top_k : FEW))
                        next = min(limit, reach + (limit - reach + step - 1) / step);
                    else if (n > MANY)
                        next = max(1, reach - (reach + 7) / 8);
                    if (index == TOO_CLOSE) next = reach;
                }
                const bool helps = n > CANDIDATES ? next < reach : next > reach;
                if (token == UNDECIDED && helps && !floored_by_min_p(d) && round < ROUNDS - 1) token = AGAIN;
                store16(d.lists, tag, (u32)token, (u32)next, 0);
            }
        }
        if (threadIdx.x == 0) {
            const uint4 told = poll_tagged(d.lists, tag);
            b.s.token[0] = (int)told.y;
            b.s.reach = (int)told.z;
        }
        b.sync();
        if (b.s.token[0] != AGAIN) break;
    }
}
