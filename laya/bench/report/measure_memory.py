"""Owns: the rows that the planner answers: what is counted before anything is loaded. Models are only described."""

from __future__ import annotations

from typing import Any

from laya.bench.report.bench_desk import Desk
from laya.bench.report.finding import Finding, NotRun, Verdict, near
from laya.types import GIB, MIB

ONE = ("--max-seq-len", "4096", "--max-num-seqs", "1")
ROOMY = ("--memory", "1024GiB")
TABLE = ("--max-seq-len", "32768", "--max-num-seqs", "8")
_NO_CARDS_SPEED = "A plan measures no card's speed"


def total(plan: dict[str, Any]) -> int:
    return sum(device["total_bytes"] for device in plan["devices"])


def term(plan: dict[str, Any], name: str) -> int:
    return sum(device["terms"].get(name, 0) for device in plan["devices"])


def gib(n_bytes: float) -> str:
    return f"{n_bytes / GIB:.1f} GiB"


def _command(name: str, *words: str) -> str:
    return " ".join(("laya plan --params", f"examples/plans/{name}.json", *words))


def refused_before_read(desk: Desk) -> Finding:
    """A8."""
    words = (*ONE, "--memory", "24GiB")
    plan = desk.described("experts-26b", *words)
    advice = plan["verdict"].rpartition(": ")[2]
    here = f"weights {gib(term(plan, 'weights'))}, {gib(total(plan))} in all: refused before a byte is read; {advice}"
    verdict: Verdict = "false" if plan["fits"] else "holds"
    ratio = total(plan) / (24 * GIB)
    return Finding(
        verdict=verdict, here=here, load="1 x 4096 tokens", ratios={"need/24 GiB": ratio},
        command=_command("experts-26b", *words),
    )  # fmt: skip


def kv_exact(desk: Desk) -> Finding:
    """A9: the article's formula against the planner's sum, for a model where all heads have keys and values."""
    plan = desk.described("dense-7b", *ONE, *ROOMY)
    formula = 2 * 1 * 4096 * 32 * 32 * 128 * 2
    here = f"{term(plan, 'kv_cache') / MIB:.0f} MiB for 32 layers x 32 heads x 128; the formula says {formula // MIB}"
    verdict: Verdict = "holds" if term(plan, "kv_cache") == formula else "differs"
    ratios = {"plan/formula": term(plan, "kv_cache") / formula}
    return Finding(
        verdict=verdict, here=f"{here}; 6-8 GB would be a model three to four times as wide",
        load="1 x 4096 tokens, FP16", ratios=ratios, command=_command("dense-7b", *ONE, *ROOMY),
    )  # fmt: skip


def both_accounts(desk: Desk) -> Finding:
    """A10."""
    words = (*ONE, "--memory", "64GiB", "--gpu-memory", "24GiB")
    plan = desk.described("experts-26b", *words)
    used = {device["device"]: device["total_bytes"] for device in plan["devices"]}
    here = " and ".join(f"{gib(n_bytes)} of {name}" for name, n_bytes in used.items())
    verdict: Verdict = near(used["cpu"] / GIB, 60) if "gpu0" in used else "false"
    return Finding(
        verdict=verdict, here=f"counted at once: {here}", load="1 x 4096 tokens, FP16",
        ratios={"RAM/60 GiB": used["cpu"] / (60 * GIB)}, command=_command("experts-26b", *words),
    )  # fmt: skip


def found_by_itself(desk: Desk) -> Finding:
    """A12."""
    words = ("--gpu-memory", "16GiB", "--memory", "32GiB")
    plan = desk.described("experts-26b-q4", *words)
    chosen = {name: plan["settings"][name] for name in ("max_seq_len", "max_num_seqs", "gpu_layers", "experts_on_cpu")}
    here = ", ".join(f"{name} {value}" for name, value in chosen.items())
    verdict: Verdict = "holds" if plan["fits"] and plan["reasons"] else "false"
    here = f"chosen without a trial: {here}; {len(plan['reasons'])} reasons are printed. {_NO_CARDS_SPEED}"
    return Finding(verdict=verdict, here=here, load="nothing asked for", command=_command("experts-26b-q4", *words))


def split(desk: Desk) -> Finding:
    """A14: placement, and the bound that memory sets to speed; a card would have to measure the speed itself."""
    words = (*ONE, "--gpu-memory", "16GiB", "--memory", "32GiB")
    plan = desk.described("experts-26b", *words)
    if not plan["fits"]:
        narrow = desk.described("experts-26b-q4", *words)
        here = (
            f"FP16 is refused there ({gib(total(plan))}); in 4 bits {narrow['settings']['experts_on_cpu']} layers' "
            f"experts stay in RAM. {_NO_CARDS_SPEED}"
        )
        verdict: Verdict = "holds" if narrow["fits"] else "false"
    else:
        here = f"{plan['settings']['experts_on_cpu']} layers' experts stay in RAM. {_NO_CARDS_SPEED}"
        verdict = "holds"
    return Finding(verdict=verdict, here=here, load="1 x 4096 tokens", command=_command("experts-26b", *words))


def precisions(desk: Desk) -> Finding:
    """A7: the memory column; quality and speed of a model at hand are `laya eval`'s."""
    wide, narrow = (desk.described(name, *ONE, *ROOMY) for name in ("dense-7b", "dense-7b-q4"))
    ratio = total(wide) / total(narrow)
    here = f"FP16 {gib(total(wide))}, 4 bits {gib(total(narrow))}: {ratio:.2f}x less (article: 24/9 = 2.67x)"
    here += ". Speed and quality of a model: `laya eval NAME --quant f16,q8_0,q4_k_m`, some minutes"
    return Finding(
        verdict=near(ratio, 24 / 9), here=here, load="7B, 1 x 4096 tokens", ratios={"FP16/4-bit": ratio},
        command=_command("dense-7b-q4", *ONE, *ROOMY),
    )  # fmt: skip


