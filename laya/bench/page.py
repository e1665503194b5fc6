"""Owns: `laya bench page`: how long the page takes, in a real Chromium, from the address typed in to the memory shown.

Layer: browser to server, both on this machine. Each load has a browser context of its own, so nothing is in a cache;
`again` is the same page once more in that context. `phone` is a narrow window on a processor slowed by DevTools. Times
count from the start of the navigation, by the browser's own clock: first paint; DOM interactive (the HTML is read);
scripts run (the page's keys and buttons answer: the end of DOMContentLoaded, which modules hold up); state shown (the
frame after the first bar of the ledger has its figures). After the last, `/` must put the focus into the search, or
the load does not count. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.table import Table

from laya.bench.hardware import hardware
from laya.bench.help import description
from laya.bench.prefix import serving
from laya.errors import ConfigError, EngineFailed, LayaError

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

LAYER = "browser to server, on this machine"
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
INSTALL = "pip install playwright; apt install chromium"
TIMES = ("first_paint_ms", "dom_interactive_ms", "scripts_run_ms", "state_shown_ms")
WAIT_S = 60.0
WATCH = """
window.stateShown = new Promise((shown) => new MutationObserver((_, watcher) => {
  if (!document.querySelector("#main:not([hidden]) .device-used:not(:empty)")) return;
  watcher.disconnect();
  requestAnimationFrame(() => requestAnimationFrame(() => shown(performance.now())));
}).observe(document, { attributes: true, characterData: true, childList: true, subtree: true }));
"""
SEEN = """async () => {
  const stateShown_ms = await stateShown;
  const [load] = performance.getEntriesByType("navigation");
  const resources = performance.getEntriesByType("resource").filter(({ startTime }) => startTime < stateShown_ms);
  const files = [load, ...resources];
  return {
    first_paint_ms: performance.getEntriesByName("first-paint")[0].startTime,
    dom_interactive_ms: load.domInteractive,
    scripts_run_ms: load.domContentLoadedEventEnd,
    state_shown_ms: stateShown_ms,
    requests: files.length,
    bytes: files.reduce((sum, file) => sum + file.transferSize, 0),
  };
}"""


class Row(NamedTuple):
    """How the page is loaded. slower: times that the processor is slowed."""

    name: str
    width_px: int = 1280
    height_px: int = 900
    slower: int = 1
    is_again: bool = False


ROWS = (Row("first"), Row("again", is_again=True), Row("phone, 4 x slower", 390, 800, 4))


def chromium() -> str | None:
    """The browser's program, where there is one."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


async def loads(browser: Browser, url: str, row: Row, n_loads: int) -> list[dict[str, float]]:
    """What each of `n_loads` loads took, after one that is not counted."""
    return [await _load(browser, url, row) for _ in range(1 + n_loads)][1:]


async def _load(browser: Browser, url: str, row: Row) -> dict[str, float]:
    context = await browser.new_context(viewport={"width": row.width_px, "height": row.height_px})
    try:
        page = await context.new_page()
        await page.add_init_script(WATCH)
        if row.slower > 1:
            devtools = await context.new_cdp_session(page)
            await devtools.send("Emulation.setCPUThrottlingRate", {"rate": row.slower})
        seen = await _shown(page, url)
        return await _shown(page, url) if row.is_again else seen
    finally:
        await context.close()


async def _shown(page: Page, url: str) -> dict[str, float]:
    """Raises EngineFailed where what is shown is not the page as it should be."""
    try:
        await page.goto(url, wait_until="commit")
        seen: dict[str, float] = await asyncio.wait_for(page.evaluate(SEEN), WAIT_S)
    except asyncio.TimeoutError as error:
        raise EngineFailed(f"The page at {url} showed no memory in {WAIT_S:.0f} s.") from error
    await page.keyboard.press("/")
    if await page.evaluate("document.activeElement.id") != "search":
        raise EngineFailed("The page showed its state and did not take a key.")
    return seen


def summary(row: Row, seen: list[dict[str, float]]) -> dict[str, Any]:
    """Medians, and the slowest load's time until its state was shown."""
    found: dict[str, Any] = {"row": row.name, "loads": len(seen)}
    for name in TIMES:
        found[name] = round(statistics.median(each[name] for each in seen), 1)
    found["slowest_state_shown_ms"] = round(max(each["state_shown_ms"] for each in seen), 1)
    return found | {name: round(statistics.median(each[name] for each in seen)) for name in ("requests", "bytes")}


async def measure(model: str, n_loads: int) -> dict[str, Any]:
    """Every row, before a server of its own whose model is ready. Raises ConfigError where there is no browser."""
    program = chromium()
    try:
        from playwright.async_api import async_playwright
    except ImportError:
        program = None
    if program is None:
        raise ConfigError(f"`laya bench page` needs Playwright and {' or '.join(PROGRAMS)}: {INSTALL}")
    async with serving(model) as url, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        rows = [summary(row, await loads(browser, url, row, n_loads)) for row in ROWS]
        version = browser.version
        await browser.close()
    load = {"loads": n_loads, "model": model, "chromium": version, "network": "loopback"}
    return {"bench": "page", "layer": LAYER, "load": load, "rows": rows, "hardware": hardware()}


def _print(report: dict[str, Any]) -> None:
    table = Table(title="The page, medians in milliseconds from the start of the navigation", box=None)
    for column in report["rows"][0]:
        table.add_column(column.removesuffix("_ms").replace("_", " "), justify="left" if column == "row" else "right")
    for row in report["rows"]:
        table.add_row(*map(str, row.values()))
    Console(highlight=False, width=120).print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="laya bench page", description=description(__doc__))
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--loads", type=int, default=15, help="of each row (default: %(default)s)")
    parser.add_argument("--model", default="laya-nano", help="that the server has loaded (default: %(default)s)")
    options = parser.parse_args(argv)
    if options.loads < 1:
        parser.error(f"--loads: expected a number >= 1, got {options.loads}.")
    try:
        report = asyncio.run(measure(options.model, options.loads))
    except LayaError as error:
        print(error.message, file=sys.stderr)
        return error.exit_code
    if not options.json:
        _print(report)
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
