#include "bench_http.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <memory>
#include <string_view>

#include "loopback.hpp"

namespace laya {
namespace {

constexpr std::size_t READ_BYTES = 64 * 1024;
constexpr int EVENTS_A_ROUND = 64;
constexpr int SILENCE_LIMIT_MS = 20'000;  // of a load whose answers do not come

// The value of content-length in a head, 0 where there is none.
std::size_t length_in(std::string_view head) {
    for (std::size_t at = head.find("\r\n"); at != std::string_view::npos; at = head.find("\r\n", at + 2)) {
        constexpr std::string_view NAME = "content-length:";
        std::string_view line = head.substr(at + 2, head.find("\r\n", at + 2) - at - 2);
        if (line.size() <= NAME.size() || strncasecmp(line.data(), NAME.data(), NAME.size()) != 0) {
            continue;
        }
        line.remove_prefix(NAME.size());
        line.remove_prefix(std::min(line.find_first_not_of(' '), line.size()));
        std::size_t value = 0;
        std::from_chars(line.data(), line.data() + line.size(), value);
        return value;
    }
    return 0;
}

}  // namespace

StubEngine::StubEngine(StubAnswers answers)
    : answers_(std::move(answers)),
      listener_(checked(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), "socket")),
      epoll_(checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      port_(listen_on_free_port(listener_)) {
    watch(epoll_, listener_, EPOLLIN);
}

StubEngine::~StubEngine() {
    for (const auto& [fd, connection] : connections_) {
        close(fd);
    }
    close(listener_);
    close(epoll_);
}

void StubEngine::run() {
    std::array<epoll_event, EVENTS_A_ROUND> events;
    while (true) {
        const int n_events = epoll_wait(epoll_, events.data(), EVENTS_A_ROUND, streaming_.empty() ? -1 : 0);
        if (n_events < 0) {
            return;
        }
        for (int index = 0; index < n_events; ++index) {
            const int fd = events[static_cast<std::size_t>(index)].data.fd;
            if (fd == listener_) {
                accept_all();
            } else if (const auto found = connections_.find(fd);
                       found != connections_.end() && !read(fd, found->second)) {
                drop(fd);
            }
        }
        step();
    }
}

void StubEngine::accept_all() {
    while (true) {
        const int fd = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            return;
        }
        write_at_once(fd);
        connections_.emplace(fd, Connection{});
        watch(epoll_, fd, EPOLLIN | EPOLLRDHUP);
    }
}

void StubEngine::drop(int fd) {
    std::erase(streaming_, fd);
    connections_.erase(fd);
    close(fd);
}

// False where the connection is done.
bool StubEngine::read(int fd, Connection& connection) {
    char buffer[READ_BYTES];
    const ssize_t n_read = recv(fd, buffer, sizeof buffer, MSG_DONTWAIT);
    if (n_read <= 0) {
        return n_read < 0 && (errno == EAGAIN || errno == EINTR);
    }
    connection.in.append(buffer, static_cast<std::size_t>(n_read));
    while (!connection.is_streaming) {
        const std::size_t head_end = connection.in.find("\r\n\r\n");
        if (head_end == std::string::npos) {
            return true;
        }
        const std::size_t size = head_end + 4 + length_in(std::string_view(connection.in).substr(0, head_end + 2));
        if (connection.in.size() < size) {
            return true;
        }
        if (!answer(fd, connection)) {
            return false;
        }
        connection.in.erase(0, size);
    }
    return true;
}

bool StubEngine::answer(int fd, Connection& connection) {
    const std::string_view request = connection.in;
    const std::string_view line = request.substr(0, request.find("\r\n"));
    if (line.substr(0, 4) == "GET ") {
        return write(fd, connection, answers_.alive);
    }
    if (line.find("input_tokens") != std::string_view::npos) {
        return write(fd, connection, answers_.count);
    }
    const bool is_stream = request.find("\"stream\":true") != std::string_view::npos ||
                           request.find("\"stream\": true") != std::string_view::npos;
    if (!is_stream) {
        return write(fd, connection, answers_.whole);
    }
    connection.is_streaming = true;
    connection.next_piece = 0;
    streaming_.push_back(fd);
    return true;
}

