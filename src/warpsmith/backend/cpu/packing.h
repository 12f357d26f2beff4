// How matrices lie in memory once loaded: panels of 16 rows, so that one pass over contiguous bytes gives 16 dot
// products and no vector is ever summed across its lanes. All processors share the layout.
//
// A panel is a sequence of blocks along K. "k-quad" j holds weights 4j .. 4j+3 of each of the 16 rows: byte 4r+t is
// row r, weight 4j+t. A nibble quad stores weight k in the low and weight k+16 in the high half of a byte (k < 16).
//   F32/F16   one block a weight: 16 values, one a row
//   BF16     2 K  16 words, one a row, weight k in the low half and k+1 in the high: a shift and a mask make floats
//   Q8_0   32 K   d f16[16], 8 quads of bytes
//   Q4_0   32 K   d f16[16], 4 nibble quads
//   Q2_K  256 K   d f16[16], dmin f16[16], 2 x 64 bytes of scales (sub-blocks 8i .. 8i+3 of 16 in the low, 8i+4 .. 8i+7
//                 in the high halves), likewise 2 quads of mins, then a quad a sub-block: of k-quad j bits 2j and 2j+1
//   Q3_K  256 K   d f16[16] and 32 bytes of nothing, scale i8[16][16], the low two bits as in Q2_K, then the third:
//                 8 quads, bit j of k-quad j, bit 4+j of that of the next sub-block. Weights are 4 more than they mean
//   Q4_K  256 K   d f16[16], dmin f16[16], scale u8[8][16], 2 quads of mins (sub-blocks 4j .. 4j+3), 8 x 4 nibble quads
//   Q5_K  256 K   as Q4_K, then the fifth bits: [2][4 quads][64], bits 2(s%4) (k < 16) and 2(s%4)+1 of sub-block s
//   Q6_K  256 K   d f16[16] and 32 bytes of nothing, scale i8[16][16], then 16 sub-blocks of 3 byte quads p0 p1 p2:
//                 weight - 32 of quads 0, 1, 2 in the top six bits of p0, p1, p2; of quad 3 in their low two bits, the
//                 highest in p0's. Masking the low bits away leaves four times the weight, signed: no shift needed.
//   Levels 256 K  d f16[16], level i8[16], what d is multiplied with f32, 12 bytes of nothing, scale i8[16][16],
//                 8 x 4 nibble quads
#pragma once
#include "types.h"

namespace warpsmith {

struct Layout {
    int elems;         // weights a row has in one block
    int stored_bytes;  // bytes of one row's block in the file
    int packed_bytes;  // bytes of 16 rows' blocks in a panel
};
constexpr Layout kLayouts[kTypes] = {
    {1, 4, 64}, {1, 2, 32}, {2, 4, 64}, {32, 34, 544}, {32, 18, 288}, {256, 84, 1344},
    {256, 110, 1856}, {256, 144, 2368}, {256, 176, 2880}, {256, 210, 3392}, {256, 168, 2368},
};
constexpr const Layout& layout_of(Type type) { return kLayouts[static_cast<int>(type)]; }

// Offsets inside a block of 256. Scales are one a sub-block: 8 (Q4_K, Q5_K) or 16, 16 bytes or (Q2_K) nibbles each.
constexpr int kScales = 64, kMins = 192, kWeights = 320;
constexpr int kThirdBits = 1344, kFifthBits = 2368;  // of Q3_K, Q5_K
constexpr int kLevels = 32, kUnit = 48;              // of Levels

size_t panel_bytes(Type type, int cols);

// Pack rows 16*index .. 16*index+15 of a stored matrix. Rows past the end become zeros.
void pack_panel(Type type, const uint8_t* stored, int rows, int cols, int index, uint8_t* panel);

// One row as floats, by the formulas (and in the order) of the file format.
void unpack_row(const Matrix& matrix, int row, float* out);

}  // namespace warpsmith
