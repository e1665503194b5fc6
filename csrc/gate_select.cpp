#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "gate_kernel.hpp"

#define LAYA_INLINE [[gnu::always_inline]] inline

namespace laya {
namespace {

constexpr float LOWEST = -std::numeric_limits<float>::infinity();
constexpr std::int64_t TAKEN = std::numeric_limits<std::int64_t>::min();
constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();
constexpr std::size_t ON_STACK = 512;

LAYA_INLINE std::int64_t largest_here(const std::int64_t* keys, std::size_t n_keys) {
    std::int64_t largest = TAKEN;
    for (std::size_t index = 0; index < n_keys; ++index) {
        largest = std::max(largest, keys[index]);
    }
    return largest;
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) std::int64_t largest_avx512(const std::int64_t* keys, std::size_t n_keys) {
    return largest_here(keys, n_keys);
}
const bool HAS_AVX512 = __builtin_cpu_supports("avx512f") != 0;
#endif

// Eight at a time where the processor has that comparison; for a few experts a call costs more than it brings.
LAYA_INLINE std::int64_t largest_of(const std::int64_t* keys, std::size_t n_keys) {
#if defined(__x86_64__)
    if (n_keys >= 32 && HAS_AVX512) {
        return largest_avx512(keys, n_keys);
    }
#endif
    return largest_here(keys, n_keys);
}

float sigmoid(float value) { return 1.0F / (1.0F + std::exp(-value)); }

float sqrt_softplus(float value) {
    // As torch: above 20 softplus is its argument.
    return std::sqrt(value > 20.0F ? value : std::log1p(std::exp(value)));
}

// One token's scratch: the choice values, of which chosen ones are taken out.
class Row {
  public:
    Row(const GateRule& rule, const float* logits, float* choice, std::int64_t* keys)
        : rule_(rule), logits_(logits), choice_(choice), keys_(keys) {}

    void select(float* weights, std::int32_t* ids) {
        if (!fill_keys()) {
            for (std::size_t index = 0; index < rule_.top_k; ++index) {
                ids[index] = static_cast<std::int32_t>(index);
                weights[index] = NOT_A_NUMBER;
            }
            return;
        }
        take_best(ids);
        weigh(weights, ids);
    }

  private:
    // False where a logit is NaN.
    bool fill_keys() {
        const float* choice = logits_;
        if (is_grouped() || rule_.choice_bias != nullptr) {
            fill_choice();
            choice = choice_;
        }
        bool has_nan = false;
        for (std::size_t expert = 0; expert < rule_.n_experts; ++expert) {
            has_nan |= logits_[expert] != logits_[expert];
            keys_[expert] = key_of(choice[expert], expert);
        }
        return !has_nan;
    }

    bool is_grouped() const { return rule_.n_top_groups < rule_.n_groups; }

    // By logits where that is the same order: scores underflow and saturate, logits do not.
    bool chooses_by_score() const {
        return rule_.choice_bias != nullptr || (is_grouped() && rule_.group_score == GroupScore::SUM_TOP2);
    }

    void fill_choice() {
        if (chooses_by_score()) {
            fill_scores();
        } else {
            std::copy_n(logits_, rule_.n_experts, choice_);
        }
        if (is_grouped()) {
            mask_groups();
        }
    }

    void fill_scores() {
        const float max = rule_.score == GateScore::SOFTMAX ? *std::max_element(logits_, logits_ + rule_.n_experts) : 0;
        const float sum = rule_.score == GateScore::SOFTMAX ? sum_of_exp(max) : 0;
        for (std::size_t expert = 0; expert < rule_.n_experts; ++expert) {
            const float bias = rule_.choice_bias != nullptr ? rule_.choice_bias[expert] : 0.0F;
            choice_[expert] = score(logits_[expert], max, sum) + bias;
        }
    }

    float sum_of_exp(float max) const {
        float sum = 0;
        for (std::size_t expert = 0; expert < rule_.n_experts; ++expert) {
            sum += std::exp(logits_[expert] - max);
        }
        return sum;
    }

    float score(float logit, float max, float sum) const {
        switch (rule_.score) {
            case GateScore::SIGMOID:
                return sigmoid(logit);
            case GateScore::SQRT_SOFTPLUS:
                return sqrt_softplus(logit);
            case GateScore::SOFTMAX:
                break;
        }
        return std::exp(logit - max) / sum;
    }

