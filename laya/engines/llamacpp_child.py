"""Owns: the child program `python -m laya.engines.llamacpp_child`: llama.cpp's server in a process of its own.

It serves with the `xllamacpp` wheel and decides nothing: every value comes from the parent. It imports little, because
its resident size is in the plan.
"""

from __future__ import annotations

import signal
from typing import Any

from laya.engines.child_start import begin, give_up, report
from laya.engines.thread_share import follow

CUDA_DRIVER = "libcuda.so.1"  # builds for CUDA are linked to it and don't bring it: it comes with the driver


def main() -> None:
    """Run until killed; exit code 1 after an error line on the report pipe."""
    document, report_fd = begin()
    try:
        if document["threads_file"] is not None:
            follow(document["threads_file"])
        serve(document["params"], report_fd)
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError, ImportError) as error:
        give_up(report_fd, error)


def serve(values: dict[str, Any], report_fd: int) -> None:
    """Load the model, report where the server listens, and wait for a signal. RuntimeError: it did not load."""
    try:
        import xllamacpp
    except ImportError as error:
        if CUDA_DRIVER not in str(error):
            raise
        raise ImportError(
            f"the engine is a build for NVIDIA's cards, whose driver ({CUDA_DRIVER}) is not here. A container gets it "
            "by `docker run --gpus all`; `laya engines use bundled` takes the build for CPUs"
        ) from None

    params = xllamacpp.CommonParams()
    for name, value in values.items():
        apply(params, name, value, xllamacpp)
    server = xllamacpp.Server(params)
    report(report_fd, {"address": server.listening_address})
    while True:
        signal.pause()


def apply(params: Any, name: str, value: Any, library: Any) -> None:
    """Set the attribute with the dotted name; a word becomes the member of the attribute's enum."""
    *path, leaf = name.split(".")
    target = params
    for part in path:
        target = getattr(target, part)
    kind = type(getattr(target, leaf))
    try:
        if name == "lora_adapters":
            value = [library.CommonAdapterLoraInfo(each, 1.0) for each in value]
        elif name == "speculative.types":
            value = [enum_member(library.common_speculative_type, each) for each in value]
        elif hasattr(kind, "__members__"):
            value = enum_member(kind, value)
        setattr(target, leaf, value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} cannot be {value!r}: {error}") from None


def enum_member(kind: Any, word: str) -> Any:
    """`q8_0` -> GGML_TYPE_Q8_0: the member that is the enum's name and the word."""
    prefix = kind.__name__.upper()
    try:
        return kind.__members__[f"{prefix}_{str(word).upper()}"]
    except KeyError:
        words = ", ".join(member[len(prefix) + 1 :].lower() for member in kind.__members__)
        raise ValueError(f"it is one of {words}") from None


if __name__ == "__main__":
    main()
