// Streams through the native pump: what it cuts, what it passes on, what it gives back, and who may do what at the same
// time. Run plain, and with a sanitizer.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <random>
#include <string>
#include <thread>

#include "plain_http.hpp"
#include "stream_events.hpp"
#include "stream_pump.hpp"
#include "test_inputs.hpp"

namespace {

const std::string EVENT = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}],\"usage\":null}\n\n";
const std::string USAGE =
    "data: {\"choices\": [],\"usage\" : {\"prompt_tokens\": 9,\"completion_tokens\":64,\"total_tokens\":73}}\n\n";
const std::string DONE = "data: [DONE]\n\n";
const std::string LAST_CHUNK = "0\r\n\r\n";
const std::string HEAD = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n";
const std::string CLIENT_HEAD = "HTTP/1.1 200 OK\r\nx-request-id: r\r\n\r\n";

std::string progress(int processed) {
    return "data: {\"choices\":[],\"prompt_progress\":{\"total\":9,\"processed\":" + std::to_string(processed) + "}}\n\n";
}

std::string chunk_of(const std::string& data) {
    char size[20];
    std::snprintf(size, sizeof size, "%zx\r\n", data.size());
    return size + data + "\r\n";
}

struct Cut {
    std::string events;
    laya::Cut what = laya::Cut::MORE;
    laya::StreamSeen seen;
    std::size_t n_cut = 0;
};

Cut cut(const std::string& raw, bool takes_end, bool has_started) {
    Cut cut;
    cut.seen.has_started = has_started;
    cut.n_cut = laya::cut_chunks(raw, takes_end, cut.seen, cut.events, cut.what);
    return cut;
}

void test_heads_are_recognised() {
    require(laya::read_stream_head(HEAD + "1") == HEAD.size(), "a plain head of a stream is one");
    const char* others[] = {"HTTP/1.1 500 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
                            "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 9\r\n\r\n",
                            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n",
                            "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n",
                            "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
                            "connection: close\r\n\r\n"};
    for (const char* other : others) {
        require(laya::read_stream_head(other) == 0, "any other head is not");
    }
}

void test_chunks_are_cut_within_their_bytes() {
    std::mt19937 dice(9);
    const std::string stream = chunk_of(EVENT) + chunk_of(EVENT + EVENT) + chunk_of(USAGE) + chunk_of(DONE) + LAST_CHUNK;
    std::size_t n_relayed = 0, n_ended = 0;
    for (int round = 0; round < 200000; ++round) {
        const Exact raw(mutated(stream, dice));
        std::string events;
        laya::Cut what = laya::Cut::MORE;
        laya::StreamSeen seen;
        const std::size_t n_cut = laya::cut_chunks(raw.view(), round % 2 != 0, seen, events, what);
        require(n_cut <= raw.size && events.size() <= n_cut, "no more is cut than there is");
        require(events.empty() || !laya::has_stream_mark(events), "nothing marked is relayed");
        require(what != laya::Cut::END || seen.is_done, "no end but behind [DONE]");
        n_relayed += events.size();
        n_ended += what == laya::Cut::END;
        std::size_t n_bytes = 0;
        for (const auto& [is_marked, run] : laya::stream_runs(raw.view())) {
            require(lies_within(run, raw.view()), "runs lie in the events");
            n_bytes += run.size();
        }
        require(n_bytes == raw.size, "and are all of them");
    }
    require(n_relayed > 1000000 && n_ended > 10000, "something is relayed, and some streams end");
}

