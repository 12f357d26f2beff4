#include "draft.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "packing.h"

namespace warpsmith {
namespace {

constexpr int kTogether = 8;  // rows of the block that share the conversion of a chunk of keys to floats

int widest(const DraftConfig& c) { return std::max({c.features * c.hidden, c.ffn, c.query_dim()}); }

// Floats of a thread: a chunk of keys and values, and running sums.
size_t mixing(const DraftConfig& c) {
    const size_t group = static_cast<size_t>(c.heads / c.kv_heads);
    return 2 * kChunkKeys * c.head_dim + kTogether * group * (c.head_dim + 2);
}

}  // namespace

DraftMemory::DraftMemory(const DraftConfig& c)
    : layers_(c.layers), kv_heads_(c.kv_heads), head_dim_(c.head_dim), capacity_(c.capacity),
      positions_(*std::max_element(c.capacity.begin(), c.capacity.end())) {
    size_t rows = 0;
    for (const int capacity : capacity_) {
        cache_at_.push_back(rows);
        rows += 2 * static_cast<size_t>(kv_heads_) * capacity;
    }
    caches_ = Memory(rows * head_dim_ * sizeof(uint16_t));
}

int DraftMemory::kept(int layer) const { return static_cast<int>(std::min<int64_t>(appended, capacity_[layer])); }

uint16_t* DraftMemory::row(int layer, int which, int head, int64_t number) const {
    const size_t plane = cache_at_[layer] + static_cast<size_t>(which * kv_heads_ + head) * capacity_[layer];
    return reinterpret_cast<uint16_t*>(caches_.data()) + (plane + number % capacity_[layer]) * head_dim_;
}

// appended, the positions, then every cache's rows in use, plane by plane.
size_t DraftMemory::snapshot_bytes() const {
    size_t bytes = sizeof(appended) + positions_.size() * sizeof(positions_[0]);
    for (int i = 0; i < layers_; i++) bytes += 2 * static_cast<size_t>(kv_heads_) * kept(i) * head_dim_ * sizeof(uint16_t);
    return bytes;
}

void DraftMemory::save(uint8_t* to) const {
    std::memcpy(to, &appended, sizeof(appended));
    to += sizeof(appended);
    const size_t positions = positions_.size() * sizeof(positions_[0]);
    std::memcpy(to, positions_.data(), positions);
    to += positions;
    for (int i = 0; i < layers_; i++) {
        const size_t bytes = static_cast<size_t>(kept(i)) * head_dim_ * sizeof(uint16_t);
        for (int plane = 0; plane < 2 * kv_heads_; plane++, to += bytes) {
            std::memcpy(to, row(i, plane / kv_heads_, plane % kv_heads_, 0), bytes);
        }
    }
}

void DraftMemory::load(const uint8_t* from) {
    std::memcpy(&appended, from, sizeof(appended));
    from += sizeof(appended);
    const size_t positions = positions_.size() * sizeof(positions_[0]);
    std::memcpy(positions_.data(), from, positions);
    from += positions;
    for (int i = 0; i < layers_; i++) {
        const size_t bytes = static_cast<size_t>(kept(i)) * head_dim_ * sizeof(uint16_t);
        for (int plane = 0; plane < 2 * kv_heads_; plane++, from += bytes) {
            std::memcpy(row(i, plane / kv_heads_, plane % kv_heads_, 0), from, bytes);
        }
    }
}

Draft::Draft(Model& target, DraftConfig config)
    : m(target), c(std::move(config)), stages_(target.pool, target.kernels, widest(c), mixing(c)) {
    const size_t nodes = kMaxNodes;
    size_t total = 0;
    const auto rows = [&](int width) { const size_t at = total; total += nodes * width; return at; };
    const size_t at_x = rows(c.hidden), at_q = rows(c.query_dim()), at_k = rows(c.kv_dim()), at_v = rows(c.kv_dim());
    const size_t at_y = rows(std::max(c.query_dim(), c.hidden)), at_h = rows(c.ffn);
    const size_t at_projected = rows(2 * c.layers * c.kv_dim());
    memory_ = Memory(total * sizeof(float));
    float* base = memory_.floats();
    x_ = base + at_x, q_ = base + at_q, k_ = base + at_k, v_ = base + at_v, y_ = base + at_y, h_ = base + at_h;
    projected_ = base + at_projected;

    const int half = c.head_dim / 2;
    for (int j = 0; j < half; j++) frequency_.push_back(std::pow(c.rope_theta, -static_cast<double>(j) / half));
    for (int i = 0; i < kMaxNodes; i++) {
        for (const double f : frequency_) step_cosine_.push_back(std::cos(i * f)), step_sine_.push_back(std::sin(i * f));
    }
}

void Draft::finish() {
    fc_ = weights.matrix("fc.weight");
    hidden_norm_ = weights.vector("hidden_norm.weight");
    norm_ = weights.vector("norm.weight");
    head_ = c.own_head ? weights.matrix("head.weight") : m.head;
    const float scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim));  // of the scores: goes into the queries' norm
    for (int i = 0; i < c.layers; i++) {
        const std::string layer = "layers." + std::to_string(i) + ".", attention = layer + "self_attn.", mlp = layer + "mlp.";
        Layer l{};
        l.input_norm = weights.vector(layer + "input_layernorm.weight");
        l.post_norm = weights.vector(layer + "post_attention_layernorm.weight");
        const float* q_norm = weights.vector(attention + "q_norm.weight");
        for (int j = 0; j < c.head_dim; j++) l.q_norm.push_back(q_norm[j] * scale);
        l.k_norm = weights.vector(attention + "k_norm.weight");
        l.q = weights.matrix(attention + "q_proj.weight");
        l.k = weights.matrix(attention + "k_proj.weight");
        l.v = weights.matrix(attention + "v_proj.weight");
        l.o = weights.matrix(attention + "o_proj.weight");
        l.gate = weights.matrix(mlp + "gate_proj.weight");
        l.up = weights.matrix(mlp + "up_proj.weight");
        l.down = weights.matrix(mlp + "down_proj.weight");
        layers_.push_back(l);
    }
}

