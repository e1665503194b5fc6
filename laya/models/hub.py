"""Owns: models on a Hugging Face hub: `hf://org/repo[@revision][:file or variant]`.

huggingface_hub says what a repository holds, with which token and from which endpoint (HF_ENDPOINT, HF_TOKEN,
proxies); the bytes come by our own resumable download, because the library starts a broken file over. The checksum
is the hub's own where the catalogue has none.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, get_token, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)

from laya.errors import DownloadError, nearest
from laya.models.download import fetch_file, remaining_bytes
from laya.models.files import model_stem, shard_names, shard_number
from laya.models.sources import FetchedFile, Probe, Progress, RemoteFile, safe_file_name

PREFERRED_VARIANT = "q4_k_m"
# what the library raises when it cannot ask: its own errors and the base class of the HTTP library it is built on
_HUB_ERRORS: tuple[type[Exception], ...] = (
    HFValidationError,
    OSError,
    *(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)),
)
_SOURCE = re.compile(r"hf://(?P<repo>[^/:@\s]+/[^/:@\s]+)(?:@(?P<revision>[^:\s]+))?(?::(?P<wanted>\S+))?")


class HubSource:
    """One model of a hub repository: a GGUF file, or the files of a split one."""

    keeps_partial = True

    def __init__(self, text: str) -> None:
        match = _SOURCE.fullmatch(text)
        if match is None:
            raise DownloadError(f"'{text}' is not hf://org/repo[@revision][:file].")
        self.repo: str = match["repo"]
        self.revision: str | None = match["revision"]
        self.wanted: str | None = match["wanted"]
        self.endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
        self._paths: dict[str, str] = {}  # file name -> path in the repository
        self._commit: str | None = None

    def probe(self) -> Probe:
        siblings = self.files()
        chosen = PurePosixPath(choose_file(self.repo, list(siblings), self.wanted))
        self._paths = {name: str(chosen.with_name(name)) for name in shard_names(chosen.name)}
        missing = [path for path in self._paths.values() if path not in siblings]
        if missing:
            raise DownloadError(f"hf://{self.repo}: the split model {chosen} lacks {', '.join(missing)}.")
        files = tuple(
            RemoteFile(name=safe_file_name(name), file_bytes=siblings[path][0], sha256=siblings[path][1])
            for name, path in self._paths.items()
        )
        return Probe(files=files, suggested_id=model_stem(chosen.name))

    def disk_need_bytes(self, probe: Probe, folder: Path) -> int | None:
        return remaining_bytes(probe, folder)

    def fetch(self, probe: Probe, folder: Path, progress: Progress) -> list[FetchedFile]:
        fetched = []
        before = 0
        for file in probe.files:
            offset = before

            def of_all(done: int, total: int | None, offset: int = offset) -> None:
                progress(offset + done, probe.file_bytes if probe.file_bytes is not None else total)

            fetched.append(self._fetch_one(file, folder, of_all))
            before += file.file_bytes or 0
        return fetched

    def _fetch_one(self, file: RemoteFile, folder: Path, progress: Progress) -> FetchedFile:
        url = self.url_of(self._paths[file.name])
        try:
            return fetch_file(url, folder / file.name, progress=progress, headers=self.headers())
        except DownloadError as error:
            if error.details.get("upstream_status") in (401, 403):
                raise self.gated() from None
            raise

    def url_of(self, path: str) -> str:
        """Where a file of the repository is, at the commit that `files` saw."""
        return hf_hub_url(self.repo, path, revision=self._commit or self.revision, endpoint=self.endpoint)

    def headers(self) -> dict[str, str]:
        """What opens the hub to this user."""
        token = get_token()
        return {"authorization": f"Bearer {token}"} if token else {}

    def files(self) -> dict[str, tuple[int | None, str | None]]:
        """Path -> (bytes, sha256) of every file in the repository. Raises: DownloadError with what to do."""
        try:
            api = HfApi(endpoint=self.endpoint)
            info = api.model_info(self.repo, revision=self.revision, files_metadata=True)
        except GatedRepoError:
            raise self.gated() from None
        except RevisionNotFoundError:
            raise DownloadError(f"hf://{self.repo}: there is no revision '{self.revision}'.") from None
        except OfflineModeIsEnabled:
            raise DownloadError(f"hf://{self.repo}: HF_HUB_OFFLINE is set, so the hub is not asked.") from None
        except _HUB_ERRORS as error:
            if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 404):
                raise DownloadError(
                    f"hf://{self.repo}: there is no such repository, or it is private and HF_TOKEN does not open it."
                ) from None
            first_line = (str(error) or type(error).__name__).partition("\n")[0]
            raise DownloadError(f"hf://{self.repo}: the hub could not be asked: {first_line}") from None
        self._commit = info.sha
        return {file.rfilename: (file.size, file.lfs.sha256 if file.lfs else None) for file in info.siblings or []}

    def gated(self) -> DownloadError:
        """What to say where the hub lists a repository but does not give its files."""
        return DownloadError(
            f"hf://{self.repo} asks for its licence to be accepted first: open "
            f"{self.endpoint or 'https://huggingface.co'}/{self.repo}, accept it, and set HF_TOKEN to your token."
        )


def choose_file(repo: str, paths: list[str], wanted: str | None) -> str:
    """The GGUF to fetch, first shard of a split one: the one asked for, the only one, or the one at Q4_K_M.

    Raises: DownloadError naming what there is.
    """
    ggufs = [path for path in paths if path.lower().endswith(".gguf") and shard_number(path) == 1]
    models = [path for path in ggufs if not PurePosixPath(path).name.lower().startswith("mmproj")]
    if not models:
        hint = "" if repo.lower().endswith("-gguf") else f" Its GGUF files are often in {repo}-GGUF."
        raise DownloadError(f"hf://{repo} holds no GGUF model.{hint}")
    if wanted is None:
        fitting = models if len(models) == 1 else _of_variant(models, PREFERRED_VARIANT)
    else:
        exact = [path for path in ggufs if wanted in (path, PurePosixPath(path).name)]
        fitting = exact or _of_variant(models, wanted)
    if len(fitting) == 1:
        return fitting[0]
    listing = ", ".join(sorted(models))
    if wanted is None or fitting:
        raise DownloadError(f"hf://{repo} holds several models; name one, as hf://{repo}:FILE: {listing}")
    close = nearest(wanted, models)
    hint = f" Did you mean {close}?" if close else ""
    raise DownloadError(f"hf://{repo} has no file '{wanted}'.{hint} It has: {listing}")


def _of_variant(paths: list[str], variant: str) -> list[str]:
    """Paths that carry a variant such as `q4_k_m` as a whole word of their name."""
    word = re.compile(rf"(?:^|[-._/]){re.escape(variant)}(?=$|[-._/])", re.IGNORECASE)
    return [path for path in paths if word.search(model_stem(path))]