bool StubEngine::write(int fd, Connection& connection, const std::string& data) {
    const bool had_unsent = !connection.unsent.empty();
    const std::string_view left = had_unsent ? std::string_view(connection.unsent) : std::string_view(data);
    const ssize_t n_sent = send(fd, left.data(), left.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n_sent < 0 && errno != EAGAIN) {
        return false;
    }
    const auto sent = static_cast<std::size_t>(std::max<ssize_t>(n_sent, 0));
    if (had_unsent) {
        connection.unsent.erase(0, sent);
    } else {
        connection.unsent.assign(left.substr(sent));
    }
    return true;
}

// The next piece of each stream.
void StubEngine::step() {
    due_ = streaming_;
    for (const int fd : due_) {
        Connection& connection = connections_.at(fd);
        const bool was_behind = !connection.unsent.empty();
        if (!write(fd, connection, answers_.pieces[connection.next_piece])) {
            drop(fd);
            continue;
        }
        if (!was_behind) {
            ++connection.next_piece;
        }
        if (connection.next_piece == answers_.pieces.size() && connection.unsent.empty()) {
            connection.is_streaming = false;
            std::erase(streaming_, fd);
        }
    }
}

namespace {

// One answer, from its head to its end.
class AnswerParser {
  public:
    enum class Found { MORE, WHOLE, WRONG };

    AnswerParser(bool is_stream, std::size_t n_events) : is_stream_(is_stream), n_events_wanted_(n_events) {}

    Found feed(std::string_view data) {
        in_.append(data);
        if (!has_head_) {
            const std::size_t end = in_.find("\r\n\r\n");
            if (end == std::string::npos) {
                return Found::MORE;
            }
            const std::string_view head(in_.data(), end + 2);
            is_good_ = head.substr(0, 12) == "HTTP/1.1 200";
            is_chunked_ = std::search(head.begin(), head.end(), CHUNKED.begin(), CHUNKED.end(), same_letter) != head.end();
            n_left_ = is_chunked_ ? 0 : length_in(head);
            in_.erase(0, end + 4);
            has_head_ = true;
        }
        return is_chunked_ ? feed_chunks() : feed_whole();
    }

  private:
    static constexpr std::string_view CHUNKED = "transfer-encoding: chunked";
    static bool same_letter(char a, char b) { return (a | 0x20) == (b | 0x20); }

    Found feed_whole() {
        if (in_.size() < n_left_) {
            return Found::MORE;
        }
        body_.swap(in_);
        return end();
    }

    Found feed_chunks() {
        std::size_t at = 0;
        while (true) {
            const std::size_t line_end = in_.find("\r\n", at);
            if (line_end == std::string::npos) {
                break;
            }
            std::size_t size = 0;
            if (std::from_chars(in_.data() + at, in_.data() + line_end, size, 16).ec != std::errc()) {
                return Found::WRONG;
            }
            if (in_.size() < line_end + 2 + size + 2) {
                break;
            }
            if (size == 0) {
                return end();
            }
            take(std::string_view(in_).substr(line_end + 2, size));
            at = line_end + 2 + size + 2;
        }
        in_.erase(0, at);
        return Found::MORE;
    }

    // Counts a stream's events; keeps no more of it than its end.
    void take(std::string_view piece) {
        if (!is_stream_) {
            body_.append(piece);
            return;
        }
        for (std::size_t at = piece.find("data: "); at != std::string_view::npos; at = piece.find("data: ", at + 6)) {
            ++n_events_;
        }
        body_.append(piece);
        if (body_.size() > LAST.size()) {
            body_.erase(0, body_.size() - LAST.size());
        }
    }