void test_what_is_taken_and_what_is_left() {
    const std::string end = chunk_of(USAGE) + chunk_of(DONE) + LAST_CHUNK;
    const Cut whole = cut(chunk_of(progress(9)) + chunk_of(EVENT) + end, true, false);
    require(whole.what == laya::Cut::END && whole.events == EVENT, "progress, usage and the end are not the client's");
    require(whole.seen.prompt_tokens == 9 && whole.seen.completion_tokens == 64, "usage is kept");
    require(cut(chunk_of(EVENT) + end, false, false).n_cut == chunk_of(EVENT).size(), "unless its end is not plain");
    require(cut(chunk_of(USAGE + DONE) + LAST_CHUNK, true, true).what == laya::Cut::END, "in one chunk too");
    require(cut(chunk_of(EVENT + DONE) + LAST_CHUNK, true, true).events == EVENT, "without usage too");
    const std::string left[] = {
        chunk_of(progress(3)), chunk_of(": ping\n\n"), chunk_of(USAGE), chunk_of(DONE), LAST_CHUNK,
    };
    for (const std::string& first : left) {
        require(cut(first, true, false).what == laya::Cut::LEFT, "before the first token these are for the full way");
    }
    const std::string left_later[] = {
        chunk_of(progress(9)), LAST_CHUNK, chunk_of(USAGE) + chunk_of(USAGE), chunk_of(DONE) + chunk_of(EVENT),
        chunk_of("data: {\"error\":{}}\n\n"), chunk_of("data: {\"choices\":[{}],\"usage\":{\"prompt_tokens\":1}}\n\n"),
        chunk_of(EVENT.substr(0, 9)), "zz\r\n", "12345678901234567890",
    };
    for (const std::string& later : left_later) {
        require(cut(later, true, true).what == laya::Cut::LEFT, "and behind it these");
    }
    const Cut mixed = cut(chunk_of(EVENT + "data: {\"error\":{}}\n\n"), true, true);
    require(mixed.n_cut == 0 && mixed.events.empty(), "a chunk is taken whole or not at all");
}

// An engine and a client at the ends of a pump.
struct Line {
    Line() {
        int engine[2], client[2];
        require(socketpair(AF_UNIX, SOCK_STREAM, 0, engine) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, client) == 0,
                "sockets");
        engine_in = engine[0], engine_out = engine[1], client_out = client[0], client_in = client[1];
    }
    ~Line() {
        for (const int fd : {engine_in, engine_out, client_out, client_in}) {
            close(fd);
        }
    }
    std::uint64_t add_to(laya::StreamPump& pump, bool from_head) const {
        return pump.add(engine_in, client_out, {from_head, true, !from_head, from_head ? CLIENT_HEAD : ""});
    }
    void say(const std::string& data) const {
        require(write(engine_out, data.data(), data.size()) == static_cast<ssize_t>(data.size()), "the engine writes");
    }
    std::string hear(std::size_t n_bytes) const {
        std::string heard;
        char buffer[4096];
        while (heard.size() < n_bytes) {
            const ssize_t n_read = read(client_in, buffer, sizeof buffer);
            require(n_read > 0, "the client reads");
            heard.append(buffer, static_cast<std::size_t>(n_read));
        }
        return heard;
    }
    int engine_in, engine_out, client_out, client_in;
};

laya::StreamBack next_leaver(laya::StreamPump& pump) {
    while (true) {
        pollfd ready{pump.fd(), POLLIN, 0};
        require(poll(&ready, 1, 20000) == 1, "a stream leaves");
        auto left = pump.leavers();
        if (!left.empty()) {
            require(left.size() == 1, "one at a time");
            return std::move(left[0]);
        }
    }
}

void test_pump_relays_a_whole_stream() {
    const Line line;
    laya::StreamPump pump;
    const std::uint64_t id = line.add_to(pump, true);
    require(id != 0 && pump.first_token_s(id) == 0, "a stream is taken");
    const std::string first = CLIENT_HEAD + chunk_of(EVENT);
    line.say(HEAD);
    for (const char letter : chunk_of(progress(9)) + chunk_of(EVENT)) {  // in as many pieces as it has bytes
        line.say(std::string(1, letter));
    }
    require(line.hear(first.size()) == first, "the client's head goes before the first event");
    require(pump.first_token_s(id) > 0, "whose time is told");
    line.say(chunk_of(EVENT + EVENT));
    line.hear(chunk_of(EVENT + EVENT).size());
    line.say(chunk_of(USAGE) + chunk_of(DONE) + LAST_CHUNK);
    const std::string last = chunk_of(DONE) + LAST_CHUNK;
    require(line.hear(last.size()) == last, "it ends as a whole stream does");
    const auto back = next_leaver(pump);
    require(back.id == id && back.is_ended && back.is_clean && back.is_head_sent && back.unsent.empty(), "and leaves");
    require(back.seen.completion_tokens == 64 && back.first_token_s > 0, "with its figures");
    laya::StreamBack none;
    require(!pump.remove(id, none), "and is forgotten");
}

