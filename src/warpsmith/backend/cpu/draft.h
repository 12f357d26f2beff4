// A DFlash draft on the target's own threads: warpsmith/backend/reference/dflash.py is the same network, written to be read.
//
// Features of committed tokens become keys and values once, in rings; a block of masked positions then runs through the
// layers without leaving a trace. Embeddings and head are the target's.
#pragma once
#include <cstdint>
#include <vector>

#include "model.h"
#include "stages.h"
#include "weights.h"

namespace warpsmith {

// Names as in warpsmith.checkpoint.dflash.DFlashConfig.
struct DraftConfig {
    int layers, hidden, ffn, heads, kv_heads, head_dim, features, block, mask_token;
    float eps;
    double rope_theta;
    std::vector<int> windows;   // how far back a layer sees; 0: all the way
    std::vector<bool> causal;   // a row of the block does not see the rows after it
    std::vector<int> capacity;  // rows of each layer's ring

    int query_dim() const { return heads * head_dim; }
    int kv_dim() const { return kv_heads * head_dim; }
};

class Draft {
public:
    Draft(Model& target, DraftConfig config);
    Model& target() const { return m; }
    Weights weights;
    void finish();  // every tensor is there

    // `count` <= 64 rows of features, of tokens that were committed at `position` onwards.
    void append(const float* features, int count, int position);
    // Append likewise, then fill the block that begins with `root` at `position`: `want` is about the `rows` positions
    // after the root's, its hidden rows about the root's too.
    void propose(const float* features, int count, int at, int32_t root, int position, int rows, const Want& want);

    void forget() { appended_ = 0; }
    // What the rings hold, in one buffer.
    size_t snapshot_bytes() const;
    void save(uint8_t* to) const;
    void load(const uint8_t* from);

private:
    struct Layer {
        const float *input_norm, *post_norm, *k_norm;
        std::vector<float> q_norm;
        Matrix q, k, v, o, gate, up, down;
    };
    struct Rotation { std::vector<float> cosine, sine; };  // [row][head_dim / 2]

    void add_context(const float* features, int count, int position, const Rotation& turn);
    void fill_block(int thread, int32_t root, int position, int rows, const Rotation& turn, const Want& want);
    void attend(int thread, int index, int position, int n);
    void rotate_head(float* x, const float* norm, const Rotation& turn, int row) const;
    void rotation(int position, int count, Rotation& turn) const;
    int kept(int layer) const;  // rows in a ring
    uint16_t* ring_row(int layer, int which, int head, int64_t number) const;

    Model& m;
    const DraftConfig c;
    Matrix fc_;
    const float *hidden_norm_ = nullptr, *norm_ = nullptr;
    std::vector<Layer> layers_;
    std::vector<double> frequency_, step_cosine_, step_sine_;  // [head_dim / 2], and of 0 .. 63 steps of each
    Stages stages_;
    Memory memory_, rings_;
    std::vector<size_t> ring_at_;  // of a layer, in rows
    float *x_, *q_, *k_, *v_, *y_, *h_, *projected_;
    int64_t appended_ = 0;              // rows so far; row i lies at i modulo a ring's capacity
    std::vector<int32_t> positions_;    // of the last rows, likewise
};

}  // namespace warpsmith
