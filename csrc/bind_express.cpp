// Owns: the door between Python and the express lane. Decides nothing.
#include "bind_express.hpp"

#include <string>

#include "bind_bytes.hpp"
#include "bind_plain.hpp"
#include "express_lane.hpp"

namespace nb = nanobind;
using laya::ExpressLane;

namespace {

std::string_view view_or_null(const nb::object& data) {
    return data.is_none() ? std::string_view() : view_of(nb::cast<nb::bytes>(data));
}

// The lane with the plain lane it takes requests by, which must live as long.
struct HeldExpress {
    nb::object plain;
    ExpressLane lane;
};

void construct(HeldExpress* self, nb::object plain, const nb::bytes& id_prefix, const nb::bytes& stream_kind,
               std::size_t most_body_bytes) {
    new (self) HeldExpress{plain, {nb::cast<HeldLane&>(plain).lane, std::string(view_of(id_prefix)),
                                   std::string(view_of(stream_kind)), most_body_bytes}};
}

// None, or (request, id, endpoint, routed tokens, promised tokens, seconds of routing, arrived, sent, engine, its uses,
// bytes for the engine, whether a stream was asked for, what is here of the answer).
nb::object asked_of(ExpressLane::ClientBack& back) {
    if (!back.is_asking) {
        return nb::none();
    }
    const ExpressLane::Asked& asked = back.asked;
    return nb::make_tuple(bytes_of(asked.data), bytes_of(asked.id), asked.endpoint, asked.routed_tokens,
                          asked.promised_tokens, asked.route_s, asked.arrived_s, asked.sent_s, back.engine,
                          back.n_engine_uses, bytes_of(back.engine_unsent), back.is_stream, std::move(back.answer));
}

// ([(client, id, endpoint, promised tokens, seconds of routing, arrived, sent, first token, answered, tokens of the
// prompt, tokens of the answer)], [(client, bytes, bytes for it, asked)], [(engine, uses, whether it is spent, bytes)])
nb::tuple tuple_of(ExpressLane::Round round) {
    nb::list served, clients, engines;
    for (const ExpressLane::Served& each : round.served) {
        served.append(nb::make_tuple(each.client, bytes_of(each.id), each.endpoint, each.promised_tokens, each.route_s,
                                     each.arrived_s, each.sent_s, each.first_token_s, each.answered_s,
                                     each.seen.prompt_tokens, each.seen.completion_tokens));
    }
    for (ExpressLane::ClientBack& each : round.clients) {
        clients.append(nb::make_tuple(each.id, bytes_of(each.raw), bytes_of(each.unsent), asked_of(each)));
    }
    for (const ExpressLane::EngineBack& each : round.engines) {
        engines.append(nb::make_tuple(each.id, each.n_uses, each.is_spent, bytes_of(each.raw)));
    }
    return nb::make_tuple(served, clients, engines);
}

ExpressLane::Reserve reserve_by(const nb::callable& reserve) {
    return [&reserve](std::uint32_t endpoint, std::uint64_t tokens, bool lacks_engine) {
        return nb::cast<bool>(reserve(endpoint, tokens, lacks_engine));
    };
}

}  // namespace

void bind_express(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<HeldExpress>(module, "ExpressLane")
        .def("__init__", &construct, "plain"_a, "id_prefix"_a, "stream_kind"_a, "most_body_bytes"_a)
        .def("fileno", [](HeldExpress& held) { return held.lane.fd(); })
        .def("add_client",
             [](HeldExpress& held, int fd, const nb::object& authorization, const nb::object& host) {
                 return held.lane.add_client(fd, view_or_null(authorization), view_or_null(host));
             },
             "fd"_a, "authorization"_a.none(), "host"_a.none())
        .def("add_engine",
             [](HeldExpress& held, int fd, std::uint32_t endpoint, std::uint64_t n_answers, bool keeps_streams,
                const nb::bytes& origin) {
                 return held.lane.add_engine(fd, endpoint, n_answers, keeps_streams, std::string(view_of(origin)));
             },
             "fd"_a, "endpoint"_a, "n_answers"_a, "keeps_streams"_a, "origin"_a)
        .def("turn",
             [](HeldExpress& held, const nb::callable& reserve) {
                 return tuple_of(held.lane.turn(reserve_by(reserve)));
             },
             "reserve"_a)
        .def("offer",
             [](HeldExpress& held, std::uint64_t client, const nb::bytes& data, const nb::callable& reserve) {
                 return tuple_of(held.lane.offer(client, view_of(data), reserve_by(reserve)));
             },
             "client"_a, "data"_a, "reserve"_a)
        .def("take_client",
             [](HeldExpress& held, std::uint64_t client) { return tuple_of(held.lane.take_client(client)); },
             "client"_a)
        .def("take_endpoint",
             [](HeldExpress& held, std::uint32_t endpoint) { return tuple_of(held.lane.take_endpoint(endpoint)); },
             "endpoint"_a)
        .def("take_all", [](HeldExpress& held) { return tuple_of(held.lane.take_all()); })
        .def("take_old",
             [](HeldExpress& held, double asked_before_s, double idle_before_s) {
                 return tuple_of(held.lane.take_old(asked_before_s, idle_before_s));
             },
             "asked_before_s"_a, "idle_before_s"_a);
}
