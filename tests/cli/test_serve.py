"""`laya serve` and `laya run` as commands: what they say, refuse, listen on, and how they end."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from laya.cli.verbs import app_for
from laya.errors import ConfigError

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
MODEL = "smollm2-135m"
SMALL = ("smollm2", "--max-num-seqs", "1", "--max-seq-len", "512", "--n-threads", "1")


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "laya.cli", *args]


def environment(home: Path) -> dict[str, str]:
    return os.environ | {"LAYA_HOME": str(home), "PYTHONPATH": str(ROOT)}


def laya(home: Path, cwd: Path, *args: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself."""
    return subprocess.run(
        command(*args), capture_output=True, text=True, cwd=cwd, env=environment(home), timeout=120, check=False, **more
    )


def get(server: Any, path: str, key: str | None = None) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.get(f"{server.url}{path}", headers=headers, trust_env=False)


def until(condition: Callable[[], object], deadline_s: float = 60.0) -> None:
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def engine_of(server: Any) -> psutil.Process:
    (engine,) = psutil.Process(server.pid).children()
    return engine


def ended(server: Any) -> None:
    """Wait until the server's process is over; its exit code is still to be read."""
    until(lambda: psutil.Process(server.pid).status() == psutil.STATUS_ZOMBIE)


def stream_from(server: Any, max_tokens: int) -> Any:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    stream = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=max_tokens,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(stream)
    return stream


def test_serve_says_what_it_loaded_and_what_to_paste(server: Any) -> None:
    until(lambda: "Try" in server.said[-1])
    said = " ".join("".join(server.said).split())
    assert f"model {MODEL} SmolLM2-135M-Instruct.Q4_1.gguf" in said
    assert "weights 92.1" in said and "kv_cache 180.0" in said
    assert "loaded in" in said and "planned" in said
    assert f'OpenAI base URL {server.url}/v1 model "{MODEL}" key: none needed on this machine' in said
    assert server.url.startswith("http://127.0.0.1:")
    assert f" In another shell    export LAYA_URL={server.url}\n" in server.said
    assert get(server, "/health").json() == {"status": "ok"}
    assert get(server, "/ready").json() == {"status": "ready"}


def test_model_of_a_peer_is_no_model_to_load_here(laya_home: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("peers: {attic: {url: 'http://127.0.0.1:9'}}\n")
    done = laya(laya_home, tmp_path, "serve", "attic/org/m", "--port", "0")
    assert done.returncode == 2 and "attic/org/m is a model of the peer 'attic'" in done.stderr
    assert "`laya load org/m` with LAYA_URL=http://127.0.0.1:9" in done.stderr


def test_port_in_use_names_the_process(laya_home: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = laya(laya_home, tmp_path, "serve", "smollm2", "--port", str(port))
    assert ended.returncode == 2
    assert f"Port {port} is in use by {psutil.Process().name()} (pid {os.getpid()})" in ended.stderr
    assert f"--port {port + 1}" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--host", "0.0.0.0"), "Listening on 0.0.0.0 without an API key"),
        (("--host", "::"), "Listening on :: without an API key"),
        (("--host", "192.0.2.1", "--lan"), "Can't listen on 192.0.2.1"),
        (("--max-num-seq", "3"), "Did you mean --max-num-seqs?"),
        (("--max-model-len", "abc"), "--max-model-len: expected a whole number"),
        (("-c", "100000"), "above the 8192 tokens"),
        (("-c",), "-c"),
        (("--gpu-memory-utilization", "0.9"), "--memory-budget 80%"),
        (("--tensor-parallel-size", "2"), "llama.cpp gives each GPU whole layers: write --gpus 0,1"),
        (("--quantization", "awq"), "awq"),
        (("--memory-budget", "lots"), "lots"),
        (("--config", "gone.yaml"), "gone.yaml"),
        (("--prto", "3"), "Did you mean --port?"),
        (("--memory.budget", "3GiB"), "Did you mean --memory-budget?"),
        (("--log-level", "debug"), "--log-level is not a flag here. Any other flag"),
        (("--ctx-size=",), "--ctx-size needs a value"),
        (("--memory-budget=-3GiB",), "--memory-budget '-3GiB' is not a budget"),
    ],
)
def test_wrong_flags_end_with_2_and_a_sentence(laya_home: Path, tmp_path: Path, args: Any, words: str) -> None:
    ended = laya(laya_home, tmp_path, "serve", "smollm2", *args, "--port", "0")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_flags_of_vllm_and_llamacpp_reach_the_plan(start_server: Callable[..., Any]) -> None:
    vllm = start_server("smollm2", "--max-model-len", "512", "--max-num-seqs", "3", "--n-threads", "1")
    settings = get(vllm, "/admin/state").json()["models"][0]["plan"]["settings"]
    assert (settings["max_seq_len"], settings["max_num_seqs"]) == (512, 3)
    assert vllm.stop() == 0
    llamacpp = start_server("smollm2", "-c", "2048", "-np", "2", "-ctk", "q8_0", "-ctv", "q8_0", "-t", "1")
    settings = get(llamacpp, "/admin/state").json()["models"][0]["plan"]["settings"]
    assert (settings["max_seq_len"], settings["max_num_seqs"]) == (1024, 2)  # llama.cpp's -c is for all sequences
    assert (settings["kv_cache_dtype"], settings["n_threads"]) == ("q8_0", 1)
    assert llamacpp.stop() == 0


