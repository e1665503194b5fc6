"""Owns: the child program `python -m laya.engines.llamacpp_child`: llama.cpp's server in a process of its own.

It serves with the `xllamacpp` wheel and decides nothing: every value comes from the parent. It imports little, because
its resident size is in the plan.
"""

from __future__ import annotations

import signal
from typing import Any

from laya.engines.child_start import begin, give_up, report
from laya.engines.thread_share import follow


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
    import xllamacpp

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
