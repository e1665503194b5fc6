"""A client in a network of its own, as a container's, and Laya on the machine: what docs/clients.md says of each way.

The network is a namespace behind a pair of virtual cables, which is what Docker makes too; its bridge and its firewall
rules are not here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, RunningServer

NAME = f"laya-{os.getpid()}"
HOST, INSIDE = "198.51.100.1", "198.51.100.2"  # of a range that is for examples
CLIENT = """
import openai, sys
client = openai.OpenAI(max_retries=0, timeout=60)
try:
    answer = client.chat.completions.create(
        model="laya-nano", messages=[{"role": "user", "content": "The river"}], max_tokens=4
    )
except openai.OpenAIError as error:
    sys.exit(f"{type(error).__name__}: {error.__cause__ or error}")
print(answer.usage.completion_tokens)
"""

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="a network namespace needs root and iproute2"
)


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


@pytest.fixture(scope="module")
def container() -> Iterator[list[str]]:
    """What runs a command in it."""
    ip(f"netns add {NAME}")
    try:
        ip(f"link add {NAME} type veth peer name eth0 netns {NAME}")
        ip(f"addr add {HOST}/30 dev {NAME}")
        ip(f"link set {NAME} up")
        ip(f"-n {NAME} addr add {INSIDE}/30 dev eth0")
        for device in ("eth0", "lo"):
            ip(f"-n {NAME} link set {device} up")
        yield ["ip", "netns", "exec", NAME]
    finally:
        ip(f"netns del {NAME}")  # and both ends of the cable


def asked(container: list[str], server: RunningServer, key: str = "none") -> subprocess.CompletedProcess[str]:
    """A request by OpenAI's SDK, from in there, to the machine's address."""
    url = f"http://{HOST}:{server.url.rpartition(':')[2]}/v1"
    environ = os.environ | {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
    words = [*container, sys.executable, "-c", CLIENT]
    return subprocess.run(words, env=environ, capture_output=True, text=True, check=False)


def serve(home: Path, *words: str) -> RunningServer:
    server = RunningServer(home, ("laya-nano", *words), home)
    server.wait_ready()
    return server


def test_a_server_on_loopback_refuses_at_once(container: list[str], tmp_path: Path) -> None:
    server = serve(tmp_path)
    try:
        refused = asked(container, server)
        assert (refused.returncode, "APIConnectionError: [Errno 111] Connection refused" in refused.stderr) == (1, True)
    finally:
        assert server.stop() == 0


def test_lan_answers_a_container_that_has_the_key(container: list[str], tmp_path: Path) -> None:
    server = serve(tmp_path, "--lan")
    try:
        assert "AuthenticationError" in asked(container, server).stderr
        answered = asked(container, server, (tmp_path / "lan_key").read_text().strip())
        assert answered.stdout == "4\n", answered.stderr
    finally:
        assert server.stop() == 0


def test_an_address_of_the_bridge_alone_answers_with_a_key_of_ones_own(container: list[str], tmp_path: Path) -> None:
    words = [sys.executable, "-m", "laya.cli", "key", "create", "me"]
    environ = os.environ | {"LAYA_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    made = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True, check=True)
    server = serve(tmp_path, "--host", HOST)
    try:
        assert server.url.startswith(f"http://{HOST}:")
        answered = asked(container, server, made.stdout.strip())
        assert answered.stdout == "4\n", answered.stderr
    finally:
        assert server.stop() == 0
