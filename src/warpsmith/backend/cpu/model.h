// The weights of one model, packed, and the sizes a pass works with.
#pragma once
#include <mutex>
#include <string>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "types.h"
#include "weights.h"

namespace warpsmith {

// Names as in warpsmith.model.config.Config.
struct Config {
    int layers, hidden, ffn, vocab, heads, kv_heads, key_heads, value_heads, head_dim, rotary_dim;
    int key_head_dim, value_head_dim, conv_kernel, mtp_layers;
    bool tied;
    float eps;
    double rope_theta;
    std::vector<bool> recurrent;

    int key_dim() const { return key_heads * key_head_dim; }
    int value_dim() const { return value_heads * value_head_dim; }
    int channels() const { return 2 * key_dim() + value_dim(); }
    int query_dim() const { return heads * head_dim; }
    int kv_dim() const { return kv_heads * head_dim; }
};

struct Layer {
    bool recurrent;
    const float *norm, *post_norm;
    Matrix mix_out, gate, up, down;
    Matrix qkv, z, beta, alpha;                         // DeltaNet
    const float *conv, *dt, *a, *ssm_norm;              // conv is [taps][channels]
    Matrix q, k, v;                                     // attention
    const float *q_norm, *k_norm;
};

class Model {
public:
    Model(Config config, int threads, const std::vector<std::string>& features);

    void finish();  // every tensor is there: connect the layers

    const Config config;
    const Kernels& kernels;
    Pool pool;
    std::mutex busy;  // one pass at a time
    Weights weights;

    std::vector<Layer> layers;  // the MTP block's layer comes after the others
    Matrix embedding, head;
    const float* output_norm = nullptr;
    Matrix mtp_project;
    const float *mtp_embedding_norm = nullptr, *mtp_hidden_norm = nullptr, *mtp_output_norm = nullptr;
};

}  // namespace warpsmith
