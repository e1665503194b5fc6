// Owns: TCP on loopback for what the bench runs: an engine, a relay, a load.
#pragma once

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cstdint>

#include "system_call.hpp"

namespace laya {

inline sockaddr_in loopback(std::uint16_t port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(port);
    return address;
}

inline void write_at_once(int fd) {
    const int yes = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
}

// Binds the socket to a free port and gives it.
inline std::uint16_t listen_on_free_port(int fd) {
    sockaddr_in address = loopback(0);
    socklen_t size = sizeof address;
    checked(bind(fd, reinterpret_cast<sockaddr*>(&address), size), "bind");
    checked(listen(fd, 1024), "listen");
    checked(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size), "getsockname");
    return ntohs(address.sin_port);
}

inline int connect_to(std::uint16_t port) {
    const int fd = checked(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "socket");
    const sockaddr_in address = loopback(port);
    checked(connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), "connect");
    write_at_once(fd);
    return fd;
}

inline void watch(int epoll, int fd, std::uint32_t what, int operation = EPOLL_CTL_ADD) {
    epoll_event event{};
    event.events = what;
    event.data.fd = fd;
    checked(epoll_ctl(epoll, operation, fd, &event), "epoll_ctl");
}

}  // namespace laya
