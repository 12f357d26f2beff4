// The convolution and the gated delta rule, one value head of one sequence at a time: a head's states and outputs meet
// no other head's, so a unit of work is a head, or all heads that share a key head, for all nodes of a tree, and a
// node's arithmetic is that of decoding it alone.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "pass.h"

namespace warpsmith {
namespace {

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// The convolution's input rows for a node: `taps` of them, the oldest first, from the tree or from before it.
void window(const State& state, const Tree& tree, int index, int node, const float* qkv, const float** rows) {
    const Config& c = state.config;
    for (int tap = 0; tap < c.conv_kernel; tap++) {
        const int depth = tree.depth[node] - (c.conv_kernel - 1) + tap;
        rows[tap] = depth >= 0 ? qkv + static_cast<size_t>(tree.path[node][depth]) * c.channels()
                               : state.conv_row(index, state.length + depth);
    }
}

// One head's inputs of one node after convolution, norms and gates.
struct HeadInputs {
    const Config& c;
    const Kernels& kernels;
    const Layer& layer;
    int head;

    void part(const float* const* rows, int channel, int width, float* out) const {
        const float* at[16];
        for (int tap = 0; tap < c.conv_kernel; tap++) at[tap] = rows[tap] + channel;
        kernels.conv(at, layer.conv + channel, c.conv_kernel, c.channels(), width, out);
    }
    void query(const float* const* rows, float* out) const {
        part(rows, head % c.key_heads * c.key_head_dim, c.key_head_dim, out);
        kernels.l2_norm(out, c.key_head_dim, 1.0f / std::sqrt(static_cast<float>(c.key_head_dim)));
    }
    void key(const float* const* rows, float* out) const {
        part(rows, c.key_dim() + head % c.key_heads * c.key_head_dim, c.key_head_dim, out);
        kernels.l2_norm(out, c.key_head_dim, 1.0f);
    }
    void value(const float* const* rows, float* out) const {
        part(rows, 2 * c.key_dim() + head * c.value_head_dim, c.value_head_dim, out);
    }
    float beta(const float* gates) const { return sigmoid(gates[head]); }
    float decay(const float* gates, int stride) const {
        return std::exp(layer.a[head] * softplus(gates[stride / 2 + head] + layer.dt[head]));
    }
};

// What is owed to a column block of a head's state, if anything is.
DeltaUpdate owed_to(const State& state, int index, int head, int column) {
    const float* update = state.owed_update(index, head);
    return {update + 16, update + 16 + state.config.key_head_dim + column, update[0]};
}

}  // namespace

void Pass::delta_mix(int thread, int index) {
    // heads together where every thread has enough to do: queries and keys are then made once for all of them
    const int sequences = static_cast<int>(parts.size());
    const int units = sequences * c.key_heads < 2 * pool.threads() ? c.value_heads : c.key_heads;
    pool.share(sequences * units + (in_place ? 0 : n), 1, [&](int unit) {
        if (unit < sequences * units) delta_heads(thread, index, parts[unit / units], unit % units, units);
        else keep_row(index, unit - sequences * units);
    });
    if (!in_place) return;
    // the rows that the next chunk's convolution looks back on; nobody reads them before the next barrier
    for (size_t i = thread; i < parts.size(); i += pool.threads()) {
        const Part& part = parts[i];
        for (int node = std::max(0, part.tree.n - (c.conv_kernel - 1)); node < part.tree.n; node++) {
            std::memcpy(part.state.conv_row(index, part.position + node),
                        w.qkv + static_cast<size_t>(part.first + node) * c.channels(), c.channels() * sizeof(float));
        }
    }
}

// What a commit will want to know of a row.
void Pass::keep_row(int index, int row) const {
    const Part& part = *part_of[row];
    const size_t node = static_cast<size_t>(row - part.first), channels = c.channels(), gates = gate_stride();
    std::memcpy(part.state.qkv(index) + node * channels, w.qkv + row * channels, channels * sizeof(float));
    std::memcpy(part.state.gates(index) + node * gates, w.gates + row * gates, gates * sizeof(float));
}

// Value heads first, first + apart, ..., which share a key head.
void Pass::delta_heads(int thread, int index, const Part& sequence, int first, int apart) {
    const HeadInputs inputs{c, kernels, m.layers[index], first};
    const float* qkv = w.qkv + static_cast<size_t>(sequence.first) * c.channels();
    float *q = w.scratch(thread), *k = q + kMaxNodes * c.key_head_dim;
    for (int i = 0; i < sequence.tree.n; i++) {
        const float* rows[16];
        window(sequence.state, sequence.tree, index, i, qkv, rows);
        inputs.query(rows, q + i * c.key_head_dim);
        inputs.key(rows, k + i * c.key_head_dim);
    }
    for (int head = first; head < c.value_heads; head += apart) {
        delta_head(index, sequence, head, head + apart, q, k, k + kMaxNodes * c.key_head_dim);
    }
}

// One of them, with the queries and keys of all nodes, and room for the rest; `next` is the head after it.
void Pass::delta_head(int index, const Part& sequence, int head, int next, const float* q, const float* k,
                      float* room) {
    const HeadInputs inputs{c, kernels, m.layers[index], head};
    const State& state = sequence.state;
    const Tree& tree = sequence.tree;
    const int dk = c.key_head_dim, dv = c.value_head_dim, stride = gate_stride();
    const float* qkv = w.qkv + static_cast<size_t>(sequence.first) * c.channels();
    const float* gates = w.gates + static_cast<size_t>(sequence.first) * stride;
    float *v = room, *out = v + kMaxNodes * dv;
    float *decay = out + kMaxNodes * dv, *beta = decay + kMaxNodes, *slots = beta + kMaxNodes;
    for (int i = 0; i < tree.n; i++) {
        const float* rows[16];
        window(state, tree, index, i, qkv, rows);
        inputs.value(rows, v + i * dv);
        beta[i] = inputs.beta(gates + static_cast<size_t>(i) * stride);
        decay[i] = inputs.decay(gates + static_cast<size_t>(i) * stride, stride);
    }
    const int width = delta_width(dv);
    const size_t block = static_cast<size_t>(dk) * width;
    const int kept = in_place ? tree.n - 1 : 0;  // the node whose update may be owed from here on
    float* update = state.next_update(index, head);
    update[0] = decay[kept];
    std::memcpy(update + 16, k + kept * dk, dk * sizeof(float));
    for (int column = 0; column < dv; column += width) {
        float* committed = state.delta(index) + (static_cast<size_t>(head) * dv + column) * dk;
        const auto place = [&](int slot) -> float* {
            if (slot == Tree::kNowhere) return nullptr;
            return slot == Tree::kCommitted ? committed : slots + slot * block;
        };
        const DeltaUpdate before = owed_to(state, index, head, column);
        float* write = update + 16 + dk + column;
        const int last = in_place ? tree.n - 1 : tree.visits.back().node;
        const float* then = column + width < dv    ? committed + block
                            : next < c.value_heads ? state.delta(index) + static_cast<size_t>(next) * dv * dk
                                                   : nullptr;  // another thread may be at the next unit
        const auto step = [&](int i, const DeltaUpdate* owed) {
            const int at = i * dv + column;
            return DeltaStep{dk, width, owed, k + i * dk, q + i * dk, v + at, decay[i], beta[i], out + at,
                             in_place || i == 0 ? write : nullptr, i == last ? then : nullptr};
        };
        if (in_place) {
            DeltaUpdate owed = before;  // each token's is added on the way through the state that tells the next
            for (int i = 0; i < tree.n; i++) {
                kernels.delta_step(committed, nullptr, step(i, i || state.owes ? &owed : nullptr));
                owed = {k + i * dk, write, decay[i]};
            }
        } else {
            for (const Tree::Visit& visit : tree.visits) {
                const DeltaUpdate* owed = visit.node == 0 && state.owes ? &before : nullptr;
                kernels.delta_step(place(visit.from), place(visit.to), step(visit.node, owed));
            }
        }
    }
    for (int i = 0; i < tree.n; i++) {
        const size_t at = static_cast<size_t>(sequence.first + i) * c.value_dim() + head * dv;
        kernels.gated_norm(out + i * dv, m.layers[index].ssm_norm, w.z + at, dv, c.eps, w.y + at);
    }
}

void Pass::commit(Model& model, Workspace& work, State& state, const int32_t* nodes, int count) {
    const Config& c = model.config;
    const Kernels& kernels = model.kernels;
    const Tree& tree = state.tree;
    const int keep = c.conv_kernel - 1, dk = c.key_head_dim, dv = c.value_head_dim, width = delta_width(dv);
    const int stride = state.gate_stride();
    state.owe_next();
    if (count > 1) {
        std::vector<int> layers;
        for (int i = 0; i < c.layers; i++) {
            if (c.recurrent[i]) layers.push_back(i);
        }
        model.pool.run([&](int thread) {
            model.pool.share(static_cast<int>(layers.size()) * c.value_heads, 1, [&](int unit) {
                const int index = layers[unit / c.value_heads], head = unit % c.value_heads;
                const HeadInputs inputs{c, kernels, model.layers[index], head};
                float *k = work.scratch(thread), *v = k + dk;
                for (int i = 1; i < count; i++) {
                    const float* rows[16];
                    window(state, tree, index, nodes[i], state.qkv(index), rows);
                    inputs.key(rows, k);
                    inputs.value(rows, v);
                    const float* gates = state.gates(index) + static_cast<size_t>(nodes[i]) * stride;
                    const float decay = inputs.decay(gates, stride), beta = inputs.beta(gates);
                    for (int column = 0; column < dv; column += width) {
                        float* s = state.delta(index) + (static_cast<size_t>(head) * dv + column) * dk;
                        const DeltaUpdate owed = owed_to(state, index, head, column);
                        const DeltaUpdate* first = i == 1 ? &owed : nullptr;
                        const DeltaStep step{dk,    width, first,   k,       nullptr, v + column,
                                             decay, beta,  nullptr, nullptr, nullptr};
                        kernels.delta_step(s, s, step);
                    }
                }
            });
        });
        state.owes = false;
    }
    for (int index = 0; index < c.layers; index++) {
        if (c.recurrent[index]) {
            for (int i = std::max(0, count - keep); i < count; i++) {
                std::memcpy(state.conv_row(index, state.length + i),
                            state.qkv(index) + static_cast<size_t>(nodes[i]) * c.channels(),
                            c.channels() * sizeof(float));
            }
        } else {
            for (int i = 0; i < count; i++) {
                const int node = nodes[i], at = state.length + i;
                for (int head = 0; head < c.kv_heads; head++) {
                    std::memcpy(state.key_row(index, head, at), state.pending_key(index, node, head),
                                state.row_bytes(false));
                    std::memcpy(state.value_row(index, head, at), state.pending_value(index, node, head),
                                state.row_bytes(true));
                }
            }
        }
    }
    state.length += count;
    state.tree.n = 0;
}

}  // namespace warpsmith
