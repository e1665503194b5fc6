// Owns: the least that any relay can do, for the gateway bench: bytes from a client to the engine and back, unread. What
// it costs bounds what any gateway on these cores can reach. Knows no HTTP and no Python.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace laya {

class BareRelay {
  public:
    // Listens on loopback; each client gets a connection of its own to the engine. Throws std::system_error.
    explicit BareRelay(std::uint16_t engine_port);
    ~BareRelay();
    BareRelay(const BareRelay&) = delete;
    BareRelay& operator=(const BareRelay&) = delete;

    std::uint16_t port() const noexcept { return port_; }

    // Relay until a signal comes.
    void run();

  private:
    void accept_one();
    bool pass_on(int from, int to);
    void drop(int fd);

    std::uint16_t engine_port_;
    int listener_ = -1;
    int epoll_ = -1;
    std::uint16_t port_ = 0;
    std::unordered_map<int, int> other_;  // of each connection, the one that its bytes go to
    std::vector<char> buffer_;
};

}  // namespace laya
