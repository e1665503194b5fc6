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
#include <charconv>
#include <csignal>

#include "plain_http.hpp"
#include "system_call.hpp"

namespace laya {
namespace {

constexpr std::size_t READ_BYTES = 64 * 1024;
constexpr int EVENTS_A_ROUND = 64;
constexpr std::uint64_t STOP = 0;  // no stream's id

// Rounds of tokens follow each other no closer: what comes meanwhile is read, and written, together. A lone token never
// waits.
constexpr std::chrono::microseconds ROUND_TIME{100};

double seconds(std::chrono::steady_clock::time_point at) {
    return std::chrono::duration<double>(at.time_since_epoch()).count();
}

void ring(int fd) noexcept {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = write(fd, &one, sizeof one);  // it fails only where it is rung already
}

// A number of bytes as a chunk's size line, then the bytes.
void append_chunk(std::string& out, std::string_view data) {
    char size[20];
    const auto written = std::to_chars(size, size + sizeof size, data.size(), 16);
    out.append(size, written.ptr).append("\r\n").append(data).append("\r\n");
}

}  // namespace

struct StreamPump::Stream {
    explicit Stream(Start start) : start(std::move(start)) { seen.has_started = this->start.has_started; }
    ~Stream() {
        for (const int fd : {engine, client}) {
            if (fd >= 0) {
                close(fd);
            }
        }
    }

    std::mutex mutex;  // of what follows
    Start start;
    int engine = -1;  // duplicates
    int client = -1;
    bool is_over = false;
    bool is_head_sent = false;
    bool has_head = false;    // the engine's
    std::string engine_head;  // for the full way's parser
    std::string held;         // the beginning of a chunk
    StreamSeen seen;
    std::atomic<double> first_token_s{0};
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

std::uint64_t StreamPump::add(Start start) {
    const auto stream = std::make_shared<Stream>(std::move(start));
    stream->engine = fcntl(stream->start.engine, F_DUPFD_CLOEXEC, 0);
    stream->client = fcntl(stream->start.client, F_DUPFD_CLOEXEC, 0);
    stream->has_head = !stream->start.from_head;
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
    return stream == nullptr ? 0 : stream->first_token_s.load(std::memory_order_relaxed);
}

bool StreamPump::remove(std::uint64_t id, Back& back) {
    if (const auto stream = find(id)) {
        const std::lock_guard lock(stream->mutex);
        if (!stream->is_over) {
            leave(id, *stream, back);
        }
    }
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(left_.begin(), left_.end(), [&](const Back& each) { return each.id == id; });
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

std::vector<StreamPump::Back> StreamPump::leavers() {
    std::uint64_t n_rung = 0;
    [[maybe_unused]] const ssize_t n = read(left_fd_, &n_rung, sizeof n_rung);
    std::vector<Back> left;
    const std::lock_guard lock(mutex_);
    left.swap(left_);
    return left;
}

// The stream's mutex is held: whoever has it next finds the stream over, and where it went.
void StreamPump::leave(std::uint64_t id, Stream& stream, Back& back) {
    stream.is_over = true;
    epoll_ctl(epoll_, EPOLL_CTL_DEL, stream.engine, nullptr);
    close(stream.engine);
    close(stream.client);
    stream.engine = stream.client = -1;
    back.id = id;
    back.seen = stream.seen;
    back.is_head_sent = stream.is_head_sent;
    back.first_token_s = stream.first_token_s.load(std::memory_order_relaxed);
    back.is_clean = stream.held.empty();
    back.raw = std::move(stream.engine_head);
    back.raw.append(stream.held);
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
    const bool had_head = stream->has_head;
    Back back;
    if (!stream->is_over && !step(*stream, back)) {
        leave(id, *stream, back);
        ring(left_fd_);
        return false;
    }
    return had_head;
}

// One read and at most one write. False where the stream is to leave.
bool StreamPump::step(Stream& stream, Back& back) {
    const ssize_t n_read = recv(stream.engine, buffer_.data(), buffer_.size(), MSG_DONTWAIT);
    if (n_read <= 0) {
        back.error = n_read < 0 ? errno : 0;
        return n_read < 0 && (errno == EAGAIN || errno == EINTR);
    }
    std::string_view raw(buffer_.data(), static_cast<std::size_t>(n_read));
    const bool was_held = !stream.held.empty();
    if (was_held) {
        stream.held.append(raw);
        raw = stream.held;
    }
    std::size_t n_head = 0;
    if (!stream.has_head) {
        n_head = read_stream_head(raw);
        if (n_head == 0) {
            stream.held.assign(raw);
            return false;
        }
        stream.has_head = true;
        stream.engine_head.assign(raw.substr(0, n_head));
    }
    events_.clear();
    Cut cut = Cut::MORE;
    const std::size_t n_cut =
        n_head + cut_chunks(raw.substr(n_head), stream.start.takes_end, stream.seen, events_, cut);
    if (was_held) {
        stream.held.erase(0, n_cut);
    } else {
        stream.held.assign(raw.substr(n_cut));
    }
    return pass_on(stream, cut, back);
}

// Write what was read; false where the stream is to leave.
bool StreamPump::pass_on(Stream& stream, Cut cut, Back& back) {
    framed_.clear();
    back.is_ended = cut == Cut::END;
    if (back.is_ended) {
        events_.append("data: [DONE]\n\n");
    }
    if (!events_.empty()) {
        if (!stream.is_head_sent) {
            framed_.append(stream.start.client_head);
        }
        append_chunk(framed_, events_);
        if (back.is_ended) {
            framed_.append("0\r\n\r\n");
        }
        if (!stream.start.has_started && stream.first_token_s.load(std::memory_order_relaxed) == 0) {
            stream.first_token_s.store(seconds(Clock::now()), std::memory_order_relaxed);
        }
        const ssize_t n_sent = send(stream.client, framed_.data(), framed_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        stream.is_head_sent = true;
        n_pieces_.fetch_add(1, std::memory_order_relaxed);
        const auto sent = static_cast<std::size_t>(std::max<ssize_t>(n_sent, 0));
        if (sent < framed_.size()) {  // the client reads slowly, or is gone
            back.unsent = framed_.substr(sent);
            return false;
        }
    }
    return cut == Cut::MORE;
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
