// Gated attention with an online softmax.
//
// A query sees keys in chunks of 16 aligned to absolute positions, chunks in segments of 512 aligned likewise. Each
// segment has its own running softmax, and segments are merged in order. So a query's arithmetic depends on its
// position and on the rows it sees, not on where those rows lie (committed or in the tree), nor on who computes what.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "pass.h"
#include "simd_generic.h"

namespace warpsmith {
namespace {

constexpr int kSegment = 512;  // keys
constexpr int kTogether = 8;   // nodes that share the conversion of a chunk to floats

void rotate(float* x, int half, const float* cosine, const float* sine) {
    for (int j = 0; j < half; j++) {
        const float a = x[j], b = x[j + half];
        x[j] = a * cosine[j] - b * sine[j];
        x[j + half] = b * cosine[j] + a * sine[j];
    }
}

// Q8_0 blocks: a half-precision scale and 32 signed bytes.
void to_q8(const float* x, int width, uint8_t* out) {
    for (int b = 0; b < width / 32; b++, x += 32, out += 34) {
        float most = 0;
        for (int i = 0; i < 32; i++) most = std::max(most, std::fabs(x[i]));
        const uint16_t scale = Generic::to_half(most / 127.0f);
        const float d = Generic::half(scale), by = d > 0 ? 1.0f / d : 0.0f;
        std::memcpy(out, &scale, 2);
        for (int i = 0; i < 32; i++) {
            const float level = std::nearbyint(std::max(-127.0f, std::min(127.0f, x[i] * by)));
            out[2 + i] = static_cast<uint8_t>(static_cast<int8_t>(level));
        }
    }
}
void from_q8(const uint8_t* x, int width, float* out) {
    for (int b = 0; b < width / 32; b++, x += 34, out += 32) {
        uint16_t scale;
        std::memcpy(&scale, x, 2);
        const float d = Generic::half(scale);
        for (int i = 0; i < 32; i++) out[i] = d * static_cast<float>(static_cast<int8_t>(x[2 + i]));
    }
}

void clear(float* running, int width) {
    std::memset(running, 0, width * sizeof(float));
    running[width] = -INFINITY;
    running[width + 1] = 0;
}

}  // namespace

// Norm, RoPE and rounding of one node's queries, keys and values.
void Pass::attention_rows(int index, int row) {
    const Layer& l = m.layers[index];
    const Part& part = *part_of[row];
    const State& state = part.state;
    const int width = c.head_dim, half = c.rotary_dim / 2, node = row - part.first, at = part.position + node;
    const float* cos = cosine.data() + static_cast<size_t>(row) * half;
    const float* sin = sine.data() + static_cast<size_t>(row) * half;
    const float scale = 1.0f / std::sqrt(static_cast<float>(width));
    for (int head = 0; head < c.heads; head++) {
        float* q = w.q + (static_cast<size_t>(row) * c.heads + head) * 2 * width;
        kernels.rms_norm(q, l.q_norm, width, c.eps, q);
        rotate(q, half, cos, sin);
        for (int i = 0; i < width; i++) q[i] *= scale;
    }
    for (int head = 0; head < c.kv_heads; head++) {
        float* k = w.k + static_cast<size_t>(row) * c.kv_dim() + head * width;
        const float* v = w.v + static_cast<size_t>(row) * c.kv_dim() + head * width;
        kernels.rms_norm(k, l.k_norm, width, c.eps, k);
        rotate(k, half, cos, sin);
        uint8_t* rows[2] = {in_place ? state.key_row(index, head, at) : state.pending_key(index, node, head),
                            in_place ? state.value_row(index, head, at) : state.pending_value(index, node, head)};
        const float* from[2] = {k, v};
        for (int i = 0; i < 2; i++) {
            if (state.kinds[i] == Kv::F16) kernels.to_f16(from[i], width, rows[i]);
            else if (state.kinds[i] == Kv::F32) std::memcpy(rows[i], from[i], width * sizeof(float));
            else to_q8(from[i], width, rows[i]);
        }
    }
}

const uint8_t* Pass::kv_row(const Part& part, int index, bool value, int head, int node, int at) const {
    const State& state = part.state;
    if (in_place || at < part.position) {
        return value ? state.value_row(index, head, at) : state.key_row(index, head, at);
    }
    const int ancestor = part.tree.path[node][at - part.position];
    return value ? state.pending_value(index, ancestor, head) : state.pending_key(index, ancestor, head);
}

void Pass::load_rows(Kv kind, const uint8_t* const* rows, int count, float* out) const {
    for (int i = 0; i < count; i++, out += c.head_dim) {
        if (kind == Kv::F16) kernels.from_f16(rows[i], c.head_dim, out);
        else if (kind == Kv::F32) std::memcpy(out, rows[i], c.head_dim * sizeof(float));
        else from_q8(rows[i], c.head_dim, out);
    }
}

// One segment of keys for a job's nodes and the query heads of its kv head; `running` is theirs, node by node.
void Pass::attend_segment(int thread, int index, const Job& job, int segment, float* running) {
    const Part& part = *job.part;
    const int width = c.head_dim, group = c.heads / c.kv_heads, state_size = width + 2;
    const auto end_of = [&](int node) { return part.position + part.tree.depth[node] + 1; };
    float *keys = w.scratch(thread), *values = keys + kChunkKeys * width;
    const size_t queries = static_cast<size_t>(job.last - job.first) * group;
    for (size_t i = 0; i < queries; i++) clear(running + i * state_size, width);
    int end = 0;
    for (int i = job.first; i < job.last; i++) end = std::max(end, end_of(i));
    const uint8_t *key_rows[kChunkKeys], *value_rows[kChunkKeys];
    // where no other node would use a chunk as floats there need not be any
    const bool halves = kernels.attend_f16 && job.last - job.first == 1 && part.state.kinds[0] == Kv::F16 &&
                        part.state.kinds[1] == Kv::F16;
    for (int at = segment * kSegment; at < std::min(end, (segment + 1) * kSegment); at += kChunkKeys) {
        const bool shared = in_place || at + kChunkKeys <= part.position;  // the same rows for all who see them
        bool loaded = false;
        for (int i = job.first; i < job.last; i++) {
            const int count = std::min(kChunkKeys, end_of(i) - at);
            if (count <= 0) continue;
            const float* q = w.q + (static_cast<size_t>(part.first + i) * c.heads + job.head * group) * 2 * width;
            const Queries queries{group, width, q, 2 * width,
                                  running + static_cast<size_t>(i - job.first) * group * state_size};
            if (halves && shared) {
                kernels.attend_f16(queries, part.state.key_row(index, job.head, at),
                                   part.state.value_row(index, job.head, at), count);
                continue;
            }
            if (!loaded) {
                const int rows = shared ? std::min(kChunkKeys, end - at) : count;
                for (int j = 0; j < rows; j++) {
                    key_rows[j] = kv_row(part, index, false, job.head, i, at + j);
                    value_rows[j] = kv_row(part, index, true, job.head, i, at + j);
                }
                load_rows(part.state.kinds[0], key_rows, rows, keys);
                load_rows(part.state.kinds[1], value_rows, rows, values);
                loaded = shared;
            }
            kernels.attend(queries, keys, values, count);
        }
    }
}

void Pass::attention_out(int row, int head, const float* running) const {
    const int width = c.head_dim;
    const float* gate = w.q + (static_cast<size_t>(row) * c.heads + head) * 2 * width + width;
    float* y = w.y + static_cast<size_t>(row) * c.query_dim() + head * width;
    const float by = 1.0f / running[width + 1];
    for (int i = 0; i < width; i++) y[i] = running[i] * by;
    kernels.sigmoid_mul(gate, y, width, y);
}

void Pass::plan_attention() {
    int units = 0;
    bool long_past = false;
    for (const Part& part : parts) {
        int end = 0;
        for (int i = 0; i < part.tree.n; i++) end = std::max(end, part.position + part.tree.depth[i] + 1);
        const int segments = (end + kSegment - 1) / kSegment;
        long_past = long_past || segments > 1;
        for (int first = 0; first < part.tree.n; first += kTogether) {
            const int last = std::min(part.tree.n, first + kTogether);
            for (int head = 0; head < c.kv_heads; head++, units += segments) {
                jobs.push_back({&part, head, first, last, segments, units});
            }
        }
    }
    if (!long_past || static_cast<int>(jobs.size()) >= 2 * pool.threads()) return;
    for (size_t i = 0; i < jobs.size(); i++) job_of.insert(job_of.end(), jobs[i].segments, static_cast<int>(i));
    const size_t own = static_cast<size_t>(kTogether) * (c.heads / c.kv_heads) * (c.head_dim + 2);
    w.partial.resize(std::max(w.partial.size(), own * units));
}

void Pass::attention_mix(int thread, int index) {
    pool.share(n, 1, [&](int row) { attention_rows(index, row); });
    const int width = c.head_dim, group = c.heads / c.kv_heads, count = static_cast<int>(jobs.size());
    const size_t size = width + 2, own = kTogether * group * size;
    const auto queries_of = [&](const Job& job) { return (job.last - job.first) * group; };
    const auto out = [&](const Job& job, int query, const float* total) {
        attention_out(job.part->first + job.first + query / group, job.head * group + query % group, total);
    };
    if (!job_of.empty()) {  // few nodes, a long past
        pool.share(static_cast<int>(job_of.size()), 1, [&](int unit) {
            const Job& job = jobs[job_of[unit]];
            attend_segment(thread, index, job, unit - job.unit, w.partial.data() + unit * own);
        });
        pool.share(count, 1, [&](int i) {
            const Job& job = jobs[i];
            float* total = w.scratch(thread);
            for (int query = 0; query < queries_of(job); query++) {
                clear(total, width);
                for (int s = 0; s < job.segments; s++) {
                    const size_t unit = static_cast<size_t>(job.unit) + s;
                    kernels.merge(w.partial.data() + unit * own + query * size, width, total);
                }
                out(job, query, total);
            }
        });
        return;
    }
    pool.share(count, 1, [&](int unit) {
        const Job& job = jobs[unit];
        float* part = w.scratch(thread) + 2 * kChunkKeys * width;
        float* total = part + own;
        for (int i = 0; i < queries_of(job); i++) clear(total + i * size, width);
        for (int s = 0; s < job.segments; s++) {
            attend_segment(thread, index, job, s, part);
            for (int i = 0; i < queries_of(job); i++) kernels.merge(part + i * size, width, total + i * size);
        }
        for (int i = 0; i < queries_of(job); i++) out(job, i, total + i * size);
    });
}

}  // namespace warpsmith
