// The table of hot functions, one for each instruction set. They are written once, as templates over a Simd struct
// (kernels_matmul.h, kernels_large.h, kernels_vector.h), and compiled in one translation unit per instruction set with
// its own flags.
//
// Every function computes a column (a token, a head, a query) by itself and in an order that depends on nothing but
// its sizes. That is where row invariance comes from; nothing above needs to care.
#pragma once
#include <string>
#include <vector>

#include "types.h"

// Loops over the registers of a tile: unrolled early, or the compiler keeps the tile in memory.
#if defined(__clang__)
#define WARPSMITH_UNROLL _Pragma("unroll")
#else
#define WARPSMITH_UNROLL _Pragma("GCC unroll 16")
#endif

// Pieces of a kernel: a call would send their registers through memory.
#define WARPSMITH_INLINE inline __attribute__((always_inline))
#define WARPSMITH_INLINE_LAMBDA __attribute__((always_inline))

namespace warpsmith {

// Value dimensions of a DeltaNet state that are stored, and stepped, together.
inline int delta_width(int dv) { return dv % 32 ? 16 : 32; }
constexpr int kChunkKeys = 16;    // keys of one online-softmax step, aligned to absolute positions

// What a token adds to a block [dk][width] of a head's state: S <- decay S + k write^T.
struct DeltaUpdate {
    const float* k;
    const float* write;
    float decay;
};

// One token's inputs for a block of a head's state; see kernels_vector.h.
struct DeltaStep {
    int dk, width;
    const DeltaUpdate* owed;  // goes into the state first, and is kept; null: nothing
    const float* k;
    const float* q;       // null: the output is not wanted
    const float* v;
    float decay;          // the factor itself, e^g
    float beta;
    float* out;
    float* write;         // what the token's update writes, for who wants to add it later; null: nobody
    const float* next;    // a block that is probably stepped after this one, to be fetched meanwhile; null: none
};

// Queries that see the same keys, so many floats apart. The running softmax of each is acc [width], peak, sum.
struct Queries {
    int count, width;
    const float* q;
    int q_stride;
    float* running;
};

struct Kernels {
    const char* name;
    // out[c * stride + r] = panel row r times column c of x, for 16 rows and x.n columns
    void (*matmul[kTypes])(const uint8_t* panel, const Acts& x, float* out, int stride);
    void (*rms_norm)(const float* x, const float* weight, int n, float eps, float* out);
    void (*quantize)(const float* x, int column, int forms, Acts& to);
    void (*sigmoid_mul)(const float* gate, const float* x, int n, float* out);    // sigmoid(gate) * x
    // tiles [rows][kPanel], as `matmul` writes them; rows of `out` and `to` are `stride` apart
    void (*silu_mul)(const float* gate, const float* up, int rows, float* out, int stride);  // silu(gate) * up
    void (*add)(const float* tile, int rows, float* to, int stride);
    // silu(sum over taps of weight[tap][channel] * rows[tap][channel])
    void (*conv)(const float* const* rows, const float* weight, int taps, int channels, int count, float* out);
    void (*l2_norm)(float* x, int n, float scale);
    void (*delta_step)(float* state, float* after, const DeltaStep& step);  // after null: not kept
    void (*delta_add)(float* state, int dk, int width, const DeltaUpdate& update);
    void (*gated_norm)(const float* x, const float* weight, const float* gate, int n, float eps, float* out);
    void (*to_f16)(const float* x, int n, uint8_t* out);
    void (*from_f16)(const uint8_t* x, int n, float* out);
    // one online-softmax step over count <= kChunkKeys keys
    void (*attend)(const Queries& queries, const float* keys, const float* values, int count);
    // the same over keys and values of 16 bits; null where each query would convert them anew
    void (*attend_f16)(const Queries& queries, const uint8_t* keys, const uint8_t* values, int count);
    void (*merge)(const float* part, int width, float* running);  // running softmax + another one's part
    float (*exp_sum)(const float* x, int n, float peak);  // sum of e^(x - peak)
};

extern const Kernels kGenericKernels;
#if defined(__aarch64__)
extern const Kernels kNeonKernels;
extern const Kernels kNeonI8mmKernels;
#elif defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

std::vector<std::string> cpu_features();                            // of this processor, those that matter to us
const Kernels& choose_kernels(const std::vector<std::string>& features);  // the best these features allow

}  // namespace warpsmith
