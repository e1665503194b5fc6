"""What is chosen when nothing is asked, in which order it gives way, and what is said when nothing fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from machine_rates import RATES, WEIGHT_S, rates_with
from small_gguf import MakeGguf

from laya.config import parse_bytes, parse_engine_flags
from laya.errors import ConfigError
from laya.memory import Budget, Machine, plan_before_download, plan_file, read_facts, refusal
from laya.memory.advice import how_to_set
from laya.memory.engine_facts import built_in_engine
from laya.memory.fit import fit
from laya.memory.planner import Model
from laya.memory.shape import ModelShape
from laya.types import GIB, MIB, AskedSettings, Plan

AUTO = AskedSettings()


def limited(n_bytes: int, **fields: Any) -> Budget:
    known: dict[str, Any] = {"limit": "memory available", "total_bytes": n_bytes, "memory_bytes": n_bytes}
    return Budget(bytes=n_bytes, **(known | fields))


def plan_in(path: Path, n_bytes: int, asked: AskedSettings = AUTO) -> Plan:
    return plan_file(path, asked, limited(n_bytes), model_id="m")


def needs(path: Path, budget: Budget, **asked: Any) -> int:
    return plan_file(path, AskedSettings(**asked), budget, model_id="m").need_bytes


@pytest.mark.parametrize(
    ("trained", "expected"), [(131072, 32768), (32768, 32768), (10000, 8192), (4096, 4096), (3000, 3000), (512, 512)]
)
def test_auto_length_aims_at_32768_and_stays_within_the_training(
    make_gguf: MakeGguf, plenty: Budget, trained: int, expected: int
) -> None:
    plan = plan_file(make_gguf(n_ctx_train=trained), AUTO, plenty, model_id="m")
    assert plan.settings.max_seq_len == expected
    assert plan.settings.max_num_seqs == 2
    assert plan.settings.kv_cache_dtype == "f16"
    assert plan.settings.n_batch == plan.settings.n_ubatch == min(128, plan.settings.slot_tokens)
    assert plan.settings.n_threads == Machine().cores()
    assert plan.fits
    assert plan.exact
    assert set(plan.reasons) == {"max_seq_len", "max_num_seqs", "kv_cache_dtype", "n_threads"}


def test_sequences_give_way_before_context_before_kv_type(make_gguf: MakeGguf, plenty: Budget) -> None:
    path = make_gguf(n_layer=8, n_head_kv=4)
    steps = []
    n_bytes = needs(path, plenty)
    while True:
        plan = plan_in(path, n_bytes)
        if not plan.fits:
            break
        settings = plan.settings
        steps.append((settings.max_num_seqs, settings.max_seq_len, settings.kv_cache_dtype))
        n_bytes = plan.need_bytes - 1  # a byte less than this choice needs
    assert steps == [
        (2, 32768, "f16"),
        (1, 32768, "f16"),
        (1, 16384, "f16"),
        (1, 8192, "f16"),
        (1, 4096, "f16"),
        (1, 4096, "q8_0"),
    ]


def test_each_change_says_what_the_choice_before_needed(make_gguf: MakeGguf, plenty: Budget) -> None:
    path = make_gguf(n_layer=8, n_head_kv=4)
    plan = plan_in(path, needs(path, plenty, max_num_seqs=1, max_seq_len=8192))
    assert plan.reasons["max_num_seqs"].startswith("instead of 2: 2 x 32768 tokens at f16 would need")
    assert plan.reasons["max_seq_len"].startswith("instead of 32768: 1 x 16384 tokens at f16 would need")
    assert plan.reasons["kv_cache_dtype"] == "the default; nothing is lost"


def test_what_was_asked_is_never_changed_and_has_no_reason(make_gguf: MakeGguf) -> None:
    asked = AskedSettings(max_seq_len=9000, max_num_seqs=3, kv_cache_dtype="f32", n_threads=5)
    plan = plan_in(make_gguf(), 1, asked)
    assert not plan.fits
    assert plan.reasons == {}
    for name in ("max_seq_len", "max_num_seqs", "kv_cache_dtype", "n_threads"):
        assert getattr(plan.settings, name) == getattr(asked, name)


def test_only_what_was_left_open_gives_way(make_gguf: MakeGguf, plenty: Budget) -> None:
    path = make_gguf(n_layer=8, n_head_kv=4)
    n_bytes = needs(path, plenty, max_num_seqs=4, max_seq_len=8192)
    settings = plan_in(path, n_bytes, AskedSettings(max_num_seqs=4)).settings
    assert (settings.max_num_seqs, settings.max_seq_len) == (4, 8192)
    settings = plan_in(path, n_bytes, AskedSettings(max_seq_len=32768)).settings
    assert (settings.max_num_seqs, settings.max_seq_len) == (1, 32768)


def test_kv_type_that_does_not_divide_the_heads_is_not_tried(make_gguf: MakeGguf) -> None:
    plan = plan_in(make_gguf(head_dim=48), 1)
    assert plan.settings.kv_cache_dtype == "f16"
    assert all("q8_0" not in suggestion.flags for suggestion in plan.suggestions)


def test_length_above_the_training_is_refused_with_both_numbers(make_gguf: MakeGguf, plenty: Budget) -> None:
    asked = AskedSettings(max_seq_len=65536)
    with pytest.raises(ConfigError, match="max_seq_len 65536 is above the 32768 tokens that 'm'") as caught:
        plan_file(make_gguf(), asked, plenty, model_id="m")
    assert caught.value.details == {"max_seq_len": 65536, "n_ctx_train": 32768}
    stretched = make_gguf("stretched", keys={"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0})
    plan = plan_file(stretched, asked, plenty, model_id="m")
    assert plan.settings.max_seq_len == 65536
    assert any("rope scaling" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"max_seq_len": 0}, "max_seq_len is 0; it must be at least 1"),
        ({"max_num_seqs": 300}, "max_num_seqs is 300; it must be between 1 and 256"),
        ({"n_threads": -1}, "n_threads is -1"),
        ({"kv_pool_tokens": 1000, "max_seq_len": 2048}, "kv_pool_tokens is 1000, below max_seq_len 2048"),
        ({"kv_cache_dtype": "q8"}, "did you mean q8_0"),
    ],
)
def test_settings_that_no_machine_could_give_are_named(
    make_gguf: MakeGguf, plenty: Budget, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_file(make_gguf(), AskedSettings(**asked), plenty, model_id="m")


def test_pool_below_the_worst_case_is_shared_and_bounds_the_length(make_gguf: MakeGguf, plenty: Budget) -> None:
    plan = plan_file(make_gguf(), AskedSettings(kv_pool_tokens=12000), plenty, model_id="m")
    settings = plan.settings
    assert (settings.max_seq_len, settings.kv_unified, settings.slot_tokens) == (8192, True, 12032)
    assert settings.kv_pool_tokens == 12032
    assert any("share one pool" in note for note in plan.notes)


@pytest.mark.parametrize("task", ["embed", "rerank"])
def test_embedding_batch_holds_the_longest_input(make_gguf: MakeGguf, plenty: Budget, task: Any) -> None:
    settings = plan_file(make_gguf(), AskedSettings(task=task), plenty, model_id="m").settings
    assert settings.max_seq_len == settings.n_batch == settings.n_ubatch == 2048
    asked = AskedSettings(task=task, max_seq_len=300)
    assert plan_file(make_gguf(), asked, plenty, model_id="m").settings.n_ubatch == 300


@pytest.mark.parametrize("task", ["embed", "rerank"])
def test_embeddings_of_several_sequences_are_computed_in_one_cache(
    make_gguf: MakeGguf, plenty: Budget, task: Any
) -> None:
    asked = AskedSettings(max_seq_len=300, max_num_seqs=3, task=task)
    settings = plan_file(make_gguf(), asked, plenty, model_id="m").settings
    assert (settings.kv_unified, settings.slot_tokens, settings.is_pool_short) == (True, 3 * 512, False)
    short = msgspec.structs.replace(asked, kv_pool_tokens=500)
    settings = plan_file(make_gguf(), short, plenty, model_id="m").settings
    assert (settings.kv_unified, settings.slot_tokens, settings.is_pool_short) == (True, 512, True)
    alone = msgspec.structs.replace(asked, max_num_seqs=1)
    assert not plan_file(make_gguf(), alone, plenty, model_id="m").settings.kv_unified


# refusals
def with_flags(asked: AskedSettings, flags: str) -> tuple[AskedSettings, str | None]:
    """The settings with the flags of a suggestion over them, read as the command line reads them."""
    words = flags.split()
    budget = None
    if "--memory-budget" in words:
        at = words.index("--memory-budget")
        budget = words[at + 1]
        del words[at : at + 2]
    settings = parse_engine_flags(words)
    return msgspec.structs.replace(asked, **settings), budget


def test_refusal_has_three_suggestions_that_fit_when_used(make_gguf: MakeGguf, plenty: Budget) -> None:
    path = make_gguf(n_layer=8, n_head_kv=4)
    asked = AskedSettings(max_seq_len=32768, max_num_seqs=8)
    budget = limited(needs(path, plenty, max_seq_len=32768, max_num_seqs=1) + MIB)
    plan = plan_file(path, asked, budget, model_id="m")
    assert not plan.fits
    assert len(plan.suggestions) >= 3
    for suggestion in plan.suggestions:
        again = plan_file(path, with_flags(asked, suggestion.flags)[0], budget, model_id="m")
        assert again.fits, suggestion
        assert again.need_bytes == suggestion.total_bytes
    error = refusal(plan, budget)
    assert error.exit_code == 3
    assert error.http_status == 422
    assert error.details == {
        "need_bytes": plan.need_bytes,
        "available_bytes": budget.bytes,
        "limit": "memory available",
        "suggestions": [suggestion.flags for suggestion in plan.suggestions],
        "models": [],
    }


def test_small_budget_of_the_users_own_suggests_budgets_that_do(smollm2_path: Path) -> None:
    budget = Machine().budget("100MiB")
    plan = plan_file(smollm2_path, AUTO, budget, model_id="smollm2")
    assert not plan.fits
    assert len(plan.suggestions) >= 3
    for suggestion in plan.suggestions:
        asked, raised = with_flags(AUTO, suggestion.flags)
        assert raised is not None
        assert plan_file(smollm2_path, asked, Machine().budget(raised), model_id="smollm2").fits


def test_budget_suggestion_counts_what_loaded_engines_hold(make_gguf: MakeGguf) -> None:
    taken = 3 * GIB
    budget = limited(MIB, total_bytes=MIB + taken, is_users=True, ceiling_bytes=8 * GIB)
    plan = plan_file(make_gguf(), AUTO, budget, model_id="m")
    first = plan.suggestions[0]
    raised = int(first.flags.split()[1].removesuffix("MiB")) * MIB
    assert taken + first.total_bytes <= raised <= taken + first.total_bytes + 10 * MIB


def test_refusal_by_the_models_own_limit_names_it_and_limits_that_do(smollm2_path: Path, plenty: Budget) -> None:
    asked = AskedSettings(memory_limit_bytes=100 * MIB)
    plan = plan_file(smollm2_path, asked, plenty, model_id="m")
    assert not plan.fits
    assert "the 100 MiB they may use (memory_limit)" in plan.verdict
    error = refusal(plan, plenty)
    assert "100 MiB may be used (memory_limit). What fits: --memory-limit " in error.message
    assert "The first, set: `laya serve --memory-limit " in error.message
    assert "`models.m.memory_limit: " in error.message
    assert (error.details["available_bytes"], error.details["limit"]) == (100 * MIB, "memory_limit")
    assert len(plan.suggestions) >= 3
    for suggestion in plan.suggestions:
        flags = parse_engine_flags(suggestion.flags.split())
        raised = flags.pop("memory_limit")
        again = msgspec.structs.replace(asked, memory_limit_bytes=parse_bytes(raised), **flags)
        assert plan_file(smollm2_path, again, plenty, model_id="m").fits, suggestion
        assert "MiB" in suggestion.flags


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--max-num-seqs 1", "`laya serve --max-num-seqs 1`, or `models.big.max_num_seqs: 1` in config.yaml"),
        ("--no-mmap", "`laya serve --no-mmap`, or `models.big.mmap: false` in config.yaml"),
        (
            "--memory-budget 3GiB --max-seq-len 4096",
            "`laya serve --memory-budget 3GiB --max-seq-len 4096`, or `memory.budget: 3GiB` and "
            "`models.big.max_seq_len: 4096` in config.yaml",
        ),
    ],
)
def test_suggestion_says_where_a_server_takes_it(flags: str, words: str) -> None:
    assert how_to_set("big", flags) == words


def test_budget_and_limit_are_raised_together(smollm2_path: Path) -> None:
    asked, budget = AskedSettings(memory_limit_bytes=100 * MIB), Machine().budget("200MiB")
    first = plan_file(smollm2_path, asked, budget, model_id="m").suggestions[0]
    assert first.flags.startswith("--memory-budget ")
    assert " --memory-limit " in first.flags


def test_refusal_without_a_setting_that_fits_leads_to_a_plan_with_the_same_limit(make_gguf: MakeGguf) -> None:
    plan = plan_file(make_gguf(), AskedSettings(memory_limit_bytes=MIB), limited(2 * MIB), model_id="m")
    assert "`laya plan m --memory-limit 1MiB` names" in refusal(plan, limited(2 * MIB)).message


def test_more_threads_than_cores_are_noted(make_gguf: MakeGguf, plenty: Budget) -> None:
    cores = Machine().cores()
    plan = plan_file(make_gguf(), AskedSettings(n_threads=1024), plenty, model_id="m")
    assert any(f"n_threads 1024 is more than the {cores} core" in note for note in plan.notes)
    plan = plan_file(make_gguf(), AskedSettings(n_threads=cores), plenty, model_id="m")
    assert not any("n_threads" in note for note in plan.notes)


def test_repacked_model_is_advised_to_read_its_weights(make_gguf: MakeGguf, plenty: Budget) -> None:
    path = make_gguf(weights="Q4_0", n_layer=8, n_embd=1024, n_ff=4096)
    asked = AskedSettings(max_seq_len=2048, max_num_seqs=1, kv_cache_dtype="f16")
    whole = plan_file(path, asked, plenty, model_id="m")
    budget = limited(whole.need_bytes - MIB)
    first = plan_file(path, asked, budget, model_id="m").suggestions[0]
    assert first.flags == "--no-mmap"
    again = plan_file(path, with_flags(asked, first.flags)[0], budget, model_id="m")
    assert again.fits
    assert again.need_bytes == first.total_bytes < whole.need_bytes - whole.devices[0].terms["repack"] / 2


def test_weights_are_read_with_a_smaller_wish_where_neither_alone_fits(make_gguf: MakeGguf, plenty: Budget) -> None:
    path = make_gguf(weights="Q4_0", n_layer=8, n_embd=1024, n_ff=4096, n_head_kv=4)
    asked = AskedSettings(max_seq_len=8192, max_num_seqs=2, kv_cache_dtype="f16", mmap=False)
    read = plan_file(path, asked, plenty, model_id="m")
    for name in ("q8_0", "q4_0"):
        small = msgspec.structs.replace(asked, kv_cache_dtype=name)
        budget = limited(plan_file(path, small, plenty, model_id="m").need_bytes + MIB)
        assert budget.bytes < read.need_bytes
        found = plan_file(path, msgspec.structs.replace(asked, mmap=True), budget, model_id="m").suggestions
        first = next(suggestion for suggestion in found if "--no-mmap" in suggestion.flags)
        assert first.flags == f"--kv-cache-dtype {name} --no-mmap"
        again = plan_file(path, with_flags(asked, first.flags)[0], budget, model_id="m")
        assert again.fits and again.need_bytes == first.total_bytes


def test_no_suggestion_where_nothing_fits(make_gguf: MakeGguf) -> None:
    budget = limited(MIB)
    plan = plan_file(make_gguf(), AUTO, budget, model_id="m")
    assert plan.suggestions == []
    assert "No setting of it fits" in refusal(plan, budget).message


def test_verdict_follows_the_rule_of_two_sequences_below_80_percent(make_gguf: MakeGguf, plenty: Budget) -> None:
    path = make_gguf(n_layer=8, n_head_kv=4)
    need = needs(path, plenty, max_num_seqs=2, max_seq_len=8192)
    asked = AskedSettings(max_num_seqs=1, max_seq_len=8192)
    enough = limited(need, memory_bytes=int(need / 0.8) + MIB)
    assert "this memory is enough" in plan_file(path, asked, enough, model_id="m").verdict
    short = limited(need, memory_bytes=int(need / 0.8) - MIB)
    verdict = plan_file(path, asked, short, model_id="m").verdict
    assert "more than 80 %" in verdict
    assert "4 GiB of memory, or a smaller model or context" in verdict


def test_unknown_architecture_is_planned_as_a_named_upper_bound(make_gguf: MakeGguf, plenty: Budget) -> None:
    plan = plan_file(make_gguf(architecture="qwen99"), AUTO, plenty, model_id="m")
    assert not plan.exact
    assert "qwen99" in plan.notes[0]
    known = plan_file(make_gguf("known"), AUTO, plenty, model_id="m")
    assert plan.need_bytes > known.need_bytes


def test_draft_and_projector_are_in_the_plan(make_gguf: MakeGguf, plenty: Budget, tmp_path: Path) -> None:
    projector = tmp_path / "mmproj.gguf"
    projector.write_bytes(b"\0" * MIB)
    asked = AskedSettings(draft_path=make_gguf("draft"), mmproj_path=projector)
    terms = plan_file(make_gguf(), asked, plenty, model_id="m").devices[0].terms
    assert terms["draft"] > 0
    assert terms["projector"] == round(1.4 * MIB)


def test_plan_before_download_is_a_bound_on_the_plan_of_the_file(smollm2_path: Path, plenty: Budget) -> None:
    exact = plan_file(smollm2_path, AUTO, plenty, model_id="m")
    shape = ModelShape(
        architecture="llama", n_layer=30, n_embd=576, n_head=(9,) * 30, n_head_kv=(3,) * 30, head_dim_k=64,
        head_dim_v=64, n_ff=1536, n_vocab=49152, n_ctx_train=8192, bound="not here yet",
    )  # fmt: skip
    early = plan_before_download(shape, 98_362_432, "Q4_1", AUTO, plenty, model_id="m")
    assert early.settings == exact.settings
    assert exact.need_bytes <= early.need_bytes <= 1.1 * exact.need_bytes
    assert not early.exact


def test_devices_sum_and_budget_are_those_of_the_plan(make_gguf: MakeGguf, plenty: Budget) -> None:
    plan = plan_file(make_gguf(), AUTO, plenty, model_id="m")
    for device in plan.devices:
        assert device.total_bytes == sum(device.terms.values())
        assert device.budget_bytes == plenty.bytes
        assert {"weights", "kv_cache", "compute", "output", "overhead"} <= device.terms.keys()


def test_auto_pool_holds_one_whole_sequence_and_a_chat_in_each_other_one(make_gguf: MakeGguf, plenty: Budget) -> None:
    path = make_gguf(n_ctx_train=8192)
    asked = AskedSettings(max_num_seqs=8, max_seq_len=8192, kv_pool_chat_tokens=2048)
    settings = plan_file(path, asked, plenty, model_id="m").settings
    assert settings.kv_unified
    assert settings.kv_pool_tokens == 22784  # 8192 + 7 x 2048 and a batch of 128, padded
    assert settings.n_batch == settings.n_ubatch == 64  # a token for every chat after each 64 of the document
    alone = msgspec.structs.replace(asked, max_num_seqs=1)
    unshared = plan_file(path, alone, plenty, model_id="m").settings
    assert (unshared.kv_unified, unshared.n_batch) == (False, 128)
    short = msgspec.structs.replace(asked, max_seq_len=1024)  # every sequence is a chat: nothing is left to share
    assert not plan_file(path, short, plenty, model_id="m").settings.kv_unified


# more sequences, cards
BIG = {"n_layer": 16, "n_embd": 2048, "n_head": 32, "n_head_kv": 4, "n_ff": 8192}


def grown_plan(path: Path, budget: Budget, **changes: Any) -> Plan:
    return plan_file(path, AUTO, budget, model_id="m", rates=rates_with(**changes))


def test_sequences_grow_where_a_step_is_bound_by_reading(make_gguf: MakeGguf, plenty: Budget) -> None:
    reads_much = {"streamed_s": dict.fromkeys(("Q8_0", "F16"), (100 * WEIGHT_S, 100 * WEIGHT_S))}
    plan = grown_plan(make_gguf(**BIG), plenty, **reads_much)
    assert plan.settings.max_num_seqs == 8
    assert plan.reasons["max_num_seqs"].startswith("8 get ")
    assert "and memory is spare" in plan.reasons["max_num_seqs"]


def test_sequences_do_not_grow_where_computing_binds(make_gguf: MakeGguf, plenty: Budget) -> None:
    plan = grown_plan(make_gguf(**BIG), plenty, streamed_s={"Q8_0": (WEIGHT_S, 2 * WEIGHT_S)})
    assert plan.settings.max_num_seqs == 2
    assert "4 would get 1.0 x the tokens/s of 2" in plan.reasons["max_num_seqs"]


def test_sequences_do_not_grow_into_memory_that_is_not_spare(make_gguf: MakeGguf, plenty: Budget) -> None:
    path = make_gguf(**BIG)
    reads_much = {"streamed_s": dict.fromkeys(("Q8_0", "F16"), (100 * WEIGHT_S, 100 * WEIGHT_S))}
    four = needs(path, plenty, max_num_seqs=4)
    plan = grown_plan(path, limited(2 * four), **reads_much)
    assert plan.settings.max_num_seqs == 4
    plan = grown_plan(path, limited(2 * four - 2), **reads_much)
    assert plan.settings.max_num_seqs == 2
    assert "more than half" in plan.reasons["max_num_seqs"]


def test_sequences_do_not_grow_without_rates_or_where_they_are_asked(make_gguf: MakeGguf, plenty: Budget) -> None:
    path = make_gguf(**BIG)
    plan = plan_file(path, AUTO, plenty, model_id="m")
    assert plan.settings.max_num_seqs == 2
    assert "laya doctor" in plan.reasons["max_num_seqs"]
    asked = AskedSettings(max_num_seqs=3)
    assert plan_file(path, asked, plenty, model_id="m", rates=RATES).settings.max_num_seqs == 3


def on_card(path: Path, card_bytes: int, asked: AskedSettings = AUTO) -> Plan:
    model = Model(id="m", facts=read_facts(path), engine=built_in_engine(), n_cores=4, gpu_free_bytes=(card_bytes,))
    return fit(model, asked, limited(64 * GIB))


def test_layers_leave_the_card_last(make_gguf: MakeGguf) -> None:
    path = make_gguf(**BIG)
    whole = on_card(path, 64 * GIB)
    assert whole.settings.gpu_layers == 17
    assert whole.reasons["gpu_layers"] == "all, and the output matrix"
    gpu = {device.device: device for device in whole.devices}["gpu0"]
    smaller = on_card(path, gpu.total_bytes - 1)
    assert smaller.settings.gpu_layers == 17
    assert smaller.settings.max_num_seqs == 1
    assert "on gpu0" in smaller.reasons["max_num_seqs"]
    least = on_card(path, 1100 * MIB)
    assert least.fits
    assert 0 < least.settings.gpu_layers < 17
    assert (least.settings.max_seq_len, least.settings.kv_cache_dtype) == (4096, "q8_0")
    assert least.reasons["gpu_layers"].startswith("instead of 17: ")
    for device in least.devices:
        assert device.total_bytes <= device.budget_bytes


def test_layers_that_were_asked_stay_on_the_card(make_gguf: MakeGguf) -> None:
    plan = on_card(make_gguf(**BIG), 600 * MIB, AskedSettings(gpu_layers=17))
    assert not plan.fits
    assert plan.settings.gpu_layers == 17
    assert "gpu_layers" not in plan.reasons


def test_limit_of_the_model_itself_bounds_its_plan(make_gguf: MakeGguf, plenty: Budget) -> None:
    path = make_gguf(**BIG)
    limit = needs(path, plenty, max_num_seqs=1, max_seq_len=8192)
    plan = plan_file(path, AskedSettings(memory_limit_bytes=limit), plenty, model_id="m")
    assert plan.fits
    assert plan.settings.max_seq_len == 8192
    assert plan.devices[0].budget_bytes == limit
