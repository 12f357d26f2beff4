// The steps that every network here is made of, for a team of threads.
//
// Inside a job every thread calls them alike, with the same arguments; each ends in a barrier, so the next may read what
// it wrote. A column of a result depends on nothing but that column.
#pragma once
#include <initializer_list>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "pool.h"
#include "types.h"

namespace warpsmith {

enum class Tokens : int { None, Argmax, Top, Logits };

constexpr int32_t kNotFinite = -1;  // the argmax of logits that hold an infinity above or a NaN

// What to compute, and where the caller wants it.
struct Want {
    Tokens tokens = Tokens::Argmax;
    int top = 0;
    std::vector<int> rows;         // whose tokens are wanted
    std::vector<int> features;     // layers whose output goes to `features_out`
    int32_t* argmax = nullptr;     // [rows]
    int32_t* top_ids = nullptr;    // [rows][top]
    float* top_logits = nullptr;
    float* logsumexp = nullptr;    // [rows]
    float* logits = nullptr;       // [rows][vocab]
    float* features_out = nullptr; // [n][features * hidden]
    float* hidden_out = nullptr;   // [n][hidden]
};

class Stages {
public:
    // Activations are at most `wide` wide; each thread gets `scratch` floats of its own besides a tile.
    Stages(Pool& pool, const Kernels& kernels, int wide, size_t scratch);

    struct Target { const Matrix* weights; float* out; int stride; };

    // Rows of `x` as the activations of a stage, in the forms that its weights read.
    Acts columns(const float* x, int stride, int width, int n, int forms);
    // The same after a norm.
    Acts normed(const float* x, int stride, int width, int n, const float* norm, float eps, int forms);
    void project(const Acts& acts, std::initializer_list<Target> targets);
    void project(const Acts& acts, const Target* first, const Target* last);
    void project_add(int thread, const Acts& acts, const Matrix& weights, float* x, int stride);  // x += weights * acts
    // out = silu(gate * acts) * (up * acts)
    void gated(int thread, const Acts& acts, const Matrix& gate, const Matrix& up, float* out, int stride);
    // What `want` says about the tokens of rows that are normed already: the head's first `vocab` rows, and the best.
    void tokens(int thread, const Matrix& head, int vocab, const float* hidden, int rows, const Want& want);

    void begin(const Want& want, int vocab, int rows);  // before a job that calls `tokens`
    float* scratch(int thread) const { return threads_[thread].floats() + kTile; }

private:
    // Rows shared out four at a time: types.h says why.
    template <class Row>
    void in_fours(int n, const Row& row) {
        pool_.share((n + 3) / 4, 1, [&](int four) {
            for (int i = 4 * four; i < n && i < 4 * four + 4; i++) row(i);
        });
    }
    static constexpr size_t kTile = 2 * kMaxNodes * kPanel;  // floats
    void pick_top(const float* logits, int vocab, int row, const Want& want) const;

    Pool& pool_;
    const Kernels& kernels_;
    Memory memory_;
    Acts room_;
    std::vector<Memory> threads_;
    std::vector<float> logits_;
    std::vector<float> best_;  // [thread][64] argmax so far
    std::vector<int32_t> best_id_;
};

}  // namespace warpsmith
