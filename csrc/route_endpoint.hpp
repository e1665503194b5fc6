// Owns: one endpoint's counters, limits and health, in one cache line of atomics. Knows no model and no clock.
//
// Sequences and tokens in flight share one word, and so do the breaker and the counts of errors: each changes in one
// atomic step. Every operation is a load or a short compare-and-swap loop: no lock, no allocation, no system call.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace laya {

inline constexpr unsigned SEQS_BITS = 24;
inline constexpr std::uint64_t MAX_SEQS = (std::uint64_t{1} << SEQS_BITS) - 1;
inline constexpr std::uint64_t MAX_TOKENS = (std::uint64_t{1} << 39) - 1;

// A rank orders endpoints, lower is better: has room first, then fewest reserved tokens, then fewest sequences.
inline constexpr std::uint64_t FULL = std::uint64_t{1} << 63;
inline constexpr std::uint64_t INELIGIBLE = ~std::uint64_t{0};

constexpr std::uint64_t tokens_of(std::uint64_t load) noexcept { return load >> SEQS_BITS & MAX_TOKENS; }
constexpr std::uint64_t seqs_of(std::uint64_t load) noexcept { return load & MAX_SEQS; }
constexpr std::uint64_t pack_load(std::uint64_t seqs, std::uint64_t tokens) noexcept {
    return std::min(tokens, MAX_TOKENS) << SEQS_BITS | std::min(seqs, MAX_SEQS);
}

inline constexpr std::uint32_t TRIP_AFTER = 5;  // errors in a row that open a breaker

// What a circuit breaker lets through: everything, nothing, one trial, nothing while that trial runs.
enum class Breaker : std::uint8_t { CLOSED = 0, OPEN = 1, HALF_OPEN = 2, TRIAL = 3 };

struct alignas(64) Endpoint {
    std::atomic<std::uint64_t> load{0};  // tokens << SEQS_BITS | sequences
    std::atomic<std::uint64_t> max_tokens{MAX_TOKENS};
    std::atomic<std::uint64_t> window_tokens{0};
    std::atomic<std::uint64_t> health{0};  // errors << 32 | errors in a row << 8 | breaker
    std::atomic<std::uint64_t> seed{0};    // of its rendezvous scores; outlives a restart if its caller's does
    std::atomic<std::uint32_t> max_seqs{MAX_SEQS};
    std::atomic<std::uint32_t> ttft_us{0};  // moving average, an eighth of it the newest; 0 = none yet
    std::atomic<std::uint32_t> turn{0};     // of the models whose first endpoint this is
    std::atomic<std::uint16_t> weight{1};
    std::atomic<bool> ready{false};

    static constexpr Breaker breaker_of(std::uint64_t word) noexcept { return static_cast<Breaker>(word & 0xFF); }
    static constexpr std::uint32_t in_row_of(std::uint64_t word) noexcept { return word >> 8 & MOST_IN_ROW; }
    static constexpr std::uint32_t errors_of(std::uint64_t word) noexcept { return word >> 32; }

    // The one predicate of every policy: ready, let through by the breaker, and with or without room for the request.
    // INELIGIBLE, or a rank whose top bit says that there is no room.
    std::uint64_t rank(std::uint32_t n_seqs, std::uint64_t tokens) const noexcept {
        const Breaker breaker = breaker_of(health.load(std::memory_order_acquire));
        if (!ready.load(std::memory_order_acquire) || breaker == Breaker::OPEN || breaker == Breaker::TRIAL) {
            return INELIGIBLE;
        }
        const std::uint64_t held = load.load(std::memory_order_relaxed);
        const bool is_full = seqs_of(held) + n_seqs > max_seqs.load(std::memory_order_relaxed) ||
                             tokens_of(held) + tokens > max_tokens.load(std::memory_order_relaxed);
        return std::min(is_full ? held | FULL : held, INELIGIBLE - 1);
    }

    // False when another thread took the half-open breaker's one trial first.
    bool claim() noexcept {
        std::uint64_t word = health.load(std::memory_order_acquire);
        while (breaker_of(word) == Breaker::HALF_OPEN) {
            if (health.compare_exchange_weak(word, with(word, Breaker::TRIAL), std::memory_order_acq_rel)) {
                return true;
            }
        }
        return breaker_of(word) == Breaker::CLOSED;
    }

