"""The args table against the wheel, and every sentence a wrong arg gets."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest

from laya.config import ModelSettings
from laya.engines.arguments import ENUMS, KINDS, REFUSED, check_args
from laya.errors import ConfigError

xllamacpp = pytest.importorskip("xllamacpp")


def checked(args: dict[str, Any], **options: bool) -> dict[str, Any]:
    return check_args(args, where="models.m.args", **({"has_draft": False} | options))


@pytest.mark.parametrize("name", sorted(KINDS))
def test_table_names_exist_in_the_wheel_with_their_kind(name: str) -> None:
    value = reduce(getattr, name.split("."), xllamacpp.CommonParams())
    if name in ENUMS.split():
        assert hasattr(type(value), "__members__")
    else:
        assert isinstance(value, KINDS[name])


def test_table_does_not_allow_what_it_refuses() -> None:
    assert not set(KINDS) & set(REFUSED)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("n_ctx", "max_seq_len"),
        ("ctx-size", "max_seq_len"),
        ("--ctx-size", "max_seq_len"),
        ("-c", "max_seq_len"),
        ("n_parallel", "max_num_seqs"),
        ("parallel", "max_num_seqs"),
        ("cache_type_k", "kv_cache_dtype"),
        ("cache-type-v", "kv_cache_dtype"),
        ("kv_unified", "kv_pool_tokens"),
        ("threads", "n_threads"),
        ("cpuparams.n_threads", "n_threads"),
        ("n_gpu_layers", "gpu_layers"),
        ("tensor_buft_overrides", "experts_on_cpu"),
        ("main_gpu", "gpus"),
        ("load_mode", "mmap"),
        ("embedding", "task"),
        ("lora_adapters", "lora"),
        ("sleep_idle_seconds", "ttl"),
    ],
)
def test_arg_that_fights_the_plan_is_refused_with_the_key_to_use(name: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"models\.m\.args\.{name} fights the plan: use {key}$"):
        checked({name: 1})
    assert key in ModelSettings.__struct_fields__


@pytest.mark.parametrize(
    "name", ["n_batch", "port", "host", "api_keys", "fit", "fit_params", "cache_ram_mib", "n_ctx_checkpoints", "ui"]
)
@pytest.mark.parametrize("native_flags", [False, True])
def test_arg_without_a_key_is_refused_with_a_reason(name: str, native_flags: bool) -> None:
    with pytest.raises(ConfigError, match=rf"args\.{name} fights the plan: \w+"):
        checked({name: 1}, native_flags=native_flags)


def test_nested_arg_is_the_dotted_one() -> None:
    assert checked({"sampling": {"top_k": 5}, "sampling.top_p": 1}) == {"sampling.top_k": 5, "sampling.top_p": 1}
    with pytest.raises(ConfigError, match=r"args\.cpuparams\.n_threads"):
        checked({"cpuparams": {"n_threads": 4}})


def test_mapping_arg_stays_a_mapping() -> None:
    args = {"default_template_kwargs": {"enable_thinking": "false"}}
    assert checked(args) == args


@pytest.mark.parametrize(
    ("name", "close"), [("top_k", "sampling.top_k"), ("n_kepp", "n_keep"), ("sampling.topk", "sampling.top_k")]
)
def test_unknown_arg_names_the_nearest(name: str, close: str) -> None:
    with pytest.raises(ConfigError, match=rf"did you mean {close}\?") as raised:
        checked({name: 1})
    assert raised.value.details["nearest"] == close


def test_key_of_the_model_is_sent_one_level_up() -> None:
    with pytest.raises(ConfigError, match="one level up"):
        checked({"max_seq_len": 1})


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"n_keep": "five"}, "a whole number, not 'five'"),
        ({"n_keep": True}, "a whole number, not True"),
        ({"ctx_shift": 1}, "true or false, not 1"),
        ({"rope_freq_base": "x"}, "a number, not 'x'"),
        ({"speculative": {"types": 1}}, "a list, not 1"),
    ],
)
def test_arg_of_the_wrong_kind_names_the_right_one(args: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        checked(args)


def test_draft_type_needs_a_draft() -> None:
    args = {"speculative.types": ["draft_eagle3"]}
    with pytest.raises(ConfigError, match="use draft"):
        checked(args)
    assert checked(args, has_draft=True) == args


def test_native_flags_pass_unless_they_fight() -> None:
    assert checked({"some-new-flag": 3}, native_flags=True) == {"some-new-flag": 3}
