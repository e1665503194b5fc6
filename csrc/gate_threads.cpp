#include "gate_threads.hpp"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace laya {
namespace {

constexpr int LOOKS_BEFORE_SLEEP = 2000;  // some microseconds: a layer's router follows the last one's soon

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// What is shared out. Held by whoever works on it, so that a thread that comes late finds it over, not gone.
struct Job {
    const std::function<void(std::size_t)>* work;
    std::size_t n_pieces;
    std::atomic<std::size_t> n_taken{0};
    std::atomic<std::size_t> n_done{0};

    void help() {
        while (true) {
            const std::size_t piece = n_taken.fetch_add(1, std::memory_order_relaxed);
            if (piece >= n_pieces) {
                return;
            }
            (*work)(piece);
            n_done.fetch_add(1, std::memory_order_release);
        }
    }
};

class Threads {
  public:
    explicit Threads(std::size_t n_threads) {
        for (std::size_t index = 0; index < n_threads; ++index) {
            std::thread([this, index] { live(index); }).detach();
        }
    }

    std::mutex in_use;

    void give(const std::shared_ptr<Job>& job, std::size_t n_helpers) {
        {
            const std::lock_guard lock(mutex_);
            job_ = job;
            n_helpers_ = n_helpers;
        }
        n_given_.fetch_add(1, std::memory_order_release);
        if (n_asleep_.load() > 0) {
            const std::lock_guard lock(mutex_);
            given_.notify_all();
        }
    }

  private:
    void live(std::size_t index) {
        std::uint64_t seen = 0;
        while (true) {
            for (int look = 0; look < LOOKS_BEFORE_SLEEP && n_given_.load(std::memory_order_acquire) == seen; ++look) {
                pause();
            }
            std::shared_ptr<Job> job;
            {
                std::unique_lock lock(mutex_);
                n_asleep_.fetch_add(1);
                given_.wait(lock, [&] { return n_given_.load() != seen; });
                n_asleep_.fetch_sub(1);
                seen = n_given_.load();
                job = index < n_helpers_ ? job_ : nullptr;
            }
            if (job != nullptr) {
                job->help();
            }
        }
    }

    std::mutex mutex_;
    std::condition_variable given_;
    std::shared_ptr<Job> job_;
    std::size_t n_helpers_ = 0;
    std::atomic<std::uint64_t> n_given_{0};
    std::atomic<int> n_asleep_{0};
};

// Never destroyed: its threads live until the process ends. After a fork the child makes its own.
std::atomic<Threads*> threads{nullptr};

Threads& threads_here() {
    static std::once_flag once;
    std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { threads.store(nullptr); }); });
    Threads* here = threads.load();
    if (here == nullptr) {
        static std::mutex making;
        const std::lock_guard lock(making);
        here = threads.load();
        if (here == nullptr) {
            here = new Threads(std::max(1U, std::thread::hardware_concurrency()) - 1);
            threads.store(here);
        }
    }
    return *here;
}

}  // namespace

void share_out(std::size_t n_pieces, std::size_t n_threads, const std::function<void(std::size_t)>& work) {
    Threads& here = threads_here();
    const auto job = std::make_shared<Job>();
    job->work = &work;
    job->n_pieces = n_pieces;
    const std::unique_lock ours(here.in_use, std::try_to_lock);
    if (ours.owns_lock()) {
        here.give(job, std::min(n_threads, n_pieces) - 1);
    }
    job->help();
    while (job->n_done.load(std::memory_order_acquire) < n_pieces) {
        pause();
    }
}

}  // namespace laya
