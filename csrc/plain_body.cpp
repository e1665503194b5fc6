#include "plain_body.hpp"

#include <charconv>
#include <cstring>

namespace laya {
namespace {

constexpr std::array<std::string_view, PlainBody::FIELD_COUNT> KEYS = {
    "model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "frequency_penalty", "presence_penalty", "seed", "stop", "user", "prompt_cache_key", "n",
};
constexpr std::array<std::string_view, 6> ROLES = {"user", "assistant", "system", "tool", "developer", "function"};
constexpr std::int64_t MOST_TOKENS = 2147483647;  // as the full decoder has it

}  // namespace

// A place in the text. Each reader moves it behind what it names and says whether that was there.
class Scanner {
  public:
    explicit Scanner(std::string_view text) noexcept : at_(text.data()), end_(text.data() + text.size()) {}
    const char* at() const noexcept { return at_; }
    bool is_done() const noexcept { return at_ == end_; }

    void skip_space() noexcept {
        while (at_ != end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r')) {
            ++at_;
        }
    }

    bool take(char wanted) noexcept {
        if (at_ == end_ || *at_ != wanted) {
            return false;
        }
        ++at_;
        return true;
    }

    bool take(std::string_view wanted) noexcept {
        if (static_cast<std::size_t>(end_ - at_) < wanted.size() || std::memcmp(at_, wanted.data(), wanted.size()) != 0) {
            return false;
        }
        at_ += wanted.size();
        return true;
    }

    // A string with its quotes. `has_escapes` is set where what it says is not what is written.
    bool string(std::string_view& quoted, bool& has_escapes) noexcept {
        const char* start = at_;
        if (!take('"')) {
            return false;
        }
        has_escapes = false;
        while (true) {
            skip_plain_text();
            if (at_ == end_) {
                return false;
            }
            const auto byte = static_cast<unsigned char>(*at_);
            if (byte == '"') {
                ++at_;
                quoted = {start, static_cast<std::size_t>(at_ - start)};
                return true;
            }
            if (byte == '\\') {
                has_escapes = true;
                if (!escape()) {
                    return false;
                }
            } else if (byte < 0x20 || !utf8()) {
                return false;
            }
        }
    }

    bool string_without_escapes(std::string_view& quoted) noexcept {
        bool has_escapes = false;
        return string(quoted, has_escapes) && !has_escapes;
    }

    bool boolean(bool& value) noexcept {
        value = take("true");
        return value || take("false");
    }

    // Digits without a sign, at most `most_digits` of them.
    bool digits(std::size_t most_digits, std::int64_t& value) noexcept {
        const char* start = at_;
        value = 0;
        while (at_ != end_ && *at_ >= '0' && *at_ <= '9' && static_cast<std::size_t>(at_ - start) < most_digits) {
            value = value * 10 + (*at_ - '0');
            ++at_;
        }
        const auto n_digits = at_ - start;
        return n_digits > 0 && (n_digits == 1 || *start != '0') && is_number_end();
    }

    // A decimal number without an exponent, of at most 15 digits, so that one division gives the nearest double.
    bool number(double least, double most) noexcept {
        const bool is_negative = take('-');
        const char* start = at_;
        std::int64_t all_digits = 0;
        std::size_t n_digits = some_digits(all_digits);
        if (n_digits == 0 || (n_digits > 1 && *start == '0')) {
            return false;
        }
        double scale = 1;
        if (take('.')) {
            const std::size_t n_places = some_digits(all_digits);
            n_digits += n_places;
            for (std::size_t place = 0; place < n_places; ++place) {
                scale *= 10;
            }
            if (n_places == 0) {
                return false;
            }
        }
        const double value = static_cast<double>(is_negative ? -all_digits : all_digits) / scale;
        return n_digits <= 15 && is_number_end() && value >= least && value <= most;
    }

