"""Owns: `laya bench latency`: where the time of one session goes, through Laya and asked directly, step by step.

Layer: socket to socket, a real engine, one chat at a time. The first token is timed twice: of a prompt that no cache
holds, and of one that the engine still has, where it computes one token and what Laya adds is seen best. The two ways
take turns on the same engine; what Laya adds is the median over pairs. The last line is JSON. How each step is measured
is in the report, in `steps`; a step that an engine says nothing of is null, and never derived from another engine's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from laya.bench.both_ways import BothWays, Turn, both_ways, mean_ms, order, paired
from laya.bench.concurrency import LAYER, common, count, serve_words, told
from laya.bench.hardware import hardware
from laya.bench.help import description
from laya.bench.prefix import WORDS
from laya.bench.sampling import sample_s
from laya.bench.token_streams import ask
from laya.errors import EngineFailed

TOKENIZED = 20  # times
VLLM_TIMES = {"prefill_s": "vllm:request_prefill_time_seconds", "decode_s": "vllm:request_decode_time_seconds"}


Chat = Callable[[], dict[str, Any]]  # gives the next one


class Step(NamedTuple):
    """One part of the way. per: `request` or `token`."""

    step: str
    per: str
    ms: float | None
    how: str


async def times(ways: BothWays, n_pairs: int, chat: Chat, *, warm_up: int = 0) -> dict[str, list[Turn]]:
    """One chat at a time, both ways in turn."""
    turns: dict[str, list[Turn]] = {"bare": [], "laya": []}
    for pair in range(-warm_up, n_pairs):
        for way in order(pair):
            turn = await ways.turn(way, [chat()])
            if pair >= 0:
                turns[way].append(turn)
    return turns


def figures(turns: dict[str, list[Turn]]) -> dict[str, Any]:
    """First token and time between tokens, both ways and what Laya adds; in milliseconds."""
    first = {way: [1000 * turn.answers[0].first_s for turn in found] for way, found in turns.items()}
    inter = {way: [1000 * turn.answers[0].inter_token_s for turn in found] for way, found in turns.items()}
    return {
        "prompt_tokens": statistics.median(turn.answers[0].prompt_tokens for turn in turns["laya"]),
        "first_token_ms": told(paired(first, is_ratio=False), is_ratio=False),
        "inter_token_ms": told(paired(inter, is_ratio=False), is_ratio=False),
    }


async def encode_ms(ways: BothWays, text: str) -> float | None:
    """The engine's tokenizer on this text, less what the same request takes for one letter."""
    bare, medians = ways.sides["bare"], []
    for content in (text, "a"):
        spent = []
        for _ in range(TOKENIZED):
            body = {"model": bare.model, "content": content, "prompt": content}  # llama.cpp's name for it, and vLLM's
            status, _, seconds = await ask(bare, "/tokenize", body)
            if status != 200:
                return None
            spent.append(seconds)
        medians.append(statistics.median(spent))
    return max(0.0, 1000 * (medians[0] - medians[1]))


async def n_vocabulary(ways: BothWays) -> int | None:
    bare = ways.sides["bare"]
    status, body, _ = await ask(bare, f"{bare.base_path}/models")
    data = json.loads(body).get("data") if status == 200 else None
    found = data[0].get("meta") if data else None
    return found.get("n_vocab") if isinstance(found, dict) else None


def engine_times(turns: list[Turn], before: str, after: str) -> tuple[float | None, float | None, str]:
    """Milliseconds of a prompt and of a token by the engine's own clock, and whose that is."""
    timings = [turn.answers[0].timings for turn in turns if turn.answers[0].timings]
    if timings:
        prompt = statistics.median(each["prompt_ms"] for each in timings)
        token = statistics.median(each["predicted_per_token_ms"] for each in timings)
        return prompt, token, "`timings` of llama.cpp"
    prefill, decode = (mean_ms(before, after, name) for name in VLLM_TIMES.values())
    n_tokens = statistics.mean(turn.answers[0].n_tokens for turn in turns)
    if prefill is not None and decode is not None:
        return prefill, decode / max(1.0, n_tokens - 1), "vLLM's histograms of prefill and decode"
    return None, None, "this engine does not say"


def beside_engine_ms(turns: list[Turn], token_ms: float | None) -> float | None:
    """What a token takes from the engine's clock to the client's; of each answer where each is timed by the engine."""
    if token_ms is None:
        return None
    answers = [turn.answers[0] for turn in turns]
    own_ms = [answer.timings["predicted_per_token_ms"] if answer.timings else token_ms for answer in answers]
    pairs = zip(answers, own_ms, strict=True)
    return statistics.median(1000 * answer.inter_token_s - own for answer, own in pairs)


