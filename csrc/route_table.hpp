// Owns: model name -> endpoints, what each endpoint has in flight, and the choice between them.
// Knows no socket, no engine, no clock, no Python.
//
// Contract. `choose`, `route` and `settle` take no lock, allocate nothing, make no system call and throw nothing; any
// number of threads may call them at any time, also while another thread publishes. `publish` builds a whole new
// generation beside the old one and makes it visible with one atomic store; the old one is freed when no reader is in
// it. Writers exclude each other with a mutex. Everything here is flat arrays and indexes, never pointers between
// entries, so that the table can move into shared memory.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "request_feature.hpp"
#include "session_table.hpp"

namespace laya {

inline constexpr std::int32_t UNKNOWN_MODEL = -1;
inline constexpr std::int32_t NO_ENDPOINT = -2;
inline constexpr std::int32_t BAD_FEATURE = -3;

inline constexpr std::uint32_t MAX_ENDPOINTS = 1u << 16;

// In flight and reserved tokens live in one word: both change in one atomic step, and comparing two words compares
// reserved tokens first, sequences second, which is the order of the choice. The top bit stays free: see rank() there.
inline constexpr unsigned SEQS_BITS = 24;
inline constexpr std::uint64_t MAX_SEQS = (std::uint64_t{1} << SEQS_BITS) - 1;
inline constexpr std::uint64_t MAX_TOKENS = (std::uint64_t{1} << 39) - 1;

struct Load {
    std::uint64_t n_seqs;
    std::uint64_t tokens;
};

// One model as a caller publishes it. The first name is the model's own, the others are aliases.
struct ModelRoute {
    std::vector<std::string> names;
    std::vector<std::uint32_t> endpoints;
};

class Generation;

class RouteTable {
  public:
    // window_tokens: how many more tokens than the least loaded endpoint a session's endpoint may hold reserved and
    // still keep the session, where no KV capacity is set; with a capacity it is half of that.
    // Throws std::invalid_argument when max_endpoints is 0 or above MAX_ENDPOINTS.
    RouteTable(std::uint32_t max_endpoints, std::size_t session_bytes, std::uint64_t window_tokens);
    ~RouteTable();
    RouteTable(const RouteTable&) = delete;
    RouteTable& operator=(const RouteTable&) = delete;

    // Replaces the set of models. Throws std::invalid_argument, with the old set still in force, when a model has no
    // name, a name appears twice, two names have one hash, or an endpoint is out of range.
    void publish(const std::vector<ModelRoute>& models);

    // A fresh endpoint is not eligible and has no limits. 0 means: no limit.
    void set_eligible(std::uint32_t endpoint, bool eligible) noexcept;
    void set_capacity(std::uint32_t endpoint, std::uint64_t max_num_seqs, std::uint64_t kv_pool_tokens) noexcept;

    // Endpoint index, or UNKNOWN_MODEL, NO_ENDPOINT, BAD_FEATURE. On success the endpoint carries n_seqs and the
    // feature's tokens until settle(). `route` trusts only the name; `choose` trusts the feature's model hash, so its
    // caller must have got the hash from a name that it knows is published.
    std::int32_t route(std::string_view model, RequestFeature feature, std::uint32_t n_seqs) noexcept;
    std::int32_t choose(const RequestFeature& feature, std::uint32_t n_seqs) noexcept;
    void settle(std::uint32_t endpoint, std::uint64_t n_seqs, std::uint64_t tokens) noexcept;

    Load load(std::uint32_t endpoint) const noexcept;
    bool is_eligible(std::uint32_t endpoint) const noexcept;
    std::uint32_t max_endpoints() const noexcept { return max_endpoints_; }
    std::size_t session_capacity() const noexcept { return sessions_.capacity(); }
    // Generations still in memory: 1, and for a moment more while readers are in an old one.
    std::size_t n_generations();

  private:
    struct alignas(64) Endpoint {
        std::atomic<std::uint64_t> load{0};  // tokens << SEQS_BITS | sequences
        std::atomic<std::uint64_t> max_seqs{MAX_SEQS};
        std::atomic<std::uint64_t> max_tokens{MAX_TOKENS};
        std::atomic<std::uint64_t> window_tokens{0};
        std::atomic<bool> eligible{false};
    };
    static_assert(sizeof(Endpoint) == 64);

    struct alignas(64) ReaderCount {
        std::atomic<std::uint32_t> n{0};
    };
    static constexpr std::size_t STRIPES = 32;  // threads beyond that share a counter
    static constexpr std::size_t CELLS = 4;
    struct Cell {
        std::array<ReaderCount, STRIPES> readers;
        std::unique_ptr<Generation> generation;
    };

    class Reading;
    struct Candidates;

    Candidates weigh(const std::uint32_t* endpoints, std::uint32_t n, std::int32_t home, std::uint32_t n_seqs,
                     std::uint64_t tokens) const noexcept;
    std::int32_t place(const Generation& generation, std::size_t slot, const RequestFeature& feature,
                       std::uint32_t n_seqs) noexcept;
    std::unique_ptr<Generation> build(const std::vector<ModelRoute>& models) const;
    static bool has_reader(const Cell& cell) noexcept;
    void reclaim() noexcept;

    const std::uint32_t max_endpoints_;
    const std::uint64_t window_tokens_;
    std::unique_ptr<Endpoint[]> endpoints_;
    SessionTable sessions_;
    std::array<Cell, CELLS> cells_;
    alignas(64) std::atomic<std::uint32_t> current_{0};
    std::mutex writing_;
};

}  // namespace laya
