// Owns: one published set of models: name -> slot -> endpoints, in one flat block without a pointer in it.
//
// The block is lines of 64 bytes: first the slots, an open-addressing table with linear probing, at most half full; then
// the endpoint lists that did not fit in their slot; then the names. Everything refers by offset. Immutable once built.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#include "request_feature.hpp"

namespace laya {

enum class Policy : std::uint8_t {
    AUTO = 0,
    SESSION = 1,
    PREFIX = 2,
    LEAST_TOKENS = 3,
    POWER_OF_TWO = 4,
    WEIGHTED = 5,
    HASH = 6,
    ROUND_ROBIN = 7,
};
inline constexpr std::uint8_t N_POLICIES = 8;

// Whether it looks at a prompt's blocks; `choice_twin.READ_PROMPT` names the same.
constexpr bool reads_prompt(Policy policy) noexcept {
    return policy == Policy::AUTO || policy == Policy::PREFIX || policy == Policy::HASH;
}

// One cache line. An unused slot has hash 0, which no name has.
struct alignas(64) ModelSlot {
    static constexpr std::uint32_t INLINE_ENDPOINTS = 8;

    std::uint64_t hash = 0;
    std::uint64_t affinity_key = 0;  // hash of the model's own name, so that its aliases share its sessions
    std::uint32_t name_at = 0;       // in bytes, from the start of the block
    std::uint32_t name_bytes = 0;
    std::uint32_t n_endpoints : 24 = 0;
    std::uint32_t policy : 8 = 0;
    std::uint32_t spilled_at = 0;  // where the endpoints are, in 4-byte units, when there are more than fit here
    std::uint32_t endpoints[INLINE_ENDPOINTS] = {};
};
static_assert(sizeof(ModelSlot) == 64);

class Generation {
  public:
    static constexpr std::size_t NOT_FOUND = ~std::size_t{0};

    Generation(std::size_t n_names, std::size_t n_spilled, std::size_t n_name_bytes)
        : n_slots_(std::bit_ceil(std::max<std::size_t>(8, 2 * n_names))),
          spilled_end_(n_slots_ * sizeof(ModelSlot) / sizeof(std::uint32_t)),
          names_end_(n_slots_ * sizeof(ModelSlot) + n_spilled * sizeof(std::uint32_t)),
          block_(n_slots_ + lines_for(n_spilled * sizeof(std::uint32_t) + n_name_bytes)) {}

    std::size_t find(std::uint64_t hash) const noexcept {
        const std::size_t mask = n_slots_ - 1;
        for (std::size_t at = hash & mask; slot(at).hash != 0; at = (at + 1) & mask) {
            if (slot(at).hash == hash) {
                return at;
            }
        }
        return NOT_FOUND;
    }

    const ModelSlot& slot(std::size_t at) const noexcept {
        return *reinterpret_cast<const ModelSlot*>(block_.data() + at);
    }

    std::string_view name_of(const ModelSlot& slot) const noexcept {
        return {bytes() + slot.name_at, slot.name_bytes};
    }

    const std::uint32_t* endpoints_of(const ModelSlot& slot) const noexcept {
        return slot.n_endpoints <= ModelSlot::INLINE_ENDPOINTS
                   ? slot.endpoints
                   : reinterpret_cast<const std::uint32_t*>(bytes()) + slot.spilled_at;
    }

    // A list that does not fit in a slot; returns where it is.
    std::uint32_t spill(const std::vector<std::uint32_t>& endpoints) noexcept {
        const std::size_t at = spilled_end_;
        std::memcpy(bytes() + at * sizeof(std::uint32_t), endpoints.data(), endpoints.size() * sizeof(std::uint32_t));
        spilled_end_ += endpoints.size();
        return static_cast<std::uint32_t>(at);
    }

    // The name must not be here yet.
    void insert(std::string_view name, std::uint64_t hash, std::uint64_t affinity_key, const ModelSlot& model) noexcept {
        const std::size_t mask = n_slots_ - 1;
        std::size_t at = hash & mask;
        while (slot(at).hash != 0) {
            at = (at + 1) & mask;
        }
        ModelSlot named = model;
        named.hash = hash;
        named.affinity_key = affinity_key;
        named.name_at = static_cast<std::uint32_t>(names_end_);
        named.name_bytes = static_cast<std::uint32_t>(name.size());
        std::memcpy(block_.data() + at, &named, sizeof named);
        std::memcpy(bytes() + names_end_, name.data(), name.size());
        names_end_ += name.size();
    }

  private:
    struct alignas(64) Line {
        std::byte bytes[64];
    };
    static constexpr std::size_t lines_for(std::size_t n_bytes) noexcept {
        return (n_bytes + sizeof(Line) - 1) / sizeof(Line);
    }
    const char* bytes() const noexcept { return reinterpret_cast<const char*>(block_.data()); }
    char* bytes() noexcept { return reinterpret_cast<char*>(block_.data()); }

    std::size_t n_slots_;
    std::size_t spilled_end_;  // 4-byte units
    std::size_t names_end_;    // bytes
    std::vector<Line> block_;
};

}  // namespace laya
