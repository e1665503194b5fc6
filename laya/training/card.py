"""Owns: the model card that a trained model carries: what it is, what it was trained on, what it measured."""

from __future__ import annotations

import torch
import transformers

import laya
from laya.modeling.model import LayaForCausalLM
from laya.training.held_out import HeldOut
from laya.training.recipe import Recipe, Schedule
from laya.training.tokens import Corpus


def _balanced(train: Schedule) -> str:
    if not train.balance_steps:
        return ""
    return f"; in the last {train.balance_steps} steps routers alone, balance loss {train.balance_aux_loss_coef}"


def card(recipe: Recipe, corpus: Corpus, result: HeldOut, model: LayaForCausalLM) -> str:
    """Markdown."""
    shape, train = recipe.model, recipe.train
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    expert = 3 * shape.hidden_size * shape.intermediate_size * shape.num_hidden_layers
    n_active = n_parameters - expert * (shape.num_local_experts - shape.num_experts_per_tok)
    lines = [
        f"# {recipe.name}",
        "",
        recipe.about.strip(),
        "",
        f"{n_parameters:,} parameters, {n_active:,} of them active for a token: {shape.num_hidden_layers} layers of "
        f"{shape.num_local_experts} experts, {shape.num_experts_per_tok} chosen. It only continues text.",
        "",
        "## Data",
        "",
        "| topic | package | version | licence | SHA-256 |",
        "|---|---|---|---|---|",
    ]
    for one in corpus.fetched:
        topics = dict.fromkeys(source.topic for source in recipe.sources if source.package == one.package)
        lines.append(f"| {', '.join(topics)} | {one.package} | {one.version} | {one.licence} | {one.sha256[:16]} |")
    held = ", ".join(
        f"{topic} {corpus.n_held_out_documents[topic]} of {corpus.n_documents[topic]}" for topic in corpus.topics
    )
    lines += [
        "",
        f"Documents held out: {held}.",
        "",
        "## Training",
        "",
        f"{train.steps * train.step_tokens:,} tokens, {train.step_tokens} a step, seed {recipe.seed}; balance loss "
        f"{train.router_aux_loss_coef}, z-loss {train.router_z_loss_coef}{_balanced(train)}. Laya {laya.__version__}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}.",
        "",
        f"Held-out loss {result.loss:.3f} nats a token ({result.tokens} tokens, as many of each topic): "
        + ", ".join(f"{topic} {loss:.3f}" for topic, loss in result.topic_loss.items())
        + ".",
    ]
    if result.layers:
        lines += ["", "| layer | share of each expert, held-out text | MaxVio | dead |", "|---|---|---|---|"]
        for index, layer in enumerate(result.layers):
            shares = " ".join(f"{share:.1%}" for share in layer.share)
            lines.append(f"| {index} | {shares} | {layer.max_vio:.3f} | {layer.n_dead} |")
    return "\n".join(lines) + "\n"
