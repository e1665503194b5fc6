// The gate kernel against sums in double precision: any shape, both inputs, no byte beyond its tensors, and threads that share
// one call, several callers, and a process that forked. Run plain, and with a sanitizer.
#include <sys/wait.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

#include "gate_kernel.hpp"

namespace {

struct Sizes {
    std::size_t n_tokens, hidden, n_experts, top_k;
};

struct Result {
    std::vector<float> logits, weights;
    std::vector<std::int32_t> ids;
    bool operator==(const Result&) const = default;
};

struct Inputs {
    explicit Inputs(const Sizes& sizes) : x(sizes.n_tokens * sizes.hidden), weight(sizes.n_experts * sizes.hidden) {
        std::mt19937 random(static_cast<unsigned>(sizes.hidden));
        std::normal_distribution<float> normal;
        for (float& value : x) {
            value = std::bit_cast<float>(std::bit_cast<std::uint32_t>(normal(random)) & 0xffff0000U);  // a bfloat16 too
        }
        for (float& value : weight) {
            value = normal(random) / std::sqrt(static_cast<float>(sizes.hidden));
        }
        for (const float value : x) {
            halves.push_back(static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16));
        }
    }
    std::vector<float> x, weight;
    std::vector<std::uint16_t> halves;
};

Result run(const Sizes& sizes, const Inputs& inputs, laya::GateInput input, std::size_t n_threads) {
    laya::GateRule rule;
    rule.n_experts = sizes.n_experts;
    rule.top_k = sizes.top_k;
    Result result{std::vector<float>(sizes.n_tokens * sizes.n_experts), std::vector<float>(sizes.n_tokens * sizes.top_k),
                  std::vector<std::int32_t>(sizes.n_tokens * sizes.top_k)};
    const void* x = input == laya::GateInput::FLOAT32 ? static_cast<const void*>(inputs.x.data()) : inputs.halves.data();
    laya::gate(rule, x, input, inputs.weight.data(), sizes.n_tokens, sizes.hidden, n_threads, result.logits.data(),
               result.weights.data(), result.ids.data());
    return result;
}

bool is_right(const Sizes& sizes, const Inputs& inputs, const Result& result) {
    for (std::size_t token = 0; token < sizes.n_tokens; ++token) {
        for (std::size_t expert = 0; expert < sizes.n_experts; ++expert) {
            double sum = 0;
            for (std::size_t at = 0; at < sizes.hidden; ++at) {
                sum += static_cast<double>(inputs.x[token * sizes.hidden + at]) *
                       static_cast<double>(inputs.weight[expert * sizes.hidden + at]);
            }
            if (std::abs(sum - static_cast<double>(result.logits[token * sizes.n_experts + expert])) > 1e-5) {
                return false;
            }
        }
        const float* logits = &result.logits[token * sizes.n_experts];
        double total = 0;
        for (std::size_t rank = 0; rank < sizes.top_k; ++rank) {
            const std::int32_t id = result.ids[token * sizes.top_k + rank];
            total += static_cast<double>(result.weights[token * sizes.top_k + rank]);
            if (rank > 0 && logits[id] > logits[result.ids[token * sizes.top_k + rank - 1]]) {
                return false;
            }
        }
        if (std::abs(total - 1) > 1e-5) {
            return false;
        }
    }
    return true;
}

bool any_shape_is_right() {
    for (const Sizes& sizes : {Sizes{1, 1, 1, 1}, Sizes{1, 7, 3, 2}, Sizes{5, 33, 8, 2}, Sizes{13, 2049, 9, 9},
                               Sizes{128, 512, 8, 2}, Sizes{25, 100, 64, 8}, Sizes{2, 64, 600, 3}, Sizes{0, 64, 8, 2}}) {
        const Inputs inputs(sizes);
        const Result floats = run(sizes, inputs, laya::GateInput::FLOAT32, 1);
        if (!is_right(sizes, inputs, floats) || run(sizes, inputs, laya::GateInput::BFLOAT16, 1) != floats) {
            std::printf("gate: wrong for %zu x %zu, %zu experts\n", sizes.n_tokens, sizes.hidden, sizes.n_experts);
            return false;
        }
    }
    return true;
}

constexpr Sizes LARGE{300, 2048, 8, 2};

bool callers_share_the_threads() {
    const Inputs inputs(LARGE);
    const Result alone = run(LARGE, inputs, laya::GateInput::FLOAT32, 1);
    std::vector<int> n_wrong(4);
    std::vector<std::thread> callers;
    for (int& wrong : n_wrong) {
        callers.emplace_back([&] {
            for (int round = 0; round < 25; ++round) {
                wrong += run(LARGE, inputs, laya::GateInput::FLOAT32, 4) != alone ? 1 : 0;
            }
        });
    }
    for (std::thread& caller : callers) {
        caller.join();
    }
    return n_wrong == std::vector<int>(4);
}

#if defined(__SANITIZE_THREAD__)
constexpr std::size_t THREADS_IN_CHILD = 1;  // this sanitizer starts none there
#else
constexpr std::size_t THREADS_IN_CHILD = 4;
#endif

// The threads stay with the parent: a child that waited for them would wait for ever.
bool child_of_a_fork_computes() {
    const Inputs inputs(LARGE);
    const Result before = run(LARGE, inputs, laya::GateInput::FLOAT32, 4);
    const pid_t child = fork();
    if (child == 0) {
        alarm(20);
        _exit(run(LARGE, inputs, laya::GateInput::FLOAT32, THREADS_IN_CHILD) == before ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

bool every_kind_of_instructions_is_right() {
    const std::string_view best = laya::gate_instructions();
    bool is_right = true;
    for (const char* name : laya::gate_instructions_here()) {
        laya::use_gate_instructions(name);
        is_right = is_right && laya::gate_instructions() == std::string_view(name) && any_shape_is_right();
    }
    laya::use_gate_instructions(best);
    return is_right;
}

int main() {
    const bool is_right = every_kind_of_instructions_is_right() && callers_share_the_threads() && child_of_a_fork_computes();
    std::printf("gate (%s): %s\n", laya::gate_instructions(), is_right ? "right" : "WRONG");
    return is_right ? 0 : 1;
}
