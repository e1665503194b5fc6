"""Which variant of a model is loaded: the order of quality, what counts as a variant, and the first that fits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laya.bench.stub_gateway import stub_plan
from laya.config import Config, ModelConfig, ResolvedModel
from laya.config.quantization import GGUF_KINDS, split_kind
from laya.errors import ConfigError, InsufficientMemory
from laya.gateway.kind_llamacpp import LlamaCppKind
from laya.gateway.variants import Candidate, candidates, choose, file_of, find_model, tell_variants
from laya.memory import Budget, plan_file, refusal
from laya.memory.ggml import FILE_TYPES
from laya.memory.shape import ModelShape
from laya.models import Library, resolve
from laya.models.variants import variants_of
from laya.quantization.make import Asked, make
from laya.types import MIB, AskedSettings, ModelFile, Plan
from tests.conftest import RunningServer
from tests.quantization.tiny_gguf import write_tiny

from .live import model_state, sdk

KINDS = ("f16", "q8_0", "q5_0")  # of these llama.cpp makes no second copy, so that fewer bits are fewer bytes
SHAPE = ModelShape(
    architecture="llama",
    n_layer=1,
    n_embd=8,
    n_head=(1,),
    n_head_kv=(1,),
    head_dim_k=8,
    head_dim_v=8,
    n_ff=8,
    n_vocab=8,
    n_ctx_train=64,
)
ASKED = AskedSettings(max_seq_len=256, max_num_seqs=1, kv_cache_dtype="f16", n_threads=1)


class Silent:
    """Nobody is told how far the making of a variant is."""

    def stage(self, text: str) -> None: ...

    def progress(self, done: int, total: int) -> None: ...

    def planned(self, job: Any, peak_bytes: int) -> None: ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny model in three types, and another that is called alike."""
    folder = tmp_path_factory.mktemp("variants")
    write_tiny(folder / "tiny-f16.gguf", width=512, n_layers=2)
    source = resolve(str(folder / "tiny-f16.gguf"))
    for kind in KINDS[1:]:
        out = folder / f"Tiny.{kind.upper()}.gguf"
        make(
            Asked(model=source, kind=kind, out=out, n_threads=1), Library(), Budget(bytes=1 << 33, limit="x"), Silent()
        )
    write_tiny(folder / "tiny-bf16.gguf", n_layers=1)  # of another shape: no variant, whatever its name
    return folder


def settings_of(quantization: str | None, model_id: str = "tiny") -> ResolvedModel:
    entry = ModelConfig(quantization=quantization)
    return Config(models={model_id: entry}).for_model(model_id)


def found_in(folder: Path, quantization: str, home: Path) -> list[Candidate]:
    settings = settings_of(quantization)
    file = find_model(settings, models_dir=folder, home=home)
    return candidates(settings, file, partial(LlamaCppKind().check, settings), models_dir=folder, home=home)


def planned(file: ModelFile, n_bytes: int, asked: AskedSettings = ASKED) -> Plan:
    return plan_file(file.path, asked, Budget(bytes=n_bytes, limit="a test"), model_id="tiny")


@pytest.mark.parametrize(
    ("name", "base", "kind"),
    [
        ("qwen3-8b:q4_k_m", "qwen3-8b", "q4_k_m"),
        ("Qwen3-8B-Q4_K_M", "qwen3-8b", "q4_k_m"),
        ("Qwen3-8B.q8_0.gguf", "qwen3-8b", "q8_0"),
        ("org/Qwen3-8B-UD-IQ2_XXS.gguf", "qwen3-8b", "iq2_xxs"),
        ("gpt-oss-20b-mxfp4", "gpt-oss-20b", "mxfp4"),
        ("Qwen3-8B-AWQ", "qwen3-8b", "awq"),
        ("model.BF16", "model", "bf16"),
        ("smollm2-135m", "smollm2-135m", None),
        ("qwen3-8b", "qwen3-8b", None),
    ],
)
def test_a_name_and_the_type_it_ends_in(name: str, base: str, kind: str | None) -> None:
    assert split_kind(name) == (base, kind)


def test_every_type_of_a_file_has_its_place_in_the_order() -> None:
    assert set(GGUF_KINDS) == {name.lower() for name in FILE_TYPES.values()}
    written = [
        "f32",
        "f16",
        "q8_0",
        "q6_k",
        "q5_k_m",
        "q5_k_s",
        "q5_0",
        "q4_k_m",
        "q4_k_s",
        "q4_0",
        "q3_k_m",
        "q2_k",
        "iq1_s",
    ]
    assert sorted(written, key=GGUF_KINDS.index) == written


