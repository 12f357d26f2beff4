// The activations-first forward pass: what the host fixes when it builds, and what follows from it.
//
// Given with -D: HIDDEN FFN VOCAB LAYERS HEADS KV_HEADS KEY_HEADS VALUE_HEADS EPS (the model); SLAB_TYPE_MASK
// EMBEDDING_TYPE (how its weights are stored); KEY_TYPE VALUE_TYPE (how keys and values are kept); GROUP_BLOCKS
// (superblocks of K that an SM has at most); MOST_PARTS (of a group's tile, where SMs share it); TABLE_ENTRIES (of the
// largest table of tiles but the head's); SMS SHARED_MEMORY (the chip); IN_FLIGHT BETWEEN (copies on their way to the
// ring, see copier.cuh); NODES (1, 8, 16 or 24: columns of this build); SAMPLES (whether it draws tokens);
// SHORT_CONTEXT (whether an SM has so few chunks of keys that room is better given to weights); LAYER_RESULTS (tiles of
// results that a layer's stage writes at most); SUM_TAGS (last bits of sums that say of which stage they are, see
// words.cuh).
#pragma once
#include "common/cache.cuh"
#include "common/made_tree.cuh"
#include "large/slab.cuh"

constexpr int WARPS = 8, CONSUMERS = 256, REDUCERS = 2, THREADS = 384;
constexpr int CONSUMER_REGISTERS = 208, OTHERS_REGISTERS = 88;
constexpr int HEAD_DIM = 256, STATE_DIM = 128, BLOCK_K = 256, ROWS = 64;  // ROWS: of a tile of results
constexpr int KEY_DIM = KEY_HEADS * STATE_DIM, VALUE_DIM = VALUE_HEADS * STATE_DIM,
              CONV_CHANNELS = 2 * KEY_DIM + VALUE_DIM;
constexpr int GROUP = HEADS / KV_HEADS, ATTENTION_DIM = HEADS * HEAD_DIM;
constexpr int MAX_NODES = 64, HISTORY = 4, COLUMNS = 16, BLOCKS = VALUE_DIM / COLUMNS,
              BLOCKS_PER_HEAD = STATE_DIM / COLUMNS;
constexpr int MAX_STOPS = 16, MAX_FEATURES = 8;
constexpr int OCTETS = (NODES + 7) / 8;
// One node: what is exchanged has two places by turns, and every SM makes its operands itself (see words.cuh).
constexpr bool POLLED = NODES == 1;
constexpr bool COPIES_COUNTED = POLLED;  // where warps skip slots
// Groups of K of projections from the residual stream, from the mixers and from the MLP's inner activation; rows of
// stages.
__host__ __device__ constexpr int groups_of(int k) { return (k / BLOCK_K + GROUP_BLOCKS - 1) / GROUP_BLOCKS; }
constexpr int HIDDEN_GROUPS = groups_of(HIDDEN), INNER_GROUPS = groups_of(FFN);
// Stages: four a layer, then the head's rounds, a group of K each (see Deal in deal.py).
constexpr int HEAD = 4 * LAYERS, STAGES = HEAD + HIDDEN_GROUPS;

__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int up(int n, int to) { return (n + to - 1) / to * to; }
#include "large/slots.cuh"

// Rows of a stage, in the order of its parts; every part begins a tile of 64 rows.
constexpr int Z_AT = up(CONV_CHANNELS, ROWS), GATES_AT = Z_AT + up(VALUE_DIM, ROWS);  // DeltaNet: qkv | z | beta, alpha
constexpr int KEYS_AT = up(2 * ATTENTION_DIM, ROWS),
              VALUES_AT = KEYS_AT + up(KV_HEADS * HEAD_DIM, ROWS);  // q and gate | k | v

constexpr int DELTA_ROWS = GATES_AT + up(2 * VALUE_HEADS, ROWS),
              ATTENTION_IN_ROWS = VALUES_AT + up(KV_HEADS * HEAD_DIM, ROWS);
constexpr int RESIDUAL_ROWS = up(HIDDEN, ROWS), MLP_ROWS = up(2 * FFN, ROWS);

// What an SM has of the residual stream: spans of 128 rows, a warp's; of a tree a superblock of a node, two warps'.
constexpr int SPAN = POLLED ? 128 : BLOCK_K, SPANS = HIDDEN / SPAN, OWN_SPANS = (SPANS * NODES + SMS - 1) / SMS;
__device__ __forceinline__ int first_of(int all, int sm) { return (int)((unsigned)all * (unsigned)sm / SMS); }

// Vectors: the small F32 weights, layer after layer.
constexpr int DELTA_VECTORS = 2 * HIDDEN + 4 * CONV_CHANNELS + 2 * VALUE_HEADS + STATE_DIM,
              ATTENTION_VECTORS = 2 * HIDDEN + 2 * HEAD_DIM;
