"""Owns: a folder of 4-bit weights as a GGUF file of the numbers they stand for, so that llama.cpp can score it.

In float32, which holds each level times its scale exactly. Run as a process of its own: it needs torch, which whoever
reads GGUF files only does not have. Of Mixtral's form, which `laya quantize --to awq|gptq` writes of a Laya model.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from transformers import MixtralConfig, PreTrainedModel

from laya.errors import BadModelFile, LayaError
from laya.modeling.config import LayaConfig
from laya.modeling.gguf_file import write_gguf
from laya.modeling.model import LayaForCausalLM
from laya.quantization.held import load_packed
from laya.quantization.packed import weights


def as_laya(model: PreTrainedModel) -> LayaForCausalLM:
    """The same function: a Mixtral's router is a Laya router of one matrix. Raises BadModelFile for another family."""
    if not isinstance(model.config, MixtralConfig):
        raise BadModelFile(f"a folder of model_type '{model.config.model_type}'; scored here are those of mixtral")
    own = ("model_type", "architectures", "transformers_version", "auto_map", "quantization_config", "dtype")
    kept = {name: value for name, value in model.config.to_dict().items() if name not in own}
    config = LayaConfig(**kept, router_type="linear")
    laya = LayaForCausalLM(config)
    laya.load_state_dict(model.state_dict())
    laya.eval()
    return laya


def packed_share(folder: Path) -> tuple[int, int]:
    """Weights that are packed, and all weights of matrices."""
    packed = matrices = 0
    for _, weight, is_packed in weights(folder):
        packed += weight.numel() * is_packed
        matrices += weight.numel() * (weight.dim() > 1)
    return packed, matrices


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m laya.quantization.unpacked")
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args(argv)
    try:
        packed, matrices = packed_share(args.folder)
        template = args.folder / "chat_template.jinja"
        write_gguf(
            as_laya(load_packed(args.folder)),
            args.folder / "tokenizer.json",
            args.out,
            kind="f32",
            name=args.folder.name,
            chat_template=template.read_text() if template.is_file() else None,
        )
    except LayaError as error:
        print(error.message, file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps({"packed": packed, "matrices": matrices}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
