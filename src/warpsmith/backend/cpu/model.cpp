#include "model.h"

#include <stdexcept>
#include <utility>

#include "packing.h"

namespace warpsmith {
namespace {
constexpr size_t kAlign = 4096;
}

Model::Model(Config c, int threads, const std::vector<std::string>& features)
    : config(std::move(c)), kernels(choose_kernels(features)), pool(threads) {}

size_t Model::packed_bytes(Type type, int rows, int cols) {
    const size_t panels = static_cast<size_t>((rows + kPanel - 1) / kPanel);
    return (panels * panel_bytes(type, cols) + kAlign - 1) / kAlign * kAlign;
}

void Model::reserve(size_t bytes) { arena_ = Memory(bytes + kAlign); }  // kernels prefetch a little past the end

void Model::add_matrix(const std::string& name, Type type, int rows, int cols, const uint8_t* stored) {
    const size_t bytes = packed_bytes(type, rows, cols);
    if (used_ + bytes > arena_.size()) throw std::length_error("more weights than were reserved for");
    uint8_t* data = arena_.data() + used_;
    used_ += bytes;
    const Matrix m{type, rows, cols, data, panel_bytes(type, cols)};
    pool.run([&](int) {
        pool.share(m.panels(), 4, [&](int i) { pack_panel(type, stored, rows, cols, i, data + i * m.panel_bytes); });
    });
    matrices_[name] = m;
}

void Model::add_vector(const std::string& name, const float* values, size_t count) {
    vectors_[name] = std::vector<float>(values, values + count);
}

const Matrix& Model::matrix(const std::string& name) const {
    const auto found = matrices_.find(name);
    if (found == matrices_.end()) throw std::out_of_range(name + " is missing");
    return found->second;
}

const float* Model::vector(const std::string& name) const {
    const auto found = vectors_.find(name);
    if (found == vectors_.end()) throw std::out_of_range(name + " is missing");
    return found->second.data();
}

void Model::finish() {
    const int blocks = config.layers + (config.mtp_layers ? 1 : 0);
    for (int i = 0; i < blocks; i++) {
        const std::string block = "blk." + std::to_string(i) + ".";
        Layer layer{};
        layer.recurrent = i < config.layers && config.recurrent[i];
        layer.norm = vector(block + "attn_norm.weight");
        layer.post_norm = vector(block + "post_attention_norm.weight");
        layer.gate = matrix(block + "ffn_gate.weight");
        layer.up = matrix(block + "ffn_up.weight");
        layer.down = matrix(block + "ffn_down.weight");
        if (layer.recurrent) {
            layer.qkv = matrix(block + "attn_qkv.weight");
            layer.z = matrix(block + "attn_gate.weight");
            layer.beta = matrix(block + "ssm_beta.weight");
            layer.alpha = matrix(block + "ssm_alpha.weight");
            layer.conv = vector(block + "ssm_conv1d.weight");
            layer.dt = vector(block + "ssm_dt.bias");
            layer.a = vector(block + "ssm_a");
            layer.ssm_norm = vector(block + "ssm_norm.weight");
            layer.mix_out = matrix(block + "ssm_out.weight");
        } else {
            layer.q = matrix(block + "attn_q.weight");
            layer.k = matrix(block + "attn_k.weight");
            layer.v = matrix(block + "attn_v.weight");
            layer.q_norm = vector(block + "attn_q_norm.weight");
            layer.k_norm = vector(block + "attn_k_norm.weight");
            layer.mix_out = matrix(block + "attn_output.weight");
        }
        layers.push_back(layer);
    }
    embedding = matrix("token_embd.weight");
    head = config.tied ? embedding : matrix("output.weight");
    output_norm = vector("output_norm.weight");
    if (config.mtp_layers) {
        const std::string block = "blk." + std::to_string(config.layers) + ".nextn.";
        mtp_project = matrix(block + "eh_proj.weight");
        mtp_embedding_norm = vector(block + "enorm.weight");
        mtp_hidden_norm = vector(block + "hnorm.weight");
        mtp_output_norm = vector(block + "shared_head_norm.weight");
    }
}

}  // namespace warpsmith
