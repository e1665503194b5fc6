"""laya-nano, as it comes with Laya: what `laya eval` tells of a variant is what torch computes of the two files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from laya.memory import Budget
from laya.models.library import Library, resolve
from laya.quantization.likelihood import Subject
from laya.quantization.llama_api import Evaluator
from laya.quantization.make import Asked, make
from laya.quantization.measuring import measure, mixed_text
from tests.quantization.test_make import SILENT
from tests.quantization.torch_gguf import mixtral_of

N_WINDOWS, WINDOW_TOKENS = 4, 128


def test_kl_is_torchs(tmp_path: Path) -> None:
    """Of the numbers that the files' types stand for: llama.cpp rounds activations too where weights have few bits."""

    def made(source: Path, kind: str) -> Path:
        out = tmp_path / f"{source.stem}-{kind}.gguf"
        asked = Asked(resolve(str(source)), kind, requantizes=True, out=out)
        return Path(make(asked, Library(tmp_path), Budget(bytes=8 << 30, limit=""), SILENT).path)

    nano = resolve("laya-nano").path
    whole, small = made(nano, "f32"), made(made(nano, "q4_k_m"), "f32")
    text = tmp_path / "text.txt"
    text.write_text(mixed_text("mixed")[:4000], encoding="utf-8")
    measured = measure(
        [Subject(name="f32", path=whole), Subject(name="q4_k_m", path=small)],
        text=text, n_tokens=N_WINDOWS * (WINDOW_TOKENS - 1), window_tokens=WINDOW_TOKENS, n_vocab=4096, n_threads=1,
        questions=[], folder=tmp_path, tell=lambda words: None, exact=True,
    )  # fmt: skip
    tokenizer = Evaluator(whole, n_ctx=16, n_threads=1)
    ids = tokenizer.tokens_of(text.read_text(encoding="utf-8"))[: N_WINDOWS * WINDOW_TOKENS]
    first = [] if tokenizer.first_token is None else [tokenizer.first_token]
    tokenizer.close()
    rows = torch.tensor([first + ids[at : at + WINDOW_TOKENS] for at in range(0, len(ids), WINDOW_TOKENS)])
    with torch.inference_mode():
        ours, theirs = (
            mixtral_of(path)(input_ids=rows).logits[:, :-1].double().log_softmax(-1) for path in (whole, small)
        )
    kl = torch.nn.functional.kl_div(theirs, ours, reduction="none", log_target=True).sum(-1)
    found = measured.likelihood["q4_k_m"]
    assert found.mean_kl is not None and found.max_kl is not None and found.n_tokens == kl.numel()
    assert float(kl.mean()) > 1e-3, "nothing to tell apart"
    assert found.mean_kl.value == pytest.approx(float(kl.mean()), abs=1e-4)
    assert found.max_kl == pytest.approx(float(kl.max()), abs=1e-2)
    for name, logits in (("f32", ours), ("q4_k_m", theirs)):
        perplexity = torch.nn.functional.nll_loss(logits.flatten(0, 1), rows[:, 1:].flatten()).exp()
        assert measured.likelihood[name].perplexity.value == pytest.approx(float(perplexity), rel=5e-3)
