"""The page's panels on a real server with a real engine: requests and their end, what one explains, two models side by
side, conversations that are their key's alone, the heat map of experts, logs."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from laya.config.keys import hash_key
from tests.conftest import ROOT

pytestmark = pytest.mark.engine

MODEL, TWIN = "laya-nano", "twin"
SLOW = "smollm2-135m"  # slow enough to be looked at
LONG_TOKENS = 3000
KEYS = {name: f"the-key-of-{name}-in-these-tests" for name in ("boss", "ann", "bob")}
CONFIG = f"""
max_seq_len: 512
max_num_seqs: 1
n_threads: 1
defaults: {{max_tokens: 16, temperature: 0}}
request_log: {{path: requests.jsonl, content: true}}
server:
  api_keys:
    - {{name: boss, sha256: {hash_key(KEYS["boss"])}}}
    - {{name: ann, role: user, sha256: {hash_key(KEYS["ann"])}}}
    - {{name: bob, role: user, sha256: {hash_key(KEYS["bob"])}}}
models:
  {MODEL}: {{preload: true}}
  {TWIN}: {{source: {ROOT / "laya/models/shipped/laya-nano.gguf"}, preload: true}}
  {SLOW}: {{max_seq_len: 4096, preload: true}}
"""
WORD = re.compile(r"\w")


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any]) -> Any:
    return start_server(config=CONFIG)


@pytest.fixture
def errors(page: Any) -> Iterator[list[str]]:
    """What the browser's console calls an error; a status that the page shows in words is none."""
    found: list[str] = []
    page.on("console", lambda said: found.append(said.text) if said.type == "error" else None)
    yield found
    assert [text for text in found if "Failed to load resource" not in text] == []


@pytest.fixture
def boss(page: Any, errors: list[str], server: Any) -> Any:
    return enter(page, server, "boss")


def enter(page: Any, server: Any, who: str) -> Any:
    page.goto(server.url)
    page.get_by_label("API key", exact=True).fill(KEYS[who])
    page.get_by_role("button", name="Use this key").click()
    page.get_by_role("button", name="Send").wait_for()
    page.locator("#chat-model option").first.wait_for(state="attached")
    return page


def say(page: Any, text: str) -> Any:
    """Gives the turn, when it is answered."""
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")
    turn = page.locator(".turn").last
    turn.get_by_text("tokens/s").first.wait_for()
    page.get_by_role("button", name="Regenerate").wait_for()
    return turn


def requests_of(page: Any) -> Any:
    return page.get_by_role("region", name="Requests")


def live(page: Any, who: str) -> Any:
    """The row of a request that runs or waits."""
    return page.locator("#requests .request").filter(has_text=who)


def as_key(who: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[who]}"}


class Asking:
    """A long answer for a key, read beside the test."""

    def __init__(self, server: Any, who: str, request_id: str) -> None:
        body = {"model": SLOW, "messages": [{"role": "user", "content": "Tell me of the sea."}], "stream": True}
        self._body = body | {"max_tokens": LONG_TOKENS, "ignore_eos": True}
        self._to = f"{server.url}/v1/chat/completions"
        self._headers = as_key(who) | {"x-request-id": request_id}
        self.text = ""
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        how = {"json": self._body, "headers": self._headers, "timeout": 120, "trust_env": False}
        with (
            suppress(httpx.RemoteProtocolError),  # one that is ended breaks off after its last words
            httpx.stream("POST", self._to, **how) as answer,  # type: ignore[arg-type]
        ):
            for piece in answer.iter_text():
                self.text += piece


def at_work(server: Any) -> bool:
    """Whether the engine computes."""
    told = httpx.get(f"{server.url}/admin/models/{SLOW}/slots", headers=as_key("boss"), trust_env=False).json()
    return any(slot["is_processing"] for slot in told["slots"])