// Angles of `count` positions in a row: a sine for the first, and the formula of sums for the others.
void Draft::rotation(int position, int count, Rotation& turn) const {
    const size_t half = frequency_.size();
    turn.cosine.resize(count * half), turn.sine.resize(count * half);
    for (size_t j = 0; j < half; j++) {
        const double angle = position * frequency_[j], cosine = std::cos(angle), sine = std::sin(angle);
        for (int i = 0; i < count; i++) {
            const double step_cosine = step_cosine_[i * half + j], step_sine = step_sine_[i * half + j];
            turn.cosine[i * half + j] = static_cast<float>(cosine * step_cosine - sine * step_sine);
            turn.sine[i * half + j] = static_cast<float>(sine * step_cosine + cosine * step_sine);
        }
    }
}

void Draft::rotate_head(float* x, const float* norm, const Rotation& turn, int row) const {
    m.kernels.rms_norm(x, norm, c.head_dim, c.eps, x);
    const int half = c.head_dim / 2;
    const float *cosine = turn.cosine.data() + static_cast<size_t>(row) * half, *sine = turn.sine.data() + static_cast<size_t>(row) * half;
    for (int j = 0; j < half; j++) {
        const float a = x[j], b = x[j + half];
        x[j] = a * cosine[j] - b * sine[j];
        x[j + half] = b * cosine[j] + a * sine[j];
    }
}

void Draft::append(DraftMemory& memory, const float* features, int count, int position) {
    Rotation turn;
    rotation(position, count, turn);
    m.pool.run([&](int) { add_context(memory, features, count, position, turn); });
    memory.appended += count;
}

void Draft::propose(DraftMemory& memory, const float* features, int count, int at, int32_t root, int position, int rows,
                    const Want& want) {
    Rotation context, block;
    if (count) rotation(at, count, context);
    rotation(position, c.block, block);
    stages_.begin(want, c.speaks, rows);
    const int64_t before = memory.appended;
    m.pool.run([&](int thread) {
        if (count) {
            add_context(memory, features, count, at, context);
            if (thread == 0) memory.appended = before + count;
            m.pool.barrier();
        }
        fill_block(memory, thread, root, position, rows, block, want);
    });
}

