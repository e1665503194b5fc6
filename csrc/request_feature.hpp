// Owns: the 32 bytes that a routing decision is made from, and the hash that names become. Knows no table.
//
// Layout (little-endian, four 64-bit words, so that a feature reads the same in shared memory and on a wire):
//
//   byte   0  u8   protocol version (1)          word 0, bits  0..7
//   byte   1  u8   endpoint kind                 word 0, bits  8..15
//   byte   2  u16  flags, bit 0 = streaming      word 0, bits 16..31
//   byte   4  u32  tokens wanted                 word 0, bits 32..63
//   byte   8  u64  model hash                    word 1
//   byte  16  u64  session hash, 0 = none        word 2
//   byte  24  u64  prefix hash, 0 = none         word 3
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace laya {

inline constexpr std::uint8_t FEATURE_VERSION = 1;
inline constexpr std::size_t FEATURE_BYTES = 32;
inline constexpr std::uint16_t FLAG_STREAMING = 1;

// memcpy into an integer is a single load; on a big-endian machine the compiler adds one byte swap.
inline std::uint64_t load_le64(const char* bytes) noexcept {
    std::uint64_t word;
    std::memcpy(&word, bytes, sizeof word);
    if constexpr (std::endian::native == std::endian::big) {
        word = __builtin_bswap64(word);
    }
    return word;
}

inline void store_le64(char* bytes, std::uint64_t word) noexcept {
    if constexpr (std::endian::native == std::endian::big) {
        word = __builtin_bswap64(word);
    }
    std::memcpy(bytes, &word, sizeof word);
}

struct RequestFeature {
    std::uint64_t word[4];

    static constexpr RequestFeature pack(std::uint8_t version, std::uint8_t kind, std::uint16_t flags,
                                         std::uint32_t tokens, std::uint64_t model, std::uint64_t session,
                                         std::uint64_t prefix) noexcept {
        const std::uint64_t head = std::uint64_t{version} | std::uint64_t{kind} << 8 | std::uint64_t{flags} << 16 |
                                   std::uint64_t{tokens} << 32;
        return {{head, model, session, prefix}};
    }

    static RequestFeature read(const char* bytes) noexcept {
        return {{load_le64(bytes), load_le64(bytes + 8), load_le64(bytes + 16), load_le64(bytes + 24)}};
    }

    void write(char* bytes) const noexcept {
        for (int i = 0; i < 4; ++i) {
            store_le64(bytes + 8 * i, word[i]);
        }
    }

    constexpr std::uint8_t version() const noexcept { return static_cast<std::uint8_t>(word[0]); }
    constexpr std::uint8_t kind() const noexcept { return static_cast<std::uint8_t>(word[0] >> 8); }
    constexpr std::uint16_t flags() const noexcept { return static_cast<std::uint16_t>(word[0] >> 16); }
    constexpr std::uint32_t tokens() const noexcept { return static_cast<std::uint32_t>(word[0] >> 32); }
    constexpr std::uint64_t model_hash() const noexcept { return word[1]; }
    constexpr std::uint64_t session_hash() const noexcept { return word[2]; }
    constexpr std::uint64_t prefix_hash() const noexcept { return word[3]; }
};
static_assert(sizeof(RequestFeature) == FEATURE_BYTES);

// The splitmix64 finaliser: every input bit reaches every output bit, and no two inputs share an output.
constexpr std::uint64_t mix64(std::uint64_t value) noexcept {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return value ^ (value >> 31);
}

// Hash of bytes, never 0 (0 means "none" in a feature). Each step is a bijection of the running value, so two texts of
// one length that differ in a single 8-byte word cannot collide. It is unseeded on purpose: a restart keeps it. It does
// not resist an attacker, who can make collisions at will; therefore nothing may be decided by it alone that would be
// wrong if two names met: RouteTable::route compares the name itself.
inline std::uint64_t hash_bytes(std::string_view bytes) noexcept {
    constexpr std::uint64_t STEP = 0xFF51AFD7ED558CCDu;
    std::uint64_t hash = 0x9E3779B97F4A7C15u ^ (bytes.size() * 0xD6E8FEB86659FD93u);
    const char* at = bytes.data();
    std::size_t left = bytes.size();
    for (; left >= 8; at += 8, left -= 8) {
        hash = (hash ^ load_le64(at)) * STEP;
        hash ^= hash >> 32;
    }
    if (left > 0) {
        char tail[8] = {};
        std::memcpy(tail, at, left);
        hash = (hash ^ load_le64(tail)) * STEP;
        hash ^= hash >> 32;
    }
    hash = mix64(hash);
    return hash != 0 ? hash : 1;
}

}  // namespace laya
