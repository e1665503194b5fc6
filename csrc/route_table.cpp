#include "route_table.hpp"

#include <algorithm>
#include <stdexcept>
#include <thread>

namespace laya {
namespace {

std::size_t number_of_thread() noexcept {
    static std::atomic<std::size_t> n_threads{0};
    thread_local const std::size_t number = n_threads.fetch_add(1, std::memory_order_relaxed);
    return number;
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

// Holds the current generation in memory for as long as it lives. A reader counts itself into the cell it saw as current
// and looks again: the writer changes `current_` before it looks at the counts, so either the writer sees the reader
// or the reader sees the change and tries the other cell.
class RouteTable::Reading {
  public:
    explicit Reading(RouteTable& table) noexcept {
        Stripe& stripe = table.stripes_[number_of_thread() % STRIPES];
        for (;;) {
            const std::uint32_t cell = table.current_.load(std::memory_order_seq_cst);
            count_ = &stripe.readers[cell];
            count_->fetch_add(1, std::memory_order_seq_cst);
            if (table.current_.load(std::memory_order_seq_cst) == cell) {
                generation_ = table.cells_[cell].get();
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

RouteTable::RouteTable(std::uint32_t max_endpoints, std::size_t session_bytes, std::uint64_t window_tokens,
                       std::size_t prefix_bytes)
    : max_endpoints_(max_endpoints), window_tokens_(window_tokens), sessions_(session_bytes), prefixes_(prefix_bytes) {
    if (max_endpoints == 0 || max_endpoints > MAX_ENDPOINTS) {
        throw std::invalid_argument("max_endpoints must be 1 to " + std::to_string(MAX_ENDPOINTS));
    }
    endpoints_ = std::make_unique<Endpoint[]>(max_endpoints);
    for (std::uint32_t endpoint = 0; endpoint < max_endpoints; ++endpoint) {
        reset(endpoint);
    }
    cells_[0] = std::make_unique<Generation>(0, 0, 0);
}

RouteTable::~RouteTable() = default;

// ------------------------------------------------------------------------------------------------ publishing

std::unique_ptr<Generation> RouteTable::build(const std::vector<ModelRoute>& models) const {
    std::size_t n_names = 0;
    std::size_t n_name_bytes = 0;
    std::size_t n_spilled = 0;
    for (const ModelRoute& model : models) {
        n_names += model.names.size();
        n_spilled += model.endpoints.size();
        for (const std::string& name : model.names) {
            n_name_bytes += name.size();
        }
    }
    auto generation = std::make_unique<Generation>(n_names, n_spilled, n_name_bytes);
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
        slot.policy = static_cast<std::uint32_t>(model.policy) & 0xFF;
        slot.n_endpoints = static_cast<std::uint32_t>(endpoints.size()) & 0xFFFFFF;
        if (endpoints.size() <= ModelSlot::INLINE_ENDPOINTS) {
            std::copy(endpoints.begin(), endpoints.end(), slot.endpoints);
        } else {
            slot.spilled_at = generation->spill(endpoints);
        }
        const std::uint64_t affinity_key = hash_bytes(model.names.front());
        for (const std::string& name : model.names) {
            const std::uint64_t hash = hash_bytes(name);
            if (const std::size_t other = generation->find(hash); other != Generation::NOT_FOUND) {
                const std::string known(generation->name_of(generation->slot(other)));
                throw std::invalid_argument(known == name
                                                ? "the model name " + quoted(name) + " is used twice"
                                                : "the model names " + quoted(known) + " and " + quoted(name) +
                                                      " have the same 64-bit hash; rename one of them");
            }
            generation->insert(name, hash, affinity_key, slot);
        }
    }
    return generation;
}

void RouteTable::publish(const std::vector<ModelRoute>& models) {
    std::unique_ptr<Generation> next = build(models);
    const std::lock_guard guard(writing_);
    for (;;) {
        reclaim();
        const auto free_cell = std::find(cells_.begin(), cells_.end(), nullptr);
        if (free_cell != cells_.end()) {
            *free_cell = std::move(next);
            current_.store(static_cast<std::uint32_t>(free_cell - cells_.begin()), std::memory_order_seq_cst);
            reclaim();
            return;
        }
        std::this_thread::yield();
    }
}

bool RouteTable::has_reader(std::uint32_t cell) const noexcept {
    return std::any_of(stripes_.begin(), stripes_.end(), [cell](const Stripe& stripe) {
        return stripe.readers[cell].load(std::memory_order_seq_cst) != 0;
    });
}

void RouteTable::reclaim() noexcept {
    const std::uint32_t current = current_.load(std::memory_order_seq_cst);
    for (std::uint32_t cell = 0; cell < CELLS; ++cell) {
        if (cell != current && cells_[cell] != nullptr && !has_reader(cell)) {
            cells_[cell].reset();
        }
    }
}

std::size_t RouteTable::n_generations() {
    const std::lock_guard guard(writing_);
    reclaim();
    return CELLS - static_cast<std::size_t>(std::count(cells_.begin(), cells_.end(), nullptr));
}

// ------------------------------------------------------------------------------------------------ endpoints

// Not its load: that belongs to the requests that it still carries.
void RouteTable::reset(std::uint32_t endpoint) noexcept {
    Endpoint& at = endpoints_[endpoint];
    at.ready.store(false, std::memory_order_release);
    at.health.store(0, std::memory_order_release);
    at.ttft_us.store(0, std::memory_order_relaxed);
    at.turn.store(0, std::memory_order_relaxed);
    set_capacity(endpoint, 0, 0);
    set_weight(endpoint, 1);
    set_seed(endpoint, mix64(std::uint64_t{endpoint} + 1));
}

void RouteTable::set_eligible(std::uint32_t endpoint, bool ready) noexcept {
    endpoints_[endpoint].ready.store(ready, std::memory_order_release);
}

bool RouteTable::is_eligible(std::uint32_t endpoint) const noexcept {
    return endpoints_[endpoint].rank(0, 0) != INELIGIBLE;
}

void RouteTable::set_capacity(std::uint32_t endpoint, std::uint32_t max_num_seqs,
                              std::uint64_t kv_pool_tokens) noexcept {
    Endpoint& at = endpoints_[endpoint];
    at.max_seqs.store(max_num_seqs == 0 ? MAX_SEQS : max_num_seqs, std::memory_order_relaxed);
    at.max_tokens.store(kv_pool_tokens == 0 ? MAX_TOKENS : kv_pool_tokens, std::memory_order_relaxed);
    at.window_tokens.store(kv_pool_tokens == 0 ? window_tokens_ : kv_pool_tokens / 2, std::memory_order_relaxed);
}

void RouteTable::set_weight(std::uint32_t endpoint, std::uint16_t weight) noexcept {
    endpoints_[endpoint].weight.store(weight, std::memory_order_relaxed);
}

void RouteTable::set_seed(std::uint32_t endpoint, std::uint64_t seed) noexcept {
    endpoints_[endpoint].seed.store(seed, std::memory_order_relaxed);
}

Load RouteTable::load(std::uint32_t endpoint) const noexcept {
    const std::uint64_t load = endpoints_[endpoint].load.load(std::memory_order_relaxed);
    return {seqs_of(load), tokens_of(load)};
}

// ------------------------------------------------------------------------------------------------ requests

std::int32_t RouteTable::route(std::string_view model, RequestFeature feature, std::uint32_t n_seqs,
                               Blocks blocks) noexcept {
    feature.word[1] = hash_bytes(model);
    const Reading generation(*this);
    const std::size_t at = generation->find(feature.model_hash());
    if (at == Generation::NOT_FOUND || generation->name_of(generation->slot(at)) != model) {
        return UNKNOWN_MODEL;
    }
    return place(*generation, generation->slot(at), feature, blocks, n_seqs);
}

std::int32_t RouteTable::route_prompt(std::string_view model, RequestFeature feature, std::uint32_t n_seqs,
                                      std::string_view prompt) noexcept {
    feature.word[1] = hash_bytes(model);
    const Reading generation(*this);
    const std::size_t at = generation->find(feature.model_hash());
    if (at == Generation::NOT_FOUND || generation->name_of(generation->slot(at)) != model) {
        return UNKNOWN_MODEL;
    }
    const ModelSlot& slot = generation->slot(at);
    if (slot.n_endpoints < 2 || !reads_prompt(static_cast<Policy>(slot.policy))) {
        return place(*generation, slot, feature, {}, n_seqs);
    }
    PrefixBlocks blocks;
    const std::size_t n_blocks = hash_prefix(prompt, blocks);
    return place(*generation, slot, feature, {blocks.data(), n_blocks}, n_seqs);
}

std::int32_t RouteTable::choose(const RequestFeature& feature, std::uint32_t n_seqs) noexcept {
    if (feature.version() != FEATURE_VERSION) {
        return BAD_FEATURE;
    }
    const Reading generation(*this);
    const std::size_t at = generation->find(feature.model_hash());
    return at == Generation::NOT_FOUND ? UNKNOWN_MODEL
                                       : place(*generation, generation->slot(at), feature, {}, n_seqs);
}

void RouteTable::settle(std::uint32_t endpoint, std::uint64_t n_seqs, std::uint64_t tokens) noexcept {
    endpoints_[endpoint].settle(n_seqs, tokens);
}

Homes RouteTable::homes(std::string_view model, std::uint64_t session_hash, Blocks blocks) noexcept {
    Homes found;
    const Reading generation(*this);
    const std::size_t at = generation->find(hash_bytes(model));
    if (at == Generation::NOT_FOUND || generation->name_of(generation->slot(at)) != model) {
        return found;
    }
    const std::uint64_t affinity_key = generation->slot(at).affinity_key;
    if (session_hash != 0) {
        found.session = sessions_.find(session_hash ^ affinity_key).endpoint;
    }
    return find_prefix(blocks, affinity_key, found);
}

std::uint64_t RouteTable::n_draws() const noexcept {
    return stripes_[number_of_thread() % STRIPES].n_draws.load(std::memory_order_relaxed);
}

// Only what orders a draw: threads that share a stripe may draw the same, which is no fault.
std::uint64_t RouteTable::next_draw() noexcept {
    return stripes_[number_of_thread() % STRIPES].n_draws.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace laya