void test_pump_gives_back_what_is_not_plain() {
    const Line line;
    laya::StreamPump pump;
    laya::StreamBack back;
    line.add_to(pump, true);
    line.say("HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n");
    back = next_leaver(pump);
    require(!back.is_ended && !back.is_head_sent && back.raw.substr(9, 3) == "503", "another head comes back");
    line.add_to(pump, true);
    line.say(HEAD.substr(0, 20));
    require(next_leaver(pump).raw == HEAD.substr(0, 20), "and half a head");
    line.add_to(pump, true);
    line.say(HEAD + chunk_of(progress(1)));
    back = next_leaver(pump);
    require(back.raw == HEAD + chunk_of(progress(1)) && !back.seen.has_started, "with what is behind it");
    line.add_to(pump, false);
    line.say(chunk_of(EVENT) + chunk_of("data: {\"error\":{}}\n\n"));
    back = next_leaver(pump);
    require(back.raw == chunk_of("data: {\"error\":{}}\n\n"), "an error comes back");
    require(line.hear(chunk_of(EVENT).size()) == chunk_of(EVENT), "behind what went before it");
    const std::uint64_t id = line.add_to(pump, false);
    line.say(chunk_of(EVENT) + chunk_of(EVENT).substr(0, 9));
    line.hear(chunk_of(EVENT).size());
    require(pump.remove(id, back) && back.raw == chunk_of(EVENT).substr(0, 9), "half a chunk is held until asked for");
    line.add_to(pump, false);
    line.say(chunk_of(DONE) + LAST_CHUNK + "more");
    back = next_leaver(pump);
    require(back.is_ended && !back.is_clean, "what follows the end is told");
}

void test_pump_gives_back_what_a_client_does_not_take() {
    const Line line;
    laya::StreamPump pump;
    close(line.client_in);
    line.add_to(pump, false);
    line.say(chunk_of(EVENT));
    require(next_leaver(pump).unsent == chunk_of(EVENT), "a client that left takes nothing");
    line.add_to(pump, false);
    close(line.engine_out);
    require(!next_leaver(pump).is_ended, "an engine that left has not ended its answer");
    const_cast<Line&>(line).client_in = const_cast<Line&>(line).engine_out = -1;
}

// Streams come, flow, are asked for and end, all at once: each leaves exactly once.
void test_streams_leave_once_whoever_asks() {
    constexpr int N_STREAMS = 2000;
    laya::StreamPump pump;
    std::atomic<int> n_left{0};
    std::atomic<bool> is_over{false};
    std::thread reader([&] {
        while (!is_over.load()) {
            n_left += static_cast<int>(pump.leavers().size());
            std::this_thread::yield();
        }
    });
    std::mt19937 dice(3);
    for (int round = 0; round < N_STREAMS; ++round) {
        const Line line;
        const std::uint64_t id = line.add_to(pump, round % 2 != 0);
        line.say((round % 2 != 0 ? HEAD : "") + chunk_of(EVENT));
        if (dice() % 2 != 0) {
            line.say(chunk_of(DONE) + LAST_CHUNK);
        }
        for (std::uint32_t spins = dice() % 2000; spins > 0; --spins) {
            pump.first_token_s(id);
        }
        laya::StreamBack back;
        n_left += pump.remove(id, back);
    }
    for (int waits = 0; n_left.load() < N_STREAMS && waits < 20000; ++waits) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    is_over = true;
    reader.join();
    require(n_left.load() == N_STREAMS, "each stream leaves once");
}

}  // namespace

int main() {
    test_heads_are_recognised();
    test_chunks_are_cut_within_their_bytes();
    test_what_is_taken_and_what_is_left();
    test_pump_relays_a_whole_stream();
    test_pump_gives_back_what_is_not_plain();
    test_pump_gives_back_what_a_client_does_not_take();
    test_streams_leave_once_whoever_asks();
    std::puts("streams: ok");
    return 0;
}
