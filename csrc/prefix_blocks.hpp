// Owns: a prompt as chained hashes of its blocks, so that prompts that begin alike have equal first hashes. Knows no
// table.
//
// A block ends where a message may end (a closing brace before a comma, or at the very end: a chat's messages as JSON),
// for the first MAX_MESSAGES of them, and every 32 bytes up to 1 KiB and then growing by a sixteenth, for prompts that
// are plain text. So a conversation's next turn has a block end exactly where the turn before ended. No more than 64 KiB
// are read.
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

constexpr std::size_t count_ends() noexcept {
    std::size_t n = 0;
    for (std::size_t end = BLOCK_BYTES; end <= MOST_PREFIX_BYTES; end = next_block_end(end)) {
        ++n;
    }
    return n;
}

inline constexpr std::size_t N_ENDS = count_ends();
inline constexpr std::size_t MAX_MESSAGES = 160;
inline constexpr std::size_t MAX_BLOCKS = N_ENDS + MAX_MESSAGES;

// Where blocks end whatever is in them, in bytes.
inline constexpr std::array<std::uint32_t, N_ENDS> BLOCK_ENDS = [] {
    std::array<std::uint32_t, N_ENDS> ends{};
    std::size_t end = BLOCK_BYTES;
    for (std::uint32_t& at : ends) {
        at = static_cast<std::uint32_t>(end);
        end = next_block_end(end);
    }
    return ends;
}();

using PrefixBlocks = std::array<std::uint64_t, MAX_BLOCKS>;

// Where the first message after `from` may end; npos: nowhere in the first `most` bytes.
inline std::size_t find_message_end(std::string_view text, std::size_t most, std::size_t from) noexcept {
    for (;;) {
        const std::size_t brace = text.substr(0, most).find('}', from);
        if (brace == std::string_view::npos || brace + 1 == text.size() || text[brace + 1] == ',') {
            return brace == std::string_view::npos ? brace : brace + 1;
        }
        from = brace + 1;
    }
}

// Fills the first hashes, none of them 0, and returns how many. The text must be what the conversation's next turn
// begins with: of a chat the messages array without its closing bracket.
inline std::size_t hash_prefix(std::string_view text, PrefixBlocks& blocks) noexcept {
    constexpr std::uint64_t STEP = 0xFF51AFD7ED558CCDu;
    constexpr std::size_t NONE = std::string_view::npos;
    const auto add = [](std::uint64_t hash, std::uint64_t word) noexcept {
        hash = (hash ^ word) * STEP;
        return hash ^ hash >> 32;
    };
    const std::size_t most = text.size() < MOST_PREFIX_BYTES ? text.size() : MOST_PREFIX_BYTES;
    std::uint64_t hash = 0x9E3779B97F4A7C15u;
    std::size_t at = 0;
    std::size_t n = 0;
    std::size_t n_ends = 0;
    std::size_t n_messages = 0;
    std::size_t message = find_message_end(text, most, 0);
    for (;;) {
        const std::size_t end = n_ends < N_ENDS && BLOCK_ENDS[n_ends] <= most ? BLOCK_ENDS[n_ends] : NONE;
        const std::size_t stop = end < message ? end : message;
        if (stop == NONE) {
            return n;
        }
        for (; at + 8 <= stop; at += 8) {
            hash = add(hash, load_le64(text.data() + at));
        }
        char tail[8] = {};
        std::memcpy(tail, text.data() + at, stop - at);
        const std::uint64_t block = mix64((stop == at ? hash : add(hash, load_le64(tail))) ^ stop);
        blocks[n++] = block != 0 ? block : 1;
        n_ends += stop == end ? 1 : 0;
        if (stop == message) {
            message = ++n_messages < MAX_MESSAGES ? find_message_end(text, most, stop) : NONE;
        }
    }
}

}  // namespace laya
