// Named weights, packed: matrices in one allocation made beforehand, vectors as they are.
#pragma once
#include <string>
#include <unordered_map>
#include <vector>

#include "memory.h"
#include "pool.h"
#include "types.h"

namespace warpsmith {

class Weights {
public:
    static size_t packed_bytes(Type type, int rows, int cols);
    void reserve(size_t bytes);  // room for all matrices, once
    void add_matrix(Pool& pool, const std::string& name, Type type, int rows, int cols, const uint8_t* stored);
    void add_vector(const std::string& name, const float* values, size_t count);

    const Matrix& matrix(const std::string& name) const;
    const float* vector(const std::string& name) const;

private:
    Memory arena_;
    size_t used_ = 0;
    std::unordered_map<std::string, Matrix> matrices_;
    std::unordered_map<std::string, std::vector<float>> vectors_;
};

}  // namespace warpsmith
