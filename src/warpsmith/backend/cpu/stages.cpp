#include "stages.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace warpsmith {

Stages::Stages(Pool& pool, const Kernels& kernels, int wide, size_t scratch)
    : pool_(pool), kernels_(kernels), best_(static_cast<size_t>(pool.threads()) * kMaxNodes),
      best_id_(static_cast<size_t>(pool.threads()) * kMaxNodes) {
    size_t total = 0;
    const auto take = [&](size_t bytes) { const size_t at = total; total += (bytes + 63) / 64 * 64; return at; };
    const size_t nodes = kMaxNodes, blocks256 = wide / 256 * nodes, blocks32 = wide / 32 * nodes;
    const size_t at_f = take(nodes * round_up(wide, kPanel) * 4), at_q256 = take(blocks256 * 256), at_d256 = take(blocks256 * 4);
    const size_t at_sum = take(blocks256 * 16), at_sums16 = take(blocks256 * 32), at_minus32 = take(blocks256 * 64);
    const size_t at_q32 = take(blocks32 * 32), at_d32 = take(blocks32 * 4), at_minus8 = take(blocks32 * 4);
    const size_t at_minus128 = take(blocks32 * 4);
    memory_ = Memory(total);
    uint8_t* base = memory_.data();
    room_.f = reinterpret_cast<float*>(base + at_f);
    room_.q256 = reinterpret_cast<int8_t*>(base + at_q256);
    room_.d256 = reinterpret_cast<float*>(base + at_d256);
    room_.sums = reinterpret_cast<int8_t*>(base + at_sum);
    room_.sums16 = reinterpret_cast<int8_t*>(base + at_sums16);
    room_.minus32 = reinterpret_cast<int32_t*>(base + at_minus32);
    room_.q32 = reinterpret_cast<int8_t*>(base + at_q32);
    room_.d32 = reinterpret_cast<float*>(base + at_d32);
    room_.minus8 = reinterpret_cast<int32_t*>(base + at_minus8);
    room_.minus128 = reinterpret_cast<int32_t*>(base + at_minus128);
    for (int i = 0; i < pool.threads(); i++) threads_.emplace_back((kTile + scratch) * sizeof(float));
}

Acts Stages::columns(const float* x, int stride, int width, int n, int forms) {
    Acts acts = room_;
    acts.k = width, acts.n = n, acts.stride = stride;
    acts.f = const_cast<float*>(x);  // read only from here on
    if (forms & (kQ8Per256 | kQ8Per32)) {
        in_fours(n, [&](int row) { kernels_.quantize(x + static_cast<size_t>(row) * stride, row, forms, acts); });
    }
    return acts;
}

Acts Stages::normed(const float* x, int stride, int width, int n, const float* norm, float eps, int forms) {
    Acts acts = room_;
    acts.k = width, acts.n = n, acts.stride = width;
    in_fours(n, [&](int row) {
        float* to = acts.f + static_cast<size_t>(row) * width;
        kernels_.rms_norm(x + static_cast<size_t>(row) * stride, norm, width, eps, to);
        kernels_.quantize(to, row, forms, acts);
    });
    return acts;
}

void Stages::project(const Acts& acts, std::initializer_list<Target> targets) {
    project(acts, targets.begin(), targets.end());
}

void Stages::project(const Acts& acts, const Target* first, const Target* last) {
    int units = 0;
    for (const Target* t = first; t != last; t++) units += t->weights->panels();
    pool_.share(units, 1, [&](int unit) {
        const Target* t = first;
        while (unit >= t->weights->panels()) unit -= (t++)->weights->panels();
        kernels_.matmul[static_cast<int>(t->weights->type)](t->weights->panel(unit), acts, t->out + unit * kPanel, t->stride);
    });
}

void Stages::project_add(int thread, const Acts& acts, const Matrix& weights, float* x, int stride) {
    float* tile = threads_[thread].floats();
    const auto matmul = kernels_.matmul[static_cast<int>(weights.type)];
    pool_.share(weights.panels(), 1, [&](int unit) {
        matmul(weights.panel(unit), acts, tile, kPanel);
        kernels_.add(tile, acts.n, x + unit * kPanel, stride);
    });
}

