"""Owns: what quantizing a Hugging Face model cost it: the same text read by the model before and after, in float32.

The model after is loaded from the numbers that the written folder stands for, unpacked here; a tensor that
transformers does not find a place for, or misses, is an error. The two are never in memory together.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from laya.errors import EngineFailed
from laya.quantization.divergence import nll_of, token_figures
from laya.quantization.measuring import mixed_text
from laya.quantization.packed import weights
from laya.texts import DEFAULT_SET

WINDOW_TOKENS, MOST_WINDOWS = 512, 4


def held_to(source: Path, made: Path, work: Path) -> dict[str, float | int | str]:
    """Figures over the built-in text. work: a folder for the reference's logits, as large as four windows' are."""
    windows = text_windows(source)
    stored = work / "reference.npy"
    reference_nll = _score_reference(load(source), windows, stored)
    figures = []
    model = load_packed(made)
    for number, logits in enumerate(_logits(model, windows)):
        reference = np.load(stored, mmap_mode="r")[number]
        figures.append(token_figures(np.asarray(reference[:-1]), logits[:-1], np.array(windows[number][1:])))
    stored.unlink()
    kl = np.concatenate([each.kl for each in figures])
    nll = np.concatenate([each.nll for each in figures])
    return {
        "text": DEFAULT_SET,
        "n_tokens": len(kl),
        "mean_kl": float(kl.mean()),
        "max_kl": float(kl.max()),
        "same_top_share": float(np.concatenate([each.same_top for each in figures]).mean()),
        "reference_perplexity": float(np.exp(reference_nll)),
        "perplexity": float(np.exp(nll.mean())),
    }


def text_windows(folder: Path) -> list[list[int]]:
    """The built-in text in whole windows, as the model's own tokenizer cuts it."""
    config = json.loads((folder / "config.json").read_bytes())
    width = min(WINDOW_TOKENS, config.get("max_position_embeddings") or WINDOW_TOKENS)
    text = mixed_text(DEFAULT_SET)[: 16 * width * MOST_WINDOWS]
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    windows = [ids[at : at + width] for at in range(0, len(ids) - width + 1, width)][:MOST_WINDOWS]
    if not windows:
        raise EngineFailed(f"The text has {len(ids)} of this model's tokens: too few to compare on.")
    return windows


def load(folder: Path) -> PreTrainedModel:
    """In float32. Raises EngineFailed where the weights are not the model's."""
    return _checked(*AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True))


def load_packed(folder: Path) -> PreTrainedModel:
    """The same of a folder of 4-bit weights, as a model that is not quantized."""
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    state = {name: weight.float() for name, weight, _ in weights(folder)}
    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    loaded = family.from_pretrained(
        None, config=config, state_dict=state, dtype=torch.float32, output_loading_info=True
    )
    return _checked(*loaded)


def _checked(model: Any, info: dict[str, Any]) -> PreTrainedModel:
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(kind):
            raise EngineFailed(f"The model does not load whole: {kind.replace('_', ' ')} {sorted(info[kind])[:3]}.")
    whole: PreTrainedModel = model.eval()
    return whole


def _score_reference(model: PreTrainedModel, windows: list[list[int]], path: Path) -> float:
    """Keep the logits of all tokens in a file; gives the mean of what the next tokens cost, in nats."""
    shape = (len(windows), len(windows[0]), model.config.vocab_size)
    kept = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
    nll = []
    for number, logits in enumerate(_logits(model, windows)):
        kept[number] = logits
        nll.append(nll_of(logits[:-1], np.array(windows[number][1:])))
    kept.flush()
    return float(np.concatenate(nll).mean())


def _logits(model: PreTrainedModel, windows: list[list[int]]) -> Any:
    with torch.inference_mode():
        for window in windows:
            yield model(input_ids=torch.tensor([window])).logits[0].float().numpy()
