"""Owns: which experts a Hugging Face model chooses, in torch, whatever its family. Run: see `counting`.

transformers gives all families' experts one interface: the module that holds a layer's experts is called with the ids
that its router chose. They are read there, so they are what was computed, biases and groups included.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import laya.modeling.model  # noqa: F401  registers Laya's own with transformers
from laya.errors import BadModelFile
from laya.experts.counting import Job, serve
from laya.modeling.quiet import quiet_transformers

_IDS = ("top_k_index", "router_indices")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


class HfRouter:
    """See `counting.Router`."""

    def __init__(self, job: Job) -> None:
        """Raises BadModelFile or OSError where the folder is no model with experts whose choice can be read."""
        torch.set_num_threads(job.n_threads)
        quiet_transformers()
        folder = Path(job.path)
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):  # before a weight is read
            _experts_of(AutoModelForCausalLM.from_config(config), folder)
        self._tokenizer = _tokenizer(folder)
        try:
            self._model, report = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
        except SafetensorError as error:
            raise BadModelFile(f"{folder} has a broken safetensors file: {error}") from None
        if missing := sorted(report["missing_keys"]):
            raise BadModelFile(f"{folder} lacks weights, which would be drawn at random: {', '.join(missing[:3])}, ...")
        self._model.eval()
        experts = _experts_of(self._model, folder)
        self.n_experts = max(int(module.num_experts) for module in experts.values())
        text_config = config.get_text_config()
        longest = getattr(text_config, "max_position_embeddings", None)
        self.window_tokens = min(job.window_tokens, longest or job.window_tokens)
        self.first_token = self._first_token()
        self._chosen: dict[int, list[list[int]]] = {}
        for layer, module in experts.items():
            module.register_forward_pre_hook(self._keeper(layer, module), with_kwargs=True)

    def tokens_of(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def expert_ids(self, tokens: Sequence[int]) -> dict[int, list[list[int]]]:
        self._chosen.clear()
        with torch.inference_mode():
            self._model(input_ids=torch.tensor([list(tokens)]), use_cache=False, logits_to_keep=1)
        return dict(self._chosen)

    def _first_token(self) -> int | None:
        """What the tokenizer puts before every text, where it does."""
        added: list[int] = self._tokenizer.encode("", add_special_tokens=True).ids
        return added[0] if added and added[0] == self._model.config.get_text_config().bos_token_id else None

    def _keeper(self, layer: int, module: nn.Module) -> Callable[..., None]:
        names = list(inspect.signature(module.forward).parameters)
        name = next(name for name in _IDS if name in names)
        at = names.index(name)

        def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids: torch.Tensor = kwargs[name] if name in kwargs else args[at]
            self._chosen.setdefault(layer, []).extend(ids.reshape(-1, ids.shape[-1]).tolist())

        return keep


def _experts_of(model: nn.Module, folder: Path) -> dict[int, Any]:
    """Layer -> the module that holds its experts. Raises BadModelFile where there is none, or none that tells."""
    found: dict[int, Any] = {}
    for layer, name, module in _modules_with_ids(model):
        if layer in found:
            raise BadModelFile(
                f"{folder} has experts in more than one stack of layers ({name}): they are not told apart"
            )
        found[layer] = module
    if found:
        return found
    kind = getattr(model.config, "model_type", type(model).__name__)
    if any("expert" in name for name, _ in model.named_parameters()):
        raise BadModelFile(
            f"{folder} (model_type '{kind}') has experts, but transformers' code of that family does not pass the "
            "router's ids to them; a GGUF file of it may tell, through llama.cpp."
        )
    raise BadModelFile(f"{folder} (model_type '{kind}') is a dense model: it has no experts.")


def _modules_with_ids(model: nn.Module) -> Iterator[tuple[int, str, nn.Module]]:
    for name, module in model.named_modules():
        layer = _LAYER.search(name)
        takes_ids = any(each in inspect.signature(module.forward).parameters for each in _IDS)
        if layer is not None and takes_ids and hasattr(module, "num_experts"):
            yield int(layer[1]), name, module


def _tokenizer(folder: Path) -> Any:
    """Raises BadModelFile where there is no tokenizer.json."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise BadModelFile(f"{file} is missing: without it no text becomes tokens.")
    try:
        tokenizer = Tokenizer.from_str(file.read_text("utf-8"))
    except Exception as error:  # the library raises Exception itself
        raise BadModelFile(f"{file} is no tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


if __name__ == "__main__":
    sys.exit(serve(HfRouter))
