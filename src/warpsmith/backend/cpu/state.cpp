#include "state.h"

#include <cstring>

namespace warpsmith {
namespace {
void copy(uint8_t* to, const uint8_t* from, size_t bytes) {
    if (bytes) std::memcpy(to, from, bytes);
}
}  // namespace

Tree Tree::chain(int n) {
    int32_t parents[kMaxNodes];
    for (int i = 0; i < n; i++) parents[i] = i - 1;
    return of(parents, n);
}

Tree Tree::of(const int32_t* parents, int n) {
    Tree tree;
    tree.n = n;
    std::array<std::vector<int>, kMaxNodes> children;
    for (int i = 0; i < n; i++) {
        const int parent = parents[i];
        if (parent >= 0) {
            tree.depth[i] = tree.depth[parent] + 1;
            tree.path[i] = tree.path[parent];
            children[parent].push_back(i);
        }
        tree.path[i][tree.depth[i]] = static_cast<uint8_t>(i);
    }
    // Depth first. A node's state takes over its parent's slot when it is the last child to need it.
    struct Todo { int node, from; bool last; };
    std::vector<Todo> todo{{0, kCommitted, false}};
    std::vector<int> free_slots;
    while (!todo.empty()) {
        const Todo at = todo.back();
        todo.pop_back();
        const bool leaf = children[at.node].empty();
        int to = kNowhere;
        if (!leaf) {
            if (at.last && at.from >= 0) to = at.from;
            else if (!free_slots.empty()) { to = free_slots.back(); free_slots.pop_back(); }
            else to = tree.slots++;
        }
        tree.visits.push_back({at.node, at.from, to});
        if (at.last && leaf && at.from >= 0) free_slots.push_back(at.from);
        const auto& next = children[at.node];
        for (size_t i = next.size(); i-- > 0;) todo.push_back({next[i], to, i + 1 == next.size()});
    }
    return tree;
}

State::State(const Model& model, int room, Kv keys, Kv values)
    : config(model.config), context(room), kinds{keys, values}, kernels_(model.kernels) {
    for (int i = 0; i < config.layers + (config.mtp_layers ? 1 : 0); i++) {
        const bool recurrent = i < config.layers && config.recurrent[i];
        slot_.push_back(recurrent ? recurrent_++ : attention_++);
    }
    const size_t width = static_cast<size_t>(config.head_dim);
    const size_t rows = static_cast<size_t>(attention_) * config.kv_heads;
    for (int which = 0; which < 2; which++) {
        row_bytes_[which] = kinds[which] == Kv::F16 ? 2 * width : kinds[which] == Kv::F32 ? 4 * width : width / 32 * 34;
        kv_[which] = Memory(rows * context * row_bytes_[which]);
        pending_kv_[which] = Memory(rows * kMaxNodes * row_bytes_[which]);
    }
    conv_ = Memory(recurrent_ * conv_floats() * sizeof(float));
    delta_ = Memory(recurrent_ * delta_floats() * sizeof(float));
    for (auto& updates : updates_) {
        updates = Memory(static_cast<size_t>(recurrent_) * config.value_heads * update_floats() * sizeof(float));
    }
    pending_qkv_ = Memory(static_cast<size_t>(recurrent_) * kMaxNodes * config.channels() * sizeof(float));
    pending_gates_ = Memory(static_cast<size_t>(recurrent_) * kMaxNodes * gate_stride() * sizeof(float));
}

size_t State::snapshot_bytes() const {
    const size_t rows = static_cast<size_t>(attention_) * config.kv_heads * length;
    return rows * (row_bytes_[0] + row_bytes_[1]) + recurrent_ * (conv_floats() + delta_floats()) * sizeof(float);
}

// Shared out, because most of the time of a copy is spent on its pages, which are new.
void State::save(Pool& pool, uint8_t* to) {
    const int planes = attention_ * config.kv_heads, dk = config.key_head_dim, dv = config.value_head_dim;
    const int width = delta_width(dv), columns = config.value_heads * dv, blocks = recurrent_ * columns / width;
    const size_t run[2] = {length * row_bytes_[0], length * row_bytes_[1]}, block = static_cast<size_t>(dk) * width;
    uint8_t* conv = to + planes * (run[0] + run[1]);
    const auto unit = [&](int i) {
        if (i < 2 * planes) {
            const int which = i / planes, plane = i % planes;
            copy(to + (which ? planes * run[0] : 0) + plane * run[which],
                 kv_[which].data() + static_cast<size_t>(plane) * context * row_bytes_[which], run[which]);
            return;
        }
        const int b = i - 2 * planes, slot = b * width / columns, column = b * width % columns;
        float* state = delta_.floats() + b * block;
        const float* owed = update(current_, slot, column / dv);
        if (owes) kernels_.delta_add(state, dk, width, {owed + 16, owed + 16 + dk + column % dv, owed[0]});
        copy(conv + conv_.size() + b * block * sizeof(float), reinterpret_cast<uint8_t*>(state), block * sizeof(float));
    };
    pool.run([&](int thread) {
        if (thread == 0) copy(conv, conv_.data(), conv_.size());
        pool.share(2 * planes + blocks, 1, unit);
    });
    owes = false;
}

void State::load(const uint8_t* from, int saved) {
    for (int which = 0; which < 2; which++) {
        const size_t run = static_cast<size_t>(saved) * row_bytes_[which];
        for (int plane = 0; plane < attention_ * config.kv_heads; plane++, from += run) {
            copy(kv_[which].data() + static_cast<size_t>(plane) * context * row_bytes_[which], from, run);
        }
    }
    copy(conv_.data(), from, conv_.size());
    copy(delta_.data(), from + conv_.size(), delta_.size());
    owes = false;
    length = saved;
    tree.n = 0;
}

}  // namespace warpsmith
