// Owns: model name -> endpoints, what each endpoint has in flight, and the choice between them.
// Knows no socket, no engine, no clock, no Python.
//
// Contract. `choose`, `route`, `settle` and everything about one endpoint take no lock, allocate nothing, make no system
// call and throw nothing; any number of threads may call them at any time, also while another thread publishes.
// `publish` builds a whole new generation beside the old one and makes it visible with one atomic store; the old one is
// freed when no reader is in it. Writers exclude each other with a mutex. Everything here is flat arrays and indexes,
// never pointers between entries, so that the table can move into shared memory.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "affinity_table.hpp"
#include "prefix_blocks.hpp"
#include "request_feature.hpp"
#include "route_endpoint.hpp"
#include "route_generation.hpp"

namespace laya {

inline constexpr std::int32_t UNKNOWN_MODEL = -1;
inline constexpr std::int32_t NO_ENDPOINT = -2;
inline constexpr std::int32_t BAD_FEATURE = -3;

inline constexpr std::uint32_t MAX_ENDPOINTS = 1u << 16;
inline constexpr std::uint32_t MOST_SCANNED = 8;  // endpoints that are all looked at; of more, two

struct Load {
    std::uint64_t n_seqs;
    std::uint64_t tokens;
};

// One model as a caller publishes it. The first name is the model's own, the others are aliases.
struct ModelRoute {
    std::vector<std::string> names;
    std::vector<std::uint32_t> endpoints;
    Policy policy = Policy::AUTO;
};

// Where the session was last, where the conversation's turn before was, and how many blocks of the prompt that had.
struct Homes {
    std::int32_t session = AffinityTable::NONE;
    std::int32_t prefix = AffinityTable::NONE;
    std::size_t prefix_blocks = 0;
};

class RouteTable {
  public:
    using Blocks = std::span<const std::uint64_t>;

    // window_tokens: how many more tokens than the least loaded endpoint a session's endpoint may hold reserved and
    // still keep the session, where no KV capacity is set; with a capacity it is half of that.
    // Throws std::invalid_argument when max_endpoints is 0 or above MAX_ENDPOINTS.
    RouteTable(std::uint32_t max_endpoints, std::size_t session_bytes, std::uint64_t window_tokens,
               std::size_t prefix_bytes = std::size_t{1} << 20);
    ~RouteTable();
    RouteTable(const RouteTable&) = delete;
    RouteTable& operator=(const RouteTable&) = delete;

    // Replaces the set of models. Throws std::invalid_argument, with the old set still in force, when a model has no
    // name, a name appears twice, two names have one hash, or an endpoint is out of range.
    void publish(const std::vector<ModelRoute>& models);

    // A fresh endpoint is not ready and has no limits, weight 1, a closed breaker and no history. 0 means: no limit.
    void reset(std::uint32_t endpoint) noexcept;
    void set_eligible(std::uint32_t endpoint, bool ready) noexcept;
    void set_capacity(std::uint32_t endpoint, std::uint32_t max_num_seqs, std::uint64_t kv_pool_tokens) noexcept;
    void set_weight(std::uint32_t endpoint, std::uint16_t weight) noexcept;
    void set_seed(std::uint32_t endpoint, std::uint64_t seed) noexcept;

    // Endpoint index, or UNKNOWN_MODEL, NO_ENDPOINT, BAD_FEATURE. On success the endpoint carries n_seqs and the
    // feature's tokens until settle(). `route` trusts only the name; `choose` trusts the feature's model hash, so its
    // caller must have got the hash from a name that it knows is published. `blocks` are the prompt's chained hashes;
    // without them the feature's prefix hash stands for the whole prompt.
    std::int32_t route(std::string_view model, RequestFeature feature, std::uint32_t n_seqs,
                       Blocks blocks = {}) noexcept;
    std::int32_t choose(const RequestFeature& feature, std::uint32_t n_seqs) noexcept;
    // `route` by the prompt itself, of which nothing is read where the choice does not depend on it.
    std::int32_t route_prompt(std::string_view model, RequestFeature feature, std::uint32_t n_seqs,
                              std::string_view prompt) noexcept;
    void settle(std::uint32_t endpoint, std::uint64_t n_seqs, std::uint64_t tokens) noexcept;

    // What is remembered of a request's keys; nothing changes. Of an unknown model: nothing.
    Homes homes(std::string_view model, std::uint64_t session_hash, Blocks blocks) noexcept;
    // How often this thread has drawn at random, which is what its next draw is made from.
    std::uint64_t n_draws() const noexcept;

    Endpoint& endpoint(std::uint32_t index) noexcept { return endpoints_[index]; }
    const Endpoint& endpoint(std::uint32_t index) const noexcept { return endpoints_[index]; }
    Load load(std::uint32_t endpoint) const noexcept;
    bool is_eligible(std::uint32_t endpoint) const noexcept;
    std::uint32_t max_endpoints() const noexcept { return max_endpoints_; }
    std::size_t session_capacity() const noexcept { return sessions_.capacity(); }
    std::size_t prefix_capacity() const noexcept { return prefixes_.capacity(); }
    // Generations still in memory: 1, and for a moment more while readers are in an old one.
    std::size_t n_generations();

  private:
    static constexpr std::size_t STRIPES = 32;  // threads beyond that share counters
    static constexpr std::size_t CELLS = 4;
    struct alignas(64) Stripe {
        std::array<std::atomic<std::uint32_t>, CELLS> readers{};  // of the generation in each cell
        std::atomic<std::uint64_t> n_draws{0};
    };

    class Reading;
    struct Asked;
    struct Survey;
    struct Pick;

    std::int32_t place(const Generation& generation, const ModelSlot& model, const RequestFeature& feature,
                       Blocks blocks, std::uint32_t n_seqs) noexcept;
    Homes find_prefix(Blocks blocks, std::uint64_t affinity_key, Homes homes) const noexcept;

    Pick pick(const Asked& asked, std::int32_t session_home) noexcept;
    Pick pick_near(const Asked& asked, std::int32_t session_home) noexcept;
    std::int32_t pick_weighted(const Asked& asked) noexcept;
    std::int32_t pick_hashed(const Asked& asked) const noexcept;
    std::int32_t pick_next(const Asked& asked) noexcept;
    Survey survey_all(const Asked& asked) const noexcept;
    Survey survey_two(const Asked& asked, std::uint64_t draw) const noexcept;
    std::int32_t highest_score(const Asked& asked, bool needs_room) const noexcept;
    std::uint64_t rank(std::int32_t endpoint, const Asked& asked) const noexcept;
    bool is_within_window(std::int32_t home, std::uint64_t home_rank, const Survey& survey) const noexcept;
    std::uint64_t next_draw() noexcept;

    std::unique_ptr<Generation> build(const std::vector<ModelRoute>& models) const;
    bool has_reader(std::uint32_t cell) const noexcept;
    void reclaim() noexcept;

    const std::uint32_t max_endpoints_;
    const std::uint64_t window_tokens_;
    std::unique_ptr<Endpoint[]> endpoints_;
    AffinityTable sessions_;
    AffinityTable prefixes_;
    std::array<std::unique_ptr<Generation>, CELLS> cells_;
    std::array<Stripe, STRIPES> stripes_;
    alignas(64) std::atomic<std::uint32_t> current_{0};
    std::mutex writing_;
};

}  // namespace laya
