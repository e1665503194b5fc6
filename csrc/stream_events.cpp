#include "stream_events.hpp"

#include <charconv>
#include <cstring>

namespace laya {
namespace {

constexpr std::size_t MOST_CHUNK_BYTES = 256 * 1024;
constexpr std::size_t MOST_SIZE_LINE_BYTES = 16;
constexpr std::string_view PROGRESS = "\"prompt_progress\"";
constexpr std::string_view USAGE = "\"usage\"";
constexpr std::string_view ERROR = "\"error\"";

bool is_blank(char letter) noexcept { return letter == ' ' || letter == '\t' || letter == '\n'; }

// Where the value behind a key begins, over blanks, a colon and blanks; npos where that is not what follows.
std::size_t value_after(std::string_view text, std::size_t at) noexcept {
    const auto skip = [&] {
        while (at < text.size() && is_blank(text[at])) {
            ++at;
        }
    };
    skip();
    if (at >= text.size() || text[at] != ':') {
        return std::string_view::npos;
    }
    ++at;
    skip();
    return at < text.size() ? at : std::string_view::npos;
}

bool begins(std::string_view text, std::size_t at, std::string_view with) noexcept {
    return text.size() - at >= with.size() && std::memcmp(text.data() + at, with.data(), with.size()) == 0;
}

// Whether the string that begins at a quote is a key that marks.
bool is_marking_key(std::string_view text, std::size_t at) noexcept {
    if (at + 1 >= text.size()) {
        return false;
    }
    switch (text[at + 1]) {
        case 'p':
            return begins(text, at, PROGRESS);
        case 'u': {
            const std::size_t value = begins(text, at, USAGE) ? value_after(text, at + USAGE.size()) : text.npos;
            return value != text.npos && text[value] == '{';
        }
        case 'e':
            return begins(text, at, ERROR) && value_after(text, at + ERROR.size()) != text.npos;
        default:
            return false;
    }
}

// Whether the colon is that of "data:" before "[DONE]" or "null".
bool is_marking_data(std::string_view text, std::size_t colon) noexcept {
    if (colon < 4 || std::memcmp(text.data() + colon - 4, "data", 4) != 0) {
        return false;
    }
    std::size_t value = colon + 1;
    while (value < text.size() && text[value] == ' ') {
        ++value;
    }
    return value < text.size() && (text[value] == '[' || text[value] == 'n');
}

// Whether a mark begins in these bytes of the events, or the last letter of its "data" lies there.
bool has_mark_between(std::string_view events, std::size_t at, std::size_t end) noexcept {
    for (; at < end; ++at) {
        const char letter = events[at];
        if (letter == '\r' || (letter == '"' && is_marking_key(events, at)) ||
            (letter == 'a' && at + 1 < events.size() && events[at + 1] == ':' && is_marking_data(events, at + 1))) {
            return true;
        }
    }
    return false;
}

using Block = std::uint8_t __attribute__((vector_size(16)));
constexpr std::size_t BLOCK_BYTES = sizeof(Block);

// Whether a block may hold the beginning of a mark, by each of its letters and the one behind it; most do not.
bool may_mark(const char* letters) noexcept {
    Block here, next;
    std::memcpy(&here, letters, BLOCK_BYTES);
    std::memcpy(&next, letters + 1, BLOCK_BYTES);
    const auto key = (here == '"') & ((next == 'p') | (next == 'u') | (next == 'e'));
    const auto found = key | (here == '\r') | ((here == 'a') & (next == ':'));
    std::uint64_t halves[2];
    std::memcpy(halves, &found, sizeof halves);
    return (halves[0] | halves[1]) != 0;
}

// The number behind a key of `text`; false where there is none.
bool number_of(std::string_view text, std::string_view key, std::uint64_t& number) noexcept {
    const std::size_t at = text.find(key);
    const std::size_t value = at == text.npos ? text.npos : value_after(text, at + key.size());
    return value != text.npos && std::from_chars(text.data() + value, text.data() + text.size(), number).ec == std::errc();
}

bool has_no_choices(std::string_view event) noexcept {
    constexpr std::string_view CHOICES = "\"choices\"";
    const std::size_t at = event.find(CHOICES);
    const std::size_t value = at == event.npos ? event.npos : value_after(event, at + CHOICES.size());
    return value != event.npos && begins(event, value, "[]");
}

std::size_t count(std::string_view text, std::string_view of) noexcept {
    std::size_t n = 0;
    for (std::size_t at = text.find(of); at != text.npos; at = text.find(of, at + of.size())) {
        ++n;
    }
    return n;
}

// A usage event without choices, the first one; its numbers are kept.
bool take_usage(std::string_view event, StreamSeen& seen) noexcept {
    const std::size_t at = event.find(USAGE);
    if (seen.has_usage || count(event, USAGE) != 1 || event.find(PROGRESS) != event.npos ||
        event.find(ERROR) != event.npos || !has_no_choices(event)) {
        return false;
    }
    const std::string_view usage = event.substr(at);
    seen.has_usage = number_of(usage, "\"prompt_tokens\"", seen.prompt_tokens) &&
                     number_of(usage, "\"completion_tokens\"", seen.completion_tokens);
    return seen.has_usage;
}

bool is_finished_prefill(std::string_view event) noexcept {
    const std::size_t at = event.find(PROGRESS);
    std::uint64_t total = 0, processed = 0;
    return at != event.npos && number_of(event.substr(at), "\"total\"", total) &&
           number_of(event.substr(at), "\"processed\"", processed) && total == processed &&
           event.find(ERROR) == event.npos && event.find(USAGE) == event.npos;
}

// One whole event. False where it is for the full way.
bool take_event(std::string_view event, bool takes_end, StreamSeen& seen, std::string& events) {
    if (seen.is_done || !begins(event, 0, "data:") || event.find('\r') != event.npos) {
        return false;
    }
    if (!has_stream_mark(event)) {
        const std::size_t value = event.find_first_not_of(' ', 5);
        if (!seen.has_started && event[value] != '{') {
            return false;
        }
        seen.has_started = true;
        events.append(event);
        return true;
    }
    if (!seen.has_started) {
        return is_finished_prefill(event);
    }
    if (takes_end && (event == "data: [DONE]\n\n" || event == "data:[DONE]\n\n")) {
        seen.is_done = true;
        return true;
    }
    return takes_end && take_usage(event, seen);
}

// The events of one chunk, all of them or none.
bool take_piece(std::string_view piece, bool takes_end, StreamSeen& seen, std::string& events) {
    if (seen.has_started && !seen.is_done && !has_stream_mark(piece)) {
        events.append(piece);
        return true;
    }
    const StreamSeen before = seen;
    const std::size_t n_before = events.size();
    for (std::size_t at = 0; at < piece.size();) {
        const std::size_t blank = piece.find("\n\n", at);
        const std::size_t end = blank == piece.npos ? piece.npos : blank + 2;
        if (end == piece.npos || !take_event(piece.substr(at, end - at), takes_end, seen, events)) {
            seen = before;
            events.resize(n_before);
            return false;
        }
        at = end;
    }
    return true;
}

}  // namespace

bool has_stream_mark(std::string_view events) noexcept {
    if (events.size() < 2 || events[events.size() - 1] != '\n' || events[events.size() - 2] != '\n') {
        return true;
    }
    std::size_t at = 0;
    for (; at + BLOCK_BYTES < events.size(); at += BLOCK_BYTES) {
        if (may_mark(events.data() + at) && has_mark_between(events, at, at + BLOCK_BYTES)) {
            return true;
        }
    }
    return has_mark_between(events, at, events.size());
}

std::vector<std::pair<bool, std::string_view>> stream_runs(std::string_view events) {
    std::vector<std::pair<bool, std::string_view>> runs;
    std::size_t run_start = 0, at = 0;
    while (at < events.size()) {
        const std::size_t blank = events.find("\n\n", at);
        const std::size_t end = blank == std::string_view::npos ? events.size() : blank + 2;
        if (has_stream_mark(events.substr(at, end - at))) {
            if (run_start < at) {
                runs.emplace_back(false, events.substr(run_start, at - run_start));
            }
            runs.emplace_back(true, events.substr(at, end - at));
            run_start = end;
        }
        at = end;
    }
    if (run_start < events.size()) {
        runs.emplace_back(false, events.substr(run_start));
    }
    return runs;
}

std::size_t cut_chunks(std::string_view raw, bool takes_end, StreamSeen& seen, std::string& events, Cut& cut) {
    std::size_t at = 0;
    cut = Cut::MORE;
    while (at < raw.size()) {
        const std::size_t line_end = raw.substr(0, at + MOST_SIZE_LINE_BYTES).find("\r\n", at);
        if (line_end == std::string_view::npos) {
            cut = raw.size() - at < MOST_SIZE_LINE_BYTES ? Cut::MORE : Cut::LEFT;
            return at;
        }
        std::size_t size = 0;
        const auto number = std::from_chars(raw.data() + at, raw.data() + line_end, size, 16);
        const std::size_t start = line_end + 2, end = start + size + 2;
        if (number.ec != std::errc() || number.ptr != raw.data() + line_end || size > MOST_CHUNK_BYTES ||
            (size == 0 && !seen.is_done)) {
            cut = Cut::LEFT;
            return at;
        }
        if (raw.size() < end) {
            return at;
        }
        // Only chunks that end where an event ends are taken: the full way can take over behind each of them.
        if (raw[end - 2] != '\r' || raw[end - 1] != '\n' ||
            (size > 0 && !take_piece(raw.substr(start, size), takes_end, seen, events))) {
            cut = Cut::LEFT;
            return at;
        }
        at = end;
        if (size == 0) {
            cut = Cut::END;
            return at;
        }
    }
    return at;
}

}  // namespace laya
