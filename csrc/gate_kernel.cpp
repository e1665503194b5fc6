#include "gate_kernel.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>

#include "gate_threads.hpp"

#if defined(__x86_64__)
#define LAYA_TARGET(name) __attribute__((target(name)))
#endif
#define LAYA_INLINE [[gnu::always_inline]] inline

namespace laya {
namespace {

constexpr std::size_t EXPERTS_A_TILE = 4;
constexpr std::size_t HIDDEN_A_STEP = 2048;  // of eight experts 64 KiB: stays in the second-level cache while tokens pass
constexpr std::size_t HIDDEN_OF_ONE_TOKEN = 1024;  // nothing is used twice but x: so much of it stays in the first-level cache
constexpr std::size_t TOKENS_A_CHUNK = 12;  // a multiple of every tile's tokens; what a thread takes at a time
constexpr std::size_t PRODUCTS_A_THREAD = 1 << 20;  // below this, waking another one costs more than it brings

struct Problem {
    const void* x;
    GateInput input;
    const float* weight;
    std::size_t n_tokens;
    std::size_t n_experts;
    std::size_t hidden;
    float* logits;
};

template <std::size_t LANES>
struct Lanes {
    typedef float Floats __attribute__((vector_size(LANES * sizeof(float))));
    typedef std::uint32_t Words __attribute__((vector_size(LANES * sizeof(float))));
    typedef std::uint16_t Halves __attribute__((vector_size(LANES * sizeof(std::uint16_t))));
};

template <std::size_t LANES>
LAYA_INLINE void load(const float* from, typename Lanes<LANES>::Floats& into) {
    std::memcpy(&into, from, sizeof into);
}

// A bfloat16 is the upper half of a float.
template <std::size_t LANES>
LAYA_INLINE void load(const std::uint16_t* from, typename Lanes<LANES>::Floats& into) {
    typename Lanes<LANES>::Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    const auto words = __builtin_convertvector(halves, typename Lanes<LANES>::Words) << 16;
    std::memcpy(&into, &words, sizeof into);
}

LAYA_INLINE float scalar(float value) { return value; }
LAYA_INLINE float scalar(std::uint16_t value) { return std::bit_cast<float>(static_cast<std::uint32_t>(value) << 16); }

template <std::size_t LANES>
LAYA_INLINE float sum_of(const typename Lanes<LANES>::Floats& lanes) {
    if constexpr (LANES == 2) {
        return lanes[0] + lanes[1];
    } else {
        typename Lanes<LANES / 2>::Floats halves[2];
        std::memcpy(halves, &lanes, sizeof halves);
        const typename Lanes<LANES / 2>::Floats sums = halves[0] + halves[1];
        return sum_of<LANES / 2>(sums);
    }
}

// logits[token][expert] += x[token][from..to) . weight[expert][from..to), for one tile; every sum in a register.
template <std::size_t LANES, std::size_t TOKENS, std::size_t EXPERTS, typename In>
LAYA_INLINE void add_tile(const In* x, const float* weight, std::size_t hidden, std::size_t from, std::size_t to,
                          float* logits, std::size_t n_experts) {
    typename Lanes<LANES>::Floats sums[TOKENS][EXPERTS] = {};
    std::size_t at = from;
    for (; at + LANES <= to; at += LANES) {
        typename Lanes<LANES>::Floats values[TOKENS];
#pragma GCC unroll 8
        for (std::size_t token = 0; token < TOKENS; ++token) {
            load<LANES>(x + token * hidden + at, values[token]);
        }
#pragma GCC unroll 8
        for (std::size_t expert = 0; expert < EXPERTS; ++expert) {
            typename Lanes<LANES>::Floats row;
            load<LANES>(weight + expert * hidden + at, row);
#pragma GCC unroll 8
            for (std::size_t token = 0; token < TOKENS; ++token) {
                sums[token][expert] += values[token] * row;
            }
        }
    }
    for (std::size_t token = 0; token < TOKENS; ++token) {
        for (std::size_t expert = 0; expert < EXPERTS; ++expert) {
            float sum = sum_of<LANES>(sums[token][expert]);
            for (std::size_t rest = at; rest < to; ++rest) {
                sum += scalar(x[token * hidden + rest]) * weight[expert * hidden + rest];
            }
            logits[token * n_experts + expert] += sum;
        }
    }
}

template <std::size_t LANES, std::size_t TOKENS, typename In>
LAYA_INLINE void add_experts(const Problem& problem, const In* x, std::size_t from, std::size_t to, float* logits) {
    const std::size_t hidden = problem.hidden;
    const std::size_t n_experts = problem.n_experts;
    std::size_t expert = 0;
    for (; expert + EXPERTS_A_TILE <= n_experts; expert += EXPERTS_A_TILE) {
        add_tile<LANES, TOKENS, EXPERTS_A_TILE>(x, problem.weight + expert * hidden, hidden, from, to, logits + expert,
                                                n_experts);
    }
    for (; expert < n_experts; ++expert) {
        add_tile<LANES, TOKENS, 1>(x, problem.weight + expert * hidden, hidden, from, to, logits + expert, n_experts);
    }
}

template <std::size_t LANES, std::size_t TOKENS, typename In>
LAYA_INLINE void add_chunk(const Problem& problem, std::size_t first, std::size_t last) {
    const In* x = static_cast<const In*>(problem.x);
    std::fill(problem.logits + first * problem.n_experts, problem.logits + last * problem.n_experts, 0.0F);
    const std::size_t step = last - first == 1 ? HIDDEN_OF_ONE_TOKEN : HIDDEN_A_STEP;
    for (std::size_t from = 0; from < problem.hidden; from += step) {
        const std::size_t to = std::min(problem.hidden, from + step);
        std::size_t token = first;
        for (; token + TOKENS <= last; token += TOKENS) {
            add_experts<LANES, TOKENS>(problem, x + token * problem.hidden, from, to,
                                       problem.logits + token * problem.n_experts);
        }
        for (; token < last; ++token) {
            add_experts<LANES, 1>(problem, x + token * problem.hidden, from, to,
                                  problem.logits + token * problem.n_experts);
        }
    }
}

template <std::size_t LANES, std::size_t TOKENS>
LAYA_INLINE void add_chunk(const Problem& problem, std::size_t first, std::size_t last) {
    if (problem.input == GateInput::FLOAT32) {
        add_chunk<LANES, TOKENS, float>(problem, first, last);
    } else {
        add_chunk<LANES, TOKENS, std::uint16_t>(problem, first, last);
    }
}

void logits_baseline(const Problem& problem, std::size_t first, std::size_t last) {
    add_chunk<4, 2>(problem, first, last);
}

#if defined(__x86_64__)
LAYA_TARGET("avx2,fma") void logits_avx2(const Problem& problem, std::size_t first, std::size_t last) {
    add_chunk<8, 3>(problem, first, last);
}

LAYA_TARGET("avx512f,avx512bw,avx512vl,avx512dq,fma")
void logits_avx512(const Problem& problem, std::size_t first, std::size_t last) {
    add_chunk<16, 6>(problem, first, last);
}
#endif

struct Implementation {
    const char* name;
    void (*logits)(const Problem&, std::size_t, std::size_t);
};

// Those that this processor has, the best first.
std::vector<Implementation> found_here() {
    std::vector<Implementation> found;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
        found.push_back({"avx512", logits_avx512});
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        found.push_back({"avx2", logits_avx2});
    }
#endif
    found.push_back({"baseline", logits_baseline});
    return found;
}

const std::vector<Implementation>& implementations() {
    static const std::vector<Implementation> here = found_here();
    return here;
}

std::atomic<const Implementation*> in_use{&implementations().front()};

}  // namespace

