// Owns: the door between Python and the native core; with the other bind_*.cpp the only file here that includes Python.
// Knows how to turn Python objects into the core's types and the core's faults into exceptions, and decides nothing.
//
// The GIL is kept on the calls of a request: they take about 100 ns, and giving it up and taking it back costs more. It
// is released while a generation is published and while a bench runs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <limits>
#include <stdexcept>

#include "bench_route.hpp"
#include "bind_bench.hpp"
#include "bind_plain.hpp"
#include "bind_express.hpp"
#include "bind_gate.hpp"
#include "bind_stream.hpp"
#include "route_table.hpp"

namespace nb = nanobind;
using laya::RequestFeature;
using laya::RouteTable;

namespace {

// The UTF-8 bytes of a str, or the bytes of a bytes, borrowed for as long as this lives.
class Text {
  public:
    explicit Text(nb::handle object) {
        if (PyUnicode_Check(object.ptr())) {
            Py_ssize_t size = 0;
            const char* data = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
            if (data != nullptr) {
                view_ = {data, static_cast<std::size_t>(size)};
                return;
            }
            // A lone surrogate, which JSON can carry: it has bytes too, so it is an unknown name and not a fault.
            PyErr_Clear();
            owned_ = nb::steal(PyUnicode_AsEncodedString(object.ptr(), "utf-8", "surrogatepass"));
            if (!owned_.is_valid()) {
                throw nb::python_error();
            }
            object = owned_;
        }
        if (!PyBytes_Check(object.ptr())) {
            throw nb::type_error("a name must be str or bytes");
        }
        view_ = {PyBytes_AS_STRING(object.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(object.ptr()))};
    }
    std::string_view view() const noexcept { return view_; }

  private:
    nb::object owned_;
    std::string_view view_;
};

template <typename Integer>
Integer in_range(std::int64_t value, const char* name, std::int64_t least = 0,
                 std::int64_t most = std::numeric_limits<Integer>::max()) {
    if (value < least || value > most) {
        throw std::invalid_argument(std::string(name) + " must be " + std::to_string(least) + " to " +
                                std::to_string(most) + ", not " + std::to_string(value));
    }
    return static_cast<Integer>(value);
}

constexpr std::int64_t MOST_SEQS = 65535;
constexpr auto MOST_TOKENS = static_cast<std::int64_t>(laya::MAX_TOKENS);

std::uint32_t n_seqs_of(std::int64_t value) { return in_range<std::uint32_t>(value, "n_seqs", 1, MOST_SEQS); }

std::uint32_t endpoint_of(const RouteTable& table, std::int64_t endpoint) {
    if (endpoint < 0 || endpoint >= table.max_endpoints()) {
        throw nb::index_error(("endpoint must be 0 to " + std::to_string(table.max_endpoints() - 1) + ", not " +
                               std::to_string(endpoint))
                                  .c_str());
    }
    return static_cast<std::uint32_t>(endpoint);
}

RequestFeature feature_of(const nb::bytes& packed) {
    if (packed.size() != laya::FEATURE_BYTES) {
        throw nb::value_error("a request feature is 32 bytes");
    }
    return RequestFeature::read(packed.c_str());
}

RequestFeature make_feature(std::int64_t kind, std::int64_t flags, std::int64_t tokens, std::uint64_t model,
                            std::uint64_t session, std::uint64_t prefix) {
    return RequestFeature::pack(laya::FEATURE_VERSION, in_range<std::uint8_t>(kind, "kind"),
                                in_range<std::uint16_t>(flags, "flags"), in_range<std::uint32_t>(tokens, "tokens"),
                                model, session, prefix);
}

nb::bytes pack_feature(std::int64_t kind, std::int64_t flags, std::int64_t tokens, std::uint64_t model,
                       std::uint64_t session, std::uint64_t prefix) {
    char bytes[laya::FEATURE_BYTES];
    make_feature(kind, flags, tokens, model, session, prefix).write(bytes);
    return nb::bytes(bytes, sizeof bytes);
}

auto unpack_feature(const nb::bytes& packed) {
    const RequestFeature feature = feature_of(packed);
    return std::make_tuple(feature.version(), feature.kind(), feature.flags(), feature.tokens(),
                           feature.model_hash(), feature.session_hash(), feature.prefix_hash());
}

// An empty session id is no session: a client that sends the header without a value must not share one with others.
std::uint64_t session_hash(nb::handle session) {
    if (session.is_none()) {
        return 0;
    }
    const Text text(session);
    return text.view().empty() ? 0 : laya::hash_bytes(text.view());
}

// The chained hashes of a prompt, copied out of the bytes that hash_prefix made.
class Blocks {
  public:
    explicit Blocks(const nb::bytes& packed) : n_(packed.size() / 8) {
        if (packed.size() % 8 != 0 || n_ > laya::MAX_BLOCKS) {
            throw std::invalid_argument("prefix_blocks must be what prefix_blocks() made: at most " +
                                        std::to_string(laya::MAX_BLOCKS) + " hashes of 8 bytes");
        }
        for (std::size_t i = 0; i < n_; ++i) {
            hashes_[i] = laya::load_le64(packed.c_str() + 8 * i);
        }
    }
    RouteTable::Blocks view() const noexcept { return {hashes_.data(), n_}; }

