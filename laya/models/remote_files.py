"""Owns: which files of a model on a hub or server say what it needs, and opening them for reading by ranges.

huggingface_hub lists a repository and knows the token, the endpoint and the addresses; the bytes come by our own
ranges, because the library's reader takes whole files from a server without ranges. Loads two large libraries, so
remote.py imports it when it is used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

import httpx

from laya.errors import DownloadError
from laya.models.files import model_stem, shard_names
from laya.models.hub import HubSource, choose_file
from laya.models.ranges import ByteAllowance, RangeFile
from laya.models.remote import RemoteModel

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
MAX_CONFIG_BYTES = 4 << 20  # the largest known ones have a fortieth
MAX_INDEX_BYTES = 128 << 20  # the largest known ones, of a million tensors, are some 100 MB
MAX_FETCHED_BYTES = 384 << 20  # of one model, all its headers together
SAFETENSORS = "safetensors"  # hf://org/repo:safetensors is the repository's own weights, where it has GGUF files too
_HUB_PAGE = re.compile(r"/(?P<repo>[^/]+/[^/]+)(?:/(?:tree|blob|resolve)/(?P<revision>[^/]+)(?:/(?P<file>.+))?)?/?")
_NO_HUB_PAGES = frozenset({"api", "datasets", "docs", "spaces"})


def remote_model(text: str, client: httpx.Client) -> RemoteModel:
    """What may be read of the model that a text names, as long as the client is open. Raises: DownloadError."""
    allowance = ByteAllowance(MAX_FETCHED_BYTES)
    try:
        page = _hub_source(text)
    except ValueError as error:
        raise DownloadError(f"{text} is no address: {error}.") from None
    return _of_hub(page, client, allowance) if page is not None else _of_url(text, client, allowance)


def _hub_source(text: str) -> str | None:
    """`hf://...` of a text that names a hub's repository, as itself or as the address of its page."""
    if text.partition("://")[0].lower() == "hf":
        return text
    parts = urlsplit(text)
    hosts = {"huggingface.co", "hf.co", urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc}
    match = _HUB_PAGE.fullmatch(unquote(parts.path))
    if parts.netloc not in hosts or match is None:
        return None
    if match["repo"].partition("/")[0] in _NO_HUB_PAGES or match["repo"].lower().endswith((".gguf", ".json")):
        return None
    revision = f"@{match['revision']}" if match["revision"] not in (None, "main") else ""
    file = match["file"]
    wanted = f":{file}" if file and file.lower().endswith(".gguf") else f":{SAFETENSORS}" if file else ""
    return f"hf://{match['repo']}{revision}{wanted}"


def _of_hub(text: str, client: httpx.Client, allowance: ByteAllowance) -> RemoteModel:
    source = HubSource(text)
    paths = list(source.files())

    def opened(path: str) -> RangeFile:
        return RangeFile(
            source.url_of(path),
            client=client,
            allowance=allowance,
            name=f"{source.repo}/{path}",
            headers=source.headers(),
            denied=source.gated(),
        )

    has_gguf = any(path.lower().endswith(".gguf") for path in paths)
    if source.wanted == SAFETENSORS or (source.wanted is None and not has_gguf and CONFIG in paths):
        return _hf_model(text, source.repo, paths, opened)
    chosen = PurePosixPath(choose_file(source.repo, paths, source.wanted))
    shards = [str(chosen.with_name(name)) for name in shard_names(chosen.name)]
    missing = [path for path in shards if path not in paths]
    if missing:
        raise DownloadError(f"{text}: the split model {chosen} lacks {', '.join(missing)}.")
    files = {PurePosixPath(path).name: opened(path) for path in shards}
    return RemoteModel(name=model_stem(chosen.name).lower(), source=text, format="gguf", files=files)


def _hf_model(text: str, repo: str, paths: list[str], opened: Callable[[str], RangeFile]) -> RemoteModel:
    """A repository of safetensors: those at its top; what lies in folders is another form of the same weights."""
    weights = [path for path in paths if path.endswith(".safetensors") and "/" not in path]
    if CONFIG not in paths:
        raise DownloadError(f"{text}: it has no config.json, so nothing says what kind of model it is.")
    if not weights:
        kinds = sorted(
            {PurePosixPath(path).suffix for path in paths if path.endswith((".bin", ".pt", ".pth", ".ckpt"))}
        )
        found = (
            f" Its weights are {', '.join(kinds)} files, which only a program of their own can read." if kinds else ""
        )
        raise DownloadError(f"{text}: it has no .safetensors files.{found}")
    return RemoteModel(
        name=repo.rpartition("/")[2].lower(),
        source=text,
        format="hf",
        files={path: opened(path) for path in weights},
        config=_whole(opened(CONFIG), MAX_CONFIG_BYTES),
        index=_whole(opened(INDEX), MAX_INDEX_BYTES) if INDEX in paths else None,
    )


def _of_url(url: str, client: httpx.Client, allowance: ByteAllowance) -> RemoteModel:
    parts = urlsplit(url)
    folder, _, encoded = parts.path.rpartition("/")
    name = unquote(encoded)

    def opened(file: str) -> RangeFile:
        return RangeFile(parts._replace(path=f"{folder}/{file}").geturl(), client=client, allowance=allowance)

    if name.lower().endswith(".gguf"):
        files = {name: opened(encoded)} if shard_names(name) == [name] else {n: opened(n) for n in shard_names(name)}
        return RemoteModel(name=model_stem(name).lower(), source=url, format="gguf", files=files)
    if name.lower().endswith(".json"):
        title = unquote(folder.rpartition("/")[2]) or parts.netloc
        config = _whole(opened(encoded), MAX_CONFIG_BYTES)
        return RemoteModel(name=title.lower(), source=url, format="hf", files={}, config=config)
    raise DownloadError(
        f"{url}: a plan is made from the address of a .gguf file or a config.json, or from hf://org/repo[:file]."
    )


def _whole(file: RangeFile, most_bytes: int) -> bytes:
    if file.file_bytes > most_bytes:
        raise DownloadError(f"{file.url}: it has {file.file_bytes} bytes; at most {most_bytes >> 20} MiB can be right.")
    return file.read(0, file.file_bytes)
