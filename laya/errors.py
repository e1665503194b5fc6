"""Owns: every fault a user can meet, with its OpenAI error code, HTTP status and exit code. Knows no room.

A room raises one of these with the values in the message; the gateway renders `body()` unchanged and the CLI
prints `message` and exits with `exit_code`. The official SDKs retry 408, 409, 429 and every status from 500 up,
so a status here is chosen by whether trying again can help.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

_LONG_WORD = re.compile(r"(\S{300})\S{300,}")  # longer than a model's id or a file's path is
_MESSAGE_MOST = 8000  # characters


def _cut(text: str) -> str:
    """What a client said comes back to it, but not in megabytes."""
    if len(text) < 600:
        return text
    text = _LONG_WORD.sub(r"\1...", text)
    half = _MESSAGE_MOST // 2
    return text if len(text) <= _MESSAGE_MOST else f"{text[:half]}...{text[-half:]}"


class LayaError(Exception):
    """A fault of the user or the environment, never of Laya's own logic."""

    code = "internal_error"
    type = "server_error"
    http_status = 500
    exit_code = 1

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None, **details: Any
    ) -> None:
        self.message = _cut(message)
        super().__init__(self.message)
        self.param = param if param is None else _cut(param)
        self.details = details  # extra members of the error object, e.g. need_bytes
        self.retry_after_s = retry_after_s

    def headers(self) -> dict[str, str]:
        """HTTP headers that go with the error."""
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after_s)))
        elif self.http_status < 500:
            headers["x-should-retry"] = "false"
        return headers

    def body(self) -> dict[str, Any]:
        """OpenAI's error envelope."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error | self.details}


class InvalidRequest(LayaError):
    code, type, http_status, exit_code = "invalid_request", "invalid_request_error", 400, 2


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"

    def __init__(self, max_seq_len: int, prompt_tokens: int, *, param: str = "messages") -> None:
        super().__init__(
            f"This model's maximum context length is {max_seq_len} tokens. However, your messages resulted in "
            f"{prompt_tokens} tokens. Please reduce the length of the messages.",
            param=param,
            max_seq_len=max_seq_len,
            prompt_tokens=prompt_tokens,
        )


class InvalidApiKey(LayaError):
    code, type, http_status = "invalid_api_key", "invalid_request_error", 401


class UnsupportedEncoding(LayaError):
    """A body that is compressed: what it comes to is not known before it is unpacked."""

    code, type, http_status = "unsupported_content_encoding", "invalid_request_error", 415

    def __init__(self, said: str) -> None:
        super().__init__(f"The request's body is said to be encoded ('content-encoding: {said}'); send it as it is.")

    def headers(self) -> dict[str, str]:
        return super().headers() | {"accept-encoding": "identity"}


class Forbidden(LayaError):
    code, type, http_status = "forbidden", "invalid_request_error", 403


class ForbiddenModel(Forbidden):
    """A model that is not on the list of the request's key."""

    code = "forbidden_model"

    def __init__(self, key: str, model: str, models: Sequence[str]) -> None:
        may = ", ".join(models)
        message = f"The key '{key}' may not use the model '{model}'; it may use: {may or 'none of those here'}."
        super().__init__(message, param="model", models=list(models))


class NotFound(LayaError):
    code, type, http_status, exit_code = "not_found", "invalid_request_error", 404, 2


class Conflict(InvalidRequest):
    """What is asked for contradicts what is there, and does so again when it is asked again."""

    code, http_status = "conflict", 409


class PreviousResponseNotFound(NotFound):
    """A conversation that can't be gone on with, since a turn of it is not there."""

    code = "previous_response_not_found"

    def __init__(self, response_id: str, going_on_from: str) -> None:
        """going_on_from: what the request named; the same one, or a later turn of the conversation."""
        where = "" if going_on_from == response_id else f", which '{going_on_from}' goes on from"
        message = f"Previous response with id '{response_id}' not found{where}."
        super().__init__(message, param="previous_response_id")


