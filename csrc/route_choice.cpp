// Owns: which of a model's endpoints serves a request. `laya/routing/choice_twin.py` is the same in Python, and what
// explains a choice; the two must answer alike.
#include <algorithm>

#include "route_table.hpp"

namespace laya {

// What the policies choose by, gathered once.
struct RouteTable::Asked {
    const std::uint32_t* endpoints;  // sorted
    std::uint32_t n;
    Policy policy;
    std::uint64_t affinity_key;
    std::uint64_t key;  // of the session, else of the prompt; 0 = neither
    bool has_session;
    Blocks blocks;
    std::uint32_t n_seqs;
    std::uint64_t tokens;
};

struct RouteTable::Pick {
    std::int32_t endpoint = NO_ENDPOINT;
    bool is_home_kept = true;  // false: the session's endpoint is away, and may come back to its session
};

struct RouteTable::Survey {
    std::int32_t least = NO_ENDPOINT;
    std::uint64_t least_rank = INELIGIBLE;
    std::uint64_t sum_tokens = 0;
    std::uint32_t n_eligible = 0;
};

namespace {

// A newcomer's endpoint, by hash or in turn, is taken while it carries at most this share of what the endpoints carry on average.
constexpr std::uint64_t MOST_SHARE_NUMERATOR = 17;
constexpr std::uint64_t MOST_SHARE_DENOMINATOR = 16;

constexpr std::uint64_t DRAW_STEP = 0x9E3779B97F4A7C15u;

bool is_member(const std::uint32_t* endpoints, std::uint32_t n, std::int32_t endpoint) noexcept {
    const auto wanted = static_cast<std::uint32_t>(endpoint);
    if (n <= MOST_SCANNED) {
        return std::find(endpoints, endpoints + n, wanted) != endpoints + n;
    }
    if (endpoints[n - 1] - endpoints[0] == n - 1) {  // one run of indexes, as replicas usually are
        return wanted - endpoints[0] < n;
    }
    return std::binary_search(endpoints, endpoints + n, wanted);
}

constexpr std::uint32_t below(std::uint64_t draw, std::uint32_t n) noexcept {
    return static_cast<std::uint32_t>((draw & 0xFFFFFFFF) * n >> 32);
}

constexpr bool has_equal_room(std::uint64_t rank, std::uint64_t other) noexcept {
    return (rank & FULL) == (other & FULL);
}

constexpr bool uses_session(Policy policy) noexcept {
    return policy == Policy::AUTO || policy == Policy::SESSION;
}
constexpr bool uses_prefix(Policy policy) noexcept { return policy == Policy::AUTO || policy == Policy::PREFIX; }

}  // namespace

std::int32_t RouteTable::place(const Generation& generation, const ModelSlot& model, const RequestFeature& feature,
                               Blocks blocks, std::uint32_t n_seqs) noexcept {
    const auto policy = static_cast<Policy>(model.policy);
    const std::uint64_t prefix_hash = feature.prefix_hash();
    if (blocks.empty() && prefix_hash != 0) {
        blocks = {&prefix_hash, 1};
    }
    blocks = blocks.first(std::min(blocks.size(), MAX_BLOCKS));
    Asked asked{generation.endpoints_of(model), model.n_endpoints, policy, model.affinity_key, 0,
                feature.session_hash() != 0, blocks, n_seqs, feature.tokens()};
    const bool has_session = asked.has_session;
    if (has_session) {
        asked.key = feature.session_hash() ^ model.affinity_key;
    } else if (!blocks.empty()) {
        asked.key = blocks.back() ^ model.affinity_key;
    }
    AffinityTable::Probe session{};
    session.endpoint = AffinityTable::NONE;
    const bool keeps_session = has_session && uses_session(policy);
    if (keeps_session) {
        session = sessions_.find(asked.key);
    }
    for (;;) {
        const Pick picked = pick(asked, session.endpoint);
        if (picked.endpoint < 0) {
            return picked.endpoint;
        }
        Endpoint& chosen = endpoints_[picked.endpoint];
        if (!chosen.claim()) {
            continue;  // another thread took the trial of a half-open breaker
        }
        chosen.reserve(n_seqs, feature.tokens());
        const auto index = static_cast<std::uint32_t>(picked.endpoint);
        if (keeps_session && picked.is_home_kept) {
            sessions_.remember(session, index);
        }
        if (uses_prefix(policy) && !blocks.empty()) {
            prefixes_.remember(prefixes_.find(blocks.back() ^ model.affinity_key), index);
        }
        return picked.endpoint;
    }
}

RouteTable::Pick RouteTable::pick(const Asked& asked, std::int32_t session_home) noexcept {
    switch (asked.policy) {
        case Policy::AUTO:
        case Policy::SESSION:
        case Policy::PREFIX:
            return pick_near(asked, session_home);
        case Policy::LEAST_TOKENS:
            return {survey_all(asked).least};
        case Policy::POWER_OF_TWO:
            return {survey_two(asked, mix64(next_draw() * DRAW_STEP ^ asked.affinity_key)).least};
        case Policy::WEIGHTED:
            return {pick_weighted(asked)};
        case Policy::HASH:
            return {pick_hashed(asked)};
        case Policy::ROUND_ROBIN:
            return {pick_next(asked)};
    }
    return {};
}

// Near its session or its prompt's beginning, as far as load allows; else where the least is reserved.
RouteTable::Pick RouteTable::pick_near(const Asked& asked, std::int32_t session_home) noexcept {
    const bool is_home_known = session_home >= 0 && is_member(asked.endpoints, asked.n, session_home);
    const std::uint64_t home_rank = is_home_known ? rank(session_home, asked) : INELIGIBLE;
    // With room and no more than a window of tokens it is within the window of any other: nobody else need be looked at.
    if (home_rank < FULL &&
        tokens_of(home_rank) <= endpoints_[session_home].window_tokens.load(std::memory_order_relaxed)) {
        return {session_home};
    }
    const bool is_few = asked.n <= MOST_SCANNED;
    Survey survey;
    if (is_few) {
        survey = survey_all(asked);
    } else {
        survey = survey_two(
            asked, mix64(asked.key != 0 ? asked.key : next_draw() * DRAW_STEP ^ asked.affinity_key));
    }
    Pick picked{survey.least};
    if (survey.least < 0) {
        return picked;
    }
    bool is_released = false;
    if (is_home_known) {
        if (home_rank == INELIGIBLE) {
            picked.is_home_kept = false;
        } else if (is_within_window(session_home, home_rank, survey)) {
            picked.endpoint = session_home;
            return picked;
        } else {
            is_released = true;
        }
    }
    if (uses_prefix(asked.policy) && !asked.blocks.empty()) {
        const Homes homes = find_prefix(asked.blocks, asked.affinity_key, {});
        if (homes.prefix >= 0 && is_member(asked.endpoints, asked.n, homes.prefix) &&
            is_within_window(homes.prefix, rank(homes.prefix, asked), survey)) {
            picked.endpoint = homes.prefix;
            return picked;
        }
    }
    if (asked.key == 0 || !is_few || is_released) {
        return picked;
    }
    const auto is_light = [&](std::int32_t endpoint) noexcept {
        const std::uint64_t at = endpoint < 0 ? INELIGIBLE : rank(endpoint, asked);
        return at != INELIGIBLE && has_equal_room(at, survey.least_rank) &&
               tokens_of(at) * survey.n_eligible * MOST_SHARE_DENOMINATOR <= survey.sum_tokens * MOST_SHARE_NUMERATOR;
    };
    if (asked.has_session) {
        const std::int32_t hashed = highest_score(asked, false);
        picked.endpoint = is_light(hashed) ? hashed : picked.endpoint;
        return picked;
    }
    std::uint32_t place = endpoints_[asked.endpoints[0]].turn.fetch_add(1, std::memory_order_relaxed) % asked.n;
    for (std::uint32_t step = 0; step < asked.n; ++step) {
        const auto endpoint = static_cast<std::int32_t>(asked.endpoints[place]);
        if (is_light(endpoint)) {
            picked.endpoint = endpoint;
            break;
        }
        place = place + 1 == asked.n ? 0 : place + 1;
    }
    return picked;
}

std::uint64_t RouteTable::rank(std::int32_t endpoint, const Asked& asked) const noexcept {
    return endpoints_[endpoint].rank(asked.n_seqs, asked.tokens);
}

bool RouteTable::is_within_window(std::int32_t home, std::uint64_t home_rank, const Survey& survey) const noexcept {
    const std::uint64_t window = endpoints_[home].window_tokens.load(std::memory_order_relaxed);
    return home_rank != INELIGIBLE && has_equal_room(home_rank, survey.least_rank) &&
           tokens_of(home_rank) <= tokens_of(survey.least_rank) + window;
}

RouteTable::Survey RouteTable::survey_all(const Asked& asked) const noexcept {
    Survey survey;
    for (std::uint32_t i = 0; i < asked.n; ++i) {
        const auto endpoint = static_cast<std::int32_t>(asked.endpoints[i]);
        const std::uint64_t at = rank(endpoint, asked);
        if (at == INELIGIBLE) {
            continue;
        }
        survey.sum_tokens += tokens_of(at);
        ++survey.n_eligible;
        if (at < survey.least_rank) {
            survey.least_rank = at;
            survey.least = endpoint;
        }
    }
    return survey;
}

// The better of two places, each moved on to the next eligible endpoint; all of them when neither has room.
RouteTable::Survey RouteTable::survey_two(const Asked& asked, std::uint64_t draw) const noexcept {
    if (asked.n < 2) {
        return survey_all(asked);
    }
    Survey survey;
    const std::uint32_t first = below(draw, asked.n);
    std::uint32_t second = below(draw >> 32, asked.n - 1);
    second += second >= first ? 1 : 0;
    for (std::uint32_t place : {first, second}) {
        for (std::uint32_t step = 0; step < asked.n; ++step) {
            const auto endpoint = static_cast<std::int32_t>(asked.endpoints[place]);
            const std::uint64_t at = rank(endpoint, asked);
            if (at != INELIGIBLE) {
                if (at < survey.least_rank) {
                    survey.least_rank = at;
                    survey.least = endpoint;
                }
                break;
            }
            place = place + 1 == asked.n ? 0 : place + 1;
        }
    }
    return survey.least < 0 || (survey.least_rank & FULL) == 0 ? survey : survey_all(asked);
}

// Rendezvous: each endpoint scores the key with a seed of its own, so that the loss of one moves only its own keys.
std::int32_t RouteTable::highest_score(const Asked& asked, bool needs_room) const noexcept {
    std::int32_t best = NO_ENDPOINT;
    std::uint64_t best_score = 0;
    for (std::uint32_t i = 0; i < asked.n; ++i) {
        const auto endpoint = static_cast<std::int32_t>(asked.endpoints[i]);
        const std::uint64_t at = rank(endpoint, asked);
        if (at == INELIGIBLE || (needs_room && (at & FULL) != 0)) {
            continue;
        }
        const std::uint64_t score = mix64(asked.key ^ endpoints_[endpoint].seed.load(std::memory_order_relaxed));
        if (best < 0 || score > best_score) {
            best = endpoint;
            best_score = score;
        }
    }
    return best;
}

std::int32_t RouteTable::pick_hashed(const Asked& asked) const noexcept {
    if (asked.key == 0) {
        return survey_all(asked).least;
    }
    const std::int32_t with_room = highest_score(asked, true);
    return with_room >= 0 ? with_room : highest_score(asked, false);
}

// At random, by weight, among those with room; among all eligible ones when none has any.
std::int32_t RouteTable::pick_weighted(const Asked& asked) noexcept {
    const Survey survey = survey_all(asked);
    if (survey.least < 0) {
        return NO_ENDPOINT;
    }
    const auto weight_of = [&](std::uint32_t endpoint) noexcept {
        const std::uint64_t at = rank(static_cast<std::int32_t>(endpoint), asked);
        const bool counts = at != INELIGIBLE && has_equal_room(at, survey.least_rank);
        return counts ? std::uint64_t{endpoints_[endpoint].weight.load(std::memory_order_relaxed)} : 0;
    };
    std::uint64_t sum = 0;
    for (std::uint32_t i = 0; i < asked.n; ++i) {
        sum += weight_of(asked.endpoints[i]);
    }
    std::uint64_t drawn = (mix64(next_draw() * DRAW_STEP ^ asked.affinity_key) >> 32) * sum >> 32;
    for (std::uint32_t i = 0; i < asked.n; ++i) {
        const std::uint64_t weight = weight_of(asked.endpoints[i]);
        if (drawn < weight) {
            return static_cast<std::int32_t>(asked.endpoints[i]);
        }
        drawn -= weight;
    }
    return survey.least;  // weights of 0, or endpoints that changed between the two passes
}

// In turn among those with room; among all eligible ones when none has any.
std::int32_t RouteTable::pick_next(const Asked& asked) noexcept {
    const Survey survey = survey_all(asked);
    if (survey.least < 0) {
        return NO_ENDPOINT;
    }
    std::uint32_t place = endpoints_[asked.endpoints[0]].turn.fetch_add(1, std::memory_order_relaxed) % asked.n;
    for (std::uint32_t step = 0; step < asked.n; ++step) {
        const auto endpoint = static_cast<std::int32_t>(asked.endpoints[place]);
        const std::uint64_t at = rank(endpoint, asked);
        if (at != INELIGIBLE && has_equal_room(at, survey.least_rank)) {
            return endpoint;
        }
        place = place + 1 == asked.n ? 0 : place + 1;
    }
    return survey.least;
}

// The longest beginning of the prompt that was once a whole prompt: the conversation's turn before. What merely begins
// alike, such as all conversations with one system prompt, is a newcomer.
Homes RouteTable::find_prefix(Blocks blocks, std::uint64_t affinity_key, Homes homes) const noexcept {
    for (std::size_t n = blocks.size(); n > 0; --n) {
        const std::int32_t endpoint = prefixes_.find(blocks[n - 1] ^ affinity_key).endpoint;
        if (endpoint != AffinityTable::NONE) {
            homes.prefix = endpoint;
            homes.prefix_blocks = n;
            break;
        }
    }
    return homes;
}

}  // namespace laya
