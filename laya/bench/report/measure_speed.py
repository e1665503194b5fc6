"""Owns: the rows that benches measure: routers, engines, sessions, a soak. Each bench proves which path it took."""

from __future__ import annotations

import importlib.util
from typing import Any

from laya.bench.report.bench_desk import Desk
from laya.bench.report.finding import Finding, NotRun, Verdict, near

MODEL = "smollm2"
LAB = "torch"
ROUTER = ("tools/benchmark_router.py", "--requests", "10000", "--threads", "8", "--json")
ROUTER_64 = ("tools/benchmark_router.py", "--requests", "10000", "--threads", "64", "--layer", "native", "--json")
KERNELS = ("bench", "expert-router", "--json", "--no-compile")
LATENCY = ("bench", "latency", "--model", MODEL, "--pairs", "3", "--warm-pairs", "10", "--json")
SESSIONS = (
    "bench", "concurrency", "--model", MODEL, "--sessions", "1,2,4,8", "--pairs", "6", "--max-tokens", "24",
    "--n-threads", "1",  # two threads that share two cores with who asks moved this by a quarter from run to run
    "--json"
)  # fmt: skip
SOAK = ("bench", "soak", "--minutes", "1", "--json")
EXPERTS = ("experts", "laya-nano", "--set", "varied", "--json")
ARTICLE = {"tokens": 128, "hidden": 4096, "experts": 8, "top_k": 2}


def _kernels(desk: Desk) -> dict[str, Any]:
    if importlib.util.find_spec(LAB) is None:
        raise NotRun("this Python has no torch: pip install 'laya-llm[torch]'")
    cases = desk.laya(*KERNELS)["cases"]
    found: dict[str, Any] = next(case for case in cases if all(case[key] == value for key, value in ARTICLE.items()))
    return found


def _kernel_finding(verdict: Verdict, here: str, ratios: dict[str, float]) -> Finding:
    load = "128 tokens, 4096 wide, 8 experts, top 2"
    spread = "medians of 9 blocks that alternate"
    command = f"laya {' '.join(KERNELS)}"
    return Finding(verdict=verdict, here=here, load=load, ratios=ratios, command=command, spread=spread)


def fused(desk: Desk) -> Finding:
    """A1."""
    row = _kernels(desk)
    ratio = row["eager_over_fused"]
    here = (
        f"fused {row['fused_us'] / 1000:.3f} ms, torch operators {row['eager_us'] / 1000:.3f} ms: {ratio:.1f}x, on CPU"
    )
    return _kernel_finding(near(ratio, 3.3), here, {"eager/fused": ratio})


def folded(desk: Desk) -> Finding:
    """A3: the projection and the expert embeddings are one matrix at inference; the bench holds both to one oracle."""
    row = _kernels(desk)
    ratio = row["eager_us"] / row["folded_us"]
    here = f"both forms choose the same experts; as one matrix {ratio:.1f}x faster ({row['folded_us']:.0f} µs)"
    return _kernel_finding("holds" if ratio > 1 else "differs", here, {"two steps/one matrix": ratio})


def shares(desk: Desk) -> Finding:
    """A4: each step switched off."""
    row = _kernels(desk)
    ratios = {
        "matrix folded": row["choice_in_core_us"] / row["folded_choice_in_core_us"],
        "one pass": row["folded_choice_in_core_us"] / row["fused_us"],
        "tokens together": row["fused_token_by_token_us"] / row["fused_us"],
    }
    here = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items())
    verdict: Verdict = "holds" if min(ratios.values()) > 1 else "differs"
    return _kernel_finding(verdict, f"each alone: {here}; constant memory is a GPU's", ratios)


def balance(desk: Desk) -> Finding:
    """A5, A24: the log of which experts were chosen, by llama.cpp, on text of several topics."""
    found = desk.laya(*EXPERTS)
    every = [share for layer in found["layers"] for share in layer["share"]]
    is_so = min(every) >= 0.10 and max(every) <= 0.15
    here = (
        f"{len(found['layers'])} layers, {len(found['topics'])} topics: {min(every):.1%} to {max(every):.1%} an expert"
    )
    return Finding(
        verdict="holds" if is_so else "differs", here=here, load=f"{found['n_tokens']} tokens of laya-nano",
        ratios={"most used/fair": max(every) * found["n_experts"]}, command=f"laya {' '.join(EXPERTS)}",
    )  # fmt: skip


