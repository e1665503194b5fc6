"""`laya key`: without a server in the store, with one through it; live, once, and never locking the owner out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import httpx
import openai
import pytest

from laya.cli.main import main
from laya.store import Store
from tests.conftest import ROOT, RunningServer

Laya = Callable[..., tuple[int, str, str]]


@pytest.fixture
def laya(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Laya:
    """`laya("key", ...)`: (exit code, stdout, stderr), in a home of its own and with no server but LAYA_URL's."""
    monkeypatch.setenv("LAYA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("LAYA_API_KEY", raising=False)
    monkeypatch.delenv("LAYA_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("server: {port: 1}")  # nothing listens there

    def run(*argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(argv))
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


# no server
def test_first_key_is_an_admin_printed_once_and_alone(laya: Laya, tmp_path: Path) -> None:
    code, out, err = laya("key", "create", "me")
    assert code == 0
    key = out.strip()
    assert key.startswith("laya-") and len(out.splitlines()) == 1
    assert "me: admin" in err and "LAYA_API_KEY" in err and "not shown again" in err
    assert key not in laya("key", "list")[1] + laya("key", "show", "me")[1] + laya("key", "list", "--json")[1]
    with Store(tmp_path / "home" / "laya.db") as store:
        (kept,) = store.api_keys()
    assert kept.sha256 == sha256(key.encode()).hexdigest()
    assert not any(key.encode() in path.read_bytes() for path in (tmp_path / "home").iterdir())


def test_every_grant_is_kept_and_shown(laya: Laya) -> None:
    laya("key", "create", "me")
    code, out, err = laya(
        "key", "create", "kid", "--models", "smollm2,qwen3-8b", "--models", "other", "--expires", "2099-12-31",
        "--max-concurrent", "2", "--requests-per-minute", "30", "--tokens-per-minute", "6000",
        "--priority", "bulk", "--max-priority", "default", "--json",
    )  # fmt: skip
    made = json.loads(out)
    assert (code, err, made["role"], made["models"]) == (0, "", "user", ["smollm2", "qwen3-8b", "other"])
    assert made["expires"] == "2100-01-01T00:00:00+00:00"  # through that day
    shown = json.loads(laya("key", "show", "kid", "--json")[1])
    assert (shown["max_concurrent"], shown["requests_left"], shown["tokens_left"]) == (2, 30, 6000)
    listed = laya("key", "list")[1]
    assert "2 at once, 30 requests a minute, 6000 tokens a minute, priority bulk, at most default" in listed
    assert "smollm2, qwen3-8b, other" in listed
    assert [key["name"] for key in json.loads(laya("key", "list", "--json")[1])["keys"]] == ["me", "kid"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("create", "kid", "--role", "user"), "`laya key create me` first"),
        (("create", "kid", "--models", "smollm2"), "`laya key create me` first"),
        (("create", "kid", "--role", "admin", "--max-concurrent", "1"), "`laya key create me` first"),
        (("create", "kid", "--requests-per-minute", "5"), "`laya key create me` first"),
        (("create", "kid", "--tokens-per-minute", "5"), "`laya key create me` first"),
        (("create", "kid", "--expires", "30d"), "`laya key create me` first"),
        (("create", "kid", "--role", "king"), "no role 'king': the roles are user, metrics, peer, admin"),
        (("create", "a b"), "'a b' is no name of a key: 1 to 64 letters, digits and . _ @ -"),
        (("create", "kid", "--max-concurrent", "0"), "max-concurrent"),
        (("create", "kid", "--priority", "high"), "'priority' is 'high': expected system or interactive"),
        (("create", "kid", "--priority", "system", "--max-priority", "bulk"), "more urgent than max_priority bulk"),
        (("create", "kid", "--expires", "soon"), "soon"),
        (("create", "kid", "--expires", "2020-01-01"), "past"),
        (("revoke", "nobody"), "no key named 'nobody'"),
        (("show", "nobody"), "no key named 'nobody'"),
    ],
)
def test_what_cannot_be_is_one_sentence(laya: Laya, argv: tuple[str, ...], words: str) -> None:
    code, out, err = laya("key", *argv)
    assert (code, out) == (2, "")
    assert words in err and "Traceback" not in err


def test_model_that_is_not_here_is_warned_of_with_the_nearest(laya: Laya) -> None:
    laya("key", "create", "me")
    code, _, err = laya("key", "create", "kid", "--models", "smolm2,auto,zzzzzz")
    assert code == 0
    assert "No model here is called 'smolm2' now. Did you mean 'smollm2'?" in err
    assert "'zzzzzz' now." in err and "'auto'" not in err


def test_last_admin_key_stays_while_there_are_others(laya: Laya) -> None:
    laya("key", "create", "me"), laya("key", "create", "kid")
    code, _, err = laya("key", "revoke", "me")
    assert code == 2 and "last admin key" in err and "kid" in err
    laya("key", "create", "other", "--role", "admin")
    assert laya("key", "revoke", "me")[:2] == (0, "me: revoked\n")
    laya("key", "revoke", "kid")
    code, _, err = laya("key", "revoke", "other")
    assert code == 0 and "No key is left" in err
    assert "No key is here" in laya("key", "list")[2]