  private:
    std::size_t n_;
    laya::PrefixBlocks hashes_;
};

nb::bytes prefix_blocks(nb::handle text) { return packed_blocks(Text(text).view()); }

int route(RouteTable& table, nb::handle model, nb::handle session, std::int64_t kind, std::int64_t flags,
          std::uint64_t prefix_hash, std::int64_t tokens, std::int64_t n_seqs, const nb::bytes& blocks) {
    const Text name(model);
    const RequestFeature feature = make_feature(kind, flags, tokens, 0, session_hash(session), prefix_hash);
    return table.route(name.view(), feature, n_seqs_of(n_seqs), Blocks(blocks).view());
}

// (session's endpoint or -1, prompt's endpoint or -1, how many blocks of the prompt it knows)
auto homes(RouteTable& table, nb::handle model, nb::handle session, const nb::bytes& blocks) {
    const laya::Homes found = table.homes(Text(model).view(), session_hash(session), Blocks(blocks).view());
    return std::make_tuple(found.session, found.prefix, found.prefix_blocks);
}

void publish(RouteTable& table, nb::iterable models) {
    std::vector<laya::ModelRoute> routes;
    for (nb::handle model : models) {
        const auto [names, endpoints, policy] = nb::cast<std::tuple<nb::iterable, nb::iterable, std::int64_t>>(model);
        laya::ModelRoute& route = routes.emplace_back();
        route.policy =
            static_cast<laya::Policy>(in_range<std::uint8_t>(policy, "policy", 0, laya::N_POLICIES - 1));
        for (nb::handle name : names) {
            route.names.emplace_back(Text(name).view());
        }
        for (nb::handle endpoint : endpoints) {
            const auto index = nb::cast<std::int64_t>(endpoint);
            if (index < 0 || index >= table.max_endpoints()) {
                throw nb::value_error(("endpoint " + std::to_string(index) + " is not 0 to " +
                                       std::to_string(table.max_endpoints() - 1))
                                          .c_str());
            }
            route.endpoints.push_back(static_cast<std::uint32_t>(index));
        }
    }
    nb::gil_scoped_release unlocked;
    table.publish(routes);
}

nb::dict bench_choose(RouteTable& table, const nb::bytes& features, const std::vector<std::uint32_t>& first,
                      const std::vector<std::uint32_t>& count, std::size_t n_threads, std::size_t n_requests) {
    if (features.size() % laya::FEATURE_BYTES != 0) {
        throw nb::value_error("a request feature is 32 bytes");
    }
    laya::BenchLoad load{{}, first, count};
    for (std::size_t at = 0; at < features.size(); at += laya::FEATURE_BYTES) {
        load.features.push_back(RequestFeature::read(features.c_str() + at));
    }
    laya::BenchResult result;
    {
        nb::gil_scoped_release unlocked;
        result = laya::bench_choose(table, load, n_threads, n_requests);
    }
    nb::dict answer;
    answer["elapsed_s"] = result.elapsed_s;
    answer["mean_ns"] = result.mean_ns;
    answer["p50_ns"] = result.p50_ns;
    answer["p99_ns"] = result.p99_ns;
    answer["p999_ns"] = result.p999_ns;
    answer["max_ns"] = result.max_ns;
    answer["timer_ns"] = result.timer_ns;
    answer["preempted_share"] = result.preempted_share;
    answer["n_wrong"] = result.n_wrong;
    answer["n_moved"] = result.n_moved;
    return answer;
}

void settle(RouteTable& table, std::int64_t endpoint, std::int64_t n_seqs, std::int64_t tokens) {
    table.settle(endpoint_of(table, endpoint), in_range<std::uint64_t>(n_seqs, "n_seqs", 0, MOST_SEQS),
                 in_range<std::uint64_t>(tokens, "tokens", 0, MOST_TOKENS));
}

int choose(RouteTable& table, const nb::bytes& feature, std::int64_t n_seqs) {
    return table.choose(feature_of(feature), n_seqs_of(n_seqs));
}

void set_eligible(RouteTable& table, std::int64_t endpoint, bool eligible) {
    table.set_eligible(endpoint_of(table, endpoint), eligible);
}

void set_capacity(RouteTable& table, std::int64_t endpoint, std::int64_t max_num_seqs, std::int64_t kv_pool_tokens) {
    table.set_capacity(endpoint_of(table, endpoint),
                       in_range<std::uint32_t>(max_num_seqs, "max_num_seqs", 0, MOST_SEQS),
                       in_range<std::uint64_t>(kv_pool_tokens, "kv_pool_tokens", 0, MOST_TOKENS));
}

laya::Endpoint& at(RouteTable& table, std::int64_t endpoint) { return table.endpoint(endpoint_of(table, endpoint)); }

void first_token(RouteTable& table, std::int64_t endpoint, std::int64_t ttft_us) {
    at(table, endpoint).first_token(in_range<std::uint32_t>(ttft_us, "ttft_us"));
}

bool failed(RouteTable& table, std::int64_t endpoint, std::int64_t trip_after) {
    return at(table, endpoint).failed(in_range<std::uint32_t>(trip_after, "trip_after", 1));
}

nb::tuple inspect(RouteTable& table, std::int64_t endpoint) {
    const laya::Endpoint& found = at(table, endpoint);
    const std::uint64_t load = found.load.load();
    const std::uint64_t health = found.health.load();
    return nb::make_tuple(found.ready.load(), static_cast<int>(laya::Endpoint::breaker_of(health)),
                          laya::seqs_of(load), laya::tokens_of(load), found.max_seqs.load(), found.max_tokens.load(),
                          found.window_tokens.load(), found.weight.load(), found.seed.load(), found.turn.load(),
                          laya::Endpoint::errors_of(health), laya::Endpoint::in_row_of(health), found.ttft_us.load());
}

std::pair<std::uint64_t, std::uint64_t> load(const RouteTable& table, std::int64_t endpoint) {
    const laya::Load load = table.load(endpoint_of(table, endpoint));
    return {load.n_seqs, load.tokens};
}

bool is_eligible(const RouteTable& table, std::int64_t endpoint) {
    return table.is_eligible(endpoint_of(table, endpoint));
}

void construct(RouteTable* self, std::int64_t max_endpoints, std::int64_t session_bytes, std::int64_t prefix_bytes,
               std::int64_t window_tokens) {
    new (self) RouteTable(in_range<std::uint32_t>(max_endpoints, "max_endpoints", 1, laya::MAX_ENDPOINTS),
                          in_range<std::size_t>(session_bytes, "session_bytes", 0, INT64_MAX),
                          in_range<std::uint64_t>(window_tokens, "window_tokens", 0, MOST_TOKENS),
                          in_range<std::size_t>(prefix_bytes, "prefix_bytes", 0, INT64_MAX));
}

void bind_table(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<RouteTable>(module, "RouteTable")
        .def("__init__", &construct, nb::kw_only(), "max_endpoints"_a = 1024, "session_bytes"_a = 1 << 20,
             "prefix_bytes"_a = 1 << 20, "window_tokens"_a = 8192)
        .def("publish", &publish, "models"_a)
        .def("route", &route, "model"_a, "session"_a.none(), "kind"_a, "flags"_a, "prefix_hash"_a, "tokens"_a,
             "n_seqs"_a, "prefix_blocks"_a = nb::bytes("", 0))
        .def("choose", &choose, "feature"_a, "n_seqs"_a = 1)
        .def("settle", &settle, "endpoint"_a, "n_seqs"_a, "tokens"_a)
        .def("homes", &homes, "model"_a, "session"_a.none(), "prefix_blocks"_a = nb::bytes("", 0))
        .def("reset", [](RouteTable& table, std::int64_t endpoint) { table.reset(endpoint_of(table, endpoint)); },
             "endpoint"_a)
        .def("set_eligible", &set_eligible, "endpoint"_a, "eligible"_a)
        .def("set_capacity", &set_capacity, "endpoint"_a, "max_num_seqs"_a, "kv_pool_tokens"_a)
        .def("set_weight",
             [](RouteTable& table, std::int64_t endpoint, std::int64_t weight) {
                 table.set_weight(endpoint_of(table, endpoint), in_range<std::uint16_t>(weight, "weight"));
             },
             "endpoint"_a, "weight"_a)
        .def("set_seed",
             [](RouteTable& table, std::int64_t endpoint, std::uint64_t seed) {
                 table.set_seed(endpoint_of(table, endpoint), seed);
             },
             "endpoint"_a, "seed"_a)
        .def("served", [](RouteTable& table, std::int64_t endpoint) { at(table, endpoint).served(); }, "endpoint"_a)
        .def("failed", &failed, "endpoint"_a, "trip_after"_a = laya::TRIP_AFTER)
        .def("dropped", [](RouteTable& table, std::int64_t endpoint) { at(table, endpoint).dropped(); }, "endpoint"_a)
        .def("half_open", [](RouteTable& table, std::int64_t endpoint) { return at(table, endpoint).half_open(); },
             "endpoint"_a)
        .def("first_token", &first_token, "endpoint"_a, "ttft_us"_a)
        .def("inspect", &inspect, "endpoint"_a)
        .def("load", &load, "endpoint"_a)
        .def("is_eligible", &is_eligible, "endpoint"_a)
        .def_prop_ro("max_endpoints", &RouteTable::max_endpoints)
        .def_prop_ro("session_capacity", &RouteTable::session_capacity)
        .def_prop_ro("prefix_capacity", &RouteTable::prefix_capacity)
        .def_prop_ro("n_draws", &RouteTable::n_draws);
}

}  // namespace