def test_lan_makes_a_key_that_is_needed_and_kept(
    start_server: Callable[..., Any], laya_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server("--lan")
    said = "".join(server.said)
    key = (laya_home / "lan_key").read_text().strip()
    assert stat.S_IMODE((laya_home / "lan_key").stat().st_mode) == 0o600
    until(lambda: f"key: {key}" in "".join(server.said))
    port = server.url.rpartition(":")[2]
    paste = "docker run --add-host=host.docker.internal:host-gateway "
    paste += f"-e OPENAI_BASE_URL=http://host.docker.internal:{port}/v1 -e OPENAI_API_KEY={key}\n"
    until(lambda: any(line.endswith(paste) for line in server.said))  # in one line, to be pasted
    paste = f"export LAYA_URL=http://127.0.0.1:{port} LAYA_API_KEY={key}\n"
    until(lambda: any(line.endswith(paste) for line in server.said))
    assert "127.0.0.1" not in said.split("is ready")[1].split("\n")[0]
    server.url = f"http://127.0.0.1:{server.url.rpartition(':')[2]}"
    for path in ("/v1/models", "/metrics", "/admin/state"):
        assert get(server, path).status_code == get(server, path, "wrong").status_code == 401
        assert get(server, path, key).status_code == 200
    assert get(server, "/health").status_code == 200
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as refused:
        client.chat.completions.create(model="smollm2", messages=[{"role": "user", "content": "Hi"}])
    assert refused.value.code == "invalid_api_key"
    monkeypatch.setenv("LAYA_API_KEY", key)
    monkeypatch.setenv("LAYA_URL", server.url)
    assert subprocess.run(command("ps"), capture_output=True, env=environment(laya_home), check=False).returncode == 0
    assert server.stop() == 0
    again = start_server("--lan")
    until(lambda: f"key: {key}" in "".join(again.said))  # clients that have it keep working
    assert again.stop() == 0


def test_term_lets_an_answer_finish_and_leaves_no_child(start_server: Callable[..., Any]) -> None:
    server = start_server(*SMALL)
    engine = engine_of(server)
    stream = stream_from(server, max_tokens=30)
    os.kill(server.pid, signal.SIGTERM)
    chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert server.stop() == 0
    assert not engine.is_running()


def test_follower_of_a_log_does_not_hold_the_server(start_server: Callable[..., Any]) -> None:
    server = start_server(*SMALL)
    url = f"{server.url}/admin/models/{MODEL}/logs"
    with httpx.stream("GET", url, params={"follow": "true"}, trust_env=False, timeout=60) as response:
        pieces = response.iter_text()
        assert next(pieces)
        os.kill(server.pid, signal.SIGTERM)
        assert all(isinstance(piece, str) for piece in pieces)  # to the end, which comes
    assert server.stop(deadline_s=20) == 0


def test_interrupt_ends_with_130_and_leaves_no_child(start_server: Callable[..., Any]) -> None:
    server = start_server(*SMALL)
    engine = engine_of(server)
    os.kill(server.pid, signal.SIGINT)
    ended(server)
    assert server.stop() == 130
    assert not engine.is_running()


@pytest.mark.parametrize(("asked", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_second_signal_ends_at_once_and_says_so(start_server: Callable[..., Any], asked: int, code: int) -> None:
    server = start_server("smollm2", "--max-num-seqs", "1", "--max-seq-len", "8192", "--n-threads", "1")
    engine = engine_of(server)
    stream, waiting = stream_from(server, max_tokens=8000), ThreadPoolExecutor(1)
    late = waiting.submit(chat_once, server)
    until(lambda: get(server, "/admin/state").json()["models"][0]["queued"] == 1)
    os.kill(server.pid, asked)
    until(lambda: "laya: finishing 2 answers, at most 30 s; signal again to stop now\n" in server.said)
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        until(lambda: not answers(client))
    next(stream)  # no new clients, but this one still gets its answer
    os.kill(server.pid, asked)
    with pytest.raises(openai.APIError) as cut:  # cut off, and not in silence
        for _ in stream:
            pass
    assert cut.value.code == "server_stopping"
    assert late.result().json()["error"]["code"] == "server_stopping"
    ended(server)
    assert server.stop() == code
    assert "".join(server.said).rstrip().endswith("signal again to stop now")  # no traceback, no word of uvicorn's
    until(lambda: not engine.is_running(), 10)


def chat_once(server: Any) -> httpx.Response:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, trust_env=False, timeout=60)


def test_signal_during_a_load_leaves_no_child(laya_home: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("serve", "smollm2", "--port", "0"), cwd=tmp_path, env=environment(laya_home), stderr=subprocess.PIPE
    )
    until(lambda: psutil.Process(process.pid).children())
    (engine,) = psutil.Process(process.pid).children()
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"Traceback" not in said
    assert not engine.is_running()


def test_health_is_there_before_the_model_and_ready_after(laya_home: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        command("serve", *SMALL, "--port", str(port)), cwd=tmp_path, env=environment(laya_home), stderr=subprocess.PIPE
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            until(lambda: answers(client))
            statuses = []
            until(lambda: statuses.append(client.get("/ready").status_code) or statuses[-1] == 200)
            assert set(statuses) <= {503, 200}
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def test_server_without_models_says_how_to_get_one(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("serve", "--port", "0"),
        cwd=tmp_path,
        env=environment(tmp_path / "empty"),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    said = ""
    while "Try" not in said:
        said += process.stderr.readline()
    process.terminate()
    process.communicate(timeout=60)
    assert "laya pull" in said
    assert process.returncode == 0


def test_run_serves_and_answers_what_is_piped_in(laya_home: Path, tmp_path: Path) -> None:
    ended = laya(
        laya_home,
        tmp_path,
        "run",
        "smollm2",
        "--max-seq-len",
        "512",
        "--max-tokens",
        "6",
        "-t",
        "1",
        input="Say hello.",
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip()
    assert str(tmp_path) not in {each.info["cwd"] for each in psutil.process_iter(["cwd"])}  # nothing of it runs on


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--preset", "wrong"], "--preset wrong: there is no such preset. There are article-a, article-b."),
        (["--max-seq-len", "much"], "--max-seq-len"),
        (["--memory-budget", "8 apples"], "--memory-budget"),
    ],
)
def test_run_refuses_wrong_words_before_it_pulls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAYA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("laya.cli.models.ensure_pulled", lambda name: pytest.fail(f"{name} would be pulled"))
    with pytest.raises(ConfigError) as refused:
        app_for(["run"])(args=["run", "smollm2", *words], standalone_mode=False)
    assert said in refused.value.message


def test_run_says_why_the_server_did_not_start(laya_home: Path, tmp_path: Path) -> None:
    ended = laya(laya_home, tmp_path, "run", "smollm2", "--memory-budget", "100MiB", input="Hi")
    assert ended.returncode == 3
    assert "100 MiB may be used" in ended.stderr
    wrong = laya(laya_home, tmp_path, "run", "smollm2", "--max-seq-lem", "8", input="Hi")
    assert wrong.returncode == 2
    assert "Did you mean --max-seq-len?" in wrong.stderr


def test_killed_run_takes_its_server_with_it(laya_home: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("run", *SMALL),
        cwd=tmp_path,
        env=environment(laya_home),
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    until(lambda: len(psutil.Process(process.pid).children(recursive=True)) == 2)
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    until(lambda: not any(each.is_running() for each in family), 10)


def test_word_that_is_no_verb_is_one_sentence(laya_home: Path, tmp_path: Path) -> None:
    ended = laya(laya_home, tmp_path, "serv")
    assert ended.returncode == 2
    assert "serv" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_settings_reach_the_engine_from_the_config_file(start_server: Callable[..., Any]) -> None:
    config = json.dumps(
        {"version": 1, "max_seq_len": 512, "n_threads": 1, "models": {MODEL: {"max_num_seqs": 3, "preload": True}}}
    )
    server = start_server(config=config)
    settings = get(server, "/admin/state").json()["models"][0]["plan"]["settings"]
    assert (settings["max_seq_len"], settings["max_num_seqs"]) == (512, 3)
    assert server.stop() == 0


def test_entry_whose_file_is_missing_costs_that_model_alone(
    start_server: Callable[..., Any], laya_home: Path, smollm2_path: Path, tmp_path: Path
) -> None:
    late = tmp_path / "late.gguf"
    small = {"max_seq_len": 512, "max_num_seqs": 1, "n_threads": 1}
    models = {"late": {"source": str(late), "preload": True} | small, MODEL: {"preload": True} | small}
    config = json.dumps({"version": 1, "models": models})
    server = start_server(config=config)
    assert any("not served" in line and "models.late" in line and "late.gguf" in line for line in server.said)
    states = {model["id"]: model for model in get(server, "/admin/state").json()["models"]}
    assert states[MODEL]["state"] == "ready"
    assert states["late"]["state"] == "failed" and "late.gguf" in states["late"]["error"]
    events = get(server, "/admin/events").json()["events"]
    assert [event["kind"] for event in events if event["level"] == "warning"] == ["model_failed"]
    percents = [event["figures"]["percent"] for event in events if event["kind"] in ("loading", "ready")]
    assert percents == sorted(percents) and percents[-1] == 100
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "Hi"}]
    with pytest.raises(openai.UnprocessableEntityError, match=r"late\.gguf"):
        client.chat.completions.create(model="late", messages=messages, max_tokens=1)
    late.symlink_to(smollm2_path)
    until(lambda: "late" in {model["id"] for model in get(server, "/v1/models").json()["data"]})
    client.chat.completions.create(model="late", messages=messages, max_tokens=1)
    assert server.stop() == 0
    late.unlink()
    (tmp_path / "config.yaml").write_text(config)
    for words in (("serve", "late"), ("config", "check")):  # asked for by name, or to be checked
        ended = laya(laya_home, tmp_path, *words)
        assert ended.returncode == 2 and "models.late" in ended.stderr, ended.stderr
    (tmp_path / "config.yaml").write_text(json.dumps({"version": 1, "models": {"late": {"source": str(late)}}}))
    ended = laya(tmp_path / "empty", tmp_path, "serve")
    assert ended.returncode == 2 and "models.late" in ended.stderr, ended.stderr


def test_model_named_twice_or_by_its_file_is_one_model(
    start_server: Callable[..., Any], laya_home: Path, smollm2_path: Path, tmp_path: Path
) -> None:
    twice = start_server("smollm2", MODEL, "--served-model-name", "gpt-4o", *SMALL[1:])
    assert "".join(twice.said).count("loaded") == 1
    assert get(twice, "/v1/models/gpt-4o").json()["id"] == MODEL
    assert twice.stop() == 0
    by_file = start_server("-m", str(smollm2_path), *SMALL[1:])
    model = get(by_file, "/v1/models/SmolLM2-135M-Instruct.Q4_1").json()
    assert (model["loaded"], model["context_length"]) == (True, 512)
    assert by_file.stop() == 0
    named = start_server("mine", "--model", str(smollm2_path), "--alias", "ours", *SMALL[1:])
    assert get(named, "/v1/models/ours").json()["id"] == "mine"
    assert named.stop() == 0
    for args in (("--alias", "x"), ("a", "b", "-m", str(smollm2_path)), ("-m", "gone.gguf")):
        assert laya(laya_home, tmp_path, "serve", *args).returncode == 2