  private:
    // ASCII that is neither a quote nor a backslash nor a control character, eight bytes at a time.
    void skip_plain_text() noexcept {
        constexpr std::uint64_t ONES = 0x0101010101010101, HIGHS = 0x8080808080808080;
        while (end_ - at_ >= 8) {
            std::uint64_t word;
            std::memcpy(&word, at_, 8);
            const std::uint64_t quotes = word ^ (ONES * '"'), slashes = word ^ (ONES * '\\');
            const std::uint64_t special =
                (word | ((quotes - ONES) & ~quotes) | ((slashes - ONES) & ~slashes) | (word - ONES * 0x20)) & HIGHS;
            if (special != 0) {
                break;
            }
            at_ += 8;
        }
        while (at_ != end_ && static_cast<unsigned char>(*at_) >= 0x20 && static_cast<unsigned char>(*at_) < 0x80 &&
               *at_ != '"' && *at_ != '\\') {
            ++at_;
        }
    }

    bool escape() noexcept {
        if (end_ - at_ < 2) {
            return false;
        }
        const char kind = at_[1];
        if (kind != 'u') {
            at_ += 2;
            return kind != '\0' && std::strchr("\"\\/bfnrt", kind) != nullptr;
        }
        unsigned code = 0;
        if (end_ - at_ < 6) {
            return false;
        }
        const auto result = std::from_chars(at_ + 2, at_ + 6, code, 16);
        at_ += 6;
        return result.ec == std::errc() && result.ptr == at_ && (code < 0xd800 || code > 0xdfff);
    }

    bool utf8() noexcept {
        const auto* bytes = reinterpret_cast<const unsigned char*>(at_);
        const auto left = end_ - at_;
        const auto follows = [&](int index) { return (bytes[index] & 0xc0) == 0x80; };
        if (bytes[0] >= 0xc2 && bytes[0] <= 0xdf && left >= 2 && follows(1)) {
            at_ += 2;
            return true;
        }
        if ((bytes[0] & 0xf0) == 0xe0 && left >= 3 && follows(1) && follows(2)) {
            const unsigned code = (bytes[0] & 0x0fu) << 12 | (bytes[1] & 0x3fu) << 6 | (bytes[2] & 0x3fu);
            at_ += 3;
            return code >= 0x800 && (code < 0xd800 || code > 0xdfff);
        }
        if ((bytes[0] & 0xf8) == 0xf0 && left >= 4 && follows(1) && follows(2) && follows(3)) {
            const unsigned code = (bytes[0] & 0x07u) << 18 | (bytes[1] & 0x3fu) << 12 | (bytes[2] & 0x3fu) << 6 |
                                  (bytes[3] & 0x3fu);
            at_ += 4;
            return code >= 0x10000 && code <= 0x10ffff;
        }
        return false;
    }

    // Appends digits to `value`, up to 16 of them; returns how many.
    std::size_t some_digits(std::int64_t& value) noexcept {
        const char* start = at_;
        while (at_ != end_ && *at_ >= '0' && *at_ <= '9' && at_ - start < 16 && value < 1'000'000'000'000'000) {
            value = value * 10 + (*at_ - '0');
            ++at_;
        }
        return static_cast<std::size_t>(at_ - start);
    }

