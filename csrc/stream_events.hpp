// Owns: what a stream of server-sent events says by its bytes alone: which events are a client's as they are, which are
// Laya's own, where the answer ends. Pure: bytes in, bytes out. What is not plain is left to the full way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace laya {

// Whether a piece of a stream needs to be looked at: progress, usage, an error, the end, or no whole events.
bool has_stream_mark(std::string_view events) noexcept;

// Whole events in runs: unmarked ones together, each marked one for itself.
std::vector<std::pair<bool, std::string_view>> stream_runs(std::string_view events);

// What of a stream has gone by.
struct StreamSeen {
    bool has_started = false;  // with the first token
    bool has_usage = false;
    bool is_done = false;  // [DONE]: the answer is whole
    std::uint64_t prompt_tokens = 0;
    std::uint64_t completion_tokens = 0;
};

enum class Cut { MORE, LEFT, END };  // all that is whole was taken; what follows is for the full way; the body ended

// Cuts a chunked body from a chunk boundary on: the events of whole chunks that are a client's are appended to `events`.
// Gives the bytes of `raw` that were taken. Progress of a prefill that is done and, where `takes_end`, the one usage
// event and the end are taken too, and kept from the client.
std::size_t cut_chunks(std::string_view raw, bool takes_end, StreamSeen& seen, std::string& events, Cut& cut);

}  // namespace laya
