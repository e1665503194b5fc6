"""Owns: `laya eval`: variants of a model in one table: what each costs in memory and time, and what is left of it.

    laya eval smollm2 --quant f16,q8_0,q4_k_m,q4_0
    laya eval smollm2 --against https://host/v1#model --set tasks.jsonl

The last line it prints is JSON. Exit codes: 0, also where a variant is flagged; with --strict 1 then.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
from rich.console import Console

from laya.bench.hardware import hardware
from laya.errors import ConfigError
from laya.lab_progress import Progressing
from laya.lab_verb import run_verb
from laya.memory.ggml import kv_cache_type
from laya.models.library import Library
from laya.models.work_folder import scratch_folder
from laya.quantization.against import other_row, remote, run_against
from laya.quantization.answers import Answered, accuracy
from laya.quantization.given import given_text
from laya.quantization.inspection import inspect
from laya.quantization.likelihood import WINDOW_TOKENS, Question, Subject
from laya.quantization.measuring import Measured, measure, mixed_text
from laya.quantization.report import Report, Variant, definitions, scored_words, show
from laya.quantization.serving import SERVED_TOKENS, Memory, Row, Speed, memory_of, served
from laya.quantization.statistics import Interval
from laya.quantization.tasks import SETS, Task, load_set
from laya.quantization.variants import File, best, variants
from laya.quantization.verdict import flags_of, limit_of, worse_than_fewer_bits
from laya.result_file import check_result_file, write_result_file
from laya.texts import DEFAULT_SET, set_names

DEFAULT_TOKENS = 8192
_TOKEN_CHARACTERS, _LEAST_CHARACTERS = 64, 1 << 20  # read of a text: more than its tokens take
Tell = Callable[[str], None]


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    return run_verb("eval", "what was made for the table is gone, and no report is written", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    console = Console(stderr=options.json, highlight=False)
    started = time.monotonic()
    _check(options)
    with ExitStack() as stack:
        # on the store's disk: what is made may be as large as models, and /tmp may lie in memory
        library = Library()
        own = scratch_folder(library.scratch_path(f"eval {os.getpid()}"), library.scratch_paths(), "this table")
        folder = stack.enter_context(own)
        progress = stack.enter_context(Progressing(Console(stderr=True), is_silent=options.json))
        progress.stage(options.model)
        report = evaluate(options, folder, lambda words: progress.update(0, note=words))
    report.seconds = round(time.monotonic() - started, 1)
    show(report, console)
    if options.html is not None:
        from laya.quantization.html_report import html_of

        write_result_file(options.html, html_of(report).encode())
    print(msgspec.json.encode(report, enc_hook=str).decode())
    return 1 if options.strict and any(variant.is_broken for variant in report.variants) else 0


def evaluate(options: argparse.Namespace, folder: Path, tell: Tell) -> Report:
    """Raises LayaError: what is wrong with what was asked for, what does not fit, and what the engine did not do."""
    tasks = load_set(options.set) if not options.no_tasks or options.against else []
    other = (
        (remote(options.against, options.against_key_env) or other_row(options.against)) if options.against else None
    )
    model_id, files = variants(options.model, options.quant, folder, options.n_threads, tell)
    reference = _named(files, options.reference) if options.reference else best(files)
    files = [reference, *(file for file in files if file is not reference)]
    rows = [_row(file.name, file) for file in files]
    rows += [_row(f"{reference.name} kv {kind}", reference, kind) for kind in options.kv]
    file_of = {row.name: next(file for file in files if file.facts.path == row.path) for row in rows}
    # what is learned of these files is not for the user's own store
    os.environ["LAYA_HOME"] = str(folder / "home")

    measured, text = _likelihoods(options, rows, reference, tasks, folder, tell)
    memory: dict[str, Memory] = {}
    for row in [row for row in rows if not row.is_unpacked] if not options.no_memory else []:
        tell(f"memory: {row.name}")
        memory[row.name] = memory_of(row, options.n_threads)
    speeds, answers = asyncio.run(_served(options, rows, tasks, folder, tell))
    _add_choices(tasks, measured, answers)
    found = None
    if other is not None:
        found = asyncio.run(run_against(rows[0], other, tasks, options.n_threads, folder, tell, options.nice))
    table = [_variant(row, file_of[row.name], reference, measured, memory, speeds, answers, tasks) for row in rows]
    _flag_order(table)
    return Report(
        model=model_id,
        reference=reference.name if len(rows) > 1 else None,
        reference_note=_reference_note(reference, alone=len(rows) == 1),
        text=text,
        task_set=options.set if tasks else None,
        n_threads=options.n_threads,
        variants=table,
        against=found,
        hardware=hardware(),
        definitions=definitions(measured.likelihood.values()),
    )


def _likelihoods(
    options: argparse.Namespace, rows: Sequence[Row], reference: File, tasks: Sequence[Task], folder: Path, tell: Tell
) -> tuple[Measured, str]:
    choices = [task for task in tasks if task.kind == "choice"] if not options.no_tasks else []
    if not options.tokens and not choices:
        return Measured(likelihood={}, choices={}), ""
    path = folder / "text.txt"
    raw = (
        mixed_text(options.text)
        if options.text in set_names()
        else given_text("--text", options.text, max(_LEAST_CHARACTERS, _TOKEN_CHARACTERS * options.tokens))
    )
    path.write_text(raw, encoding="utf-8")
    room = reference.facts.n_ctx_train or WINDOW_TOKENS + 1
    measured = measure(
        [Subject(name=row.name, path=row.path, kv_cache_dtype=row.kv_cache_dtype) for row in rows],
        text=path if options.tokens else None,
        n_tokens=options.tokens,
        window_tokens=min(options.window, room - 1),
        n_vocab=reference.facts.n_vocab,
        n_threads=options.n_threads,
        questions=[Question(prompt=task.prompt, choices=task.choices) for task in choices],
        folder=folder,
        tell=tell,
        exact=options.exact,
    )
    if not options.tokens:
        return measured, ""
    first = measured.likelihood[rows[0].name]
    return measured, f"{options.text}, {scored_words(first.n_tokens, first.n_windows, options.tokens)}"


async def _served(
    options: argparse.Namespace, rows: Sequence[Row], tasks: Sequence[Task], folder: Path, tell: Tell
) -> tuple[dict[str, Speed], dict[str, Answered]]:
    spoken = [task for task in tasks if task.kind != "choice"] if not options.no_tasks else []
    if options.no_speed and not spoken:
        return {}, {}
    async with served(rows, options.n_threads, folder, tell, options.nice) as here:
        speeds = {} if options.no_speed else await here.speeds(options.repeats)
        return speeds, await here.answers(spoken) if spoken else {}


def _add_choices(tasks: Sequence[Task], measured: Measured, answers: dict[str, Answered]) -> None:
    """Choices by likelihood become answers like the others."""
    asked = [task for task in tasks if task.kind == "choice"]
    for name, found in measured.choices.items():
        answered = answers.setdefault(name, Answered(texts={}, right={}))
        for task, index in zip(asked, found, strict=False):
            answered.texts[task.id] = task.choices[index]
            answered.right[task.id] = task.choices[index] == task.answer


def _variant(
    row: Row,
    file: File,
    reference: File,
    measured: Measured,
    memory: dict[str, Memory],
    speeds: dict[str, Speed],
    answers: dict[str, Answered],
    tasks: Sequence[Task],
) -> Variant:
    kv = row.kv_cache_dtype
    found = measured.likelihood.get(row.name)
    flags = []
    if kv is None:
        is_unpacked = file.facts.packed_as is not None
        flags = [*file.flags, *inspect(file.facts.path, reference.facts.path, is_unpacked=is_unpacked)]
    if found is not None:
        kv_bits = kv and 8 * kv_cache_type(kv).block_bytes / kv_cache_type(kv).block
        flags += flags_of(found, limit_of(file.facts.main_bits, kv_bits or None))
    ratio = found.ppl_ratio if found else None
    first = answers.get(reference.name) if row.name != reference.name else None
    answered = answers.get(row.name)
    asked = [task for task in tasks if answered is not None and task.id in answered.right]
    return Variant(
        name=row.name,
        path=row.path,
        kv_cache_dtype=kv or "f16",
        file_bytes=file.facts.file_bytes,
        bits=file.facts.bits,
        types=file.facts.types,
        memory=memory.get(row.name),
        speed=speeds.get(row.name),
        likelihood=found,
        tasks=accuracy(asked, answered, first) if answered is not None and asked else None,
        quality_percent=_quality(ratio) if ratio else None,
        flags=flags,
    )


def _quality(ratio: Interval) -> Interval:
    low, high = (None if bound is None else 100 / bound for bound in (ratio.high, ratio.low))
    return Interval(100 / ratio.value, low, high)


def _flag_order(table: list[Variant]) -> None:
    rows = [
        (each.name, each.bits, each.likelihood) for each in table if each.likelihood and each.kv_cache_dtype == "f16"
    ]
    for name, flag in worse_than_fewer_bits(rows).items():
        next(each for each in table if each.name == name).flags.append(flag)


def _row(name: str, file: File, kv_cache_dtype: str | None = None) -> Row:
    room = file.facts.n_ctx_train or SERVED_TOKENS
    return Row(
        name=name,
        path=file.facts.path,
        kv_cache_dtype=kv_cache_dtype,
        is_chat=file.facts.chat_template,
        is_unpacked=file.facts.packed_as is not None,
        max_seq_len=min(SERVED_TOKENS, room),
    )


def _named(files: Sequence[File], name: str) -> File:
    found = next((file for file in files if file.name == name), None)
    if found is None:
        raise ConfigError(
            f"--reference {name}: no variant of the table; there are {', '.join(file.name for file in files)}",
            param="reference",
        )
    return found


def _reference_note(reference: File, *, alone: bool) -> str:
    facts = reference.facts
    words = f"{reference.name} ({facts.main_type}, {facts.bits:.1f} bits a weight)"
    return f"none: {words} is the only variant" if alone else f"{words}, the best precision in the table"


def _check(options: argparse.Namespace) -> None:
    """Raises ConfigError for what would be found only after minutes."""
    for name, least in (("tokens", 0), ("repeats", 1), ("window", 16), ("n_threads", 1)):
        if (value := getattr(options, name)) < least:
            raise ConfigError(f"--{name.replace('_', '-')}: expected {least} or more, got {value}", param=name)
    options.kv = [kv_cache_type(kind).name.lower() for kind in options.kv]
    if options.text not in set_names():
        given_text("--text", options.text, 1, f" Built in: {', '.join(set_names())}.")
    if options.html is not None:
        check_result_file("--html", options.html)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="laya eval",
        description="Variants of a model in one table: memory, speed, and what is left of its quality.",
    )
    parser.add_argument("model", help="a model that is here, or the path of a GGUF file")
    parser.add_argument("--quant", type=_words, default=[], help="variants: f16,q8_0,q4_k_m,awq, names or paths")
    parser.add_argument("--reference", help="the variant that the others are held to; else the one of most bits")
    parser.add_argument("--kv", type=_words, default=[], help="rows of the reference with this KV cache: q8_0,q4_0")
    parser.add_argument("--against", help="another model's name, or http://host/v1#model: both answer the task set")
    parser.add_argument("--against-key-env", default="OPENAI_API_KEY", help="variable that has the key of that address")
    parser.add_argument("--set", default=SETS[0], help=f"tasks: a .jsonl file, or {', '.join(SETS)}")
    parser.add_argument("--text", default=DEFAULT_SET, help=f"what is scored: a file, or {', '.join(set_names())}")
    parser.add_argument(
        "--tokens", type=int, default=DEFAULT_TOKENS, help="of the text, in whole windows; 0 = no perplexity"
    )
    parser.add_argument("--window", type=int, default=WINDOW_TOKENS, help="tokens of context that are scored at once")
    parser.add_argument("--exact", action="store_true", help="KV cache in 32 bits, to compare with other programs")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of the speed rows")
    parser.add_argument("--n-threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--nice", type=int, help="priority of the engines while they are asked, as in `laya bench`")
    for name in ("speed", "tasks", "memory"):
        parser.add_argument(f"--no-{name}", action="store_true", help=f"leave {name} out")
    parser.add_argument("--strict", action="store_true", help="exit 1 where a variant is broken")
    parser.add_argument("--html", type=Path, help="also write a report with plots, one file")
    parser.add_argument("--json", action="store_true", help="only the JSON line on stdout, the rest on stderr")
    return parser


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


if __name__ == "__main__":
    sys.exit(main())
