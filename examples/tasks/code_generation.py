"""Let a model write the body of a function from its docstring, and run the docstring's examples to see whether it did.

    laya serve smollm2 &
    python examples/tasks/code_generation.py --model smollm2
    python examples/tasks/code_generation.py stub.py --tries 8      # a file that ends with a function's docstring

The first try is the model's likeliest answer, the others are drawn. What it wrote is run in a process of its own, with
limits on time, memory and files: that stops accidents, not an attacker, so run a stranger's model in a container.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

STUB = '''def double(number):
    """Return twice the number.

    >>> double(2)
    4
    >>> double(-3)
    -6
    """
'''
STOP = ["\ndef ", "\nclass ", "\nif ", "\nprint", "\n#", "\n>>>", "\n```"]  # where a body is over
RUN_DOCTESTS = "import doctest, sys, task; sys.exit(doctest.testmod(task).failed > 0)"
CPU_S, WALL_S = 2, 20
MEMORY_BYTES = 512 * 2**20
FILE_BYTES = 2**16
SHOWN_CHARS = 600


def written(url: str, model: str, stub: str, try_number: int, max_tokens: int) -> str:
    """The model's body for the stub, as source text that follows it."""
    key = os.environ.get("LAYA_API_KEY")
    body: dict[str, Any] = {
        "model": model,
        "prompt": stub.rstrip() + "\n",
        "max_tokens": max_tokens,
        "stop": STOP,
        "temperature": 0.8 if try_number else 0,
        "seed": try_number,
    }
    try:
        response = httpx.post(
            f"{url}/v1/completions",
            json=body,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=600,
            trust_env=False,
        )
        answer = response.json()
    except (httpx.HTTPError, ValueError) as error:
        sys.exit(f"no answer from {url}: {error}")
    if response.status_code != 200:
        sys.exit(f"/v1/completions: {answer['error']['message']}")
    text: str = answer["choices"][0]["text"]
    return text


def fault_of(source: str) -> str | None:
    """None where the source's examples give what they should; else what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "task.py").write_text(source)
        # -B: no file is written; the environment is empty, so no key or path of ours is there to be read
        command = [sys.executable, "-B", "-c", RUN_DOCTESTS]
        with Path(folder, "said").open("w+b") as said:
            child = subprocess.Popen(
                command, cwd=folder, env={}, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT,
                preexec_fn=limit_myself, start_new_session=True,
            )  # fmt: skip
            try:
                child.wait(WALL_S)
            except subprocess.TimeoutExpired:
                return f"it was not done after {WALL_S} s"
            finally:
                with contextlib.suppress(ProcessLookupError):  # nothing is left of it
                    os.killpg(child.pid, signal.SIGKILL)  # with what it started
                child.wait()
            said.seek(0)
            words = said.read().decode(errors="replace").strip()
    if child.returncode == 0:
        return None
    if child.returncode < 0:
        return f"it was stopped by signal {-child.returncode}, as after {CPU_S} s of CPU"
    return words[-SHOWN_CHARS:] or f"it ended with {child.returncode}"


def limit_myself() -> None:
    """In the child, before it runs what a model wrote."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stub", type=Path, nargs="?", help="a file that ends with the docstring of a function")
    parser.add_argument("--url", default=os.environ.get("LAYA_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tries", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=96, help="most tokens of one try (%(default)s)")
    args = parser.parse_args()
    stub = args.stub.read_text() if args.stub else STUB
    if ">>>" not in stub:
        sys.exit("the docstring has no examples (>>>), so nothing would say whether the function is right")
    for number in range(args.tries):
        source = stub.rstrip() + "\n" + written(args.url, args.model, stub, number, args.max_tokens).rstrip() + "\n"
        fault = fault_of(source)
        if fault is None:
            print(source)
            print(f"# try {number + 1}: its examples hold")
            return
        print(f"try {number + 1}: {fault.splitlines()[-1]}", file=sys.stderr)
    sys.exit(f"no function in {args.tries} tries whose examples hold")


if __name__ == "__main__":
    main()
