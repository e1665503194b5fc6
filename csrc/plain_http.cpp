#include "plain_http.hpp"

#include <array>
#include <cstring>

namespace laya {
namespace {

constexpr std::size_t MOST_HEAD_BYTES = 8192;
constexpr std::size_t MOST_REQUEST_ID_BYTES = 128;  // longer ones are replaced, by the full way

constexpr std::array<std::string_view, 3> STARTS = {
    "POST /v1/chat/completions HTTP/1.1\r\n",
    "POST /v1/completions HTTP/1.1\r\n",
    "POST /v1/embeddings HTTP/1.1\r\n",
};

constexpr std::array<char, 256> make_name_table() {
    std::array<char, 256> table{};
    for (int c = 'a'; c <= 'z'; ++c) {
        table[static_cast<std::size_t>(c)] = static_cast<char>(c);
        table[static_cast<std::size_t>(c - 'a' + 'A')] = static_cast<char>(c);
    }
    for (int c = '0'; c <= '9'; ++c) {
        table[static_cast<std::size_t>(c)] = static_cast<char>(c);
    }
    table['-'] = '-';
    table['_'] = '_';
    return table;
}
// The character in lower case, or 0 for one that no plain header name has.
constexpr std::array<char, 256> NAME = make_name_table();

bool equals_lower(std::string_view text, std::string_view lower) noexcept {
    if (text.size() != lower.size()) {
        return false;
    }
    for (std::size_t i = 0; i < text.size(); ++i) {
        if (NAME[static_cast<unsigned char>(text[i])] != lower[i]) {
            return false;
        }
    }
    return true;
}

// One "name: value\r\n" at `at`, which is moved behind it. False for what is not plain.
bool read_header(std::string_view data, std::size_t& at, std::string_view& name, std::string_view& value) noexcept {
    const std::size_t start = at;
    while (at < data.size() && NAME[static_cast<unsigned char>(data[at])] != 0) {
        ++at;
    }
    if (at == start || at >= data.size() || data[at] != ':') {
        return false;
    }
    name = data.substr(start, at - start);
    ++at;
    while (at < data.size() && data[at] == ' ') {
        ++at;
    }
    const std::size_t first = at;
    while (at < data.size() && data[at] >= 0x20 && data[at] < 0x7f) {  // a signed char above 0x7f is negative
        ++at;
    }
    value = data.substr(first, at - first);
    if (at + 1 >= data.size() || data[at] != '\r' || data[at + 1] != '\n' || (!value.empty() && value.back() == ' ')) {
        return false;
    }
    at += 2;
    return true;
}

bool read_length(std::string_view value, std::size_t& length) noexcept {
    if (value.empty() || value.size() > 9) {
        return false;
    }
    length = 0;
    for (const char digit : value) {
        if (digit < '0' || digit > '9') {
            return false;
        }
        length = length * 10 + static_cast<std::size_t>(digit - '0');
    }
    return true;
}

// A second header of a name is for the full parser to judge.
bool set_once(std::string_view& field, std::string_view value) noexcept {
    if (field.data() != nullptr || value.empty()) {
        return false;
    }
    field = value;
    return true;
}

bool is_blank_line(std::string_view data, std::size_t at) noexcept {
    return at + 1 < data.size() && data[at] == '\r' && data[at + 1] == '\n';
}

bool take_request_header(std::string_view name, std::string_view value, PlainRequest& out,
                         std::string_view& length) noexcept {
    switch (name.size()) {
        case 2:
            return !equals_lower(name, "te");
        case 4:
            return !equals_lower(name, "host") || set_once(out.host, value);
        case 6:
            return !equals_lower(name, "expect") && !equals_lower(name, "origin");
        case 7:
            return !equals_lower(name, "upgrade") && !equals_lower(name, "trailer");
        case 10:
            return !equals_lower(name, "connection") || equals_lower(value, "keep-alive");
        case 12:
            if (equals_lower(name, "x-session-id")) {
                return set_once(out.session_id, value);
            }
            if (equals_lower(name, "x-request-id")) {
                return value.size() <= MOST_REQUEST_ID_BYTES && set_once(out.request_id, value);
            }
            return !equals_lower(name, "x-laya-model");
        case 13:
            return !equals_lower(name, "authorization") || set_once(out.authorization, value);
        case 14:
            return !equals_lower(name, "content-length") || set_once(length, value);
        case 15:
            return !equals_lower(name, "x-laya-priority");
        case 16:
            return !equals_lower(name, "proxy-connection");
        case 17:
            return !equals_lower(name, "transfer-encoding");
        default:
            return true;
    }
}

// The bytes of a plain status line with status 200; 0 for any other.
std::size_t status_line_bytes(std::string_view data) noexcept {
    constexpr std::string_view START = "HTTP/1.1 200 ";
    if (data.substr(0, START.size()) != START) {
        return 0;
    }
    const std::size_t line_end = data.find("\r\n");
    if (line_end == std::string_view::npos || line_end > 64) {
        return 0;
    }
    for (std::size_t i = START.size(); i < line_end; ++i) {
        if (NAME[static_cast<unsigned char>(data[i])] == 0 && data[i] != ' ') {
            return 0;
        }
    }
    return line_end + 2;
}

}  // namespace

bool read_plain_request(std::string_view data, std::size_t most_body_bytes, PlainRequest& out) noexcept {
    std::size_t at = 0;
    for (std::size_t kind = 0; kind < STARTS.size(); ++kind) {
        if (data.substr(0, STARTS[kind].size()) == STARTS[kind]) {
            out.kind = static_cast<std::uint8_t>(kind + 1);
            at = STARTS[kind].size();
            break;
        }
    }
    if (at == 0) {
        return false;
    }
    std::string_view name, value, length_text;
    while (!is_blank_line(data, at)) {
        if (!read_header(data, at, name, value) || at > MOST_HEAD_BYTES ||
            !take_request_header(name, value, out, length_text)) {
            return false;
        }
    }
    std::size_t length = 0;
    if (!read_length(length_text, length) || length > most_body_bytes || data.size() - at - 2 != length) {
        return false;
    }
    out.body = data.substr(at + 2);
    return true;
}

bool read_plain_answer(std::string_view data, PlainAnswer& out) noexcept {
    std::size_t at = status_line_bytes(data);
    if (at == 0) {
        return false;
    }
    std::string_view name, value, length_text;
    while (!is_blank_line(data, at)) {
        if (!read_header(data, at, name, value) || at > MOST_HEAD_BYTES) {
            return false;
        }
        bool plain = true;
        if (equals_lower(name, "content-length")) {
            plain = set_once(length_text, value);
        } else if (equals_lower(name, "content-type")) {
            plain = set_once(out.content_type, value);
        } else if (equals_lower(name, "connection")) {
            plain = equals_lower(value, "keep-alive");
        } else {
            plain = !equals_lower(name, "transfer-encoding") && !equals_lower(name, "upgrade") &&
                    !equals_lower(name, "trailer") && !equals_lower(name, "proxy-connection");
        }
        if (!plain) {
            return false;
        }
    }
    std::size_t length = 0;
    if (!read_length(length_text, length) || data.size() - at - 2 != length) {
        return false;
    }
    out.body = data.substr(at + 2);
    return true;
}

std::size_t read_stream_head(std::string_view data) noexcept {
    std::size_t at = status_line_bytes(data);
    if (at == 0) {
        return 0;
    }
    std::string_view name, value, coding, type;
    while (!is_blank_line(data, at)) {
        if (!read_header(data, at, name, value) || at > MOST_HEAD_BYTES) {
            return 0;
        }
        bool plain = true;
        if (equals_lower(name, "transfer-encoding")) {
            plain = set_once(coding, value) && equals_lower(value, "chunked");
        } else if (equals_lower(name, "content-type")) {
            plain = set_once(type, value);
        } else if (equals_lower(name, "connection")) {
            plain = equals_lower(value, "keep-alive");
        } else {
            plain = !equals_lower(name, "content-length") && !equals_lower(name, "content-encoding") &&
                    !equals_lower(name, "upgrade") && !equals_lower(name, "trailer") &&
                    !equals_lower(name, "proxy-connection");
        }
        if (!plain) {
            return 0;
        }
    }
    constexpr std::string_view EVENTS = "text/event-stream";
    return coding.empty() || type.substr(0, EVENTS.size()) != EVENTS ? 0 : at + 2;
}

}  // namespace laya
