#include "express_lane.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "monotonic.hpp"
#include "plain_http.hpp"

namespace laya {
namespace {

constexpr std::size_t READ_BYTES = 80 * 1024;

bool is_same(std::string_view said, const std::string& known, bool has_known) noexcept {
    return (said.data() != nullptr) == has_known && said == known;
}

bool is_nothing_yet(ssize_t n_read) noexcept { return n_read < 0 && (errno == EAGAIN || errno == EINTR); }

}  // namespace

struct ExpressLane::Client {
    int fd = -1;
    bool has_authorization = false;
    bool has_host = false;
    std::string authorization;
    std::string host;
    std::uint64_t engine = 0;  // that has its request
    Asked asked;
    std::optional<StreamFlow> stream;  // its answer, where that is one
    double idle_since_s = 0;
};

struct ExpressLane::Engine {
    int fd = -1;
    std::uint32_t endpoint = 0;
    std::uint64_t client = 0;  // whose request it has
    std::uint64_t n_most_uses = 0;
    std::uint64_t n_uses = 0;
    bool keeps_streams = false;
    bool has_stream = false;  // as its socket is watched
    std::string origin;
    double idle_since_s = 0;
};

ExpressLane::ExpressLane(PlainLane& lane, std::string id_prefix, std::string stream_kind, std::size_t most_body_bytes)
    : lane_(lane), id_prefix_(std::move(id_prefix)), stream_kind_(std::move(stream_kind)),
      most_body_bytes_(most_body_bytes), buffer_(READ_BYTES) {}

ExpressLane::~ExpressLane() {
    for (const auto& [id, client] : clients_) {
        close(client->fd);
    }
    for (const auto& [id, engine] : engines_) {
        close(engine->fd);
    }
}

std::uint64_t ExpressLane::add_client(int fd, std::string_view authorization, std::string_view host) {
    const std::uint64_t id = ++last_id_;
    auto client = std::make_unique<Client>();
    client->fd = watch_.add(fd, id);
    if (client->fd < 0) {
        return 0;
    }
    client->has_authorization = authorization.data() != nullptr;
    client->has_host = host.data() != nullptr;
    client->authorization.assign(authorization);
    client->host.assign(host);
    client->idle_since_s = monotonic_s();
    clients_.emplace(id, std::move(client));
    return id;
}

std::uint64_t ExpressLane::add_engine(int fd, std::uint32_t endpoint, std::uint64_t n_answers, bool keeps_streams,
                                      std::string origin) {
    const std::uint64_t id = ++last_id_;
    auto engine = std::make_unique<Engine>();
    engine->fd = watch_.add(fd, id);
    if (engine->fd < 0) {
        return 0;
    }
    engine->endpoint = endpoint;
    engine->n_most_uses = n_answers;
    engine->keeps_streams = keeps_streams;
    engine->origin = std::move(origin);
    engine->idle_since_s = monotonic_s();
    engines_.emplace(id, std::move(engine));
    if (endpoint >= idle_.size()) {
        idle_.resize(endpoint + 1);
    }
    idle_[endpoint].push_back(id);
    return id;
}

ExpressLane::Round ExpressLane::turn(const Reserve& reserve) {
    watch_.look();
    if (watch_.has_round()) {
        bool is_flowing = !watch_.streams().empty();
        for (const std::uint64_t id : watch_.streams()) {
            if (const auto engine = engines_.find(id); engine != engines_.end()) {
                is_flowing &= on_engine(id, *engine->second);
            }
        }
        watch_.end_round(is_flowing);  // who waits for the beginning of a stream, or has its end, goes on at once
    }
    for (const std::uint64_t id : watch_.ready()) {
        if (const auto client = clients_.find(id); client != clients_.end()) {
            on_client(id, *client->second, reserve);
        } else if (const auto engine = engines_.find(id); engine != engines_.end()) {
            on_engine(id, *engine->second);
        }
    }
    return end();
}

ExpressLane::Round ExpressLane::offer(std::uint64_t id, std::string_view data, const Reserve& reserve) {
    if (const auto client = clients_.find(id); client != clients_.end()) {
        on_request(id, *client->second, data, reserve);
    }
    return end();
}

void ExpressLane::on_client(std::uint64_t id, Client& client, const Reserve& reserve) {
    if (client.engine != 0) {  // it left, or asks on before it has its answer
        give_client(id, {});
        return;
    }
    const ssize_t n_read = recv(client.fd, buffer_.data(), buffer_.size(), MSG_DONTWAIT);
    if (n_read > 0) {
        on_request(id, client, {buffer_.data(), static_cast<std::size_t>(n_read)}, reserve);
    } else if (!is_nothing_yet(n_read)) {
        give_client(id, {});
    }
}

void ExpressLane::on_request(std::uint64_t id, Client& client, std::string_view data, const Reserve& reserve) {
    const double arrived_s = monotonic_s();
    PlainTaken taken;
    if (!lane_.take(data, most_body_bytes_, taken)) {
        give_client(id, data);
        return;
    }
    const bool is_known = is_same(taken.request.authorization, client.authorization, client.has_authorization) &&
                          is_same(taken.request.host, client.host, client.has_host);
    if (taken.endpoint >= idle_.size()) {
        idle_.resize(taken.endpoint + 1);
    }
    if (!is_known || taken.wants_usage ||
        !reserve(taken.endpoint, taken.promised_tokens, idle_[taken.endpoint].empty())) {
        lane_.drop(taken);
        give_client(id, data);
        return;
    }
    std::vector<std::uint64_t>& idle = idle_[taken.endpoint];
    Asked& asked = client.asked;
    client.engine = idle.back();
    idle.pop_back();
    Engine& engine = *engines_.at(client.engine);
    engine.client = id;
    ++engine.n_uses;
    asked.data.assign(data);
    asked.id = taken.request.request_id.empty() ? id_prefix_ + std::to_string(++n_asked_)
                                                : std::string(taken.request.request_id);
    asked.endpoint = taken.endpoint;
    asked.routed_tokens = taken.routed_tokens;
    asked.promised_tokens = taken.promised_tokens;
    asked.route_s = taken.route_s;
    asked.arrived_s = arrived_s;
    asked.sent_s = monotonic_s();
    client.stream.reset();
    if (engine.has_stream != taken.is_stream) {
        engine.has_stream = taken.is_stream;
        watch_.set_stream(engine.fd, client.engine, taken.is_stream);
    }
    if (taken.is_stream) {
        std::string head = answer_head(asked, stream_kind_, engine).append("transfer-encoding: chunked\r\n\r\n");
        client.stream.emplace(StreamFlow::Start{true, true, false, std::move(head)});
    }
    unsent_.push_back({false, client.engine, std::move(taken.upstream)});
}

// Whether it gives a stream that goes on as it did: neither began nor ended.
bool ExpressLane::on_engine(std::uint64_t id, Engine& engine) {
    const ssize_t n_read = recv(engine.fd, buffer_.data(), buffer_.size(), MSG_DONTWAIT);
    if (is_nothing_yet(n_read)) {
        return true;
    }
    const std::string_view raw(buffer_.data(), static_cast<std::size_t>(std::max<ssize_t>(n_read, 0)));
    PlainAnswer answer;
    if (engine.client == 0) {
        give_engine(id, raw);
    } else if (n_read <= 0) {
        give_client(engine.client, {}, {}, n_read < 0 ? errno : 0);
    } else if (clients_.at(engine.client)->stream) {
        return on_stream(id, engine, raw);
    } else if (read_plain_answer(raw, answer)) {
        on_answer(id, engine, answer);
    } else {
        give_client(engine.client, {}, raw);
    }
    return false;
}

std::string ExpressLane::answer_head(const Asked& asked, std::string_view kind, const Engine& engine) const {
    std::string out;
    out.reserve(128 + kind.size() + asked.id.size() + engine.origin.size());
    out.append("HTTP/1.1 200 OK\r\n").append(kind).append("x-request-id: ").append(asked.id).append("\r\n");
    return out.append(engine.origin);
}

void ExpressLane::on_answer(std::uint64_t id, Engine& engine, const PlainAnswer& answer) {
    const std::string_view type = answer.content_type.empty() ? "application/json" : answer.content_type;
    std::string kind("content-type: ");
    std::string out = answer_head(clients_.at(engine.client)->asked, kind.append(type).append("\r\n"), engine);
    out.append("content-length: ").append(std::to_string(answer.body.size())).append("\r\n\r\n").append(answer.body);
    unsent_.push_back({true, engine.client, std::move(out)});
    served(id, engine, monotonic_s(), {}, false);
}

bool ExpressLane::on_stream(std::uint64_t id, Engine& engine, std::string_view raw) {
    StreamFlow& stream = *clients_.at(engine.client)->stream;
    const bool had_head = stream.has_engine_head();
    std::string out;
    const Cut cut = stream.take(raw, out);
    if (!out.empty()) {
        unsent_.push_back({true, engine.client, std::move(out)});
    }
    if (cut == Cut::LEFT) {
        give_client(engine.client, {});
    } else if (cut == Cut::END) {
        served(id, engine, stream.first_token_s(), stream.seen(), !(engine.keeps_streams && stream.is_clean()));
    }
    return had_head && cut == Cut::MORE;
}

void ExpressLane::served(std::uint64_t id, Engine& engine, double first_token_s, const StreamSeen& seen,
                         bool is_spent) {
    Client& client = *clients_.at(engine.client);
    const double at_s = monotonic_s();
    const Asked& asked = client.asked;
    round_.served.push_back({engine.client, asked.id, asked.endpoint, asked.promised_tokens, asked.route_s,
                             asked.arrived_s, asked.sent_s, first_token_s, at_s, seen});
    lane_.settle(asked.endpoint, asked.routed_tokens);
    client.engine = 0;
    client.stream.reset();
    client.idle_since_s = engine.idle_since_s = at_s;
    engine.client = 0;
    idle_[engine.endpoint].push_back(id);
    if (is_spent || engine.n_uses >= engine.n_most_uses) {
        give_engine(id, {}, is_spent);
    }
}

// What a turn has to send leaves together: only the first write wakes a peer that sleeps.
void ExpressLane::send_all() {
    for (Unsent& each : unsent_) {
        int fd = -1;
        if (each.is_client) {
            const auto found = clients_.find(each.id);
            fd = found == clients_.end() ? -1 : found->second->fd;
        } else {
            const auto found = engines_.find(each.id);
            fd = found == engines_.end() ? -1 : found->second->fd;
        }
        if (fd < 0) {  // it left since: what is still to be sent goes with it
            continue;
        }
        const ssize_t n_sent = send(fd, each.data.data(), each.data.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        each.data.erase(0, static_cast<std::size_t>(std::max<ssize_t>(n_sent, 0)));
        if (each.data.empty()) {
            continue;
        }
        const std::uint64_t client = each.is_client ? each.id : engines_.at(each.id)->client;
        give_client(client, {});
    }
    unsent_.clear();
}

// What was still to be sent to it, or for it to its engine, goes with it.
void ExpressLane::give_client(std::uint64_t id, std::string_view raw, std::string_view engine_raw, int engine_error) {
    const auto found = clients_.find(id);
    if (found == clients_.end()) {
        return;
    }
    Client& client = *found->second;
    ClientBack back;
    back.id = id;
    back.raw.assign(raw);
    for (Unsent& each : unsent_) {
        if (each.is_client && each.id == id) {
            back.unsent.append(std::exchange(each.data, {}));
        } else if (!each.is_client && each.id == client.engine) {
            back.engine_unsent.append(std::exchange(each.data, {}));
        }
    }
    if (client.engine != 0) {
        back.is_asking = true;
        back.engine = client.engine;
        back.is_stream = client.stream.has_value();
        if (back.is_stream) {
            back.answer = client.stream->back();
        }
        back.answer.raw.append(engine_raw);
        back.answer.error = engine_error;
        back.asked = std::move(client.asked);
        const auto engine = engines_.find(client.engine);
        back.n_engine_uses = engine->second->n_uses;
        watch_.drop(engine->second->fd, engine->second->has_stream);
        engines_.erase(engine);
    }
    watch_.drop(client.fd, false);
    clients_.erase(found);
    round_.clients.push_back(std::move(back));
}

void ExpressLane::give_engine(std::uint64_t id, std::string_view raw, bool is_spent) {
    Engine& engine = *engines_.at(id);
    std::vector<std::uint64_t>& idle = idle_[engine.endpoint];
    idle.erase(std::remove(idle.begin(), idle.end(), id), idle.end());
    watch_.drop(engine.fd, engine.has_stream);
    round_.engines.push_back({id, engine.n_uses, is_spent, std::string(raw)});
    engines_.erase(id);
}

ExpressLane::Round ExpressLane::end() {
    send_all();
    return std::exchange(round_, {});
}

ExpressLane::Round ExpressLane::take_client(std::uint64_t client) {
    give_client(client, {});
    return std::exchange(round_, {});
}

ExpressLane::Round ExpressLane::take_endpoint(std::uint32_t endpoint) {
    std::vector<std::uint64_t> asking;
    for (const auto& [id, client] : clients_) {
        if (client->engine != 0 && client->asked.endpoint == endpoint) {
            asking.push_back(id);
        }
    }
    for (const std::uint64_t id : asking) {
        give_client(id, {});
    }
    while (endpoint < idle_.size() && !idle_[endpoint].empty()) {
        give_engine(idle_[endpoint].back(), {});
    }
    return std::exchange(round_, {});
}

ExpressLane::Round ExpressLane::take_all() {
    while (!clients_.empty()) {
        give_client(clients_.begin()->first, {});
    }
    while (!engines_.empty()) {
        give_engine(engines_.begin()->first, {});
    }
    return std::exchange(round_, {});
}

ExpressLane::Round ExpressLane::take_old(double asked_before_s, double idle_before_s) {
    std::vector<std::uint64_t> clients, engines;
    for (const auto& [id, client] : clients_) {
        const bool is_asking = client->engine != 0;
        if (is_asking ? client->asked.sent_s < asked_before_s : client->idle_since_s < idle_before_s) {
            clients.push_back(id);
        }
    }
    for (const auto& [id, engine] : engines_) {
        if (engine->client == 0 && engine->idle_since_s < idle_before_s) {
            engines.push_back(id);
        }
    }
    for (const std::uint64_t id : clients) {
        give_client(id, {});
    }
    for (const std::uint64_t id : engines) {
        give_engine(id, {});
    }
    return std::exchange(round_, {});
}

}  // namespace laya
