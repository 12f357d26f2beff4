// A DFlash draft on the target's own threads: warpsmith/backend/reference/dflash.py is the same network, written to be read.
//
// Features of committed tokens become keys and values once, in rolling caches; a block of masked positions then runs through the
// layers without leaving a trace. Embeddings are the target's, and so is the head, unless the draft has its own.
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
    int speaks;     // so many first tokens of the target's
    bool own_head;  // of these tokens
    float eps;
    double rope_theta;
    std::vector<int> windows;   // how far back a layer sees; 0: all the way
    std::vector<bool> causal;   // a row of the block does not see the rows after it
    std::vector<int> capacity;  // rows of each layer's rolling cache

    int query_dim() const { return heads * head_dim; }
    int kv_dim() const { return kv_heads * head_dim; }
};

// What a draft keeps of one sequence: keys and values of its last tokens, for each layer in a rolling cache.
class DraftMemory {
public:
    explicit DraftMemory(const DraftConfig& config);
    void forget() { appended = 0; }
    // What the caches hold, in one buffer.
    size_t snapshot_bytes() const;
    void save(uint8_t* to) const;
    void load(const uint8_t* from);

    int kept(int layer) const;  // rows in a cache
    uint16_t* row(int layer, int which, int head, int64_t number) const;  // which: 0 keys, 1 values
    int32_t& position(int64_t number) { return positions_[number % positions_.size()]; }
    int longest() const { return static_cast<int>(positions_.size()); }
    int64_t appended = 0;  // rows so far; row i lies at i modulo its capacity

private:
    const int layers_, kv_heads_, head_dim_;
    const std::vector<int> capacity_;
    Memory caches_;
    std::vector<size_t> cache_at_;     // of a layer, in rows
    std::vector<int32_t> positions_;  // of the last rows, at their number modulo the longest capacity
};

// The network: its weights, and buffers for the one call that runs at a time.
class Draft {
public:
    Draft(Model& target, DraftConfig config);
    Model& target() const { return m; }
    const DraftConfig& config() const { return c; }
    Weights weights;
    void finish();  // every tensor is there

    // `count` <= 64 rows of features, of tokens that were committed at `position` onwards.
    void append(DraftMemory& memory, const float* features, int count, int position);
    // Append likewise, then fill the block that begins with `root` at `position`: `want` is about the `rows` positions
    // after the root's, its hidden rows about the root's too.
    void propose(DraftMemory& memory, const float* features, int count, int at, int32_t root, int position, int rows,
                 const Want& want);

private:
    struct Layer {
        const float *input_norm, *post_norm, *k_norm;
        std::vector<float> q_norm;
        Matrix q, k, v, o, gate, up, down;
    };
    struct Rotation { std::vector<float> cosine, sine; };  // [row][head_dim / 2]

    void add_context(DraftMemory& memory, const float* features, int count, int position, const Rotation& turn);
    void fill_block(DraftMemory& memory, int thread, int32_t root, int position, int rows, const Rotation& turn,
                    const Want& want);
    void attend(DraftMemory& memory, int thread, int index, int position, int n);
    void rotate_head(float* x, const float* norm, const Rotation& turn, int row) const;
    void rotation(int position, int count, Rotation& turn) const;

    Model& m;
    const DraftConfig c;
    Matrix fc_, head_;
    const float *hidden_norm_ = nullptr, *norm_ = nullptr;
    std::vector<Layer> layers_;
    std::vector<double> frequency_, step_cosine_, step_sine_;  // [head_dim / 2], and of 0 .. 63 steps of each
    Stages stages_;
    Memory memory_;
    float *x_, *q_, *k_, *v_, *y_, *h_, *projected_;
};

}  // namespace warpsmith