    void reserve(std::uint32_t n_seqs, std::uint64_t tokens) noexcept {
        std::uint64_t before = load.load(std::memory_order_relaxed);
        while (!load.compare_exchange_weak(before, pack_load(seqs_of(before) + n_seqs, tokens_of(before) + tokens),
                                           std::memory_order_relaxed)) {
        }
    }

    void settle(std::uint64_t n_seqs, std::uint64_t tokens) noexcept {
        std::uint64_t before = load.load(std::memory_order_relaxed);
        std::uint64_t after;
        do {
            const std::uint64_t seqs_held = seqs_of(before);
            const std::uint64_t tokens_held = tokens_of(before);
            after = pack_load(seqs_held - std::min(seqs_held, n_seqs), tokens_held - std::min(tokens_held, tokens));
        } while (!load.compare_exchange_weak(before, after, std::memory_order_relaxed));
    }

    // An answer came: errors in a row end, and a half-open breaker or its trial closes. An open one stays open, since
    // the answer is of a request from before.
    void served() noexcept {
        change_health([](std::uint64_t word) {
            const std::uint64_t calm = word & ~(std::uint64_t{MOST_IN_ROW} << 8);
            return breaker_of(word) == Breaker::OPEN ? calm : with(calm, Breaker::CLOSED);
        });
    }

    // The endpoint failed a request. True when that opened the breaker.
    bool failed(std::uint32_t trip_after) noexcept {
        const auto [before, after] = change_health([trip_after](std::uint64_t word) {
            const std::uint32_t in_row = std::min(in_row_of(word) + 1, MOST_IN_ROW);
            const bool opens = breaker_of(word) != Breaker::CLOSED || in_row >= trip_after;
            return std::uint64_t{errors_of(word) + 1} << 32 | std::uint64_t{in_row} << 8 |
                   static_cast<std::uint64_t>(opens ? Breaker::OPEN : Breaker::CLOSED);
        });
        return breaker_of(before) != Breaker::OPEN && breaker_of(after) == Breaker::OPEN;
    }

    // A request ended without a verdict (its client left): a trial is given back.
    void dropped() noexcept {
        change_health([](std::uint64_t word) {
            return breaker_of(word) == Breaker::TRIAL ? with(word, Breaker::HALF_OPEN) : word;
        });
    }

    // An open breaker lets one trial through; so does one whose trial never came back. False when it was neither.
    bool half_open() noexcept {
        const auto [before, after] = change_health([](std::uint64_t word) {
            const Breaker breaker = breaker_of(word);
            return breaker == Breaker::OPEN || breaker == Breaker::TRIAL ? with(word, Breaker::HALF_OPEN) : word;
        });
        return before != after;
    }

    void first_token(std::uint32_t us) noexcept {
        std::uint32_t before = ttft_us.load(std::memory_order_relaxed);
        std::uint32_t after;
        do {
            after = before == 0 ? us : static_cast<std::uint32_t>((std::uint64_t{before} * 7 + us) / 8);
            after = std::max(after, std::uint32_t{1});
        } while (!ttft_us.compare_exchange_weak(before, after, std::memory_order_relaxed));
    }

  private:
    static constexpr std::uint32_t MOST_IN_ROW = (1u << 24) - 1;

    static constexpr std::uint64_t with(std::uint64_t word, Breaker breaker) noexcept {
        return (word & ~std::uint64_t{0xFF}) | static_cast<std::uint64_t>(breaker);
    }

    struct Change {
        std::uint64_t before;
        std::uint64_t after;
    };
    template <typename Next>
    Change change_health(Next next) noexcept {
        std::uint64_t before = health.load(std::memory_order_acquire);
        for (;;) {
            const std::uint64_t after = next(before);
            if (after == before ||
                health.compare_exchange_weak(before, after, std::memory_order_acq_rel, std::memory_order_acquire)) {
                return {before, after};
            }
        }
    }
};
static_assert(sizeof(Endpoint) == 64);

}  // namespace laya