const char* gate_instructions() noexcept { return in_use.load()->name; }

std::vector<const char*> gate_instructions_here() {
    std::vector<const char*> names;
    for (const Implementation& each : implementations()) {
        names.push_back(each.name);
    }
    return names;
}

void use_gate_instructions(std::string_view name) {
    for (const Implementation& each : implementations()) {
        if (each.name == name) {
            in_use.store(&each);
            return;
        }
    }
    throw std::invalid_argument("this processor has no such instructions: " + std::string(name));
}

void gate(const GateRule& rule, const void* x, GateInput input, const float* weight, std::size_t n_tokens,
          std::size_t hidden, std::size_t n_threads, float* logits, float* weights, std::int32_t* ids) {
    const Problem problem{x, input, weight, n_tokens, rule.n_experts, hidden, logits};
    const Implementation& implementation = *in_use.load(std::memory_order_relaxed);
    const auto chunk = [&](std::size_t index) {
        const std::size_t first = index * TOKENS_A_CHUNK;
        const std::size_t last = std::min(n_tokens, first + TOKENS_A_CHUNK);
        implementation.logits(problem, first, last);
        if (rule.logit_bias != nullptr) {
            for (std::size_t token = first; token < last; ++token) {
                for (std::size_t expert = 0; expert < rule.n_experts; ++expert) {
                    logits[token * rule.n_experts + expert] += rule.logit_bias[expert];
                }
            }
        }
        gate_select(rule, logits + first * rule.n_experts, last - first, weights + first * rule.top_k,
                    ids + first * rule.top_k);
    };
    const std::size_t n_chunks = (n_tokens + TOKENS_A_CHUNK - 1) / TOKENS_A_CHUNK;
    const std::size_t worth = n_tokens * rule.n_experts * hidden / PRODUCTS_A_THREAD;
    const std::size_t n_wanted = std::min(n_threads, worth);
    if (n_wanted <= 1 || n_chunks == 1) {
        for (std::size_t index = 0; index < n_chunks; ++index) {
            chunk(index);
        }
        return;
    }
    share_out(n_chunks, n_wanted, chunk);
}

}  // namespace laya
