// A team of threads that runs one job together, many short stages with a barrier after each.
//
// Waiting spins first, because a stage takes microseconds and the next one is about to begin, then sleeps, because
// the next call may be seconds away, or whoever we wait for may have lost its processor and need ours. Within a job it
// sleeps sooner than between two: threads end a stage at about the same time, unless one of them was put aside.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace warpsmith {

class Pool {
public:
    explicit Pool(int threads);
    ~Pool();
    int threads() const { return threads_; }

    // Call job(thread) on every thread, the caller being thread 0; returns when all have finished.
    void run(const std::function<void(int)>& job);

    // From inside a job, by every thread alike: units 0 .. units-1 in runs, each on whichever thread is free, then wait
    // for all. Runs are long at first, for memory is read best in one direction, and end at `grain`, so that all
    // threads end together. Who computes a unit must not matter to its result.
    template <class Unit>
    void share(int units, int grain, const Unit& unit) {
        int first = next_.load(std::memory_order_relaxed);
        while (first < units) {
            const int left = units - first, part = left / (4 * threads_);
            const int last = first + (part > grain ? part : grain < left ? grain : left);
            if (!next_.compare_exchange_weak(first, last, std::memory_order_relaxed)) continue;
            for (int i = first; i < last; i++) unit(i);
            first = next_.load(std::memory_order_relaxed);
        }
        barrier();
    }

    void barrier() { meet(std::chrono::microseconds(50)); }

private:
    using Patience = std::chrono::microseconds;
    static constexpr Patience kBetweenJobs{250};
    void work(int thread);
    void meet(Patience patience);

    const int threads_;
    const bool crowded_;  // more threads than processors: whoever we wait for may need the one we spin on
    const std::function<void(int)>* job_ = nullptr;
    bool stop_ = false;
    std::vector<std::thread> workers_;
    alignas(64) std::atomic<int> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> phase_{0};
    std::atomic<int> sleepers_{0};
    std::mutex mutex_;
    std::condition_variable wake_;
};

}  // namespace warpsmith
