// Queries, keys and values as attention wants them: normed and rotated, queries in fp16; keys and values where and as
// the cache has them.
//
// Maths: x / rms(x) * weight, then RoPE on the first 64 dimensions; queries times the scale of scores. Values are as
// they are. A warp has a head of eight tokens; a lane has 8 dimensions of every 32 of one token. Dimension j and its
// partner j + 32 of the rotation are the same lane's. Grid: four rows of an octet a CTA, a warp each. Bytes: 512 read
// and 512 written a row.
#include "prefill/attention.cuh"

constexpr float ATTENTION_SCALE = 0.0625f * 1.44269504f;  // 256 ** -0.5, and scores are to base 2
constexpr float LARGEST_HALF = 65504.0f;

constexpr int ROWS = HEADS + 2 * KV_HEADS, ROWS_A_CTA = 4, SHARES = (ROWS + ROWS_A_CTA - 1) / ROWS_A_CTA;

template <int TYPE>
struct Type {
    static constexpr int VALUE = TYPE;
};

extern "C" __global__ void __launch_bounds__(ROWS_A_CTA * 32)
    attention_rows(const __grid_constant__ Attention a, const __grid_constant__ Piece p) {
    let_next_start();
    const int row = blockIdx.x % SHARES * ROWS_A_CTA + threadIdx.x / 32, lane = threadIdx.x % 32, o = lane / 8,
              octet = blockIdx.x / SHARES, token = octet * 8 + lane % 8;
    if (row >= ROWS) return;
    const bool is_query = row < HEADS, is_value = row >= HEADS + KV_HEADS, live = token >= p.lead && token < p.end;
    const int first_tile = is_query ? row * 2 * DIM_TILES : 2 * HEADS * DIM_TILES + (row - HEADS) * DIM_TILES;
    const int position = p.base + token;
    if (!is_value) {
        prefetch(a.vectors + (is_query ? ATTENTION_MIX_Q_NORM : ATTENTION_MIX_K_NORM) + lane % 8 * 32);
        prefetch(a.rope + (lane < 16 ? position & 63 : 64 + (position >> 6)) * 32 + lane / 8 % 2 * 16);
    }
    // Few tokens: at first with whatever is there, for the sake of the instructions, which come from far away; the
    // launch before still works meanwhile. Nothing of what is read stays in L1.
#pragma unroll 1
    for (bool real = p.end > CHUNK;; real = true) {
        if (real) wait_for_previous();
        float x[DIM_TILES][8];
        float square = 0.0f;
#pragma unroll
        for (int tile = 0; tile < DIM_TILES; tile++) {
            const uint4 v =
                __ldcg((const uint4*)a.raw + ((size_t)p.capacity * (first_tile + tile) + octet) * 32 + lane);
            const u32 pair[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                x[tile][2 * i] = bf16_low(pair[i]), x[tile][2 * i + 1] = bf16_high(pair[i]);
                square = fmaf(x[tile][2 * i], x[tile][2 * i], fmaf(x[tile][2 * i + 1], x[tile][2 * i + 1], square));
            }
        }
        if (is_value) {
#pragma unroll
            for (int tile = 0; tile < DIM_TILES; tile++)
#pragma unroll
                for (int i = 0; i < 8; i++) x[tile][i] = fminf(fmaxf(x[tile][i], -LARGEST_HALF), LARGEST_HALF);
        } else {
            square += __shfl_xor_sync(~0u, square, 8);
            square += __shfl_xor_sync(~0u, square, 16);
            const float scale = inverse_root(square / HEAD_DIM + EPS) * (is_query ? ATTENTION_SCALE : 1.0f);
            const float* norm = a.vectors + (is_query ? ATTENTION_MIX_Q_NORM : ATTENTION_MIX_K_NORM) + 2 * o;
#pragma unroll
            for (int tile = 0; tile < DIM_TILES; tile++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float2 w = __ldg((const float2*)(norm + tile * 32 + i * 8));
                    x[tile][2 * i] *= scale * w.x, x[tile][2 * i + 1] *= scale * w.y;
                }
            const float2 *low = a.rope + (position & 63) * 32 + 2 * o,
                         *high = a.rope + (64 + (position >> 6)) * 32 + 2 * o;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float2 l = __ldg(low + i / 2 * 8 + i % 2), h = __ldg(high + i / 2 * 8 + i % 2);
                const float cosine = fmaf(l.x, h.x, -(l.y * h.y)), sine = fmaf(l.y, h.x, l.x * h.y);
                const float early = x[0][i], late = x[1][i];
                x[0][i] = fmaf(early, cosine, -(late * sine)), x[1][i] = fmaf(late, cosine, early * sine);
            }
        }
        // A lane gets eight dimensions that lie together, and writes those of a live token.
        const auto store = [&](auto type, u8* to, bool write) {
#pragma unroll
            for (int tile = 0; tile < DIM_TILES; tile++) {
                if constexpr (decltype(type)::VALUE == CACHE_F16) {
                    // Neighbours give each other half of their pairs: each has eight bytes of two octets, and a token's
                    // lanes write 32 bytes together.
                    const bool odd = o & 1;
#pragma unroll
                    for (int i = 0; i < 4; i += 2) {
                        const u32 even_pair = pack_half(x[tile][2 * i], x[tile][2 * i + 1]),
                                  odd_pair = pack_half(x[tile][2 * i + 2], x[tile][2 * i + 3]);
                        const u32 got = __shfl_xor_sync(~0u, odd ? even_pair : odd_pair, 8);
                        if (write)
                            *(uint2*)(to + tile * 64 + (i + odd) * 16 + o / 2 * 8) =
                                odd ? uint2{got, odd_pair} : uint2{even_pair, got};
                    }
                } else {
                    u32 low[4], high[4];
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        low[i] = __float_as_uint(x[tile][2 * i]), high[i] = __float_as_uint(x[tile][2 * i + 1]);
                    const uint4 even = pairs_of_octet(low), odd = pairs_of_octet(high);
                    const float v[8] = {__uint_as_float(even.x), __uint_as_float(odd.x),  __uint_as_float(even.y),
                                        __uint_as_float(odd.y),  __uint_as_float(even.z), __uint_as_float(odd.z),
                                        __uint_as_float(even.w), __uint_as_float(odd.w)};
                    store_eight<decltype(type)::VALUE, 8>(to, tile * 4 + o, v, write);
                }
            }
        };
        const size_t at = (size_t)((row - HEADS) % KV_HEADS) * a.context + position;
        const size_t query = ((size_t)(row / GROUP) * p.capacity * 8 + token) * GROUP + row % GROUP;
        u8* to = is_query   ? (u8*)(a.queries + query * HEAD_DIM)
                 : is_value ? a.values + at * VALUE_ROW
                            : a.keys + at * KEY_ROW;
        if (is_query || (is_value ? VALUE_TYPE : KEY_TYPE) == CACHE_F16)
            store(Type<CACHE_F16>(), to, real && (is_query || live));
        else if (is_value)
            store(Type<VALUE_TYPE>(), to, real && live);
        else
            store(Type<KEY_TYPE>(), to, real && live);
        if (real) return;
    }
}
