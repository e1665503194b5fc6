// Owns: streams on their way from an engine's socket to a client's, on a thread of its own, which knows no Python and
// waits for nobody: the head, tokens, the end. Works on duplicates of both sockets, so that a number that is closed and
// used again elsewhere is never written to. Whatever is not plain goes back to the full way, from the last chunk boundary on.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "stream_flow.hpp"

namespace laya {

class StreamPump {
  public:
    StreamPump();
    ~StreamPump();
    StreamPump(const StreamPump&) = delete;
    StreamPump& operator=(const StreamPump&) = delete;

    // Readable when streams have left: then call `leavers`.
    int fd() const noexcept { return left_fd_; }

    // Gives the id, 0 where the system refuses. Throws std::system_error where there can be no thread.
    std::uint64_t add(int engine, int client, StreamFlow::Start start);

    // Have a stream back now; nothing more of it is read or written. False where it was not here.
    bool remove(std::uint64_t id, StreamBack& back);

    // Return when what was read of a stream by now is passed on: if its end was, it has left.
    void await_step(std::uint64_t id) const;

    // Those that have left since the last call.
    std::vector<StreamBack> leavers();

    // When its first token went through, 0 before.
    double first_token_s(std::uint64_t id) const;

    std::uint64_t n_pieces() const noexcept { return n_pieces_.load(std::memory_order_relaxed); }  // written to clients

  private:
    struct Stream;
    struct Step;
    using Clock = std::chrono::steady_clock;

    void run();
    bool relay(std::uint64_t id);
    void leave(std::uint64_t id, Stream& stream, const Step& last);
    Step step(Stream& stream);
    std::shared_ptr<Stream> find(std::uint64_t id) const;

    const int epoll_;
    const int stop_fd_;
    const int left_fd_;
    std::atomic<std::uint64_t> n_pieces_{0};

    mutable std::mutex mutex_;  // of what follows; taken inside a stream's own, never around it
    std::uint64_t last_id_ = 0;
    std::unordered_map<std::uint64_t, std::shared_ptr<Stream>> streams_;
    std::vector<StreamBack> left_;
    std::thread thread_;

    // of the thread alone
    std::vector<char> buffer_;
    std::string framed_;
};

}  // namespace laya
