// What recognises plain messages, on bytes that are nearly right: run plain, and with a sanitizer.
#include <cstdio>
#include <random>
#include <string>

#include "plain_body.hpp"
#include "plain_http.hpp"
#include "plain_lane.hpp"
#include "test_inputs.hpp"

namespace {

const std::string BODY =
    R"({"model":"m","messages":[{"role":"system","content":"a\n\u00e9é"},{"role":"user","content":"hi 世 😀"}],)"
    R"("stream":true,"stream_options":{"include_usage":true},"max_tokens":16,"temperature":0.7,"seed":1,"n":1,"user":"u"})";

std::string request_with(const std::string& body) {
    return "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:8000\r\nauthorization: Bearer k\r\n"
           "x-request-id: r\r\nx-session-id: s\r\ncontent-length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

const std::string ANSWER = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";

void test_plain_messages_are_recognised() {
    laya::PlainRequest request;
    const std::string text = request_with(BODY);
    require(laya::read_plain_request(text, 65536, request), "a plain request is one");
    require(request.kind == 1 && request.body == BODY && request.host == "127.0.0.1:8000", "its parts are found");
    require(request.authorization == "Bearer k" && request.request_id == "r" && request.session_id == "s", "and headers");
    laya::PlainRequest small;
    require(!laya::read_plain_request(text, BODY.size() - 1, small), "a body above the limit is not plain");
    laya::PlainBody body;
    require(body.read(BODY) && body.model() == "m" && body.session() == "u" && body.stream() && body.include_usage() &&
                body.max_tokens() == 16 && body.n_messages() == 2,
            "a plain body's fields are read");
    require(body.edited("\"model\",\"stream_options\",", "\"model\":\"x\"").find("\"model\":\"m\"") == std::string::npos,
            "a replaced member is gone");
    laya::PlainAnswer answer;
    require(laya::read_plain_answer(ANSWER, answer) && answer.body == "{}", "a plain answer is one");
}

void test_nothing_is_read_outside_of_a_message() {
    std::mt19937 dice(7);
    std::size_t n_plain = 0;
    for (int round = 0; round < 300000; ++round) {
        const Exact body_text(mutated(BODY, dice));
        laya::PlainBody body;
        if (body.read(body_text.view())) {
            ++n_plain;
            require(lies_within(body.model(), body_text.view()) && lies_within(body.session(), body_text.view()),
                    "fields lie in the body");
            require(body.edited("\"model\",", "").size() <= body_text.size + 2, "an edit without additions is no longer");
        }
        const bool whole = dice() % 2 == 0;
        const Exact request_text(whole ? request_with(mutated(BODY, dice)) : mutated(request_with(BODY), dice));
        laya::PlainRequest request;
        if (laya::read_plain_request(request_text.view(), 65536, request)) {
            require(lies_within(request.body, request_text.view()) && lies_within(request.host, request_text.view()),
                    "parts lie in the request");
        }
        const Exact answer_text(mutated(ANSWER, dice));
        laya::PlainAnswer answer;
        if (laya::read_plain_answer(answer_text.view(), answer)) {
            require(lies_within(answer.body, answer_text.view()), "an answer's body lies in it");
        }
    }
    require(n_plain > 1000, "some of them are plain");
}

void test_lane_takes_only_what_an_endpoint_takes_as_it_is() {
    laya::RouteTable table(8, 1 << 16, 8192);
    table.publish({{{"m", "alias"}, {0}}});
    table.set_eligible(0, true);
    laya::PlainLane lane(table);
    const std::string body = R"({"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":8})";
    const std::string aliased = R"({"model":"alias","messages":[{"role":"user","content":"hi"}]})";
    laya::PlainTaken taken, other;
    require(!lane.take(request_with(body), 65536, other), "an endpoint that is not open takes nothing");
    require(table.load(0).n_seqs == 0, "and carries nothing");
    lane.open(0, {true, "m", "HEAD", 100, 1000});
    require(!lane.take(request_with(aliased), 65536, other) && table.load(0).n_seqs == 0, "an alias must be edited");
    require(lane.take(request_with(body), 65536, taken), "an open endpoint takes a plain request");
    require(taken.upstream == "HEAD" + std::to_string(body.size()) + "\r\n\r\n" + body, "as it came");
    require(table.load(0).n_seqs == 1 && table.load(0).tokens == taken.routed_tokens, "and carries it");
    require(taken.promised_tokens == body.size() + 16 + 100 + 8, "its promise is its prompt's bound and its ceiling");
    const std::string streamed =
        R"({"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}],"stream_options":{"include_usage":true}})";
    laya::PlainTaken refused, stream;
    require(!lane.take(request_with(streamed), 65536, refused) && table.load(0).n_seqs == 1, "streams only where there are");
    lane.open(0, {true, "m", "HEAD", 100, 1000, true});
    require(lane.take(request_with(streamed), 65536, stream) && stream.is_stream && stream.wants_usage, "a stream is taken");
    const std::string asked =
        R"({"model":"m","messages":[{"role":"user","content":"hi"}],)"
        R"("stream":true,"stream_options":{"include_usage":true},"return_progress":true})";
    require(stream.upstream == "HEAD" + std::to_string(asked.size()) + "\r\n\r\n" + asked, "with what Laya asks of it");
    lane.close(0);
    require(!lane.take(request_with(body), 65536, other), "a closed endpoint takes nothing");
}

