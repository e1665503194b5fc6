"""Owns: `laya export`: a Laya model in forms that others run: Mixtral's Hugging Face form, and GGUF for llama.cpp.

What was written is held to the torch model before it gets its name; where it differs, there is no file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from transformers import MixtralConfig, MixtralForCausalLM

from laya.errors import BadModelFile, ConfigError
from laya.lab_progress import Progressing
from laya.lab_verb import run_verb
from laya.memory.hf import local_model
from laya.memory.safetensors import read_tables
from laya.modeling.config import LayaConfig
from laya.modeling.gguf_file import TYPES, check_router, write_gguf
from laya.modeling.model import LayaForCausalLM
from laya.modeling.quiet import quiet_transformers
from laya.modeling.room import check_disk, check_memory
from laya.result_file import as_umask_says, check_new

MOST_KL = {"f32": 1e-4, "f16": 2e-2}
LEAST_SAME_EXPERTS = {"f32": 0.999, "f16": 0.95}
_FLOAT_BYTES = 4
_COPIES = {"gguf": 2, "mixtral": 3}
"""Of the weights in float32: the torch model, the file beside it; Mixtral's model, and what was saved, read again."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_SAMPLE = Path(__file__).with_name("parity_text.txt")


def _nobody(_stage: str) -> None:
    """Is told of the stages where nobody asked."""


def load_model(folder: Path) -> LayaForCausalLM:
    """In float32. Raises BadModelFile where its files lack weights: transformers would draw them."""
    model, report = LayaForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if missing := sorted(report["missing_keys"]):
        raise BadModelFile(f"{folder} lacks weights, which would be drawn at random: {', '.join(missing[:3])}")
    return model.eval()


def as_mixtral(model: LayaForCausalLM) -> MixtralForCausalLM:
    """The same function of the same tokens. Raises ValueError where Mixtral's router would choose otherwise."""
    check_router(model)
    ours = model.config.to_dict()
    known = {name: ours[name] for name in MixtralConfig().to_dict() if name in ours}
    dropped = ("model_type", "architectures", "transformers_version", "auto_map")
    config = MixtralConfig(**{name: value for name, value in known.items() if name not in dropped})
    theirs = MixtralForCausalLM(config).to(model.dtype).eval()
    state = {name: tensor for name, tensor in model.state_dict().items() if ".mlp.gate." not in name}
    for index, layer in enumerate(model.model.layers):
        state[f"model.layers.{index}.mlp.gate.weight"] = layer.mlp.gate.folded_weight()  # type: ignore[union-attr, operator]
    theirs.load_state_dict(state)
    return theirs


