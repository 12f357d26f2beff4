// One walk over chunks of keys and values, for some rows of queries of one key head.
//
// A step takes a chunk of 64 positions: scores (a warp has 8 keys), softmax so far (eight lanes have a query), sums (a
// warp has 32 dimensions). Scores of the next chunk are made beside the softmax. Keys of the chunk after that are on
// their way to registers, values of the next steps to shared memory. In long contexts (TWO_TEAMS) four warps have keys,
// 16 of a chunk each, and four have values, 64 dimensions each, a chunk later, so that either team works while the
// other waits. A query's numbers depend on it and its own keys alone, whatever else is in its tile and whoever makes
// them.
#pragma once
#include "large/attention_loads.cuh"

static_assert(HEAD_DIM == 32 * WARPS && CHUNK == 8 * WARPS, "a warp has 32 dimensions, or 8 keys");

// One node's queries, of which a tile has half, stay in registers.
constexpr bool HELD = POLLED && TWO_TEAMS;
enum { SCORES_MADE = 8, VALUES_HERE, WEIGHTS_MADE, WEIGHTS_USED = WEIGHTS_MADE + 2 };  // barriers; the last two twice

// Where four keys' scores are: lanes that load together meet different banks.
__device__ __forceinline__ int score_place(int row, int four) { return row * (CHUNK * 4) + (four ^ (row & 7)) * 16; }

struct KeyWalk : AttentionLoads {
    using AttentionLoads::AttentionLoads;

    // Of the keys that have come; the next are asked for. A warp's groups of keys share what is loaded of a query.
    typedef uint2 Held[HELD ? HEAD_DIM / 16 : 1];
    __device__ __forceinline__ void scores(int step, int tiles, const Held& held = {}) {
        const int g = b.lane >> 2, q = b.lane & 3;
        uint4 key[EACH][8];
        if (b.warp * (EACH * 8) >= positions()) return;
#pragma unroll
        for (int i = 0; i < EACH; i++) next[i].operands(key[i], q);
        if (KEY_TYPE != CACHE_F16 && step + 1 < steps) ask_keys(step + 1);
#pragma unroll 1
        for (int tile = 0; tile < (QUERY_TILES == 1 ? 1 : tiles); tile++) {
            const auto query = [&](int i) -> uint4 {
                if constexpr (HELD) return {held[i].x, 0, held[i].y, 0};
                return *(const uint4*)(at.queries + tile * QUERY_TILE + b.lane * 16 + i * OPERAND);
            };
            float s[EACH][4][4] = {};
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const uint4 even = query(2 * j), odd = query(2 * j + 1);
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    mma_half(s[i][j % 4], even, key[i][j].x, key[i][j].y);
                    mma_half(s[i][j % 4], odd, key[i][j].z, key[i][j].w);
                }
            }
            u8* to = at.scores + (tile * 2 + (step & 1)) * SCORE_TILE + q % 2 * 8;
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const auto all = [&](int k) { return (s[i][0][k] + s[i][1][k]) + (s[i][2][k] + s[i][3][k]); };
                u8* here = to + score_place(g, (b.warp * EACH + i) * 2 + q / 2);
                *(float2*)here = {all(0), all(1)}, *(float2*)(here + 8 * CHUNK * 4) = {all(2), all(3)};
            }
        }
        if (KEY_TYPE == CACHE_F16 && step + 1 < steps) ask_keys(step + 1);  // the operands are the words
    }

    // Scores become weights. Lane 4 u + r has row r of its warp's four, keys 4 u .. + 3 of every 32. A warp has every
    // TEAM_WARPS-th four of COUNT rounds, all at once, since each is little but waiting.
    template <int COUNT>
    __device__ __forceinline__ void soften(int step) const {
        const int u = b.lane >> 2, here = chunk + step * stride, first = here * CHUNK, turn = step % TEAMS;
        int row[COUNT];
        float v[COUNT][2][4], peak[COUNT], weight[COUNT], before[COUNT], now[COUNT];
#pragma unroll
        for (int p = 0; p < COUNT; p++) {
            row[p] = min((b.warp + p * TEAM_WARPS) * 4 + (b.lane & 3), QUERY_TILES * 16 - 1);
            const u8* scores = at.scores + (row[p] / 16 * 2 + (step & 1)) * SCORE_TILE;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float4 four = *(const float4*)(scores + score_place(row[p] % 16, u + 8 * i));
                v[p][i][0] = four.x, v[p][i][1] = four.y, v[p][i][2] = four.z, v[p][i][3] = four.w;
            }
            before[p] = at.peak[row[p]];
        }
        if (node >= 0)
