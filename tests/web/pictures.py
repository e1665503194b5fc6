"""Takes the pictures of docs/page.md from a server that runs: `python -m tests.web.pictures http://127.0.0.1:8000`.

The first model that is loaded says something for them; the one that does not fit is tried. Colours are made fewer, so
that the files stay small.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parent.parent.parent / "docs" / "images"
WAIT_MS = 120_000
N_COLOURS = 96


def main(url: str) -> None:
    """Each picture by its name: light as it is, dark with a model that is too big, and a phone."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for name, scheme, width, height in (
            ("page-light", "light", 1360, 900),
            ("page-fit-dark", "dark", 1360, 900),
            ("page-phone-dark", "dark", 390, 1500),
        ):
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            context.set_default_timeout(WAIT_MS)
            page = context.new_page()
            page.goto(url)
            page.locator(".device-room:not(:empty)").wait_for()
            page.locator(".curve polyline.now").wait_for(state="attached")
            if name == "page-light":
                chat(page)
            if name == "page-fit-dark":
                page.locator(".state.unloaded").first.wait_for()
                page.locator(".model", has=page.locator(".state.unloaded")).first.get_by_text("Fit").click()
                page.locator(".ghost.too-big, .ghost.fits").first.wait_for()
            page.evaluate("scrollTo(0, 0)")
            page.wait_for_timeout(1500)  # transitions, and the next look at the server
            save(page.screenshot(), IMAGES / f"{name}.png")
            context.close()
        browser.close()


def chat(page: Any) -> None:
    page.get_by_label("Message").fill("Name three rivers of Europe and say one sentence about each.")
    page.keyboard.press("Enter")
    page.get_by_text("tokens/s").first.wait_for()


def save(picture: bytes, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    few = Image.open(io.BytesIO(picture)).convert("RGB").quantize(N_COLOURS, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    print(f"{path.name} {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main(sys.argv[1])
