#include "express_watch.hpp"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <array>

#include "system_call.hpp"

namespace laya {
namespace {

constexpr int EVENTS_A_LOOK = 64;
constexpr std::uint64_t STREAMS = ~std::uint64_t{0};  // the ids of no socket
constexpr std::uint64_t TIMER = STREAMS - 1;
constexpr long ROUND_NS = 100'000;  // rounds follow each other no closer

int control(int epoll, int operation, int fd, std::uint64_t id, std::uint32_t events) noexcept {
    epoll_event event{};
    event.events = events;
    event.data.u64 = id;
    return epoll_ctl(epoll, operation, fd, &event);
}

void ids_of(int epoll, ExpressWatch::Ids& ids) {
    std::array<epoll_event, EVENTS_A_LOOK> events;
    const int n_events = epoll_wait(epoll, events.data(), EVENTS_A_LOOK, 0);
    ids.clear();
    for (int index = 0; index < n_events; ++index) {
        ids.push_back(events[static_cast<std::size_t>(index)].data.u64);
    }
}

}  // namespace

ExpressWatch::ExpressWatch()
    : all_(checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      of_streams_(checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      timer_(checked(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK), "timerfd_create")) {
    checked(control(all_, EPOLL_CTL_ADD, of_streams_, STREAMS, EPOLLIN | EPOLLONESHOT), "epoll_ctl");
    // each time it ends is told once, and need not be read
    checked(control(all_, EPOLL_CTL_ADD, timer_, TIMER, EPOLLIN | EPOLLET), "epoll_ctl");
}

ExpressWatch::~ExpressWatch() {
    for (const int fd : {timer_, of_streams_, all_}) {
        close(fd);
    }
}

int ExpressWatch::add(int fd, std::uint64_t id) noexcept {
    const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own >= 0 && control(all_, EPOLL_CTL_ADD, own, id, EPOLLIN | EPOLLRDHUP) < 0) {
        close(own);
        return -1;
    }
    return own;
}

void ExpressWatch::set_stream(int own, std::uint64_t id, bool is_stream) {
    epoll_ctl(is_stream ? all_ : of_streams_, EPOLL_CTL_DEL, own, nullptr);
    checked(control(is_stream ? of_streams_ : all_, EPOLL_CTL_ADD, own, id, EPOLLIN | EPOLLRDHUP), "epoll_ctl");
}

// A socket stays in an epoll until each of its descriptors is closed, and the transport has one.
void ExpressWatch::drop(int own, bool is_stream) noexcept {
    epoll_ctl(is_stream ? of_streams_ : all_, EPOLL_CTL_DEL, own, nullptr);
    close(own);
}

void ExpressWatch::look() {
    ids_of(all_, ready_);
    has_round_ = std::erase_if(ready_, [](std::uint64_t id) { return id == STREAMS || id == TIMER; }) > 0;
    streams_.clear();
    if (has_round_) {
        ids_of(of_streams_, streams_);
    }
}

void ExpressWatch::end_round(bool is_flowing) {
    if (is_flowing) {
        const itimerspec round{{0, 0}, {0, ROUND_NS}};
        checked(timerfd_settime(timer_, 0, &round, nullptr), "timerfd_settime");
    } else {
        checked(control(all_, EPOLL_CTL_MOD, of_streams_, STREAMS, EPOLLIN | EPOLLONESHOT), "epoll_ctl");
    }
}

}  // namespace laya