#pragma unroll
            for (int p = 0; p < COUNT; p++)
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        if (first + (u + 8 * i) * 4 + j >= own_end) v[p][i][j] = MINUS_INFINITY;
#pragma unroll
        for (int p = 0; p < COUNT; p++)
            peak[p] = fmaxf(fmaxf(fmaxf(v[p][0][0], v[p][0][1]), fmaxf(v[p][0][2], v[p][0][3])),
                            fmaxf(fmaxf(v[p][1][0], v[p][1][1]), fmaxf(v[p][1][2], v[p][1][3])));
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2)
#pragma unroll
            for (int p = 0; p < COUNT; p++) peak[p] = fmaxf(peak[p], __shfl_xor_sync(~0u, peak[p], lanes));
        uint2 packed[COUNT][2];
#pragma unroll
        for (int p = 0; p < COUNT; p++) {
            now[p] = fmaxf(before[p], peak[p]), weight[p] = 0.0f;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                packed[p][i] = {pack_half(power_of_2(v[p][i][0] - now[p]), power_of_2(v[p][i][1] - now[p])),
                                pack_half(power_of_2(v[p][i][2] - now[p]), power_of_2(v[p][i][3] - now[p]))};
                const float2 a = unpack_half(packed[p][i].x), c = unpack_half(packed[p][i].y);
                weight[p] += (a.x + a.y) + (c.x + c.y);
            }
        }
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2)
#pragma unroll
            for (int p = 0; p < COUNT; p++) weight[p] += __shfl_xor_sync(~0u, weight[p], lanes);
        __syncwarp();  // all have read the peak
