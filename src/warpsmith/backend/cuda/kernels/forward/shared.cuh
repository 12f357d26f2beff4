// What lies where in an SM's shared memory: the ring, the scratch of the stages, states kept for branches, then
// `Shared`. The ring is as deep as there is room.
#pragma once
#include "forward/parts.cuh"

constexpr int OWN_LOGITS = (HEAD_TILES + SMS - 1) / SMS * WIDE;  // of an SM, at most
#include "sample/candidates.cuh"
// Only plain decoding draws, and only where an SM's logits are few enough to lie there.
constexpr bool SAMPLES = NODES == 1 && OWN_LOGITS <= MAX_OWN_LOGITS;
constexpr int SAMPLE_FLOATS = SAMPLES ? (int)(sizeof(Candidates) + 15) / 16 * 4 : 0;

// A node of the tree in a DeltaNet layer: where its parent's state is kept (-1: in registers, or committed), where its
// own will be (-1: nowhere), and which node its worker takes next (-1: none).
struct __align__(16) Step {
    int source, keep, next, time;
};
constexpr int WORKERS = WARPS / 2, WORKER_WARPS = WARPS / WORKERS, FETCHERS = WARPS / 2;    // see delta.cuh
constexpr int PUBLISHERS = 2, DONE_GROUPS = (NODES + 3) / 4, NODE_TILES = (NODES + 7) / 8;  // see publish.cuh
// How many of these have nodes to publish, four each at a time: a tree may be smaller than the build. Who has none
// takes no part: it would go through all layers at once and arrive for those who are not done.
__device__ __forceinline__ int publishers_of(int nodes) { return min(PUBLISHERS, (nodes + 3) / 4); }
constexpr int IN_ROWS = MOST_IN_TILES * WIDE;  // of a DeltaNet projection, an SM's at most

// Attention's items of a tree (see attention.cuh). Splits with drafted keys take longest: they come first, and as many
// SMs as there are share their nodes; if SMs are left, the others' as well.
struct AttentionItems {
    int splits, fresh;                  // of them with drafted keys
    int fresh_items, count;             // with drafted keys, of a key head; all
    int all_tiles, fresh_tiles, tiles;  // of queries: of the tree, and of an item with drafted keys, and of another
};

struct __align__(16) Shared {
    float residual[OWN_TILES][NODES][8];  // the rows of the residual stream this SM owns
    float4 conv_weights[IN_ROWS];         // of the convolution: this SM's channels
    float past[HISTORY - 1][IN_ROWS];     // their inputs 1, 2, 3 tokens before the tree
    float gate_weights[2 * VALUE_HEADS];  // dt, then a
    Step steps[NODES];
    float squares[2][NODES][WARPS];  // each warp's share of a norm's sum of squares
    int first[WORKERS];              // each worker's first node
    int token[NODES], depth[NODES], deepest;
    signed char path[NODES][4];  // a node's nearest ancestors: itself, parent, ... ; -1 - i: i before the root
    AttentionItems items;
    u8 ancestor[NODES][NODES];           // [node][depth]
    u64 best[NODES == 1 ? WARPS : 1];    // one node's running argmax: value, then lowest id
    int drawn[SAMPLES ? MAX_STEPS : 1];  // tokens of this launch
    int reach;                           // m of sample.cuh
    int stopped;                         // decoding has ended: the producer should leave
};

