// Owns: recognising the plainest HTTP/1.1 messages: a request to an inference path and an answer with a length that are
// whole in one piece of bytes, and the head of a stream. What is not plain is not refused here: `false` leaves it to the
// full parser, whose verdict stands. So this may only accept what the full parser reads in the very same way.
#pragma once

#include <cstdint>
#include <string_view>

namespace laya {

struct PlainRequest {
    std::uint8_t kind = 0;  // laya.types.EndpointKind
    std::string_view body;
    std::string_view host;
    std::string_view authorization;  // each empty where the request has none
    std::string_view request_id;
    std::string_view session_id;
};

struct PlainAnswer {
    std::string_view content_type;
    std::string_view body;
};

// Whether `data` is exactly one plain POST to an inference path, with its whole body of at most `most_body_bytes`.
bool read_plain_request(std::string_view data, std::size_t most_body_bytes, PlainRequest& out) noexcept;

// Whether `data` is exactly one whole answer with status 200 and a length, after which the connection stays open.
bool read_plain_answer(std::string_view data, PlainAnswer& out) noexcept;

// The size of the head that `data` begins with, of a chunked stream of events with status 200, after which the
// connection stays open; 0 where it is no such head.
std::size_t read_stream_head(std::string_view data) noexcept;

}  // namespace laya
