"""Owns: what the articles say and is not so: each counted or measured, so that a reader can do it again."""

from __future__ import annotations

from laya.bench.report.bench_desk import Desk
from laya.bench.report.finding import Finding, NotRun
from laya.bench.report.measure_memory import ONE, ROOMY, gib, term, total
from laya.bench.report.measure_speed import LATENCY, ROUTER, step_ms
from laya.types import MIB


def _finding(is_false: bool, here: str, load: str, command: str, **ratios: float) -> Finding:
    named = {name.replace("_over_", "/"): value for name, value in ratios.items()}
    return Finding(verdict="false" if is_false else "holds", here=here, load=load, command=command, ratios=named)


def half_the_bytes(desk: Desk) -> Finding:
    words = (*ONE, *ROOMY)
    weights = term(desk.described("experts-26b", *words), "weights")
    here = f"{weights / 1e9:.1f} GB of memory for 26 billion weights in FP16"
    ratio = weights / 26e9
    command = f"laya plan --params examples/plans/experts-26b.json {' '.join(words)}"
    return _finding(weights > 39e9, here, "26B, 8 experts", command, need_over_claimed=ratio)


def streaming(desk: Desk) -> Finding:
    files = ("examples/plans/streamed.yaml", "examples/plans/whole.yaml")
    desk.need(files[0])
    found = desk.laya("plan", "--compare", *files, "--json")
    one, other = (each["plan"] for each in next(iter(found["models"].values())))
    here = f"KV cache {term(one, 'kv_cache') // MIB} MiB streamed, {term(other, 'kv_cache') // MIB} MiB whole"
    same = term(one, "kv_cache") == term(other, "kv_cache")
    ratio = term(one, "kv_cache") / term(other, "kv_cache")
    return _finding(
        same, here, "smollm2, 1 x 4096", f"laya plan --compare {' '.join(files)}", streamed_over_whole=ratio
    )


def quantized_cache(desk: Desk) -> Finding:
    wide, narrow = (desk.described(name, *ONE, *ROOMY) for name in ("dense-7b", "dense-7b-q4"))
    ratio = term(narrow, "kv_cache") / term(wide, "kv_cache")
    here = f"weights {gib(term(wide, 'weights'))} -> {gib(term(narrow, 'weights'))}, KV cache x{ratio:g}"
    command = "laya plan --params examples/plans/dense-7b-q4.json --max-seq-len 4096 --max-num-seqs 1 --memory 1024GiB"
    return _finding(ratio == 1, here, "7B, 1 x 4096", command, q4_over_f16=ratio)


def linear(desk: Desk) -> Finding:
    sizes = {
        n: term(desk.described("dense-7b", "--max-seq-len", str(n), "--max-num-seqs", "1", *ROOMY), "kv_cache")
        for n in (4096, 8192, 32768)
    }
    here = ", ".join(f"{gib(n_bytes)} at {n}" for n, n_bytes in sizes.items())
    ratio = sizes[32768] / sizes[4096]
    command = "laya plan --params examples/plans/dense-7b.json --table --memory 1024GiB"
    return _finding(ratio == 8, f"{here}: a straight line", "7B FP16, 1 sequence", command, long_over_short=ratio)


def all_heads(desk: Desk) -> Finding:
    all_of_them, grouped = (term(desk.described(name, *ONE, *ROOMY), "kv_cache") for name in ("dense-7b", "grouped-7b"))
    ratio = all_of_them / grouped
    here = f"{all_of_them // MIB} MiB where every head counts, {grouped // MIB} with 8 of 32: {ratio:g}x overstated"
    command = "laya plan --params examples/plans/grouped-7b.json --max-seq-len 4096 --max-num-seqs 1 --memory 1024GiB"
    return _finding(ratio >= 4, here, "7B, 1 x 4096", command, counted_over_held=ratio)


def experts_in_ram(desk: Desk) -> Finding:
    words = (*ONE, "--memory", "64GiB", "--gpu-memory", "12GiB")
    plan = desk.described("experts-26b-q4", *words)
    on_card = next(device for device in plan["devices"] if device["device"] == "gpu0")["total_bytes"]
    n_layers = plan["settings"]["experts_on_cpu"]
    here = f"{gib(total(plan))} fit beside a card of 12 GiB ({gib(on_card)} on it): experts of {n_layers} layers in RAM"
    command = f"laya plan --params examples/plans/experts-26b-q4.json {' '.join(words)}"
    return _finding(
        plan["fits"] and n_layers > 0, here, "26B 4-bit, 1 x 4096", command, card_over_all=on_card / total(plan)
    )


def faster_tokens(desk: Desk) -> Finding:
    """F7: what a decision, once a request, is of one token. Times between tokens with and without the router differ by
    the noise of a machine, many times more than a decision takes."""
    decision_ms = desk.tool(*ROUTER)["layers"]["python"]["p50_us"] / 1000
    token_ms = step_ms(desk.laya(*LATENCY)["engines"][0], "between tokens at the client")
    if token_ms is None:
        raise NotRun("the latency bench gave no time between tokens")
    share = decision_ms / token_ms
    here = f"a decision {decision_ms * 1000:.1f} µs once a request, a token {token_ms:.1f} ms: {share:.3%} of one token"
    return Finding(
        verdict="false" if share < 0.01 else "differs", here=here, load="1 session, smollm2",
        command=f"laya {' '.join(LATENCY)}",
    )  # fmt: skip