constexpr int MIX_NORM = 0, MLP_NORM = HIDDEN, CONV_AT = 2 * HIDDEN, DT_AT = CONV_AT + 4 * CONV_CHANNELS,
              A_AT = DT_AT + VALUE_HEADS;
constexpr int GATED_NORM_AT = A_AT + VALUE_HEADS, Q_NORM_AT = 2 * HIDDEN, K_NORM_AT = Q_NORM_AT + HEAD_DIM;

// Attention: chunks of 64 positions; of those before a query's last two chunk c belongs to split c mod SPLITS; the last
// two are a part each.
constexpr int CHUNK = 64, SPLITS = 128 / KV_HEADS, PARTS = SPLITS + 2;

// --- arguments (see large.py) ---------------------------------------------------------------------------------------
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
struct Request {
    // steps: tokens to decode, which the build for one node does alone; or 0: one pass
    int nodes, length, steps, stops, features, want_logits, want_hidden;
    int whole;  // nodes of the tree that these are a part of, or 0: they are all
    int tokens[MAX_NODES], parents[MAX_NODES], stop_ids[MAX_STOPS], feature_layers[MAX_FEATURES];
    u8 place[MAX_NODES];  // of a node in that tree
    const MadeTree* made;  // instead of these tokens and parents, of `nodes` at most; or null
};
struct Params {
    const u8* stream;
    const u32* parcels;       // where they lie, SM after SM (see copier.cuh)
    const u32* first_parcel;  // [SMS] of each SM
    const Stage* stages;      // [STAGES]
    const Run* runs;          // [STAGES][SMS]
    const u16* tiles;         // a stage's [groups][tile_rows + 1], aligned: where results of a tile of rows begin
    const u8* recurrent;      // [LAYERS]
    const u8* embedding;      // the file's rows
    const float* vectors;
    const float2* rope;
    float* delta;
    float* history;
    u8* keys;    // [attention layer][key head][context] rows of KEY_ROW bytes
    u8* values;  // and of VALUE_ROW
    long long context;
    // between SMs
    u32* counter;        // arrivals; 32 words on those of SMs that used sums, then of sums of the four stages
    u32* words;          // see words.cuh
    float* sums;         // [tile][NODES][64]: of a layer's stages (of one node twice, see words.cuh), and
    float* head_sums;    // of the head: of one node [VOCAB], else see OwnSums
    u32* queries;        // fp16 [NODES][HEADS][256]
    u32* parts;          // fp16 [NODES][HEADS][PARTS][256]
    float2* part_stats;  // [NODES][HEADS][PARTS] {maximum, sum}
    u64* best;           // [NODES][SMS]
    // what a commit needs
    float* pending_raw;
    float* pending_key;
    float* pending_write;
    float* pending_fade;
    u8* pending_keys;  // [attention layer][key head][MAX_NODES] rows
    u8* pending_values;
    float* branch_state;  // [MIX_UNITS][KEPT_STATES][8][128]
    // results
    int* out_tokens;
    volatile int* out_count;
    float* out_logits;
    float* out_features;
    float* out_hidden;
    long long* profile;
};

// --- a thread block's shared memory ---------------------------------------------------------------------------------
// Activations of a group of superblocks: 16 steps of 16 k, then the sums of 32 k (rounded, rests):
// [octet][half][token][8] fp16 (of one node: see multiply_one.cuh); then factors of a token's sums in f32. A tree's
// products read 128 bytes at a time.
constexpr int STEP_BYTES = NODES * 32, BACK_AT = 17 * STEP_BYTES,
              BLOCK_BYTES = up(BACK_AT + NODES * 4, POLLED ? 16 : 128), OPERAND_BYTES = GROUP_BLOCKS * BLOCK_BYTES;
constexpr float OPERANDS_BACK = 0x1p24f;  // weights are integers times 2^-24
// DeltaNet: an SM has units of 8 value columns whose heads share a key head. A row a node: q, k and v after the
// convolution, silu(z), what is written, gates; then their inputs before it (which may go when it is done), with its
// weights and the inputs before the tree.
constexpr int MIX_UNITS = VALUE_DIM / 8, KEY_UNITS = VALUE_HEADS / KEY_HEADS * 16, KEY_SMS = SMS / KEY_HEADS,
              KEY_PARTS = larger(1, KEY_SMS < KEY_UNITS ? KEY_SMS : KEY_UNITS),
              OWN_UNITS = (KEY_UNITS + KEY_PARTS - 1) / KEY_PARTS, OWN_HEADS = (OWN_UNITS + 14) / 16 + 1;
