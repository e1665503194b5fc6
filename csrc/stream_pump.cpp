#include "stream_pump.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>

#include "system_call.hpp"

namespace laya {
namespace {

constexpr std::size_t READ_BYTES = 64 * 1024;
constexpr int EVENTS_A_ROUND = 64;
constexpr std::uint64_t STOP = 0;  // no stream's id

// Rounds of tokens follow each other no closer: what comes meanwhile is read, and written, together. A lone token never
// waits.
constexpr std::chrono::microseconds ROUND_TIME{100};

void ring(int fd) noexcept {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = write(fd, &one, sizeof one);  // it fails only where it is rung already
}

}  // namespace

struct StreamPump::Stream {
    explicit Stream(StreamFlow::Start start) : flow(std::move(start)) {}
    ~Stream() {
        for (const int fd : {engine, client}) {
            if (fd >= 0) {
                close(fd);
            }
        }
    }

    std::mutex mutex;  // of what follows
    StreamFlow flow;
    int engine = -1;  // duplicates
    int client = -1;
    bool is_over = false;
};

// What came of one read.
struct StreamPump::Step {
    Cut cut = Cut::MORE;
    int error = 0;
    std::string unsent;  // for a client that reads slowly, or is gone
};

StreamPump::StreamPump()
    : epoll_(checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      stop_fd_(checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")),
      left_fd_(checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")), buffer_(READ_BYTES) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = STOP;
    checked(epoll_ctl(epoll_, EPOLL_CTL_ADD, stop_fd_, &event), "epoll_ctl");
}

StreamPump::~StreamPump() {
    if (thread_.joinable()) {
        ring(stop_fd_);
        thread_.join();
    }
    streams_.clear();
    for (const int fd : {epoll_, stop_fd_, left_fd_}) {
        close(fd);
    }
}

std::uint64_t StreamPump::add(int engine, int client, StreamFlow::Start start) {
    const auto stream = std::make_shared<Stream>(std::move(start));
    stream->engine = fcntl(engine, F_DUPFD_CLOEXEC, 0);
    stream->client = fcntl(client, F_DUPFD_CLOEXEC, 0);
    if (stream->engine < 0 || stream->client < 0) {
        return 0;
    }
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable()) {
        sigset_t all, before;  // signals are for Python's thread
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        thread_ = std::thread([this] { run(); });
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
    const std::uint64_t id = ++last_id_;
    streams_.emplace(id, stream);
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    event.data.u64 = id;
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, stream->engine, &event) < 0) {
        streams_.erase(id);
        return 0;
    }
    return id;
}

std::shared_ptr<StreamPump::Stream> StreamPump::find(std::uint64_t id) const {
    const std::lock_guard lock(mutex_);
    const auto found = streams_.find(id);
    return found == streams_.end() ? nullptr : found->second;
}

double StreamPump::first_token_s(std::uint64_t id) const {
    const auto stream = find(id);
    if (stream == nullptr) {
        return 0;
    }
    const std::lock_guard lock(stream->mutex);
    return stream->flow.first_token_s();
}

bool StreamPump::remove(std::uint64_t id, StreamBack& back) {
    if (const auto stream = find(id)) {
        const std::lock_guard lock(stream->mutex);
        if (!stream->is_over) {
            leave(id, *stream, {});
        }
    }
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(left_.begin(), left_.end(), [&](const StreamBack& each) { return each.id == id; });
    if (found == left_.end()) {
        return false;
    }
    back = std::move(*found);
    left_.erase(found);
    return true;
}

void StreamPump::await_step(std::uint64_t id) const {
    if (const auto stream = find(id)) {
        const std::lock_guard lock(stream->mutex);
    }
}

std::vector<StreamBack> StreamPump::leavers() {
    std::uint64_t n_rung = 0;
    [[maybe_unused]] const ssize_t n = read(left_fd_, &n_rung, sizeof n_rung);
    std::vector<StreamBack> left;
    const std::lock_guard lock(mutex_);
    left.swap(left_);
    return left;
}

// The stream's mutex is held: whoever has it next finds the stream over, and where it went.
void StreamPump::leave(std::uint64_t id, Stream& stream, const Step& last) {
    stream.is_over = true;
    epoll_ctl(epoll_, EPOLL_CTL_DEL, stream.engine, nullptr);
    close(stream.engine);
    close(stream.client);
    stream.engine = stream.client = -1;
    StreamBack back = stream.flow.back();
    back.id = id;
    back.is_ended = last.cut == Cut::END;
    back.error = last.error;
    back.unsent = last.unsent;
    const std::lock_guard lock(mutex_);
    streams_.erase(id);
    left_.push_back(std::move(back));
}

// Whether it goes on as it did: neither began nor left.
bool StreamPump::relay(std::uint64_t id) {
    const auto stream = find(id);
    if (stream == nullptr) {
        return true;
    }
    const std::lock_guard lock(stream->mutex);
    const bool had_head = stream->flow.has_engine_head();
    if (stream->is_over) {
        return had_head;
    }
    const Step last = step(*stream);
    if (last.cut == Cut::MORE && last.error == 0 && last.unsent.empty()) {
        return had_head;
    }
    leave(id, *stream, last);
    ring(left_fd_);
    return false;
}

// One read and at most one write.
StreamPump::Step StreamPump::step(Stream& stream) {
    const ssize_t n_read = recv(stream.engine, buffer_.data(), buffer_.size(), MSG_DONTWAIT);
    if (n_read < 0 && (errno == EAGAIN || errno == EINTR)) {
        return {};
    }
    if (n_read <= 0) {
        return {Cut::LEFT, n_read < 0 ? errno : 0, {}};
    }
    framed_.clear();
    Step step;
    step.cut = stream.flow.take({buffer_.data(), static_cast<std::size_t>(n_read)}, framed_);
    if (!framed_.empty()) {
        const ssize_t n_sent = send(stream.client, framed_.data(), framed_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        n_pieces_.fetch_add(1, std::memory_order_relaxed);
        step.unsent = framed_.substr(static_cast<std::size_t>(std::max<ssize_t>(n_sent, 0)));
    }
    return step;
}

void StreamPump::run() {
    pthread_setname_np(pthread_self(), "laya-streams");
    prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);  // ns: the time between rounds is short
    std::array<epoll_event, EVENTS_A_ROUND> events;
    auto last_round = Clock::time_point{};
    while (true) {
        int n_events = epoll_wait(epoll_, events.data(), EVENTS_A_ROUND, -1);
        if (Clock::now() < last_round + ROUND_TIME) {
            std::this_thread::sleep_until(last_round + ROUND_TIME);
            n_events = epoll_wait(epoll_, events.data(), EVENTS_A_ROUND, 0);
        }
        last_round = Clock::now();
        for (int index = 0; index < n_events; ++index) {
            const std::uint64_t id = events[static_cast<std::size_t>(index)].data.u64;
            if (id == STOP) {
                return;
            }
            if (!relay(id)) {
                last_round = {};  // somebody waits for what comes next
            }
        }
    }
}

}  // namespace laya
