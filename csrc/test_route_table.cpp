// The route table under threads, without Python: run plain, and built with -fsanitize=thread or address.
//
// Lines that must hold whatever the schedule: a choice is always one of the model's endpoints, an endpoint that was
// ineligible before the choosing began is never chosen, counters return to zero, old generations are freed.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "bench_route.hpp"
#include "route_table.hpp"
#include "test_inputs.hpp"

using laya::ModelRoute;
using laya::RequestFeature;
using laya::RouteTable;

namespace {

RequestFeature feature(const std::string& model, std::uint64_t session, std::uint32_t tokens) {
    return RequestFeature::pack(laya::FEATURE_VERSION, 1, 0, tokens, laya::hash_bytes(model), session, 0);
}

// Model i owns endpoints 4i .. 4i+3; every other generation also holds a model that comes and goes.
constexpr std::uint32_t N_MODELS = 16;
constexpr std::uint32_t ENDPOINTS_EACH = 4;

std::vector<ModelRoute> models(bool with_guest) {
    std::vector<ModelRoute> routes;
    for (std::uint32_t i = 0; i < N_MODELS; ++i) {
        ModelRoute route{{"model-" + std::to_string(i), "alias-" + std::to_string(i)}, {}};
        for (std::uint32_t k = 0; k < ENDPOINTS_EACH; ++k) {
            route.endpoints.push_back(ENDPOINTS_EACH * i + k);
        }
        routes.push_back(route);
    }
    if (with_guest) {
        routes.push_back({{"guest"}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}});  // more than fit in its slot
    }
    return routes;
}

void test_features_keep_their_fields() {
    char bytes[laya::FEATURE_BYTES];
    RequestFeature::pack(1, 2, 0x8001, 0xFFFFFFFF, 3, 4, 5).write(bytes);
    const RequestFeature read = RequestFeature::read(bytes);
    require(read.version() == 1 && read.kind() == 2 && read.flags() == 0x8001 && read.tokens() == 0xFFFFFFFF,
            "head fields survive a round trip");
    require(read.model_hash() == 3 && read.session_hash() == 4 && read.prefix_hash() == 5, "hashes survive too");
}

void test_publish_refuses_and_keeps_the_old_set() {
    RouteTable table(8, 4096, 0);
    table.publish({{{"kept"}, {1}}});
    table.set_eligible(1, true);
    const std::vector<std::vector<ModelRoute>> refused = {{{{}, {1}}}, {{{"a", "a"}, {1}}}, {{{"a"}, {8}}}};
    for (const std::vector<ModelRoute>& routes : refused) {
        bool threw = false;
        try {
            table.publish(routes);
        } catch (const std::invalid_argument&) {
            threw = true;
        }
        require(threw, "a wrong set of models is refused");
    }
    require(table.choose(feature("kept", 0, 1), 1) == 1, "the old set is still in force");
    require(table.choose(RequestFeature{}, 1) == laya::BAD_FEATURE, "a feature of another version is refused");
}

void test_counters_saturate_and_never_pass_zero() {
    RouteTable table(1, 64, 0);
    table.publish({{{"m"}, {0}}});
    table.set_eligible(0, true);
    for (int i = 0; i < 300; ++i) {
        require(table.choose(feature("m", 0, 0xFFFFFFFF), 65535) == 0, "a loaded endpoint is still the only one");
    }
    require(table.load(0).n_seqs == laya::MAX_SEQS && table.load(0).tokens == laya::MAX_TOKENS, "counters saturate");
    table.settle(0, laya::MAX_SEQS + 1, laya::MAX_TOKENS + 1);
    require(table.load(0).n_seqs == 0 && table.load(0).tokens == 0, "counters stop at zero");
}

void choose_and_settle(RouteTable& table, std::uint32_t thread, std::uint32_t n_requests) {
    for (std::uint32_t i = 0; i < n_requests; ++i) {
        const std::uint32_t model = (i * 7 + thread) % N_MODELS;
        const std::string name = (i % 2 ? "alias-" : "model-") + std::to_string(model);
        const std::uint64_t session = laya::mix64(i % 512);
        const std::int32_t endpoint = i % 3 ? table.route(name, feature("", session, 64), 1)
                                            : table.choose(feature(name, session, 64), 1);
        require(endpoint >= 0, "a model with eligible endpoints has one to give");
        const auto chosen = static_cast<std::uint32_t>(endpoint);
        require(chosen / ENDPOINTS_EACH == model, "the endpoint is the model's own");
        require(chosen % ENDPOINTS_EACH != 3, "an ineligible endpoint is not chosen");
        table.settle(chosen, 1, 64);
        const std::int32_t guest = table.route("guest", feature("", session, 64), 2);
        require(guest == laya::UNKNOWN_MODEL || (guest >= 0 && guest < 12), "a guest is unknown or served");
        if (guest >= 0) {
            table.settle(static_cast<std::uint32_t>(guest), 2, 64);
        }
    }
}

