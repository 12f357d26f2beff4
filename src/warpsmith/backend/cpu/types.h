// Shared vocabulary of the engine: weight types, packed matrices, prepared activations.
#pragma once
#include <cstddef>
#include <cstdint>

namespace warpsmith {

constexpr int kPanel = 16;     // rows of a matrix that are stored, and computed, together
constexpr int kMaxNodes = 64;  // columns of one pass

// Levels is what the IQ types become: a nibble names one of sixteen whole levels, sixteen weights share a scale.
enum class Type : int { F32, F16, BF16, Q8_0, Q4_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, Levels };
constexpr int kTypes = 11;
constexpr const char* kTypeNames[kTypes] = {"F32",  "F16",  "BF16", "Q8_0", "Q4_0",  "Q2_K",
                                            "Q3_K", "Q4_K", "Q5_K", "Q6_K", "LEVELS"};

// Forms of the activations that a matrix multiplication may read. A stage prepares those its weights need.
enum Form : int { kFloat = 1, kQ8Per256 = 2, kQ8Per32 = 4, kSums16 = 8 };

constexpr int form_of(Type type) {
    switch (type) {
        case Type::F32: case Type::F16: case Type::BF16: return kFloat;
        case Type::Q8_0: case Type::Q4_0: return kQ8Per32;
        case Type::Q2_K: return kQ8Per256 | kSums16;
        default: return kQ8Per256;
    }
}

// A weight matrix [rows, cols] as panels of 16 rows. packing.h says what is inside a panel.
struct Matrix {
    Type type = Type::F32;
    int rows = 0, cols = 0;
    const uint8_t* data = nullptr;
    size_t panel_bytes = 0;
    int panels() const { return (rows + kPanel - 1) / kPanel; }
    const uint8_t* panel(int i) const { return data + static_cast<size_t>(i) * panel_bytes; }
};

// n columns of k activations, in the forms asked for. A column's numbers depend on nothing but that column.
//   f       float [n][stride]
//   q256    bytes, value = d256[k/256][n] * byte. A single column is as it comes. More lie in fours side by side, four
//           bytes of each in turn, so that one load serves four columns: [k/256][n/4][256/4][4][4], n rounded up
//   sums    sums of 32 such bytes as 64 * h + l: h of the eight, then l of the eight, laid out like q256 with 16 for 256
//   sums16  the same for sums of 16: h of the sixteen, then l of the sixteen, 32 for 256
//   minus32 int32 [k/256][n][16], -32 times the sums of 16 of them (what the offsets of Q6_K and Q3_K take away)
//   q32     bytes like q256 with 32 for 256, value = d32 * byte; d32 is float [n/4][k/32][4]
//   minus8, minus128  int32, laid out like d32, -8 and -128 times the sums of 32 of them
// Four columns are written by one thread: they hardly share a cache line with others.
struct Acts {
    int k = 0, n = 0, stride = 0;
    float* f = nullptr;
    int8_t* q256 = nullptr;
    float* d256 = nullptr;
    int8_t* sums = nullptr;
    int8_t* sums16 = nullptr;
    int32_t* minus32 = nullptr;
    int8_t* q32 = nullptr;
    float* d32 = nullptr;
    int32_t* minus8 = nullptr;
    int32_t* minus128 = nullptr;
    int padded() const { return n == 1 ? 1 : (n + 3) / 4 * 4; }
    // Where the scale of a block of 32 is: of column `first`, the first of four, or of one that comes so many after it.
    size_t small(int block, int first, int after = 0) const {
        return (static_cast<size_t>(first / 4 + after / 4) * (k / 32) + block) * 4 + after % 4;
    }
};

inline int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace warpsmith
