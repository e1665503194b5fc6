// Owns: the door between Python and the two ends of the gateway bench. Decides nothing.
#include "bind_bench.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bench_http.hpp"
#include "bench_relay.hpp"
#include "bind_bytes.hpp"

namespace nb = nanobind;

namespace {

std::string string_of(const nb::bytes& data) { return std::string(view_of(data)); }

void construct(laya::StubEngine* self, const nb::bytes& whole, const nb::bytes& alive, const nb::bytes& count,
               const nb::list& pieces) {
    laya::StubAnswers answers{string_of(whole), string_of(alive), string_of(count), {}};
    for (const nb::handle piece : pieces) {
        answers.pieces.push_back(string_of(nb::cast<nb::bytes>(piece)));
    }
    new (self) laya::StubEngine(std::move(answers));
}

template <typename Server>
void run(Server& server) {
    while (PyErr_CheckSignals() == 0) {
        nb::gil_scoped_release unlocked;
        server.run();
    }
    throw nb::python_error();
}

// (seconds, failed, latencies in microseconds)
nb::tuple drive_load(std::uint16_t port, const nb::bytes& request, std::size_t n_requests, std::size_t n_connections,
                     bool is_stream, std::size_t n_events) {
    laya::LoadRun done;
    const std::string bytes = string_of(request);
    {
        nb::gil_scoped_release unlocked;
        done = laya::drive_load(port, bytes, n_requests, n_connections, is_stream, n_events);
    }
    return nb::make_tuple(done.seconds, done.n_failed, done.latencies_us);
}

}  // namespace

void bind_bench(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<laya::StubEngine>(module, "StubEngine")
        .def("__init__", &construct, "whole"_a, "alive"_a, "count"_a, "pieces"_a)
        .def_prop_ro("port", &laya::StubEngine::port)
        .def("run", &run<laya::StubEngine>);
    nb::class_<laya::BareRelay>(module, "BareRelay")
        .def(nb::init<std::uint16_t>(), "engine_port"_a)
        .def_prop_ro("port", &laya::BareRelay::port)
        .def("run", &run<laya::BareRelay>);
    module.def("drive_load", &drive_load, "port"_a, "request"_a, "n_requests"_a, "n_connections"_a, "is_stream"_a,
               "n_events"_a);
}
