"""The page in a real browser, on a real server with a real engine: keys, the ledger, load, chat, unload, faults."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from laya.config.keys import hash_key

pytestmark = pytest.mark.engine

MODEL = "smollm2-135m"
KEY = "a-key-of-these-tests-only"
USER_KEY, METRICS_KEY = "a-users-key-of-these-tests", "a-scrapers-key-of-these-tests"
CONFIG = f"""
max_seq_len: 512
max_num_seqs: 1
n_threads: 1
defaults: {{max_tokens: 160, temperature: 0}}
server:
  api_keys:
    - {{name: test, sha256: {hash_key(KEY)}}}
    - {{name: kid, role: user, sha256: {hash_key(USER_KEY)}}}
    - {{name: scraper, role: metrics, sha256: {hash_key(METRICS_KEY)}}}
"""
WAIT_MS = 60_000


@pytest.fixture(scope="module")
def locked(start_server: Callable[..., Any]) -> Any:
    """A server that needs a key; its model is not loaded until somebody asks."""
    return start_server(config=CONFIG)


@pytest.fixture
def opened(page: Any, locked: Any) -> Any:
    """The page, with the key in it."""
    page.goto(locked.url)
    give_key(page, KEY)
    row(page).wait_for()
    return page


def give_key(page: Any, key: str) -> None:
    page.get_by_label("API key", exact=True).fill(key)
    page.get_by_role("button", name="Use this key").click()


def row(page: Any, model: str = MODEL) -> Any:
    return page.get_by_role("region", name="Models").get_by_role("listitem").filter(has_text=model)


def state_is(page: Any, state: str) -> None:
    row(page).locator(f".state.{state}").wait_for(timeout=WAIT_MS)


def load(page: Any) -> None:
    """Have the model ready, whatever it is."""
    row(page).locator(".state.ready, .state.unloaded").wait_for(timeout=WAIT_MS)
    if row(page).locator(".state.unloaded").count():
        page.get_by_role("button", name=f"Load {MODEL}").click()
    state_is(page, "ready")


def say(page: Any, text: str) -> Any:
    """Send a message; gives the answer's element."""
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")
    return page.locator(".message.assistant").last


def answered(page: Any) -> None:
    page.get_by_role("button", name="Send").wait_for(timeout=WAIT_MS)


def state_of(server: Any) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {KEY}"}
    state: dict[str, Any] = httpx.get(f"{server.url}/admin/state", headers=headers, trust_env=False).json()
    return state


def test_page_asks_for_a_key_says_when_it_is_wrong_and_keeps_it(page: Any, locked: Any) -> None:
    page.goto(locked.url)
    page.get_by_label("API key", exact=True).wait_for()
    assert not page.get_by_role("main").is_visible()
    give_key(page, "clé 🔑")
    page.get_by_text("it has characters that no key has").wait_for()
    give_key(page, "not-this-one")
    page.get_by_text("The API key is not one of this server's.").wait_for()
    assert not page.get_by_role("main").is_visible()
    give_key(page, KEY)
    row(page).wait_for()
    page.reload()
    row(page).wait_for()
    page.get_by_role("button", name="Forget the key").click()
    page.get_by_label("API key", exact=True).wait_for()


def test_page_of_another_tab_has_the_key_only_if_it_was_to_be_kept(opened: Any, locked: Any) -> None:
    other = opened.context.new_page()
    other.goto(locked.url)
    other.get_by_label("API key", exact=True).wait_for()
    other.get_by_label("keep it in this browser").check()
    give_key(other, KEY)
    row(other).wait_for()
    third = opened.context.new_page()
    third.goto(locked.url)
    row(third).wait_for()


def test_page_loads_chats_in_a_stream_and_unloads(opened: Any, locked: Any) -> None:
    state_is(opened, "unloaded")
    load(opened)
    answer = say(opened, "Say hello.")
    answer.locator(".text", has_text=re.compile(r"\w")).wait_for(timeout=WAIT_MS)
    answered(opened)
    assert "tokens/s" in answer.locator(".note").inner_text()
    assert "of 512 tokens of context" in answer.locator(".note").inner_text()
    assert answer.locator(".error").inner_text() == ""
    opened.get_by_role("button", name=f"Unload {MODEL}").click()
    state_is(opened, "unloaded")
    (model,) = state_of(locked)["models"]
    assert (model["state"], model["pid"]) == ("unloaded", None)


def test_page_shows_text_before_the_answer_is_over_and_stop_ends_it(opened: Any, locked: Any) -> None:
    load(opened)
    answer = say(opened, "Tell me a very long story about a ship, its captain and the sea.")
    answer.locator(".text", has_text=re.compile(r"\w")).wait_for(timeout=WAIT_MS)
    opened.get_by_role("button", name="Stop").click()
    answered(opened)
    assert answer.locator(".note").inner_text() == "stopped"
    row(opened).get_by_text("running 0").wait_for()
    assert state_of(locked)["outcomes"]["cancelled"] >= 1