    bool is_number_end() const noexcept {
        return at_ != end_ && (*at_ == ',' || *at_ == '}' || *at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r');
    }

    const char* at_;
    const char* end_;
};

namespace {

// {"role": ..., "content": "..."}: these two members and no other.
bool read_message(Scanner& scan) noexcept {
    bool has_role = false, has_content = false, has_escapes = false;
    if (!scan.take('{')) {
        return false;
    }
    do {
        scan.skip_space();
        std::string_view key, value;
        if (!scan.string_without_escapes(key)) {
            return false;
        }
        scan.skip_space();
        if (!scan.take(':')) {
            return false;
        }
        scan.skip_space();
        if (key == "\"content\"" && !has_content) {
            has_content = scan.string(value, has_escapes);
            if (!has_content) {
                return false;
            }
        } else if (key == "\"role\"" && !has_role && scan.string_without_escapes(value)) {
            const std::string_view role = value.substr(1, value.size() - 2);
            for (const std::string_view known : ROLES) {
                has_role = has_role || role == known;
            }
            if (!has_role) {
                return false;
            }
        } else {
            return false;
        }
        scan.skip_space();
    } while (scan.take(','));
    return scan.take('}') && has_role && has_content;
}

bool read_messages(Scanner& scan, std::uint32_t& count) noexcept {
    if (!scan.take('[')) {
        return false;
    }
    do {
        scan.skip_space();
        if (!read_message(scan)) {
            return false;
        }
        ++count;
        scan.skip_space();
    } while (scan.take(','));
    return scan.take(']');
}

bool read_stream_options(Scanner& scan, bool& include_usage) noexcept {
    if (!scan.take('{')) {
        return false;
    }
    scan.skip_space();
    if (!scan.take("\"include_usage\"")) {
        return false;
    }
    scan.skip_space();
    if (!scan.take(':')) {
        return false;
    }
    scan.skip_space();
    if (!scan.boolean(include_usage)) {
        return false;
    }
    scan.skip_space();
    return scan.take('}');
}

bool read_token_count(Scanner& scan, std::int64_t& count) noexcept {
    return scan.digits(10, count) && count >= 1 && count <= MOST_TOKENS;
}

}  // namespace

bool PlainBody::read_value(Scanner& scan, Field field) noexcept {
    std::string_view text;
    std::int64_t whole = 0;
    bool has_escapes = false;
    switch (field) {
        case MODEL:
        case USER:
        case PROMPT_CACHE_KEY:
            return scan.string_without_escapes(text) && text.size() > 2;
        case MESSAGES:
            return read_messages(scan, n_messages_);
        case STREAM:
            return scan.boolean(stream_);
        case STREAM_OPTIONS:
            return read_stream_options(scan, include_usage_);
        case MAX_TOKENS:
            return read_token_count(scan, max_tokens_);
        case MAX_COMPLETION_TOKENS:
            return read_token_count(scan, max_completion_tokens_);
        case TEMPERATURE:
            return scan.number(0.0, 2.0);
        case TOP_P:
            return scan.number(0.0, 1.0);
        case FREQUENCY_PENALTY:
        case PRESENCE_PENALTY:
            return scan.number(-2.0, 2.0);
        case SEED:
            return scan.digits(18, whole);
        case STOP:
            return scan.string(text, has_escapes) && text.size() > 2;  // an empty one is refused
        case N:
            return scan.digits(1, whole) && whole == 1;
        case FIELD_COUNT:
            break;
    }
    return false;
}

bool PlainBody::read_member(Scanner& scan) noexcept {
    std::string_view key;
    if (!scan.string_without_escapes(key)) {
        return false;
    }
    scan.skip_space();
    if (!scan.take(':')) {
        return false;
    }
    scan.skip_space();
    for (std::size_t index = 0; index < FIELD_COUNT; ++index) {
        if (key.size() != KEYS[index].size() + 2 || key.compare(1, KEYS[index].size(), KEYS[index]) != 0) {
            continue;
        }
        const auto field = static_cast<Field>(index);
        const char* start = scan.at();
        if (has(field) || !read_value(scan, field)) {
            return false;
        }
        members_[field] = {key, {start, static_cast<std::size_t>(scan.at() - start)}};
        order_[n_members_++] = field;
        return true;
    }
    return false;
}

bool PlainBody::read(std::string_view body) noexcept {
    Scanner scan(body);
    scan.skip_space();
    if (!scan.take('{')) {
        return false;
    }
    do {
        scan.skip_space();
        if (!read_member(scan)) {
            return false;
        }
        scan.skip_space();
    } while (scan.take(','));
    if (!scan.take('}')) {
        return false;
    }
    scan.skip_space();
    if (max_completion_tokens_ != 0) {
        max_tokens_ = max_completion_tokens_;
    }
    return scan.is_done() && has(MODEL) && has(MESSAGES);
}

std::string PlainBody::edited(std::string_view replaced, std::string_view added) const {
    std::string out = "{";
    for (std::size_t index = 0; index < n_members_; ++index) {
        const Member& member = members_[order_[index]];
        const std::size_t place = replaced.find(member.key);
        if (place != std::string_view::npos && replaced.substr(place + member.key.size(), 1) == ",") {
            continue;
        }
        out += member.key;
        out += ':';
        out += member.value;
        out += ',';
    }
    if (!added.empty()) {
        out += added;
    } else if (out.size() > 1) {
        out.pop_back();
    }
    out += '}';
    return out;
}

}  // namespace laya
