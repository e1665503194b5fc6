#include "plain_lane.hpp"

#include <algorithm>
#include <chrono>

#include "plain_body.hpp"

namespace laya {
namespace {

constexpr std::uint8_t CHAT = 1;
// what Laya asks of every stream, in place of what the client says of it (engine_body.py)
constexpr std::string_view CLIENTS_FIELDS = "\"stream\",\"stream_options\",";
constexpr std::string_view STREAM_FIELDS =
    "\"stream\":true,\"stream_options\":{\"include_usage\":true},\"return_progress\":true";
constexpr std::uint64_t MESSAGE_TOKENS = 16;  // that a message's frame takes at most, beside the template

}  // namespace

void PlainLane::open(std::uint32_t endpoint, PlainEndpoint facts) {
    if (endpoint >= endpoints_.size()) {
        endpoints_.resize(endpoint + 1);
    }
    endpoints_[endpoint] = std::move(facts);
    endpoints_[endpoint].is_open = true;
}

void PlainLane::close(std::uint32_t endpoint) {
    if (endpoint < endpoints_.size()) {
        endpoints_[endpoint] = {};
    }
}

void PlainLane::drop(const PlainTaken& taken) {
    table_.settle(taken.endpoint, 1, taken.routed_tokens);
    table_.endpoint(taken.endpoint).dropped();  // the full way may go elsewhere: this was no trial
}

bool PlainLane::take(std::string_view data, std::size_t most_body_bytes, PlainTaken& out) {
    PlainBody body;
    if (!read_plain_request(data, most_body_bytes, out.request) || out.request.kind != CHAT ||
        !body.read(out.request.body) || body.has(PlainBody::MAX_COMPLETION_TOKENS)) {
        return false;
    }
    const auto max_tokens = static_cast<std::uint64_t>(body.max_tokens());
    const std::uint64_t bound = out.request.body.size() + MESSAGE_TOKENS * body.n_messages();
    out.routed_tokens = std::min<std::uint64_t>(bound + max_tokens, MAX_TOKENS);
    const std::string_view session = out.request.session_id.empty() ? body.session() : out.request.session_id;
    const RequestFeature feature =
        RequestFeature::pack(FEATURE_VERSION, CHAT, body.stream() ? FLAG_STREAMING : 0,
                             static_cast<std::uint32_t>(out.routed_tokens), 0,
                             session.empty() ? 0 : hash_bytes(session), 0);
    const auto start = std::chrono::steady_clock::now();
    const int chosen = table_.route_prompt(body.model(), feature, 1, body.prompt());
    out.route_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (chosen < 0) {
        return false;
    }
    out.endpoint = static_cast<std::uint32_t>(chosen);
    const PlainEndpoint closed;
    const PlainEndpoint& endpoint = out.endpoint < endpoints_.size() ? endpoints_[out.endpoint] : closed;
    const std::uint64_t prompt = bound + endpoint.template_tokens;
    if (!endpoint.is_open || endpoint.model != body.model() || prompt + max_tokens > endpoint.max_seq_len ||
        (body.stream() && !endpoint.takes_streams)) {
        drop(out);
        return false;
    }
    out.promised_tokens = max_tokens == 0 ? endpoint.max_seq_len : prompt + max_tokens;
    out.is_stream = body.stream();
    out.wants_usage = out.is_stream && body.include_usage();
    const std::string edited = out.is_stream ? body.edited(CLIENTS_FIELDS, STREAM_FIELDS) : std::string();
    const std::string_view sent = out.is_stream ? std::string_view(edited) : out.request.body;
    const std::string length = std::to_string(sent.size());
    out.upstream.reserve(endpoint.head.size() + length.size() + 4 + sent.size());
    out.upstream.append(endpoint.head).append(length).append("\r\n\r\n").append(sent);
    return true;
}

}  // namespace laya
