#include "pass.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "packing.h"

namespace warpsmith {
namespace {

int widest(const Config& c) { return std::max({2 * c.hidden, c.ffn, c.value_dim(), c.query_dim()}); }

// Floats a thread needs: a DeltaNet head's q, k, v and outputs of all nodes and 64 branch states; or attention's chunk
// of keys and values and the running sums of 8 nodes.
size_t mixing(const Config& c) {
    const size_t nodes = kMaxNodes, group = static_cast<size_t>(c.heads / c.kv_heads);
    const size_t delta = nodes * (2 * c.key_head_dim + 2 * c.value_head_dim + 2) + nodes * c.key_head_dim * 32;
    return std::max(delta, 2 * kChunkKeys * c.head_dim + 2 * 8 * group * (c.head_dim + 2));
}

}  // namespace

Workspace::Workspace(Model& model) : stages(model.pool, model.kernels, widest(model.config), mixing(model.config)) {
    const Config& c = model.config;
    const size_t nodes = kMaxNodes;
    size_t total = 0;
    const auto take = [&](size_t bytes) { const size_t at = total; total += (bytes + 63) / 64 * 64; return at; };
    const auto rows = [&](int width) { return take(nodes * round_up(width, kPanel) * sizeof(float)); };
    const size_t at_x = rows(c.hidden), at_normed = rows(2 * c.hidden), at_qkv = rows(c.channels());
    const size_t at_z = rows(c.value_dim()), at_gates = rows(2 * round_up(c.value_heads, kPanel));
    const size_t at_q = rows(2 * c.query_dim()), at_k = rows(c.kv_dim()), at_v = rows(c.kv_dim());
    const size_t at_y = rows(std::max(c.value_dim(), c.query_dim())), at_h = rows(c.ffn);
    memory = Memory(total);
    const auto floats = [&](size_t at) { return reinterpret_cast<float*>(memory.data() + at); };
    x = floats(at_x), normed = floats(at_normed), qkv = floats(at_qkv), z = floats(at_z), gates = floats(at_gates);
    q = floats(at_q), k = floats(at_k), v = floats(at_v), y = floats(at_y), h = floats(at_h);
    const int half = c.rotary_dim / 2;
    for (int j = 0; j < half; j++) frequencies.push_back(std::pow(c.rope_theta, -static_cast<double>(j) / half));
}

void multiply(Model& model, Workspace& work, const std::string& name, const float* x, int n, float* out) {
    const Matrix& matrix = model.weights.matrix(name);
    model.pool.run([&](int) {
        const Acts acts = work.stages.columns(x, matrix.cols, matrix.cols, n, form_of(matrix.type));
        work.stages.project(acts, {{&matrix, out, round_up(matrix.rows, kPanel)}});
    });
}

Pass::Pass(Model& model, Workspace& work, std::vector<Part> sequences, bool inside)
    : m(model), c(model.config), kernels(model.kernels), pool(model.pool), w(work), parts(std::move(sequences)),
      in_place(inside) {
    for (Part& part : parts) {
        part.first = n;
        n += part.tree.n;
        part_of.resize(n, &part);
    }
    cosine.resize(static_cast<size_t>(n) * w.frequencies.size());
    sine.resize(cosine.size());
    plan_attention();
}

// The angles by which a row's queries and keys are turned.
void Pass::turn(int row) {
    const size_t half = w.frequencies.size();
    const Part& part = *part_of[row];
    const int position = part.position + part.tree.depth[row - part.first];
    for (size_t j = 0; j < half; j++) {
        const double angle = position * w.frequencies[j];
        cosine[row * half + j] = static_cast<float>(std::cos(angle));
        sine[row * half + j] = static_cast<float>(std::sin(angle));
    }
}

void Pass::forward(const int32_t* tokens, const Want& want) {
    w.stages.begin(want, c.vocab, static_cast<int>(want.rows.size()));
    pool.run([&](int thread) {
        embed(tokens, w.x, c.hidden);
        for (int i = 0; i < c.layers; i++) {
            layer(thread, i);
            for (size_t f = 0; f < want.features.size(); f++) {
                if (want.features[f] != i) continue;
                const size_t stride = want.features.size() * c.hidden;
                // x is next written two barriers from here
                for (int row = thread; row < n; row += pool.threads()) {
                    std::memcpy(want.features_out + row * stride + f * c.hidden,
                                w.x + static_cast<size_t>(row) * c.hidden, c.hidden * sizeof(float));
                }
            }
        }
        finish(thread, m.output_norm, want);
    });
    for (const Part& part : parts) {
        part.state.owes = false;  // delta_head has added it
        if (in_place) part.state.owe_next();
    }
}

void Pass::mtp(const int32_t* tokens, const float* hidden, const Want& want) {
    w.stages.begin(want, c.vocab, static_cast<int>(want.rows.size()));
    pool.run([&](int thread) {
        const int stride = 2 * c.hidden;
        embed(tokens, w.normed, stride);
        pool.share(n, 1, [&](int row) {
            float* both = w.normed + static_cast<size_t>(row) * stride;
            kernels.rms_norm(both, m.mtp_embedding_norm, c.hidden, c.eps, both);
            kernels.rms_norm(hidden + static_cast<size_t>(row) * c.hidden, m.mtp_hidden_norm, c.hidden, c.eps,
                             both + c.hidden);
        });
        const Acts acts = w.stages.columns(w.normed, stride, stride, n, form_of(m.mtp_project.type));
        w.stages.project(acts, {{&m.mtp_project, w.x, c.hidden}});
        layer(thread, c.layers);
        finish(thread, m.mtp_output_norm, want);
    });
}

void Pass::embed(const int32_t* tokens, float* out, int stride) {
    pool.share(n, 1, [&](int row) {
        unpack_row(m.embedding, tokens[row], out + static_cast<size_t>(row) * stride);
        turn(row);
    });
}

// The residual stream, normed, for weights that read these forms.
Acts Pass::normed(const float* norm, int forms) {
    return w.stages.normed(w.x, c.hidden, c.hidden, n, norm, c.eps, forms);
}

// The residual stream gains weights * y.
void Pass::add_mixed(int thread, const float* y, int width, const Matrix& weights) {
    w.stages.project_add(thread, w.stages.columns(y, width, width, n, form_of(weights.type)), weights, w.x, c.hidden);
}

void Pass::layer(int thread, int index) {
    const Layer& l = m.layers[index];
    if (l.recurrent) {
        const int forms = form_of(l.qkv.type) | form_of(l.z.type) | form_of(l.beta.type) | form_of(l.alpha.type);
        const Acts acts = normed(l.norm, forms);
        const int stride = gate_stride();
        w.stages.project(acts, {{&l.qkv, w.qkv, c.channels()},
                                {&l.z, w.z, c.value_dim()},
                                {&l.beta, w.gates, stride},
                                {&l.alpha, w.gates + stride / 2, stride}});
        delta_mix(thread, index);
        add_mixed(thread, w.y, c.value_dim(), l.mix_out);
    } else {
        const Acts acts = normed(l.norm, form_of(l.q.type) | form_of(l.k.type) | form_of(l.v.type));
        w.stages.project(acts, {{&l.q, w.q, 2 * c.query_dim()}, {&l.k, w.k, c.kv_dim()}, {&l.v, w.v, c.kv_dim()}});
        attention_mix(thread, index);
        add_mixed(thread, w.y, c.query_dim(), l.mix_out);
    }
    mlp(thread, l);
}

void Pass::mlp(int thread, const Layer& l) {
    w.stages.gated(thread, normed(l.post_norm, form_of(l.gate.type) | form_of(l.up.type)), l.gate, l.up, w.h, c.ffn);
    add_mixed(thread, w.h, c.ffn, l.down);
}

void Pass::finish(int thread, const float* norm, const Want& want) {
    const int count = want.tokens == Tokens::None ? 0 : static_cast<int>(want.rows.size());
    const int hidden = want.hidden_out ? n : 0;
    if (count + hidden == 0) return;
    pool.share(count + hidden, 1, [&](int i) {
        const size_t row = i < count ? want.rows[i] : i - count;
        float* to = i < count ? w.normed + static_cast<size_t>(i) * c.hidden : want.hidden_out + row * c.hidden;
        kernels.rms_norm(w.x + row * c.hidden, norm, c.hidden, c.eps, to);
    });
    if (count) w.stages.tokens(thread, m.head, m.head.rows, w.normed, count, want);
}

}  // namespace warpsmith