// Context rows pass through the feature projection and the layers' key and value projections only.
void Draft::add_context(DraftMemory& memory, const float* features, int count, int position, const Rotation& turn) {
    const int wide = c.features * c.hidden, kv = c.kv_dim(), stride = 2 * c.layers * kv;
    stages_.project(stages_.columns(features, wide, wide, count, form_of(fc_.type)), {{&fc_, x_, c.hidden}});
    int forms = 0;
    std::vector<Stages::Target> targets;
    for (int i = 0; i < c.layers; i++) {
        const Layer& l = layers_[i];
        targets.push_back({&l.k, projected_ + 2 * i * kv, stride});
        targets.push_back({&l.v, projected_ + (2 * i + 1) * kv, stride});
        forms |= form_of(l.k.type) | form_of(l.v.type);
    }
    const Acts acts = stages_.normed(x_, c.hidden, c.hidden, count, hidden_norm_, c.eps, forms);
    stages_.project(acts, targets.data(), targets.data() + targets.size());
    m.pool.share(count, 1, [&](int row) {
        float* from = projected_ + static_cast<size_t>(row) * stride;
        for (int i = 0; i < c.layers; i++, from += 2 * kv) {
            if (row < count - c.capacity[i]) continue;  // a row that comes after it takes its place
            for (int head = 0; head < c.kv_heads; head++) {
                float *k = from + head * c.head_dim, *v = k + kv;
                rotate_head(k, layers_[i].k_norm, turn, row);
                const int64_t number = memory.appended + row;
                m.kernels.to_f16(k, c.head_dim, reinterpret_cast<uint8_t*>(memory.row(i, 0, head, number)));
                m.kernels.to_f16(v, c.head_dim, reinterpret_cast<uint8_t*>(memory.row(i, 1, head, number)));
            }
        }
        if (row >= count - memory.longest()) memory.position(memory.appended + row) = position + row;
    });
}

// The whole block runs through the layers; of the last one only the rows that are asked about are computed.
void Draft::fill_block(DraftMemory& memory, int thread, int32_t root, int position, int rows, const Rotation& turn,
                       const Want& want) {
    const int hidden = c.hidden, asked = rows + 1;
    m.pool.share(c.block, 1, [&](int row) {
        unpack_row(m.embedding, row ? c.mask_token : root, x_ + static_cast<size_t>(row) * hidden);
    });
    for (int i = 0; i < c.layers; i++) {
        const Layer& l = layers_[i];
        const int n = i + 1 < c.layers ? c.block : asked, forms = form_of(l.k.type) | form_of(l.v.type);
        stages_.project(stages_.normed(x_, hidden, hidden, c.block, l.input_norm, c.eps, forms),
                        {{&l.k, k_, c.kv_dim()}, {&l.v, v_, c.kv_dim()}});
        stages_.project(stages_.normed(x_, hidden, hidden, n, l.input_norm, c.eps, form_of(l.q.type)), {{&l.q, q_, c.query_dim()}});
        m.pool.share(c.block, 1, [&](int row) {
            float *q = q_ + static_cast<size_t>(row) * c.query_dim(), *k = k_ + static_cast<size_t>(row) * c.kv_dim();
            for (int head = 0; row < n && head < c.heads; head++) rotate_head(q + head * c.head_dim, l.q_norm.data(), turn, row);
            for (int head = 0; head < c.kv_heads; head++) rotate_head(k + head * c.head_dim, l.k_norm, turn, row);
        });
        attend(memory, thread, i, position, n);
        stages_.project_add(thread, stages_.columns(y_, c.query_dim(), c.query_dim(), n, form_of(l.o.type)), l.o, x_, hidden);
        const int gates = form_of(l.gate.type) | form_of(l.up.type);
        stages_.gated(thread, stages_.normed(x_, hidden, hidden, n, l.post_norm, c.eps, gates), l.gate, l.up, h_, c.ffn);
        stages_.project_add(thread, stages_.columns(h_, c.ffn, c.ffn, n, form_of(l.down.type)), l.down, x_, hidden);
    }
    m.pool.share(asked, 1, [&](int row) {
        const size_t at = static_cast<size_t>(row) * hidden;
        m.kernels.rms_norm(x_ + at, norm_, hidden, c.eps, y_ + at);
        if (want.hidden_out) std::memcpy(want.hidden_out + at, y_ + at, hidden * sizeof(float));
    });
    if (want.tokens != Tokens::None) stages_.tokens(thread, head_, c.speaks, y_ + hidden, rows, want);
}

