"""Owns: what Ollama keeps as a configuration of Laya's: Modelfiles, its environment, and the models of its store."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from laya.cli.imports.draft import Draft, literal
from laya.cli.imports.gpu_flags import layers_of
from laya.cli.imports.modelfile import Instruction, is_environment, read_environment, read_modelfile
from laya.config.document import Document, KeyPath
from laya.config.hosts import is_loopback
from laya.config.settings import SamplingDefaults
from laya.errors import ConfigError, LayaError
from laya.models import OllamaEntry, ollama_entries, resolve

MAX_BLOB_BYTES = 64 * 1024  # of parameters
_NAMED_MODELFILE = re.compile(r"(?:modelfile[.-_](?P<after>.+)|(?P<before>.+)[.-_]modelfile)", re.IGNORECASE)
_SETTINGS = {"num_ctx": "max_seq_len", "num_gpu": "gpu_layers", "num_thread": "n_threads", "use_mmap": "mmap"}
_ARGS = {"num_keep": "n_keep"}
_OLD = "Ollama itself knows it no more"
_PARAMETERS = {
    "num_batch": "the plan decides it", "use_mlock": "the plan decides what stays in memory", "low_vram": _OLD,
    "f16_kv": "kv_cache_dtype", "penalize_newline": _OLD, "logits_all": _OLD, "vocab_only": _OLD, "numa": _OLD,
    "tfs_z": _OLD, "mirostat": "args: {sampling.mirostat: 1}", "mirostat_tau": "args: {sampling.mirostat_tau: 5}",
    "mirostat_eta": "args: {sampling.mirostat_eta: 0.1}", "main_gpu": "gpus", "num_gqa": _OLD, "rope_frequency_base":
    "args: {rope_freq_base: N}", "rope_frequency_scale": "args: {rope_freq_scale: N}",
    "draft_num_predict": "args: {speculative.draft.n_max: N}",
}  # fmt: skip
_INSTRUCTIONS = {
    "template": "Go's template syntax; the model's own template is used, and chat_template takes one in Jinja",
    "system": "clients send the system message, such as `laya chat --system TEXT`",
    "message": "clients send the conversation", "license": "it goes with the model, not with a setting",
    "requires": "it is about Ollama", "renderer": "chat_template", "parser": "args: {reasoning_format: auto}",
    "capability": "the model's template says what it can",
}  # fmt: skip
_MEMORY = "memory: {budget: 80%}, by bytes"
_VARIABLES = {
    "OLLAMA_CONTEXT_LENGTH": "max_seq_len", "OLLAMA_NUM_PARALLEL": "max_num_seqs", "OLLAMA_KEEP_ALIVE": "ttl",
    "OLLAMA_KV_CACHE_TYPE": "kv_cache_dtype", "OLLAMA_MAX_QUEUE": "queue_size", "OLLAMA_LOAD_TIMEOUT": "load_timeout_s",
}  # fmt: skip
_OTHERS = {
    "OLLAMA_MAX_LOADED_MODELS": _MEMORY, "OLLAMA_GPU_OVERHEAD": _MEMORY, "OLLAMA_MAX_VRAM": _MEMORY,
    "OLLAMA_FLASH_ATTENTION": "the plan decides it: it is on", "OLLAMA_SCHED_SPREAD": "gpus",
    "OLLAMA_MODELS": "set it for `laya serve`, which reads that store; or import the folder",
    "OLLAMA_DEBUG": "`laya logs`", "OLLAMA_NOHISTORY": "chats are kept by store", "OLLAMA_NOPRUNE": "nothing is pruned",
    "OLLAMA_LLM_LIBRARY": "engine_path", "OLLAMA_MULTIUSER_CACHE": "prompt_cache", "OLLAMA_NEW_ENGINE": "engine",
    "OLLAMA_AUTH": "server.api_keys", "OLLAMA_API_KEY": "server.api_keys", "OLLAMA_INTEL_GPU": "gpus",
    "OLLAMA_REMOTES": "engine: remote", "OLLAMA_VULKAN": "gpus", "OLLAMA_TMPDIR": "nothing is unpacked",
    "OLLAMA_RUNNERS_DIR": "engine_path", "OLLAMA_NEW_ESTIMATES": "the plan", "OLLAMA_HOME": "LAYA_HOME",
    "CUDA_VISIBLE_DEVICES": "gpus", "HIP_VISIBLE_DEVICES": "gpus", "ROCR_VISIBLE_DEVICES": "gpus",
}  # fmt: skip


def read_ollama(paths: Sequence[Path], name: str | None) -> Draft:
    """Modelfiles, files of variables, folders of these, and stores (with `manifests/`), as one configuration.

    name: of the model, where one Modelfile is read. Raises ConfigError for what is none of these.
    """
    draft = Draft(Document({}))
    files = [each for path in paths for each in ([path] if _is_store(path) else _files(path))]
    models = [path for path in files if not _is_store(path) and not is_environment(path)]
    if name is not None and len(models) != 1:
        raise ConfigError(f"--name names the model of one Modelfile, and {len(models)} are here", param="--name")
    for path in files:
        if _is_store(path):
            _read_store(draft, path)
        elif path in models:
            _read_model(draft, path, name or _name_of(path))
        else:
            _read_variables(draft, path)
    return draft


def _is_store(path: Path) -> bool:
    return (path / "manifests").is_dir() and (path / "blobs").is_dir()


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = [each for each in sorted(path.iterdir()) if each.is_file() and _is_named_so(each)]
    found += [each / "Modelfile" for each in sorted(path.iterdir()) if (each / "Modelfile").is_file()]
    if not found:
        raise ConfigError(f"{path}: no Modelfile is in it (Modelfile, Modelfile.NAME, NAME/Modelfile), and no store")
    return found


def _is_named_so(path: Path) -> bool:
    name = path.name.lower()
    return (
        name == "modelfile" or _NAMED_MODELFILE.fullmatch(name) is not None or name.endswith((".env", "override.conf"))
    )


def _name_of(path: Path) -> str:
    match = _NAMED_MODELFILE.fullmatch(path.name)
    if match is not None:
        return match["after"] or match["before"]
    return path.absolute().parent.name if path.name.lower() == "modelfile" else path.stem


def _read_model(draft: Draft, path: Path, name: str) -> None:
    """One Modelfile. Instructions are told by the file, where they stand."""
    instructions = read_modelfile(path)
    if name in draft.models:
        raise ConfigError(f"{path}: a model named {name} was read before; --name names it")
    entry: dict[str, Any] = {}
    lines: dict[KeyPath, int] = {}
    draft.document = Document({}, str(path), path.parent.absolute(), lines)
    for number, each in enumerate(instructions):
        where: KeyPath = (name, each.name.upper(), number)
        lines[where] = each.line
        _instruction(draft, where, each, entry, f"{name}: {each.name.upper()}")
    draft.models[name] = {"source": entry.pop("source")} | entry


def _instruction(draft: Draft, path: KeyPath, each: Instruction, entry: dict[str, Any], key: str) -> None:
    if each.name == "from":
        if "source" in entry:
            draft.skip(path, "a second FROM: the shards of a split model are found by the first", key=key)
        else:
            source = _source(each.argument, draft.document.folder)
            entry["source"] = literal(source, keeps_env=False)
            if source.startswith("ollama/") and not _is_in_store(source):
                draft.note(
                    path, f"Ollama's store here has no {each.argument}: pull it there, or write a file as source"
                )
    elif each.name in ("adapter", "draft"):
        file = _path(each.argument, draft.document.folder)
        value = [str(file)] if each.name == "adapter" else str(file)
        if file.is_dir() or file.suffix == ".safetensors":
            draft.skip(path, "a GGUF file of it is what lora takes", key=key)
        else:
            draft.setting(path, entry, "lora" if each.name == "adapter" else "draft", value, key=key)
    elif each.name == "parameter":
        parameter, _, text = each.argument.partition(" ")
        _parameter(draft, path, entry, parameter.lower(), text.strip(), f"{key} {parameter}")
    else:
        draft.skip(path, _INSTRUCTIONS[each.name], key=key)


def _parameter(draft: Draft, path: KeyPath, entry: dict[str, Any], name: str, value: Any, key: str) -> None:
    value = _typed(value) if isinstance(value, str) and name != "stop" else value
    if name == "stop":
        stops = [value] if isinstance(value, str) else value
        entry.setdefault("defaults", {}).setdefault("stop", []).extend(
            literal(str(stop), keeps_env=False) for stop in stops
        )
    elif name == "num_predict":
        if not isinstance(value, int) or value > 0:  # below: without end, as here
            draft.setting(path, entry, "defaults.max_tokens", value, key=key)
    elif name == "num_gpu":
        layers = layers_of(str(value))
        if layers is not None:  # else as many as fit, so it is here
            draft.setting(path, entry, "gpu_layers", _typed(layers), key=key)
    elif name in _SETTINGS:
        draft.setting(path, entry, _SETTINGS[name], value, key=key)
    elif name in _ARGS:
        entry.setdefault("args", {})[_ARGS[name]] = value
    elif name in SamplingDefaults.__struct_fields__:
        draft.setting(path, entry, f"defaults.{name}", value, key=key)
    else:
        draft.skip(path, _PARAMETERS.get(name, "an unknown parameter of Ollama"), key=key)


def _typed(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _source(argument: str, folder: Path) -> str:
    """A file where it lies, a model of the store by its name there, or one of the hub."""
    if argument.startswith(("hf.co/", "huggingface.co/")):
        return "hf://" + argument.partition("/")[2]
    path = _path(argument, folder)
    if "*" in path.name:
        return str(next(iter(sorted(path.parent.glob(path.name))), path))
    if path.exists() or argument.startswith((".", "/", "~")) or argument.lower().endswith((".gguf", ".bin")):
        return str(path)
    return f"ollama/{argument}"


def _is_in_store(name: str) -> bool:
    try:
        return resolve(name, models_dir=None, allow_path=False).origin == "ollama"
    except LayaError:
        return False


def _path(argument: str, folder: Path) -> Path:
    return (folder / Path(argument).expanduser()).absolute()


def _read_store(draft: Draft, store: Path) -> None:
    draft.document = Document({}, str(store), store.absolute())
    entries = list(ollama_entries(store.absolute()))
    if not entries:
        raise ConfigError(f"{store}: no model is in this store")
    for each in entries:
        weights = each.files("model")
        if not weights:
            draft.skip((each.id,), "no weights of it are here")
            continue
        if each.id in draft.models:
            draft.skip((each.id,), "a model of this name was read before")
            continue
        entry: dict[str, Any] = {"source": str(weights[0])}
        _layers(draft, each, entry)
        draft.models[each.id] = entry
        for alias in each.aliases:
            draft.alias((each.id,), alias, each.id)


def _layers(draft: Draft, each: OllamaEntry, entry: dict[str, Any]) -> None:
    for name, value in _kept_parameters(draft, each).items():
        _parameter(draft, (each.id, name), entry, name, value, f"{each.id}: {name}")
    for projector in each.files("projector")[:1]:
        draft.setting((each.id, "projector"), entry, "mmproj", str(projector))
    if adapters := [str(path) for path in each.files("adapter")]:
        draft.setting((each.id, "adapter"), entry, "lora", adapters)
    for kind in ("template", "system", "messages"):
        if each.files(kind):
            draft.skip(
                (each.id, kind), _INSTRUCTIONS["message" if kind == "messages" else kind], key=f"{each.id}: {kind}"
            )


def _kept_parameters(draft: Draft, each: OllamaEntry) -> dict[str, Any]:
    for path in each.files("params")[:1]:
        try:
            if path.stat().st_size > MAX_BLOB_BYTES:
                raise ValueError("it is too large")
            return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
            draft.skip((each.id, "params"), str(error))
    return {}


def _read_variables(draft: Draft, path: Path) -> None:
    document = read_environment(path)
    draft.document = document
    for name, value in document.data.items():
        where: KeyPath = (name,)
        if name in _VARIABLES:
            _variable(draft, where, _VARIABLES[name], value)
        elif name == "OLLAMA_HOST":
            _host(draft, where, value)
        elif name == "OLLAMA_ORIGINS":
            origins = [
                each for each in value.split(",") if each.startswith(("http://", "https://")) and "*" not in each
            ]
            if origins:
                draft.config.setdefault("server", {})["cors_origins"] = origins
            if len(origins) < len(value.split(",")):
                draft.skip(where, "server.cors_origins has whole origins, such as https://chat.example")
        elif name.startswith("OLLAMA_") or name in _OTHERS:
            draft.skip(where, _OTHERS.get(name, "an unknown variable of Ollama"))


def _variable(draft: Draft, path: KeyPath, setting: str, value: str) -> None:
    typed = _typed(value)
    if setting in ("max_seq_len", "max_num_seqs") and typed == 0:
        return  # Ollama decides then, and so does Laya
    if setting in ("ttl", "load_timeout_s") and str(value).startswith("-"):
        typed = -1
    if setting == "load_timeout_s":
        typed = _seconds(value)
        if typed <= 0:
            draft.skip(path, "a load has an end here: load_timeout_s")
            return
    draft.setting(path, draft.config, setting, typed)


def _seconds(value: str) -> float:
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|[smh]?)", value if not value.startswith("-") else "0")
    return sum(float(number) * {"": 1, "s": 1, "m": 60, "h": 3600, "ms": 0.001}[unit] for number, unit in parts)


def _host(draft: Draft, path: KeyPath, value: str) -> None:
    match = re.fullmatch(r"(?:https?://)?(?P<host>\[[^]]*\]|[^:/]*)(?::(?P<port>\d+))?/?", value)
    if match is None:
        draft.skip(path, "server.host and server.port")
        return
    if match["port"]:
        draft.config.setdefault("server", {})["port"] = int(match["port"])
    if match["host"] and not is_loopback(match["host"]):
        draft.skip(path, "an address that others reach needs a key: `laya serve --lan`, or server.host with api_keys")
