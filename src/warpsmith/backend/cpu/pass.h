// One pass of up to 64 tokens through the model: all layers, one call, every thread running the same code with a
// barrier after each stage.
//
// In place (prefill, decoding, MTP): the tokens are a chain and become part of the state as they are computed.
// Otherwise (a tree): the state stays as it is and the tree's rows are kept aside in it for `commit`.
#pragma once
#include <vector>

#include "model.h"
#include "stages.h"
#include "state.h"

namespace warpsmith {

// Buffers shared by all passes of a model; see pass.cpp for their sizes.
struct Workspace {
    explicit Workspace(Model& model);
    Memory memory;
    float *x, *normed, *qkv, *z, *gates, *q, *k, *v, *y, *h;
    Stages stages;
    float* scratch(int thread) const { return stages.scratch(thread); }
    std::vector<float> partial;
};

// out [n][rows rounded up to 16] = matrix `name` times the columns x [n][cols]
void multiply(Model& model, Workspace& work, const std::string& name, const float* x, int n, float* out);

// The stages of the plan (model/plan.py) that a pass runs: before the layers | a DeltaNet layer | an attention layer | after
// them | what an MTP block begins with. They are compared with the plan when weights are loaded.
inline constexpr char kStages[] =
    "embed | delta_in delta_mix mix_out mlp_in mlp_out | attention_in attention_mix mix_out mlp_in mlp_out"
    " | final_norm head | mtp_in";

class Pass {
public:
    Pass(Model& model, Workspace& work, State& state, const Tree& tree, int position, bool in_place);

    void forward(const int32_t* tokens, const Want& want);
    void mtp(const int32_t* tokens, const float* hidden, const Want& want);

    // Make nodes[0 .. count-1], a path from the root of the state's last tree, part of the committed past.
    static void commit(Model& model, Workspace& work, State& state, const int32_t* nodes, int count);

private:
    // Every thread calls these with the same arguments.
    void embed(const int32_t* tokens, float* out, int stride);
    Acts normed(const float* norm, int forms);
    void add_mixed(int thread, const float* y, int width, const Matrix& weights);
    void layer(int thread, int index);
    void delta_mix(int thread, int index);
    void attention_mix(int thread, int index);
    void mlp(int thread, const Layer& layer);
    void finish(int thread, const float* norm, const Want& want);

    // pass_delta.cpp
    float* qkv_rows(int index) const;
    float* gate_rows(int index) const;
    void delta_head(int thread, int index, int head);
    // pass_attention.cpp
    void attention_rows(int index, int node);
    const uint8_t* kv_row(int index, bool value, int head, int node, int position) const;
    void load_rows(Kv kind, const uint8_t* const* rows, int count, float* out) const;
    void attend_segment(int thread, int index, int head, int first, int last, int segment, float* running);
    void plan_attention();
    void attention_out(int node, int query_head, const float* running) const;

    Model& m;
    const Config& c;
    const Kernels& kernels;
    Pool& pool;
    Workspace& w;
    State& state;
    const Tree& tree;
    const int n, position;
    const bool in_place;
    int attention_jobs = 0, segments = 0;
    bool split_segments = false;
    std::vector<float> cosine, sine;  // [node][rotary_dim / 2]
};

}  // namespace warpsmith
