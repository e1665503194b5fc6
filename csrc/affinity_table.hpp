// Owns: which endpoint a key (of a session or a prompt) was last sent to, in a fixed number of bytes. Knows no
// model and no load.
//
// A set is one cache line of eight entries, an entry one 64-bit atomic, so that a reader can never see half of one:
//
//   bits 63..32  tag (upper half of the mixed key, never 0; an empty entry is 0)
//   bits 31..16  endpoint
//   bits 15..0   stamp: when the entry was last used, counted within its set
//
// A full set gives up the entry with the lowest stamp: idle keys leave when room is needed, not by a clock. An entry
// that is still near the newest is not stamped again, so busy keys are read and not written, and cost no cache line
// transfer; eight entries have at least eight stamps between them, so one that near is never the one given up. Two
// keys whose set and tag are equal (chance 2^-32 per entry looked at) share an endpoint: affinity is a preference,
// so that is slower, never wrong. When threads race, an update that lost three times is dropped for the same reason.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "request_feature.hpp"

namespace laya {

class AffinityTable {
  public:
    static constexpr unsigned WAYS = 8;
    static constexpr std::int32_t NONE = -1;

    struct Probe {
        std::atomic<std::uint64_t>* set;
        std::uint64_t seen;  // the entry that a remember() would replace
        std::uint32_t tag;
        std::uint32_t way;
        std::uint32_t newest;   // the highest stamp in the set
        std::int32_t endpoint;  // where the key was last, or NONE
    };

    // Uses the largest power of two of 64-byte sets that fits in `bytes`, at least one.
    explicit AffinityTable(std::size_t bytes)
        : n_sets_(std::bit_floor(bytes < sizeof(Set) ? std::size_t{1} : bytes / sizeof(Set))),
          sets_(std::make_unique<Set[]>(n_sets_)) {}

    Probe find(std::uint64_t key) const noexcept {
        const std::uint64_t mixed = mix64(key);
        const std::uint32_t tag = tag_of(mixed);
        return scan(sets_[mixed & (n_sets_ - 1)].way, tag);
    }

    void remember(Probe probe, std::uint32_t endpoint) noexcept {
        for (int attempt = 0; attempt < 3; ++attempt) {
            if (probe.endpoint == static_cast<std::int32_t>(endpoint) &&
                probe.newest - stamp_of(probe.seen) < STALE_AFTER) {
                return;
            }
            if (probe.newest == MAX_STAMP) {
                halve_stamps(probe.set);
                probe = scan(probe.set, probe.tag);
            }
            const std::uint64_t entry = std::uint64_t{probe.tag} << 32 | std::uint64_t{endpoint} << 16 |
                                        (probe.newest + 1);
            if (probe.set[probe.way].compare_exchange_strong(probe.seen, entry, std::memory_order_relaxed)) {
                return;
            }
            probe = scan(probe.set, probe.tag);
        }
    }

    std::size_t capacity() const noexcept { return n_sets_ * WAYS; }

  private:
    static constexpr std::uint32_t MAX_STAMP = 0xFFFF;
    static constexpr std::uint32_t STALE_AFTER = 4;  // stamps behind the newest; half of a set

    struct alignas(64) Set {
        std::atomic<std::uint64_t> way[WAYS];
    };
    static_assert(sizeof(Set) == 64);

    static constexpr std::uint32_t tag_of(std::uint64_t mixed) noexcept {
        const auto tag = static_cast<std::uint32_t>(mixed >> 32);
        return tag != 0 ? tag : 1;
    }
    static constexpr std::uint32_t stamp_of(std::uint64_t entry) noexcept { return entry & MAX_STAMP; }

    static Probe scan(std::atomic<std::uint64_t>* set, std::uint32_t tag) noexcept {
        Probe probe{set, 0, tag, 0, 0, NONE};
        std::uint32_t oldest = MAX_STAMP + 1;
        for (unsigned way = 0; way < WAYS; ++way) {
            const std::uint64_t entry = set[way].load(std::memory_order_relaxed);
            const std::uint32_t stamp = stamp_of(entry);
            if (stamp > probe.newest) {
                probe.newest = stamp;
            }
            if (probe.endpoint != NONE) {
                continue;
            }
            if (static_cast<std::uint32_t>(entry >> 32) == tag) {
                probe.endpoint = static_cast<std::int32_t>((entry >> 16) & 0xFFFF);
                probe.way = way;
                probe.seen = entry;
            } else if (stamp < oldest) {
                oldest = stamp;
                probe.way = way;
                probe.seen = entry;
            }
        }
        return probe;
    }

    // Keeps the order of use when the 16-bit stamps run out. A used entry keeps at least 1: only empty ones have 0.
    static void halve_stamps(std::atomic<std::uint64_t>* set) noexcept {
        for (unsigned way = 0; way < WAYS; ++way) {
            std::uint64_t entry = set[way].load(std::memory_order_relaxed);
            const std::uint32_t stamp = stamp_of(entry);
            if (stamp > 1) {
                const std::uint64_t halved = (entry & ~std::uint64_t{MAX_STAMP}) | stamp / 2;
                set[way].compare_exchange_strong(entry, halved, std::memory_order_relaxed);
            }
        }
    }

    std::size_t n_sets_;
    std::unique_ptr<Set[]> sets_;
};

}  // namespace laya
