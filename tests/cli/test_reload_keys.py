"""A reload never opens a server: a config.yaml that is gone, empty or half written, or without its keys, is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_serve import command, environment, get, until

from laya.config.keys import hash_key

KEY = "sk-laya-" + "k" * 40
KEYS = f"api_keys: [{{name: me, sha256: {hash_key(KEY)}}}]"
PROGRAM = "models: {gone: {engine: command, cmd: 'no-such-program ${PORT}'}, nowhere: {source: nowhere.gguf}}\n"
SERVED = f"server: {{{KEYS}, watch_config: true}}\n{PROGRAM}"


@pytest.fixture(scope="module")
def keyed(start_server: Callable[..., Any]) -> Any:
    server = start_server(config=SERVED)
    yield server
    assert server.stop() == 0


def reload(server: Any, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = environment(home) | {"LAYA_URL": server.url, "LAYA_API_KEY": KEY}
    return subprocess.run(
        command("reload", *words), capture_output=True, text=True, env=environ, timeout=60, check=False
    )


def events(server: Any) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = get(server, "/admin/events", KEY).json()["events"]
    return told


def refusals(server: Any) -> list[str]:
    return [each["text"] for each in events(server) if each["kind"] == "reload_failed"]


def is_closed(server: Any) -> bool:
    return get(server, "/admin/state").status_code == 401


def test_server_that_starts_can_be_reloaded_and_says_what_it_does_not_serve(keyed: Any, laya_home: Path) -> None:
    done = reload(keyed, laya_home, "--json")
    assert done.returncode == 0, done.stderr
    not_served = json.loads(done.stdout)["not_served"]
    assert "no-such-program" in not_served["gone"] and "nowhere.gguf" in not_served["nowhere"]


def test_file_that_is_emptied_changes_nothing_and_is_watched_on(keyed: Any, laya_home: Path) -> None:
    file = keyed.cwd / "config.yaml"
    file.write_text("")
    until(lambda: any("half written" in text for text in refusals(keyed)))
    assert is_closed(keyed)
    empty = reload(keyed, laya_home)
    assert empty.returncode == 2 and "config.yaml: it is empty" in empty.stderr
    file.write_text(SERVED.replace("server: {", "server: {max_body_bytes: 8MiB, "))
    until(lambda: any("server.max_body_bytes" in each["text"] for each in events(keyed)))
    file.write_text(SERVED)
    until(lambda: len([each for each in events(keyed) if "server.max_body_bytes" in each["text"]]) == 2)


def test_file_that_is_gone_is_not_looked_for_elsewhere(keyed: Any, laya_home: Path) -> None:
    file, other = keyed.cwd / "config.yaml", laya_home / "config.yaml"
    assert not other.exists()
    other.write_text("version: 1\n")
    try:
        file.unlink()
        n_before = len(refusals(keyed))
        os.kill(keyed.pid, signal.SIGHUP)
        until(lambda: len(refusals(keyed)) > n_before)
        assert "no such file" in refusals(keyed)[-1]
        assert reload(keyed, laya_home).returncode == 2 and is_closed(keyed)
    finally:
        other.unlink()
        file.write_text(SERVED)


def test_reload_takes_no_last_key_and_leaves_the_watch_on(keyed: Any, laya_home: Path) -> None:
    file = keyed.cwd / "config.yaml"
    for text in ("version: 1\n", PROGRAM, "server: {watch_config: true}\n"):
        file.write_text(text)
        refused = reload(keyed, laya_home, "--dry-run"), reload(keyed, laya_home)
        assert [each.returncode for each in refused] == [2, 2]
        assert "server.api_keys: without me no key would be left" in refused[1].stderr
        assert is_closed(keyed)
    file.write_text(f"server: {{{KEYS}}}\n{PROGRAM}")
    waits = json.loads(reload(keyed, laya_home, "--json").stdout)["needs_server_restart"]
    assert waits == [{"name": "server.watch_config", "was": True, "now": False}]
    file.write_text(f"server: {{{KEYS}, header_timeout_s: 7}}\n{PROGRAM}")
    until(lambda: any("server.header_timeout_s" in each["text"] for each in events(keyed)))
