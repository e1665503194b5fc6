"""The screen's centre, in a real browser on a real server: the bars, a model tried before it is loaded, rows, refusals,
keys, what a user's key sees, contrast and width. One server and one page; each test leaves the page as it was."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from laya.config.keys import hash_key
from laya.connect import names, snippet
from tests.conftest import PROGRAM, ROOT

pytestmark = pytest.mark.engine

WAIT_MS = 60_000
ADMIN, USER = "an-admins-key-of-the-screen", "a-users-key-of-the-screen"
CONFIG = f"""
n_threads: 1
memory: {{{{budget: {{budget}}}}}}
models:
  nano: {{{{source: laya-nano, max_seq_len: 256, ttl: 20m, preload: true}}}}
  giant: {{{{source: laya-nano, max_seq_len: 1024, max_num_seqs: 64}}}}
server:
  api_keys:
    - {{{{name: admin, sha256: {hash_key(ADMIN)}}}}}
    - {{{{name: kid, role: user, sha256: {hash_key(USER)}}}}}
"""
CONTRAST = (ROOT / "tests" / "web" / "contrast.js").read_text()
TOLD_OF_REFUSALS = "the server responded with a status of 422"  # Chromium's own word for each


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any], laya_home: Path) -> Any:
    """With room for one of its models, and half of another: what was learned of earlier runs is in the plan."""
    environ = os.environ | {"LAYA_HOME": str(laya_home), "PYTHONPATH": str(ROOT)}
    command = [*PROGRAM, "plan", "laya-nano", "--max-seq-len", "256", "--max-num-seqs", "2", "--json"]
    plan = json.loads(subprocess.run(command, env=environ, capture_output=True, check=True).stdout)
    need_bytes = sum(device["total_bytes"] for device in plan["devices"])
    return start_server(config=CONFIG.format(budget=int(1.5 * need_bytes)))


@pytest.fixture(scope="module")
def screen(browser: Any, server: Any) -> Iterator[Any]:
    """The page as an admin has it; a script that fails and any error in the console fail the module."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
    enter(page, server, ADMIN)
    row(page, "nano").locator(".state.ready").wait_for()
    yield page
    context.close()
    assert [fault for fault in faults if TOLD_OF_REFUSALS not in fault and "401" not in fault] == []


def enter(page: Any, server: Any, key: str) -> None:
    page.goto(server.url)
    page.get_by_label("API key", exact=True).fill(key)
    page.get_by_role("button", name="Use this key").click()


def row(page: Any, model: str) -> Any:
    return page.locator(f".model[data-id='{model}']")