// Row tiles of 16 rows that a warp holds in registers at once (see matmul.cuh).
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr int WEIGHT_QUADS = 32;
#else
constexpr int WEIGHT_QUADS = 16;
#endif
constexpr int TILES_AT_ONCE = smaller(4, larger(1, WEIGHT_QUADS / (2 * chunks_of(HIDDEN))));
constexpr int TOKENS_AT_ONCE = NODES == 1 ? 1 : 8;
constexpr int MAX_CHUNKS = 16;
__host__ __device__ constexpr int parts_of(int k) { return WARPS * ((chunks_of(k) + MAX_CHUNKS - 1) / MAX_CHUNKS); }
// Chunks of a row tile that are in registers together; a row tile's parts are the sums over such a block by each warp.
template <int K>
struct NarrowBlocks {
    static constexpr int CHUNKS = chunks_of(K), PARTS = parts_of(K);
    static constexpr int WHOLE = NarrowFormats::slot_chunks(NARROW);  // slots
    static constexpr int EACH = (CHUNKS + PARTS / WARPS - 1) / (PARTS / WARPS) + WHOLE - 1 & ~(WHOLE - 1);
    static constexpr int COUNT = (CHUNKS + EACH - 1) / EACH;
    static_assert(COUNT == PARTS / WARPS, "every part must be written");
};
// Trees of more than a node tile look for activations before they ask for them (see matmul.cuh). On sm_90a warps that
// would be idle help them: one looks out (lookout.cuh), two publish (publish.cuh).
constexpr bool LOOKS = NODES > 8;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool HELPED = NODES > 8;
#else
constexpr bool HELPED = false;
#endif

// Partial sums of TILES_AT_ONCE row tiles and TOKENS_AT_ONCE, twice; behind them a tree's rows, for the convolution. Or
// partial sums of a row tile of 8 rows and all tokens: in the first ones' place if a barrier lies between, else behind
// them.
constexpr int ROW_STRIDE = TILES_AT_ONCE * WIDE + 4, TILE_STRIDE = 12;  // floats a token; keep the banks apart
constexpr int WIDE_FLOATS = WARPS * TOKENS_AT_ONCE * ROW_STRIDE;
constexpr int NARROW_FLOATS = larger(parts_of(FFN), parts_of(Y_DIM)) * NODES * TILE_STRIDE;
constexpr int KEPT_ROWS_AT = 2 * WIDE_FLOATS, NARROW_AT = LOOKS ? KEPT_ROWS_AT : 0;
constexpr int PRODUCT_FLOATS =
    on_lines(larger(KEPT_ROWS_AT + (NODES == 1 ? 0 : NODES * ROW_STRIDE), NARROW_AT + NARROW_FLOATS));
// DeltaNet: see delta.cuh
constexpr int ROW_FLOATS = 2 * STATE_DIM + 4 * COLUMNS + 8,
              DELTA_FLOATS = NODES == 1 ? 2 * COLUMNS : NODES * ROW_FLOATS;
// attention: see attention.cuh
// A tile of 16 queries has whole nodes; tiles that share a walk over the keys, as many as there are scratch and
// registers for; chunks of keys that are worked on at the same time.
static_assert(GROUP <= 16, "a node's queries fit in a tile");
constexpr int TILE_NODES = smaller(NODES, 16 / GROUP), TREE_TILES = (NODES + TILE_NODES - 1) / TILE_NODES;
constexpr int MOST_TILES = SHARED_MEMORY < (160 << 10) || NODES != 24 ? 2 : 3,
              WALKS = (TREE_TILES + MOST_TILES - 1) / MOST_TILES;
constexpr int QUERY_TILES = (TREE_TILES + WALKS - 1) / WALKS;
constexpr int CHUNKS_AT_ONCE = QUERY_TILES == 1 ? 2 : 1;
// Words of a row of q or k, of v, of scores, and fp16 numbers of their weights: all but v's keep the banks apart.
// One node's tile has eight rows at most, and its node tile one key; what is read past them counts for nothing.
static_assert(NODES > 1 || GROUP <= 8, "a node's queries are in the tile's upper half");
constexpr int TILE_ROWS = NODES == 1 ? 8 : 16, QUERIES = QUERY_TILES * TILE_ROWS,
              QUERY_ROWS = NODES == 1 ? GROUP : QUERIES;
