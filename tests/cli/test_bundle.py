"""`laya doctor --bundle`: everything a helper needs is in it, and nothing that was planted to be found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from laya.cli.redaction import LEFT_OUT, SECRET, Redactor, secrets_of
from laya.config.keys import hash_key

ROOT = Path(__file__).parents[2]
ROOT_HOME = "/" + "root"  # of that account, on any Linux
PLANTED = {
    "HF_TOKEN": "hf_PlantedTokenOfTheHub0123",
    "LAYA_API_KEY": "laya-PlantedKeyOfAClient00000",
    "MY_PASSWORD": 'pass"word \\ with quotes/and slash',
    "AWS_SECRET_ACCESS_KEY": "plantedplantedplanted+/40chars",
    "PLAIN_SETTING": "planted-value-used-by-the-config",
}
LAN_KEY = "laya-PlantedKeyOfTheLan000000000"
PROMPTS = ("planted words that a user wrote", "planted second line of it", "planted answer of a model")
CONFIG = """
server:
  port: 0
  api_keys: [{name: planted-friend, sha256: %s}]
chat_template: "{{ messages }} planted words that a user wrote"
defaults: {stop: [planted answer of a model], temperature: 0.5}
args: {api_key: plantedinargs000, slot_save_path: "${env.PLAIN_SETTING}"}
models:
  far: {source: "https://me:plantedurlpass@hub.example/m.gguf?token=plantedqueryt0ken"}
