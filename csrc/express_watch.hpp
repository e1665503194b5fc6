// Owns: which of the express lane's sockets are ready. Those that streams come on are told in rounds: tokens that come
// close together are read, and written, together. A lone token never waits. Works on duplicates of the sockets.
#pragma once

#include <cstdint>
#include <vector>

namespace laya {

class ExpressWatch {
  public:
    using Ids = std::vector<std::uint64_t>;

    ExpressWatch();  // throws std::system_error where the system refuses
    ~ExpressWatch();
    ExpressWatch(const ExpressWatch&) = delete;
    ExpressWatch& operator=(const ExpressWatch&) = delete;

    int fd() const noexcept { return all_; }  // readable when `look` has something to tell

    // A watched duplicate of the socket, told by this id; -1 where the system refuses. No stream comes on it.
    int add(int fd, std::uint64_t id) noexcept;
    // Whether a stream comes on it from now on. Throws std::system_error where the system refuses.
    void set_stream(int own, std::uint64_t id, bool is_stream);
    // Close the duplicate.
    void drop(int own, bool is_stream) noexcept;

    // What is ready now: into `ready()`, and where it is time for a round of streams, into `streams()`.
    void look();
    const Ids& ready() const noexcept { return ready_; }
    const Ids& streams() const noexcept { return streams_; }
    bool has_round() const noexcept { return has_round_; }
    // The round that `look` told of is over. `is_flowing`: all of it goes on as it did, so that the next one can wait.
    void end_round(bool is_flowing);

  private:
    const int all_;
    const int of_streams_;  // in `all_` itself, but while the timer runs
    const int timer_;
    bool has_round_ = false;
    Ids ready_, streams_;
};

}  // namespace laya
