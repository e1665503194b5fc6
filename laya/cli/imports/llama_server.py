"""Owns: a command line of llama-server as settings of a model that Laya's own llama.cpp runs. Knows no file's form.

Flags are read by the table that `laya serve` reads them by; what it does not have is found by the name that llama.cpp's
parameter has, and what neither has is told.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from laya.cli.imports.draft import Draft, is_secret_name
from laya.cli.imports.gpu_flags import layers_of, placed
from laya.config.document import KeyPath
from laya.config.flags import FLAGS, REFUSED, parse_engine_flags
from laya.engines.arguments import BY_LEAF, KINDS, check_args
from laya.errors import ConfigError

Fill = Callable[[str], str]
_PATHS = {"source": "source", "mmproj": "mmproj", "draft": "draft", "lora": "lora", "chat_template": "chat_template"}
_SPELLED = {  # the flags of llama-server that the table of `laya serve` has by one name only
    "--mmproj": "-mm", "--spec-draft-model": "-md", "--typical": "--typical-p", "-s": "--seed",
}  # fmt: skip
_SWITCHES = {"--embedding": ("task", "embed"), "--embeddings": ("task", "embed"), "--reranking": ("task", "rerank"),
             "--rerank": ("task", "rerank"), "--no-mmap": ("mmap", False)}  # fmt: skip
# What Laya does by itself, so that nothing is lost: its own port and key, one page, the plan's cache.
_AS_HERE = {
    "--port": 1, "--host": 1, "--api-key": 1, "--api-key-file": 1, "--jinja": 0, "--metrics": 0, "--slots": 0,
    "--no-webui": 0,
    "--no-ui": 0, "--mmap": 0, "--cont-batching": 0, "-cb": 0, "--no-context-shift": 0, "--log-disable": 0,
    "--offline": 0, "--props": 0, "--no-slots": 0,
}  # fmt: skip
_ALONE = frozenset({"--mlock", "--flash-attn", "-fa", "--swa-full", "--verbose", "-v", "--no-warmup", "--cpu-moe",
                    "-cmoe", "--kv-unified", "-kvu", "--no-kv-offload", "-nkvo", "--no-jinja", "--special", "-sp",
                    "--context-shift", "--spm-infill", "--no-repack", "--log-timestamps", "--log-prefix",
                    "--ignore-eos", "--verbose-prompt", "--check-tensors", "--no-mmproj"})  # fmt: skip
_ARGS = {  # flag -> llama.cpp's parameter, where the flag's own words are not its name
    "--rope-scaling": "rope_scaling_type", "--pooling": "pooling_type", "--reasoning-budget":
    "sampling.reasoning_budget_tokens", "--chat-template-kwargs": "default_template_kwargs", "--cache-reuse":
    "n_cache_reuse", "--keep": "n_keep", "--draft-max": "speculative.draft.n_max", "--draft": "speculative.draft.n_max",
    "--draft-n": "speculative.draft.n_max", "--draft-min": "speculative.draft.n_min", "--draft-p-min":
    "speculative.draft.p_min", "-sps": "slot_prompt_similarity", "--numa": "numa",
}  # fmt: skip
_LAYERS = frozenset({"-ngl", "--gpu-layers", "--n-gpu-layers"})
_PLACES = {
    "-dev": "--device", "-mg": "--main-gpu", "-sm": "--split-mode", "-ot": "--override-tensor",
} | {name: name for name in ("--device", "--main-gpu", "--split-mode", "--override-tensor")}  # fmt: skip
_HUB = frozenset({"-hf", "-hfr", "--hf-repo"})
_HUB_FILE = frozenset({"-hff", "--hf-file"})


def is_llama_server(program: str) -> bool:
    """Whether a command line's first word is llama.cpp's server, in whatever build."""
    return re.match(r"llama-server([-_.]|$)", Path(program).name) is not None


def model_of(words: list[str], draft: Draft, path: KeyPath, folder: Path, fill: Fill) -> dict[str, Any]:
    """The settings of the model that such a command line (without the program) serves.

    folder: what relative paths start from. fill: a word with its variables filled in. Raises ConfigError where it
    names no model.
    """
    reading = _Reading(draft, path, folder, fill)
    rest = list(words)
    while rest:
        name, attached, value = rest.pop(0).partition("=")
        reading.flag(name, value if attached else None, rest)
    return reading.settled()


class _Reading:
    def __init__(self, draft: Draft, path: KeyPath, folder: Path, fill: Fill) -> None:
        self._draft = draft
        self._path = path
        self._folder = folder
        self._fill = fill
        self._flags: list[str] = []  # those that Laya takes as they are
        self._entry: dict[str, Any] = {}
        self._hub: dict[str, str] = {}
        self._places: dict[str, str] = {}
        self._is_unified = False
        self._cache_type_v: str | None = None

    def flag(self, name: str, attached: str | None, rest: list[str]) -> None:
        if not name.startswith("-"):
            self._skip(name, "expected a flag here")
            return
        name = _SPELLED.get(name, name)
        if name in _AS_HERE:
            if _AS_HERE[name] and attached is None and rest:
                rest.pop(0)
        elif name in _SWITCHES:
            key, value = _SWITCHES[name]
            self._entry[key] = value
        elif name in ("--kv-unified", "-kvu"):
            self._is_unified = True
        else:
            has_value = (
                attached is None and rest and not _is_flag(rest[0]) and (name not in _ALONE or _is_word(rest[0]))
            )
            self._with_value(name, rest.pop(0) if has_value else attached)

    def _with_value(self, name: str, value: str | None) -> None:
        if name in _HUB | _HUB_FILE:
            self._hub["file" if name in _HUB_FILE else "repo"] = value or ""
        elif name in ("-fa", "--flash-attn") and value in (None, "on", "auto", "1", "true"):
            return  # so it is here
        elif name in _PLACES and value is not None:
            self._places[_PLACES[name]] = value
        elif name in _LAYERS and value is not None and layers_of(value) is None:
            return  # as many as fit, so it is here
        elif name in FLAGS and name not in _ARGS:
            self._own(name, value)
        elif name in REFUSED:
            self._skip(name, REFUSED[name])
        else:
            self._argument(name, value)

    def _own(self, name: str, value: str | None) -> None:
        """A flag of `laya serve`, tried alone so that one which Laya refuses costs no other."""
        key, written = FLAGS[name].key, value
        if value is not None and key in _PATHS:
            self._file(name, _PATHS[key], value)
            return
        if key == "cache_type_v" and value is not None:
            self._cache_type_v = value
            return
        try:
            words = [name] if value is None else [name, self._fill(value)]
            parse_engine_flags(words)
        except ConfigError as error:
            self._skip(name if value is None else f"{name} {written}", error.message)
        else:
            self._flags += words

    def _file(self, name: str, key: str, value: str) -> None:
        whole = value if value.startswith(("/", "~", "${env.")) else str(self._folder / value)
        if key == "source":
            self._entry["source"] = whole
        else:
            filled = str(Path(self._fill(whole)).expanduser())
            if "{" not in filled and not Path(filled).is_file():
                self._skip(f"{name} {value}", f"there is no file {filled}; {key} names it")
            else:
                self._entry[key] = [*self._entry.get("lora", []), whole] if key == "lora" else whole

    def _argument(self, name: str, value: str | None) -> None:
        plain = name.lstrip("-").replace("-", "_")
        known = _ARGS.get(name) or (plain if plain in KINDS else BY_LEAF.get(plain))
        shown = name if value is None or is_secret_name(name) or name == "-hft" else f"{name} {value}"
        if known is None and f"--{plain[3:].replace('_', '-')}" in _AS_HERE and plain.startswith("no_"):
            self._skip(shown, "Laya decides it")
            return
        args = {known or plain: _typed(known or plain, value)}
        try:
            check_args(args, where="args", has_draft=True)
        except ConfigError as error:
            hint = "no flag that is known here; your own llama-server, by engine_path, takes its flags under args"
            advised = "fights the plan" in error.message
            self._skip(shown, hint if known is None and not advised else error.message)
        else:
            self._entry.setdefault("args", {}).update(args)

    def settled(self) -> dict[str, Any]:
        try:
            settings = parse_engine_flags(self._flags)
        except ConfigError as error:  # each alone was right: the context is too small for its slots
            self._skip("-c", error.message)
            place = next(n for n, word in enumerate(self._flags) if word in ("-c", "--ctx-size"))
            settings = parse_engine_flags(self._flags[:place] + self._flags[place + 2 :])
        if self._cache_type_v not in (None, settings.get("kv_cache_dtype")):
            self._skip(f"-ctv {self._cache_type_v}", "keys and values have one type here: kv_cache_dtype")
        if self._is_unified and "max_seq_len" in settings:  # one pool that all slots share
            n_slots = settings.get("max_num_seqs", 1)
            pool = settings["max_seq_len"] * n_slots if settings["max_seq_len"] != "auto" else "auto"
            settings |= {"max_seq_len": pool, "kv_pool_tokens": pool}
        made, left = placed(self._places)
        settings |= made
        for name, why in left.items():
            self._skip(f"{name} {self._places[name]}", why)
        if self._hub.get("repo") and "source" not in self._entry:
            repo, _, quant = self._hub["repo"].partition(":")
            part = self._hub.get("file") or quant
            self._entry["source"] = f"hf://{repo}:{part}" if part else f"hf://{repo}"
        if "source" not in self._entry:
            raise ConfigError("it names no model (-m FILE, or -hf REPO)")
        return {"source": self._entry.pop("source")} | settings | self._entry

    def _skip(self, flag: str, why: str) -> None:
        self._draft.skip(self._path, why, key=f"{self._draft_key} {flag}")

    @property
    def _draft_key(self) -> str:
        return ".".join(str(part) for part in self._path)


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not re.match(r"-[\d.]", word)


def _is_word(word: str) -> bool:
    """Whether it can be the value of a flag that may stand alone."""
    return word.lower() in ("on", "off", "auto", "true", "false", "0", "1")


def _typed(parameter: str, value: str | None) -> Any:
    """The word as the parameter's kind has it; what is not of it stays text, and is told as such."""
    kinds = KINDS.get(parameter, ())
    if value is None:
        return True
    if bool in kinds:
        return value.lower() in ("1", "on", "true")
    if dict in kinds:
        with contextlib.suppress(ValueError):
            found = json.loads(value)
            if isinstance(found, dict):  # the engine takes the JSON text of each value
                return {name: json.dumps(each) for name, each in found.items()}
    for kind in (int, float):
        if kind in kinds:
            with contextlib.suppress(ValueError):
                return kind(value)
    return value


def filler(environ: Mapping[str, str]) -> Fill:
    """Fills in `${env.NAME}` of a word. Raises ConfigError for a variable that is not there."""

    def fill(text: str) -> str:
        def value(match: re.Match[str]) -> str:
            if match[1] not in environ:
                raise ConfigError(f"the environment has no {match[1]}")
            return environ[match[1]]

        return re.sub(r"\$\{env\.([A-Za-z_][A-Za-z0-9_]*)\}", value, text)

    return fill