// Units that would leave some warps without work are walked in halves.
constexpr bool SPLIT_UNITS = !POLLED && OWN_UNITS > WARPS / 2 && OWN_UNITS < WARPS;
// With many nodes, SMs that share a key head convolve a part of its q and k each, and exchange them.
constexpr bool QK_SHARED = NODES > 8 && KEY_PARTS > 1;
constexpr int QK_QUADS = QK_SHARED ? (STATE_DIM / 2 + KEY_PARTS - 1) / KEY_PARTS : STATE_DIM / 2;
constexpr int MIX_CHANNELS = 2 * STATE_DIM + OWN_UNITS * 8,
              MIX_ROW = up(MIX_CHANNELS + 2 * OWN_UNITS * 8 + 4 + OWN_HEADS * 2, 32) + 4;  // nodes' banks differ
// Four by four, what an SM reads of the projection: what it convolves, z, and beta and alpha of each head.
constexpr int CONVOLVED_QUADS = QK_QUADS + OWN_UNITS * 2, INPUT_QUADS = CONVOLVED_QUADS + OWN_UNITS * 2 + 2 * OWN_HEADS;
constexpr int MIX_ROWS_BYTES = NODES * MIX_ROW * 4,
              MIX_INPUT_BYTES = (NODES * INPUT_QUADS * 4 + 7 * CONVOLVED_QUADS * 4 + 2 * OWN_HEADS + INPUT_QUADS) * 4;
// Attention: values of some chunks, as they are kept; of some tiles of 16 queries their rows, scores of two chunks,
// weights in fp16, and what the softmax remembers. Trees of many nodes need fewer chunks ahead. Where a walk has many
// chunks, and warps have registers for it, half of them make weights of one while the others add up values of the one
// before.
constexpr int KEY_ROW = cache_row_bytes(KEY_TYPE), VALUE_ROW = cache_row_bytes(VALUE_TYPE);
constexpr int VALUE_STAGES = SHORT_CONTEXT             ? 1
                             : !ROOMY                  ? VALUE_TYPE == CACHE_Q4_0 ? 2 : 1
                             : VALUE_TYPE == CACHE_F16 ? 2
                                                       : (VALUE_TYPE == CACHE_Q8_0 ? 2 : 3) + (NODES == 1),
              VALUE_BYTES = CHUNK * VALUE_ROW, SCORE_TILE = 16 * CHUNK * 4;
constexpr bool TWO_TEAMS = ROOMY && VALUE_STAGES > 1;
constexpr int TEAMS = TWO_TEAMS ? 2 : 1,  // chunks of which weights are kept
              QUERY_TILE_BYTES = 16 * (HEAD_DIM * 2 + 2 * 4) + 2 * SCORE_TILE + TEAMS * 16 * (CHUNK * 2 + 4);
// Tiles that one walk over the keys serves: as many as leave the ring its slots. In short contexts SMs are idle rather
// than late: eight nodes have two walks.
constexpr int ATTENTION_ROOM = (!ROOMY                         ? 52
                                : NODES <= 8 && SHORT_CONTEXT ? 72
                                : NODES <= 16                  ? 106
                                : SHORT_CONTEXT                ? 120
                                                               : 127)
                               << 10,
              ALL_TILES = (NODES * GROUP + 15) / 16,
              ROOM_TILES = (ATTENTION_ROOM - VALUE_STAGES * VALUE_BYTES) / QUERY_TILE_BYTES,
              MOST_TILES = ROOM_TILES < 6 ? ROOM_TILES : 6, WALKS = (ALL_TILES + MOST_TILES - 1) / MOST_TILES,
              QUERY_TILES = (ALL_TILES + WALKS - 1) / WALKS;
constexpr int QUERIES_AT = VALUE_STAGES * VALUE_BYTES, SCORES_AT = QUERIES_AT + QUERY_TILES * 16 * HEAD_DIM * 2,
              WEIGHTS_AT = SCORES_AT + QUERY_TILES * 2 * SCORE_TILE,
              FACTORS_AT = WEIGHTS_AT + TEAMS * QUERY_TILES * 16 * CHUNK * 2;
constexpr int ATTENTION_BYTES = FACTORS_AT + QUERY_TILES * 16 * (2 + TEAMS) * 4;
// Sampling: an SM's logits, and candidates.
constexpr int HEAD_TILES = up(VOCAB, ROWS) / ROWS, OWN_LOGITS = (HEAD_TILES + SMS - 1) / SMS * ROWS;
#include "sample/candidates.cuh"
constexpr int SAMPLE_BYTES = SAMPLES ? (int)sizeof(Candidates) : 0;
constexpr int OTHERS_BYTES = larger(larger(OPERAND_BYTES, ATTENTION_BYTES), SAMPLE_BYTES);
// Of a tile of results: both groups of warps. Of one node a superblock's, see multiply_one.cuh. How many warps fill and
// empty them. Where a second buffer would take the room of a slot of weights, one does: a tile takes far longer to
// multiply than to add up.
constexpr int SUM_BUFFERS = POLLED ? WARPS / 2 : NODES > 16 ? 1 : 2,
              SUM_BYTES = POLLED ? ROWS * 16 : 2 * 4 * OCTETS * 512, SUM_WRITERS = POLLED ? 2 : WARPS;