def test_last_key_of_an_open_address_stays(laya: Laya, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("server: {port: 1, host: 0.0.0.0}")
    laya("key", "create", "me")
    code, _, err = laya("key", "revoke", "me")
    assert code == 2 and "listens to its network" in err


def test_an_admin_key_that_expires_is_not_counted_on(laya: Laya) -> None:
    laya("key", "create", "other"), laya("key", "create", "kid")
    laya("key", "create", "me", "--role", "admin", "--expires", "30d")
    assert laya("key", "revoke", "other")[0] == 0  # `me` works for a month


def test_keys_of_the_config_stand_beside_those_of_the_store(laya: Laya, tmp_path: Path) -> None:
    (tmp_path / "mounted").write_text("a-secret-of-the-orchestrator\n")
    (tmp_path / "config.yaml").write_text(
        "server: {port: 1, api_keys: [{name: prometheus, role: metrics, key_file: mounted}, "
        "{name: ops, key: '${env.OPS}'}]}"
    )
    os.environ["OPS"] = "another-secret-of-theirs"
    try:
        laya("key", "create", "kid")
        listed = json.loads(laya("key", "list", "--json")[1])["keys"]
        code, _, err = laya("key", "revoke", "ops")
    finally:
        del os.environ["OPS"]
    assert [(key["name"], key["role"], key["origin"]) for key in listed] == [
        ("prometheus", "metrics", "config"), ("ops", "admin", "config"), ("kid", "user", "store"),
    ]  # fmt: skip
    assert listed[0]["digest"] == sha256(b"a-secret-of-the-orchestrator").hexdigest()[:8]
    assert code == 2 and "config.yaml" in err


def test_a_key_that_one_has_is_piped_in(laya: Laya, tmp_path: Path) -> None:
    given = subprocess.run(
        [sys.executable, "-m", "laya.cli", "key", "create", "me", "--stdin", "--json"],
        input="my-own-long-enough-key\n", capture_output=True, text=True, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True,
    )  # fmt: skip
    made = json.loads(given.stdout)
    assert "key" not in made
    assert made["digest"] == sha256(b"my-own-long-enough-key").hexdigest()[:8]
    again = subprocess.run(
        [sys.executable, "-m", "laya.cli", "key", "create", "dupe", "--stdin"],
        input="my-own-long-enough-key\n", capture_output=True, text=True, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert again.returncode == 2 and "secret is that of the key 'me' already" in again.stderr


def test_a_server_that_was_meant_and_is_not_there_is_said(laya: Laya, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYA_URL", "http://127.0.0.1:1")
    assert laya("key", "list")[0] == 4
    assert laya("key", "list", "--here")[0] == 0


# with a server
@pytest.fixture
def home(tmp_path: Path, laya_home: Path) -> Path:
    """A home of its own with the models of the suite's."""
    made = tmp_path / "home"
    made.mkdir()
    for name in ("models", "catalogue.json"):
        if (laya_home / name).exists():
            (made / name).symlink_to(laya_home / name)
    return made


@pytest.fixture
def served(home: Path, tmp_path: Path) -> Iterator[RunningServer]:
    cwd = tmp_path / "serve"
    cwd.mkdir()
    (cwd / "config.yaml").write_text("n_threads: 1\nmax_seq_len: 1024\nmax_num_seqs: 1\n")
    server = RunningServer(home, (), cwd)
    server.wait_ready()
    yield server
    server.stop()


def client(server: RunningServer, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=120)


@pytest.mark.engine
def test_keys_of_a_running_server(laya: Laya, served: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """From open to closed and back, live, as the official SDK sees it."""
    monkeypatch.setenv("LAYA_URL", served.url)
    assert laya("ps")[0] == 0
    code, out, err = laya("key", "create", "me")
    admin = out.strip()
    assert code == 0 and "from now on" in err
    code, _, err = laya("ps")
    assert code == 1 and "LAYA_API_KEY" in err
    code, _, err = laya("key", "create", "thief")
    assert code == 1 and "--here" in err
    rescue = laya("key", "create", "rescue", "--role", "admin", "--here")[1].strip()  # who owns the machine
    monkeypatch.setenv("LAYA_API_KEY", admin)
    made = json.loads(laya("key", "create", "kid", "--models", "smollm2", "--requests-per-minute", "1", "--json")[1])
    kid = client(served, made["key"])
    words = [{"role": "user", "content": "Hi"}]
    with pytest.raises(openai.AuthenticationError) as unknown:
        client(served, "sk-nobody").models.list()
    assert unknown.value.code == "invalid_api_key"
    with pytest.raises(openai.PermissionDeniedError) as forbidden:
        kid.chat.completions.create(model="other", messages=words, max_tokens=1)  # type: ignore[arg-type]
    assert forbidden.value.code == "forbidden_model"
    with pytest.raises(openai.RateLimitError) as limited:
        kid.chat.completions.create(model="smollm2", messages=words, max_tokens=1)  # type: ignore[arg-type]
    assert limited.value.code == "rate_limit_exceeded"
    assert int(limited.value.response.headers["retry-after"]) > 30
    assert isinstance(limited.value.body, dict) and limited.value.body["allowed"] == 1
    assert [model.id for model in kid.models.list()] == ["smollm2-135m"]
    for path in ("/admin/state", "/metrics", "/admin/keys"):
        answer = httpx.get(f"{served.url}{path}", headers={"authorization": f"Bearer {made['key']}"}, trust_env=False)
        assert answer.status_code == 403
    seen = httpx.get(f"{served.url}/admin/state", headers={"authorization": f"Bearer {rescue}"}, trust_env=False)
    assert seen.status_code == 200
    assert laya("key", "revoke", "kid")[0] == 0
    with pytest.raises(openai.AuthenticationError):
        kid.models.list()
