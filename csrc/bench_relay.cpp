#include "bench_relay.hpp"

#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>

#include "loopback.hpp"

namespace laya {
namespace {

constexpr std::size_t READ_BYTES = 64 * 1024;
constexpr int EVENTS_A_ROUND = 64;

}  // namespace

BareRelay::BareRelay(std::uint16_t engine_port)
    : engine_port_(engine_port),
      listener_(checked(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), "socket")),
      epoll_(checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      port_(listen_on_free_port(listener_)),
      buffer_(READ_BYTES) {
    watch(epoll_, listener_, EPOLLIN);
}

BareRelay::~BareRelay() {
    for (const auto& [fd, other] : other_) {
        close(fd);
    }
    close(listener_);
    close(epoll_);
}

void BareRelay::run() {
    std::array<epoll_event, EVENTS_A_ROUND> events;
    while (true) {
        const int n_events = epoll_wait(epoll_, events.data(), EVENTS_A_ROUND, -1);
        if (n_events < 0) {
            return;
        }
        for (int index = 0; index < n_events; ++index) {
            const int fd = events[static_cast<std::size_t>(index)].data.fd;
            if (fd == listener_) {
                accept_one();
            } else if (const auto found = other_.find(fd); found != other_.end() && !pass_on(fd, found->second)) {
                drop(fd);
            }
        }
    }
}

void BareRelay::accept_one() {
    const int client = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (client < 0) {
        return;
    }
    write_at_once(client);
    const int engine = connect_to(engine_port_);
    other_.emplace(client, engine);
    other_.emplace(engine, client);
    watch(epoll_, client, EPOLLIN);
    watch(epoll_, engine, EPOLLIN);
}

// False where either end is done. Waits for the receiver, which reads by itself.
bool BareRelay::pass_on(int from, int to) {
    const ssize_t n_read = recv(from, buffer_.data(), buffer_.size(), MSG_DONTWAIT);
    if (n_read <= 0) {
        return n_read < 0 && (errno == EAGAIN || errno == EINTR);
    }
    return send(to, buffer_.data(), static_cast<std::size_t>(n_read), MSG_NOSIGNAL) == n_read;
}

void BareRelay::drop(int fd) {
    const int other = other_.at(fd);
    other_.erase(fd);
    other_.erase(other);
    close(fd);
    close(other);
}

}  // namespace laya