#pragma unroll
        for (int p = 0; p < COUNT; p++) {
            if ((b.warp + p * TEAM_WARPS) * 4 >= rows) break;
            bool sees = true;  // nodes of one tile may share different chunks
            if (node < 0) {
                const int early =
                    early_chunks(node_position(b, min(first_row + row[p], first_row + rows - 1) / GROUP));
                sees = part == SPLITS ? here == early : here < early;
            }
#pragma unroll
            for (int i = 0; i < 2;
                 i++) {  // keys 4 (u + 8 i): product (u + 8 i) / 4, half u / 2 % 2, lanes u % 2 * 2, + 1
                u8* to = at.weights + (row[p] / 16 * TEAMS + turn) * WEIGHT_TILE + (u / 4 + 2 * i) * OPERAND +
                         operand_place(row[p], u % 2 * 2, u / 2 % 2);
                *(u32*)to = sees ? packed[p][i].x : 0, *(u32*)(to + 16) = sees ? packed[p][i].y : 0;
            }
            if (u == 0) {
                const float factor = power_of_2(before[p] - now[p]);  // 0 at first
                at.factor[turn * (QUERY_TILES * 16) + row[p]] = sees ? factor : 1.0f;
                if (sees)
                    at.peak[row[p]] = now[p], at.weight[row[p]] = fmaf(at.weight[row[p]], factor, weight[p]);
            }
        }
    }
    __device__ __forceinline__ void softmax(int step) const {
        constexpr int AT_ONCE = TEAM_WARPS * 4, ROUNDS = (QUERY_TILES * 16 + AT_ONCE - 1) / AT_ONCE;
        if (ROUNDS > 1 && (TWO_TEAMS || rows > AT_ONCE))
            soften<ROUNDS>(step);
        else if (b.warp * 4 < rows)
            soften<1>(step);
    }

    typedef float SumOf[QUERY_TILES][EACH][4][4];
    // The first of this warp's blocks of 32 dimensions.
    __device__ __forceinline__ int first_block() const { return (b.warp - (WARPS - TEAM_WARPS)) * EACH; }

    // WHOLE: of all tiles, and all positions count, so that nothing is asked in between.
    template <bool WHOLE>
    __device__ __forceinline__ void add_values(SumOf& sum, int step, int tiles) const {
        const int g = b.lane >> 2, turn = step % TEAMS;
        const u8* rows_at = at.values + step % VALUE_STAGES * VALUE_BYTES;
        const float* factors = at.factor + turn * (QUERY_TILES * 16) + g;
        u32 scales[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) scales[i] = value_scales<VALUE_TYPE>(rows_at, first_block() + i, b.lane);
#pragma unroll
        for (int tile = 0; tile < QUERY_TILES; tile++) {
            if (!WHOLE && tile >= tiles) break;
            const float low = factors[tile * 16], high = factors[tile * 16 + 8];
#pragma unroll
            for (int i = 0; i < EACH; i++)
#pragma unroll
                for (int o = 0; o < 4; o++) {
                    float(&v)[4] = sum[tile][i][o];
                    v[0] *= low, v[1] *= low, v[2] *= high, v[3] *= high;
                }
        }
#pragma unroll(WHOLE ? 4 : 1)
        for (int from = 0; from < (WHOLE ? CHUNK : positions()); from += 16) {
            u32 v[EACH][4][2];
#pragma unroll
            for (int i = 0; i < EACH; i++)
                value_operands<VALUE_TYPE>(v[i], rows_at, scales[i], from, first_block() + i, b.lane);
#pragma unroll
            for (int tile = 0; tile < QUERY_TILES; tile++) {
                if (!WHOLE && tile >= tiles) break;
                const uint4 weights = *(const uint4*)(at.weights + (tile * TEAMS + turn) * WEIGHT_TILE +
                                                      from / 16 * OPERAND + b.lane * 16);
#pragma unroll
                for (int i = 0; i < EACH; i++)
#pragma unroll
                    for (int o = 0; o < 4; o++) mma_half(sum[tile][i][o], weights, v[i][o][0], v[i][o][1]);
            }
        }
    }
    __device__ __forceinline__ void add_values(SumOf& sum, int step, int tiles) const {
        if (node < 0 && tiles == QUERY_TILES)
            add_values<true>(sum, step, tiles);
        else
            add_values<false>(sum, step, tiles);
    }

    __device__ __forceinline__ void write_sums(const SumOf& sum, int tiles) const {
        const int g = b.lane >> 2, q = b.lane & 3;
#pragma unroll
        for (int tile = 0; tile < QUERY_TILES; tile++) {
            if (tile >= tiles) break;
#pragma unroll
            for (int upper = 0; upper < 2; upper++) {
                const int row = tile * 16 + upper * 8 + g;
                if (row >= rows || at.weight[row] == 0.0f) continue;  // none of its positions
                const size_t to = (size_t)query_at(row) * PARTS + part;
                const float inverse = reciprocal(fmaxf(at.weight[row], 1e-30f));
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    float first[4], second[4];
#pragma unroll
                    for (int o = 0; o < 4; o++)
                        first[o] = sum[tile][i][o][upper * 2] * inverse,
                        second[o] = sum[tile][i][o][upper * 2 + 1] * inverse;
                    u32* block = b.p.parts + to * (HEAD_DIM / 2) + (first_block() + i) * 16;
                    store_sums<VALUE_TYPE>(block, first, second, q);
                }
            }
        }
    }
    __device__ __forceinline__ void write_stats() const {
        const int row = threadIdx.x;
        if (row < rows && at.weight[row] != 0.0f)
            b.p.part_stats[(size_t)query_at(row) * PARTS + part] = {at.peak[row], at.weight[row]};
    }

    // After `go_on`, when the queries are there.
    __device__ __forceinline__ void run() {
        const int tiles = (rows + 15) / 16;
        if (threadIdx.x < tiles * 16) at.peak[threadIdx.x] = MINUS_INFINITY, at.weight[threadIdx.x] = 0.0f;
        if constexpr (TWO_TEAMS) {
            if (has_keys())
                weigh(tiles);
            else
                add_up(tiles);
        } else {
            walk(tiles);
        }
    }
    __device__ __forceinline__ void walk(int tiles) {
        SumOf sum = {};
        scores(0, tiles);
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            b.sync();
            if (step + VALUE_STAGES > FIRST_STEPS) ask_values(step + VALUE_STAGES - 1);
            copies_queued();
            expect(step + EXPECTED);
            softmax(step);
            if (step + 1 < steps) scores(step + 1, tiles);
            copies_left<VALUE_STAGES - 1>();
            b.sync();
            add_values(sum, step, tiles);
        }
        write_sums(sum, tiles);
        write_stats();
        copies_done();
    }
    // The teams. Weights of two chunks are kept, and so are scores: whoever makes some has waited for all others of the
    // team since those two steps before were used.
    __device__ __forceinline__ void weigh(int tiles) {
        Held held = {};
        if constexpr (HELD)
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 16; i++) {
                const u32* query = (const u32*)(at.queries + i * OPERAND) + b.lane * 4;
                held[i] = {query[0], query[2]};
            }
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            scores(step, tiles, held);
            if (EXPECTS) expect(step + EXPECTED);
            sync_some<TEAM>(SCORES_MADE);
            if (step >= 2) sync_some<CONSUMERS>(WEIGHTS_USED + (step & 1));
            softmax(step);
            arrive_some<CONSUMERS>(WEIGHTS_MADE + (step & 1));
        }
        sync_some<TEAM>(SCORES_MADE);
        write_stats();
    }
    __device__ __forceinline__ void add_up(int tiles) {
        SumOf sum = {};
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            copies_left<VALUE_STAGES < 2 ? 0 : VALUE_STAGES - 2>();
            sync_some<TEAM>(VALUES_HERE);  // and those of the step before are done with
            ask_values(step + VALUE_STAGES - 1);
            copies_queued();
            if (EXPECTS) expect(step + EXPECTED);
            sync_some<CONSUMERS>(WEIGHTS_MADE + (step & 1));
            add_values(sum, step, tiles);
            if (step + 2 < steps) arrive_some<CONSUMERS>(WEIGHTS_USED + (step & 1));
        }
        write_sums(sum, tiles);
        copies_done();
    }
};
