// Owns: both ends of the gateway bench, cheap enough that what stands between them is what is measured: an engine that
// thinks nothing, and a closed-loop load that checks every answer. Knows no gateway and no Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace laya {

// What the engine sends, each as it goes on the wire. A stream's pieces are written one by one, in turns with the other
// streams, as an engine does that computes a token of every sequence in each step.
struct StubAnswers {
    std::string whole;                // to a POST without "stream": true
    std::string alive;                // to a GET
    std::string count;                // to a POST of a path that ends in "input_tokens"
    std::vector<std::string> pieces;  // of a stream
};

class StubEngine {
  public:
    // Listens on loopback. Throws std::system_error.
    explicit StubEngine(StubAnswers answers);
    ~StubEngine();
    StubEngine(const StubEngine&) = delete;
    StubEngine& operator=(const StubEngine&) = delete;

    std::uint16_t port() const noexcept { return port_; }

    // Serve until a signal comes while nothing streams.
    void run();

  private:
    struct Connection {
        std::string in;
        std::string unsent;
        std::size_t next_piece = 0;
        bool is_streaming = false;
    };

    void accept_all();
    bool read(int fd, Connection& connection);
    bool answer(int fd, Connection& connection);
    bool write(int fd, Connection& connection, const std::string& data);
    void step();
    void drop(int fd);

    StubAnswers answers_;
    int listener_ = -1;
    int epoll_ = -1;
    std::uint16_t port_ = 0;
    std::unordered_map<int, Connection> connections_;
    std::vector<int> streaming_;
    std::vector<int> due_;  // reused by `step`
};

struct LoadRun {
    double seconds = 0;
    std::uint64_t n_failed = 0;  // another status than 200, no choices, a stream that is not whole, a lost connection
    std::vector<double> latencies_us;
};

// `n_requests` times `request` over `n_connections`, each of which sends its next one when its answer is whole. A stream
// must bring `n_events` events at least. Throws std::system_error where nobody listens.
LoadRun drive_load(std::uint16_t port, const std::string& request, std::size_t n_requests, std::size_t n_connections,
                   bool is_stream, std::size_t n_events);

}  // namespace laya
