// Owns: an expert router's arithmetic on the CPU: logits = x W^T, then which experts and with what weight, in one pass
// over the tokens. Its twin and oracle is laya/modeling/selection.py. Knows no torch and no Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace laya {

enum class GateScore : std::uint8_t { SOFTMAX, SIGMOID, SQRT_SOFTPLUS };
enum class GroupScore : std::uint8_t { MAX, SUM_TOP2 };
enum class GateInput : std::uint8_t { FLOAT32, BFLOAT16 };

// What is done with the logits of a token. A pointer may be null; each has n_experts elements.
struct GateRule {
    std::size_t n_experts = 0;
    std::size_t top_k = 0;
    GateScore score = GateScore::SOFTMAX;
    bool is_over_top_k = false;  // softmax over the chosen ones only
    bool renormalizes = true;
    float renorm_eps = 0.0F;  // added to the sum
    float scaling = 1.0F;
    std::size_t n_groups = 1;      // of neighbours; only the experts of the n_top_groups best can be chosen
    std::size_t n_top_groups = 1;
    GroupScore group_score = GroupScore::MAX;
    const float* logit_bias = nullptr;   // part of the logits
    const float* choice_bias = nullptr;  // added to the scores for the choice alone
    const float* expert_scale = nullptr;
};

// Of `n_tokens` rows of logits: weights and ids, [n_tokens, top_k], best first, the lower index first where two are equal.
// A row with a NaN in its logits gives ids 0..top_k-1 and weights NaN. `logits` hold the bias already.
void gate_select(const GateRule& rule, const float* logits, std::size_t n_tokens, float* weights, std::int32_t* ids);

// x: [n_tokens, hidden] of `input`; weight: [n_experts, hidden]; logits: [n_tokens, n_experts], bias included.
// n_threads: at most, as far as the work is worth it. All rows are contiguous.
void gate(const GateRule& rule, const void* x, GateInput input, const float* weight, std::size_t n_tokens,
          std::size_t hidden, std::size_t n_threads, float* logits, float* weights, std::int32_t* ids);

// What logits are computed with: "avx512", "avx2" or "baseline", the best that this processor has.
const char* gate_instructions() noexcept;

// All that it has, the best first.
std::vector<const char*> gate_instructions_here();

// Another one of them from here on, for whoever calls: to test and to compare. Throws std::invalid_argument.
void use_gate_instructions(std::string_view name);

}  // namespace laya