void Stages::gated(int thread, const Acts& acts, const Matrix& gate, const Matrix& up, float* out, int stride) {
    const auto one = kernels_.matmul[static_cast<int>(gate.type)], other = kernels_.matmul[static_cast<int>(up.type)];
    float *a = threads_[thread].floats(), *b = a + kMaxNodes * kPanel;
    pool_.share(gate.panels(), 1, [&](int unit) {
        one(gate.panel(unit), acts, a, kPanel);
        other(up.panel(unit), acts, b, kPanel);
        kernels_.silu_mul(a, b, acts.n, out + unit * kPanel, stride);
    });
}

void Stages::begin(const Want& want, int vocab, int rows) {
    if (want.tokens == Tokens::Top) logits_.resize(static_cast<size_t>(rows) * vocab);
    std::fill(best_.begin(), best_.end(), -INFINITY);
    std::fill(best_id_.begin(), best_id_.end(), 0);
}

void Stages::tokens(int thread, const Matrix& head, int vocab, const float* hidden, int rows, const Want& want) {
    const Acts acts = columns(hidden, head.cols, head.cols, rows, form_of(head.type));
    const auto matmul = kernels_.matmul[static_cast<int>(head.type)];
    float* logits = want.tokens == Tokens::Logits ? want.logits : want.tokens == Tokens::Top ? logits_.data() : nullptr;
    float* tile = threads_[thread].floats();
    float* most = best_.data() + static_cast<size_t>(thread) * kMaxNodes;
    int32_t* id = best_id_.data() + static_cast<size_t>(thread) * kMaxNodes;
    pool_.share((vocab + kPanel - 1) / kPanel, 1, [&](int unit) {
        matmul(head.panel(unit), acts, tile, kPanel);
        const int first = unit * kPanel, count = std::min(kPanel, vocab - first);
        for (int row = 0; row < rows; row++) {
            const float* values = tile + row * kPanel;
            if (logits) std::memcpy(logits + static_cast<size_t>(row) * vocab + first, values, count * sizeof(float));
            const float best = most[row];
            bool better = false;  // seldom, and told without branches
            for (int i = 0; i < kPanel; i++) better |= !(values[i] <= best);
            for (int i = 0; better && i < count; i++) {  // a thread's units only ever go up: the first of equals stays
                if (values[i] <= most[row]) continue;
                const bool finite = values[i] < INFINITY;  // an infinity or a NaN wins for good, as no token
                most[row] = finite ? values[i] : INFINITY;
                id[row] = finite ? first + i : kNotFinite;
            }
        }
    });
    pool_.share(rows, 1, [&](int row) {
        float top = -INFINITY;
        int32_t winner = 0;
        for (int t = 0; t < pool_.threads(); t++) {
            const float value = best_[static_cast<size_t>(t) * kMaxNodes + row];
            const int32_t candidate = best_id_[static_cast<size_t>(t) * kMaxNodes + row];
            if (value > top || (value == top && value > -INFINITY && candidate < winner)) top = value, winner = candidate;
        }
        want.argmax[row] = winner;
        if (want.tokens == Tokens::Top) pick_top(logits_.data() + static_cast<size_t>(row) * vocab, vocab, row, want);
    });
}

// The best `top` logits, best first and the lower id first among equals, and the log of the sum of all exponentials.
void Stages::pick_top(const float* logits, int vocab, int row, const Want& want) const {
    const auto better = [&](int32_t a, int32_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; };
    std::vector<int32_t> heap;  // the worst of the best so far is in front
    heap.reserve(static_cast<size_t>(want.top) + 1);
    for (int32_t id = 0; id < vocab; id++) {
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
    const float peak = want.argmax[row] == kNotFinite ? INFINITY : logits[want.argmax[row]];
    want.logsumexp[row] = peak + std::log(kernels_.exp_sum(logits, vocab, peak));
}

}  // namespace warpsmith
