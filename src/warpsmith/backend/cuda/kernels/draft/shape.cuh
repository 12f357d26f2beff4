// A draft's programs: what the host fixes when it builds, and what follows from it.
//
// Given with -D: HIDDEN FFN VOCAB LAYERS HEADS KV_HEADS EPS FEATURES (the draft; VOCAB: the target's; FEATURES: layers
// of the target that it reads); SLAB_TYPE_MASK EMBEDDING_TYPE (how weights are stored); GROUP_BLOCKS (superblocks of K
// that an SM has at most); MOST_PARTS (of a group's tile, where SMs share it); LAYER_RESULTS (tiles of results that a
// stage but the head writes at most), FC_RESULTS and CONTEXT_RESULTS of them; TABLE_ENTRIES (of the largest table of
// tiles but the head's); SMS SHARED_MEMORY (the chip); IN_FLIGHT BETWEEN (copies on their way to the ring, see
// large/copier.cuh). Heads have 128 dimensions. Stages count from the block's first: -2 is fc, -1 keys and values of
// the context for all layers, then four a layer, then the target's head.
#pragma once
#include "common/commit.cuh"
#include "large/slab.cuh"

constexpr int NODES = 16, OCTETS = NODES / 8;  // rows of a launch
constexpr int WARPS = 8, CONSUMERS = 256, REDUCERS = 2, THREADS = 384;
constexpr bool POLLED = false;          // SMs do not make their operands themselves, as for one node
constexpr bool COPIES_COUNTED = false;  // no warp skips a slot
constexpr int DIM = 128, BLOCK_K = 256, ROWS = 64, MAX_LAYERS = 32;  // ROWS: of a tile of results
constexpr int GROUP = HEADS / KV_HEADS, DRAFT_DIM = HEADS * DIM, KV_ROWS = KV_HEADS * DIM;
constexpr int NO_STAGE = -3, FC = -2, CONTEXT = -1, HEAD = 4 * LAYERS;

__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int up(int n, int to) { return (n + to - 1) / to * to; }
__host__ __device__ constexpr int groups_of(int k) { return (k / BLOCK_K + GROUP_BLOCKS - 1) / GROUP_BLOCKS; }
constexpr int HIDDEN_GROUPS = groups_of(HIDDEN), INNER_GROUPS = groups_of(FFN), OUT_GROUPS = groups_of(DRAFT_DIM),
              FC_GROUPS = groups_of(FEATURES * HIDDEN);
constexpr int LAST = HEAD + HIDDEN_GROUPS - 1;  // of the head's rounds, a group of K each (see Deal in deal.py)
#include "large/slots.cuh"

// Rows of stages: q | k | v; of every layer k | v; the residual stream; gate and up.
constexpr int IN_ROWS = DRAFT_DIM + 2 * KV_ROWS, CONTEXT_ROWS = LAYERS * 2 * KV_ROWS, RESIDUAL_ROWS = up(HIDDEN, ROWS),
              MLP_ROWS = up(2 * FFN, ROWS);

// What an SM has of the residual stream: superblocks of a row, two warps'.
constexpr int SPAN = BLOCK_K, SPANS = HIDDEN / SPAN, OWN_SPANS = (SPANS * NODES + SMS - 1) / SMS;
__device__ __forceinline__ int first_of(int all, int sm) { return (int)((unsigned)all * (unsigned)sm / SMS); }

// Vectors: of every layer two norms of rows, norms of queries and keys; the last norm; that of the context.
constexpr int MIX_NORM = 0, MLP_NORM = HIDDEN, Q_NORM = 2 * HIDDEN, K_NORM = Q_NORM + DIM, VECTORS = K_NORM + DIM;
constexpr int HIDDEN_NORM = LAYERS * VECTORS + HIDDEN;

// Attention: chunks of 64 keys; chunk c belongs to split c mod SPLITS.
constexpr int CHUNK = 64, QUERIES = NODES * GROUP, BATCH = 64, BATCHES = (QUERIES + BATCH - 1) / BATCH;
constexpr int SPLITS = SMS / (KV_HEADS * BATCHES) < 1    ? 1
                       : SMS / (KV_HEADS * BATCHES) > 32 ? 32
                                                         : SMS / (KV_HEADS * BATCHES);
struct AttentionScratch {
    alignas(16) u32 keys[2][CHUNK * DIM / 2], values[2][CHUNK * DIM / 2];  // of a chunk, and of the next one
    alignas(8) int position[2][CHUNK];
};

