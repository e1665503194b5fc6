"""Owns: an upcycled model on disk: a shard a layer, index, settings and card; nothing is there until it is whole.

Tensors are written as they come, so that no more than a layer's experts are in memory. Knows not how they are made.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from laya.modeling.config import LayaConfig
from laya.result_file import as_umask_says, check_new

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_INDEX = "model.safetensors.index.json"


class ModelFolder:
    """A model's folder that is being written."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.path = path
        self.dtype = dtype
        self._of: dict[str, str] = {}
        self._n_bytes = 0

    def write_layer(self, layer: int, state: dict[str, Tensor]) -> None:
        """state: the layer's tensors by their names within it."""
        self._write(f"layer-{layer:03d}.safetensors", {f"model.layers.{layer}.{n}": t for n, t in state.items()})

    def write_rest(self, state: dict[str, Tensor]) -> None:
        """Embeddings, last norm, and head where it is not the embeddings."""
        self._write("rest.safetensors", state)

    def replace_experts(self, layer: int, gate_up_proj: Tensor, down_proj: Tensor) -> None:
        """In a layer that was written."""
        name = f"layer-{layer:03d}.safetensors"
        state = load_file(self.path / name)
        experts = {"gate_up_proj": gate_up_proj, "down_proj": down_proj}
        state |= {f"model.layers.{layer}.mlp.experts.{part}": tensor for part, tensor in experts.items()}
        self._save(name, state)

    def finish(self, config: LayaConfig, card: str) -> None:
        """What makes the shards a model."""
        index = {"metadata": {"total_size": self._n_bytes}, "weight_map": self._of}
        (self.path / _INDEX).write_text(json.dumps(index, indent=1), "utf-8")
        config.architectures, config.dtype = ["LayaForCausalLM"], self.dtype
        config.save_pretrained(self.path)
        (self.path / "README.md").write_text(card, "utf-8")

    def _write(self, name: str, state: dict[str, Tensor]) -> None:
        self._of |= dict.fromkeys(state, name)
        self._n_bytes += self._save(name, state)

    def _save(self, name: str, state: dict[str, Tensor]) -> int:
        """Routers stay in float32: half precision changes who is chosen."""
        whole = {
            key: tensor.detach().to(torch.float32 if ".gate." in key else DTYPES[self.dtype]).contiguous()
            for key, tensor in state.items()
        }
        save_file(whole, self.path / name, metadata={"format": "pt"})
        return sum(tensor.nbytes for tensor in whole.values())


@contextmanager
def new_folder(out: Path, dtype: str) -> Iterator[ModelFolder]:
    """`out` is there when the block has ended well; otherwise nothing is. Raises Conflict where it is there."""
    check_new("--out", out)
    part = out.with_name(f"{out.name}.part-{os.getpid()}")
    part.mkdir()
    try:
        yield ModelFolder(part, dtype)
        as_umask_says(part)
        os.rename(part, out)  # fails where a folder with something in it has come meanwhile
    finally:
        shutil.rmtree(part, ignore_errors=True)