// Each of the block's first n rows sees a run of the cache's rows, oldest first, up to the newest, and then one of the block's.
void Draft::attend(DraftMemory& memory, int thread, int index, int position, int n) {
    const int width = c.head_dim, group = c.heads / c.kv_heads, size = width + 2, past = memory.kept(index), window = c.windows[index];
    const int64_t oldest = memory.appended - past;
    const auto first_seen = [&](int row) {  // of the cache's rows
        if (!window) return 0;
        int first = 0, last = past;
        while (first < last) {
            const int middle = (first + last) / 2;
            if (memory.position(oldest + middle) > position + row - window) last = middle;
            else first = middle + 1;
        }
        return first;
    };
    const int parts = (n + kTogether - 1) / kTogether;
    m.pool.share(parts * c.kv_heads, 1, [&](int unit) {
        const int head = unit % c.kv_heads, begin = unit / c.kv_heads * kTogether, end = std::min(n, begin + kTogether);
        float *keys = stages_.scratch(thread), *values = keys + kChunkKeys * width, *running = values + kChunkKeys * width;
        int first[kTogether];
        for (int row = begin; row < end; row++) first[row - begin] = first_seen(row);
        for (int i = 0; i < (end - begin) * group; i++) {
            std::memset(running + i * size, 0, width * sizeof(float));
            running[i * size + width] = -INFINITY, running[i * size + width + 1] = 0;
        }
        const auto see = [&](int row, int from, int to) {  // keys from .. to-1 of the chunk
            const float* q = q_ + static_cast<size_t>(row) * c.query_dim() + head * group * width;
            const Queries queries{group, width, q, width, running + (row - begin) * group * size};
            if (from < to) m.kernels.attend(queries, keys + from * width, values + from * width, to - from);
        };
        for (int at = first[0]; at < past; at += kChunkKeys) {
            const int count = std::min(kChunkKeys, past - at);
            for (int i = 0; i < count; i++) {
                const int64_t number = oldest + at + i;
                const auto kept = [&](int which) {
                    return reinterpret_cast<const uint8_t*>(memory.row(index, which, head, number));
                };
                m.kernels.from_f16(kept(0), width, keys + i * width);
                m.kernels.from_f16(kept(1), width, values + i * width);
            }
            for (int row = begin; row < end; row++) see(row, std::max(0, first[row - begin] - at), count);
        }
        for (int at = 0; at < c.block; at += kChunkKeys) {
            const int count = std::min(kChunkKeys, c.block - at);
            for (int i = 0; i < count; i++) {
                const size_t from = static_cast<size_t>(at + i) * c.kv_dim() + head * width;
                std::memcpy(keys + i * width, k_ + from, width * sizeof(float));
                std::memcpy(values + i * width, v_ + from, width * sizeof(float));
            }
            for (int row = begin; row < end; row++) {
                const int low = window ? row - window + 1 : 0;
                const int high = c.causal[index] ? row : window ? row + window - 1 : c.block - 1;
                see(row, std::max(0, low - at), std::min(count, high - at + 1));
            }
        }
        for (int i = 0; i < (end - begin) * group; i++) {
            float* y = y_ + static_cast<size_t>(begin + i / group) * c.query_dim() + (head * group + i % group) * width;
            const float by = 1.0f / running[i * size + width + 1];
            for (int j = 0; j < width; j++) y[j] = running[i * size + j] * by;
        }
    });
}

}  // namespace warpsmith
