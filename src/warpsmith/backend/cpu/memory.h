// Large zeroed allocations, in huge pages where the system gives them; untouched pages cost nothing.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

namespace warpsmith {

class Memory {
public:
    Memory() = default;
    explicit Memory(size_t bytes) : bytes_(bytes) {
        if (bytes == 0) return;
        void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
        madvise(p, bytes, MADV_HUGEPAGE);
#endif
        data_ = static_cast<uint8_t*>(p);
    }
    ~Memory() {
        if (data_) munmap(data_, bytes_);
    }
    Memory(Memory&& other) noexcept { swap(other); }
    Memory& operator=(Memory&& other) noexcept {
        swap(other);
        return *this;
    }
    uint8_t* data() const { return data_; }
    float* floats() const { return reinterpret_cast<float*>(data_); }
    size_t size() const { return bytes_; }

private:
    void swap(Memory& other) {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
    }
    uint8_t* data_ = nullptr;
    size_t bytes_ = 0;
};

}  // namespace warpsmith
