// Owns: one stream on its way from an engine to a client, as bytes: the engine's head is recognised, what is a client's
// goes on in Laya's own head and framing, what is not plain is kept, from the last chunk boundary on. Knows no socket.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "stream_events.hpp"

namespace laya {

// A stream that goes on elsewhere, or has ended.
struct StreamBack {
    std::uint64_t id = 0;
    bool is_ended = false;      // the client has all of it but `unsent`
    bool is_clean = false;      // and the engine sent nothing behind it
    bool is_head_sent = false;  // the client's head, or all of it but `unsent`
    int error = 0;              // errno of the engine's socket
    double first_token_s = 0;   // of the monotonic clock, 0 where it was not here
    StreamSeen seen;
    std::string raw;     // from the engine, with its head where that was read here, from a chunk boundary on
    std::string unsent;  // for the client, ready to be written before anything else
};

class StreamFlow {
  public:
    // How a stream begins.
    struct Start {
        bool from_head = false;   // the engine has sent nothing yet; otherwise its next byte is at a chunk boundary
        bool takes_end = false;   // usage and the end are kept from the client and ended here
        bool has_started = false; // its first token is with the client
        std::string client_head;  // written before the first event
    };

    explicit StreamFlow(Start start);

    // What came from the engine: what the client gets for it, ready to be written, is appended to `out`. LEFT: the full
    // way is to go on.
    Cut take(std::string_view raw, std::string& out);

    // The rest of it, for who goes on; its fields that tell of sockets are the caller's.
    StreamBack back();

    const StreamSeen& seen() const noexcept { return seen_; }
    bool has_engine_head() const noexcept { return has_engine_head_; }
    bool is_clean() const noexcept { return held_.empty(); }
    double first_token_s() const noexcept { return first_token_s_; }

  private:
    Start start_;
    bool has_engine_head_;
    bool is_head_sent_ = false;
    double first_token_s_ = 0;
    std::string engine_head_;  // for the full way's parser
    std::string held_;         // the beginning of a chunk
    std::string events_;
    StreamSeen seen_;
};

}  // namespace laya
