// Owns: recognising the plainest body of a chat request: one JSON object whose members are all known here and of the
// expected type and range. What is not plain is not refused: `false` leaves it to the full decoder, whose verdict stands.
// Nothing is copied: members are places in the body, from which an edited body is put together.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace laya {

class PlainBody {
  public:
    enum Field : std::uint8_t {
        MODEL, MESSAGES, STREAM, STREAM_OPTIONS, MAX_TOKENS, MAX_COMPLETION_TOKENS, TEMPERATURE, TOP_P,
        FREQUENCY_PENALTY, PRESENCE_PENALTY, SEED, STOP, USER, PROMPT_CACHE_KEY, N, FIELD_COUNT
    };
    struct Member {
        std::string_view key;    // with its quotes
        std::string_view value;  // as written
    };

    // Whether `body` is plain. Called once; `body` must outlive this.
    bool read(std::string_view body) noexcept;

    bool has(Field field) const noexcept { return !members_[field].value.empty(); }
    std::string_view model() const noexcept { return unquoted(MODEL); }
    std::string_view session() const noexcept { return has(PROMPT_CACHE_KEY) ? unquoted(PROMPT_CACHE_KEY) : unquoted(USER); }
    bool stream() const noexcept { return stream_; }
    bool include_usage() const noexcept { return include_usage_; }
    std::int64_t max_tokens() const noexcept { return max_tokens_; }  // 0 where none is set
    std::uint32_t n_messages() const noexcept { return n_messages_; }

    // What the conversation's next turn begins with: the messages without the bracket that closes them.
    std::string_view prompt() const noexcept {
        const std::string_view messages = members_[MESSAGES].value;
        const std::size_t last = messages.size() - 2;
        return messages.substr(0, (messages[last] == '}' ? last : messages.find_last_not_of(" \n\r\t", last)) + 1);
    }

    // The body without the members of `replaced`, keys in quotes, each followed by a comma, and with `added`, members
    // without braces, at its end.
    std::string edited(std::string_view replaced, std::string_view added) const;

  private:
    std::string_view unquoted(Field field) const noexcept {
        const std::string_view value = members_[field].value;
        return value.empty() ? value : value.substr(1, value.size() - 2);
    }
    bool read_member(class Scanner& scan) noexcept;
    bool read_value(class Scanner& scan, Field field) noexcept;

    std::array<Member, FIELD_COUNT> members_{};
    std::array<Field, FIELD_COUNT> order_{};
    std::size_t n_members_ = 0;
    std::int64_t max_tokens_ = 0;
    std::int64_t max_completion_tokens_ = 0;
    std::uint32_t n_messages_ = 0;
    bool stream_ = false;
    bool include_usage_ = false;
};

}  // namespace laya
