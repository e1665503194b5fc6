"""What `laya import` writes is served: of llama-swap and Ollama by the real engine, of LiteLLM by another server."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from importing_world import runner

from laya.cli.importing import import_app
from tests.gateway.live import Serving, sdk, user
from tests.gateway.other_server import KEY, OtherServer

PROGRAM = Path(__file__).parent.parent / "engines" / "openai_program.py"
SWAP = """
models:
  tiny:
    cmd: |
      llama-server --port ${{PORT}} -m {gguf} -c 1024 -np 2 -t 1 -ngl 99 --temp 0
      --chat-template-kwargs '{{"enable_thinking": false}}' --reasoning-format deepseek --cache-reuse 64
      --samplers "top_k;temperature" --override-tensor ".ffn_.*_exps.=CPU"
    aliases: [gpt-4o-mini]
  program:
    proxy: http://127.0.0.1:8999
    cmd: {python} {program} --port 8999 --api-key sk-0123456789abcdef --model its-name
    useModelName: its-name
"""
MODELFILE = """FROM {gguf}
PARAMETER num_ctx 512
PARAMETER num_thread 1
PARAMETER num_predict 8
PARAMETER temperature 0
SYSTEM You are Mario
"""
LITELLM = """
model_list:
  - model_name: far
    litellm_params: {{model: openai/their-model, api_base: {url}, api_key: os.environ/FAR_KEY}}
  - model_name: gone
    litellm_params: {{model: openai/their-model, api_base: http://127.0.0.1:9/v1, api_key: os.environ/FAR_KEY}}
  - model_name: pair
    litellm_params: {{model: openai/their-model, api_base: {url}, api_key: os.environ/FAR_KEY, top_p: 0.9}}
  - model_name: pair
    litellm_params: {{model: openai/their-model, api_base: http://127.0.0.1:9/v1, api_key: os.environ/FAR_KEY}}
router_settings:
  fallbacks: [{{gone: [far]}}, {{pair: [far]}}]
  model_group_alias: {{gpt-4: pair, gpt-5: far}}
"""


def configuration(*words: str) -> str:
    result = runner.invoke(import_app, list(words))
    assert result.exception is None, result.exception
    assert "to do:" not in result.stderr, result.stderr
    return result.stdout


@pytest.fixture
def client(start_server: Callable[..., Any]) -> Iterator[Callable[[str], openai.OpenAI]]:
    started: list[Any] = []

    def start(config: str) -> openai.OpenAI:
        server: Serving = start_server(config=config)
        started.append(server)
        return sdk(server)

    yield start
    for server in started:
        assert server.stop() == 0


def answer(client: openai.OpenAI, model: str) -> Any:
    return client.chat.completions.create(model=model, messages=user("Say yes."), max_tokens=6)


@pytest.mark.engine
def test_llama_swap_import_serves(client: Any, smollm2_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "swap.yaml"
    file.write_text(SWAP.format(gguf=smollm2_path, python=sys.executable, program=PROGRAM))
    http = client(configuration("llama-swap", str(file)))
    said = answer(http, "gpt-4o-mini")
    assert (said.model, said.usage.completion_tokens) == ("tiny", 6)
    assert answer(http, "program").choices[0].message.content


@pytest.mark.engine
def test_ollama_import_serves(client: Any, smollm2_path: Path, tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / ("sha256-" + "a" * 64)  # as Ollama keeps it: without an ending
    blob.parent.mkdir()
    blob.symlink_to(smollm2_path)
    digest = blob.name.replace("-", ":", 1)
    manifest = tmp_path / "manifests/registry.ollama.ai/library/kept/latest"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": digest}
    manifest.write_text(json.dumps({"layers": [layer]}))
    (tmp_path / "Modelfile").write_text(MODELFILE.format(gguf=blob))
    http = client(configuration("ollama", str(tmp_path), str(tmp_path / "Modelfile"), "--name", "mario"))
    names = {model.id for model in http.models.list()}
    assert {"kept:latest", "mario"} <= names
    unlimited = http.chat.completions.create(model="mario", messages=user("Count to fifty."))
    assert unlimited.usage is not None
    assert unlimited.usage.completion_tokens == 8  # num_predict


def test_litellm_import_serves(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = OtherServer()
    try:
        monkeypatch.setenv("FAR_KEY", KEY)
        file = tmp_path / "lite.yaml"
        file.write_text(LITELLM.format(url=other.url))
        http = client(configuration("litellm", str(file)))
        names = ("far", "gpt-4", "gpt-5", "gone", "pair")
        for name in names:
            assert answer(http, name).choices[0].message.content == "from afar", name
        assert [body["model"] for body in other.bodies] == ["their-model"] * len(names)
        assert other.heads[0]["authorization"] == f"Bearer {KEY}"
    finally:
        other.stop()
