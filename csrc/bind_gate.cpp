// Owns: the door between Python and the gate kernel, by addresses: tensors keep their memory, and their layout is checked by
// who calls (laya/modeling/kernels/cpu.py). Decides nothing.
#include "bind_gate.hpp"

#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>

#include "gate_kernel.hpp"

namespace nb = nanobind;

namespace {

constexpr std::size_t UNLOCKED_FROM_PRODUCTS = 1 << 18;  // a shorter call is over before another thread would run

// A rule without its vectors, which come with each call: they may be trained in between.
class Gate {
  public:
    Gate(std::size_t n_experts, std::size_t top_k, int score, bool is_over_top_k, bool renormalizes, float renorm_eps,
         float scaling, std::size_t n_groups, std::size_t n_top_groups, int group_score) {
        if (n_experts == 0 || top_k == 0 || top_k > n_experts || n_groups == 0 || n_experts % n_groups != 0 ||
            n_top_groups == 0 || n_top_groups > n_groups) {
            throw std::invalid_argument("top_k must be in 1..n_experts, and n_experts a multiple of n_groups");
        }
        rule_.n_experts = n_experts;
        rule_.top_k = top_k;
        rule_.score = static_cast<laya::GateScore>(score);
        rule_.is_over_top_k = is_over_top_k;
        rule_.renormalizes = renormalizes;
        rule_.renorm_eps = renorm_eps;
        rule_.scaling = scaling;
        rule_.n_groups = n_groups;
        rule_.n_top_groups = n_top_groups;
        rule_.group_score = static_cast<laya::GroupScore>(group_score);
    }

    void run(std::uintptr_t x, bool is_bfloat16, std::uintptr_t weight, std::size_t n_tokens, std::size_t hidden,
             std::uintptr_t logit_bias, std::uintptr_t choice_bias, std::uintptr_t expert_scale, std::uintptr_t logits,
             std::uintptr_t weights, std::uintptr_t ids, std::size_t n_threads) const {
        const auto input = is_bfloat16 ? laya::GateInput::BFLOAT16 : laya::GateInput::FLOAT32;
        const laya::GateRule rule = with(logit_bias, choice_bias, expert_scale);
        const auto call = [&] {
            laya::gate(rule, reinterpret_cast<const void*>(x), input, floats(weight), n_tokens, hidden, n_threads,
                       floats(logits), floats(weights), reinterpret_cast<std::int32_t*>(ids));
        };
        if (n_tokens * hidden * rule_.n_experts < UNLOCKED_FROM_PRODUCTS) {
            call();
            return;
        }
        nb::gil_scoped_release unlocked;
        call();
    }

    // One token's results in one block: logits, weights, ids, each from a multiple of 16 bytes on, as what torch.compile
    // makes expects of an op's results. Fewer addresses to hand over, which is what such a call costs.
    void run_one(std::uintptr_t x, bool is_bfloat16, std::uintptr_t weight, std::size_t hidden, std::uintptr_t logit_bias,
                 std::uintptr_t choice_bias, std::uintptr_t expert_scale, std::uintptr_t block) const {
        float* logits = floats(block);
        float* weights = logits + padded(rule_.n_experts);
        laya::gate(with(logit_bias, choice_bias, expert_scale), reinterpret_cast<const void*>(x),
                   is_bfloat16 ? laya::GateInput::BFLOAT16 : laya::GateInput::FLOAT32, floats(weight), 1, hidden, 1, logits,
                   weights, reinterpret_cast<std::int32_t*>(weights + padded(rule_.top_k)));
    }

    void select(std::uintptr_t logits, std::size_t n_tokens, std::uintptr_t choice_bias, std::uintptr_t expert_scale,
                std::uintptr_t weights, std::uintptr_t ids) const {
        laya::gate_select(with(0, choice_bias, expert_scale), floats(logits), n_tokens, floats(weights),
                          reinterpret_cast<std::int32_t*>(ids));
    }

  private:
    static std::size_t padded(std::size_t n_floats) { return (n_floats + 3) / 4 * 4; }

    static float* floats(std::uintptr_t address) { return reinterpret_cast<float*>(address); }

    laya::GateRule with(std::uintptr_t logit_bias, std::uintptr_t choice_bias, std::uintptr_t expert_scale) const {
        laya::GateRule rule = rule_;
        rule.logit_bias = floats(logit_bias);
        rule.choice_bias = floats(choice_bias);
        rule.expert_scale = floats(expert_scale);
        return rule;
    }

    laya::GateRule rule_;
};

}  // namespace

void bind_gate(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<Gate>(module, "Gate")
        .def(nb::init<std::size_t, std::size_t, int, bool, bool, float, float, std::size_t, std::size_t, int>(),
             "n_experts"_a, "top_k"_a, "score"_a, "over_top_k"_a, "renormalize"_a, "renorm_eps"_a, "scaling"_a,
             "n_groups"_a, "n_top_groups"_a, "group_score"_a)
        .def("run", &Gate::run, "x"_a, "is_bfloat16"_a, "weight"_a, "n_tokens"_a, "hidden"_a, "logit_bias"_a,
             "choice_bias"_a, "expert_scale"_a, "logits"_a, "weights"_a, "ids"_a, "n_threads"_a)
        .def("run_one", &Gate::run_one, "x"_a, "is_bfloat16"_a, "weight"_a, "hidden"_a, "logit_bias"_a, "choice_bias"_a,
             "expert_scale"_a, "block"_a)
        .def("select", &Gate::select, "logits"_a, "n_tokens"_a, "choice_bias"_a, "expert_scale"_a, "weights"_a, "ids"_a);
    module.def("gate_instructions", &laya::gate_instructions);
    module.def("gate_instructions_here", &laya::gate_instructions_here);
    module.def("use_gate_instructions", &laya::use_gate_instructions, "name"_a);
}