class ModelNotFound(NotFound):
    code = "model_not_found"

    def __init__(self, name: str, known: Iterable[str]) -> None:
        close = nearest(name, known)
        hint = f" Did you mean '{close}'?" if close else " `laya list` shows what there is."
        if name == "auto":
            hint = " `auto` needs `routing.rules` in config.yaml, which choose a model for it."
        super().__init__(f"The model '{name}' does not exist.{hint}", param="model", nearest=close)


class ModelRemoved(ModelNotFound):
    """A model that a reload took away before its engine was there."""

    def __init__(self, model_id: str) -> None:
        message = f"The model '{model_id}' was taken out of the configuration before it was loaded."
        NotFound.__init__(self, message, param="model")


class ModelNotPulled(ModelNotFound):
    """A model of the catalogue that is not on this machine yet."""

    def __init__(self, name: str, model_id: str) -> None:
        NotFound.__init__(
            self,
            f"The model '{name}' is known but not on this machine: `laya pull {model_id}` fetches it, `laya plan "
            f"{model_id}` says whether it fits.",
            param="model",
            nearest=model_id,
        )


class RequestTimeout(LayaError):
    code, type, http_status = "request_timeout", "invalid_request_error", 408


class PayloadTooLarge(LayaError):
    code, type, http_status = "payload_too_large", "invalid_request_error", 413


class HeadTooLarge(LayaError):
    code, type, http_status = "head_too_large", "invalid_request_error", 431


class InsufficientMemory(LayaError):
    """A model that does not fit. 422, never 5xx: trying again does not make memory."""

    code, type, http_status, exit_code = "insufficient_memory", "invalid_request_error", 422, 3

    def __init__(
        self,
        message: str,
        *,
        need_bytes: int,
        available_bytes: int,
        limit: str,
        suggestions: list[str],
        models: Sequence[str] = (),
    ) -> None:
        super().__init__(
            message,
            param="model",
            need_bytes=need_bytes,
            available_bytes=available_bytes,
            limit=limit,
            suggestions=suggestions,
            models=list(models),
        )


class InsufficientDisk(LayaError):
    """A file that the disk has no room for. Carries need_bytes and available_bytes."""

    code, type, http_status, exit_code = "insufficient_disk", "invalid_request_error", 422, 3


class QueueFull(LayaError):
    code, type, http_status = "queue_full", "rate_limit_error", 429

    def __init__(self, message: str, retry_after_s: float, **details: Any) -> None:
        super().__init__(message, retry_after_s=retry_after_s, **details)


class RateLimitExceeded(QueueFull):
    """More at once or in a minute than a key, or a model, may be used for. Carries the limit's name and the numbers."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, retry_after_s: float, *, limit: str, allowed: int, used: int, asked: int) -> None:
        super().__init__(message, math.ceil(retry_after_s), limit=limit, allowed=allowed, used=used, asked=asked)


class QueueTimeout(QueueFull):
    code, type, http_status = "queue_timeout", "server_error", 503


class ServerBusy(QueueFull):
    """More bytes of request bodies at once than this server holds."""

    code, type, http_status = "server_busy", "server_error", 503


class ModelLoading(QueueFull):
    code, type, http_status = "model_loading", "server_error", 503


class ModelDraining(QueueFull):
    """A model that finishes what it has and takes nothing new."""

    code, type, http_status = "model_draining", "server_error", 503


class MemoryBusy(QueueFull):
    """A model that fits once others are done. Carries need_bytes, available_bytes and each one's held_bytes."""

    code, type, http_status, exit_code = "memory_busy", "server_error", 503, 3


class MemoryPressure(QueueFull):
    """Nothing is loaded while this machine is short of memory."""

    code, type, http_status = "memory_pressure", "server_error", 503


class NotSupported(LayaError):
    code, type, http_status = "not_supported", "invalid_request_error", 501

    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "false"}


class EngineCrashed(LayaError):
    code, type, http_status = "engine_crashed", "server_error", 502


