#include "bench_route.hpp"

#include <algorithm>
#include <barrier>
#include <chrono>
#include <limits>
#include <stdexcept>
#include <thread>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace laya {
namespace {

using SteadyClock = std::chrono::steady_clock;

// Ticks of the time stamp counter where there is one (a read costs about 10 ns), else nanoseconds. The fences keep the
// measured work from leaking out of the measured interval.
#if defined(__x86_64__)
std::uint64_t ticks_before() noexcept {
    _mm_lfence();
    const std::uint64_t now = __rdtsc();
    _mm_lfence();
    return now;
}
std::uint64_t ticks_after() noexcept {
    unsigned core;
    const std::uint64_t now = __rdtscp(&core);
    _mm_lfence();
    return now;
}
#else
std::uint64_t ticks_before() noexcept {
    return static_cast<std::uint64_t>(SteadyClock::now().time_since_epoch() / std::chrono::nanoseconds(1));
}
std::uint64_t ticks_after() noexcept { return ticks_before(); }
#endif

constexpr std::uint64_t PREEMPTED_NS = 20'000;
constexpr std::size_t WARM_UP_REQUESTS = 2'000;

struct Sample {
    std::uint32_t request;
    std::int32_t endpoint;
    std::uint32_t ticks;
};

// xorshift64*: cheap enough to stand between two measurements.
class Dice {
  public:
    explicit Dice(std::uint64_t seed) : state_(mix64(seed + 1) | 1) {}
    std::uint32_t below(std::size_t n) noexcept {
        state_ ^= state_ >> 12;
        state_ ^= state_ << 25;
        state_ ^= state_ >> 27;
        return static_cast<std::uint32_t>(((state_ * 0x2545F4914F6CDD1Du >> 32) * n) >> 32);
    }

