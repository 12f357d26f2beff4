#include "packing.h"

#include <cstring>

#include "simd_generic.h"

namespace warpsmith {
namespace {

uint32_t word(const uint8_t* p) {
    uint32_t v;
    std::memcpy(&v, p, 4);
    return v;
}
void put(uint8_t* p, uint32_t v) { std::memcpy(p, &v, 4); }

float half_at(const uint8_t* p) {
    uint16_t h;
    std::memcpy(&h, p, 2);
    return Generic::half(h);
}

constexpr uint32_t kLow = 0x0f0f0f0fu, kPair = 0x03030303u, kBit = 0x01010101u;

// The eight 6-bit scales and mins that Q4_K and Q5_K keep in 12 bytes.
void unpack_scales(const uint8_t* sc, uint8_t* scale, uint8_t* min) {
    for (int s = 0; s < 4; s++) {
        scale[s] = sc[s] & 63;
        min[s] = sc[s + 4] & 63;
        scale[s + 4] = static_cast<uint8_t>((sc[s + 8] & 15) | (sc[s] >> 6) << 4);
        min[s + 4] = static_cast<uint8_t>((sc[s + 8] >> 4) | (sc[s + 4] >> 6) << 4);
    }
}

void pack_q45(const uint8_t* src, int r, uint8_t* block, bool five) {
    std::memcpy(block + 2 * r, src, 2);
    std::memcpy(block + 32 + 2 * r, src + 2, 2);
    uint8_t scale[8], min[8];
    unpack_scales(src + 4, scale, min);
    for (int s = 0; s < 8; s++) {
        block[kScales + 16 * s + r] = scale[s];
        block[kMins + 64 * (s / 4) + 4 * r + s % 4] = min[s];
    }
    const uint8_t* qs = src + (five ? 48 : 16);
    for (int p = 0; p < 4; p++) {
        uint8_t* out = block + kWeights + 512 * p + 4 * r;
        for (int j = 0; j < 4; j++) {
            const uint32_t a = word(qs + 32 * p + 4 * j), b = word(qs + 32 * p + 16 + 4 * j);
            put(out + 64 * j, (a & kLow) | (b & kLow) << 4);
            put(out + 256 + 64 * j, (a >> 4 & kLow) | (b & ~kLow));
        }
    }
    if (!five) return;
    const uint8_t* qh = src + 16;
    for (int j = 0; j < 4; j++) {
        const uint32_t a = word(qh + 4 * j), b = word(qh + 16 + 4 * j);
        for (int g = 0; g < 2; g++) {
            uint32_t bits = 0;
            for (int i = 0; i < 4; i++) {
                bits |= (a >> (4 * g + i) & kBit) << 2 * i | (b >> (4 * g + i) & kBit) << (2 * i + 1);
            }
            put(block + kFifthBits + 256 * g + 64 * j + 4 * r, bits);
        }
    }
}

// The low two bits of Q2_K and Q3_K: sub-block s is pair (s%8)/2 of the bits of 16 bytes.
void pack_two_bits(const uint8_t* qs, int r, uint8_t* block) {
    for (int s = 0; s < 16; s++) {
        const uint8_t* from = qs + 32 * (s / 8) + 16 * (s % 2);
        uint32_t bits = 0;
        for (int j = 0; j < 4; j++) bits |= (word(from + 4 * j) >> 2 * (s % 8 / 2) & kPair) << 2 * j;
        put(block + kWeights + 64 * s + 4 * r, bits);
    }
}

void pack_q2(const uint8_t* src, int r, uint8_t* block) {
    std::memcpy(block + 2 * r, src + 80, 2);
    std::memcpy(block + 32 + 2 * r, src + 82, 2);
    for (int i = 0; i < 2; i++) {
        const uint8_t* sc = src + 8 * i;  // scales below, mins above
        for (int s = 0; s < 4; s++) {
            block[kScales + 64 * i + 16 * s + r] = static_cast<uint8_t>((sc[s] & 15) | sc[s + 4] << 4);
            block[kMins + 64 * i + 4 * r + s] = static_cast<uint8_t>(sc[s] >> 4 | (sc[s + 4] & 0xf0));
        }
    }
    pack_two_bits(src + 16, r, block);
}

void pack_q3(const uint8_t* src, int r, uint8_t* block) {
    std::memcpy(block + 2 * r, src + 108, 2);
    const uint8_t* sc = src + 96;  // sixteen nibbles, then what completes them to six bits
    for (int s = 0; s < 16; s++) {
        const int low = s < 8 ? sc[s] & 15 : sc[s - 8] >> 4, high = sc[8 + s % 4] >> 2 * (s / 4) & 3;
        block[kScales + 16 * s + r] = static_cast<uint8_t>((low | high << 4) - 32);
    }
    pack_two_bits(src + 32, r, block);
    for (int g = 0; g < 8; g++) {
        uint32_t bits = 0;
        for (int j = 0; j < 4; j++) {
            bits |= (word(src + 4 * j) >> g & kBit) << j | (word(src + 16 + 4 * j) >> g & kBit) << (4 + j);
        }
        put(block + kThirdBits + 64 * g + 4 * r, bits);
    }
}

// Stored: d f16, 2 bytes of nothing, unit f32, level i8[16], scale i8[16], nibbles of 8 sub-blocks as in Q4_0. Levels
// and unit are those of the whole matrix.
void pack_levels(const uint8_t* src, int r, uint8_t* block) {
    std::memcpy(block + 2 * r, src, 2);
    std::memcpy(block + kUnit, src + 4, 4);
    std::memcpy(block + kLevels, src + 8, 16);
    for (int s = 0; s < 16; s++) block[kScales + 16 * s + r] = src[24 + s];
    for (int j = 0; j < 32; j++) put(block + kWeights + 64 * j + 4 * r, word(src + 40 + 4 * j));
}

void pack_q6(const uint8_t* src, int r, uint8_t* block) {
    std::memcpy(block + 2 * r, src + 208, 2);
    for (int i = 0; i < 16; i++) block[kScales + 16 * i + r] = src[192 + i];
    for (int n = 0; n < 2; n++) {
        for (int i = 0; i < 8; i++) {  // sub-blocks of 16 in this half of the block
            const uint8_t* ql = src + 64 * n + 16 * (i % 4);
            const uint8_t* qh = src + 128 + 32 * n + 16 * (i % 2);
            uint32_t quad[4];
            for (int j = 0; j < 4; j++) {
                const uint32_t low = word(ql + 4 * j) >> (i < 4 ? 0 : 4) & kLow;
                const uint32_t high = word(qh + 4 * j) >> 2 * (i / 2) & kPair;
                quad[j] = (low | high << 4) ^ 0x20202020u;  // weight - 32 in six bits
            }
            uint8_t* out = block + kWeights + 192 * (8 * n + i) + 4 * r;
            put(out, quad[0] << 2 | (quad[3] >> 4 & kPair));
            put(out + 64, quad[1] << 2 | (quad[3] >> 2 & kPair));
            put(out + 128, quad[2] << 2 | (quad[3] & kPair));
        }
    }
}

template <class T>
void pack_floats(const uint8_t* stored, int first, int count, int cols, uint8_t* panel) {
    constexpr int kTile = 64;  // columns transposed while 16 lines are in the nearest cache
    const T* rows = reinterpret_cast<const T*>(stored) + static_cast<size_t>(first) * cols;
    T* out = reinterpret_cast<T*>(panel);
    for (int k0 = 0; k0 < cols; k0 += kTile) {
        const int k1 = k0 + kTile < cols ? k0 + kTile : cols;
        for (int r = 0; r < count; r++) {
            const T* row = rows + static_cast<size_t>(r) * cols;
            for (int k = k0; k < k1; k++) out[static_cast<size_t>(k) * kPanel + r] = row[k];
        }
        for (int r = count; r < kPanel; r++) {
            for (int k = k0; k < k1; k++) out[static_cast<size_t>(k) * kPanel + r] = 0;
        }
    }
}

}  // namespace

size_t panel_bytes(Type type, int cols) {
    return static_cast<size_t>(cols / layout_of(type).elems) * layout_of(type).packed_bytes;
}

void pack_panel(Type type, const uint8_t* stored, int rows, int cols, int index, uint8_t* panel) {
    const int first = index * kPanel, count = rows - first < kPanel ? rows - first : kPanel;
    if (type == Type::F32) return pack_floats<uint32_t>(stored, first, count, cols, panel);
    if (type == Type::F16) return pack_floats<uint16_t>(stored, first, count, cols, panel);
    if (type == Type::BF16) return pack_floats<uint32_t>(stored, first, count, cols / 2, panel);  // by pairs
    const Layout& layout = layout_of(type);
    const int blocks = cols / layout.elems;
    const bool gaps = type == Type::Q3_K || type == Type::Q6_K || type == Type::Levels;
    if (count < kPanel || gaps) std::memset(panel, 0, panel_bytes(type, cols));
    for (int b = 0; b < blocks; b++) {
        uint8_t* block = panel + static_cast<size_t>(b) * layout.packed_bytes;
        for (int r = 0; r < count; r++) {
            const uint8_t* src = stored + (static_cast<size_t>(first + r) * blocks + b) * layout.stored_bytes;
            switch (type) {
                case Type::Q2_K: pack_q2(src, r, block); break;
                case Type::Q3_K: pack_q3(src, r, block); break;
                case Type::Levels: pack_levels(src, r, block); break;
                case Type::Q4_K: pack_q45(src, r, block, false); break;
                case Type::Q5_K: pack_q45(src, r, block, true); break;
                case Type::Q6_K: pack_q6(src, r, block); break;
                default: {  // Q8_0, Q4_0: quads as they come
                    std::memcpy(block + 2 * r, src, 2);
                    const int quads = type == Type::Q8_0 ? 8 : 4;
                    for (int j = 0; j < quads; j++) put(block + 32 + 64 * j + 4 * r, word(src + 2 + 4 * j));
                }
            }
        }
    }
}

void unpack_row(const Matrix& matrix, int row, float* out) {
    const uint8_t* panel = matrix.panel(row / kPanel);
    const int r = row % kPanel;
    const Layout& layout = layout_of(matrix.type);
    for (int b = 0; b < matrix.cols / layout.elems; b++) {
        const uint8_t* block = panel + static_cast<size_t>(b) * layout.packed_bytes;
        float* y = out + static_cast<size_t>(b) * layout.elems;
        switch (matrix.type) {
            case Type::F32: std::memcpy(y, block + 4 * r, 4); break;
            case Type::F16: *y = half_at(block + 2 * r); break;
            case Type::BF16: {
                const uint32_t pair = word(block + 4 * r), first = pair << 16, second = pair & 0xffff0000u;
                std::memcpy(y, &first, 4);
                std::memcpy(y + 1, &second, 4);
                break;
            }
            case Type::Q8_0: {
                const float d = half_at(block + 2 * r);
                for (int k = 0; k < 32; k++) {
                    y[k] = static_cast<float>(static_cast<int8_t>(block[32 + 64 * (k / 4) + 4 * r + k % 4])) * d;
                }
                break;
            }
            case Type::Q4_0: {
                const float d = half_at(block + 2 * r);
                for (int k = 0; k < 16; k++) {
                    const uint8_t q = block[32 + 64 * (k / 4) + 4 * r + k % 4];
                    y[k] = static_cast<float>((q & 15) - 8) * d;
                    y[k + 16] = static_cast<float>((q >> 4) - 8) * d;
                }
                break;
            }
            case Type::Q2_K: {
                const float d = half_at(block + 2 * r), dmin = half_at(block + 32 + 2 * r);
                for (int s = 0; s < 16; s++) {
                    const int line = 64 * (s / 8), half = s % 8 / 4 * 4;
                    const float scale = d * static_cast<float>(block[kScales + line + 16 * (s % 4) + r] >> half & 15);
                    const float min = dmin * static_cast<float>(block[kMins + line + 4 * r + s % 4] >> half & 15);
                    for (int k = 0; k < 16; k++) {
                        const int q = block[kWeights + 64 * s + 4 * r + k % 4] >> 2 * (k / 4) & 3;
                        y[16 * s + k] = scale * static_cast<float>(q) - min;
                    }
                }
                break;
            }
            case Type::Q3_K: {
                const float d = half_at(block + 2 * r);
                for (int s = 0; s < 16; s++) {
                    const float scale = d * static_cast<int8_t>(block[kScales + 16 * s + r]);
                    for (int k = 0; k < 16; k++) {
                        const int at = 4 * r + k % 4, low = block[kWeights + 64 * s + at] >> 2 * (k / 4) & 3;
                        const int third = block[kThirdBits + 64 * (s / 2) + at] >> (4 * (s % 2) + k / 4) & 1;
                        y[16 * s + k] = scale * static_cast<float>((low | third << 2) - 4);
                    }
                }
                break;
            }
            case Type::Levels: {
                float unit;
                std::memcpy(&unit, block + kUnit, 4);
                const float d = half_at(block + 2 * r) * unit;
                for (int s = 0; s < 16; s++) {
                    const float scale = d * static_cast<int8_t>(block[kScales + 16 * s + r]);
                    for (int k = 0; k < 16; k++) {
                        const int at = 256 * (s / 2) + 64 * (k / 4) + 4 * r + k % 4;
                        const int number = block[kWeights + at] >> 4 * (s % 2) & 15;
                        y[16 * s + k] = scale * static_cast<float>(static_cast<int8_t>(block[kLevels + number]));
                    }
                }
                break;
            }
            case Type::Q4_K: case Type::Q5_K: {
                const float d = half_at(block + 2 * r), dmin = half_at(block + 32 + 2 * r);
                for (int s = 0; s < 8; s++) {
                    const float scale = d * block[kScales + 16 * s + r], min = dmin * block[kMins + 64 * (s / 4) + 4 * r + s % 4];
                    for (int k = 0; k < 16; k++) {
                        const int at = 64 * (k / 4) + 4 * r + k % 4;
                        const uint8_t q = block[kWeights + 256 * s + at];
                        int low = q & 15, high = q >> 4;
                        if (matrix.type == Type::Q5_K) {
                            const int bits = block[kFifthBits + 256 * (s / 4) + at] >> 2 * (s % 4);
                            low |= (bits & 1) << 4;
                            high |= (bits >> 1 & 1) << 4;
                        }
                        y[32 * s + k] = scale * static_cast<float>(low) - min;
                        y[32 * s + 16 + k] = scale * static_cast<float>(high) - min;
                    }
                }
                break;
            }
            case Type::Q6_K: {
                const float d = half_at(block + 2 * r);
                for (int s = 0; s < 16; s++) {
                    const float scale = d * static_cast<int8_t>(block[kScales + 16 * s + r]);
                    const uint8_t* planes = block + kWeights + 192 * s + 4 * r;
                    for (int t = 0; t < 4; t++) {
                        const uint8_t p[3] = {planes[t], planes[64 + t], planes[128 + t]};
                        const int last = (p[0] & 3) << 6 | (p[1] & 3) << 4 | (p[2] & 3) << 2;
                        for (int j = 0; j < 4; j++) {
                            const int q = static_cast<int8_t>(j < 3 ? p[j] & 0xfc : last) / 4;
                            y[16 * s + 4 * j + t] = scale * static_cast<float>(q);
                        }
                    }
                }
                break;
            }
        }
    }
}

}  // namespace warpsmith