// In a tree they lie in the scratch, behind operands and what a mixer asks for early; before anything else is written
// there, they have been read (see wait_for_empty_buffers). One node's lie behind the ring.
constexpr int EARLY_BYTES = larger(OPERAND_BYTES, larger(VALUE_STAGES * VALUE_BYTES, MIX_ROWS_BYTES + MIX_INPUT_BYTES)),
              SUMS_INSIDE = up(EARLY_BYTES, 128), SUMS_AFTER = POLLED ? SUM_BUFFERS * SUM_BYTES : 0;
// Of one node a DeltaNet's inputs lie beside the operands, since they are fetched while its projection is made.
constexpr int MIX_INPUTS_AT = POLLED ? larger(MIX_ROWS_BYTES, OPERAND_BYTES) : MIX_ROWS_BYTES;
constexpr int SCRATCH_BYTES =
    up(larger(OTHERS_BYTES, POLLED ? MIX_INPUTS_AT + MIX_INPUT_BYTES : SUMS_INSIDE + SUM_BUFFERS * SUM_BYTES), 128);
// States of branches that have room in the scratch, once the inputs may go; the others are kept in memory.
constexpr int UNIT_BYTES = 8 * STATE_DIM * 4,
              MIX_PLACES = (SCRATCH_BYTES - MIX_ROWS_BYTES) / (OWN_UNITS * UNIT_BYTES);

// A node's turn when a DeltaNet's states are walked (see prepare_walk): the place that its parent's state is fetched
// from, or HERE if it is at hand, the place that what is at hand afterwards is kept at, or NOWHERE, and whether no
// state follows from it.
struct alignas(4) Visit {
    signed char node, from, to;
    bool leaf;
};
constexpr int HERE = -1, NOWHERE = -1, KEPT_STATES = 5;  // places: a tree of n nodes needs at most log2(n)
static_assert(NODES < 1 << KEPT_STATES, "too few places for states");

// Attention's items (see attention_items.cuh): how many there are of each kind, and one of them.
struct ItemCounts {
    int committed;                   // whole chunks that are: all nodes may share them
    int chunks, splits, batches;     // chunks that are early for some node; splits of them; batches of queries
    int shared, own_at, whole, all;  // items of shared chunks; where nodes' own begin; chunks of a node; all items
};
struct Item {
    int kv_head, first_row, rows, part;  // queries (node, head of the group) in order
    int chunk, stride, steps;            // chunks chunk, chunk + stride, ...
    int node, own_end;  // the one whose own chunk this is, and where its positions end; or -1: shared chunks
};

struct Shared {
    Params params;  // here, since functions would fetch them from memory
    Request request;
    alignas(16) float residual[OWN_SPANS][SPAN];
    float inverse[REDUCERS][NODES];  // 1 / rms of its residual stream, if the stage's activations are `normed`
    u32 largest[2][WARPS];  // of a span, by turns
#ifdef EVERY_LANE_ARRIVES
    alignas(8) u64 pairs[WARPS / 2];  // see sync_pair
    u32 meetings[WARPS];
#endif
    int scaled;             // the last stage with a superblock that has a scale of its own
    unsigned long long best[NODES];
    int token[NODES], depth[NODES];
    u32 half_by_nodes;                   // 2^31 / nodes, rounded up
    signed char path[NODES][4];          // a node and its ancestors; -1, -2, ...: committed tokens, newest first
    Visit visits[NODES];                 // the nodes in the order in which states are walked
    signed char ancestor[NODES][NODES];  // by depth
    alignas(16) Run runs[2];             // of this stage and the next, by turns
    u32 recurrent[4];                    // bits of layers
    alignas(16) u16 tiles[TABLE_ENTRIES];  // of the stage whose sums are at work
    volatile int stopped;
    int deepest;
    ItemCounts items;
    Item first_item;  // of this SM's
    int drawn[SAMPLES ? MAX_STEPS : 1];  // tokens of this launch
    int reach;                           // m of sample.cuh
#ifdef PROFILE
    int marks;
#endif
};
constexpr int RING_AT = SCRATCH_BYTES, SHARED_STRUCT = up((int)sizeof(Shared), 128);
constexpr int BARRIER_BYTES = 384;
#include "large/room.cuh"