def export_mixtral(folder: Path, out: Path, stage: Callable[[str], None] = _nobody) -> float:
    """A folder that servers and quantizers of Mixtral take. Gives the largest difference of a logit on a sample.

    Raises ValueError where the saved model computes something else, Conflict where `out` is there.
    """
    check_new("--out", out)
    stage("reading")
    model = load_model(folder)
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        stage("writing")
        as_mixtral(model).save_pretrained(part)
        for name in _TOKENIZER_FILES:
            if (folder / name).is_file():
                shutil.copy(folder / name, part / name)
        as_umask_says(part)
        stage("comparing with the torch model")
        saved = MixtralForCausalLM.from_pretrained(part, dtype=torch.float32).eval()
        sample = torch.arange(min(64, model.config.vocab_size))[None]
        with torch.inference_mode():
            difference = float((model(input_ids=sample).logits - saved(input_ids=sample).logits).abs().max())
        if difference > 1e-3:
            raise ValueError(f"the saved model's logits differ by {difference:.2g}: nothing was exported")
        os.replace(part, out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return difference


def export_gguf(
    folder: Path, out: Path, kind: str, text: Path, greedy_tokens: int, stage: Callable[[str], None] = _nobody
) -> dict[str, float]:
    """A GGUF file, held to the torch model on `text`; gives `Parity` as a dict.

    Raises ValueError where it differs by more than `MOST_KL` and `LEAST_SAME_EXPERTS` allow its type.
    """
    check_new("--out", out)
    stage("reading")
    model = load_model(folder)
    template = folder / "chat_template.jinja"
    unchecked = out.with_name(f"unchecked-{os.getpid()}-{out.name}")
    try:
        stage("writing")
        write_gguf(
            model,
            folder / "tokenizer.json",
            unchecked,
            kind="f32" if kind == "f32" else "f16",
            name=out.stem,
            chat_template=template.read_text() if template.is_file() else None,
        )
        del model
        stage("comparing with the torch model, by llama.cpp")
        words = [sys.executable, "-m", "laya.modeling.parity", str(folder), str(unchecked), "--text", str(text)]
        words += ["--greedy-tokens", str(greedy_tokens)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"llama.cpp does not run what was written: {done.stderr.strip().rpartition(chr(10))[2]}")
        parity: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        if parity["mean_kl"] > MOST_KL[kind] or parity["same_experts_share"] < LEAST_SAME_EXPERTS[kind]:
            raise ValueError(
                f"llama.cpp computes something else: mean KL {parity['mean_kl']:.2g} (at most {MOST_KL[kind]}), the "
                f"same experts for {parity['same_experts_share']:.2%} (at least {LEAST_SAME_EXPERTS[kind]:.1%})"
            )
        os.replace(unchecked, out)
    finally:
        unchecked.unlink(missing_ok=True)
    return parity


def n_weights(folder: Path) -> int:
    """By the headers of its files. Raises BadModelFile where one is broken."""
    tables = read_tables(list(local_model(folder).files.values()))
    return sum(math.prod(tensor.shape) for table in tables for tensor in table.values() if tensor.dtype)


def check_room(folder: Path, out: Path, to: str, kind: str) -> None:
    """Raises InsufficientMemory and InsufficientDisk with the figures."""
    whole = n_weights(folder)
    weight_bytes = 2 if to == "gguf" and kind == "f16" else _FLOAT_BYTES
    check_disk(weight_bytes * whole, out.parent, f"{out}")
    check_memory(_FLOAT_BYTES * _COPIES[to] * whole, f"Exporting {folder}")


def _check(folder: Path, out: Path, text: Path, greedy_tokens: int) -> None:
    """Raises LayaError for what would be found only after minutes, or taken for something else."""
    config = folder / "config.json"
    if not config.is_file():  # Transformers would look for a repository of that name
        raise BadModelFile(f"{folder} is no folder of a Laya model: there is no {config}")
    try:
        found = json.loads(config.read_text()).get("model_type")
    except (ValueError, AttributeError):
        raise BadModelFile(f"{config} is no configuration of a model") from None
    if found != LayaConfig.model_type:  # whose weights Transformers would pass over, and export what it drew instead
        raise BadModelFile(f"{config}: model_type is {found!r}; what is exported is {LayaConfig.model_type!r}")
    if not any(folder.glob("*.safetensors")):
        raise BadModelFile(
            f"{folder} has no weights: there is no .safetensors file beside {config.name}. Name the folder that "
            "`laya train` (OUT/model) or `laya upcycle` wrote."
        )
    check_new("--out", out)
    if not text.is_file():
        raise ConfigError(f"--text {text}: there is no such file", param="text")
    if greedy_tokens < 0:
        raise ConfigError(f"--greedy-tokens: expected 0 or more, got {greedy_tokens}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="laya export", description="A Laya model in a form that others run.")
    parser.add_argument("model", type=Path, help="its folder")
    parser.add_argument("--to", choices=("gguf", "mixtral"), default="gguf")
    parser.add_argument("--type", choices=tuple(TYPES), default="f16", help="of a GGUF file's matrices")
    parser.add_argument("--out", type=Path, required=True, help="a file that is not there yet; for mixtral a folder")
    parser.add_argument("--text", type=Path, default=_SAMPLE, help="what both are compared on")
    parser.add_argument("--greedy-tokens", type=int, default=0, help="also compare this many tokens of greedy text")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    args = parser.parse_args(argv)
    quiet_transformers()
    return run_verb("export", f"nothing is left of {args.out}", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    _check(args.model, args.out, args.text, args.greedy_tokens)
    check_room(args.model, args.out, args.to, args.type)
    with Progressing(Console(stderr=True), is_silent=args.json) as progress:
        if args.to == "mixtral":
            result = {"max_logit_difference": export_mixtral(args.model, args.out, progress.stage)}
        else:
            result = export_gguf(args.model, args.out, args.type, args.text, args.greedy_tokens, progress.stage)
    if not args.json:
        print(f"{args.out} computes what {args.model} does:")
        for name, value in result.items():
            print(f"  {name.replace('_', ' '):<22} {value:.6g}")
    print(json.dumps({"exported": str(args.out), **result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
