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
            out[2 + i] = static_cast<uint8_t>(static_cast<int8_t>(std::nearbyint(std::max(-127.0f, std::min(127.0f, x[i] * by)))));
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
void Pass::attention_rows(int index, int node) {
    const Layer& l = m.layers[index];
    const int width = c.head_dim, half = c.rotary_dim / 2;
    const float *cos = cosine.data() + static_cast<size_t>(node) * half, *sin = sine.data() + static_cast<size_t>(node) * half;
    const float scale = 1.0f / std::sqrt(static_cast<float>(width));
    for (int head = 0; head < c.heads; head++) {
        float* q = w.q + (static_cast<size_t>(node) * c.heads + head) * 2 * width;
        kernels.rms_norm(q, l.q_norm, width, c.eps, q);
        rotate(q, half, cos, sin);
        for (int i = 0; i < width; i++) q[i] *= scale;
    }
    for (int head = 0; head < c.kv_heads; head++) {
        float* k = w.k + static_cast<size_t>(node) * c.kv_dim() + head * width;
        const float* v = w.v + static_cast<size_t>(node) * c.kv_dim() + head * width;
        kernels.rms_norm(k, l.k_norm, width, c.eps, k);
        rotate(k, half, cos, sin);
        uint8_t* rows[2] = {in_place ? state.key_row(index, head, position + node) : state.pending_key(index, node, head),
                            in_place ? state.value_row(index, head, position + node) : state.pending_value(index, node, head)};
        const float* from[2] = {k, v};
        for (int i = 0; i < 2; i++) {
            if (state.kinds[i] == Kv::F16) kernels.to_f16(from[i], width, rows[i]);
            else if (state.kinds[i] == Kv::F32) std::memcpy(rows[i], from[i], width * sizeof(float));
            else to_q8(from[i], width, rows[i]);
        }
    }
}

const uint8_t* Pass::kv_row(int index, bool value, int head, int node, int at) const {
    if (in_place || at < position) return value ? state.value_row(index, head, at) : state.key_row(index, head, at);
    const int ancestor = tree.path[node][at - position];
    return value ? state.pending_value(index, ancestor, head) : state.pending_key(index, ancestor, head);
}

void Pass::load_rows(Kv kind, const uint8_t* const* rows, int count, float* out) const {
    for (int i = 0; i < count; i++, out += c.head_dim) {
        if (kind == Kv::F16) kernels.from_f16(rows[i], c.head_dim, out);
        else if (kind == Kv::F32) std::memcpy(out, rows[i], c.head_dim * sizeof(float));
        else from_q8(rows[i], c.head_dim, out);
    }
}

// One segment of keys for nodes first .. last-1 and the query heads of one kv head; `running` is theirs, node by node.
void Pass::attend_segment(int thread, int index, int head, int first, int last, int segment, float* running) {
    const int width = c.head_dim, group = c.heads / c.kv_heads, state_size = width + 2;
    float *keys = w.scratch(thread), *values = keys + kChunkKeys * width;
    for (int i = 0; i < (last - first) * group; i++) clear(running + static_cast<size_t>(i) * state_size, width);
    int end = 0;
    for (int i = first; i < last; i++) end = std::max(end, position + tree.depth[i] + 1);
    const uint8_t *key_rows[kChunkKeys], *value_rows[kChunkKeys];
    for (int at = segment * kSegment; at < std::min(end, (segment + 1) * kSegment); at += kChunkKeys) {
        const bool shared = at + kChunkKeys <= position;  // the same committed rows for every node
        for (int i = first; i < last; i++) {
            const int count = std::min(kChunkKeys, position + tree.depth[i] + 1 - at);
            if (count <= 0) continue;
            if (!shared || i == first) {
                for (int j = 0; j < count; j++) {
                    key_rows[j] = kv_row(index, false, head, i, at + j);
                    value_rows[j] = kv_row(index, true, head, i, at + j);
                }
                load_rows(state.kinds[0], key_rows, count, keys);
                load_rows(state.kinds[1], value_rows, count, values);
            }
            for (int g = 0; g < group; g++) {
                const float* q = w.q + (static_cast<size_t>(i) * c.heads + head * group + g) * 2 * width;
                kernels.attend(q, keys, values, count, width, running + (static_cast<size_t>(i - first) * group + g) * state_size);
            }
        }
    }
}

void Pass::attention_out(int node, int head, const float* running) const {
    const int width = c.head_dim;
    const float* gate = w.q + (static_cast<size_t>(node) * c.heads + head) * 2 * width + width;
    float* y = w.y + static_cast<size_t>(node) * c.query_dim() + head * width;
    const float by = 1.0f / running[width + 1];
    for (int i = 0; i < width; i++) y[i] = running[i] * by;
    kernels.sigmoid_mul(gate, y, width, y);
}

void Pass::plan_attention() {
    int end = 0;
    for (int i = 0; i < n; i++) end = std::max(end, position + tree.depth[i] + 1);
    segments = (end + kSegment - 1) / kSegment;
    attention_jobs = (n + kTogether - 1) / kTogether * c.kv_heads;
    split_segments = segments > 1 && attention_jobs < 2 * pool.threads();  // few nodes, a long past
    if (split_segments) {
        const size_t job = static_cast<size_t>(kTogether) * (c.heads / c.kv_heads) * (c.head_dim + 2);
        w.partial.resize(std::max(w.partial.size(), job * attention_jobs * segments));
    }
}

void Pass::attention_mix(int thread, int index) {
    pool.share(n, 1, [&](int node) { attention_rows(index, node); });
    const int width = c.head_dim, group = c.heads / c.kv_heads;
    const size_t size = width + 2, own = kTogether * group * size;
    const auto first_of = [&](int job) { return job / c.kv_heads * kTogether; };
    const auto last_of = [&](int job) { return std::min(n, first_of(job) + kTogether); };
    const auto out = [&](int job, int query, const float* total) {
        attention_out(first_of(job) + query / group, job % c.kv_heads * group + query % group, total);
    };
    if (split_segments) {
        pool.share(attention_jobs * segments, 1, [&](int unit) {
            const int job = unit / segments;
            attend_segment(thread, index, job % c.kv_heads, first_of(job), last_of(job), unit % segments,
                           w.partial.data() + unit * own);
        });
        pool.share(attention_jobs, 1, [&](int job) {
            float* total = w.scratch(thread);
            for (int query = 0; query < (last_of(job) - first_of(job)) * group; query++) {
                clear(total, width);
                for (int s = 0; s < segments; s++) {
                    const size_t unit = static_cast<size_t>(job) * segments + s;
                    kernels.merge(w.partial.data() + unit * own + query * size, width, total);
                }
                out(job, query, total);
            }
        });
        return;
    }
    pool.share(attention_jobs, 1, [&](int job) {
        const int queries = (last_of(job) - first_of(job)) * group;
        float* part = w.scratch(thread) + 2 * kChunkKeys * width;
        float* total = part + own;
        for (int i = 0; i < queries; i++) clear(total + i * size, width);
        for (int s = 0; s < segments; s++) {
            attend_segment(thread, index, job % c.kv_heads, first_of(job), last_of(job), s, part);
            for (int i = 0; i < queries; i++) kernels.merge(part + i * size, width, total + i * size);
        }
        for (int i = 0; i < queries; i++) out(job, i, total + i * size);
    });
}

}  // namespace warpsmith