def test_requests_are_told_cancelled_and_explained(boss: Any, server: Any, browser: Any) -> None:
    runs, waits = Asking(server, "ann", "of-ann"), None
    live(boss, "ann").get_by_text(re.compile(r"[\d.]+ tok/s, \d+ tokens")).wait_for()
    facts = boss.locator(f".model[data-id='{SLOW}'] .facts")
    facts.get_by_text(re.compile(r"^speed [\d.]+ tok/s$")).wait_for()
    waits = Asking(server, "bob", "of-bob")
    waiting = live(boss, "bob")
    waiting.get_by_text(re.compile(rf"waits for a place at {SLOW}: 1 of 1 taken, \d+ s")).wait_for()
    assert re.search(r"since .+, \d+ s", waiting.inner_text())
    context = browser.new_context(viewport={"width": 390, "height": 800}, color_scheme="dark")
    bob = enter(context.new_page(), server, "bob")
    requests_of(bob).get_by_text("waits for").wait_for()
    assert bob.locator(".request").count() == 1, "ann's request does not exist for bob"
    assert bob.evaluate("document.documentElement.scrollWidth") <= 390
    boss.get_by_role("button", name="Cancel of-ann").click()
    runs.thread.join(30)
    assert "request_cancelled" in runs.text and "[DONE]" not in runs.text
    waiting.get_by_text(re.compile(r"[\d.]+ tok/s")).wait_for()  # the engine works for bob now
    requests_of(bob).get_by_role("button", name="Cancel of-bob").click()
    waits.thread.join(30)
    assert "request_cancelled" in waits.text
    requests_of(bob).locator(".ended .request-open").first.click()
    told = bob.get_by_role("dialog")
    told.get_by_text("Where its time went").wait_for()
    for part in ("read", "route", "queue", "prefill", "decode"):
        assert told.get_by_role("row").filter(has_text=part).count() >= 1
    assert f"{SLOW}, by the policy auto: it is the only one." in told.inner_text()
    assert "chosen" in told.get_by_role("table").nth(1).inner_text()
    assert json.loads(told.locator("pre.body").inner_text())["max_tokens"] == LONG_TOKENS, "capture is on here"
    assert bob.evaluate("document.documentElement.scrollWidth") <= 390
    context.close()
    end_s = time.monotonic() + 20
    while at_work(server):  # its engine sees that nobody reads any more between two tokens
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_phases_of_a_request_are_words(boss: Any) -> None:
    words = """async () => {
      const { howOf } = await import('/page/requests.js');
      return [{phase: 'prefill', prefill_tokens: 41, prompt_tokens: 100}, {phase: 'decode'},
              {phase: 'queued', waits_for: 'qwen to unload', age_s: 6}].map(howOf);
    }"""
    assert boss.evaluate(words) == ["prefill 41 %", "answers", "waits for qwen to unload, 6 s"]


def test_chat_answers_side_by_side_again_and_keeps_conversations_for_their_key(
    boss: Any, server: Any, browser: Any
) -> None:
    boss.locator("#chat-fit").get_by_text("loaded").wait_for()
    assert boss.locator("#chat-model option").all_inner_texts()[:3] == [
        f"{name}: loaded" for name in (MODEL, SLOW, TWIN)
    ]
    turn = say(boss, "What is the sea?")
    note = turn.locator(".note").inner_text()
    assert re.search(r"16 tokens · [\d.]+ tokens/s · \d+ of 512 tokens of context", note)
    held = int(re.findall(r"(\d+) of 512", note)[0])
    assert turn.get_by_role("meter").evaluate("each => [each.value, each.max]") == [held, 512]
    boss.get_by_role("button", name="Regenerate").click()
    boss.get_by_role("button", name="Regenerate").wait_for()
    assert boss.locator(".turn").count() == 1
    boss.get_by_label("Second model, side by side").select_option(TWIN)
    turn = say(boss, "And the land?")
    turn.locator(".answers.two .note").nth(1).get_by_text("tokens/s").wait_for()
    first, second = turn.locator(".message.assistant").all()
    assert (first.locator(".by").inner_text(), second.locator(".by").inner_text()) == (MODEL, TWIN)
    assert first.locator(".text").inner_text() == second.locator(".text").inner_text(), "it is the same file"
    boss.reload()
    boss.locator(".turn").nth(1).wait_for()
    assert boss.locator(".message.user .text").all_inner_texts() == ["What is the sea?", "And the land?"]
    kept = "of => Object.keys(of === 'tab' ? sessionStorage : localStorage).filter(key => /^laya-chats/.test(key))"
    assert (len(boss.evaluate(kept, "tab")), boss.evaluate(kept, "browser")) == (1, []), "as long as the key"
    boss.get_by_role("button", name="New chat").click()
    assert boss.locator(".turn").count() == 0
    boss.get_by_label("Kept conversations").select_option("What is the sea?")
    boss.locator(".turn").nth(1).wait_for()
    boss.get_by_role("button", name="Forget the key").click()
    enter(boss, server, "bob")
    assert boss.locator(".turn").count() == 0
    assert boss.evaluate(kept, "tab") == [], "what was said with the key goes with it"


