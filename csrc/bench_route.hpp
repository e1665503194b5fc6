// Owns: the measurement of choose + settle by native threads, and the check of every answer. Knows no Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "route_table.hpp"

namespace laya {

// What is asked, and what is right: request i of the list may be answered by the endpoints
// first[i] .. first[i] + count[i] - 1 and by no other.
struct BenchLoad {
    std::vector<RequestFeature> features;
    std::vector<std::uint32_t> first;
    std::vector<std::uint32_t> count;
};

struct BenchResult {
    double elapsed_s = 0;
    double mean_ns = 0;
    double p50_ns = 0;
    double p99_ns = 0;
    double p999_ns = 0;
    double max_ns = 0;
    double timer_ns = 0;          // cost of reading the clock twice, contained in every figure above
    double preempted_share = 0;   // samples above 20 us: the thread was not running for part of it
    std::uint64_t n_wrong = 0;    // answers outside the model's endpoints
    std::uint64_t n_moved = 0;    // requests of a session that did not go where the session's first one went
};

// Each of n_threads picks from the load at random (seeded by its number), n_requests in all, after a warm-up that is not
// counted. Throws std::invalid_argument on an empty load or no threads.
BenchResult bench_choose(RouteTable& table, const BenchLoad& load, std::size_t n_threads, std::size_t n_requests);

}  // namespace laya