std::string request_without_session(const std::string& body) {
    return "POST /v1/chat/completions HTTP/1.1\r\ncontent-length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

void test_lane_sends_a_conversation_where_its_turn_before_went() {
    laya::RouteTable table(8, 1 << 16, 8192);
    table.publish({{{"m"}, {0, 1}}, {{"alone"}, {2}}});
    laya::PlainLane lane(table);
    for (std::uint32_t endpoint = 0; endpoint < 3; ++endpoint) {
        table.set_eligible(endpoint, true);
        lane.open(endpoint, {true, endpoint == 2 ? "alone" : "m", "HEAD", 100, 100000});
    }
    std::string messages[4];
    std::uint32_t homes[4] = {};
    for (int turn = 0; turn < 6; ++turn) {
        for (int number = 0; number < 4; ++number) {
            messages[number] += std::string(turn == 0 ? "[" : ", ") + R"({"role":"user","content":"turn )" +
                                std::to_string(turn) + " of " + std::to_string(number) + "\"}";
            laya::PlainTaken taken;
            const std::string end = turn % 2 == 0 ? "]" : " \n ]";
            require(lane.take(request_without_session(R"({"model":"m","messages":)" + messages[number] + end + "}"), 65536,
                              taken),
                    "a plain request is taken");
            table.settle(taken.endpoint, 1, taken.routed_tokens);
            require(turn == 0 || homes[number] == taken.endpoint, "a next turn follows the one before");
            homes[number] = taken.endpoint;
        }
    }
    require(homes[0] != homes[1] && homes[2] != homes[3], "new conversations are spread");
    laya::PlainTaken taken;
    require(lane.take(request_without_session(R"({"model":"alone","messages":)" + messages[0] + "]}"), 65536, taken),
            "a plain request is taken");
    laya::PrefixBlocks blocks;
    const std::size_t n_blocks = laya::hash_prefix(messages[0], blocks);
    require(n_blocks > 0 && table.homes("alone", 0, {blocks.data(), n_blocks}).prefix < 0, "nothing is kept for one engine");
}

}  // namespace

int main() {
    test_plain_messages_are_recognised();
    test_nothing_is_read_outside_of_a_message();
    test_lane_takes_only_what_an_endpoint_takes_as_it_is();
    test_lane_sends_a_conversation_where_its_turn_before_went();
    std::puts("plain messages: ok");
    return 0;
}
