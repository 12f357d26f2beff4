// Which format each row tile of the stream is held in.
//
// LAYER_FORMATS has a number for each part of each layer's stages, LAYER_PARTS a layer (see schedule.py). Every part is
// whole row tiles. A build has code for the formats its model uses; where stages of a kind have but one, nothing is
// looked up.
#pragma once
#include "forward/params.cuh"
#include "stream.cuh"

constexpr int SLOT_BYTES = larger(WideFormats::slot_bytes(), NarrowFormats::slot_bytes());

static __constant__ u8 layer_formats[] = {LAYER_FORMATS};
static_assert(sizeof(layer_formats) == LAYERS * LAYER_PARTS, "one for each part of every layer");

// First row tile of an SM in a stage.
#ifdef DEALT_TILES
static __constant__ u16 dealt_tiles[LAYERS][SMS + 1] = {DEALT_TILES};
#endif
template <class Stage>
__device__ __forceinline__ int first_tile(int layer, bool recurrent, int sm) {
#ifdef DEALT_TILES
    if constexpr (Stage::PARTS > 1) return dealt_tiles[layer][sm];
#endif
    return first_of(Stage::tiles(recurrent), sm);
}

template <int TILE_ROWS>
struct FormatsFor {
    typedef NarrowFormats type;
};
template <>
struct FormatsFor<WIDE> {
    typedef WideFormats type;
};
template <int TILE_ROWS>
using FormatsOf = typename FormatsFor<TILE_ROWS>::type;

struct Run {
    int format, tiles;
};

// A stage has up to three parts.
struct StageParts {
    int format[3];
    int second, third;  // row tiles where those parts begin

    // Row tiles from `row tile` on that are held in one format, before `end`.
    template <class FormatsHere>
    __device__ Run run(int tile, int end) const {
        if constexpr (FormatsHere::SEVERAL) {
            const int here = tile < second ? format[0] : tile < third ? format[1] : format[2];
            if (tile < second && format[1] != here) {
                end = min(end, second);
            } else if (tile < third && format[2] != here) {
                end = min(end, third);
            }
            return {here, end - tile};
        }
        return {0, end - tile};
    }
};

// Of a stage in a layer.
template <class Stage>
__device__ __forceinline__ StageParts parts_of(int layer) {
    constexpr bool LOOKED_UP = Stage::TILE_ROWS == WIDE ? WideFormats::SEVERAL : NarrowFormats::SEVERAL;
    if constexpr (!LOOKED_UP) {
        return {};
    } else if constexpr (Stage::SLOT == HEAD) {
        return {{HeadFormat::NUMBER, HeadFormat::NUMBER, HeadFormat::NUMBER}, 0, 0};
    } else {
        const u8* formats = layer_formats + (layer * LAYER_PARTS + Stage::FIRST_PART);
        if constexpr (Stage::PARTS == 1) {
            return {{formats[0], formats[0], formats[0]}, 0, 0};
        } else {
            static_assert(Stage::PARTS == 3, "one part or three");
            const bool recurrent = is_recurrent(layer);
            return {{formats[0], formats[1], formats[2]}, Stage::part1(recurrent), Stage::part2(recurrent)};
        }
    }
}
