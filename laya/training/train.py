"""Owns: `laya train`: a recipe's model, trained on this machine's processor, in a folder that training resumes from.

Every step's batch depends on the seed and the step alone, so a run that was killed goes on as if it had not been.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from platformdirs import user_cache_path
from rich.console import Console
from torch import Tensor

from laya.errors import ConfigError
from laya.lab_progress import Progressing
from laya.lab_verb import run_verb
from laya.modeling.config import LayaConfig
from laya.modeling.model import LayaForCausalLM
from laya.modeling.quiet import quiet_transformers
from laya.training import recipe as recipes
from laya.training.held_out import HeldOut, measure
from laya.training.recipe import Recipe, Schedule
from laya.training.run_folder import RunFolder
from laya.training.tokens import Corpus, prepare
from laya.training.train_memory import check_room

_QUICK_TOKENS = 8192  # of held-out text, while it trains


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """loss: the language model's, nats a token; aux_loss: the router's, weighed, on top of it."""

    step: int
    loss: float
    aux_loss: float
    learning_rate: float


def model_config(recipe: Recipe) -> LayaConfig:
    told = msgspec.structs.asdict(recipe.model)
    projection_size = told.pop("router_projection_size")
    rope_theta = told.pop("rope_theta")
    return LayaConfig(
        **told,
        head_dim=recipe.model.hidden_size // recipe.model.num_attention_heads,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        router_options={"projection_size": projection_size},
        router_aux_loss_coef=recipe.train.router_aux_loss_coef,
        router_z_loss_coef=recipe.train.router_z_loss_coef,
    )


def new_model(recipe: Recipe) -> LayaForCausalLM:
    """Weights drawn from the recipe's seed."""
    config = model_config(recipe)
    torch.manual_seed(recipe.seed)
    return LayaForCausalLM(config)


def learning_rate(schedule: Schedule, step: int) -> float:
    """Of this step, counted from 0."""
    if step < schedule.warmup_steps:
        return schedule.learning_rate * (step + 1) / schedule.warmup_steps
    done = (step - schedule.warmup_steps) / max(1, schedule.whole_steps - schedule.warmup_steps)
    return schedule.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))


def batch(corpus: Corpus, recipe: Recipe, step: int) -> Tensor:
    """[sequences_per_step, sequence_tokens]: windows from anywhere in the topics' texts, the topics in turn."""
    schedule = recipe.train
    generator = np.random.default_rng([recipe.seed, step])
    rows = []
    for row in range(schedule.sequences_per_step):
        tokens = corpus.tokens(corpus.topics[(step * schedule.sequences_per_step + row) % len(corpus.topics)], "train")
        start = int(generator.integers(0, len(tokens) - schedule.sequence_tokens + 1))
        rows.append(tokens[start : start + schedule.sequence_tokens].astype(np.int64))
    return torch.from_numpy(np.stack(rows))


