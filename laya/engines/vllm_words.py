"""Owns: what vLLM says of itself in its log, in Laya's words: why it did not start, why it ended, how far it is.

Its own last line is "Engine core initialization failed. See root cause above", of a traceback over three processes; the
root is what a user can act on. Knows lines of text only. The messages were recorded from vLLM 0.32.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

_PROCESS = re.compile(r"^\((?:APIServer|EngineCore|Worker|VllmWorker)[^)]*\) ")
_LEVEL = re.compile(r"^(?:ERROR|WARNING|INFO) \d\d-\d\d [\d:]+ \[[^\]]*\] ?")
_ERROR = re.compile(r"^(?:[\w.]*(?:Error|Exception|Exit)|Value error)[:,] (.*)")
_EMPTY = re.compile(r"See root cause above|See stack trace for root cause|^Failed core proc|^EngineCore encountered")
_ADDRESS_TAKEN = re.compile(r"address already in use|errno 98\b", re.IGNORECASE)
_GPU_FULL = re.compile(
    r"(?:CUDA|HIP) out of memory|torch\.OutOfMemoryError|No available memory for the cache blocks|"
    r"Free memory on device .* is less than desired"
)

# What it said -> what is to be done. The first that matches wins; a root stands above what follows from it.
_TABLE: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"cpu_gemm_wna16|No WNA16 MoE backend supports"),
     "this build of vLLM has no kernels for 4-bit weights on this CPU (they need AVX-512, or a GPU); take a checkpoint "
     "that is not quantized, or a GGUF file, which llama.cpp runs"),
    (re.compile(r"Total number of attention heads \((\d+)\) must be divisible by tensor parallel size \((\d+)\)"),
     "tensor_parallel_size {1} does not divide the {0} attention heads"),
    (re.compile(r"User-specified max_model_len \((\d+)\) is greater than the derived max_model_len \(\w+=([\d.]+)"),
     "max_seq_len {0} is above the {1} tokens that the model was trained for"),
    (re.compile(r"To serve at least one request.*estimated maximum model length is (\d+)"),
     "its KV cache does not hold one sequence; {0} tokens would fit: lower max_seq_len"),
    (_GPU_FULL, "a GPU has not enough memory for it: lower max_num_seqs or max_seq_len, or free the GPU"),
    (re.compile(r"There is no module or parameter named '([^']+)'"),
     "its checkpoint has a tensor that the model has no place for ({0}): it is damaged, or of another model"),
    (re.compile(r"Following weights were not initialized from checkpoint: (.{1,200})"),
     "its checkpoint lacks tensors ({0}): it is not the whole model"),
    (re.compile(r"Model architectures \[?(.+?)\]? (?:are|is) not supported"),
     "this vLLM does not know models of the architecture {0}: a newer one may"),
    (re.compile(r"Unsupported quantization config: (.*?)(?: \[type=|$)"),
     "this vLLM does not run its quantization ({0})"),
)  # fmt: skip
# A load report of what found no place, or got none: the engine would answer, by weights of chance.
_FAULTS = (
    re.compile(r"Following weights were not initialized from checkpoint: (.{1,200})"),
    re.compile(r"Some weights of .* were not initialized.*?: (.{1,200})"),
    re.compile(r"^\W*(\S+)\W+\b(?:MISSING|UNEXPECTED)\b"),
    re.compile(r"newly initialized: (.{1,200})"),
)
# The stages of a start and the share of its time that is over then, as seen of a small model. Loading the weights,
# which grows with the model, is told in shards between two of them.
_STAGES = (
    (re.compile(r"Resolved architecture"), 20), (re.compile(r"Initializing a V1 LLM engine"), 40),
    (re.compile(r"Starting to load model"), 50), (re.compile(r"Loading weights took"), 80),
    (re.compile(r"KV cache size"), 85), (re.compile(r"Capturing CUDA graphs.*100%|Graph capturing finished"), 95),
    (re.compile(r"Application startup complete"), 98),
)  # fmt: skip
_SHARDS = re.compile(r"checkpoint shards: +(\d+)% Completed")
_SHARDS_FROM, _SHARDS_TO = 50, 80


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """Why an engine failed."""

    words: str
    is_gpu_full: bool = False


def why(lines: Sequence[str]) -> Said | None:
    """The root of a failure, from the lines of one run; None: nothing there is one."""
    plain = [_bare(line) for line in lines]
    for pattern, text in _TABLE:
        for line in plain:
            found = pattern.search(line)
            if found:
                words = text.format(*(group.removesuffix(".0") for group in found.groups()))
                return Said(words=words, is_gpu_full=pattern is _GPU_FULL)
    errors = [found[1] for line in plain if (found := _ERROR.match(line)) and not _EMPTY.search(found[1])]
    return Said(words=errors[0][:500]) if errors else None


def fault_of_load(lines: Sequence[str]) -> str | None:
    """What its load report says is missing, or has no place; None: nothing."""
    for line in map(_bare, lines):
        for pattern in _FAULTS:
            found = pattern.search(line)
            if found:
                return f"its load report says that weights are missing or have no place: {found[1]}"
    return None


def is_port_taken(lines: Sequence[str]) -> bool:
    return any(_ADDRESS_TAKEN.search(line) for line in lines)


def percent_of(lines: Sequence[str]) -> int | None:
    """How far a start has come; None: it has not said anything yet."""
    percent = None
    for line in lines:
        for pattern, share in _STAGES:
            if pattern.search(line):
                percent = max(percent or 0, share)
        if shards := _SHARDS.findall(line):
            percent = max(percent or 0, _SHARDS_FROM + (_SHARDS_TO - _SHARDS_FROM) * int(shards[-1]) // 100)
    return percent


def _bare(line: str) -> str:
    """Without the process and the level before it."""
    return _LEVEL.sub("", _PROCESS.sub("", line)).strip()