def test_page_shows_the_ledger_as_the_server_tells_it(opened: Any, locked: Any) -> None:
    load(opened)
    told = httpx.get(f"{locked.url}/admin/state", headers={"authorization": f"Bearer {KEY}"}, trust_env=False)
    opened.route("**/admin/state", lambda route: route.fulfill(body=told.content))  # the figures of one moment
    device, model = told.json()["devices"][0], told.json()["models"][0]
    bar = opened.get_by_role("group", name=re.compile("^RAM: "))
    for name in ("total", "others", "measured", "reserved", "budget"):
        opened.locator(f"[data-{name}='{device[f'{name}_bytes']}']").wait_for()
    assert device["reserved_bytes"] == model["plan"]["devices"][0]["total_bytes"] > 0
    assert device["measured_bytes"] == model["measured_bytes"] > 0
    slices = {
        kind: int(bar.locator(f".slice.{kind}").get_attribute("data-bytes"))
        for kind in ("others", "measured", "promised")
    }
    assert slices["others"] == device["others_bytes"]
    assert slices["measured"] == device["measured_bytes"]
    assert slices["measured"] + slices["promised"] == max(device["reserved_bytes"], device["measured_bytes"])
    assert f"{device['budget_bytes'] / 2**30:.1f} GiB" in bar.locator(".mark-text").inner_text()
    left_px = bar.locator(".mark").bounding_box()["x"] - bar.bounding_box()["x"]
    ceiling = (device["others_bytes"] + device["budget_bytes"]) / device["total_bytes"]
    assert left_px / bar.bounding_box()["width"] == pytest.approx(ceiling, abs=0.01)


def test_page_says_in_words_why_a_prompt_is_refused_and_gives_it_back(opened: Any) -> None:
    load(opened)
    text = "word " * 3000
    answer = say(opened, text)
    answer.get_by_role("alert").filter(has_text="maximum context length is 512 tokens").wait_for()
    answered(opened)
    assert opened.get_by_label("Message").input_value() == text.strip()


def test_page_tells_that_an_engine_ended_by_itself(opened: Any, locked: Any) -> None:
    load(opened)
    (model,) = state_of(locked)["models"]
    os.kill(model["pid"], signal.SIGKILL)
    opened.get_by_role("region", name="What happened").get_by_text(
        f"the engine of '{MODEL}' ended by itself"
    ).wait_for()
    row(opened).locator(".state.failed").wait_for()
    opened.get_by_role("button", name=f"Load again {MODEL}").click()
    state_is(opened, "ready")


def test_page_without_keys_shows_a_refused_load_and_a_server_that_is_gone(
    page: Any, start_server: Callable[..., Any]
) -> None:
    small = start_server("--memory-budget", "64MiB")
    page.goto(small.url)
    row(page).wait_for()
    assert not page.get_by_label("API key", exact=True).is_visible()
    page.get_by_role("button", name=f"Load {MODEL}").click()
    refusal = row(page).get_by_role("alert")
    refusal.filter(has_text="64 MiB may be used").wait_for()
    answer = say(page, "Hello")
    answer.get_by_role("alert").filter(has_text="64 MiB may be used").wait_for()
    refusal.get_by_role("button", name="Load it anyway").click()
    refusal.filter(has_text="memory limit of 64").wait_for()
    small.stop()
    page.get_by_role("alert").filter(has_text="Laya does not answer").wait_for()


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_page_fits_its_window_in_light_and_dark(
    browser: Any, start_server: Callable[..., Any], locked: Any, width: int, scheme: str
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    page.goto(locked.url)
    give_key(page, KEY)
    row(page).wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ink, paper = page.evaluate(
        "(({color, backgroundColor}) => [color, backgroundColor])(getComputedStyle(document.body))"
    )
    is_dark = sum(map(int, re.findall(r"\d+", paper)[:3])) < sum(map(int, re.findall(r"\d+", ink)[:3]))
    assert is_dark == (scheme == "dark")
    context.close()


def test_users_key_shows_a_chat_and_nothing_of_the_machine(page: Any, locked: Any) -> None:
    page.goto(locked.url)
    give_key(page, USER_KEY)
    page.get_by_text("0 of your requests running").wait_for()
    assert not page.get_by_role("region", name="Memory").is_visible()
    assert not page.get_by_role("region", name="Models").is_visible()
    answer = say(page, "Say hello.")
    answer.get_by_text(re.compile(r"tok/s|tokens")).first.wait_for(timeout=WAIT_MS)
    page.get_by_text(re.compile("[01] of your")).wait_for()


def test_a_key_that_is_for_no_page_is_told_so(page: Any, locked: Any) -> None:
    page.goto(locked.url)
    give_key(page, METRICS_KEY)
    page.get_by_text("needs a key with the role").wait_for()