    void mask_groups() {
        const std::size_t size = rule_.n_experts / rule_.n_groups;
        std::vector<float> scores(rule_.n_groups);
        for (std::size_t group = 0; group < rule_.n_groups; ++group) {
            float best = LOWEST;
            float second = LOWEST;
            for (std::size_t expert = group * size; expert < (group + 1) * size; ++expert) {
                const float value = choice_[expert];
                second = std::max(second, std::min(best, value));
                best = std::max(best, value);
            }
            scores[group] = rule_.group_score == GroupScore::SUM_TOP2 && size > 1 ? best + second : best;
        }
        std::vector<bool> stays(rule_.n_groups);
        for (std::size_t round = 0; round < rule_.n_top_groups; ++round) {
            std::size_t best = rule_.n_groups;
            for (std::size_t group = 0; group < rule_.n_groups; ++group) {
                if (!stays[group] && (best == rule_.n_groups || scores[group] > scores[best])) {
                    best = group;
                }
            }
            stays[best] = true;
        }
        for (std::size_t expert = 0; expert < rule_.n_experts; ++expert) {
            if (!stays[expert / size]) {
                choice_[expert] = LOWEST;
            }
        }
    }

    // k rounds of the largest key, which then is out of the running.
    void take_best(std::int32_t* ids) {
        for (std::size_t round = 0; round < rule_.top_k; ++round) {
            const std::int64_t largest = largest_of(keys_, rule_.n_experts);
            const auto best = ~static_cast<std::uint32_t>(largest);
            ids[round] = static_cast<std::int32_t>(best);
            keys_[best] = TAKEN;
        }
    }

    // Ordered as the values are, and among equal ones the lower index higher: the best is found without a branch.
    static std::int64_t key_of(float value, std::size_t expert) {
        const auto bits = std::bit_cast<std::int32_t>(value + 0.0F);  // -0 is equal to 0
        const std::int32_t ordered = bits ^ ((bits >> 31) & 0x7fffffff);
        return static_cast<std::int64_t>(ordered) * (std::int64_t{1} << 32) |
               static_cast<std::int64_t>(~static_cast<std::uint32_t>(expert));
    }

    void weigh(float* weights, const std::int32_t* ids) const {
        const std::size_t top_k = rule_.top_k;
        if (rule_.score == GateScore::SOFTMAX) {
            softmax_weights(weights, ids);
        } else {
            for (std::size_t index = 0; index < top_k; ++index) {
                weights[index] = score(logits_[ids[index]], 0, 0);
            }
        }
        float factor = rule_.scaling;
        if (rule_.renormalizes) {
            float sum = 0;
            for (std::size_t index = 0; index < top_k; ++index) {
                sum += weights[index];
            }
            factor /= sum + rule_.renorm_eps;
        }
        for (std::size_t index = 0; index < top_k; ++index) {
            const float own = rule_.expert_scale != nullptr ? rule_.expert_scale[ids[index]] : 1.0F;
            weights[index] *= factor * own;
        }
    }

    // Where weights are renormalised without an epsilon, the sum over all experts cancels out and is not computed.
    void softmax_weights(float* weights, const std::int32_t* ids) const {
        const bool cancels = rule_.is_over_top_k || (rule_.renormalizes && rule_.renorm_eps == 0.0F);
        float max = LOWEST;
        if (cancels) {
            for (std::size_t index = 0; index < rule_.top_k; ++index) {
                max = std::max(max, logits_[ids[index]]);
            }
        } else {
            max = *std::max_element(logits_, logits_ + rule_.n_experts);
        }
        float sum = cancels ? 0.0F : sum_of_exp(max);
        for (std::size_t index = 0; index < rule_.top_k; ++index) {
            const float below = logits_[ids[index]] - max;
            weights[index] = below == 0.0F ? 1.0F : std::exp(below);
            sum += cancels ? weights[index] : 0.0F;
        }
        if (rule_.renormalizes && rule_.renorm_eps == 0.0F) {
            return;  // divided by their sum next, whatever they are divided by here
        }
        for (std::size_t index = 0; index < rule_.top_k; ++index) {
            weights[index] /= sum;
        }
    }

    const GateRule& rule_;
    const float* logits_;
    float* choice_;
    std::int64_t* keys_;
};

}  // namespace

void gate_select(const GateRule& rule, const float* logits, std::size_t n_tokens, float* weights, std::int32_t* ids) {
    std::array<float, ON_STACK> few_choices;
    std::array<std::int64_t, ON_STACK> few_keys;
    const bool is_few = rule.n_experts <= ON_STACK;
    std::vector<float> choices(is_few ? 0 : rule.n_experts);
    std::vector<std::int64_t> keys(is_few ? 0 : rule.n_experts);
    for (std::size_t token = 0; token < n_tokens; ++token) {
        Row(rule, logits + token * rule.n_experts, is_few ? few_choices.data() : choices.data(),
            is_few ? few_keys.data() : keys.data())
            .select(weights + token * rule.top_k, ids + token * rule.top_k);
    }
}

}  // namespace laya
