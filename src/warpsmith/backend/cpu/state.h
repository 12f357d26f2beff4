// The committed past of one sequence, and the rows of the last tree until one of its paths is committed.
//
// Keys, and values likewise, per attention layer: [kv head][position] rows of head_dim numbers as f16, f32 or Q8_0
// blocks; keys and values may be of different types.
// DeltaNet states, per DeltaNet layer: [value head][dv / width][dk][width] floats (delta_width). They are large beside
// what a token adds to them: a commit of the root alone owes them its update, as a chain does its last token's, and the
// next pass, which reads them anyway, adds it. Convolution inputs: the last taps-1 rows of channels, that of position p
// in place p modulo taps-1.
#pragma once
#include <array>
#include <vector>

#include "memory.h"
#include "model.h"

namespace warpsmith {

enum class Kv : int { F16, F32, Q8_0 };

// A tree of 1 to 64 nodes with what every layer asks about it.
struct Tree {
    int n = 0;
    std::array<int, kMaxNodes> depth{};
    std::array<std::array<uint8_t, kMaxNodes>, kMaxNodes> path{};  // path[i][d]: the ancestor of i at depth d

    // The order in which DeltaNet states are computed: depth first. Slots are places for states: kCommitted is the
    // state before the tree, 0 and up are scratch; kNowhere: no child needs it.
    static constexpr int kCommitted = -1, kNowhere = -2;
    struct Visit { int node, from, to; };
    std::vector<Visit> visits;
    int slots = 0;

    static Tree of(const int32_t* parents, int n);
    static Tree chain(int n);
};

struct State {
    State(const Model& model, int context, Kv keys, Kv values);

    const Config& config;
    const int context;
    const Kv kinds[2];  // of keys, of values
    int length = 0;

    size_t row_bytes(bool value) const { return row_bytes_[value]; }
    uint8_t* key_row(int layer, int head, int position) const { return kv_row(layer, 0, head, position); }
    uint8_t* value_row(int layer, int head, int position) const { return kv_row(layer, 1, head, position); }
    float* conv_row(int layer, int position) const {
        const size_t keep = config.conv_kernel - 1, place = (position + keep) % keep;  // the first are before the text
        return conv_.floats() + (slot_[layer] * keep + place) * config.channels();
    }
    float* delta(int layer) const { return delta_.floats() + static_cast<size_t>(slot_[layer]) * delta_floats(); }

    // Updates of a layer's head: decay, 15 floats of nothing, k, write.
    // of the last pass
    float* next_update(int layer, int head) const { return update(1 - current_, slot_[layer], head); }
    float* owed_update(int layer, int head) const { return update(current_, slot_[layer], head); }      // where `owes`
    bool owes = false;  // updates of all layers and heads to `delta`
    void owe_next() { current_ = 1 - current_, owes = true; }

    // rows of the last tree
    Tree tree;
    float* qkv(int layer) const { return pending_qkv_.floats() + static_cast<size_t>(slot_[layer]) * kMaxNodes * config.channels(); }
    float* gates(int layer) const {  // [node][beta: value heads | alpha: value heads], padded
        return pending_gates_.floats() + static_cast<size_t>(slot_[layer]) * kMaxNodes * gate_stride();
    }
    int gate_stride() const { return 2 * round_up(config.value_heads, kPanel); }
    uint8_t* pending_key(int layer, int node, int head) const { return pending_row(layer, 0, node, head); }
    uint8_t* pending_value(int layer, int node, int head) const { return pending_row(layer, 1, node, head); }

    // A snapshot is every committed byte in one buffer: all keys, all values, then convolution inputs, then states.
    size_t snapshot_bytes() const;
    void save(Pool& pool, uint8_t* to);
    void load(const uint8_t* from, int length);

    size_t conv_floats() const { return static_cast<size_t>(config.conv_kernel - 1) * config.channels(); }
    size_t delta_floats() const { return static_cast<size_t>(config.value_heads) * config.key_head_dim * config.value_head_dim; }

private:
    size_t update_floats() const { return 16 + config.key_head_dim + config.value_head_dim; }
    float* update(int which, int slot, int head) const {
        return updates_[which].floats() + (static_cast<size_t>(slot) * config.value_heads + head) * update_floats();
    }
    uint8_t* kv_row(int layer, int which, int head, int position) const {
        const size_t plane = static_cast<size_t>(slot_[layer]) * config.kv_heads + head;
        return kv_[which].data() + (plane * context + position) * row_bytes_[which];
    }
    uint8_t* pending_row(int layer, int which, int node, int head) const {
        const size_t plane = static_cast<size_t>(slot_[layer]) * kMaxNodes + node;
        return pending_kv_[which].data() + (plane * config.kv_heads + head) * row_bytes_[which];
    }

    const Kernels& kernels_;
    std::vector<int> slot_;  // of a layer, among the layers of its kind
    int recurrent_ = 0, attention_ = 0, current_ = 0;
    size_t row_bytes_[2];
    Memory kv_[2], conv_, delta_, updates_[2], pending_qkv_, pending_gates_, pending_kv_[2];
};

}  // namespace warpsmith
