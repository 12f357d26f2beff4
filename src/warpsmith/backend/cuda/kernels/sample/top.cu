// The best k logits of every node, and the logarithm of the sum of all their exponentials: what a draft or a sampler
// wants to know of a row of logits, in k numbers instead of the whole row.
//
// Grid: SLICES blocks of SLICE_THREADS a node, each with a slice of the vocabulary; the last one to finish merges them.
// A slice's k best are at least as good as the k-th best of what its warps, or its threads, have best: what is as good
// is collected, then sorted by counting who is better. Bytes: the logits from L2, then once more from L1.
#include "sample/ranked.cuh"
#include "schedule.cuh"

constexpr int SLICES = 8, SLICE_THREADS = 512, MAX_TOP = 256, COLLECTED = 1024, SLICE_WARPS = SLICE_THREADS / 32;
constexpr int WIDTH = VOCAB % 4 ? 1 : 4, ALL_PIECES = VOCAB / WIDTH;  // a piece is read at once
constexpr int AT_ONCE = 8;  // pieces that a thread asks for together
constexpr bool EVERY_WARP = ALL_PIECES / SLICES > SLICE_THREADS - 32;  // has logits, in every slice
struct alignas(4 * WIDTH) Piece {
    float logit[WIDTH];
};

struct Top {
    const float* logits;  // [nodes][VOCAB]
    u64* keys;            // [nodes][SLICES][MAX_TOP], each slice's best first
    float2* sums;         // [nodes][SLICES] {largest logit, sum of exp(logit - largest)}
    int* arrived;         // [nodes] slices that are done; 0 before and after
    u32* out;             // [nodes][2 * count + 1] ids, logits, log-sum-exp
    int count;            // k, up to MAX_TOP and to VOCAB
};

// In every thread. `spare` has room for a word of each warp.
template <class Value, class Combine>
__device__ Value over_block(Value v, Value* spare, Combine combine) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) v = combine(v, __shfl_xor_sync(~0u, v, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) spare[threadIdx.x / 32] = v;
    __syncthreads();
    v = spare[0];
    for (int w = 1; w < SLICE_WARPS; w++) v = combine(v, spare[w]);
    return v;
}

// How many of `keys` are better.
__device__ int place_of(u64 key, const u64* keys, int count) {
    int better = 0;
#pragma unroll 8
    for (int i = 0; i < count; i++) better += keys[i] > key;
    return better;
}

extern "C" __global__ void __launch_bounds__(SLICE_THREADS) top(const __grid_constant__ Top t) {
    __shared__ u64 keys[SLICES * MAX_TOP], spare[SLICE_WARPS], floor;
    __shared__ float sums[SLICE_WARPS];
    __shared__ int found, last;
    static_assert(COLLECTED <= SLICES * MAX_TOP && SLICE_THREADS <= COLLECTED && MAX_TOP <= SLICE_THREADS,
                  "keys serve for all");
    const int node = blockIdx.x / SLICES, slice = blockIdx.x % SLICES, k = t.count;
    const int begin = (int)((long long)ALL_PIECES * slice / SLICES);
    const int end = (int)((long long)ALL_PIECES * (slice + 1) / SLICES);
    const Piece* row = (const Piece*)(t.logits + (size_t)node * VOCAB);
    // `use` of every logit of this thread, as a key, and of a few zeros; -0 is 0 to the sampler
    const auto each = [&](auto use) {
#pragma unroll 1
        for (int first = begin + threadIdx.x; first < end; first += AT_ONCE * SLICE_THREADS) {
            Piece here[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) here[i] = row[min(first + i * SLICE_THREADS, end - 1)];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int piece = first + i * SLICE_THREADS;
#pragma unroll
                for (int j = 0; j < WIDTH; j++)
                    use(piece < end ? ranked(here[i].logit[j] + 0.0f, piece * WIDTH + j) : 0);
            }
        }
    };

    u64 best = 0;
    each([&](u64 key) { best = best_of(best, key); });
    keys[threadIdx.x] = best;
    if (threadIdx.x == 0) found = 0, floor = 0;
    const float peak = logit_of(over_block(best, spare, best_of));
    if (k <= SLICE_WARPS && EVERY_WARP) {  // as many are as good as the worst of the warps' best
        if (threadIdx.x == 0) {
            u64 least = spare[0];
            for (int w = 1; w < SLICE_WARPS; w++) least = spare[w] < least ? spare[w] : least;
            floor = least;
        }
    } else if (best && place_of(best, keys, min(end - begin, SLICE_THREADS)) == k - 1) {
        floor = best;  // nobody's, where fewer threads have logits
    }
    __syncthreads();

    float sum = 0;
    each([&](u64 key) {
        sum += key ? expf(logit_of(key) - peak) : 0.0f;
        if (key >= floor && key) {
            const int at = atomicAdd(&found, 1);
            if (at < COLLECTED) keys[at] = key;
        }
    });
    sum = over_block(sum, sums, [](float a, float b) { return a + b; });
    int count = found;
    if (count > COLLECTED) {  // a few threads had most of the best: find them one after the other
        u64 before = ~0ull;
        for (count = 0; count < k; count++) {
            best = 0;
            each([&](u64 key) {
                if (key < before) best = best_of(best, key);
            });
            before = over_block(best, spare, best_of);
            if (threadIdx.x == 0) keys[count] = before;
        }
        __syncthreads();
    }
    u64* mine = t.keys + (size_t)(node * SLICES + slice) * MAX_TOP;
    for (int i = threadIdx.x; i < count; i += SLICE_THREADS) {
        const int place = place_of(keys[i], keys, count);
        if (place < k) mine[place] = keys[i];
    }
    for (int i = count + threadIdx.x; i < k; i += SLICE_THREADS) mine[i] = 0;
    if (threadIdx.x == 0) t.sums[node * SLICES + slice] = {peak, sum};

    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(t.arrived + node, 1) == SLICES - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int i = threadIdx.x; i < SLICES * k; i += SLICE_THREADS)
        keys[i] = __ldcg(t.keys + (size_t)(node * SLICES + i / k) * MAX_TOP + i % k);
    __syncthreads();
    u32* out = t.out + (size_t)node * (2 * k + 1);
    for (int i = threadIdx.x; i < SLICES * k; i += SLICE_THREADS) {
        const int place = place_of(keys[i], keys, SLICES * k);
        if (place < k && keys[i]) out[place] = (u32)id_of(keys[i]), out[k + place] = __float_as_uint(logit_of(keys[i]));
    }
    if (threadIdx.x < 32) {  // a lane a slice
        const bool own = threadIdx.x < SLICES;
        const float2 part = own ? __ldcg(t.sums + node * SLICES + threadIdx.x) : float2{MINUS_INFINITY, 0.0f};
        const float largest = warp_max(part.x);
        double total = own ? (double)part.y * exp((double)part.x - largest) : 0.0;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) total += __shfl_xor_sync(~0u, total, step);
        if (threadIdx.x == 0) {
            out[2 * k] = __float_as_uint((float)(largest + log(total)));
            t.arrived[node] = 0;
        }
    }
}
