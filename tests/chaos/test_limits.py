"""A small group of 1 GiB: the settings that froze an article's author his machine, and a real task to its end."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from laya.memory.machine import LEAST_BYTES, LEAST_COMMAND
from laya.types import GIB, MIB
from tests.conftest import PROGRAM, ROOT, RunningServer

from .conftest import Group, assert_nothing_killed, chat, measured_answers, measured_mib

Serve = Callable[..., RunningServer]
MakeLimited = Callable[[int], Group]
MakeModels = Callable[..., list[Path]]

ARTICLE = """
version: 1
max_seq_len: 32768
max_num_seqs: 8
enable_streaming: true
models:
  article: {{source: {model}}}
"""
READER = """
version: 1
n_threads: 1
max_seq_len: 4096
models:
  reader: {{source: {model}}}
"""
N_FILES = 20
N_LONG = 2  # longer than the model's window
WORDS = ("river", "stone", "bread", "winter", "market", "garden", "letter", "harbour", "clock", "bridge")


def test_article_settings_are_refused_where_they_do_not_fit_and_what_is_suggested_loads(
    make_limited: MakeLimited, serve: Serve, make_models: MakeModels
) -> None:
    (model,) = make_models(1, n_layer=16)  # 4 GiB of KV cache at f16
    group = make_limited(GIB)
    server = serve(config=ARTICLE.format(model=model), group=group)
    refused = chat(server, "article")
    error = refused.json()["error"]
    print(f"\n32768 x 8 in 1 GiB: {refused.status_code} {error['message']}")
    assert (refused.status_code, error["code"]) == (422, "insufficient_memory")
    assert error["need_bytes"] > error["available_bytes"] and error["suggestions"]
    server.stop()
    lines = [flags.split() for flags in error["suggestions"]]
    measured_answers(serve, "article", "article", lines, config=ARTICLE.format(model=model), group=group)
    assert_nothing_killed(group)


def test_article_settings_load_where_a_smaller_cache_makes_them_fit(
    make_limited: MakeLimited, serve: Serve, make_models: MakeModels
) -> None:
    (model,) = make_models(1, n_layer=4)  # 1 GiB of KV cache at f16
    group = make_limited(GIB)
    print("\n32768 x 8 of a smaller model, in 1 GiB")
    measured_answers(serve, "article", "article", [()], config=ARTICLE.format(model=model), group=group)
    assert_nothing_killed(group)


def test_folder_of_long_files_is_summarized_to_the_end(
    make_limited: MakeLimited, serve: Serve, make_models: MakeModels, tmp_path: Path
) -> None:
    draw = random.Random(7)
    n_bytes = 0
    for number in range(N_FILES):
        text = " ".join(draw.choices(WORDS, k=6000 if number < N_LONG else 1500))
        n_bytes += (tmp_path / f"note{number:02}.txt").write_text(text)
    (model,) = make_models(1, n_layer=2)
    group = make_limited(GIB)
    server = serve(config=READER.format(model=model), group=group)
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "examples/tasks/summarize_folder.py",
            tmp_path,
            "--model",
            "reader",
            "--answer-tokens",
            "16",
        ],
        env=os.environ | {"LAYA_URL": server.url},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    print(f"\n{n_bytes} bytes: {done.stdout.splitlines()[-1]}; {measured_mib(server, 'reader'):.0f} MiB measured")
    server.stop()
    assert f"{N_FILES} files in" in done.stdout
    assert_nothing_killed(group)


def test_group_that_is_too_small_for_a_server_is_refused_in_a_sentence(
    make_limited: MakeLimited, tmp_path: Path
) -> None:
    for verb in (("serve", "smollm2"), ("run", "smollm2")):
        group = make_limited(40 * MIB)
        environment = os.environ | {"LAYA_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
        command = group.program(*PROGRAM, *verb)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        print(
            f"\n{verb[0]} in 40 MiB, exit code {done.returncode}, at most {group.peak_bytes / MIB:.0f}: {done.stderr}"
        )
        assert done.returncode == 3
        assert "needs 64 MiB for itself" in done.stderr and group.folder.name in done.stderr
        assert group.kills() == 0


def test_least_group_that_the_refusal_names_serves_the_smallest_model(make_limited: MakeLimited, serve: Serve) -> None:
    group = make_limited(LEAST_BYTES)
    server = serve(*LEAST_COMMAND.split()[2:], group=group)
    assert chat(server, "smollm2").status_code == 200
    server.stop()
    print(f"\n{LEAST_COMMAND} in {LEAST_BYTES / MIB:.0f} MiB: the group held {group.peak_bytes / MIB:.0f} MiB at most")
    assert group.kills() == 0