// --- arguments (see structures.py) ----------------------------------------------------------------------------------
struct Stage {
    int tiles_at, tile_rows, groups, pad;  // where its table of tiles begins; tiles of 64 rows; groups of K
};
// What an SM does of a stage: of (tile, superblock) pairs of its group of K, tile by tile, `count` from the first on.
struct Run {
    int first_block, blocks;  // the group's superblocks
    int tile, block, count;   // the first pair, `block` counted from the group's first
    int result;               // where its first result goes
    int second, third;        // tiles of rows where the stage's second and third part begin
    u32 types;                // of the parts, a byte each
    int pad[3];
};
struct Params {
    const u8* stream;
    const u32* parcels;       // where they lie, SM after SM (see large/copier.cuh)
    const u32* first_parcel;  // [SMS] of each SM, then [SMS] of its part of the block's first stage
    const u8* head_stream;    // the target's
    const u32* head_parcels;
    const u32* first_head_parcel;
    const Stage* stages;
    const Run* runs;        // [stages][SMS]
    const u16* tiles;       // a stage's [groups][tile_rows + 1], aligned: where results of a tile of rows begin
    const u8* embedding;    // the file's rows
    const float* vectors;
    const float2* rope;
    // what is remembered of a sequence
    u32* keys;            // fp16 [LAYERS][KV_HEADS][capacity][128]
    u32* values;
    int* positions;       // [capacity]
    const u16* waiting;   // bf16 (see activation_at), features of rows to be appended
    long long capacity;
    // between SMs
    u32* counter;          // arrivals, then who has left; 32 words on those of stages, see `used`; 0 before and after
    u32* words;            // see words.cuh
    float* sums;           // [2][tile][NODES][64]: of all stages, by turns, but the head, and
    float* head_sums;      // of the head, see OwnSums
    u32* parts;            // words too: fp16 [NODES][HEADS][SPLITS][128]
    u32* part_stats;       // [NODES][HEADS][SPLITS] {maximum, sum}, f32
    // results
    float* out_logits;
    float* out_hidden;
    long long* profile;
};
// What is asked of one launch.
struct Request {
    int nodes, position;       // of the block, 0 for none; where the root stands
    int rows, first_position;  // to append, and where the first of them stands
    int appended;              // before, since the beginning
    int want_logits, want_hidden;
    int tokens[NODES];
    int window[MAX_LAYERS];  // how far a layer sees, 0: all the way
    int causal[MAX_LAYERS];
    u8 context[2 * MAX_LAYERS];  // whose the i-th keys or values of the context are: twice a layer, and 1 for values
    const Path* path;  // whose nodes are the rows to append, and whose last token is the root; or null
};

// --- a thread block's shared memory ---------------------------------------------------------------------------------
// Activations of a group of superblocks, as in the activations-first pass (large/shape.cuh).
constexpr int STEP_BYTES = NODES * 32, BACK_AT = 17 * STEP_BYTES, BLOCK_BYTES = up(BACK_AT + NODES * 4, 128),
              OPERAND_BYTES = GROUP_BLOCKS * BLOCK_BYTES;
constexpr float OPERANDS_BACK = 0x1p24f;  // weights are integers times 2^-24
constexpr int SCRATCH_BYTES = up(larger(OPERAND_BYTES, (int)sizeof(AttentionScratch)), 128);
constexpr int SUM_BUFFERS = 2, SUM_BYTES = 2 * 4 * OCTETS * 512;  // of a tile of results: both groups of warps
constexpr int SUM_WRITERS = WARPS;
// Last bits of sums that tell a stage from the others with the same place, and all ones from none of them.
__host__ __device__ constexpr u32 ones_above(u32 n) {
    u32 ones = 1;
    while (ones <= n) ones = 2 * ones + 1;
    return ones;
}
constexpr u32 SUM_TAGS = ones_above(2 * LAYERS + 1);

struct Shared {
    Params params;  // here, since functions would fetch them from memory
    Request request;
    alignas(16) Run runs[2];  // of this stage and the next, by turns
    alignas(16) float residual[OWN_SPANS][SPAN];
    float inverse[REDUCERS][NODES];  // 1 / rms of its residual stream, if the stage's activations are `normed`
    u32 largest[2][WARPS];           // of a span, by turns
#ifdef EVERY_LANE_ARRIVES
    alignas(8) u64 pairs[WARPS / 2];  // see sync_pair
    u32 meetings[WARPS];
#endif
    int scaled;         // the last stage with a superblock that has a scale of its own
    u32 half_by_nodes;  // 2^31 / rows, rounded up
    int token[NODES];
    int marks;  // of a profile, so far
    alignas(16) u16 tiles[TABLE_ENTRIES];  // of the stage whose sums are at work
};
constexpr int RING_AT = SCRATCH_BYTES, SUMS_AFTER = SUM_BUFFERS * SUM_BYTES, SUMS_INSIDE = 0,
              SHARED_STRUCT = up((int)sizeof(Shared), 128);
constexpr int BARRIER_BYTES = 1024;
#include "large/room.cuh"