    Found end() const {
        const bool is_right = is_stream_ ? body_ == LAST && n_events_ >= n_events_wanted_
                                         : body_.find("\"choices\":[{") != std::string::npos;
        return is_good_ && is_right ? Found::WHOLE : Found::WRONG;
    }

    static constexpr std::string_view LAST = "data: [DONE]\n\n";
    bool is_stream_;
    std::size_t n_events_wanted_;
    std::size_t n_events_ = 0;
    std::size_t n_left_ = 0;
    bool has_head_ = false;
    bool is_chunked_ = false;
    bool is_good_ = false;
    std::string in_;
    std::string body_;
};

using Clock = std::chrono::steady_clock;

class Load {
  public:
    Load(const std::string& request, std::size_t n_requests, bool is_stream, std::size_t n_events)
        : request_(request), n_left_(n_requests), fresh_(is_stream, n_events),
          epoll_(checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")) {
        run_.latencies_us.reserve(n_requests);
    }
    ~Load() {
        for (const auto& [fd, client] : clients_) {
            close(fd);
        }
        close(epoll_);
    }

    LoadRun drive(std::uint16_t port, std::size_t n_connections) {
        const auto start = Clock::now();
        for (std::size_t index = 0; index < n_connections && n_left_ > 0; ++index) {
            open(port);
        }
        std::array<epoll_event, EVENTS_A_ROUND> events;
        while (!clients_.empty()) {
            const int n_events = epoll_wait(epoll_, events.data(), EVENTS_A_ROUND, SILENCE_LIMIT_MS);
            if (n_events == 0 || (n_events < 0 && errno != EINTR)) {
                run_.n_failed += clients_.size();
                break;
            }
            for (int index = 0; index < n_events; ++index) {
                const int fd = events[static_cast<std::size_t>(index)].data.fd;
                if (!read(fd, clients_.at(fd))) {
                    clients_.erase(fd);
                    close(fd);
                }
            }
        }
        run_.seconds = std::chrono::duration<double>(Clock::now() - start).count();
        return std::move(run_);
    }

  private:
    struct Client {
        AnswerParser answer;
        Clock::time_point sent;
    };

    void open(std::uint16_t port) {
        const int fd = connect_to(port);
        const auto& client = clients_.emplace(fd, Client{fresh_, {}}).first;
        watch(epoll_, fd, EPOLLIN);
        ask(fd, client->second);
    }

    void ask(int fd, Client& client) {
        --n_left_;
        client.answer = fresh_;
        client.sent = Clock::now();
        if (send(fd, request_.data(), request_.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(request_.size())) {
            ++run_.n_failed;
        }
    }

    // False where the connection has no more to do.
    bool read(int fd, Client& client) {
        const ssize_t n_read = recv(fd, buffer_.data(), buffer_.size(), MSG_DONTWAIT);
        if (n_read < 0 && (errno == EAGAIN || errno == EINTR)) {
            return true;
        }
        if (n_read <= 0) {
            ++run_.n_failed;
            return false;
        }
        const auto found = client.answer.feed({buffer_.data(), static_cast<std::size_t>(n_read)});
        if (found == AnswerParser::Found::MORE) {
            return true;
        }
        run_.latencies_us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - client.sent).count());
        run_.n_failed += found == AnswerParser::Found::WRONG;
        if (n_left_ == 0 || found == AnswerParser::Found::WRONG) {
            return false;
        }
        ask(fd, client);
        return true;
    }

    const std::string& request_;
    std::size_t n_left_;
    const AnswerParser fresh_;
    int epoll_;
    LoadRun run_;
    std::unordered_map<int, Client> clients_;
    std::vector<char> buffer_ = std::vector<char>(READ_BYTES);
};

}  // namespace

LoadRun drive_load(std::uint16_t port, const std::string& request, std::size_t n_requests, std::size_t n_connections,
                   bool is_stream, std::size_t n_events) {
    return Load(request, n_requests, is_stream, n_events).drive(port, n_connections);
}

}  // namespace laya
