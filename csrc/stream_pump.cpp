#include "stream_pump.hpp"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <system_error>

namespace laya {
namespace {

constexpr std::size_t READ_BYTES = 64 * 1024;
constexpr std::size_t MOST_CHUNK_BYTES = 256 * 1024;
constexpr std::size_t MOST_SIZE_LINE_BYTES = 16;
constexpr int EVENTS_A_ROUND = 64;
constexpr int ROUNDS_A_TURN = 8;  // then others have their turn

// The first character behind `name` and blanks, a colon and blanks; 0 where that is not what follows.
char value_after(std::string_view text, std::size_t at) noexcept {
    const auto skip = [&] {
        while (at < text.size() && (text[at] == ' ' || text[at] == '\t' || text[at] == '\n')) {
            ++at;
        }
    };
    skip();
    if (at >= text.size() || text[at] != ':') {
        return '\0';
    }
    ++at;
    skip();
    return at < text.size() ? text[at] : '\0';
}

bool has_member(std::string_view text, std::string_view key, char value) noexcept {
    for (std::size_t at = text.find(key); at != std::string_view::npos; at = text.find(key, at + 1)) {
        const char found = value_after(text, at + key.size());
        if (found != '\0' && (value == '\0' || found == value)) {
            return true;
        }
    }
    return false;
}

}  // namespace

bool has_stream_mark(std::string_view events) noexcept {
    if (events.size() < 2 || events.substr(events.size() - 2) != "\n\n" ||
        events.find('\r') != std::string_view::npos || events.find("\"prompt_progress\"") != std::string_view::npos ||
        has_member(events, "\"usage\"", '{') || has_member(events, "\"error\"", '\0')) {
        return true;
    }
    for (std::size_t at = events.find("data:"); at != std::string_view::npos; at = events.find("data:", at + 1)) {
        std::size_t value = at + 5;
        while (value < events.size() && events[value] == ' ') {
            ++value;
        }
        if (value < events.size() && (events[value] == '[' || events[value] == 'n')) {
            return true;
        }
    }
    return false;
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

std::size_t cut_chunks(std::string_view raw, std::string& events, bool& is_good) {
    std::size_t at = 0;
    is_good = true;
    while (at < raw.size()) {
        const std::size_t line_end = raw.substr(0, at + MOST_SIZE_LINE_BYTES).find("\r\n", at);
        if (line_end == std::string_view::npos) {
            is_good = raw.size() - at < MOST_SIZE_LINE_BYTES;
            return at;
        }
        std::size_t size = 0;
        const auto number = std::from_chars(raw.data() + at, raw.data() + line_end, size, 16);
        is_good = number.ec == std::errc() && number.ptr == raw.data() + line_end && size > 0 && size <= MOST_CHUNK_BYTES;
        const std::size_t start = line_end + 2;
        if (!is_good || raw.size() < start + size + 2) {
            return at;
        }
        // Only chunks that end where an event ends are relayed: the full way can take over behind each of them.
        const std::string_view piece = raw.substr(start, size);
        is_good = raw.substr(start + size, 2) == "\r\n" && !has_stream_mark(piece);
        if (!is_good) {
            return at;
        }
        events.append(piece);
        at = start + size + 2;
    }
    return at;
}

StreamPump::StreamPump() : buffer_(READ_BYTES), epoll_(epoll_create1(EPOLL_CLOEXEC)) {
    if (epoll_ < 0) {
        throw std::system_error(errno, std::generic_category(), "epoll_create1");
    }
}

StreamPump::~StreamPump() {
    for (auto& [id, stream] : streams_) {
        close(stream.engine);
        close(stream.client);
    }
    close(epoll_);
}

std::uint64_t StreamPump::add(int engine, int client) {
    Stream stream;
    stream.engine = fcntl(engine, F_DUPFD_CLOEXEC, 0);
    stream.client = fcntl(client, F_DUPFD_CLOEXEC, 0);
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    event.data.u64 = last_id_ + 1;
    if (stream.engine < 0 || stream.client < 0 || epoll_ctl(epoll_, EPOLL_CTL_ADD, stream.engine, &event) < 0) {
        for (const int fd : {stream.engine, stream.client}) {
            if (fd >= 0) {
                close(fd);
            }
        }
        return 0;
    }
    streams_.emplace(++last_id_, std::move(stream));
    return last_id_;
}

StreamPump::Returned StreamPump::remove(std::uint64_t id) {
    Returned back;
    back.id = id;
    const auto found = streams_.find(id);
    if (found != streams_.end()) {
        epoll_ctl(epoll_, EPOLL_CTL_DEL, found->second.engine, nullptr);
        close(found->second.engine);
        close(found->second.client);
        back.raw = std::move(found->second.held);
        streams_.erase(found);
    }
    return back;
}

// One read and at most one write. False where the stream is to go back.
bool StreamPump::relay(Stream& stream, Returned& back) {
    const ssize_t n_read = recv(stream.engine, buffer_.data(), buffer_.size(), MSG_DONTWAIT);
    if (n_read < 0 && (errno == EAGAIN || errno == EINTR)) {
        return true;
    }
    if (n_read <= 0) {
        return false;  // the end, or an error: the full way sees it too
    }
    std::string_view raw(buffer_.data(), static_cast<std::size_t>(n_read));
    const bool was_held = !stream.held.empty();
    if (was_held) {
        stream.held.append(raw);
        raw = stream.held;
    }
    events_.clear();
    bool is_good = true;
    const std::size_t n_cut = cut_chunks(raw, events_, is_good);
    if (was_held) {
        stream.held.erase(0, n_cut);
    } else {
        stream.held.assign(raw.substr(n_cut));
    }
    if (events_.empty()) {
        return is_good;
    }
    char size[20];
    const auto written = std::to_chars(size, size + sizeof size, events_.size(), 16);
    framed_.assign(size, written.ptr);
    framed_.append("\r\n").append(events_).append("\r\n");
    const ssize_t n_sent = send(stream.client, framed_.data(), framed_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    ++n_pieces_;
    const std::size_t sent = static_cast<std::size_t>(n_sent > 0 ? n_sent : 0);
    if (sent < framed_.size()) {  // the client reads slowly, or is gone
        back.unsent = framed_.substr(sent);
        return false;
    }
    return is_good;
}

std::vector<StreamPump::Returned> StreamPump::turn() {
    std::vector<Returned> returned;
    epoll_event events[EVENTS_A_ROUND];
    for (int round = 0; round < ROUNDS_A_TURN; ++round) {
        const int n_events = epoll_wait(epoll_, events, EVENTS_A_ROUND, 0);
        for (int index = 0; index < n_events; ++index) {
            const std::uint64_t id = events[index].data.u64;
            Returned back;
            if (relay(streams_.at(id), back)) {
                continue;
            }
            std::string unsent = std::move(back.unsent);
            back = remove(id);
            back.unsent = std::move(unsent);
            returned.push_back(std::move(back));
        }
        if (n_events <= 0) {
            break;
        }
    }
    return returned;
}

}  // namespace laya
