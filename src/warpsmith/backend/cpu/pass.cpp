#include "pass.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "packing.h"

namespace warpsmith {
namespace {

// Units that a thread takes from the pile at a time: few enough grabs to be cheap, enough of them to end together.
int grain_of(int units, int threads) { return std::max(1, units / (threads * 8)); }

}  // namespace

Workspace::Workspace(const Model& model) {
    const Config& c = model.config;
    const int wide = std::max({2 * c.hidden, c.ffn, c.value_dim(), c.query_dim()});
    const size_t nodes = kMaxNodes;
    size_t total = 0;
    const auto take = [&](size_t bytes) { const size_t at = total; total += (bytes + 63) / 64 * 64; return at; };
    const auto rows = [&](int width) { return take(nodes * round_up(width, kPanel) * sizeof(float)); };
    const size_t at_x = rows(c.hidden), at_normed = rows(2 * c.hidden), at_qkv = rows(c.channels());
    const size_t at_z = rows(c.value_dim()), at_gates = rows(2 * round_up(c.value_heads, kPanel));
    const size_t at_q = rows(2 * c.query_dim()), at_k = rows(c.kv_dim()), at_v = rows(c.kv_dim());
    const size_t at_y = rows(std::max(c.value_dim(), c.query_dim())), at_h = rows(c.ffn);
    const size_t blocks256 = wide / 256 * nodes, blocks32 = wide / 32 * nodes;
    const size_t at_f = rows(wide), at_q256 = take(blocks256 * 256), at_d256 = take(blocks256 * 4);
    const size_t at_sum = take(blocks256 * 16), at_minus32 = take(blocks256 * 64);
    const size_t at_q32 = take(blocks32 * 32), at_d32 = take(blocks32 * 4), at_minus8 = take(blocks32 * 4);
    memory = Memory(total);
    const auto floats = [&](size_t at) { return reinterpret_cast<float*>(memory.data() + at); };
    x = floats(at_x), normed = floats(at_normed), qkv = floats(at_qkv), z = floats(at_z), gates = floats(at_gates);
    q = floats(at_q), k = floats(at_k), v = floats(at_v), y = floats(at_y), h = floats(at_h);
    acts.f = floats(at_f);
    acts.q256 = reinterpret_cast<int8_t*>(memory.data() + at_q256);
    acts.d256 = floats(at_d256);
    acts.sum32 = reinterpret_cast<int16_t*>(memory.data() + at_sum);
    acts.minus32 = reinterpret_cast<int32_t*>(memory.data() + at_minus32);
    acts.q32 = reinterpret_cast<int8_t*>(memory.data() + at_q32);
    acts.d32 = floats(at_d32);
    acts.minus8 = reinterpret_cast<int32_t*>(memory.data() + at_minus8);

    tiles = 2 * nodes * kPanel;
    // a DeltaNet head: q, k, v and outputs of all nodes, 64 branch states; attention: a chunk, 8 nodes' running sums
    const size_t delta = nodes * (2 * c.key_head_dim + 2 * c.value_head_dim + 2) + nodes * c.key_head_dim * 32;
    const size_t group = static_cast<size_t>(c.heads / c.kv_heads);
    const size_t attention = 2 * kChunkKeys * c.head_dim + 2 * 8 * group * (c.head_dim + 2);
    for (int i = 0; i < model.pool.threads(); i++) {
        threads.emplace_back((tiles + std::max(delta, attention)) * sizeof(float));
    }
}

void multiply(Model& model, Workspace& work, const std::string& name, const float* x, int n, float* out) {
    const Matrix& matrix = model.matrix(name);
    const int forms = form_of(matrix.type), stride = round_up(matrix.rows, kPanel);
    const auto matmul = model.kernels.matmul[static_cast<int>(matrix.type)];
    model.pool.run([&](int) {
        Acts acts = work.acts;
        acts.k = acts.stride = matrix.cols, acts.n = n, acts.f = const_cast<float*>(x);
        model.pool.share(n, 1, [&](int i) { model.kernels.quantize(x + static_cast<size_t>(i) * matrix.cols, i, forms, acts); });
        model.pool.share(matrix.panels(), grain_of(matrix.panels(), model.pool.threads()),
                         [&](int i) { matmul(matrix.panel(i), acts, out + i * kPanel, stride); });
    });
}

Pass::Pass(Model& model, Workspace& work, State& s, const Tree& t, int at, bool inside)
    : m(model), c(model.config), kernels(model.kernels), pool(model.pool), w(work), state(s), tree(t), n(t.n),
      position(at), in_place(inside), best(static_cast<size_t>(pool.threads()) * kMaxNodes, -INFINITY),
      best_id(static_cast<size_t>(pool.threads()) * kMaxNodes, 0) {
    const int half = c.rotary_dim / 2;
    cosine.resize(static_cast<size_t>(n) * half);
    sine.resize(cosine.size());
    for (int j = 0; j < half; j++) {
        const double frequency = std::pow(c.rope_theta, -static_cast<double>(j) / half);
        for (int i = 0; i < n; i++) {
            const double angle = (position + tree.depth[i]) * frequency;
            cosine[static_cast<size_t>(i) * half + j] = static_cast<float>(std::cos(angle));
            sine[static_cast<size_t>(i) * half + j] = static_cast<float>(std::sin(angle));
        }
    }
    plan_attention();
}

void Pass::forward(const int32_t* tokens, const Want& want) {
    if (want.tokens == Tokens::Top) w.logits.resize(static_cast<size_t>(n - want.first_row) * c.vocab);
    pool.run([&](int thread) {
        embed(tokens, w.x, c.hidden);
        for (int i = 0; i < c.layers; i++) {
            layer(thread, i);
            for (size_t f = 0; f < want.features.size(); f++) {
                if (want.features[f] != i) continue;
                const size_t stride = want.features.size() * c.hidden;
                // x is next written two barriers from here
                for (int row = thread; row < n; row += pool.threads()) {
                    std::memcpy(want.features_out + row * stride + f * c.hidden, w.x + static_cast<size_t>(row) * c.hidden,
                                c.hidden * sizeof(float));
                }
            }
        }
        finish(thread, m.output_norm, want);
    });
}

void Pass::mtp(const int32_t* tokens, const float* hidden, const Want& want) {
    if (want.tokens == Tokens::Top) w.logits.resize(static_cast<size_t>(n - want.first_row) * c.vocab);
    pool.run([&](int thread) {
        const int stride = 2 * c.hidden;
        embed(tokens, w.normed, stride);
        pool.share(n, 1, [&](int row) {
            float* both = w.normed + static_cast<size_t>(row) * stride;
            kernels.rms_norm(both, m.mtp_embedding_norm, c.hidden, c.eps, both);
            kernels.rms_norm(hidden + static_cast<size_t>(row) * c.hidden, m.mtp_hidden_norm, c.hidden, c.eps,
                             both + c.hidden);
        });
        const Acts acts = prepare_rows(w.normed, stride, stride, n, form_of(m.mtp_project.type));
        project(thread, acts, {{&m.mtp_project, w.x, c.hidden}});
        layer(thread, c.layers);
        finish(thread, m.mtp_output_norm, want);
    });
}

void Pass::embed(const int32_t* tokens, float* out, int stride) {
    pool.share(n, 1, [&](int row) { unpack_row(m.embedding, tokens[row], out + static_cast<size_t>(row) * stride); });
}

// The forms of a stage's input that its weights read, after an optional norm.
Acts Pass::prepare(const float* x, int stride, int width, const float* norm, int forms) {
    if (!norm) return prepare_rows(x, stride, width, n, forms);
    Acts acts = w.acts;
    acts.k = width, acts.n = n, acts.stride = width;
    pool.share(n, 1, [&](int row) {
        float* to = acts.f + static_cast<size_t>(row) * width;
        kernels.rms_norm(x + static_cast<size_t>(row) * stride, norm, width, c.eps, to);
        kernels.quantize(to, row, forms, acts);
    });
    return acts;
}

Acts Pass::prepare_rows(const float* x, int stride, int width, int rows, int forms) {
    Acts acts = w.acts;
    acts.k = width, acts.n = rows, acts.stride = stride;
    acts.f = const_cast<float*>(x);  // read only from here on
    if (forms & (kQ8Per256 | kQ8Per32)) {
        pool.share(rows, 1, [&](int row) { kernels.quantize(x + static_cast<size_t>(row) * stride, row, forms, acts); });
    }
    return acts;
}

void Pass::project(int, const Acts& acts, std::initializer_list<Target> targets) {
    int units = 0;
    for (const Target& t : targets) units += t.weights->panels();
    pool.share(units, grain_of(units, pool.threads()), [&](int unit) {
        const Target* t = targets.begin();
        while (unit >= t->weights->panels()) unit -= (t++)->weights->panels();
        kernels.matmul[static_cast<int>(t->weights->type)](t->weights->panel(unit), acts, t->out + unit * kPanel, t->stride);
    });
}

// x += weights * acts
void Pass::project_add(int thread, const Acts& acts, const Matrix& weights) {
    float* tile = w.tile(thread);
    const auto matmul = kernels.matmul[static_cast<int>(weights.type)];
    pool.share(weights.panels(), grain_of(weights.panels(), pool.threads()), [&](int unit) {
        matmul(weights.panel(unit), acts, tile, kPanel);
        for (int row = 0; row < n; row++) {
            kernels.add(tile + row * kPanel, kPanel, w.x + static_cast<size_t>(row) * c.hidden + unit * kPanel);
        }
    });
}

void Pass::layer(int thread, int index) {
    const Layer& l = m.layers[index];
    if (l.recurrent) {
        const int forms = form_of(l.qkv.type) | form_of(l.z.type) | form_of(l.beta.type) | form_of(l.alpha.type);
        const Acts acts = prepare(w.x, c.hidden, c.hidden, l.norm, forms);
        float* gates = gate_rows(index);
        const int stride = state.gate_stride();
        project(thread, acts,
                {{&l.qkv, qkv_rows(index), c.channels()},
                 {&l.z, w.z, c.value_dim()},
                 {&l.beta, gates, stride},
                 {&l.alpha, gates + stride / 2, stride}});
        delta_mix(thread, index);
        project_add(thread, prepare(w.y, c.value_dim(), c.value_dim(), nullptr, form_of(l.mix_out.type)), l.mix_out);
    } else {
        const Acts acts = prepare(w.x, c.hidden, c.hidden, l.norm, form_of(l.q.type) | form_of(l.k.type) | form_of(l.v.type));
        project(thread, acts, {{&l.q, w.q, 2 * c.query_dim()}, {&l.k, w.k, c.kv_dim()}, {&l.v, w.v, c.kv_dim()}});
        attention_mix(thread, index);
        project_add(thread, prepare(w.y, c.query_dim(), c.query_dim(), nullptr, form_of(l.mix_out.type)), l.mix_out);
    }
    mlp(thread, l);
}

void Pass::mlp(int thread, const Layer& l) {
    const Acts acts = prepare(w.x, c.hidden, c.hidden, l.post_norm, form_of(l.gate.type) | form_of(l.up.type));
    const auto gate = kernels.matmul[static_cast<int>(l.gate.type)], up = kernels.matmul[static_cast<int>(l.up.type)];
    float *a = w.tile(thread), *b = a + kMaxNodes * kPanel;
    pool.share(l.gate.panels(), grain_of(l.gate.panels(), pool.threads()), [&](int unit) {
        gate(l.gate.panel(unit), acts, a, kPanel);
        up(l.up.panel(unit), acts, b, kPanel);
        for (int row = 0; row < n; row++) {
            kernels.silu_mul(a + row * kPanel, b + row * kPanel, kPanel, w.h + static_cast<size_t>(row) * c.ffn + unit * kPanel);
        }
    });
    project_add(thread, prepare(w.h, c.ffn, c.ffn, nullptr, form_of(l.down.type)), l.down);
}

void Pass::finish(int thread, const float* norm, const Want& want) {
    if (want.tokens == Tokens::None && !want.hidden_out) return;
    pool.share(n, 1, [&](int row) {
        float* to = w.normed + static_cast<size_t>(row) * c.hidden;
        kernels.rms_norm(w.x + static_cast<size_t>(row) * c.hidden, norm, c.hidden, c.eps, to);
        if (want.hidden_out) std::memcpy(want.hidden_out + static_cast<size_t>(row) * c.hidden, to, c.hidden * sizeof(float));
    });
    if (want.tokens != Tokens::None && want.first_row < n) tokens_out(thread, want);
}

void Pass::tokens_out(int thread, const Want& want) {
    const int rows = n - want.first_row;
    const float* hidden = w.normed + static_cast<size_t>(want.first_row) * c.hidden;
    const Acts acts = prepare_rows(hidden, c.hidden, c.hidden, rows, form_of(m.head.type));
    const auto matmul = kernels.matmul[static_cast<int>(m.head.type)];
    float* logits = want.tokens == Tokens::Logits ? want.logits : want.tokens == Tokens::Top ? w.logits.data() : nullptr;
    float* tile = w.tile(thread);
    float* most = best.data() + static_cast<size_t>(thread) * kMaxNodes;
    int32_t* id = best_id.data() + static_cast<size_t>(thread) * kMaxNodes;
    pool.share(m.head.panels(), grain_of(m.head.panels(), pool.threads()), [&](int unit) {
        matmul(m.head.panel(unit), acts, tile, kPanel);
        const int first = unit * kPanel, count = std::min(kPanel, c.vocab - first);
        for (int row = 0; row < rows; row++) {
            const float* values = tile + row * kPanel;
            if (logits) std::memcpy(logits + static_cast<size_t>(row) * c.vocab + first, values, count * sizeof(float));
            for (int i = 0; i < count; i++) {  // a thread's units only ever go up: the first of equals stays
                if (values[i] > most[row]) most[row] = values[i], id[row] = first + i;
            }
        }
    });
    pool.share(rows, 1, [&](int row) {
        float top = -INFINITY;
        int32_t winner = 0;
        for (int t = 0; t < pool.threads(); t++) {
            const float value = best[static_cast<size_t>(t) * kMaxNodes + row];
            const int32_t candidate = best_id[static_cast<size_t>(t) * kMaxNodes + row];
            if (value > top || (value == top && value > -INFINITY && candidate < winner)) top = value, winner = candidate;
        }
        want.argmax[row] = winner;
        if (want.tokens == Tokens::Top) pick_top(w.logits.data() + static_cast<size_t>(row) * c.vocab, row, want);
    });
}

// The best `top` logits, best first and the lower id first among equals, and the log of the sum of all exponentials.
void Pass::pick_top(const float* logits, int row, const Want& want) const {
    const auto better = [&](int32_t a, int32_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; };
    std::vector<int32_t> heap;  // the worst of the best so far is in front
    heap.reserve(static_cast<size_t>(want.top) + 1);
    for (int32_t id = 0; id < c.vocab; id++) {
        if (static_cast<int>(heap.size()) == want.top && !(logits[id] > logits[heap.front()])) continue;
        heap.push_back(id);
        std::push_heap(heap.begin(), heap.end(), better);
        if (static_cast<int>(heap.size()) > want.top) {
            std::pop_heap(heap.begin(), heap.end(), better);
            heap.pop_back();
        }
    }
    std::sort_heap(heap.begin(), heap.end(), better);
    for (size_t i = 0; i < heap.size(); i++) {
        want.top_ids[static_cast<size_t>(row) * want.top + i] = heap[i];
        want.top_logits[static_cast<size_t>(row) * want.top + i] = logits[heap[i]];
    }
    const float peak = logits[want.argmax[row]];
    want.logsumexp[row] = peak + std::log(kernels.exp_sum(logits, c.vocab, peak));
}

}  // namespace warpsmith
