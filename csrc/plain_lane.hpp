// Owns: what a plain request for a ready engine comes to, in one step: recognised, its body checked, an endpoint chosen,
// the engine's request put together. Knows of an endpoint what it takes to tell that nothing in the body is to be
// changed. Whatever is not plain is left as it was, so that the full way finds it untouched.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "plain_http.hpp"
#include "route_table.hpp"

namespace laya {

// An engine that gets plain bodies as they came.
struct PlainEndpoint {
    bool is_open = false;
    std::string model;                // its own name; a request by an alias must be edited
    std::string head;                 // of its requests, up to the value of content-length
    std::uint64_t template_tokens = 0;  // that its chat template adds at most to a chat without tools
    std::uint64_t max_seq_len = 0;    // tokens
    bool takes_streams = false;       // a client that asks for a stream gets one
};

struct PlainTaken {
    PlainRequest request;
    std::uint32_t endpoint = 0;
    std::uint64_t routed_tokens = 0;    // what the route table carries until `settle`
    std::uint64_t promised_tokens = 0;  // what its sequence may come to hold
    double route_s = 0;
    std::string upstream;  // the engine's request
    bool is_stream = false;
    bool wants_usage = false;  // the client of a stream
};

class PlainLane {
  public:
    explicit PlainLane(RouteTable& table) : table_(table) {}

    void open(std::uint32_t endpoint, PlainEndpoint facts);
    void close(std::uint32_t endpoint);

    // Whether `data` is a whole plain chat request that an open endpoint takes, a stream with usage and progress asked
    // for, anything else as it is. If so, the endpoint carries it in the route table.
    bool take(std::string_view data, std::size_t most_body_bytes, PlainTaken& out);

    // It is answered.
    void settle(std::uint32_t endpoint, std::uint64_t routed_tokens) { table_.settle(endpoint, 1, routed_tokens); }
    // It goes another way after all.
    void drop(const PlainTaken& taken);

  private:
    RouteTable& table_;
    std::vector<PlainEndpoint> endpoints_;
};

}  // namespace laya
