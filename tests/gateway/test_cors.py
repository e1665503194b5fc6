"""A page of an origin that the config names may use the API from a browser; no other may."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from tests.conftest import RunningServer

PAGE = "https://chat.example"
CONFIG = f"version: 1\nserver:\n  cors_origins: [{PAGE}]\n"
BODY = {"model": "nothing-here", "messages": [{"role": "user", "content": "x"}]}


@pytest.fixture(scope="module")
def open_to_page(start_server: Callable[..., RunningServer]) -> RunningServer:
    return start_server(config=CONFIG)


def test_cors_preflight_of_a_named_origin_is_allowed(open_to_page: RunningServer) -> None:
    asked = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    answer = httpx.options(f"{open_to_page.url}/v1/chat/completions", headers=asked, trust_env=False)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE


def test_cors_hot_and_cold_answers_name_the_origin(open_to_page: RunningServer) -> None:
    hot = httpx.post(f"{open_to_page.url}/v1/chat/completions", json=BODY, headers={"origin": PAGE}, trust_env=False)
    cold = httpx.get(f"{open_to_page.url}/v1/models", headers={"origin": PAGE}, trust_env=False)
    assert hot.status_code == 404
    assert hot.headers["access-control-allow-origin"] == PAGE
    assert cold.headers["access-control-allow-origin"] == PAGE


def test_cors_another_origin_is_refused(open_to_page: RunningServer) -> None:
    headers = {"origin": "https://evil.example"}
    hot = httpx.post(f"{open_to_page.url}/v1/chat/completions", json=BODY, headers=headers, trust_env=False)
    cold = httpx.get(f"{open_to_page.url}/v1/models", headers=headers, trust_env=False)
    for answer in (hot, cold):
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
