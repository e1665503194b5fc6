"""Owns: whether an exported model computes what the torch model does: logits, experts and greedy text, token by token.

Run: `python -m laya.modeling.parity FOLDER FILE.gguf --text FILE`; the last line is JSON. A process of its own, since
llama.cpp ends it where it does not like something.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from laya.modeling.model import LayaForCausalLM
from laya.quantization.llama_api import Evaluator

N_PROMPTS, PROMPT_TOKENS, GREEDY_TOKENS = 20, 128, 64


class Parity(msgspec.Struct, kw_only=True):
    """Over all tokens of all prompts."""

    n_tokens: int
    mean_kl: float
    """Of the file's distribution from the torch model's, nats a token."""
    max_kl: float
    same_top_share: float
    same_experts_share: float
    """Tokens whose set of experts is the same in a layer, over all layers."""
    n_greedy_prompts: int
    n_same_greedy: int
    """Prompts after which both go on with the same tokens."""


def compare(
    model: LayaForCausalLM, path: Path, prompts: Sequence[Sequence[int]], *, n_threads: int, greedy_tokens: int
) -> Parity:
    """prompts: token ids each. Raises EngineFailed where the file cannot be run."""
    n_ctx = max(map(len, prompts)) + greedy_tokens
    evaluator = Evaluator(path, n_ctx=n_ctx, n_threads=n_threads, exact=True, collects_experts=True)
    kls: list[Tensor] = []
    n_tokens = n_same_top = n_same_experts = n_expert_rows = n_same_greedy = 0
    try:
        for prompt in prompts:
            file_logits, experts = _of_file(evaluator, prompt), evaluator.expert_ids()
            with torch.inference_mode():
                out = model(input_ids=torch.tensor([list(prompt)]), output_router_logits=True)
            ours, theirs = out.logits[0].float().log_softmax(-1), file_logits.log_softmax(-1)
            kls.append((ours.exp() * (ours - theirs)).sum(-1).clamp(min=0))
            n_tokens += len(prompt)
            n_same_top += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
            for ours_of_layer, layer in zip(_experts_of(model, out.router_logits), sorted(experts), strict=True):
                same = ours_of_layer == torch.tensor(experts[layer]).sort(-1).values
                n_same_experts += int(same.all(-1).sum())
                n_expert_rows += len(prompt)
            n_same_greedy += _goes_on_alike(model, evaluator, prompt, greedy_tokens)
    finally:
        evaluator.close()
    kl = torch.cat(kls)
    return Parity(
        n_tokens=n_tokens,
        mean_kl=float(kl.mean()),
        max_kl=float(kl.max()),
        same_top_share=n_same_top / n_tokens,
        same_experts_share=n_same_experts / n_expert_rows,
        n_greedy_prompts=len(prompts) if greedy_tokens else 0,
        n_same_greedy=n_same_greedy,
    )


def _of_file(evaluator: Evaluator, tokens: Sequence[int]) -> Tensor:
    return torch.frombuffer(evaluator.logits(tokens), dtype=torch.float32).view(len(tokens), evaluator.n_vocab)


def _experts_of(model: LayaForCausalLM, router_logits: tuple[Tensor, ...]) -> Iterator[Tensor]:
    top_k: int = model.config.num_experts_per_tok
    for logits in router_logits:
        yield logits.view(-1, logits.shape[-1]).topk(top_k).indices.sort(-1).values


def _goes_on_alike(model: LayaForCausalLM, evaluator: Evaluator, prompt: Sequence[int], n_tokens: int) -> bool:
    """Whether the file would have chosen each token that the torch model chose."""
    if not n_tokens:
        return False
    start = torch.tensor([list(prompt)])
    with torch.inference_mode():
        text = model.generate(
            start, attention_mask=torch.ones_like(start), max_new_tokens=n_tokens, do_sample=False, eos_token_id=-1
        )[0].tolist()
    chosen = _of_file(evaluator, text[:-1]).argmax(-1)[len(prompt) - 1 :]
    return bool(chosen.tolist() == text[len(prompt) :])


def prompts_of(tokens: Sequence[int], n_prompts: int = N_PROMPTS, n_tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    """Pieces of a text, spread over it. Raises ValueError where it has not one token."""
    if not tokens:
        raise ValueError("the text has no token to compare on")
    n_tokens = min(n_tokens, len(tokens))
    n_prompts = min(n_prompts, max(1, len(tokens) // n_tokens))
    step = max(1, (len(tokens) - n_tokens) // max(1, n_prompts - 1))
    return [list(tokens[at : at + n_tokens]) for at in range(0, len(tokens) - n_tokens + 1, step)][:n_prompts]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=N_PROMPTS)
    parser.add_argument("--greedy-tokens", type=int, default=GREEDY_TOKENS)
    args = parser.parse_args(argv)
    model = LayaForCausalLM.from_pretrained(args.folder, dtype=torch.float32).eval()
    evaluator = Evaluator(args.file, n_ctx=8, n_threads=1)
    tokens = evaluator.tokens_of(args.text.read_text())
    evaluator.close()
    room: int = model.config.max_position_embeddings - args.greedy_tokens
    prompts = prompts_of(tokens, args.prompts, min(PROMPT_TOKENS, room))
    n_threads = torch.get_num_threads()
    result = compare(model, args.file, prompts, n_threads=n_threads, greedy_tokens=args.greedy_tokens)
    print(json.dumps(msgspec.to_builtins(result)))


if __name__ == "__main__":
    main()
