"""Owns: `laya upcycle`: a dense chat model of the llama family becomes a LayaForCausalLM with experts and routers.

Each expert starts as the parent's feed-forward block. Equal experts give a router no gradient, and hidden states that
do not depend on it: routers are fitted layer by layer to the states that their layer gets (`router_fit`). The parent
is its weights in float32, dequantized where they were quantized. What was made is measured on text held out.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from tokenizers import Tokenizer
from torch import Tensor

from laya.errors import BadModelFile, ConfigError
from laya.lab_progress import Progressing
from laya.lab_verb import run_verb
from laya.modeling.balance import Balance
from laya.modeling.quiet import quiet_transformers
from laya.modeling.room import check_disk, check_memory
from laya.models import resolve
from laya.result_file import check_new
from laya.texts import DEFAULT_SET, load_files, load_set
from laya.training.expert_training import load_for_training, measure, train_experts
from laya.training.mixed_text import local_documents, windows_of
from laya.training.parent import Parent, open_parent
from laya.training.parent_tokenizer import tokenizer_of, write_tokenizer
from laya.training.upcycle_memory import disk_bytes, n_active_parameters, n_parameters, need_bytes
from laya.training.upcycle_report import Report, perplexity
from laya.training.upcycled_folder import DTYPES, ModelFolder, new_folder
from laya.training.upcycled_layers import Recipe, Texts, Upcycling, laya_config

MOST_KL_BEFORE = 1e-6
_WINDOW_TOKENS, _HELD_OUT_WINDOWS, _CHECK_WINDOWS = 256, 48, 4
_TRAINING_TOKENS = 32_768
_TRAINING_SET, _HELD_OUT_EVERY = "varied", 4
_TRAINING_NAME = f"Laya's text set '{_TRAINING_SET}', then what lies on this machine"
_HELD_OUT_NAME = f"every {_HELD_OUT_EVERY}th document of '{_TRAINING_SET}', not trained on, and '{DEFAULT_SET}'"
_LOCAL_WINDOWS_A_DOCUMENT = 1  # many documents, a little of each


class Asked(NamedTuple):
    """What the command line asks for. texts, held_out: files, or none; n_tokens: to train on, at most."""

    parent: Parent
    out: Path
    recipe: Recipe
    expert_steps: int
    texts: list[Path]
    held_out: list[Path]
    n_tokens: int
    dtype: str
    chat_template: str | None


def upcycle(asked: Asked, progress: Progressing) -> Report:
    """Raises InsufficientMemory, ConfigError for texts that are too short, ValueError for a model that is
    not what it is to be."""
    began = time.monotonic()
    parent, recipe = asked.parent, asked.recipe
    config = laya_config(parent.config, recipe)
    texts = _texts(asked, tokenizer_of(parent))
    need = need_bytes(
        config,
        n_training_tokens=texts.training.numel(),
        n_held_tokens=texts.held_out.numel(),
        window=texts.held_out.shape[1],
        perturbs=bool(recipe.perturb),
        trains_experts=bool(asked.expert_steps),
    )
    check_memory(need, "Upcycling this model", ["--experts with fewer", "no --train-experts"])
    check_disk(disk_bytes(config, asked.dtype), asked.out.parent, "The model")
    with new_folder(asked.out, asked.dtype) as folder:
        making = Upcycling(parent, recipe, texts)
        progress.stage("routers", total=config.num_hidden_layers, unit="layers")
        counts: list[Tensor] = []
        for done in making.layers():
            folder.write_layer(done.layer, done.state)
            counts.append(done.counts)
            progress.update(len(counts))
        progress.stage("held-out text")
        measured = making.measured()
        if not recipe.perturb and measured.max_kl_before > MOST_KL_BEFORE:
            raise ValueError(
                f"the model differs from its parent before any training: max KL {measured.max_kl_before:.1e} "
                f"(at most {MOST_KL_BEFORE:.0e})"
            )
        head = {} if config.tie_word_embeddings else {"lm_head.weight": parent.tensor("lm_head.weight")}
        names = ("model.embed_tokens.weight", "model.norm.weight")
        folder.write_rest(head | {name: parent.tensor(name) for name in names})
        write_tokenizer(parent, folder.path, asked.chat_template)
        folder.finish(config, card="")
        loss = measured.loss
        del making
        if asked.expert_steps:
            loss, counts = _train_experts(asked, folder, texts, progress)
        report = Report(
            model=asked.out.name,
            parent=parent.name,
            parent_sha256=parent.sha256(),
            licence=parent.licence,
            n_experts=recipe.n_experts,
            top_k=recipe.top_k,
            n_parameters=n_parameters(config),
            n_active_parameters=n_active_parameters(config),
            dtype=asked.dtype,
            perturb=recipe.perturb,
            router_steps=recipe.n_steps,
            expert_steps=asked.expert_steps,
            seed=recipe.seed,
            training_text=_named(asked.texts, _TRAINING_NAME),
            n_training_tokens=texts.training.numel(),
            held_out_text=_named(asked.held_out, _HELD_OUT_NAME),
            n_held_out_tokens=texts.held_out.numel(),
            max_kl_before=measured.max_kl_before,
            parent_perplexity=perplexity(measured.parent_loss),
            perplexity=perplexity(loss),
            layers=[Balance.of(of_layer) for of_layer in counts],
            seconds=time.monotonic() - began,
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )
        folder.finish(config, report.card())
    return report


def _texts(asked: Asked, tokenizer: Tokenizer) -> Texts:
    """Windows of ids. Raises ConfigError where a text is shorter than one."""
    n_tokens = min(_WINDOW_TOKENS, asked.parent.config.max_position_embeddings)

    def windows(documents: list[str], most: int, most_each: int, option: str) -> Tensor:
        found = windows_of(documents, tokenizer, n_tokens, most, most_each)
        if not found:
            raise ConfigError(f"{option}: no document is as long as a window of {n_tokens} tokens")
        return torch.tensor(found)

    most = max(1, asked.n_tokens // n_tokens)
    varied = [document.text for document in load_set(_TRAINING_SET)]
    if asked.texts:
        of_user = [document.text for document in load_files(asked.texts)]
        training = windows(of_user, most, -(-most // len(of_user)), "--text")
    else:
        of_set = [text for index, text in enumerate(varied) if index % _HELD_OUT_EVERY]
        training = windows(of_set, most, max(1, most // len(of_set)), "--text")
        if (left := most - len(training)) > 0:
            local = windows(local_documents(asked.recipe.seed), left, _LOCAL_WINDOWS_A_DOCUMENT, "--text")
            training = torch.cat([training, local])
    if asked.held_out:
        measured = [document.text for document in load_files(asked.held_out)]
    else:  # many documents: of few, a topic of one decides what a share is
        measured = varied[::_HELD_OUT_EVERY] + [document.text for document in load_set(DEFAULT_SET)]
    each = -(-_HELD_OUT_WINDOWS // len(measured))
    held_out = windows(measured, _HELD_OUT_WINDOWS, each, "--held-out")
    spread = torch.linspace(0, len(held_out) - 1, min(_CHECK_WINDOWS, len(held_out))).long()
    return Texts(training, held_out, held_out[spread])


def _train_experts(
    asked: Asked, folder: ModelFolder, texts: Texts, progress: Progressing
) -> tuple[float, list[Tensor]]:
    """Trains what the folder holds, and writes it there."""
    model = load_for_training(folder.path)
    progress.stage("experts", total=asked.expert_steps, unit="steps")
    train_experts(model, texts.training, asked.expert_steps, asked.recipe.seed, progress.update)
    progress.stage("held-out text")
    for number, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts  # type: ignore[union-attr]
        folder.replace_experts(number, experts.gate_up_proj, experts.down_proj)  # type: ignore[union-attr, arg-type]
    return measure(model, texts.held_out)


def _named(files: list[Path], default: str) -> str:
    return ", ".join(file.name for file in files) or default


def _asked(args: argparse.Namespace) -> Asked:
    """Raises LayaError for what can be known before anything is computed."""
    for name, value, least in (
        ("--experts", args.experts, 2),
        ("--top-k", args.top_k, 1),
        ("--steps", args.steps, 0),
        ("--tokens", args.tokens, 1),
        ("--train-experts", args.train_experts, 0),
        ("--perturb", args.perturb, 0),
        ("--seed", args.seed, 0),
        ("--threads", args.threads, 1),
    ):
        if not value >= least or math.isinf(value):
            raise ConfigError(f"{name}: expected {least} or more, got {value}")
    if args.top_k > args.experts:
        raise ConfigError(f"--top-k {args.top_k}: there are {args.experts} experts to choose from")
    check_new("--out", args.out)
    for file in (*args.text, *args.held_out):
        if not file.is_file():
            raise ConfigError(f"{file}: there is no such file of text", param="text")
    model = resolve(args.model)
    if model.format not in ("gguf", "hf"):
        raise BadModelFile(f"{args.model} is no model on this disk that could be read")
    return Asked(
        parent=open_parent(model.path),
        out=args.out,
        recipe=Recipe(args.experts, args.top_k, args.perturb, args.steps, args.seed),
        expert_steps=args.train_experts,
        texts=args.text,
        held_out=args.held_out,
        n_tokens=args.tokens,
        dtype=args.dtype,
        chat_template=model.chat_template,
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="laya upcycle", description="A dense llama-family model becomes a Mixture of Experts that answers like it."
    )
    parser.add_argument("model", help="a model's name, a GGUF file, or a Hugging Face folder")
    parser.add_argument("--out", type=Path, required=True, help="a folder that is not there yet")
    parser.add_argument("--experts", type=int, default=8, help="a layer")
    parser.add_argument("--top-k", type=int, default=2, help="experts that a token gets")
    parser.add_argument("--perturb", type=float, default=0.0, help="noise on experts, of a matrix's standard deviation")
    parser.add_argument("--train-experts", type=int, default=0, metavar="STEPS", help="train them, a window a step")
    parser.add_argument("--steps", type=int, default=200, help="that a layer's router is trained for")
    parser.add_argument(
        "--text", type=Path, nargs="+", default=[], help="to train on; default: a set that ships, then what lies here"
    )
    parser.add_argument("--tokens", type=int, default=_TRAINING_TOKENS, help="of it, at most")
    parser.add_argument("--held-out", type=Path, nargs="+", default=[], help="default: others of sets that ship")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32", help="of the files")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    args = parser.parse_args(argv)
    quiet_transformers()
    return run_verb("upcycle", f"nothing is left of {args.out}", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    asked = _asked(args)
    torch.set_num_threads(args.threads)
    with Progressing(Console(stderr=True), is_silent=args.json) as progress:
        report = upcycle(asked, progress)
    if not args.json:
        print("\n".join(report.lines()))
    print(json.dumps({"upcycled": str(args.out), **report.fields()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