HALF_AN_ANSWER = """() => {
  const real = fetch;
  window.fetch = (to, how) => !String(to).endsWith("/chat/completions") ? real(to, how) : Promise.resolve(new Response(
    new ReadableStream({start(stream) {
      stream.enqueue(new TextEncoder().encode('data: {"choices": [{"delta": {"content": "half of it"}}]}\\n\\n'));
      how.signal.addEventListener("abort", () => stream.error(new DOMException("", "AbortError")));
    }})));
}"""


def test_conversation_that_is_deleted_while_it_is_answered_stays_deleted(boss: Any) -> None:
    kept = "() => [sessionStorage, localStorage].flatMap((each) => Object.values(each)).filter((of) => /half/.test(of))"
    say(boss, "What is a lake?")
    key = boss.get_by_label("API key", exact=True)
    for forget, after in (("Delete", boss.get_by_label("Message")), ("Forget the key", key)):
        boss.evaluate(HALF_AN_ANSWER)
        boss.get_by_label("Message").fill("And a river?")
        boss.keyboard.press("Enter")
        boss.get_by_text("half of it").wait_for()
        boss.get_by_role("button", name=forget, exact=True).click()
        boss.locator(".turn").first.wait_for(state="detached")
        after.wait_for()  # of the page as it is loaded again
        assert boss.evaluate(kept) == [], forget


def test_heat_map_shows_which_experts_the_chat_uses(boss: Any) -> None:
    say(boss, "Tell me of a ship, its captain and the sea.")
    boss.get_by_role("button", name="Measure this chat").click()
    heat = boss.get_by_role("table", name="Share of each expert")
    heat.wait_for()
    cells = [[float(text) for text in row.locator("td").all_inner_texts()] for row in heat.locator("tbody tr").all()]
    assert [len(row) for row in cells] == [8] * 4
    assert [sum(row) for row in cells] == pytest.approx([100] * 4, abs=0.5)
    even = heat.locator("td.even").all_inner_texts()
    assert all(10 <= float(text) <= 15 for text in even)
    shares = [share for row in cells for share in row]  # as they are shown: rounded
    assert sum(10 < share < 15 for share in shares) <= len(even) <= sum(10 <= share <= 15 for share in shares)
    card = boss.get_by_role("region", name="Experts")
    assert "10-15 %: even" in card.inner_text() and f"{MODEL}: " in card.inner_text()
    boss.set_viewport_size({"width": 390, "height": 800})
    assert boss.evaluate("document.documentElement.scrollWidth") <= 390
    before = heat.inner_text()
    card.get_by_label("Which words").select_option("you")
    assert heat.inner_text() != before


def test_log_is_followed_filtered_and_has_the_line_of_a_failed_request(boss: Any, server: Any) -> None:
    asking = Asking(server, "boss", "doomed")
    live(boss, SLOW).get_by_text(re.compile(r"tok/s")).wait_for()
    state = httpx.get(f"{server.url}/admin/state", headers=as_key("boss"), trust_env=False).json()
    os.kill(next(model["pid"] for model in state["models"] if model["id"] == SLOW), signal.SIGKILL)
    asking.thread.join(30)
    requests_of(boss).locator(".ended .request").filter(has_text="failed, engine_crashed").locator("button").click()
    boss.get_by_role("dialog").get_by_role("button", name="Show its line in the log").click()
    line = boss.locator(".line.wanted")
    line.wait_for()
    assert "request doomed failed (engine_crashed)" in line.inner_text()
    logs = boss.get_by_role("region", name="Logs")
    assert logs.get_by_label("Engine").input_value() == SLOW
    logs.get_by_label("Filter").fill("doomed")
    assert logs.locator(".line:visible").count() == 1
    logs.get_by_label("Engine").select_option(MODEL)
    logs.get_by_label("Filter").fill("print_timing")
    n_before = logs.locator(".line").count()
    say(boss, "Hello.")
    logs.locator(".line").nth(n_before + 1).wait_for(state="attached")  # it is followed
    assert logs.locator(".line:visible").count() >= 1