def step_ms(engine: dict[str, Any], name: str) -> float | None:
    found: float | None = next((step["ms"] for step in engine["steps"] if step["step"] == name), None)
    return found


def latency(desk: Desk) -> Finding:
    """A6: the article's steps, of a dense model on this processor."""
    engine = desk.laya(*LATENCY)["engines"][0]
    steps = [f"{step['step']} {step['ms']:.3g} ms" for step in engine["steps"] if step["ms"] is not None]
    cold = engine["cold"]["first_token_ms"]
    low, high = cold["added_quartiles"]
    return Finding(
        verdict=near(cold["laya"], 850), here=f"first token {cold['laya']:.0f} ms; {'; '.join(steps)}",
        load=f"1 session, {engine['cold']['prompt_tokens']:g} prompt tokens, {engine['model']}",
        ratios={"through Laya/asked directly": cold["laya"] / cold["bare"]}, command=f"laya {' '.join(LATENCY)}",
        spread=f"added by Laya: quartiles {low:+.1f} and {high:+.1f} ms",
    )  # fmt: skip


def _rows(desk: Desk) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    engine = desk.laya(*SESSIONS)["engines"][0]
    return engine, {row["sessions"]: row for row in engine["rows"]}


def sessions(desk: Desk) -> Finding:
    """A11."""
    engine, rows = _rows(desk)
    gains = {n: row["over_one_session"]["laya"] for n, row in rows.items()}
    here = f"{engine['engine']}: " + ", ".join(f"{n} sessions {gain:.2f}x" for n, gain in gains.items() if n > 1)
    low, high = rows[8]["tokens_per_s"]["ratio_quartiles"]
    missing = "" if importlib.util.find_spec("vllm") else "; vLLM: not in this Python"
    return Finding(
        verdict=near(gains[8], 4), here=here + missing, load=f"{MODEL}, 48 prompt and 24 answer tokens each",
        ratios={"8 sessions/1": gains[8], "through Laya/asked directly, 8": rows[8]["tokens_per_s"]["ratio"]},
        command=f"laya {' '.join(SESSIONS)}", spread=f"Laya/direct quartiles {low:.2f} and {high:.2f}",
    )  # fmt: skip


def bandwidth(desk: Desk) -> Finding:
    """A20: more windows are slower each; and what the plan said beforehand."""
    _, rows = _rows(desk)
    each = {n: row["tokens_per_s"]["laya"] / n for n, row in rows.items()}
    told = desk.plan(MODEL)["speed"]["estimate"] or []
    predicted = next((point["tokens_per_s"] for point in told if point["sessions"] == 1), None)
    here = ", ".join(f"{speed:.1f} tok/s each of {n}" for n, speed in each.items())
    if predicted:
        here += f"; planned for one: {predicted['low']:.0f} to {predicted['high']:.0f}"
    return Finding(
        verdict="holds" if each[8] < each[1] else "false", here=here, load=f"{MODEL}, 1 to 8 sessions",
        ratios={"each of 8/alone": each[8] / each[1]}, command=f"laya {' '.join(SESSIONS)}",
    )  # fmt: skip


def long_run(desk: Desk) -> Finding:
    """A13: the cache was promised before it was used; what was held never passed what was promised."""
    _, rows = _rows(desk)
    most = [
        [max((point[index] or 0.0 for point in row["kv_use"]), default=0.0) for index in (1, 2)]
        for row in rows.values()
    ]
    if not all(promised for _, promised in most):
        raise NotRun("the bench was not told what was promised of the KV cache")
    is_so = all(held <= promised <= 1 for held, promised in most)
    held, promised = (max(column) for column in zip(*most, strict=True))
    here = f"KV tokens: {promised:.1%} promised, {held:.1%} held at most; every answer of 1 to 8 sessions came whole"
    return Finding(
        verdict="holds" if is_so else "false", here=here, load=f"{MODEL}, 1 to 8 sessions",
        command=f"laya {' '.join(SESSIONS)}",
    )  # fmt: skip