NB_MODULE(_core, module) {
    using namespace nb::literals;
    module.attr("UNKNOWN_MODEL") = laya::UNKNOWN_MODEL;
    module.attr("NO_ENDPOINT") = laya::NO_ENDPOINT;
    module.attr("BAD_FEATURE") = laya::BAD_FEATURE;
    module.attr("FEATURE_VERSION") = laya::FEATURE_VERSION;
    module.attr("FLAG_STREAMING") = laya::FLAG_STREAMING;
    module.attr("COMPILER") = LAYA_COMPILER;
    module.def("hash_name", [](nb::handle name) { return laya::hash_bytes(Text(name).view()); }, "name"_a);
    module.attr("MAX_BLOCKS") = laya::MAX_BLOCKS;
    module.def("prefix_blocks", &prefix_blocks, "text"_a);
    module.def("pack_feature", &pack_feature, nb::kw_only(), "kind"_a, "flags"_a, "tokens"_a, "model_hash"_a,
               "session_hash"_a = 0, "prefix_hash"_a = 0);
    module.def("unpack_feature", &unpack_feature, "feature"_a);
    module.def("bench_choose", &bench_choose, "table"_a, "features"_a, "first"_a, "count"_a, "n_threads"_a,
               "n_requests"_a);
    bind_table(module);
    bind_plain(module);
    bind_express(module);
    bind_stream(module);
    bind_bench(module);
    bind_gate(module);
}
