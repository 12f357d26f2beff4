#include "weights.h"

#include <stdexcept>

#include "packing.h"

namespace warpsmith {
namespace {
constexpr size_t kAlign = 4096;
}

size_t Weights::packed_bytes(Type type, int rows, int cols) {
    const size_t panels = static_cast<size_t>((rows + kPanel - 1) / kPanel);
    return (panels * panel_bytes(type, cols) + kAlign - 1) / kAlign * kAlign;
}

void Weights::reserve(size_t bytes) { arena_ = Memory(bytes + kAlign); }  // kernels prefetch a little past the end

void Weights::add_matrix(Pool& pool, const std::string& name, Type type, int rows, int cols, const uint8_t* stored) {
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

void Weights::add_vector(const std::string& name, const float* values, size_t count) {
    vectors_[name] = std::vector<float>(values, values + count);
}

const Matrix& Weights::matrix(const std::string& name) const {
    const auto found = matrices_.find(name);
    if (found == matrices_.end()) throw std::out_of_range(name + " is missing");
    return found->second;
}

const float* Weights::vector(const std::string& name) const {
    const auto found = vectors_.find(name);
    if (found == vectors_.end()) throw std::out_of_range(name + " is missing");
    return found->second.data();
}

}  // namespace warpsmith
