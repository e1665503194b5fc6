// Owns: a prompt as chained hashes of its blocks, so that prompts that begin alike have equal first hashes. Knows no
// table.
//
// Blocks end every 32 bytes up to 1 KiB and then grow by a sixteenth, up to 64 KiB: what two prompts share is found to
// within 32 bytes or a sixteenth, a prompt of any length has at most MAX_BLOCKS hashes, and no more than 64 KiB are read.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "request_feature.hpp"

namespace laya {

inline constexpr std::size_t BLOCK_BYTES = 32;
inline constexpr std::size_t MOST_PREFIX_BYTES = 64 * 1024;

constexpr std::size_t next_block_end(std::size_t end) noexcept {
    const std::size_t grown = end / 16 / BLOCK_BYTES * BLOCK_BYTES;
    return end + (grown < BLOCK_BYTES ? BLOCK_BYTES : grown);
}

constexpr std::size_t count_blocks() noexcept {
    std::size_t n = 0;
    for (std::size_t end = BLOCK_BYTES; end <= MOST_PREFIX_BYTES; end = next_block_end(end)) {
        ++n;
    }
    return n;
}

inline constexpr std::size_t MAX_BLOCKS = count_blocks();

// Where block i ends, in bytes.
inline constexpr std::array<std::uint32_t, MAX_BLOCKS> BLOCK_ENDS = [] {
    std::array<std::uint32_t, MAX_BLOCKS> ends{};
    std::size_t end = BLOCK_BYTES;
    for (std::uint32_t& at : ends) {
        at = static_cast<std::uint32_t>(end);
        end = next_block_end(end);
    }
    return ends;
}();

using PrefixBlocks = std::array<std::uint64_t, MAX_BLOCKS>;

// Fills the first hashes, none of them 0, and returns how many: the whole blocks of the text.
inline std::size_t hash_prefix(std::string_view text, PrefixBlocks& blocks) noexcept {
    constexpr std::uint64_t STEP = 0xFF51AFD7ED558CCDu;
    std::uint64_t hash = 0x9E3779B97F4A7C15u;
    std::size_t n = 0;
    std::size_t at = 0;
    for (; n < MAX_BLOCKS && BLOCK_ENDS[n] <= text.size(); ++n) {
        for (; at < BLOCK_ENDS[n]; at += 8) {
            hash = (hash ^ load_le64(text.data() + at)) * STEP;
            hash ^= hash >> 32;
        }
        const std::uint64_t block = mix64(hash);
        blocks[n] = block != 0 ? block : 1;
    }
    return n;
}

}  // namespace laya