def froze(desk: Desk) -> Finding:
    """B3: what those defaults ask for; and, in a group with a limit, what a real server does with them."""
    words = (*TABLE, "--memory", "64GiB")
    plan = desk.described("dense-7b", *words)
    verdict: Verdict = "false" if plan["fits"] else "holds"
    here = f"{gib(total(plan))} would be needed: refused before the load"
    try:
        passed = desk.tests("tests/chaos/test_limits.py::test_article_settings_are_refused_where_they_do_not_fit_and_"
                            "what_is_suggested_loads")  # fmt: skip
        here += f"; a real server in a limited group refuses too and loads what it suggests ({passed})"
    except NotRun as reason:
        here += f". In a limited group: not run, {reason}"
    return Finding(
        verdict=verdict, here=here, load="8 x 32768 tokens, 64 GiB", command=_command("dense-7b", *words),
        ratios={"need/64 GiB": total(plan) / (64 * GIB)},
    )  # fmt: skip


def smaller_config(desk: Desk) -> Finding:
    """B4: the article's keys, and its two settings on the same model."""
    large = desk.described("dense-7b", *TABLE, *ROOMY)
    small = desk.described("dense-7b-q4", *ONE, *ROOMY)
    ratio = total(large) / total(small)
    here = f"{gib(total(large))} -> {gib(total(small))}: {ratio:.1f}x (article: 60/18 = 3.3x, where swap hid the rest)"
    return Finding(
        verdict=near(ratio, 60 / 18), here=here, load="8 x 32768 FP16 -> 1 x 4096 Q4", ratios={"before/after": ratio},
        command=_command("dense-7b-q4", *ONE, *ROOMY),
    )  # fmt: skip


def kv_table(desk: Desk) -> Finding:
    """B5."""
    one = term(desk.described("dense-7b", *ONE, *ROOMY), "kv_cache")
    eight = term(desk.described("dense-7b", "--max-seq-len", "4096", "--max-num-seqs", "8", *ROOMY), "kv_cache")
    long = term(desk.described("dense-7b", *TABLE, *ROOMY), "kv_cache")
    is_so = (one, eight, long) == (2 * GIB, 16 * GIB, 128 * GIB)
    here = f"{one // 4096 // 1024} KiB a token; {gib(one)} at 4096, {gib(eight)} for 8, {gib(long)} at 32768"
    ratios = {"8 sequences/1": eight / one, "32768/4096": long / eight}
    return Finding(
        verdict="holds" if is_so else "differs", here=here, load="32 layers, 4096 wide, FP16", ratios=ratios,
        command=_command("dense-7b", "--table", *ROOMY),
    )  # fmt: skip


def awq_size(desk: Desk) -> Finding:
    """B6: the sizes; the speed needs an engine for AWQ and GPTQ."""
    wide, narrow = (term(desk.described(name, *ONE, *ROOMY), "weights") for name in ("dense-7b", "dense-7b-q4"))
    ratio = wide / narrow
    here = f"weights {gib(wide)} -> {gib(narrow)} in 4 bits, {ratio:.1f}x (article: 2x). {_NO_CARDS_SPEED}"
    return Finding(
        verdict=near(ratio, 2), here=here, load="7B", ratios={"FP16/4-bit weights": ratio},
        command=_command("dense-7b-q4", *ONE, *ROOMY),
    )  # fmt: skip


def rule_of_thumb(desk: Desk) -> Finding:
    """B7."""
    few, many = (desk.described("dense-7b", *words, *ROOMY) for words in (ONE, TABLE))
    low, high = (total(plan) / term(plan, "weights") for plan in (few, many))
    here = f"{low:.2f}x the weights for 1 x 4096 tokens, {high:.1f}x for 8 x 32768: the rule knows neither"
    verdict: Verdict = "false" if low < 1.5 or high > 2 else "holds"
    return Finding(
        verdict=verdict, here=here, load="7B FP16", ratios={"1 x 4096": low, "8 x 32768": high},
        command=_command("dense-7b", *TABLE, *ROOMY),
    )  # fmt: skip


def verdict_rule(desk: Desk) -> Finding:
    """B9."""
    words = (*ONE, "--memory", "16GiB")
    said = desk.described("dense-7b", *words)["verdict"]
    verdict: Verdict = "holds" if "80 %" in said and said.startswith("2 sequences") else "false"
    return Finding(verdict=verdict, here=f"the plan says: {said}", load="7B FP16", command=_command("dense-7b", *words))


def safe_defaults(desk: Desk) -> Finding:
    """B15."""
    plan = desk.described("grouped-7b", "--memory", "32GiB")
    n_seqs, why = plan["settings"]["max_num_seqs"], plan["reasons"].get("max_num_seqs", "")
    verdict: Verdict = "holds" if n_seqs <= 2 and why else "false"
    here = f"max_num_seqs {n_seqs}: {why}; max_seq_len {plan['settings']['max_seq_len']}"
    command = _command("grouped-7b", "--memory 32GiB")
    return Finding(verdict=verdict, here=here, load="nothing asked for", command=command)


def smaller_first(desk: Desk) -> Finding:
    """B16."""
    words = (*ONE, "--memory", "64GiB", "--gpu-memory", "24GiB")
    said = desk.described("experts-26b", *words)["verdict"].rpartition(": ")[2]
    verdict: Verdict = "holds" if "smaller model" in said and ("card" in said or "memory" in said) else "false"
    return Finding(
        verdict=verdict, here=f"the plan says: {said}", load="26B FP16", command=_command("experts-26b", *words)
    )
