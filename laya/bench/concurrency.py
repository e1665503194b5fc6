"""Owns: `laya bench concurrency`: what an engine gives to 1 ... 32 sessions, through Laya and asked directly.

Layer: socket to socket, a real engine. Load: so many chats at once, each a prompt of its own that no cache holds, all
of the same length, each with as many tokens of answer. Tokens per second are all tokens over the time from the first
request to the end of the last answer. The two ways take turns on the same engine; a ratio is the median over pairs,
with its quartiles and the interval in which that median lies with 95 % confidence. JSON comes last.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from laya.bench.both_ways import WAYS, BothWays, Paired, Turn, both_ways, mean_ms, order, paired
from laya.bench.hardware import hardware
from laya.bench.help import description
from laya.bench.kv_use import bars, watched

SESSIONS = (1, 2, 4, 8, 16, 32)
LAYER = "socket to socket: HTTP, SSE, a real engine in a process of its own"
Figure = Callable[[Turn], float]
_FIGURES: dict[str, tuple[Figure, bool]] = {  # name -> how it is taken, whether Laya's is told as a ratio
    "tokens_per_s": (lambda turn: turn.tokens_per_s, True),
    "first_token_ms": (lambda turn: 1000 * statistics.median(each.first_s for each in turn.answers), False),
    "inter_token_ms": (lambda turn: 1000 * statistics.median(each.inter_token_s for each in turn.answers), False),
}


def told(figure: Paired, *, is_ratio: bool) -> dict[str, Any]:
    low, high = figure.quartiles
    name = "ratio" if is_ratio else "added"
    return {
        "bare": round(figure.bare, 3),
        "laya": round(figure.laya, 3),
        name: round(figure.median, 4),
        f"{name}_quartiles": [round(low, 4), round(high, 4)],
        f"{name}_interval": [round(value, 4) for value in figure.interval],
    }


def verdict(interval: Sequence[float], at_least: float) -> str:
    """What an interval says of a ratio that is to be reached: "holds", "fails", or "open" where it lies around it."""
    low, high = interval
    return "holds" if low >= at_least else "fails" if high < at_least else "open"


async def measure(ways: BothWays, n_sessions: int, n_pairs: int, n_words: int, max_tokens: int) -> dict[str, Any]:
    """One row: so many sessions, both ways in turn, after a round that is not counted; then the cache, watched."""

    def chats() -> list[dict[str, Any]]:
        return [ways.chat(n_words, max_tokens) for _ in range(n_sessions)]

    turns: dict[str, list[Turn]] = {"bare": [], "laya": []}
    before = await ways.metrics("laya")
    for pair in range(-1, n_pairs):
        for way in order(pair):
            turn = await ways.turn(way, chats())
            if pair >= 0:
                turns[way].append(turn)
    added_ms = mean_ms(before, await ways.metrics("laya"), "laya_gateway_added_seconds")
    row: dict[str, Any] = {"sessions": n_sessions, "pairs": n_pairs, "laya_before_engine_ms": added_ms}
    for name, (figure, is_ratio) in _FIGURES.items():
        values = {way: [figure(turn) for turn in found] for way, found in turns.items()}
        row[name] = told(paired(values, is_ratio=is_ratio), is_ratio=is_ratio)
    answers = [answer for found in turns.values() for turn in found for answer in turn.answers]
    row["prompt_tokens"] = statistics.median(answer.prompt_tokens for answer in answers)
    row["answer_tokens"] = statistics.median(answer.n_tokens for answer in answers)
    row["kv_use"] = await watched(ways, chats())
    return row


async def run(options: argparse.Namespace, serve: Sequence[str], model: str) -> dict[str, Any]:
    """All rows of one model."""
    async with both_ways(model, serve, ignores_eos=not options.ends_itself, nice=options.nice) as ways:
        rows = [
            await measure(ways, n, options.pairs, options.prompt_words, options.max_tokens) for n in options.sessions
        ]
        one = next((row["tokens_per_s"] for row in rows if row["sessions"] == 1), None)
        for row in rows:
            speed = row["tokens_per_s"]
            row["over_one_session"] = {way: round(speed[way] / one[way], 2) for way in WAYS} if one else {}
        return {
            "model": model,
            "engine": ways.engine,
            "settings": ways.settings,
            "proof": ["x-laya-engine", "laya_requests_total", *([ways.engine_counter] if ways.engine_counter else [])],
            "rows": rows,
        }


def serve_words(options: argparse.Namespace, flags: Sequence[str], n_seqs: int) -> list[str]:
    """What the Laya of the bench is started with. One thread is left to whoever asks, where there are several."""
    words = [*flags]
    if not {"--max-num-seqs", "-np", "--parallel"} & set(flags):
        words += ["--max-num-seqs", str(n_seqs)]
    for name in ("config", "url"):
        if (value := getattr(options, name)) is not None:
            words += [f"--{name}", str(value)]
    return words


def common(parser: argparse.ArgumentParser) -> None:
    """Options of every bench that asks an engine both ways."""
    parser.add_argument("--model", action="append", help="a name in config.yaml or a model that is here; repeatable")
    parser.add_argument("--config", help="config.yaml with the models, of any kind of engine")
    parser.add_argument("--url", help="the model is that of another server, at this address (https://.../v1)")
    parser.add_argument("--ends-itself", action="store_true", help="do not ask for ignore_eos: the server refuses it")
    parser.add_argument("--nice", type=int, help="priority of Laya and its engine meanwhile; below 0 needs root")
    parser.add_argument("--json", action="store_true", help="only the JSON line on stdout, the rest on stderr")


def count(text: str) -> int:
    """A number of an option that counts something there has to be."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1, got {text!r}")
    return int(text)


