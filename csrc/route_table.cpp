#include "route_table.hpp"

#include <algorithm>
#include <bit>
#include <iterator>
#include <stdexcept>
#include <thread>

namespace laya {
namespace {

// One name in a generation: exactly one cache line for a model of up to eight endpoints.
struct alignas(64) ModelSlot {
    std::uint64_t hash = 0;          // 0 = empty
    std::uint64_t affinity_key = 0;  // hash of the model's own name, so that its aliases share its sessions
    std::uint32_t name_at = 0;
    std::uint32_t name_bytes = 0;
    std::uint32_t n_endpoints = 0;
    std::uint32_t spilled_at = 0;  // where the endpoints are when there are more than fit here
    std::uint32_t endpoints[8] = {};
};
static_assert(sizeof(ModelSlot) == 64);

constexpr std::uint64_t FULL = std::uint64_t{1} << 63;

constexpr std::uint64_t tokens_of(std::uint64_t load) noexcept { return load >> SEQS_BITS & MAX_TOKENS; }
constexpr std::uint64_t seqs_of(std::uint64_t load) noexcept { return load & MAX_SEQS; }
constexpr std::uint64_t pack_load(std::uint64_t seqs, std::uint64_t tokens) noexcept {
    return std::min(tokens, MAX_TOKENS) << SEQS_BITS | std::min(seqs, MAX_SEQS);
}

std::size_t stripe_of_thread(std::size_t n_stripes) noexcept {
    static std::atomic<std::size_t> n_threads{0};
    thread_local const std::size_t number = n_threads.fetch_add(1, std::memory_order_relaxed);
    return number % n_stripes;
}

// A name in an error message: whatever its bytes are, the message stays printable ASCII.
std::string quoted(std::string_view name) {
    static constexpr char HEX[] = "0123456789abcdef";
    std::string text = "'";
    for (const char c : name) {
        const auto byte = static_cast<unsigned char>(c);
        if (byte >= 0x20 && byte < 0x7F) {
            text += c;
        } else {
            text += {'\\', 'x', HEX[byte >> 4], HEX[byte & 15]};
        }
    }
    return text + "'";
}

}  // namespace

// Open addressing with linear probing, at most half full. Immutable once published.
class Generation {
  public:
    static constexpr std::size_t NOT_FOUND = ~std::size_t{0};

    explicit Generation(std::size_t n_names) : slots(std::bit_ceil(std::max<std::size_t>(8, 2 * n_names))) {}

    std::size_t find(std::uint64_t hash) const noexcept {
        const std::size_t mask = slots.size() - 1;
        for (std::size_t at = hash & mask; slots[at].hash != 0; at = (at + 1) & mask) {
            if (slots[at].hash == hash) {
                return at;
            }
        }
        return NOT_FOUND;
    }

    std::string_view name_of(const ModelSlot& slot) const noexcept {
        return {names.data() + slot.name_at, slot.name_bytes};
    }

    const std::uint32_t* endpoints_of(const ModelSlot& slot) const noexcept {
        return slot.n_endpoints <= std::size(slot.endpoints) ? slot.endpoints : spilled.data() + slot.spilled_at;
    }

    void insert(const std::string& name, std::uint64_t affinity_key, const ModelSlot& model) {
        const std::uint64_t hash = hash_bytes(name);
        if (const std::size_t other = find(hash); other != NOT_FOUND) {
            const std::string known(name_of(slots[other]));
            throw std::invalid_argument(known == name
                                            ? "the model name " + quoted(name) + " is used twice"
                                            : "the model names " + quoted(known) + " and " + quoted(name) +
                                                  " have the same 64-bit hash; rename one of them");
        }
        const std::size_t mask = slots.size() - 1;
        std::size_t at = hash & mask;
        while (slots[at].hash != 0) {
            at = (at + 1) & mask;
        }
        slots[at] = model;
        slots[at].hash = hash;
        slots[at].affinity_key = affinity_key;
        slots[at].name_at = static_cast<std::uint32_t>(names.size());
        slots[at].name_bytes = static_cast<std::uint32_t>(name.size());
        names += name;
    }

