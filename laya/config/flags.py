"""Owns: engine settings as command-line flags, in Laya's, vLLM's and llama.cpp's spellings. Knows no verb.

Verbs declare the flags that are theirs and hand every other word of the command line to `parse_engine_flags`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import yaml

from laya.config.document import KeyPath
from laya.config.load import parse_settings
from laya.config.resolve import SETTING_NAMES
from laya.config.settings import SamplingDefaults
from laya.config.vllm import INSTEAD, VLLM_KEYS, not_vllms
from laya.errors import ConfigError, nearest


class Flag(NamedTuple):
    """The setting a flag stands for; a `constant` is set by the flag alone, else the next word is its value."""

    key: str
    constant: Any = None
    optional_value: bool = False  # the value may be left out, and the constant is meant then


_SWITCHES = frozenset({"enable_streaming", "mmap", "pinned", "preload"})
_VLLM_SWITCHES = frozenset({"enable_expert_parallel", "enforce_eager"})
_LISTS = frozenset({"lora", "gpus", "tensor_split", "aliases"})
_TEXTS = frozenset({"engine_path", "mmproj", "draft", "chat_template", "source", "kv_cache_dtype", "quantization"})

_OWN = {
    f"--{name.replace('_', '-')}": Flag(name, True if name in _SWITCHES else None, name in _SWITCHES)
    for name in SETTING_NAMES
    if name not in ("args", "defaults", "limits")
} | {f"--no-{name.replace('_', '-')}": Flag(name, False) for name in _SWITCHES}
_SAMPLING = {f"--{name.replace('_', '-')}": Flag(f"defaults.{name}") for name in SamplingDefaults.__struct_fields__}
_VLLM = {
    "--max-model-len": Flag("max_seq_len"),
    "--served-model-name": Flag("aliases"),
    "-q": Flag("quantization"),
}
_VLLM_ALONE = {
    f"--{name.replace('_', '-')}": Flag(name, True if name in _VLLM_SWITCHES else None) for name in VLLM_KEYS
}
_VLLM_ALONE |= {"-tp": _VLLM_ALONE["--tensor-parallel-size"], "-pp": _VLLM_ALONE["--pipeline-parallel-size"]}
_LLAMACPP = {
    "-c": Flag("ctx_size"), "--ctx-size": Flag("ctx_size"),
    "-np": Flag("max_num_seqs"), "--parallel": Flag("max_num_seqs"),
    "-ctk": Flag("kv_cache_dtype"), "--cache-type-k": Flag("kv_cache_dtype"),
    "-ctv": Flag("cache_type_v"), "--cache-type-v": Flag("cache_type_v"),
    "-t": Flag("n_threads"), "--threads": Flag("n_threads"),
    "-ngl": Flag("gpu_layers"), "--gpu-layers": Flag("gpu_layers"), "--n-gpu-layers": Flag("gpu_layers"),
    "-ncmoe": Flag("experts_on_cpu"), "--n-cpu-moe": Flag("experts_on_cpu"),
    "-cmoe": Flag("experts_on_cpu", "all"), "--cpu-moe": Flag("experts_on_cpu", "all"),
    "-ts": Flag("tensor_split"),
    "-m": Flag("source"), "--model": Flag("source"),
    "-a": Flag("aliases"), "--alias": Flag("aliases"),
    "-mm": Flag("mmproj"),
    "-md": Flag("draft"), "--model-draft": Flag("draft"),
    "--chat-template-file": Flag("chat_template"),
    "--sleep-idle-seconds": Flag("ttl"),
    "-n": Flag("defaults.max_tokens"), "--predict": Flag("defaults.max_tokens"),
    "--n-predict": Flag("defaults.max_tokens"),
    "--temp": Flag("defaults.temperature"),
}  # fmt: skip
FLAGS: Mapping[str, Flag] = _OWN | _SAMPLING | _VLLM | _LLAMACPP

_SPLIT = "llama.cpp gives each GPU whole layers: write --gpus 0,1 with the numbers of the GPUs"
_KEYS_COMMAND = "keys are kept by hash, under `server.api_keys`: `laya config hash-key` makes one"
REFUSED: Mapping[str, str] = (
    {
        "--gpu-memory-utilization": "here each model takes what its plan says, and all of them stay below "
        "`--memory-budget 80%`, or `memory: {budget: 80%}` in config.yaml",
        "--tensor-parallel-size": _SPLIT,
        "-tp": _SPLIT,
    }
    | dict.fromkeys(("-sm", "--split-mode"), _SPLIT)
    | dict.fromkeys(
        ("-mg", "--main-gpu", "-dev", "--device"), "write --gpus with the number of the GPU, such as --gpus 0"
    )
    | dict.fromkeys(
        ("-b", "--batch-size", "-ub", "--ubatch-size", "--max-num-batched-tokens"),
        "the plan decides it, so that a client that leaves frees its slot at once; leave it out",
    )
    | dict.fromkeys(
        ("-fa", "--flash-attn"), "the plan decides it, because it changes the memory a model takes; leave it out"
    )
    | dict.fromkeys(("--mlock", "-fit", "--fit"), "the plan decides what stays in memory; leave it out")
    | dict.fromkeys(("-cram", "--cache-ram"), "write --prompt-cache with an amount, such as --prompt-cache 256MiB")
    | {
        "--api-key": _KEYS_COMMAND,
        "--api-key-file": _KEYS_COMMAND,
    }
)


# Settings that two articles about local servers found by hand: for any engine, and for vLLM. Those of article A are for
# a checkpoint of 4 bits, by whatever method.
PRESETS: Mapping[str, tuple[str, str]] = {
    "article-a": ("--max-seq-len 4096 --max-num-seqs 8", "--gpu-memory-utilization 0.9"),
    "article-b": ("--max-seq-len 4096 --max-num-seqs 1 --enable-streaming --memory-limit 32GiB", "--quantization awq"),
}


def _with_preset(words: list[str]) -> list[str]:
    """The words of a preset before all others, which win. It is for vLLM unless another engine is said."""
    place = next((place for place, word in enumerate(words) if word.partition("=")[0] == "--preset"), None)
    if place is None:
        return words
    _, separator, name = words[place].partition("=")
    rest = words[:place] + words[place + (1 if separator else 2) :]
    name = name if separator else next(iter(words[place + 1 :]), "")
    there = f"There are {', '.join(PRESETS)}."
    if not name or _is_flag(name):
        raise ConfigError(f"--preset needs a name. {there}", param="--preset")
    if name not in PRESETS:
        close = nearest(name, PRESETS)
        hint = f"Did you mean {close}? {there}" if close else there
        raise ConfigError(f"--preset {name}: there is no such preset. {hint}", param="--preset")
    if any(word.partition("=")[0] == "--preset" for word in rest):
        raise ConfigError(f"--preset {name} and another --preset: leave one out", param="--preset")
    shared, of_vllm = PRESETS[name]
    engine = _engine_of(rest) or "vllm"
    return [*f"--engine {engine} {shared} {of_vllm if engine == 'vllm' else ''}".split(), *rest]


def _engine_of(words: list[str]) -> str | None:
    for place, word in enumerate(words):
        if word.startswith("--engine="):
            return word.partition("=")[2]
        if word == "--engine":
            return next(iter(words[place + 1 :]), None)
    return None


def parse_engine_flags(argv: list[str], beside: Sequence[str] = (), bare: list[str] | None = None) -> dict[str, Any]:
    """Settings, as `with_settings` takes them, from words such as `--max-model-len 4096 -np 2`.

    beside: other flags of the command, which may have been meant by a word that is none.
    bare: gets the first word that is neither a flag nor a value.
    Raises ConfigError naming the flag: unknown (with the nearest), without its value, or with one that is not right.
    """
    written: dict[str, Any] = {}
    spelled: dict[KeyPath, str] = {}
    words = _with_preset(list(argv))
    is_vllm = _engine_of(words) == "vllm"
    while words:
        if bare == [] and not words[0].startswith("-"):
            bare.append(words.pop(0))
            continue
        name, separator, attached = words.pop(0).partition("=")
        flag = _VLLM_ALONE[name] if is_vllm and name in _VLLM_ALONE else _flag(name, beside)
        value = _value(name, flag, attached if separator else None, words)
        _put(written, flag.key, value)
        spelled[tuple(flag.key.split("."))] = name
    _settle_context(written, spelled)
    _settle_value_cache(written)
    settings = parse_settings(written, spelled)
    _check_engine(written, spelled)
    return {name: msgspec.to_builtins(getattr(settings, name)) for name in written}


def _check_engine(written: Mapping[str, Any], spelled: Mapping[KeyPath, str]) -> None:
    """Raise ConfigError for an engine that flags cannot describe, and for flags of another than the one they name."""
    engine = written.get("engine")
    if engine in ("command", "remote"):
        raise ConfigError(
            f"--engine {engine}: a model under `models:` of config.yaml says that, with its "
            f"{'cmd' if engine == 'command' else 'url'}",
            param="--engine",
        )
    strange = not_vllms(written) if engine == "vllm" else None
    if strange is not None:
        words = f"{spelled[strange,]} is llama.cpp's; leave it out with --engine vllm. {INSTEAD[strange]}"
        raise ConfigError(words, param=strange)


def _flag(name: str, beside: Sequence[str]) -> Flag:
    if name in FLAGS:
        return FLAGS[name]
    if name in REFUSED:
        raise ConfigError(f"{name}: {REFUSED[name]}", param=name)
    if not name.startswith("-"):
        raise ConfigError(f"{name}: expected a flag here, such as --max-seq-len 8192", param=name)
    plain = name.replace("_", "-").replace(".", "-")
    known = [flag for flag in (*beside, *FLAGS) if flag.startswith("--")]
    bare = nearest(plain.lstrip("-"), [flag[2:] for flag in known])  # dashes that all flags have say nothing
    close = plain if plain in known else f"--{bare}" if bare else None
    hint = f"Did you mean {close}?" if close else "Any other flag of the engine goes under `args:` in config.yaml."
    raise ConfigError(f"{name} is not a flag here. {hint}", param=name)


def _value(name: str, flag: Flag, attached: str | None, words: list[str]) -> Any:
    if flag.constant is not None and attached is None:
        follows = flag.optional_value and words and words[0].lower() in ("on", "off", "auto", "true", "false")
        return _typed(flag.key, words.pop(0)) if follows else flag.constant
    if attached is None:
        if not words or _is_flag(words[0]):
            raise ConfigError(f"{name} needs a value, such as `{name} {_example(flag.key)}`", param=name)
        attached = words.pop(0)
    if not attached.strip():
        raise ConfigError(f"{name} needs a value, such as `{name} {_example(flag.key)}`", param=name)
    if flag.key not in _LISTS:
        return _typed(flag.key, attached)
    more: list[str] = []
    while flag.key == "aliases" and words and not _is_flag(words[0]):  # vLLM's takes several names
        more.append(words.pop(0))
    values = [part for text in (attached, *more) for part in text.split(",")]
    return [_typed(flag.key, part) for part in values]


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit()


def _example(key: str) -> str:
    return {"max_seq_len": "8192", "ctx_size": "8192", "kv_cache_dtype": "q8_0"}.get(key, "VALUE")


def _typed(key: str, text: str) -> Any:
    """The word as YAML would read it, so that a flag and the same line of config.yaml mean the same."""
    if key in _TEXTS or key in ("aliases", "lora", "cache_type_v", "defaults.stop"):
        return text
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):  # a word that looks like a date, or opens a list
        return text


def _put(written: dict[str, Any], key: str, value: Any) -> None:
    head, _, rest = key.partition(".")
    if rest:
        written.setdefault(head, {})[rest] = value
    elif key in _LISTS:
        written.setdefault(key, []).extend(value)
    else:
        written[key] = value


def _settle_context(written: dict[str, Any], spelled: dict[KeyPath, str]) -> None:
    """llama.cpp's context is the total of all slots: the sequences asked for share it, one when none are."""
    total = written.pop("ctx_size", None)
    if total is None:
        return
    name = spelled.pop(("ctx_size",))
    if "max_seq_len" in written:
        raise ConfigError(f"{name} and {spelled['max_seq_len',]} both set the context: leave one out", param=name)
    slots = written.setdefault("max_num_seqs", 1) if total else 1
    if not isinstance(total, int) or isinstance(total, bool) or not isinstance(slots, int) or slots < 1:
        raise ConfigError(f"{name}: expected a whole number of tokens, the total of all slots, got {total}", param=name)
    written["max_seq_len"] = total // slots if total else "auto"
    spelled["max_seq_len",] = f"{name} {total} for {slots} slots" if slots > 1 else name


def _settle_value_cache(written: dict[str, Any]) -> None:
    values_dtype = written.pop("cache_type_v", None)
    if values_dtype not in (None, written.get("kv_cache_dtype")):
        raise ConfigError(
            f"--cache-type-v {values_dtype}: keys and values have one type here: write --kv-cache-dtype {values_dtype}",
            param="--cache-type-v",
        )
