#include "pool.h"

namespace warpsmith {
namespace {

inline void relax() {
#if defined(__aarch64__)
    __asm__ volatile("isb");  // a few dozen cycles off, where `yield` is nothing
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

}  // namespace

Pool::Pool(int threads)
    : threads_(threads), crowded_(threads > static_cast<int>(std::thread::hardware_concurrency())) {
    for (int i = 1; i < threads_; i++) workers_.emplace_back([this, i] { work(i); });
}

Pool::~Pool() {
    stop_ = true;
    meet(kBetweenJobs);
    for (auto& worker : workers_) worker.join();
}

void Pool::run(const std::function<void(int)>& job) {
    job_ = &job;
    meet(kBetweenJobs);
    job(0);
    barrier();
}

void Pool::work(int thread) {
    for (;;) {
        meet(kBetweenJobs);
        if (stop_) return;
        (*job_)(thread);
        barrier();
    }
}

void Pool::meet(Patience patience) {
    const unsigned phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
        arrived_.store(0, std::memory_order_relaxed);
        next_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) > 0) {
            const std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
        return;
    }
    using Clock = std::chrono::steady_clock;
    for (Clock::time_point began{}; !crowded_;) {
        for (int i = 0; i < 32; i++) {
            if (phase_.load(std::memory_order_acquire) != phase) return;
            relax();
        }
        const auto now = Clock::now();
        if (began == Clock::time_point{}) began = now;
        if (now - began > patience) break;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] { return phase_.load(std::memory_order_seq_cst) != phase; });
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace warpsmith