constexpr int FRESH_ROWS = NODES == 1 ? 1 : (NODES + 7) / 8 * 8;
constexpr int KEY_ROW = HEAD_DIM / 2 + 16, VALUE_ROW = HEAD_DIM / 2, SCORE_ROW = KEYS + 8, SHARE_ROW = KEYS + 8;
// Queries of all walks of an item may lie where another has drafted keys and values; in larger builds they would take
// too many registers on their way.
constexpr int ROWS_FLOATS = QUERY_ROWS * KEY_ROW + FRESH_ROWS * (KEY_ROW + VALUE_ROW),
              ROWS_AHEAD = ROWS_FLOATS / KEY_ROW,
              TILES_FETCHED = NODES <= 24 ? smaller(TREE_TILES, (ROWS_AHEAD + 15) / 16) : QUERY_TILES;
constexpr int ATTENTION_FLOATS =
    ROWS_FLOATS + QUERIES + CHUNKS_AT_ONCE * (2 * KEYS * VALUE_ROW + QUERIES * (SCORE_ROW + SHARE_ROW / 2 + 1));
// A build for one node has room for every stage's scratch side by side, and needs no barrier between them.
constexpr int MIX_AT = NODES == 1 ? PRODUCT_FLOATS : 0;
constexpr int MIX_FLOATS = larger(larger(DELTA_FLOATS, ATTENTION_FLOATS), SAMPLE_FLOATS);
constexpr int SCRATCH_FLOATS = larger(PRODUCT_FLOATS, MIX_AT + MIX_FLOATS);
constexpr int STATE_FLOATS = COLUMNS * STATE_DIM;
// The LM head of a tree: where registers hold the activations of all its nodes beside two row tiles, and the scratch
// the partial sums of these twice, activations are loaded once (see head.cuh).
constexpr int HEAD_ROW_TILES = 2, HEAD_STRIDE = HEAD_ROW_TILES * WIDE + 4, HEAD_FLOATS = WARPS * NODES * HEAD_STRIDE;
constexpr bool HEAD_HOLDS_NODES =
    HELPED && NODE_TILES * chunks_of(HIDDEN) <= 12 && 2 * HEAD_FLOATS <= SCRATCH_FLOATS;

constexpr int TREE_BARRIERS =
    NODES == 1 ? 0 : NODE_TILES + NODES * WORKER_WARPS + (HELPED ? DONE_GROUPS + 1 + NODE_TILES + 1 : 0);
constexpr int WARP_BARRIERS = NODE_TILES + 1 + TREE_BARRIERS;  // see barriers.cuh
constexpr int ROOM = SHARED_MEMORY - (int)sizeof(Shared) - SCRATCH_FLOATS * 4 - 96 - 8 * WARP_BARRIERS;
constexpr int WANTED_SLOTS = NODES == 1 ? 13 : NODES == 8 ? 10 : 9;
constexpr int SLOT_COST = SLOT_BYTES + 16;  // with its two barriers
static_assert(ROOM >= 2 * SLOT_COST, "the ring needs two slots");
constexpr int RING_SLOTS = ROOM / SLOT_COST < WANTED_SLOTS ? ROOM / SLOT_COST : WANTED_SLOTS;
constexpr int SCRATCH_AT = RING_SLOTS * SLOT_BYTES;
constexpr int SHARED_AT =
    (SCRATCH_AT + SCRATCH_FLOATS * 4 + 15 + (NODES == 1 ? 0 : ROOM - RING_SLOTS * SLOT_COST)) / 16 * 16;
// What a tree's rows leave of the scratch, and what is left besides, holds states of nodes where chains branch off.
constexpr int KEPT_STATES =
    NODES == 1 ? 0 : (SHARED_AT - SCRATCH_AT - (MIX_AT + DELTA_FLOATS) * 4) / (STATE_FLOATS * 4);
constexpr int RING_BARRIERS_AT = SHARED_AT + ((int)sizeof(Shared) + 15) / 16 * 16;
constexpr int WARP_BARRIERS_AT = RING_BARRIERS_AT + 16 * RING_SLOTS;
static_assert(WARP_BARRIERS_AT + 8 * WARP_BARRIERS <= SHARED_MEMORY, "all of it must fit");
