// One pass of up to 64 tokens, of one sequence or of several, through the model: all layers, one call, every thread
// running the same code with a barrier after each stage. Weights are read once for all tokens; what looks at other
// tokens (convolution, DeltaNet, attention) is shared out by sequence and head.
//
// In place (prefill, decoding, MTP): the trees are chains and become part of their states as they are computed.
// Otherwise (trees): the states stay as they are and each tree's rows are kept aside in its state for `commit`.
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
    std::vector<double> frequencies;  // of RoPE
};

// out [n][rows rounded up to 16] = matrix `name` times the columns x [n][cols]
void multiply(Model& model, Workspace& work, const std::string& name, const float* x, int n, float* out);

// One sequence of a pass: a tree that begins at a position.
struct Part {
    State& state;
    const Tree& tree;
    int position;
    int first = 0;  // its root's row among all rows
};

// The stages of the plan (model/plan.py) that a pass runs: before the layers | a DeltaNet layer | an attention layer | after
// them | what an MTP block begins with. They are compared with the plan when weights are loaded.
inline constexpr char kStages[] =
    "embed | delta_in delta_mix mix_out mlp_in mlp_out | attention_in attention_mix mix_out mlp_in mlp_out"
    " | final_norm head | mtp_in";

class Pass {
public:
    Pass(Model& model, Workspace& work, std::vector<Part> parts, bool in_place);

    void forward(const int32_t* tokens, const Want& want);
    void mtp(const int32_t* tokens, const float* hidden, const Want& want);

    // Make nodes[0 .. count-1], a path from the root of the state's last tree, part of the committed past.
    static void commit(Model& model, Workspace& work, State& state, const int32_t* nodes, int count);

private:
    // Every thread calls these with the same arguments.
    void embed(const int32_t* tokens, float* out, int stride);
    void turn(int row);
    Acts normed(const float* norm, int forms);
    void add_mixed(int thread, const float* y, int width, const Matrix& weights);
    void layer(int thread, int index);
    void delta_mix(int thread, int index);
    void attention_mix(int thread, int index);
    void mlp(int thread, const Layer& layer);
    void finish(int thread, const float* norm, const Want& want);

    // pass_delta.cpp
    int gate_stride() const { return 2 * round_up(c.value_heads, kPanel); }
    void delta_heads(int thread, int index, const Part& part, int first, int apart);
    void delta_head(int index, const Part& part, int head, int next, const float* q, const float* k, float* room);
    void keep_row(int index, int row) const;
    // pass_attention.cpp
    struct Job { const Part* part; int head, first, last, segments, unit; };  // nodes first .. last-1, one kv head
    void attention_rows(int index, int row);
    const uint8_t* kv_row(const Part& part, int index, bool value, int head, int node, int position) const;
    void load_rows(Kv kind, const uint8_t* const* rows, int count, float* out) const;
    void attend_segment(int thread, int index, const Job& job, int segment, float* running);
    void plan_attention();
    void attention_out(int row, int query_head, const float* running) const;

    Model& m;
    const Config& c;
    const Kernels& kernels;
    Pool& pool;
    Workspace& w;
    std::vector<Part> parts;
    std::vector<const Part*> part_of;  // a row
    int n = 0;
    const bool in_place;
    std::vector<Job> jobs;
    std::vector<int> job_of;  // a unit, where jobs are split into a unit a segment; empty where they are not
    std::vector<float> cosine, sine;  // [row][rotary_dim / 2]
};

}  // namespace warpsmith
