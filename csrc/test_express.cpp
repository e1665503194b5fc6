// The express lane between sockets of this process: run plain, and with a sanitizer.
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <string>

#include "express_lane.hpp"
#include "test_inputs.hpp"

namespace {

using laya::ExpressLane;

const std::string BODY = R"({"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":8})";
const std::string REQUEST =
    "POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\nauthorization: Bearer k\r\nx-request-id: r\r\ncontent-length: " +
    std::to_string(BODY.size()) + "\r\n\r\n" + BODY;
const std::string STREAM_BODY = R"({"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":8,"stream":true})";
const std::string STREAM_REQUEST =
    "POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\nauthorization: Bearer k\r\nx-request-id: r\r\ncontent-length: " +
    std::to_string(STREAM_BODY.size()) + "\r\n\r\n" + STREAM_BODY;
const std::string STREAM_HEAD = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
const std::string EVENT = "data: {\"choices\":[]}\n\n";
const std::string DONE = "data: [DONE]\n\n";
const std::string ASKED = "HEAD" + std::to_string(BODY.size()) + "\r\n\r\n" + BODY;

std::string answer_with(const std::string& body) {
    return "HTTP/1.1 200 OK\r\ncontent-type: text/x\r\ncontent-length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

std::string answer_to_client(const std::string& body) {
    return "HTTP/1.1 200 OK\r\ncontent-type: text/x\r\nx-request-id: r\r\nfrom: m\r\ncontent-length: " +
           std::to_string(body.size()) + "\r\n\r\n" + body;
}

std::string chunk_of(const std::string& data) {
    char size[20];
    std::snprintf(size, sizeof size, "%zx\r\n", data.size());
    return size + data + "\r\n";
}

const std::string STREAM_BEGIN = "HTTP/1.1 200 OK\r\nkind: s\r\nx-request-id: r\r\nfrom: m\r\ntransfer-encoding: chunked\r\n\r\n";
const std::string STREAM_END = chunk_of(DONE) + "0\r\n\r\n";

// A connection: the gateway's end, and the other's.
struct Pair {
    Pair() { require(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "a pair of sockets"); }
    ~Pair() {
        close(ends[0]);
        hang_up();
    }
    Pair(const Pair&) = delete;

    void write(const std::string& text) {
        require(send(ends[1], text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()), "it is written");
    }
    std::string read() {
        char buffer[200000];
        const ssize_t n = recv(ends[1], buffer, sizeof buffer, MSG_DONTWAIT);
        return n > 0 ? std::string(buffer, static_cast<std::size_t>(n)) : std::string();
    }
    void hang_up() {
        if (ends[1] >= 0) {
            close(ends[1]);
            ends[1] = -1;
        }
    }
    int ends[2] = {-1, -1};
};

struct World {
    World() : table(8, 1 << 16, 8192), plain(table), lane(plain, "own-", "kind: s\r\n", 65536) {
        table.publish({{{"m"}, {0}}});
        table.set_eligible(0, true);
        plain.open(0, {true, "m", "HEAD", 100, 1000, true});
        client = lane.add_client(client_pair.ends[0], "Bearer k", "h");
        engine = lane.add_engine(engine_pair.ends[0], 0, 100, true, "from: m\r\n");
        require(client != 0 && engine != 0, "they are lent");
    }

    ExpressLane::Round turn() {
        return lane.turn([this](std::uint32_t, std::uint64_t, bool lacks_engine) { return has_room && !lacks_engine; });
    }
    // A request that the engine has.
    void ask() {
        client_pair.write(REQUEST);
        const ExpressLane::Round round = turn();
        require(round.clients.empty() && engine_pair.read() == ASKED, "the engine is asked");
        require(table.load(0).n_seqs == 1, "and carries it");
    }
    void ask_for_stream() {
        client_pair.write(STREAM_REQUEST);
        require(turn().clients.empty() && engine_pair.read().starts_with("HEAD"), "the engine is asked for a stream");
    }
    // Turns until something came of them, the timer's time included.
    ExpressLane::Round turn_on() {
        for (int times = 0; times < 20000; ++times) {
            ExpressLane::Round round = turn();
            if (!round.served.empty() || !round.clients.empty() || !round.engines.empty()) {
                return round;
            }
            usleep(100);
        }
        require(false, "something comes of it");
        return {};
    }
    bool has_books_closed() const { return table.load(0).n_seqs == 0 && table.load(0).tokens == 0; }

    laya::RouteTable table;
    laya::PlainLane plain;
    Pair client_pair, engine_pair;
    bool has_room = true;
    ExpressLane lane;
    std::uint64_t client = 0, engine = 0;
};

void test_requests_go_to_the_engine_and_answers_back() {
    World world;
    for (int turn = 0; turn < 3; ++turn) {
        world.ask();
        world.engine_pair.write(answer_with("body"));
        const ExpressLane::Round round = world.turn();
        require(round.served.size() == 1 && round.served[0].answered_s >= round.served[0].sent_s, "it is served");
        require(world.client_pair.read() == answer_to_client("body") && world.has_books_closed(), "the client has it");
    }
    require(world.lane.take_old(1e12, 0).clients.empty(), "nothing is asked any more");
    const ExpressLane::Round back = world.lane.take_old(0, 1e12);
    require(back.clients.size() == 1 && !back.clients[0].is_asking, "an idle client comes back");
    require(back.engines.size() == 1 && back.engines[0].n_uses == 3, "and an idle connection");
}

void test_what_is_not_plain_comes_back_as_it_came() {
    for (const std::string& data : {std::string("GET / HTTP/1.1\r\n\r\n"), REQUEST.substr(0, 60), REQUEST + "x",
                                    std::string(REQUEST).replace(REQUEST.find("Bearer k"), 8, "Bearer x"),
                                    std::string(REQUEST).replace(REQUEST.find("host: h\r\n"), 9, "")}) {
        World world;
        world.client_pair.write(data);
        const ExpressLane::Round round = world.turn();
        require(round.clients.size() == 1 && round.clients[0].raw == data && !round.clients[0].is_asking, "it is back");
        require(world.has_books_closed() && world.engine_pair.read().empty(), "and no engine knows of it");
    }
    World full;
    full.has_room = false;
    full.client_pair.write(REQUEST);
    require(full.turn().clients.at(0).raw == REQUEST && full.has_books_closed(), "where there is no room, too");
}

void test_an_answer_that_is_not_plain_comes_back_with_its_request() {
    for (const std::string& data : {std::string("HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n"),
                                    answer_with("body").substr(0, 50), answer_with("body") + "x", std::string()}) {
        World world;
        world.ask();
        if (data.empty()) {
            world.engine_pair.hang_up();
        } else {
            world.engine_pair.write(data);
        }
        const ExpressLane::Round round = world.turn();
        require(round.served.empty() && round.clients.size() == 1, "it is back");
        const ExpressLane::ClientBack& back = round.clients[0];
        require(back.is_asking && back.engine == world.engine && back.answer.raw == data, "with what the engine said");
        require(back.asked.data == REQUEST && back.asked.id == "r" && back.n_engine_uses == 1, "and with its request");
        require(world.table.load(0).tokens == back.asked.routed_tokens, "which the endpoint still carries");
        require(world.lane.take_all().engines.empty() && world.client_pair.read().empty(), "nothing is left here");
    }
}

void test_a_client_that_leaves_or_asks_on_comes_back() {
    for (const bool leaves : {true, false}) {
        World world;
        world.ask();
        if (leaves) {
            world.client_pair.hang_up();
        } else {
            world.client_pair.write(REQUEST);
        }
        const ExpressLane::Round round = world.turn();
        require(round.clients.size() == 1 && round.clients[0].is_asking && round.clients[0].raw.empty(), "with its request");
    }
    World idle;
    idle.client_pair.hang_up();
    idle.engine_pair.hang_up();
    const ExpressLane::Round round = idle.turn();
    require(round.clients.size() == 1 && !round.clients[0].is_asking && round.engines.size() == 1, "both are back");
}

void test_what_a_slow_peer_does_not_take_comes_back() {
    World world;
    const int small = 4096;
    setsockopt(world.client_pair.ends[0], SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
    world.ask();
    const std::string body(60000, 'x');
    world.engine_pair.write(answer_with(body));
    const ExpressLane::Round round = world.turn();
    require(round.served.size() == 1 && round.clients.size() == 1 && !round.clients[0].is_asking, "it is served, and back");
    require(!round.clients[0].unsent.empty(), "with the rest of its answer");
    require(world.client_pair.read() + round.clients[0].unsent == answer_to_client(body), "which misses nothing");
}

void test_a_request_that_the_engine_does_not_take_comes_back() {
    World world;
    world.client_pair.write(REQUEST);
    world.engine_pair.hang_up();
    const ExpressLane::Round round = world.turn();
    const bool is_refused = round.clients.size() == 1 && !round.clients[0].is_asking;  // seen to be closed before
    const bool is_back = round.clients.size() == 1 && round.clients[0].engine_unsent == ASKED;
    require(is_refused || is_back, "it is sent by nobody");
}

void test_a_connection_is_given_back_after_its_last_answer() {
    World world;
    world.lane.take_all();
    world.client = world.lane.add_client(world.client_pair.ends[0], "Bearer k", "h");
    world.engine = world.lane.add_engine(world.engine_pair.ends[0], 0, 2, true, "");
    for (int turn = 0; turn < 2; ++turn) {
        world.ask();
        world.engine_pair.write(answer_with("x"));
        require(world.turn().engines.size() == static_cast<std::size_t>(turn), "after the second answer");
    }
    world.client_pair.write(REQUEST);
    require(world.turn().clients.at(0).raw == REQUEST, "there is none any more");
}

void test_an_endpoint_gives_what_it_runs() {
    World world;
    Pair other;
    world.lane.add_engine(other.ends[0], 0, 100, true, "");
    world.client_pair.write(REQUEST);
    world.turn();
    const ExpressLane::Round round = world.lane.take_endpoint(0);
    require(round.clients.size() == 1 && round.clients[0].is_asking && round.engines.size() == 1, "and what is idle");
    require(world.lane.take_endpoint(7).clients.empty(), "one that was never here gives nothing");
}

void test_streams_flow_to_their_end() {
    for (const bool is_cut : {false, true}) {
        World world;
        for (int turn = 0; turn < 3; ++turn) {
            world.ask_for_stream();
            const std::string said = chunk_of(EVENT) + chunk_of(EVENT) + STREAM_END;
            world.engine_pair.write(STREAM_HEAD + (is_cut ? "" : said));
            ExpressLane::Round round = world.turn();
            std::string heard = world.client_pair.read();
            for (std::size_t at = 0; is_cut && at < said.size(); ++at) {
                world.engine_pair.write(said.substr(at, 1));
                round = world.turn();
                heard += world.client_pair.read();
            }
            if (round.served.empty()) {
                round = world.turn_on();
                heard += world.client_pair.read();
            }
            require(round.served.size() == 1 && round.clients.empty() && round.engines.empty(), "a stream is served");
            require(round.served[0].first_token_s >= round.served[0].sent_s, "and its first token has its time");
            require(heard.starts_with(STREAM_BEGIN) && heard.ends_with("0\r\n\r\n"), "whole");
            require(world.has_books_closed(), "and settled");
        }
        world.ask();  // a whole answer on the same connections
        world.engine_pair.write(answer_with("body"));
        require(world.turn().served.size() == 1, "is told as ever");
    }
}

void test_a_stream_comes_back_with_what_is_here_of_it() {
    const std::string half = chunk_of(EVENT).substr(0, 9);
    for (const int way : {0, 1, 2, 3}) {
        World world;
        world.ask_for_stream();
        world.engine_pair.write(STREAM_HEAD + chunk_of(EVENT) + half);
        require(world.turn().clients.empty(), "it flows");
        require(world.client_pair.read() == STREAM_BEGIN + chunk_of(EVENT), "to its client");
        ExpressLane::Round round;
        if (way == 0) {
            round = world.lane.take_endpoint(0);
        } else if (way == 1) {
            round = world.lane.take_old(1e12, 0);
        } else if (way == 2) {
            world.client_pair.hang_up();
            round = world.turn_on();
        } else {
            world.engine_pair.hang_up();
            round = world.turn_on();
        }
        require(round.served.empty() && round.clients.size() == 1 && round.clients[0].is_asking, "it is back");
        const ExpressLane::ClientBack& back = round.clients[0];
        require(back.is_stream && back.answer.is_head_sent && back.answer.seen.has_started, "as a stream that has begun");
        require(back.answer.raw == STREAM_HEAD + half && back.answer.first_token_s > 0, "with what was read of it");
    }
}

void test_a_stream_that_is_not_plain_comes_back() {
    const std::string odd[] = {"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n", answer_with("body"), "x",
                               STREAM_HEAD + chunk_of(": note\n\n")};
    for (const std::string& data : odd) {
        World world;
        world.ask_for_stream();
        world.engine_pair.write(data);
        const ExpressLane::Round round = world.turn_on();
        require(round.clients.size() == 1 && round.clients[0].answer.raw == data, "as it came");
        require(!round.clients[0].answer.is_head_sent && world.client_pair.read().empty(), "and the client has nothing");
    }
}

void test_a_connection_is_spent_where_more_came_or_it_keeps_none() {
    for (const bool keeps : {true, false}) {
        World world;
        world.lane.take_all();
        world.client = world.lane.add_client(world.client_pair.ends[0], "Bearer k", "h");
        world.engine = world.lane.add_engine(world.engine_pair.ends[0], 0, 100, keeps, "from: m\r\n");
        world.ask_for_stream();
        world.engine_pair.write(STREAM_HEAD + chunk_of(EVENT) + STREAM_END + (keeps ? "more" : ""));
        const ExpressLane::Round round = world.turn_on();
        require(round.served.size() == 1 && round.engines.size() == 1 && round.engines[0].is_spent, "it is given back");
    }
}

void test_what_a_slow_client_does_not_take_of_a_stream_comes_back() {
    World world;
    const int small = 4096;
    setsockopt(world.client_pair.ends[0], SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
    world.ask_for_stream();
    const std::string event = "data: {" + std::string(60000, 'x') + "}\n\n";
    world.engine_pair.write(STREAM_HEAD + chunk_of(event));
    const ExpressLane::Round round = world.turn_on();
    require(round.clients.size() == 1 && round.clients[0].is_asking && !round.clients[0].unsent.empty(), "the rest");
    require(world.client_pair.read() + round.clients[0].unsent == STREAM_BEGIN + chunk_of(event), "misses nothing");
}

}  // namespace

int main() {
    test_requests_go_to_the_engine_and_answers_back();
    test_what_is_not_plain_comes_back_as_it_came();
    test_an_answer_that_is_not_plain_comes_back_with_its_request();
    test_a_client_that_leaves_or_asks_on_comes_back();
    test_what_a_slow_peer_does_not_take_comes_back();
    test_a_request_that_the_engine_does_not_take_comes_back();
    test_a_connection_is_given_back_after_its_last_answer();
    test_an_endpoint_gives_what_it_runs();
    test_streams_flow_to_their_end();
    test_a_stream_comes_back_with_what_is_here_of_it();
    test_a_stream_that_is_not_plain_comes_back();
    test_a_connection_is_spent_where_more_came_or_it_keeps_none();
    test_what_a_slow_client_does_not_take_of_a_stream_comes_back();
    std::puts("express lane: ok");
    return 0;
}
