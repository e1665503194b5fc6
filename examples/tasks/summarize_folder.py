"""Summarize every text file of a folder with a model that Laya serves, one file after the other.

    laya serve smollm2 &
    python examples/tasks/summarize_folder.py ~/notes --model smollm2

A file longer than the model's window is read in parts, and the parts' summaries are summarized again. At the end it
says what the whole task took, which is more than tokens per second tell: files, tokens read and written, seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

SUFFIXES = {".txt", ".md", ".rst", ".log"}
BYTES_PER_TOKEN = 3  # fewer than in most texts, so that a part never overflows the window
PROMPT_TOKENS = 120  # the question around the text, and the model's template


class Model:
    """The server and one of its models."""

    def __init__(self, url: str, name: str, answer_tokens: int) -> None:
        key = os.environ.get("LAYA_API_KEY")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=600, trust_env=False)
        self._name = name
        self._answer_tokens = answer_tokens
        window = self._asked("GET", f"/v1/models/{name}")["context_length"]
        if window is None:
            sys.exit(f"{name} does not fit this machine's memory: `laya plan {name}` says what would")
        self.part_bytes = (window - answer_tokens - PROMPT_TOKENS) * BYTES_PER_TOKEN
        if self.part_bytes <= 0:
            sys.exit(f"a window of {window} tokens has no room for {answer_tokens} tokens of answer and a text")
        self.tokens_read = self.tokens_written = 0

    def summary(self, text: str) -> str:
        """The model's words for a text that fits its window."""
        question = f"Summarize the following text in two sentences.\n\n{text}\n\nSummary:"
        body = {
            "model": self._name,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": self._answer_tokens,
            "temperature": 0,
        }
        answer = self._asked("POST", "/v1/chat/completions", body)
        self.tokens_read += answer["usage"]["prompt_tokens"]
        self.tokens_written += answer["usage"]["completion_tokens"]
        content: str = answer["choices"][0]["message"]["content"]
        return " ".join(content.split())

    def _asked(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, json=body)
            answer: dict[str, Any] = response.json()
        except (httpx.HTTPError, ValueError) as error:
            sys.exit(f"no answer from {self._http.base_url}: {error}")
        if response.status_code != 200:
            sys.exit(f"{path}: {answer['error']['message']}")
        return answer


def parts_of(text: str, part_bytes: int) -> Iterator[str]:
    """Pieces of at most `part_bytes`, cut between words where there are any."""
    data = text.encode()
    while len(data) > part_bytes:
        cut = max(data.rfind(b" ", 0, part_bytes), data.rfind(b"\n", 0, part_bytes))
        cut = cut if cut > 0 else part_bytes
        yield data[:cut].decode(errors="ignore")
        data = data[cut:]
    yield data.decode(errors="ignore")


def summarized(text: str, model: Model) -> str:
    """One summary of a text of any length."""
    while True:
        summaries = [model.summary(part) for part in parts_of(text, model.part_bytes)]
        if len(summaries) == 1:
            return summaries[0]
        shorter = "\n".join(summaries)
        if len(shorter) >= len(text):  # a model that only repeats would never come to an end
            return shorter
        text = shorter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--url", default=os.environ.get("LAYA_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--answer-tokens", type=int, default=96, help="most tokens of one summary (%(default)s)")
    args = parser.parse_args()
    files = sorted(path for path in args.folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    if not files:
        sys.exit(f"{args.folder}: no files that end in {', '.join(sorted(SUFFIXES))}")
    model = Model(args.url, args.model, args.answer_tokens)
    start_s = time.monotonic()
    for path in files:
        file_start_s = time.monotonic()
        summary = summarized(path.read_text(errors="replace"), model)
        print(f"{path.relative_to(args.folder)}  ({time.monotonic() - file_start_s:.1f} s)\n    {summary}", flush=True)
    took_s = time.monotonic() - start_s
    print(
        f"\n{len(files)} files in {took_s:.1f} s: {model.tokens_read} tokens read, {model.tokens_written} written, "
        f"{took_s / len(files):.1f} s a file"
    )


if __name__ == "__main__":
    main()