def _optimizer(model: LayaForCausalLM, schedule: Schedule) -> torch.optim.AdamW:
    """Vectors (norms) are not decayed."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": schedule.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=schedule.learning_rate, betas=(0.9, 0.95), fused=True)


def train(recipe: Recipe, corpus: Corpus, folder: RunFolder, progress: Progressing) -> HeldOut:
    """From the last checkpoint, if there is one, to the end. Gives what the finished model is worth on held-out text.

    Raises KeyboardInterrupt after a signal, when the step is whole and kept; ConfigError where a topic is too short for
    a sequence, ValueError where the loss is no number.
    """
    schedule = recipe.train
    corpus.check_lengths(schedule.sequence_tokens)
    model = new_model(recipe).train()
    optimizer = _optimizer(model, schedule)
    first = folder.restore(model, optimizer, corpus)
    progress.stage(recipe.name, total=schedule.steps, done=first, unit="steps")
    with _asked_to_stop() as is_asked:
        for step in range(first, schedule.steps):
            if step >= schedule.whole_steps:
                _leave_to_routers(model, schedule)
            done = _step(model, optimizer, batch(corpus, recipe, step), recipe, step)
            if not math.isfinite(done.loss + done.aux_loss):
                raise ValueError(f"step {step + 1}: the loss is {done.loss}; a lower train.learning_rate may help")
            folder.log(done)
            progress.update(step + 1, note=f"loss {done.loss:.3f}")
            is_last = step + 1 == schedule.steps
            if step + 1 == schedule.whole_steps and not is_last:
                folder.log(_held_out(model, corpus, schedule, step + 1, schedule.held_out_tokens))
            elif (step + 1) % schedule.held_out_steps == 0 and not is_last:
                folder.log(_held_out(model, corpus, schedule, step + 1, _QUICK_TOKENS))
            if (step + 1) % schedule.checkpoint_steps == 0 or is_last or is_asked():
                folder.keep(model, optimizer, step + 1)
            if (number := is_asked()) and not is_last:
                raise KeyboardInterrupt(number)
    model.config.router_aux_loss_coef = schedule.router_aux_loss_coef
    progress.stage(f"{recipe.name}: held-out text")
    last = _held_out(model, corpus, schedule, schedule.steps, schedule.held_out_tokens)
    folder.log(last)
    folder.finish(model, recipe, corpus, last)
    return last


def _leave_to_routers(model: LayaForCausalLM, schedule: Schedule) -> None:
    """From here on nothing else learns, and balance weighs what the recipe says of its end."""
    model.config.router_aux_loss_coef = schedule.balance_aux_loss_coef
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".mlp.gate." in name)


@contextmanager
def _asked_to_stop() -> Iterator[Callable[[], int]]:
    """The first signal's number, or 0. It is noted only: an optimizer stopped inside a step is in between. The second
    one ends."""
    asked: list[int] = []

    def note(number: int, _frame: Any) -> None:
        asked.append(number)
        put_back()

    def put_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield lambda: asked[0] if asked else 0
    finally:
        put_back()


def _step(model: LayaForCausalLM, optimizer: Any, ids: Tensor, recipe: Recipe, step: int) -> Step:
    rate = learning_rate(recipe.train, step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    torch.manual_seed(recipe.seed * 1_000_003 + step)  # what a router's jitter draws
    outputs = model(input_ids=ids, labels=ids, use_cache=False)
    outputs.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.train.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    aux_loss = 0.0 if outputs.aux_loss is None else float(outputs.aux_loss.detach())
    return Step(step=step + 1, loss=float(outputs.loss.detach()) - aux_loss, aux_loss=aux_loss, learning_rate=rate)


def _held_out(model: LayaForCausalLM, corpus: Corpus, schedule: Schedule, step: int, most_tokens: int) -> HeldOut:
    tokens = min(most_tokens, schedule.held_out_tokens)
    return measure(model, corpus, step=step, sequence_tokens=schedule.sequence_tokens, most_tokens=tokens)


def _chosen(args: argparse.Namespace) -> Recipe:
    for name, value, least in (("threads", args.threads, 1), ("tokens", args.tokens, 1), ("seed", args.seed, 0)):
        if value is not None and value < least:
            raise ConfigError(f"--{name}: expected {least} or more, got {value}", param=name)
    recipe = recipes.load(args.recipe)
    if args.tokens is not None:
        recipe = msgspec.structs.replace(recipe, train=msgspec.structs.replace(recipe.train, tokens=args.tokens))
    if args.seed is not None:
        recipe = msgspec.structs.replace(recipe, seed=args.seed)
    if args.dense:
        recipe = recipe.dense_twin()
    if args.no_balance:
        recipe = recipe.without_balance()
    return recipe


def _steps(schedule: Schedule) -> str:
    """What a run's number of steps is made of."""
    whole = f"{schedule.whole_steps * schedule.step_tokens} tokens in {schedule.whole_steps} steps"
    if not schedule.balance_steps:
        return whole
    alone = f"{schedule.balance_steps * schedule.step_tokens} in {schedule.balance_steps} steps of routers alone"
    return f"{whole}, then {alone} (train.balance_steps)"


def _say(result: HeldOut, recipe: Recipe, folder: Path, seconds: float) -> None:
    print(f"{folder / 'model'}: {result.loss:.3f} nats a token of {result.tokens} held-out ones, {seconds:.0f} s")
    print(f"  trained on {_steps(recipe.train)}")
    for topic, loss in result.topic_loss.items():
        print(f"  {topic:<10} {loss:.3f}")
    for index, layer in enumerate(result.layers):
        shares = " ".join(f"{share:5.1%}" for share in layer.share)
        print(f"  layer {index}  {shares}   MaxVio {layer.max_vio:.3f}, dead {layer.n_dead}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="laya train", description="Train a recipe's model on this processor.")
    parser.add_argument("recipe", nargs="?", default="laya-nano", help="a YAML file, or a built-in recipe's name")
    parser.add_argument(
        "--out", type=Path, required=True, help="the run's folder; if training was begun there, it goes on"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        help="train all weights on so many, not the recipe's; its balance_steps, of routers alone, come on top",
    )
    parser.add_argument("--seed", type=int)
    twins = parser.add_mutually_exclusive_group()
    twins.add_argument("--dense", action="store_true", help="its dense twin: the same active size, nothing to choose")
    twins.add_argument(
        "--no-balance", action="store_true", help="without the router's losses, to see what they prevent"
    )
    parser.add_argument("--threads", type=int, help="default: torch's; a run that is resumed keeps its own")
    parser.add_argument("--cache", type=Path, default=user_cache_path("laya") / "training", help="packages and tokens")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    args = parser.parse_args(argv)
    quiet_transformers()
    return run_verb("train", f"the same command goes on from {args.out}", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    began = time.monotonic()
    recipe = _chosen(args)
    check_room(recipe, model_config(recipe), args.out)
    with (
        RunFolder.open(args.out, recipe, args.threads) as folder,
        Progressing(Console(stderr=True), is_silent=args.json) as progress,
    ):
        torch.set_num_threads(folder.n_threads)
        if folder.n_threads != folder.begun_threads:
            differs = f"begun with --threads {folder.begun_threads}: from here on sums round otherwise"
            progress.say(f" {differs}, and the run is not the one it would have been")
        corpus = prepare(recipe, args.cache, lambda line: None if args.json else progress.say(line))
        result = train(recipe, corpus, folder, progress)
    if not args.json:
        _say(result, recipe, args.out, time.monotonic() - began)
    told = msgspec.to_builtins(result)
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({"trained": os.fspath(args.out / "model"), "seconds": seconds, **told}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
