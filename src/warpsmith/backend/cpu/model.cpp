#include "model.h"

#include <utility>

namespace warpsmith {

Model::Model(Config c, int threads, const std::vector<std::string>& features)
    : config(std::move(c)), kernels(choose_kernels(features)), pool(threads) {}

void Model::finish() {
    const int blocks = config.layers + (config.mtp_layers ? 1 : 0);
    for (int i = 0; i < blocks; i++) {
        const std::string block = "blk." + std::to_string(i) + ".";
        Layer layer{};
        layer.recurrent = i < config.layers && config.recurrent[i];
        layer.norm = weights.vector(block + "attn_norm.weight");
        layer.post_norm = weights.vector(block + "post_attention_norm.weight");
        layer.gate = weights.matrix(block + "ffn_gate.weight");
        layer.up = weights.matrix(block + "ffn_up.weight");
        layer.down = weights.matrix(block + "ffn_down.weight");
        if (layer.recurrent) {
            layer.qkv = weights.matrix(block + "attn_qkv.weight");
            layer.z = weights.matrix(block + "attn_gate.weight");
            layer.beta = weights.matrix(block + "ssm_beta.weight");
            layer.alpha = weights.matrix(block + "ssm_alpha.weight");
            layer.conv = weights.vector(block + "ssm_conv1d.weight");
            layer.dt = weights.vector(block + "ssm_dt.bias");
            layer.a = weights.vector(block + "ssm_a");
            layer.ssm_norm = weights.vector(block + "ssm_norm.weight");
            layer.mix_out = weights.matrix(block + "ssm_out.weight");
        } else {
            layer.q = weights.matrix(block + "attn_q.weight");
            layer.k = weights.matrix(block + "attn_k.weight");
            layer.v = weights.matrix(block + "attn_v.weight");
            layer.q_norm = weights.vector(block + "attn_q_norm.weight");
            layer.k_norm = weights.vector(block + "attn_k_norm.weight");
            layer.mix_out = weights.matrix(block + "attn_output.weight");
        }
        layers.push_back(layer);
    }
    embedding = weights.matrix("token_embd.weight");
    head = config.tied ? embedding : weights.matrix("output.weight");
    output_norm = weights.vector("output_norm.weight");
    if (config.mtp_layers) {
        const std::string block = "blk." + std::to_string(config.layers) + ".nextn.";
        mtp_project = weights.matrix(block + "eh_proj.weight");
        mtp_embedding_norm = weights.vector(block + "enorm.weight");
        mtp_hidden_norm = weights.vector(block + "hnorm.weight");
        mtp_output_norm = weights.vector(block + "shared_head_norm.weight");
    }
}

}  // namespace warpsmith