def ask(server: Any, path: str, **query: str) -> Any:
    headers = {"authorization": f"Bearer {ADMIN}"}
    answer = httpx.get(f"{server.url}{path}", headers=headers, params=query, trust_env=False, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def model_of(server: Any, name: str) -> dict[str, Any]:
    return next(model for model in ask(server, "/admin/state")["models"] if model["id"] == name)


def slide(page: Any, label: str, value: str) -> None:
    """Move a slider by keys until it says so."""
    slider = page.get_by_role("slider", name=label)
    slider.press("Home")
    for _ in range(20):
        if page.locator(f"output[for='{slider.get_attribute('id')}']").inner_text().split()[0] == value:
            return
        slider.press("ArrowRight")
    raise AssertionError(f"{label} has no step {value}")


def test_bar_has_its_sentence_its_slices_and_ten_minutes(screen: Any, server: Any) -> None:
    device = screen.locator(".device[data-id='cpu']")
    (room,) = ask(server, "/admin/headroom")["devices"]
    assert re.fullmatch(r"\d+(\.\d)?( MiB)? of \d+ MiB\. (Room for .+|No room for another model)\.", room["sentence"])
    device.get_by_text(re.compile(r"^(Room for|No room) ")).wait_for()
    nano = device.locator(".slice.promised[aria-label^='nano: ']")
    nano.focus()
    said = device.locator(".device-detail").inner_text()
    assert re.search(r"nano: \d+ MiB measured of \d+ MiB planned, \d\.\d\d × the peak\. weights 8 MiB · KV cache", said)
    device.locator(".slice.others").hover()
    device.get_by_text(re.compile("^Other programs: ")).wait_for()
    device.locator(".curve polyline.now").wait_for(state="attached")
    assert len(ask(server, "/admin/history")["devices"]["cpu"]) > 1


def test_row_says_how_it_stands_and_pins(screen: Any, server: Any) -> None:
    facts = row(screen, "nano").locator(".facts")
    for words in (r"context 0 of \d+ × 256", r"memory \d+ of \d+ MiB", "queue 0", r"unloads in \d+:\d\d"):
        assert re.search(words, facts.inner_text())
    before = re.search(r"unloads in (\S+)", facts.inner_text())
    assert before is not None
    facts.get_by_text(f"unloads in {before[1]}").wait_for(state="detached")
    pin = screen.get_by_role("button", name="Pin nano")
    pin.click()
    facts.get_by_text("stays pinned").wait_for()
    assert model_of(server, "nano")["pinned"] is True
    pin.click()
    facts.get_by_text("unloads in").wait_for()


def test_model_dragged_over_the_bar_shows_what_it_evicts_and_sliders_make_it_fit(screen: Any, server: Any) -> None:
    name, bar = row(screen, "giant").locator(".model-name").bounding_box(), screen.locator("#ledger").bounding_box()
    screen.mouse.move(name["x"] + 5, name["y"] + 5)
    screen.mouse.down()
    screen.mouse.move(name["x"] + 30, name["y"] + 5)
    screen.mouse.move(bar["x"] + 300, bar["y"] + 60, steps=4)
    ghost = screen.locator(".ghost.too-big")
    ghost.wait_for()
    trial = ask(server, "/admin/fit", model="giant")
    assert int(ghost.get_attribute("data-bytes")) == trial["plan"]["devices"][0]["total_bytes"]
    screen.mouse.up()
    panel = screen.get_by_role("region", name="Fit")
    panel.get_by_text(re.compile(r"^Too big by .+: needs .+ can be had\.")).wait_for()
    assert [each.get_attribute("id") for each in panel.get_by_role("slider").all()] == [
        "fit-max_seq_len",
        "fit-max_num_seqs",
        "fit-kv_cache_dtype",
    ]
    slide(screen, "Sequences", "1")
    slide(screen, "Context", "256")
    screen.locator(".ghost.fits").wait_for()
    panel.get_by_text("nano would be unloaded.").wait_for()
    assert screen.locator(".slice.leaving").count() == 2  # what of it is measured, and promised
    panel.get_by_role("button", name="Load it so").click()
    row(screen, "giant").locator(".state.ready").wait_for()
    settings = model_of(server, "giant")["plan"]["settings"]
    assert (settings["max_num_seqs"], settings["max_seq_len"]) == (1, 256)
    assert model_of(server, "nano")["state"] == "unloaded"
    screen.get_by_role("button", name=re.compile("make room for 'giant'")).wait_for()  # a flag on the curve
    screen.get_by_role("button", name="Unload giant").click()
    row(screen, "giant").locator(".state.unloaded").wait_for()


def test_catalogue_model_that_is_not_here_is_tried_by_keys_alone(screen: Any) -> None:
    screen.get_by_role("heading", name="Models").click()
    screen.keyboard.press("/")
    screen.keyboard.type("qwen3-8b")
    screen.keyboard.press("Enter")
    screen.keyboard.press("l")
    panel = screen.get_by_role("region", name="Fit")
    panel.get_by_text(re.compile("^Too big by ")).wait_for()
    panel.get_by_text("laya pull qwen3-8b").wait_for()
    assert screen.locator(".ghost.too-big").is_visible()
    screen.keyboard.press("Escape")
    screen.locator(".ghost").wait_for(state="hidden")
    screen.get_by_role("searchbox", name="Search models").fill("")


def test_refusal_is_a_card_whose_buttons_work(screen: Any, server: Any) -> None:
    # the settings of the file again: those that it was loaded with hold until then
    headers = {"authorization": f"Bearer {ADMIN}"}
    assert httpx.post(f"{server.url}/admin/reload", headers=headers, trust_env=False, timeout=60).status_code == 200
    screen.get_by_role("button", name="Load giant").click()
    card = row(screen, "giant").get_by_role("alert")
    card.get_by_text("giant does not fit").wait_for()
    need, have = card.locator("dd").all_inner_texts()
    assert re.fullmatch(r"\d+ MiB", have) and re.fullmatch(r"\d+ MiB|\d+\.\d GiB", need)
    card.locator(".way").nth(2).wait_for()
    assert card.locator(".way").count() == 3
    card.locator(".way").first.click()
    row(screen, "giant").locator(".state.ready").wait_for()
    assert card.count() == 0
    assert model_of(server, "giant")["plan"]["fits"] is True


def test_keys_unload_and_pause(screen: Any, server: Any) -> None:
    row(screen, "giant").focus()
    screen.keyboard.press("u")
    row(screen, "giant").locator(".state.unloaded").wait_for()
    screen.keyboard.press("p")
    screen.locator("#paused").wait_for()
    assert ask(server, "/admin/state")["is_paused"] is True
    screen.get_by_role("button", name="Resume all").click()
    screen.locator("#paused").wait_for(state="hidden")
    assert ask(server, "/admin/state")["is_paused"] is False


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_is_enough_in_both_schemes(screen: Any, scheme: str) -> None:
    """WCAG AA, of the colours that are really there, with the fit and the catalogue open."""
    screen.emulate_media(color_scheme=scheme)
    screen.get_by_role("button", name="Fit giant").click()
    screen.locator(".ghost.fits, .ghost.too-big").wait_for()
    screen.evaluate("Promise.allSettled(document.getAnimations().map((each) => each.finished))")  # colours that change
    found = screen.evaluate(CONTRAST)
    screen.keyboard.press("Escape")
    assert found["seen"] > 30
    assert found["poor"] == []


def test_phone_has_all_of_it_without_scrolling_sideways(screen: Any) -> None:
    screen.set_viewport_size({"width": 360, "height": 740})
    screen.get_by_role("button", name="Fit nano").click()
    screen.get_by_role("slider", name="Context").wait_for()
    assert screen.evaluate("document.documentElement.scrollWidth") <= 360
    screen.keyboard.press("Escape")
    screen.set_viewport_size({"width": 1280, "height": 900})


def test_connect_has_the_lines_of_eight_clients_with_url_key_and_window(screen: Any, server: Any) -> None:
    screen.get_by_role("button", name="Connect").click()
    dialog = screen.get_by_role("dialog", name="Connect")
    dialog.get_by_role("combobox", name="model").select_option("giant")
    text = dialog.locator("pre")
    for client in names():
        lines = snippet(client, server.url, "giant", api_key=ADMIN, context_length=_window(server, "giant"))
        dialog.get_by_role("button", name=lines.title, exact=True).click()
        dialog.get_by_text(lines.where).wait_for()
        assert text.text_content() == lines.text.replace(ADMIN, "••••••••")
    dialog.get_by_label("show the key").check()
    assert ADMIN in text.inner_text()
    screen.context.grant_permissions(["clipboard-read", "clipboard-write"])
    dialog.get_by_role("button", name="Copy").click()
    dialog.get_by_text("Copied.").wait_for()
    assert screen.evaluate("navigator.clipboard.readText()") == lines.text
    screen.keyboard.press("Escape")
    dialog.wait_for(state="hidden")


def _window(server: Any, name: str) -> int:
    window: int = next(each for each in ask(server, "/v1/models")["data"] if each["id"] == name)["context_length"]
    return window


def test_user_sees_nothing_of_the_machine(browser: Any, server: Any) -> None:
    context = browser.new_context()
    page = context.new_page()
    enter(page, server, USER)
    page.get_by_text("0 of your requests running").wait_for()
    for name in ("Memory", "Models", "Logs", "What happened"):
        assert not page.get_by_role("region", name=name).is_visible()
    assert not page.get_by_role("button", name="Pause all").is_visible()
    headers = {"authorization": f"Bearer {USER}"}
    for path in ("fit?model=nano", "headroom", "history", "catalogue"):
        assert httpx.get(f"{server.url}/admin/{path}", headers=headers, trust_env=False).status_code == 403
    context.close()