class EngineFailed(LayaError):
    """An engine that could not be started."""

    code, type, http_status = "engine_failed", "server_error", 503


class EngineStuck(EngineFailed):
    """An engine that held requests and gave nothing; a new one takes its place."""

    code = "engine_stuck"


class EngineRefused(EngineFailed):
    """An engine that answers and does not do what Laya, not the client, asks it for: a wrong key, path or name."""

    code, http_status = "engine_refused", 502


class EngineBusy(EngineFailed):
    """A program or another server has no room for a request now."""

    code, type, http_status = "engine_busy", "rate_limit_error", 429


class LoopDetected(LayaError):
    """A request that this server sent out itself has come back to it."""

    code, http_status = "loop_detected", 508


# What helps a program that Laya did not plan.
PROGRAM_ADVICE = "Declare more with memory, or lower what the program takes by its own settings."


class EngineOutOfMemory(EngineFailed):
    """An engine that asked for more than its limit while it was loading. 422: the same again would end the same."""

    code, type, http_status, exit_code = "engine_out_of_memory", "invalid_request_error", 422, 3

    def __init__(
        self,
        model_id: str,
        limit_bytes: int,
        peak_bytes: int,
        suggestions: Sequence[str] = (),
        advice: str = "",
        *,
        on_gpu: bool = False,
    ) -> None:
        """suggestions: flags with which it was planned to fit. advice: the same as sentences. on_gpu: it was a GPU's
        memory that was too small."""
        stopped = (
            f"was stopped at its memory limit of {limit_bytes / 2**20:.1f} MiB ({limit_bytes} bytes): it held "
            f"{peak_bytes} bytes and asked for more. "
        )
        super().__init__(
            f"The engine of '{model_id}' "
            + ("found too little memory on a GPU. " if on_gpu else stopped)
            + (advice or "Lower max_seq_len or max_num_seqs, or take a smaller model."),
            param="model",
            limit_bytes=limit_bytes,
            peak_bytes=peak_bytes,
            suggestions=list(suggestions),
        )

    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "false"}


class RequestCancelled(LayaError):
    """Somebody who may cancel this request has done so. 499, so that no client tries it again."""

    code, type, http_status = "request_cancelled", "invalid_request_error", 499


class ServerStopping(LayaError):
    """This server was asked to end, and the request could not be finished before."""

    code, type, http_status = "server_stopping", "server_error", 503


class BadModelFile(LayaError):
    """A model file that is missing, empty, truncated, corrupt or of another kind; names the file and what is wrong."""

    code, type, http_status, exit_code = "bad_model_file", "invalid_request_error", 422, 2


class ConfigError(LayaError):
    """A key or value of the config that is not right; names the key, the value and the nearest right one."""

    code, type, http_status, exit_code = "bad_config", "invalid_request_error", 400, 2


class ModelMisconfigured(LayaError):
    """A model whose settings name what is not there, a program or a key: for who runs the server to mend, and no fault
    of who asks. Asking again helps nobody."""

    code, type, http_status, exit_code = "model_misconfigured", "server_error", 503, 2

    def __init__(self, model_id: str, fault: ConfigError) -> None:
        super().__init__(f"'{model_id}' cannot be served: {fault.message}", param="model")

    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "false"}


class DownloadError(LayaError):
    """A pull that could not be finished; nothing is left half-written under the model's name."""

    code, type, http_status = "download_failed", "server_error", 502


class StoreError(LayaError):
    """The database cannot be opened, read or written; names its file."""

    code = "store_failed"


class NoServer(LayaError):
    code, exit_code = "no_server", 4


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name a user most likely meant, or None."""
    likely = [each for each in known if len(name) <= 3 * len(each)]  # else too long for the cutoff, and long to compare
    if name not in likely and (same := next((each for each in likely if each.lower() == name.lower()), None)):
        return same
    found = difflib.get_close_matches(name, likely, n=1, cutoff=0.5) if likely else []
    return found[0] if found else None
