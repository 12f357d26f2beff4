// One pass of up to 64 tokens through the model: all layers, one call, every thread running the same code with a
// barrier after each stage.
//
// In place (prefill, decoding, MTP): the tokens are a chain and become part of the state as they are computed.
// Otherwise (a tree): the state stays as it is and the tree's rows are kept aside in it for `commit`.
#pragma once
#include <initializer_list>
#include <vector>

#include "model.h"
#include "state.h"

namespace warpsmith {

enum class Tokens : int { None, Argmax, Top, Logits };

// What to compute, and where the caller wants it.
struct Want {
    Tokens tokens = Tokens::Argmax;
    int top = 0;
    int first_row = 0;             // tokens are wanted for rows first_row .. n-1
    std::vector<int> features;     // layers whose output goes to `features_out`
    int32_t* argmax = nullptr;     // [rows]
    int32_t* top_ids = nullptr;    // [rows][top]
    float* top_logits = nullptr;
    float* logsumexp = nullptr;    // [rows]
    float* logits = nullptr;       // [rows][vocab]
    float* features_out = nullptr; // [n][features * hidden]
    float* hidden_out = nullptr;   // [n][hidden]
};

// Buffers shared by all passes of a model; see pass.cpp for their sizes.
struct Workspace {
    explicit Workspace(const Model& model);
    Memory memory;
    float *x, *normed, *qkv, *z, *gates, *q, *k, *v, *y, *h;
    Acts acts;  // with room for every form at 64 columns of the widest stage
    std::vector<Memory> threads;
    size_t tiles = 0;  // floats of a thread's memory that hold matmul tiles; the rest belongs to the mixers
    float* tile(int thread) const { return threads[thread].floats(); }
    float* scratch(int thread) const { return threads[thread].floats() + tiles; }
    std::vector<float> logits, partial;
};

// out [n][rows rounded up to 16] = matrix `name` times the columns x [n][cols]
void multiply(Model& model, Workspace& work, const std::string& name, const float* x, int n, float* out);

class Pass {
public:
    Pass(Model& model, Workspace& work, State& state, const Tree& tree, int position, bool in_place);

    void forward(const int32_t* tokens, const Want& want);
    void mtp(const int32_t* tokens, const float* hidden, const Want& want);

    // Make nodes[0 .. count-1], a path from the root of the state's last tree, part of the committed past.
    static void commit(Model& model, Workspace& work, State& state, const int32_t* nodes, int count);

private:
    struct Target { const Matrix* weights; float* out; int stride; };

    // Stages; every thread calls them with the same arguments.
    void embed(const int32_t* tokens, float* out, int stride);
    Acts prepare(const float* x, int stride, int width, const float* norm, int forms);
    Acts prepare_rows(const float* x, int stride, int width, int rows, int forms);
    void project(int thread, const Acts& acts, std::initializer_list<Target> targets);
    void project_add(int thread, const Acts& acts, const Matrix& weights);
    void layer(int thread, int index);
    void delta_mix(int thread, int index);
    void attention_mix(int thread, int index);
    void mlp(int thread, const Layer& layer);
    void tokens_out(int thread, const Want& want);
    void pick_top(const float* logits, int row, const Want& want) const;
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
    std::vector<float> best;          // [thread][64] argmax so far
    std::vector<int32_t> best_id;
};

}  // namespace warpsmith
