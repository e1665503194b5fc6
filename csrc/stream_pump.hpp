// Owns: streams in their steady state: whole chunks of server-sent events from an engine's socket to a client's, looked
// at for marks and otherwise untouched. Works on duplicates of both sockets, so that a number that is closed and used
// again elsewhere is never written to. Whatever is not a whole unmarked event goes back to the full way, from the last
// chunk boundary on.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace laya {

// Whether a piece of a stream needs to be looked at: progress, usage, an error, the end, or no whole events.
bool has_stream_mark(std::string_view events) noexcept;

// Whole events in runs: unmarked ones together, each marked one for itself.
std::vector<std::pair<bool, std::string_view>> stream_runs(std::string_view events);

// Cuts a chunked body from a chunk boundary on: whole chunks of unmarked events are appended to `events`. Gives the bytes
// of `raw` that they took; `is_good` is false where what follows is for the full way.
std::size_t cut_chunks(std::string_view raw, std::string& events, bool& is_good);

class StreamPump {
  public:
    struct Returned {
        std::uint64_t id = 0;
        std::string raw;     // from the engine, from a chunk boundary on, not yet relayed
        std::string unsent;  // for the client, ready to be written before anything else
    };

    StreamPump();
    ~StreamPump();
    StreamPump(const StreamPump&) = delete;
    StreamPump& operator=(const StreamPump&) = delete;

    // Readable when there is something to do: then call `turn`.
    int fd() const noexcept { return epoll_; }

    // Relay from `engine` to `client` from a chunk boundary on. Gives the id, 0 where the system refuses.
    std::uint64_t add(int engine, int client);

    // Forget a stream; nothing more of it is read or written. Gives back what was read and not relayed.
    Returned remove(std::uint64_t id);

    // Relay what there is; streams that need the full way are removed and returned.
    std::vector<Returned> turn();

    std::size_t size() const noexcept { return streams_.size(); }
    std::uint64_t n_pieces() const noexcept { return n_pieces_; }  // written to clients, in all

  private:
    struct Stream {
        int engine = -1;
        int client = -1;
        std::string held;  // the beginning of a chunk
    };

    bool relay(Stream& stream, Returned& back);

    std::vector<char> buffer_;
    int epoll_ = -1;
    std::uint64_t last_id_ = 0;
    std::uint64_t n_pieces_ = 0;
    std::unordered_map<std::uint64_t, Stream> streams_;
    std::string events_;  // reused from piece to piece
    std::string framed_;
};

}  // namespace laya
