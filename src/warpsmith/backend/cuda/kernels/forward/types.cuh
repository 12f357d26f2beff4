// Which type each unit of the stream has.
//
// LAYER_TYPES is a string of six digits a layer, each the WeightType of a part of its stages:
// 0, 1, 2: of the projections into the mixer, qkv | z | beta and alpha, or q | k | v;  3: mixer output;  4: gate and up;
// 5: MLP output. Every part is whole units, and every unit has one type. A build has code for the types its model uses;
// where stages of a kind have but one, nothing is looked up.
#pragma once
#include "forward/params.cuh"

constexpr int LAYER_PARTS = 6, MIX_OUT_PART = 3, MLP_IN_PART = 4, MLP_OUT_PART = 5;
static_assert(sizeof(LAYER_TYPES) == LAYERS * LAYER_PARTS + 1, "six digits a layer");

__host__ __device__ constexpr u32 types_in(int first, int count) {  // a bit each
    u32 types = 0;
    for (int layer = 0; layer < LAYERS; layer++)
        for (int part = first; part < first + count; part++) types |= 1u << (LAYER_TYPES[layer * LAYER_PARTS + part] - '0');
    return types;
}
constexpr u32 WIDE_TYPES = types_in(0, 3) | types_in(MLP_IN_PART, 1) | 1u << HEAD_TYPE;
constexpr u32 NARROW_TYPES = types_in(MIX_OUT_PART, 1) | types_in(MLP_OUT_PART, 1);
__host__ __device__ constexpr bool has(u32 types, int type) { return types >> type & 1; }
__host__ __device__ constexpr bool several(u32 types) { return (types & types - 1) != 0; }
constexpr int SLOT_BYTES = slot_bytes(has(WIDE_TYPES | NARROW_TYPES, Q8_0) ? Q8_0 : BF16);  // room for any of them

static __constant__ char layer_types[] = LAYER_TYPES;
__device__ __forceinline__ int part_type(int layer, int part) { return layer_types[layer * LAYER_PARTS + part] - '0'; }

struct Run {
    int type, units;
};

// A stage has up to three parts.
struct StageTypes {
    int type[3];
    int second, third;  // units where those parts begin

    // Units from `unit` on that have one type, before `end`. TYPES: any of these.
    template <u32 TYPES>
    __device__ Run run(int unit, int end) const {
        if constexpr (several(TYPES)) {
            const int here = unit < second ? type[0] : unit < third ? type[1] : type[2];
            if (unit < second && type[1] != here) {
                end = min(end, second);
            } else if (unit < third && type[2] != here) {
                end = min(end, third);
            }
            return {here, end - unit};
        }
        return {has(TYPES, Q8_0) ? Q8_0 : BF16, end - unit};
    }
};
__device__ __forceinline__ StageTypes one_part(int type) { return {{type, type, type}, 0, 0}; }
__device__ __forceinline__ StageTypes in_types(int layer) {
    if constexpr (!several(WIDE_TYPES)) return {};
    StageTypes types = {{part_type(layer, 0), part_type(layer, 1), part_type(layer, 2)}, CONV_CHANNELS / WIDE, (CONV_CHANNELS + VALUE_DIM) / WIDE};
    if (!is_recurrent(layer)) types.second = 2 * ATTENTION_DIM / WIDE, types.third = types.second + KV_HEADS * HEAD_DIM / WIDE;
    return types;
}
__device__ __forceinline__ StageTypes mlp_in_types(int layer) { return one_part(several(WIDE_TYPES) ? part_type(layer, MLP_IN_PART) : 0); }
__device__ __forceinline__ StageTypes head_types() { return one_part(HEAD_TYPE); }
__device__ __forceinline__ StageTypes mix_out_types(int layer) { return one_part(several(NARROW_TYPES) ? part_type(layer, MIX_OUT_PART) : 0); }
__device__ __forceinline__ StageTypes mlp_out_types(int layer) { return one_part(several(NARROW_TYPES) ? part_type(layer, MLP_OUT_PART) : 0); }