def test_a_type_that_is_said_for_all_leaves_names_that_say_their_own() -> None:
    config = Config(quantization="auto", models={"own-q4_0": ModelConfig(quantization="Q8_0")})
    assert [config.for_model(name).quantization for name in ("a", "a:q4_0", "own-q4_0")] == ["auto", None, "q8_0"]
    assert Config().for_model("a").quantization is None


def test_variants_are_of_one_shape_the_best_first_as_their_headers_say(folder: Path, tmp_path: Path) -> None:
    named = {file.id for file in variants_of(resolve("tiny-f16", models_dir=folder), models_dir=folder, home=tmp_path)}
    assert named == {"tiny-f16", "Tiny.Q8_0", "Tiny.Q5_0", "tiny-bf16"}
    assert [each.quantization for each in found_in(folder, "auto", tmp_path)] == list(KINDS)
    assert [each.file.id for each in found_in(folder, "none", tmp_path)] == ["tiny-f16"]
    assert [each.file.id for each in found_in(folder, "q5_0", tmp_path)] == ["Tiny.Q5_0"]
    path = resolve(str(folder / "tiny-f16.gguf"))  # beside a file that lies anywhere
    assert {file.id for file in variants_of(path, models_dir=None, home=tmp_path)} == named


def test_a_variant_that_is_not_at_hand_is_an_error_with_the_nearest_and_the_command(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="f16, q8_0, q5_0 is q5_0; `laya quantize tiny --to q4_k_m` makes it"):
        found_in(folder, "q4_k_m", tmp_path)
    (tmp_path / "only-q8_0.gguf").symlink_to(folder / "Tiny.Q8_0.gguf")
    settings = settings_of("none", "only")
    file = find_model(settings, models_dir=tmp_path, home=tmp_path)
    with pytest.raises(ConfigError, match="no variant in 16 or 32 bits is at hand, only q8_0; write"):
        candidates(settings, file, lambda each: None, models_dir=tmp_path, home=tmp_path)


def test_the_best_that_fits_to_the_byte(folder: Path, tmp_path: Path) -> None:
    found, auto = found_in(folder, "auto", tmp_path), settings_of("auto")
    needs = [planned(each.file, 1 << 40).need_bytes for each in found]
    assert needs == sorted(needs, reverse=True)
    for n_bytes, kind, reason in (
        (needs[0], "f16", "the best of 3 at hand"),
        (needs[0] - 1, "q8_0", "the best of 3 that fits: f16 would need "),
        (needs[1], "q8_0", "the best of 3 that fits"),
        (needs[1] - 1, "q5_0", "; q8_0 would need "),
        (needs[2], "q5_0", "the best of 3 that fits"),
    ):
        plan = choose(found, partial(planned, n_bytes=n_bytes), auto)
        assert plan.fits and plan.variant is not None
        assert (plan.variant.quantization, reason in plan.variant.reason) == (kind, True)
        assert file_of(plan, found[0].file).path == Path(plan.variant.path)
        assert plan.settings.max_seq_len == 256  # what the user fixed is never changed


def test_what_nobody_fixed_is_lowered_before_fewer_bits_are_taken(folder: Path, tmp_path: Path) -> None:
    found, asked = found_in(folder, "auto", tmp_path), msgspec.structs.replace(ASKED, max_num_seqs=None)
    wanted = planned(found[0].file, 1 << 40, asked)
    plan = choose(found, partial(planned, n_bytes=wanted.need_bytes - 1, asked=asked), settings_of("auto"))
    assert (wanted.settings.max_num_seqs, plan.settings.max_num_seqs) == (2, 1)
    assert plan.variant is not None and plan.variant.quantization == "f16"


def test_a_refusal_tells_what_each_variant_needs(folder: Path, tmp_path: Path) -> None:
    found = found_in(folder, "auto", tmp_path)
    plan = choose(found, partial(planned, n_bytes=MIB), settings_of("auto"))
    assert not plan.fits and plan.variant is not None and plan.variant.reason == "the smallest of 3; none fits"
    error = tell_variants(refusal(plan, Budget(bytes=MIB, limit="a test")), plan)
    assert [each["quantization"] for each in error.details["variants"]] == list(KINDS)
    assert error.details["need_bytes"] == min(each["need_bytes"] for each in error.details["variants"])
    assert "Variants at hand need: f16 " in error.message