"""
LOG = f"""laya: engine for mine started, pid 5
0.00.000.001 I srv load_model: loading model 'HOME/models/mine.gguf'
0.00.000.002 I srv log_request: Authorization: Bearer plantedbearer0123456789
0.00.000.003 I srv operator: request: {{"messages": [{{"role": "user", "content": "{PROMPTS[0]}
{PROMPTS[1]}
0.00.000.004 I slot print_timing: prompt eval time = 30.01 ms / 1 tokens
0.00.000.005 D slot process: next token: '{PROMPTS[2]}'
0.00.000.006 I srv formatted: <|im_start|>user
{PROMPTS[0]}<|im_end|>
0.00.000.007 E srv load_model: failed to allocate 512 MiB, /home/planted-person/x
/usr/src/ggml.c:11: GGML_ASSERT(ok) failed
"""


@pytest.fixture(scope="module")
def bundle(laya_home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name -> text of a bundle made where secrets were planted in every place Laya reads or writes."""
    person = tmp_path_factory.mktemp("planted-home")
    home = person / "laya"
    (home / "logs").mkdir(parents=True)
    (home / "logs" / "mine.log").write_text(LOG.replace("HOME", str(person)))
    (home / "lan_key").write_text(LAN_KEY + "\n")
    (home / "laya.db").write_text(PROMPTS[0])
    (home / "models").symlink_to(laya_home / "models")
    (home / "config.yaml").write_text(CONFIG % hash_key(LAN_KEY))
    environ = os.environ | PLANTED | {"HOME": str(person), "LAYA_HOME": str(home), "PYTHONPATH": str(ROOT)}
    environ["LAYA_URL"] = "http://127.0.0.1:9"
    command = [sys.executable, "-m", "laya.cli", "doctor", "--bundle", "--output", "out.tar.gz"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=person, env=environ, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    path = person / "out.tar.gz"
    assert path.stat().st_mode & 0o777 == 0o600
    again = subprocess.run(command, capture_output=True, text=True, cwd=person, env=environ, check=False)
    assert (again.returncode, "is there already" in again.stderr) == (2, True)
    with tarfile.open(path) as archive:
        assert all((entry.uid, entry.uname, entry.mode) == (0, "", 0o600) for entry in archive)
        parts = {entry.name.removeprefix("out/"): archive.extractfile(entry) for entry in archive}
        return {name: part.read().decode() for name, part in parts.items() if part is not None} | {"home": str(person)}


def test_bundle_holds_nothing_that_was_planted(bundle: dict[str, str]) -> None:
    home = bundle.pop("home")
    everything = "\n".join([*bundle, *bundle.values()])
    for secret in (*PLANTED.values(), *PROMPTS, LAN_KEY, hash_key(LAN_KEY), home):
        assert secret not in everything, secret
        assert json.dumps(secret)[1:-1] not in everything, secret
    for part in ("plantedinargs", "plantedurlpass", "plantedqueryt0ken", "plantedbearer", "planted-person"):
        assert part not in everything, part
    bundle["home"] = home


def test_bundle_holds_what_a_helper_needs(bundle: dict[str, str]) -> None:
    config = yaml.safe_load(bundle["config.yaml"])
    assert config["args"]["slot_save_path"] == "${env.PLAIN_SETTING}"
    assert config["defaults"]["temperature"] == 0.5
    plans = json.loads(bundle["plan.json"])
    assert plans["smollm2-135m"]["devices"][0]["total_bytes"] > 0
    assert "error" in plans["far"]
    assert json.loads(bundle["versions.json"])["packages"]["xllamacpp"]
    assert {finding["topic"] for finding in json.loads(bundle["doctor.json"])} >= {"cpu", "memory", "ceiling"}
    assert json.loads(bundle["state.json"])["error"]["code"] == "no_server"
    assert "MemAvailable" in bundle["machine/meminfo.txt"]
    assert {"HF_TOKEN", "LAYA_HOME"} <= set(bundle["variables.txt"].split())
    log = bundle["logs/mine.log"].splitlines()
    assert log[1] == "0.00.000.001 I srv load_model: loading model '~/models/mine.gguf'"
    assert [line for line in log if LEFT_OUT in line] == [
        f"0.00.000.003 I srv operator: {LEFT_OUT}",
        f"0.00.000.006 I srv {LEFT_OUT}",
    ]
    assert "0.00.000.004 I slot print_timing: prompt eval time = 30.01 ms / 1 tokens" in log
    assert log[-2:] == [
        "0.00.000.007 E srv load_model: failed to allocate 512 MiB, ~/x",
        "/usr/src/ggml.c:11: GGML_ASSERT(ok) failed",
    ]


def test_bundle_of_a_broken_config_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("max_seq_length: 5\n")
    environ = os.environ | {"LAYA_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "laya.cli", "doctor", "--json", "--output", "b.tar.gz"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ, check=False)
    assert "config.yaml" in json.loads(done.stdout)["files"]
    with tarfile.open(tmp_path / "b.tar.gz") as archive:
        part = archive.extractfile("b/config.yaml")
        assert part is not None
        assert "max_seq_len" in part.read().decode()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Authorization: Basic dXNlcjpwYXNz\nnext", f"Authorization: {SECRET}\nnext"),
        ('{"authorization": "Bearer abcdefgh"}', f'{{"authorization": "{SECRET}"}}'),
        ("curl -H 'bearer abcdef123'", f"curl -H 'bearer {SECRET}'"),
        ("ghp_0123456789abcdef and AKIAABCDEFGHIJKLMNOP", f"{SECRET} and {SECRET}"),
        ("postgres://me:pw@db/x", f"postgres://{SECRET}@db/x"),
        ("https://hub/x?api_key=abcdefghij&y=1", f"https://hub/x?api_key={SECRET}&y=1"),
        ("/home/somebody/models/a.gguf", "~/models/a.gguf"),
        (f"{ROOT_HOME}/.local and {ROOT_HOME}ed", f"~/.local and {ROOT_HOME}ed"),
        ("n_tokens = 31, eos token = 2 '<s>'", "n_tokens = 31, eos token = 2 '<s>'"),
        ("weights 92.1 MiB at 127.0.0.1:8000", "weights 92.1 MiB at 127.0.0.1:8000"),
    ],
)
def test_redactor_knows_what_secrets_look_like(text: str, shown: str) -> None:
    assert Redactor([], {}).text(text) == shown


@given(st.text(min_size=6, max_size=40), st.text(max_size=40), st.text(max_size=40))
def test_redactor_hides_a_known_secret_in_every_spelling(secret: str, before: str, after: str) -> None:
    redactor = Redactor([secret], {})
    assert secret not in redactor.text(f"{before}{secret}{after}").replace(SECRET, "")
    written = json.dumps({"value": f"{secret}"})
    assert json.dumps(secret)[1:-1] not in redactor.text(written).replace(SECRET, "") or secret in '{"value": ""}'


def test_secrets_of_takes_no_switches_and_no_paths(tmp_path: Path) -> None:
    environ = {"A_TOKEN": "abcdefg", "B_KEY": "1", "AUTH_SOCK": str(tmp_path), "LANG": "en_US.UTF-8"}
    assert secrets_of(environ) == ["abcdefg"]