def soak(desk: Desk) -> Finding:
    """A17: not a day, but a minute in which models take turns and engines are killed."""
    found = desk.laya(*SOAK)
    seen = ", ".join(f"{n} {name}" for name, n in found["outcomes"].items())
    here = f"{found['arrivals']} requests: {seen}; unaccounted {found['unaccounted']}, faults {len(found['faults'])}"
    here += f"; the bench killed engines {found['broken'].get('kill', 0)} times, and what they were at failed. "
    here += "Docker and a whole day: not in a report"
    return Finding(
        verdict="holds" if found["passed"] else "false", here=here, load=f"{found['load']['clients']} clients, 1 min",
        command=f"laya {' '.join(SOAK)}",
    )  # fmt: skip


def request_router(desk: Desk) -> Finding:
    """B1."""
    layers = desk.tool(*ROUTER)["layers"]
    native, hop = layers.get("native", layers["python"]), layers["gateway"]
    ratio = 302 / native["mean_us"]
    here = (
        f"decision mean {native['mean_us']:.3f}, p50 {native['p50_us']:.3f}, p99 {native['p99_us']:.2f}, "
        f"p99.9 {native['p999_us']:.2f} µs; hop through HTTP adds p50 {hop['p50_us']:.0f} µs"
    )
    wrong = sum(layer["wrong"] for layer in layers.values())
    return Finding(
        verdict="false" if wrong else near(native["mean_us"], 302), here=f"{here}; {wrong} wrong answers",
        load="10 000 requests, 8 threads", command=f"python {' '.join(ROUTER[:-1])}",
        spread=f"{ratio:.0f}x less than 0.302 ms, which no layer was named for",
    )  # fmt: skip


def four_lines(desk: Desk) -> Finding:
    """B13: that the last of them works, in what the three before it make. Its figures are B1's."""
    layers = desk.tool(*ROUTER)["layers"]
    wrong = sum(layer["wrong"] for layer in layers.values())
    return Finding(
        verdict="false" if wrong else "holds",
        here=f"the last line runs and measures {', '.join(layers)}; {wrong} wrong answers. Its figures: B1",
        load="10 000 requests, 8 threads", command=f"python {' '.join(ROUTER[:-1])}",
    )  # fmt: skip


def no_lock(desk: Desk) -> Finding:
    """B2: a decision costs the same whoever else decides."""
    eight, many = desk.tool(*ROUTER), desk.tool(*ROUTER_64)
    if "native" not in eight["layers"]:
        raise NotRun("the native core was not built here")
    pair = [found["layers"]["native"]["p50_us"] for found in (eight, many)]
    here = f"p50 {pair[0]:.3f} µs with 8 threads, {pair[1]:.3f} with 64 on {eight['hardware']['cores']} cores"
    return Finding(
        verdict="holds" if max(pair) < 10 else "differs", here=here, load="10 000 requests",
        command=f"python {' '.join(ROUTER_64[:-1])}",
    )  # fmt: skip


def figures_named(desk: Desk) -> Finding:
    """B10: of the benches that this very report ran."""
    desk.tool(*ROUTER)
    n_named = 0
    for command, report in desk.reports.items():
        layer = report.get("layer") or report.get("layers") or report.get("hardware", {}).get("layer")
        if not (layer and report.get("hardware") and (report.get("load") or report.get("cases"))):
            return Finding(verdict="false", here=f"`{command}` does not say layer, load and hardware")
        n_named += 1
    return Finding(verdict="holds", here=f"all {n_named} benches of this report print layer, load and hardware")


def end_to_end(desk: Desk) -> Finding:
    """A25: one operator's time beside the whole chain's."""
    engine = desk.laya(*LATENCY)["engines"][0]
    first = engine["cold"]["first_token_ms"]["laya"]
    routed = step_ms(engine, "choose the engine")
    if not routed:
        raise NotRun("the engine was chosen too quickly to be told by /metrics")
    passed = desk.tests("tests/gateway/test_example_tasks.py")
    here = f"choosing the engine {routed:.3f} ms of {first:.0f} until the first token; tests of the tasks: {passed}"
    return Finding(
        verdict="holds", here=here, load="1 session", command="python -m pytest tests/gateway/test_example_tasks.py"
    )