def counts(text: str) -> list[int]:
    return [count(word) for word in text.split(",")]


def main(argv: list[str] | None = None) -> int:
    """`laya bench concurrency`: 1 where an interval lies below `--at-least` of the bare engine's tokens/s, else 0."""
    parser = argparse.ArgumentParser(
        prog="laya bench concurrency",
        description=description(__doc__.partition("\n")[0]),
        epilog="Other options are settings of engines, as `laya serve` takes them.",
    )
    common(parser)
    parser.add_argument("--sessions", type=counts, default=list(SESSIONS), help="such as 1,4,8")
    parser.add_argument("--pairs", type=count, default=5, help="turns of each way; the more, the narrower the interval")
    parser.add_argument("--prompt-words", type=count, default=16)
    parser.add_argument("--max-tokens", type=count, default=48)
    parser.add_argument(
        "--at-least", type=float, default=0.0, help="ratio that no row may lie below, with 95 %% confidence"
    )
    options, flags = parser.parse_known_args(argv)
    console = Console(stderr=options.json, highlight=False, width=140)
    words = serve_words(options, flags, max(options.sessions))
    engines = [asyncio.run(run(options, words, model)) for model in options.model or ["smollm2"]]
    for engine in engines:
        for row in engine["rows"]:
            row["verdict"] = verdict(row["tokens_per_s"]["ratio_interval"], options.at_least)
        console.print(_table(engine))
    load = {"prompt_words": options.prompt_words, "max_tokens": options.max_tokens, "serve": words}
    report = {"bench": "concurrency", "layer": LAYER, "load": load, "engines": engines, "hardware": hardware()}
    print(msgspec.json.encode(report).decode())
    intervals = [row["tokens_per_s"]["ratio_interval"] for engine in engines for row in engine["rows"]]
    return 1 if any(verdict(each, options.at_least) == "fails" for each in intervals) else 0


def _table(engine: dict[str, Any]) -> Table:
    table = Table(title=f"{engine['model']} ({engine['engine']}), through Laya", box=None, header_style="dim")
    for column in ("sessions", "tok/s", "of bare", "95 %", "", "x one", "first token", "added", "95 %"):
        table.add_column(column, justify="right")
    for column in ("a token", "KV cache held over time"):
        table.add_column(column, justify="right" if column == "a token" else "left")
    for row in engine["rows"]:
        speed, first, inter = (row[name] for name in _FIGURES)
        table.add_row(
            str(row["sessions"]),
            f"{speed['laya']:.1f}",
            f"{speed['ratio']:.3f}",
            "-".join(f"{value:.3f}" for value in speed["ratio_interval"]),
            row["verdict"],
            f"{row['over_one_session'].get('laya', '')}",
            f"{first['laya']:.1f} ms",
            f"{first['added']:+.2f} ms",
            " ".join(f"{value:+.1f}" for value in first["added_interval"]),
            f"{inter['laya']:.2f} ms",
            bars(row["kv_use"]),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
