"""A real browser for the page: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from laya.bench.page import chromium

MISSING = "NOT TESTED: the page in a browser. `make browser` installs Chromium and Playwright where it can."


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Module-wide and no wider: Playwright's loop counts as running in this thread until it is stopped."""
    program = chromium()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        program = None
    if program is None:
        pytest.skip(MISSING)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page of its own; a script that fails, and what the page's policy forbids, fail the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(60_000)
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if "Content Security" in said.text else None)
    yield page
    context.close()
    assert faults == []