async def steps(ways: BothWays, options: argparse.Namespace) -> tuple[dict[str, Any], list[Step]]:
    """A cold prompt's figures, and the steps of its way."""

    def chat() -> dict[str, Any]:
        return ways.chat(options.prompt_words, options.max_tokens)

    await times(ways, 0, chat, warm_up=1)
    before = [await ways.metrics(way) for way in ("laya", "bare")]
    turns = await times(ways, options.pairs, chat)
    after = [await ways.metrics(way) for way in ("laya", "bare")]
    cold = figures(turns)
    prompt_ms, token_ms, whose = engine_times(turns["laya"], before[1], after[1])
    encoded = await encode_ms(ways, " ".join((WORDS * options.prompt_words)[: options.prompt_words]))
    n_words = await n_vocabulary(ways) if ways.engine == "llamacpp" else None
    sampled = 1000 * sample_s(n_words) if n_words else None
    first, between = cold["first_token_ms"]["laya"], cold["inter_token_ms"]["laya"]
    routed, added = (mean_ms(before[0], after[0], f"laya_{name}_seconds") for name in ("route", "gateway_added"))
    how_beside = "the time between tokens here, less the engine's own, answer by answer"
    found = [
        Step("encode the prompt", "request", encoded, "the engine's /tokenize, less that of one letter; median of 20"),
        Step("choose the engine", "request", routed, "laya_route_seconds, mean"),
        Step(
            "Laya, before the engine is asked", "request", added,
            "laya_gateway_added_seconds, mean: from the last byte of the request to the first one sent on",
        ),
        Step("compute the prompt", "request", prompt_ms, f"{whose}, median"),
        Step("first token at the client", "request", first, "here, since the request was written"),
        Step(
            "compute a token", "token", token_ms - sampled if token_ms is not None and sampled is not None else None,
            f"{whose}, less the sampling; an MoE's expert router is in it",
        ),
        Step("sample it", "token", sampled, f"the engine's samplers alone, llama-server's defaults, {n_words} words"),
        Step("decode it, SSE, Laya, sockets", "token", beside_engine_ms(turns["laya"], token_ms), how_beside),
        Step("between tokens at the client", "token", between, "here, mean of an answer, median of answers"),
    ]  # fmt: skip
    return cold, found


async def run(options: argparse.Namespace, serve: Sequence[str], model: str) -> dict[str, Any]:
    async with both_ways(model, serve, ignores_eos=not options.ends_itself, nice=options.nice) as ways:
        cold, found = await steps(ways, options)
        kept = ways.chat(options.prompt_words, options.warm_tokens, is_kept=True)
        warm = figures(await times(ways, options.warm_pairs, lambda: kept, warm_up=2))
        if any(step.ms is not None and step.ms < 0 for step in found[:5]):
            raise EngineFailed(f"Clocks disagree, so nothing was measured: {found}")
        return {
            "model": model, "engine": ways.engine, "settings": ways.settings, "cold": cold, "warm": warm,
            "steps": [step._asdict() for step in found],
        }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """`laya bench latency`: 0 when Laya adds at most `--at-most-ms` to the first token of a warm prompt, else 1."""
    parser = argparse.ArgumentParser(
        prog="laya bench latency",
        description=description(__doc__.partition("\n")[0]),
        epilog="Other options are settings of engines, as `laya serve` takes them.",
    )
    common(parser)
    parser.add_argument("--pairs", type=count, default=5, help="of prompts that no cache holds")
    parser.add_argument("--prompt-words", type=count, default=225, help="about 256 tokens with those of a template")
    parser.add_argument("--max-tokens", type=count, default=32)
    parser.add_argument("--warm-pairs", type=count, default=100, help="of one prompt that the engine has")
    parser.add_argument("--warm-tokens", type=count, default=4)
    parser.add_argument("--at-most-ms", type=float, default=float("inf"))
    options, flags = parser.parse_known_args(argv)
    console = Console(stderr=options.json, highlight=False, width=150)
    words = serve_words(options, flags, 1)
    engines = [asyncio.run(run(options, words, model)) for model in options.model or ["smollm2"]]
    for engine in engines:
        _print(console, engine)
    load = {"pairs": options.pairs, "warm_pairs": options.warm_pairs, "max_tokens": options.max_tokens, "serve": words}
    report = {"bench": "latency", "layer": LAYER, "load": load, "engines": engines, "hardware": hardware()}
    print(msgspec.json.encode(report).decode())
    return 0 if max(each["warm"]["first_token_ms"]["added"] for each in engines) <= options.at_most_ms else 1


def _print(console: Console, engine: dict[str, Any]) -> None:
    n_tokens = engine["cold"]["prompt_tokens"]
    title = f"{engine['model']} ({engine['engine']}): one session, a prompt of {n_tokens:g} tokens"
    table = Table(title=title, box=None, header_style="dim")
    for column in ("step", "a", "ms", "how it is measured"):
        table.add_column(column, justify="right" if column == "ms" else "left")
    for step in engine["steps"]:
        table.add_row(step["step"], step["per"], "-" if step["ms"] is None else f"{step['ms']:.3f}", step["how"])
    console.print(table)
    for name in ("cold", "warm"):
        for figure, text in (("first_token_ms", "first token"), ("inter_token_ms", "between tokens")):
            found = engine[name][figure]
            low, high = found["added_quartiles"]
            console.print(
                f" {name:5} {text:15} bare {found['bare']:9.3f} ms, Laya {found['laya']:9.3f} ms; "
                f"added {found['added']:+.3f} ms (quartiles {low:+.3f} {high:+.3f})"
            )


if __name__ == "__main__":
    sys.exit(main())
