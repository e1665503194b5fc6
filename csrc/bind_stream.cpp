// Owns: the door between Python and streams. Decides nothing.
#include "bind_stream.hpp"

#include <nanobind/stl/vector.h>

#include "bind_bytes.hpp"
#include "stream_events.hpp"
#include "stream_pump.hpp"

namespace nb = nanobind;
using laya::StreamPump;
using Back = laya::StreamBack;

namespace {

nb::list stream_runs(const nb::bytes& events) {
    nb::list out;
    for (const auto& [is_marked, run] : laya::stream_runs(view_of(events))) {
        out.append(nb::make_tuple(is_marked, bytes_of(run)));
    }
    return out;
}

std::uint64_t add(StreamPump& pump, int engine, int client, bool from_head, bool takes_end, bool has_started,
                  const nb::bytes& client_head) {
    return pump.add(engine, client, {from_head, takes_end, has_started, std::string(view_of(client_head))});
}

nb::object take_back(StreamPump& pump, std::uint64_t id) {
    Back back;
    return pump.remove(id, back) ? nb::cast(std::move(back)) : nb::object(nb::none());
}

}  // namespace

void bind_stream(nb::module_& module) {
    using namespace nb::literals;
    module.def("stream_runs", &stream_runs, "events"_a);
    nb::class_<Back>(module, "StreamBack")
        .def_ro("id", &Back::id)
        .def_ro("is_ended", &Back::is_ended)
        .def_ro("is_clean", &Back::is_clean)
        .def_ro("is_head_sent", &Back::is_head_sent)
        .def_ro("error", &Back::error)
        .def_ro("first_token_s", &Back::first_token_s)
        .def_prop_ro("has_started", [](const Back& back) { return back.seen.has_started; })
        .def_prop_ro("is_done", [](const Back& back) { return back.seen.is_done; })
        .def_prop_ro("usage",
                     [](const Back& back) -> nb::object {
                         const laya::StreamSeen& seen = back.seen;
                         if (!seen.has_usage) {
                             return nb::none();
                         }
                         return nb::make_tuple(seen.prompt_tokens, seen.completion_tokens);
                     })
        .def_prop_ro("raw", [](const Back& back) { return bytes_of(back.raw); })
        .def_prop_ro("unsent", [](const Back& back) { return bytes_of(back.unsent); });
    nb::class_<StreamPump>(module, "StreamPump")
        .def(nb::init<>())
        .def("fileno", &StreamPump::fd)
        .def("add", &add, "engine"_a, "client"_a, "from_head"_a, "takes_end"_a, "has_started"_a, "client_head"_a)
        .def("remove", &take_back, "id"_a)
        .def("await_step", &StreamPump::await_step, "id"_a)
        .def("leavers", &StreamPump::leavers)
        .def("first_token_s", &StreamPump::first_token_s, "id"_a)
        .def_prop_ro("n_pieces", &StreamPump::n_pieces);
}
