"""The client of the verbs, against a real socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_stub import StubServer

from laya.cli.client import ServerClient
from laya.errors import ConfigError, LayaError, NoServer


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with StubServer() as server:
        yield server


@pytest.fixture
def client(stub: StubServer) -> Iterator[ServerClient]:
    client = ServerClient(stub.url, "sk-key")
    yield client
    client.close()


def test_client_gets_posts_and_deletes_json(stub: StubServer, client: ServerClient) -> None:
    assert client.get("/v1/models")["data"] == stub.models
    assert client.post("/admin/models/a b?c/load", {"x": 1}) == {
        "path": "/admin/models/a%20b%3Fc/load",
        "body": {"x": 1},
    }
    assert client.delete("/v1/models/m") == {"path": "/v1/models/m"}
    assert client.get("/null") is None
    assert stub.authorizations[0] == "Bearer sk-key"


def test_client_finds_the_server_by_the_environment(stub: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYA_URL", stub.url + "/v1/")
    monkeypatch.setenv("LAYA_API_KEY", "sk-env")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    client = ServerClient()
    assert client.get("/v1/models")["data"] == stub.models
    assert stub.authorizations == ["Bearer sk-env"]
    client.close()


def test_client_streams_text(client: ServerClient) -> None:
    assert "".join(client.stream_text("/text", {"follow": "true"})) == "/text?follow=true"


def test_client_names_the_address_where_nothing_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        client = ServerClient(url)
        for ask in (lambda: client.get("/x"), lambda: list(client.stream_text("/x"))):
            with pytest.raises(NoServer, match=f"No server at {url}.*laya serve") as caught:
                ask()
            assert caught.value.exit_code == 4
        client.close()


@pytest.mark.parametrize(
    ("path", "words", "code", "exit_code"),
    [
        ("/v1/models/nope", "The model does not exist.", "model_not_found", 2),
        ("/big", "It does not fit.", "insufficient_memory", 3),
        ("/key", "The API key is wrong. Set LAYA_API_KEY", "invalid_api_key", 1),
        ("/html", "without the words of a Laya server", "internal_error", 1),
        ("/other", "answered 500 without the words of a Laya server", "internal_error", 1),
    ],
)
def test_client_raises_the_servers_own_error(
    client: ServerClient, path: str, words: str, code: str, exit_code: int
) -> None:
    with pytest.raises(LayaError) as caught:
        client.get(path)
    assert words in caught.value.message
    assert (caught.value.code, caught.value.exit_code) == (code, exit_code)


def test_client_keeps_the_details_of_an_error(client: ServerClient) -> None:
    with pytest.raises(LayaError) as caught:
        client.get("/big")
    assert caught.value.details == {"need_bytes": 5}


@pytest.mark.parametrize(
    ("server", "url"),
    [
        ("{port: 8123}", "http://127.0.0.1:8123"),
        ("{host: 0.0.0.0, port: 81}", "http://127.0.0.1:81"),
        ("{host: '::', port: 81}", "http://[::1]:81"),
        ("{host: 127.0.0.2}", "http://127.0.0.2:8000"),
    ],
)
def test_client_asks_where_the_config_here_would_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str, url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LAYA_URL", raising=False)
    (tmp_path / "config.yaml").write_text(f"server: {server}\n")
    client = ServerClient()
    assert client.url == url
    client.close()
    monkeypatch.setenv("LAYA_URL", "http://127.0.0.1:9000")
    client = ServerClient()
    assert client.url == "http://127.0.0.1:9000"
    client.close()


@pytest.mark.parametrize(
    ("text", "words"), [("server: {port: many}", "config.yaml:1: server.port"), ("server: {port: 0}", "any free port")]
)
def test_client_refuses_to_guess_where_the_config_does_not_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LAYA_URL", raising=False)
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        ServerClient()


def test_client_refuses_a_key_that_no_header_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="LAYA_API_KEY is no key"):
        ServerClient("http://127.0.0.1:1", "\udcff")


@pytest.mark.parametrize("url", ["http://x\x1b", "ftp://x", "http://", "http://x:port", "http://[::1"])
def test_client_refuses_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        ServerClient(url)


def test_client_takes_an_address_without_a_scheme() -> None:
    client = ServerClient("localhost:8123")
    assert client.url == "http://localhost:8123"
    client.close()
