// Owns: plain requests on their way from a client's socket to an engine's and back, where both ends were lent to it: a
// request that the plain lane takes goes out at once, its answer, whole or a stream, comes back in Laya's own head, and
// Python hears of it when it is over. Runs on the caller's thread, one call for all sockets that are ready. Works on duplicates of
// the sockets. Whatever is not plain goes back to Python, as it came.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "express_watch.hpp"
#include "plain_lane.hpp"
#include "stream_flow.hpp"

namespace laya {

class ExpressLane {
  public:
    // A request that an engine has. Times are seconds of the monotonic clock.
    struct Asked {
        std::string data;  // as it came
        std::string id;
        std::uint32_t endpoint = 0;
        std::uint64_t routed_tokens = 0;
        std::uint64_t promised_tokens = 0;
        double route_s = 0;
        double arrived_s = 0;
        double sent_s = 0;
    };
    struct Served {
        std::uint64_t client;
        std::string id;
        std::uint32_t endpoint;
        std::uint64_t promised_tokens;
        double route_s, arrived_s, sent_s, first_token_s, answered_s;  // the last two are one of a whole answer
        StreamSeen seen;                                               // of a stream
    };
    // A client that leaves. What is in `raw` was read of it and is still to be looked at.
    struct ClientBack {
        std::uint64_t id = 0;
        std::string raw;
        std::string unsent;  // of the answer before
        bool is_asking = false;
        Asked asked;
        std::uint64_t engine = 0;  // which goes with it, as does what follows
        std::uint64_t n_engine_uses = 0;
        std::string engine_unsent;
        StreamBack answer;  // of a whole one, its bytes and what its socket said
        bool is_stream = false;
    };
    // An engine's connection that leaves by itself, with nothing to answer.
    struct EngineBack {
        std::uint64_t id = 0;
        std::uint64_t n_uses = 0;  // requests it was sent here
        bool is_spent = false;     // no request may follow
        std::string raw;
    };
    struct Round {
        std::vector<Served> served;
        std::vector<ClientBack> clients;
        std::vector<EngineBack> engines;
    };
    // Whether the endpoint takes one more request with so many tokens; `lacks_engine`: and has lent a connection for it.
    using Reserve = std::function<bool(std::uint32_t endpoint, std::uint64_t tokens, bool lacks_engine)>;

    // `stream_kind`: the lines that say of an answer that it is a stream. Throws std::system_error where the system refuses.
    ExpressLane(PlainLane& lane, std::string id_prefix, std::string stream_kind, std::size_t most_body_bytes);
    ~ExpressLane();
    ExpressLane(const ExpressLane&) = delete;
    ExpressLane& operator=(const ExpressLane&) = delete;

    int fd() const noexcept { return watch_.fd(); }  // readable when `turn` has something to do

    // Lend a client whose requests are known by these two headers (data() is null where it sends none); 0 where the
    // system refuses.
    std::uint64_t add_client(int fd, std::string_view authorization, std::string_view host);
    // Lend a connection that is idle and may give so many more answers, with the lines that say of an answer where it
    // is from; `keeps_streams`: another request may follow a stream. 0 where the system refuses.
    std::uint64_t add_engine(int fd, std::uint32_t endpoint, std::uint64_t n_answers, bool keeps_streams,
                             std::string origin);

    Round turn(const Reserve& reserve);
    // What a client's transport had read already.
    Round offer(std::uint64_t client, std::string_view data, const Reserve& reserve);

    Round take_client(std::uint64_t client);
    Round take_endpoint(std::uint32_t endpoint);  // its requests with their clients, and its idle connections
    Round take_all();
    Round take_old(double asked_before_s, double idle_before_s);

  private:
    struct Client;
    struct Engine;
    struct Unsent {
        bool is_client;
        std::uint64_t id;
        std::string data;
    };

    void on_client(std::uint64_t id, Client& client, const Reserve& reserve);
    void on_request(std::uint64_t id, Client& client, std::string_view data, const Reserve& reserve);
    bool on_engine(std::uint64_t id, Engine& engine);
    void on_answer(std::uint64_t id, Engine& engine, const PlainAnswer& answer);
    bool on_stream(std::uint64_t id, Engine& engine, std::string_view raw);
    void served(std::uint64_t id, Engine& engine, double first_token_s, const StreamSeen& seen, bool is_spent);
    std::string answer_head(const Asked& asked, std::string_view kind, const Engine& engine) const;
    void send_all();
    void give_client(std::uint64_t id, std::string_view raw, std::string_view engine_raw = {}, int engine_error = 0);
    void give_engine(std::uint64_t id, std::string_view raw, bool is_spent = false);
    Round end();

    PlainLane& lane_;
    const std::string id_prefix_;
    const std::string stream_kind_;
    const std::size_t most_body_bytes_;
    ExpressWatch watch_;
    std::uint64_t last_id_ = 0;
    std::uint64_t n_asked_ = 0;
    std::unordered_map<std::uint64_t, std::unique_ptr<Client>> clients_;
    std::unordered_map<std::uint64_t, std::unique_ptr<Engine>> engines_;
    std::vector<std::vector<std::uint64_t>> idle_;  // engines by endpoint, the last used one last
    std::vector<Unsent> unsent_;
    Round round_;
    std::vector<char> buffer_;
};

}  // namespace laya
