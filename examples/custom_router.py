"""A router of one's own in a Laya model: it chooses by the angle between a token and each expert, as X-MoE does.

    python examples/custom_router.py

Trains a tiny model for some steps on made-up text and prints which share of the tokens each expert of a layer gets.
"""

import torch
from torch import nn
from torch.nn import functional

from laya.modeling import (
    ExpertRouter,
    GateRule,
    LayaConfig,
    LayaForCausalLM,
    RouterOutput,
    register_router,
    select,
)


class CosineRouter(ExpertRouter):
    def __init__(self, hidden_size: int, rule: GateRule, scale: float = 8.0) -> None:
        super().__init__(hidden_size, rule)
        self.scale = scale
        self.directions = nn.Parameter(torch.empty(rule.n_experts, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.directions)

    def forward(self, hidden_states: torch.Tensor) -> RouterOutput:
        x, directions = (functional.normalize(each.float(), dim=-1) for each in (hidden_states, self.directions))
        logits = self.scale * functional.linear(x, directions)
        return RouterOutput(logits, *select(logits, self.rule))


register_router("cosine", CosineRouter)


def main(n_steps: int = 30) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8}
    model = LayaForCausalLM(LayaConfig(**sizes, **heads, router_type="cosine", router_options={"scale": 6.0}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.randint(256, (8, 33)).repeat(1, 2)  # its second half can be learnt
    for step in range(n_steps):
        loss = model(input_ids=text, labels=text).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, n_steps - 1):
            print(f"step {step}: loss {loss.item():.3f}")
    with torch.no_grad():
        recorded = model.eval()(input_ids=text, output_router_logits=True).router_logits
    for layer, (logits, block) in enumerate(zip(recorded, model.model.layers, strict=True)):
        counts = select(logits, block.mlp.gate.rule)[1].flatten().bincount(minlength=8)
        print(f"layer {layer}: " + " ".join(f"{share:.0%}" for share in (counts / counts.sum()).tolist()))


if __name__ == "__main__":
    main()