    std::vector<ModelSlot> slots;
    std::vector<std::uint32_t> spilled;
    std::string names;
};

// Holds the current generation in memory for as long as it lives. A reader counts itself into the cell it saw as current
// and looks again: the writer changes `current_` before it looks at the counts, so either the writer sees the reader
// or the reader sees the change and tries the other cell.
class RouteTable::Reading {
  public:
    explicit Reading(RouteTable& table) noexcept {
        const std::size_t stripe = stripe_of_thread(STRIPES);
        for (;;) {
            const std::uint32_t cell = table.current_.load(std::memory_order_seq_cst);
            count_ = &table.cells_[cell].readers[stripe].n;
            count_->fetch_add(1, std::memory_order_seq_cst);
            if (table.current_.load(std::memory_order_seq_cst) == cell) {
                generation_ = table.cells_[cell].generation.get();
                return;
            }
            count_->fetch_sub(1, std::memory_order_release);
        }
    }
    ~Reading() { count_->fetch_sub(1, std::memory_order_release); }
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;

    const Generation* operator->() const noexcept { return generation_; }
    const Generation& operator*() const noexcept { return *generation_; }

  private:
    std::atomic<std::uint32_t>* count_;
    const Generation* generation_;
};

RouteTable::RouteTable(std::uint32_t max_endpoints, std::size_t session_bytes, std::uint64_t window_tokens)
    : max_endpoints_(max_endpoints), window_tokens_(window_tokens), sessions_(session_bytes) {
    if (max_endpoints == 0 || max_endpoints > MAX_ENDPOINTS) {
        throw std::invalid_argument("max_endpoints must be 1 to " + std::to_string(MAX_ENDPOINTS));
    }
    endpoints_ = std::make_unique<Endpoint[]>(max_endpoints);
    for (std::uint32_t endpoint = 0; endpoint < max_endpoints; ++endpoint) {
        set_capacity(endpoint, 0, 0);
    }
    cells_[0].generation = std::make_unique<Generation>(0);
}

RouteTable::~RouteTable() = default;

// ------------------------------------------------------------------------------------------------ publishing

std::unique_ptr<Generation> RouteTable::build(const std::vector<ModelRoute>& models) const {
    std::size_t n_names = 0;
    for (const ModelRoute& model : models) {
        n_names += model.names.size();
    }
    auto generation = std::make_unique<Generation>(n_names);
    for (const ModelRoute& model : models) {
        if (model.names.empty()) {
            throw std::invalid_argument("a model needs a name");
        }
        std::vector<std::uint32_t> endpoints = model.endpoints;
        // Sorted, because the choice between equals is the lowest index: the first one met.
        std::sort(endpoints.begin(), endpoints.end());
        endpoints.erase(std::unique(endpoints.begin(), endpoints.end()), endpoints.end());
        if (!endpoints.empty() && endpoints.back() >= max_endpoints_) {
            throw std::invalid_argument("endpoint " + std::to_string(endpoints.back()) + " of model " +
                                        quoted(model.names.front()) + " is not below " +
                                        std::to_string(max_endpoints_));
        }
        ModelSlot slot;
        slot.n_endpoints = static_cast<std::uint32_t>(endpoints.size());
        if (endpoints.size() <= std::size(slot.endpoints)) {
            std::copy(endpoints.begin(), endpoints.end(), slot.endpoints);
        } else {
            slot.spilled_at = static_cast<std::uint32_t>(generation->spilled.size());
            generation->spilled.insert(generation->spilled.end(), endpoints.begin(), endpoints.end());
        }
        const std::uint64_t affinity_key = hash_bytes(model.names.front());
        for (const std::string& name : model.names) {
            generation->insert(name, affinity_key, slot);
        }
    }
    return generation;
}

void RouteTable::publish(const std::vector<ModelRoute>& models) {
    std::unique_ptr<Generation> next = build(models);
    const std::lock_guard guard(writing_);
    for (;;) {
        reclaim();
        const auto free_cell = std::find_if(cells_.begin(), cells_.end(),
                                            [](const Cell& cell) { return cell.generation == nullptr; });
        if (free_cell != cells_.end()) {
            free_cell->generation = std::move(next);
            current_.store(static_cast<std::uint32_t>(free_cell - cells_.begin()), std::memory_order_seq_cst);
            reclaim();
            return;
        }
        std::this_thread::yield();
    }
}

bool RouteTable::has_reader(const Cell& cell) noexcept {
    return std::any_of(cell.readers.begin(), cell.readers.end(), [](const ReaderCount& count) {
        return count.n.load(std::memory_order_seq_cst) != 0;
    });
}

void RouteTable::reclaim() noexcept {
    const std::uint32_t current = current_.load(std::memory_order_seq_cst);
    for (std::uint32_t cell = 0; cell < CELLS; ++cell) {
        if (cell != current && cells_[cell].generation != nullptr && !has_reader(cells_[cell])) {
            cells_[cell].generation.reset();
        }
    }
}

std::size_t RouteTable::n_generations() {
    const std::lock_guard guard(writing_);
    reclaim();
    return static_cast<std::size_t>(std::count_if(
        cells_.begin(), cells_.end(), [](const Cell& cell) { return cell.generation != nullptr; }));
}

// ------------------------------------------------------------------------------------------------ endpoints

void RouteTable::set_eligible(std::uint32_t endpoint, bool eligible) noexcept {
    endpoints_[endpoint].eligible.store(eligible, std::memory_order_release);
}

bool RouteTable::is_eligible(std::uint32_t endpoint) const noexcept {
    return endpoints_[endpoint].eligible.load(std::memory_order_acquire);
}

void RouteTable::set_capacity(std::uint32_t endpoint, std::uint64_t max_num_seqs,
                              std::uint64_t kv_pool_tokens) noexcept {
    Endpoint& at = endpoints_[endpoint];
    at.max_seqs.store(max_num_seqs == 0 ? MAX_SEQS : max_num_seqs, std::memory_order_relaxed);
    at.max_tokens.store(kv_pool_tokens == 0 ? MAX_TOKENS : kv_pool_tokens, std::memory_order_relaxed);
    at.window_tokens.store(kv_pool_tokens == 0 ? window_tokens_ : kv_pool_tokens / 2, std::memory_order_relaxed);
}

Load RouteTable::load(std::uint32_t endpoint) const noexcept {
    const std::uint64_t load = endpoints_[endpoint].load.load(std::memory_order_relaxed);
    return {seqs_of(load), tokens_of(load)};
}

// ------------------------------------------------------------------------------------------------ the hot path

struct RouteTable::Candidates {
    std::uint64_t least_rank = 0;
    std::uint64_t home_rank = 0;
    std::int32_t least = NO_ENDPOINT;
    std::int32_t home = NO_ENDPOINT;  // the session's endpoint, if it is one of this model's and eligible
};

// Rank of an endpoint, lower is better: has room first, then fewest reserved tokens, then fewest sequences.
RouteTable::Candidates RouteTable::weigh(const std::uint32_t* endpoints, std::uint32_t n, std::int32_t home,
                                         std::uint32_t n_seqs, std::uint64_t tokens) const noexcept {
    Candidates found;
    for (std::uint32_t i = 0; i < n; ++i) {
        const Endpoint& at = endpoints_[endpoints[i]];
        if (!at.eligible.load(std::memory_order_acquire)) {
            continue;
        }
        const std::uint64_t load = at.load.load(std::memory_order_relaxed);
        const bool is_full = seqs_of(load) + n_seqs > at.max_seqs.load(std::memory_order_relaxed) ||
                             tokens_of(load) + tokens > at.max_tokens.load(std::memory_order_relaxed);
        const std::uint64_t rank = is_full ? load | FULL : load;
        const auto endpoint = static_cast<std::int32_t>(endpoints[i]);
        if (found.least < 0 || rank < found.least_rank) {
            found.least_rank = rank;
            found.least = endpoint;
        }
        if (endpoint == home) {
            found.home_rank = rank;
            found.home = endpoint;
        }
    }
    return found;
}

std::int32_t RouteTable::place(const Generation& generation, std::size_t slot, const RequestFeature& feature,
                               std::uint32_t n_seqs) noexcept {
    const ModelSlot& model = generation.slots[slot];
    const bool has_session = feature.session_hash() != 0;
    SessionTable::Probe probe{};
    probe.endpoint = SessionTable::NONE;
    if (has_session) {
        probe = sessions_.find(feature.session_hash() ^ model.affinity_key);
    }
    const Candidates found = weigh(generation.endpoints_of(model), model.n_endpoints, probe.endpoint, n_seqs,
                                   feature.tokens());
    if (found.least < 0) {
        return NO_ENDPOINT;
    }
    std::int32_t chosen = found.least;
    if (found.home >= 0) {
        // A session stays where its KV cache is unless that endpoint is out of room while another has some, or is
        // ahead of the least loaded by more than the window.
        const bool has_equal_room = (found.home_rank & FULL) == (found.least_rank & FULL);
        const std::uint64_t window = endpoints_[found.home].window_tokens.load(std::memory_order_relaxed);
        if (has_equal_room && tokens_of(found.home_rank) <= tokens_of(found.least_rank) + window) {
            chosen = found.home;
        }
    }
    std::atomic<std::uint64_t>& load = endpoints_[chosen].load;
    std::uint64_t before = load.load(std::memory_order_relaxed);
    while (!load.compare_exchange_weak(
        before, pack_load(seqs_of(before) + n_seqs, tokens_of(before) + feature.tokens()),
        std::memory_order_relaxed)) {
    }
    if (has_session) {
        sessions_.remember(probe, static_cast<std::uint32_t>(chosen));
    }
    return chosen;
}

std::int32_t RouteTable::route(std::string_view model, RequestFeature feature, std::uint32_t n_seqs) noexcept {
    feature.word[1] = hash_bytes(model);
    const Reading generation(*this);
    const std::size_t slot = generation->find(feature.model_hash());
    if (slot == Generation::NOT_FOUND || generation->name_of(generation->slots[slot]) != model) {
        return UNKNOWN_MODEL;
    }
    return place(*generation, slot, feature, n_seqs);
}

std::int32_t RouteTable::choose(const RequestFeature& feature, std::uint32_t n_seqs) noexcept {
    if (feature.version() != FEATURE_VERSION) {
        return BAD_FEATURE;
    }
    const Reading generation(*this);
    const std::size_t slot = generation->find(feature.model_hash());
    return slot == Generation::NOT_FOUND ? UNKNOWN_MODEL : place(*generation, slot, feature, n_seqs);
}

void RouteTable::settle(std::uint32_t endpoint, std::uint64_t n_seqs, std::uint64_t tokens) noexcept {
    std::atomic<std::uint64_t>& load = endpoints_[endpoint].load;
    std::uint64_t before = load.load(std::memory_order_relaxed);
    std::uint64_t after;
    do {
        const std::uint64_t seqs_held = seqs_of(before);
        const std::uint64_t tokens_held = tokens_of(before);
        after = pack_load(seqs_held - std::min(seqs_held, n_seqs), tokens_held - std::min(tokens_held, tokens));
    } while (!load.compare_exchange_weak(before, after, std::memory_order_relaxed));
}

}  // namespace laya