  private:
    std::uint64_t state_;
};

std::int32_t choose_and_settle(RouteTable& table, const RequestFeature& feature) noexcept {
    const std::int32_t endpoint = table.choose(feature, 1);
    if (endpoint >= 0) {
        table.settle(static_cast<std::uint32_t>(endpoint), 1, feature.tokens());
    }
    return endpoint;
}

struct ThreadRun {
    std::vector<Sample> samples;
    std::uint64_t began = 0;  // ticks, taken by the thread itself: the thread that starts it may wake up later
    std::uint64_t ended = 0;
};

void run_thread(RouteTable& table, const BenchLoad& load, std::size_t thread, ThreadRun& run, std::barrier<>& start) {
    Dice dice(thread);
    for (std::size_t i = 0; i < WARM_UP_REQUESTS; ++i) {
        choose_and_settle(table, load.features[dice.below(load.features.size())]);
    }
    start.arrive_and_wait();
    run.began = ticks_before();
    for (Sample& sample : run.samples) {
        const std::uint32_t request = dice.below(load.features.size());
        const RequestFeature feature = load.features[request];
        const std::uint64_t before = ticks_before();
        const std::int32_t endpoint = choose_and_settle(table, feature);
        const std::uint64_t ticks = ticks_after() - before;
        sample = {request, endpoint,
                  static_cast<std::uint32_t>(std::min<std::uint64_t>(ticks, std::numeric_limits<std::uint32_t>::max()))};
    }
    run.ended = ticks_after();
}

double measure_timer_ticks() {
    std::uint64_t least = std::numeric_limits<std::uint64_t>::max();
    for (int i = 0; i < 1000; ++i) {
        const std::uint64_t before = ticks_before();
        least = std::min(least, ticks_after() - before);
    }
    return static_cast<double>(least);
}

struct Ran {
    std::vector<ThreadRun> threads;
    double ns_per_tick;
};

Ran run_threads(RouteTable& table, const BenchLoad& load, std::size_t n_threads, std::size_t n_requests) {
    Ran ran{std::vector<ThreadRun>(n_threads), 0};
    std::barrier<> start(static_cast<std::ptrdiff_t>(n_threads));
    std::vector<std::thread> threads;
    const SteadyClock::time_point calibration = SteadyClock::now();
    const std::uint64_t calibration_ticks = ticks_before();
    for (std::size_t thread = 0; thread < n_threads; ++thread) {
        ran.threads[thread].samples.resize(n_requests / n_threads + (thread < n_requests % n_threads ? 1 : 0));
        threads.emplace_back(run_thread, std::ref(table), std::cref(load), thread, std::ref(ran.threads[thread]),
                             std::ref(start));
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    // A run may be over in microseconds: the clocks are compared over at least 10 ms.
    while (SteadyClock::now() - calibration < std::chrono::milliseconds(10)) {
    }
    const std::uint64_t ticks = ticks_after() - calibration_ticks;
    ran.ns_per_tick = std::chrono::duration<double, std::nano>(SteadyClock::now() - calibration).count() /
                      static_cast<double>(ticks);
    return ran;
}

void check_answers(const BenchLoad& load, const std::vector<std::int32_t>& home, const Ran& ran, BenchResult& result) {
    for (const ThreadRun& thread : ran.threads) {
        for (const Sample& sample : thread.samples) {
            const auto endpoint = static_cast<std::uint32_t>(sample.endpoint);
            const bool is_right =
                sample.endpoint >= 0 && endpoint - load.first[sample.request] < load.count[sample.request];
            result.n_wrong += is_right ? 0 : 1;
            const bool has_session = load.features[sample.request].session_hash() != 0;
            result.n_moved += has_session && sample.endpoint != home[sample.request] ? 1 : 0;
        }
    }
}

void summarise(const Ran& ran, BenchResult& result) {
    std::vector<std::uint32_t> ticks;
    double sum = 0;
    std::size_t n_preempted = 0;
    const double preempted_ticks = PREEMPTED_NS / ran.ns_per_tick;
    std::uint64_t began = std::numeric_limits<std::uint64_t>::max();
    std::uint64_t ended = 0;
    for (const ThreadRun& thread : ran.threads) {
        began = std::min(began, thread.began);
        ended = std::max(ended, thread.ended);
        for (const Sample& sample : thread.samples) {
            ticks.push_back(sample.ticks);
            sum += sample.ticks;
            n_preempted += sample.ticks > preempted_ticks ? 1 : 0;
        }
    }
    std::sort(ticks.begin(), ticks.end());
    const auto quantile_ns = [&](double share) {
        const auto at = static_cast<std::size_t>(share * static_cast<double>(ticks.size() - 1));
        return ticks[at] * ran.ns_per_tick;
    };
    const auto n = static_cast<double>(ticks.size());
    result.elapsed_s = static_cast<double>(ended - began) * ran.ns_per_tick * 1e-9;
    result.mean_ns = sum / n * ran.ns_per_tick;
    result.p50_ns = quantile_ns(0.5);
    result.p99_ns = quantile_ns(0.99);
    result.p999_ns = quantile_ns(0.999);
    result.max_ns = quantile_ns(1.0);
    result.timer_ns = measure_timer_ticks() * ran.ns_per_tick;
    result.preempted_share = static_cast<double>(n_preempted) / n;
}

}  // namespace

BenchResult bench_choose(RouteTable& table, const BenchLoad& load, std::size_t n_threads, std::size_t n_requests) {
    const std::size_t n = load.features.size();
    if (n == 0 || n > std::numeric_limits<std::uint32_t>::max() || load.first.size() != n || load.count.size() != n) {
        throw std::invalid_argument("a bench needs features, and as many endpoint ranges as features");
    }
    if (n_threads == 0 || n_requests == 0) {
        throw std::invalid_argument("a bench needs at least one thread and one request");
    }
    std::vector<std::int32_t> home(n);
    for (std::size_t request = 0; request < n; ++request) {
        home[request] = choose_and_settle(table, load.features[request]);
    }
    const Ran ran = run_threads(table, load, n_threads, n_requests);
    BenchResult result;
    check_answers(load, home, ran, result);
    summarise(ran, result);
    return result;
}

}  // namespace laya
