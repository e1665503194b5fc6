// Owns: the door between Python and what recognises plain messages. Decides nothing.
#include "bind_plain.hpp"

#include <nanobind/stl/unique_ptr.h>

#include <memory>

#include "bind_bytes.hpp"
#include "plain_body.hpp"
#include "plain_http.hpp"
#include "plain_lane.hpp"
#include "prefix_blocks.hpp"

namespace nb = nanobind;

namespace {

nb::object bytes_or_none(std::string_view text) {
    return text.data() == nullptr ? nb::none() : nb::object(bytes_of(text));
}

nb::object str_of(std::string_view text) { return nb::str(text.data(), text.size()); }

// (kind, body, host, authorization, request id, session id); None for what is not plain.
nb::object read_request(const nb::bytes& data, std::size_t most_body_bytes) {
    laya::PlainRequest request;
    if (!laya::read_plain_request(view_of(data), most_body_bytes, request)) {
        return nb::none();
    }
    const auto session = request.session_id.empty() ? nb::none() : str_of(request.session_id);
    return nb::make_tuple(request.kind, bytes_of(request.body),
                          bytes_or_none(request.host), bytes_or_none(request.authorization),
                          bytes_or_none(request.request_id), session);
}

void construct_lane(HeldLane* self, nb::object table) {
    new (self) HeldLane{table, laya::PlainLane(nb::cast<laya::RouteTable&>(table))};
}

void open_lane(HeldLane& held, std::uint32_t endpoint, const nb::str& model, const nb::bytes& head,
               std::uint64_t template_tokens, std::uint64_t max_seq_len, bool takes_streams) {
    held.lane.open(endpoint, {true, model.c_str(), std::string(view_of(head)), template_tokens, max_seq_len,
                              takes_streams});
}

// (endpoint, engine's request, routed tokens, promised tokens, seconds of routing, host, authorization, request id,
// whether the client of a stream wants usage or None where it wants no stream); None for what the lane does not take.
nb::object take(HeldLane& held, const nb::bytes& data, std::size_t most_body_bytes) {
    laya::PlainTaken taken;
    if (!held.lane.take(view_of(data), most_body_bytes, taken)) {
        return nb::none();
    }
    const laya::PlainRequest& request = taken.request;
    return nb::make_tuple(taken.endpoint, bytes_of(taken.upstream),
                          taken.routed_tokens, taken.promised_tokens, taken.route_s, bytes_or_none(request.host),
                          bytes_or_none(request.authorization), bytes_or_none(request.request_id),
                          taken.is_stream ? nb::object(nb::bool_(taken.wants_usage)) : nb::none());
}

// (content type, body); None for what is not plain.
nb::object read_answer(const nb::bytes& data) {
    laya::PlainAnswer answer;
    if (!laya::read_plain_answer(view_of(data), answer)) {
        return nb::none();
    }
    return nb::make_tuple(bytes_or_none(answer.content_type), bytes_of(answer.body));
}

// The places of a body's members, with the body they are in.
struct HeldBody {
    nb::bytes data;
    laya::PlainBody body;
};

// (held body, model, session, stream, include_usage, max_tokens or None, n_messages); None for what is not plain.
nb::object read_body(nb::bytes data) {
    auto held = std::make_unique<HeldBody>(HeldBody{data, {}});
    const laya::PlainBody& body = held->body;
    if (!held->body.read(view_of(data))) {
        return nb::none();
    }
    const std::string_view session = body.session();
    const auto model = str_of(body.model());
    const auto told_session = session.empty() ? nb::none() : str_of(session);
    const auto max_tokens = body.max_tokens() == 0 ? nb::none() : nb::object(nb::int_(body.max_tokens()));
    const bool stream = body.stream(), include_usage = body.include_usage();
    const std::uint32_t n_messages = body.n_messages();
    return nb::make_tuple(nb::cast(std::move(held)), model, told_session, stream, include_usage, max_tokens,
                          n_messages);
}

nb::bytes edited(const HeldBody& held, const nb::bytes& replaced, const nb::bytes& added) {
    return bytes_of(held.body.edited(view_of(replaced), view_of(added)));
}

// The chained hashes of what the conversation's next turn begins with.
nb::bytes blocks_of(const HeldBody& held) { return packed_blocks(held.body.prompt()); }

}  // namespace

nb::bytes packed_blocks(std::string_view prompt) {
    laya::PrefixBlocks hashes;
    const std::size_t n = laya::hash_prefix(prompt, hashes);
    char packed[8 * laya::MAX_BLOCKS];
    for (std::size_t i = 0; i < n; ++i) {
        laya::store_le64(packed + 8 * i, hashes[i]);
    }
    return nb::bytes(packed, 8 * n);
}

void bind_plain(nb::module_& module) {
    using namespace nb::literals;
    module.def("read_plain_request", &read_request, "data"_a, "most_body_bytes"_a);
    module.def("read_plain_answer", &read_answer, "data"_a);
    module.def("read_plain_body", &read_body, "data"_a);
    nb::class_<HeldLane>(module, "PlainLane")
        .def("__init__", &construct_lane, "table"_a)
        .def("open", &open_lane, "endpoint"_a, "model"_a, "head"_a, "template_tokens"_a, "max_seq_len"_a,
             "takes_streams"_a = true)
        .def("close", [](HeldLane& held, std::uint32_t endpoint) { held.lane.close(endpoint); }, "endpoint"_a)
        .def("take", &take, "data"_a, "most_body_bytes"_a);
    nb::class_<HeldBody>(module, "PlainBody")
        .def("edited", &edited, "replaced"_a, "added"_a)
        .def("prefix_blocks", &blocks_of);
}
