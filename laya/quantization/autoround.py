"""Owns: a folder of 4-bit weights made of a Hugging Face model by AutoRound, in names that loaders know, and checked.

`laya quantize MODEL --to awq|gptq` starts it as a process of its own: it needs torch, and its memory is its own. A line
of JSON on stdout tells each stage, the last one what was made. What AutoRound says goes to stderr.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from laya.errors import EngineFailed, LayaError
from laya.modeling.export import export_mixtral
from laya.quantization.held import held_to
from laya.quantization.limits import status_bytes
from laya.quantization.packed import BITS, PARTS
from laya.quantization.published import IS_ROUTER, check_whole, linear_stems, published, settings_of
from laya.result_file import as_umask_says

TUNING_STEPS, TUNING_WINDOW = 50, 512  # AutoRound's "light" recipe has so many
COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
          "generation_config.json")  # fmt: skip
_INDEX = "model.safetensors.index.json"


def quantize(model: Path, out: Path, work: Path, kind: str, group: int, text: Path | None, most_tokens: int) -> int:
    """Write AutoRound's folder of `model`, with the names made right, as `out`. Gives the tokens it was tuned on."""
    os.environ |= {"AR_DISABLE_META_LOAD": "1", "HF_HUB_OFFLINE": "1"}  # on meta it loses experts; nothing is fetched
    from auto_round import AutoRound

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"))
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    windows = _windows(model, text.read_text("utf-8"), most_tokens) if text else []
    tuning = {"iters": TUNING_STEPS, "dataset": windows, "nsamples": len(windows), "seqlen": TUNING_WINDOW}
    rounding = {"iters": 0, "disable_opt_rtn": True}  # to nearest: no text is read
    rounder = AutoRound(
        loaded,
        tokenizer=tokenizer,
        scheme="W4A16",
        group_size=group,
        sym=kind == "gptq",  # engines run GPTQ only so; AWQ is published with zero points
        device_map="cpu",
        enable_torch_compile=False,
        batch_size=1,
        **(tuning if text else rounding),
    )
    rounder.quantize_and_save(output_dir=str(work), format=f"auto_{kind}")
    made = [file.parent for file in work.rglob("config.json")]
    if len(made) != 1:
        raise EngineFailed(f"AutoRound wrote {len(made)} folders with a config.json.")
    del loaded, rounder
    _rename(made[0], out, json.loads((model / "config.json").read_bytes()), kind, group)
    for name in COPIED:
        if (model / name).is_file():
            shutil.copy(model / name, out / name)
    return sum(window.numel() for window in windows)


def _windows(model: Path, text: str, most_tokens: int) -> list[torch.Tensor]:
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids[:most_tokens]
    if len(ids) < TUNING_WINDOW:
        raise EngineFailed(f"The calibration text has {len(ids)} tokens: tuning takes {TUNING_WINDOW} at least.")
    starts = range(0, len(ids) - TUNING_WINDOW + 1, TUNING_WINDOW)
    return [torch.tensor([ids[at : at + TUNING_WINDOW]]) for at in starts]


def _rename(made: Path, out: Path, config: dict[str, Any], kind: str, group: int) -> None:
    """Shard by shard. What was not quantized is kept, but for large matrices in float32, which become float16."""
    out.mkdir()
    files = sorted(made.glob("*.safetensors"))
    places: dict[str, str] = {}
    kept: list[str] = []
    for file in files:
        tensors = {published(config["model_type"], name): tensor for name, tensor in _tensors(file)}
        for name, tensor in tensors.items():
            places[name] = file.name
            if name.rpartition(".")[2] not in PARTS:
                kept.append(name)
                tensors[name] = _half(name, tensor)
        save_file(tensors, out / file.name, metadata={"format": "pt"})
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(file.stat().st_size for file in files)}, "weight_map": places}
        (out / _INDEX).write_text(json.dumps(index, indent=1))
    config.pop("torch_dtype", None)
    config |= {"dtype": "float16", "quantization_config": settings_of(kind, group, kept)}
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def _tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(file, framework="pt") as opened:
        for name in list(opened.keys()):
            yield name, opened.get_tensor(name)


def _half(name: str, tensor: torch.Tensor) -> torch.Tensor:
    is_matrix = tensor.ndim > 1 and tensor.dtype == torch.float32 and not IS_ROUTER.search(name)
    if not is_matrix or tensor.abs().max() > torch.finfo(torch.float16).max:
        return tensor
    return tensor.half()


def _source(model: Path, work: Path) -> tuple[Path, float | None]:
    """A folder that AutoRound knows: of a Laya model its Mixtral form, and the largest difference of a logit to it."""
    if json.loads((model / "config.json").read_bytes())["model_type"] != "laya":
        return model, None
    out = work / "mixtral"
    return out, export_mixtral(model, out)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="laya quantize --to awq")
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("work", type=Path, help="an empty folder, for what is cleared away after")
    parser.add_argument("--to", choices=("awq", "gptq"), required=True)
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--calibration-tokens", type=int, default=0)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    report = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # AutoRound prints

    def stage(text: str) -> None:
        print(json.dumps({"stage": text}), file=report)

    try:
        stage("reading")
        source, difference = _source(args.model, args.work)
        linear_stems(source)  # experts that cannot be packed are told before, not after
        stage("tuning the rounding" if args.calibration else "rounding")
        rounded = args.work / "autoround"
        n_tokens = quantize(
            source, args.out, rounded, args.to, args.group_size, args.calibration, args.calibration_tokens
        )
        shutil.rmtree(rounded)
        stage("checking")
        found = check_whole(args.out, linear_stems(source))
        as_umask_says(args.out)
        held = held_to(source, args.out, args.work)
    except (LayaError, OSError, ValueError) as error:
        print(re.sub(r"\s+", " ", str(error)), file=sys.stderr)
        return 1
    versions = {name: importlib.metadata.version(name) for name in ("auto-round", "torch", "transformers")}
    made = {
        "bits": BITS,
        "model_type": json.loads((source / "config.json").read_bytes())["model_type"],
        "max_logit_difference_of_form": difference,
        "tuned_on_tokens": n_tokens,
        "peak_bytes": status_bytes("VmHWM"),
        "versions": versions,
    }
    print(json.dumps({"made": made | found | held}), file=report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