void test_threads_choose_while_a_writer_publishes(std::uint32_t n_requests) {
    RouteTable table(N_MODELS * ENDPOINTS_EACH, 16384, 1024, 16384);
    table.publish(models(false));
    for (std::uint32_t endpoint = 0; endpoint < table.max_endpoints(); ++endpoint) {
        table.set_capacity(endpoint, 2, 4096);
        table.set_eligible(endpoint, endpoint % ENDPOINTS_EACH != 3);
    }
    std::atomic<bool> done{false};
    std::vector<std::thread> threads;
    for (std::uint32_t thread = 0; thread < 8; ++thread) {
        threads.emplace_back([&table, thread, n_requests] { choose_and_settle(table, thread, n_requests); });
    }
    std::thread writer([&] {
        for (std::uint32_t i = 0; !done.load(); ++i) {
            table.publish(models(i % 2 == 0));
            // The first endpoint of each model dies and comes back; two others always remain.
            table.set_eligible(i % N_MODELS * ENDPOINTS_EACH, i % 32 >= 16);
            table.set_capacity(i % N_MODELS * ENDPOINTS_EACH + 1, i % 3, 4096);
            require(table.n_generations() <= 4, "generations are reclaimed");
        }
    });
    for (std::thread& thread : threads) {
        thread.join();
    }
    done.store(true);
    writer.join();
    for (std::uint32_t endpoint = 0; endpoint < table.max_endpoints(); ++endpoint) {
        require(table.load(endpoint).n_seqs == 0 && table.load(endpoint).tokens == 0, "counters return to zero");
    }
    require(table.n_generations() == 1, "without readers only the current generation is left");
}

// One half-open endpoint beside a sound one: however many threads ask, each opening lets exactly one trial through.
void test_half_open_gives_one_trial(std::uint32_t n_rounds) {
    RouteTable table(2, 4096, 1024);
    table.publish({{{"m"}, {0, 1}, laya::Policy::LEAST_TOKENS}});
    table.set_eligible(0, true);
    table.set_eligible(1, true);
    table.endpoint(1).reserve(1, 1 << 20);  // so that endpoint 0 is the one that all want
    for (std::uint32_t round = 0; round < n_rounds; ++round) {
        require(table.endpoint(0).failed(1) && !table.endpoint(0).failed(1), "a breaker opens once");
        require(table.choose(feature("m", 0, 1), 1) == 1, "an open endpoint is not chosen");
        table.settle(1, 1, 1);
        require(table.endpoint(0).half_open(), "an open breaker can be half opened");
        std::atomic<std::uint32_t> n_trials{0};
        std::vector<std::thread> threads;
        for (int thread = 0; thread < 4; ++thread) {
            threads.emplace_back([&] {
                for (int i = 0; i < 8; ++i) {
                    const std::int32_t chosen = table.choose(feature("m", laya::mix64(i), 1), 1);
                    n_trials.fetch_add(chosen == 0 ? 1 : 0);
                    table.settle(static_cast<std::uint32_t>(chosen), 1, 1);
                }
            });
        }
        for (std::thread& thread : threads) {
            thread.join();
        }
        require(n_trials.load() == 1, "exactly one trial");
        table.endpoint(0).served();
    }
    require(table.load(0).n_seqs == 0 && table.load(1).n_seqs == 1, "nothing is left of them");
}

