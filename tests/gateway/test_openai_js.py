"""The documented examples of OpenAI's JavaScript SDK on the real engine; they are in tests/sdk_js."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .live import Serving

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]
MISSING = "NOT TESTED: OpenAI's JavaScript SDK. `make sdk-js` installs it where node (20 or newer) and npm are."
ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "tests" / "sdk_js"
INSTALLED = ROOT / "build" / "sdk_js"  # by `make sdk-js`
EXAMPLES = re.findall(r"^export async function (\w+)", (SOURCE / "examples.mjs").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def run_example() -> Iterator[Callable[[str, str], str | None]]:
    """`run_example(name, url)`: what went wrong, in one node for all examples."""
    node = shutil.which("node")
    if node is None or not (INSTALLED / "node_modules" / "openai").exists():
        pytest.skip(MISSING)
    for script in SOURCE.glob("*.mjs"):  # beside their packages: imports are found from where a script lies
        shutil.copy(script, INSTALLED)
    with subprocess.Popen(
        [node, "run.mjs"], cwd=INSTALLED, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def run(name: str, url: str) -> str | None:
            stdin.write(json.dumps({"name": name, "url": url}) + "\n")
            stdin.flush()
            error: str | None = json.loads(stdout.readline())["error"]
            return error

        yield run
        process.kill()


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, run_example: Callable[[str, str], str | None], request: pytest.FixtureRequest) -> None:
    server: Serving = request.getfixturevalue("embedding" if name == "embeddings" else "server")
    error = run_example(name, server.url)
    assert error is None, error