def test_a_refusal_names_the_smaller_one_that_could_be_made_where_it_would_fit(folder: Path, tmp_path: Path) -> None:
    found = found_in(folder, "none", tmp_path)
    need_bytes = planned(found[0].file, 1 << 40).need_bytes
    plan = choose(found, partial(planned, n_bytes=need_bytes - 1), settings_of("none"))
    error = tell_variants(refusal(plan, Budget(bytes=need_bytes - 1, limit="a test")), plan)
    assert error.details["commands"] == ["laya quantize tiny --to q4_k_m"]
    tight = choose(found, partial(planned, n_bytes=MIB), settings_of("none"))
    assert "commands" not in tell_variants(refusal(tight, Budget(bytes=MIB, limit="a test")), tight).details


def stub(need_bytes: int, budget_bytes: int, *, spills: bool) -> Plan:
    plan = stub_plan(1)
    ram = msgspec.structs.replace(plan.devices[0], budget_bytes=budget_bytes, total_bytes=need_bytes)
    settings = msgspec.structs.replace(plan.settings, spills=spills)
    return msgspec.structs.replace(plan, fits=need_bytes <= budget_bytes, devices=[ram], settings=settings)


@given(st.lists(st.tuples(st.integers(1, 100), st.booleans()), min_size=1, max_size=6), st.integers(1, 100))
def test_what_fits_is_never_passed_over_for_fewer_bits(variants: list[tuple[int, bool]], budget_bytes: int) -> None:
    """But for one that leaves to the CPU what GPUs should hold, where another does not."""
    found = [
        Candidate(
            file=ModelFile(id=kind, path=Path(kind), format="gguf", file_bytes=need, origin="path"),
            quantization=kind,
            weights_bytes=need,
            shape=SHAPE,
        )
        for kind, (need, _) in zip(GGUF_KINDS, variants, strict=False)
    ]
    plans = {
        kind: stub(need, budget_bytes, spills=spills)
        for kind, (need, spills) in zip(GGUF_KINDS, variants, strict=False)
    }
    plan = choose(found, lambda file: plans[file.id], settings_of("auto"))
    assert plan.variant is not None
    fitting = [each for each in found if plans[each.file.id].fits]
    whole = [each for each in fitting if not plans[each.file.id].settings.spills]
    assert plan.fits == bool(fitting)
    if fitting:
        assert plan.variant.id == (whole or fitting)[0].file.id
    else:
        assert plan.need_bytes == min(each.need_bytes for each in plans.values())


@pytest.mark.engine
def test_a_server_loads_the_best_that_fits_and_says_so(folder: Path, start_server: Any) -> None:
    sizes = [planned(resolve(str(folder / name)), 1 << 40).need_bytes for name in ("tiny-f16.gguf", "Tiny.Q8_0.gguf")]
    between = sum(sizes) // 2
    server: RunningServer = start_server(
        config=f"""
version: 1
models_dir: {folder}
memory: {{budget: {between // 1024}KiB}}
max_seq_len: 256
max_num_seqs: 1
kv_cache_dtype: f16
n_threads: 1
models:
  tiny: {{quantization: auto}}
  whole: {{source: tiny-f16, quantization: none}}
  absent: {{source: tiny-f16, quantization: q6_k}}
"""
    )
    try:
        client = sdk(server)
        answer = client.completions.create(model="tiny", prompt="a", max_tokens=3, temperature=0)
        assert answer.model == "tiny" and answer.usage is not None and answer.usage.completion_tokens == 3
        state = model_state(server, "tiny")
        variant = state["plan"]["variant"]
        assert (variant["id"], variant["quantization"]) == ("Tiny.Q8_0", "q8_0")
        assert variant["reason"].startswith("the best of 3 that fits: f16 would need ")
        maps = Path(f"/proc/{state['pid']}/maps").read_text()
        assert str(folder / "Tiny.Q8_0.gguf") in maps and "tiny-f16.gguf" not in maps  # what computes is that file
        ids = {model.id for model in client.models.list()}  # the name of one variant stays that one
        assert {"tiny", "whole", "tiny-f16", "Tiny.Q8_0"} <= ids
        with pytest.raises(Exception, match="Variants at hand need: f16 ") as refused:
            client.completions.create(model="whole", prompt="a", max_tokens=1)
        assert refused.value.status_code == InsufficientMemory.http_status  # type: ignore[attr-defined]
        with pytest.raises(Exception, match="`laya quantize absent --to q6_k` makes it"):
            client.completions.create(model="absent", prompt="a", max_tokens=1)
    finally:
        server.stop()