// Every policy under threads while endpoints fail and come back, with prompts.
void test_policies_under_threads(std::uint32_t n_requests) {
    constexpr std::uint32_t N = 24;
    RouteTable table(N, 4096, 1024, 4096);
    std::vector<ModelRoute> routes;
    for (std::uint8_t policy = 0; policy < laya::N_POLICIES; ++policy) {
        for (const std::uint32_t n : {3u, N}) {
            ModelRoute route{{std::to_string(policy) + "/" + std::to_string(n)}, {}, static_cast<laya::Policy>(policy)};
            for (std::uint32_t endpoint = 0; endpoint < n; ++endpoint) {
                route.endpoints.push_back(endpoint);
            }
            routes.push_back(route);
        }
    }
    table.publish(routes);
    for (std::uint32_t endpoint = 1; endpoint < N; ++endpoint) {
        table.set_eligible(endpoint, true);
    }
    const std::string text(3000, 'x');
    laya::PrefixBlocks blocks;
    const std::size_t n_blocks = laya::hash_prefix(text, blocks);
    std::vector<std::thread> threads;
    for (std::uint32_t thread = 0; thread < 4; ++thread) {
        threads.emplace_back([&, thread] {
            for (std::uint32_t i = 0; i < n_requests; ++i) {
                const ModelRoute& route = routes[(i + thread) % routes.size()];
                const RouteTable::Blocks prompt(blocks.data(), (i * 7 + thread) % n_blocks);
                const std::int32_t chosen =
                    table.route(route.names[0], feature("", i % 3 ? 0 : laya::mix64(i % 64), 32), 1, prompt);
                require(chosen == laya::NO_ENDPOINT || chosen > 0, "an endpoint that is never ready is never chosen");
                if (chosen >= 0) {
                    laya::Endpoint& at = table.endpoint(static_cast<std::uint32_t>(chosen));
                    at.first_token(i % 5000);
                    i % 5 == 0 ? static_cast<void>(at.failed(2)) : i % 7 == 0 ? at.dropped() : at.served();
                    table.settle(static_cast<std::uint32_t>(chosen), 1, 32);
                }
                table.endpoint(i % N).half_open();
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    for (std::uint32_t endpoint = 0; endpoint < N; ++endpoint) {
        require(table.load(endpoint).n_seqs == 0 && table.load(endpoint).tokens == 0, "counters return to zero");
    }
}

void test_bench_checks_its_answers(std::size_t n_requests) {
    RouteTable table(4, 4096, 1 << 20);
    table.publish({{{"a"}, {0, 1}}, {{"b"}, {2, 3}}});
    for (std::uint32_t endpoint = 0; endpoint < 4; ++endpoint) {
        table.set_eligible(endpoint, true);
    }
    laya::BenchLoad load{{feature("a", 1, 8), feature("b", 2, 8)}, {0, 2}, {2, 2}};
    const laya::BenchResult right = laya::bench_choose(table, load, 4, n_requests);
    require(right.n_wrong == 0 && right.n_moved == 0, "right answers are right");
    load.first = {2, 0};
    require(laya::bench_choose(table, load, 4, n_requests).n_wrong == n_requests, "wrong answers are counted");
}

// For counting instructions: `test_route_table count N MODELS ENDPOINTS` chooses and settles N times, uniformly over the
// models; two N apart by a million differ by what a million of them take.
int count(std::uint32_t n_requests, std::uint32_t n_models, std::uint32_t n_endpoints) {
    RouteTable table(n_endpoints, std::max(std::size_t{1} << 20, std::size_t{32} * n_models), 8192);  // a quarter is used
    std::vector<ModelRoute> routes;
    std::vector<RequestFeature> features;
    for (std::uint32_t i = 0; i < n_models; ++i) {
        ModelRoute route{{"model-" + std::to_string(i)}, {}};
        for (std::uint32_t each = 0; each < std::max(1u, n_endpoints / n_models); ++each) {
            route.endpoints.push_back((i * std::max(1u, n_endpoints / n_models) + each) % n_endpoints);
        }
        features.push_back(feature(route.names[0], laya::mix64(i % 1000 + 1), 128));
        routes.push_back(std::move(route));
    }
    table.publish(routes);
    for (std::uint32_t endpoint = 0; endpoint < n_endpoints; ++endpoint) {
        table.set_eligible(endpoint, true);
    }
    for (const RequestFeature& asked : features) {  // every session has its endpoint before anything is counted
        table.settle(static_cast<std::uint32_t>(table.choose(asked, 1)), 1, 128);
    }
    std::uint32_t at = 0;
    for (std::uint32_t i = 0; i < n_requests; ++i) {
        at = (at + 7919) % n_models;
        table.settle(static_cast<std::uint32_t>(table.choose(features[at], 1)), 1, 128);
    }
    return table.load(0).n_seqs == 0 ? 0 : 1;
}

std::uint32_t number(const char* text) { return static_cast<std::uint32_t>(std::atoi(text)); }

}  // namespace

int main(int argc, char** argv) {
    if (argc == 5 && std::string(argv[1]) == "count") {
        return count(number(argv[2]), number(argv[3]), number(argv[4]));
    }
    const std::uint32_t n_requests = argc > 1 ? number(argv[1]) : 20000;
    test_features_keep_their_fields();
    test_publish_refuses_and_keeps_the_old_set();
    test_counters_saturate_and_never_pass_zero();
    test_threads_choose_while_a_writer_publishes(n_requests);
    test_half_open_gives_one_trial(n_requests / 200);
    test_policies_under_threads(n_requests);
    test_bench_checks_its_answers(n_requests);
    std::puts("ok");
    return 0;
}
