"""Owns: `laya serve` and `laya run`: settings in, a running server out, and what is printed on the way."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import laya
from laya.cli.client import DEFAULT_URL
from laya.cli.output import shown
from laya.cli.serve_config import ServedConfig
from laya.engines.builds import used
from laya.engines.child_start import die_with_parent
from laya.errors import LayaError
from laya.gateway.endpoint import Endpoint
from laya.gateway.listening import listen
from laya.gateway.live_keys import lasts
from laya.gateway.operating import ConfigSource
from laya.gateway.server import Gateway
from laya.gateway.server import run as run_server
from laya.gateway.variants import file_of
from laya.memory import GpuMeter, size_text
from laya.models import home_path
from laya.routing import NATIVE, WHY_NOT_NATIVE
from laya.types import MIB, ModelStatus

Models = Annotated[list[str] | None, typer.Argument(help="Models to load at once; others are loaded when asked for.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Default: ./config.yaml if there is one.")]
Host = Annotated[str | None, typer.Option(help="Address to listen on; other than loopback needs an API key.")]
Port = Annotated[int | None, typer.Option(min=0, max=65535, help="Port (default 8000; 0: any free one).")]
Lan = Annotated[bool, typer.Option("--lan", help="Make a key, listen on all addresses, print what to paste.")]
Budget = Annotated[str | None, typer.Option("--memory-budget", help="Bytes engines may use in all, e.g. 8GiB or 50%.")]
Ray = Annotated[str | None, typer.Option("--ray", help="Run engines on the nodes of this Ray cluster: HOST:6379.")]
Anyway = Annotated[bool, typer.Option("--anyway", help="Load what does not fit too, held to the memory that is free.")]


def serve(
    context: typer.Context,
    models: Models = None,
    config_file: ConfigFile = None,
    host: Host = None,
    port: Port = None,
    lan: Lan = False,
    memory_budget: Budget = None,
    anyway: Anyway = False,
    ray: Ray = None,
) -> None:
    """Serve models on one port. Settings of config.yaml, vLLM and llama.cpp work as flags (--max-seq-len 8192)."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    home = home_path()
    source = ServedConfig(
        [*(models or []), *context.args],
        home=home,
        beside=[name for option in context.command.params for name in option.opts],
        file=config_file,
        memory_budget=memory_budget,
        anyway=anyway,
        ray_address=ray,
        host=host,
        port=port,
        lan=lan,
    )
    names, config, lan_key = source.read()
    sock = listen(config.server.host, config.server.port)
    preload = names or [name for name in config.models if config.for_model(name).preload]
    router = "native" if NATIVE else f"plain Python ({WHY_NOT_NATIVE})"
    build = used(home)
    console.print(f" [dim]engine[/]    {build.words};  request router {router}")
    if build.kind == "cpu" and config.for_model("").engine_path is None:
        for card in GpuMeter().read():
            words = "the engine is CPU only; laya doctor says what to do"
            console.print(f" [bold red]GPU idle[/]  {shown(card.name)}: {words}")
    raise typer.Exit(
        run_server(
            config,
            home=home,
            sock=sock,
            preload=preload,
            on_loaded=lambda gateway, endpoint: _say_loaded(console, gateway, endpoint),
            on_ready=lambda gateway: _say_ready(console, gateway, sock, lan_key, preload),
            source=ConfigSource(lambda: source.read().config, source.path),
        )
    )


def _say_loaded(console: Console, gateway: Gateway, endpoint: Endpoint) -> None:
    status = next(status for status in gateway.fleet.statuses() if status.id == endpoint.model_id)
    plan = status.plan
    assert plan is not None
    file = file_of(plan, gateway.fleet.files[endpoint.model_id])
    console.print(f" [dim]model[/]     {endpoint.model_id}   {file.path.name}")
    for device in plan.devices:
        terms = "   ".join(f"{name} {n_bytes / MIB:.1f}" for name, n_bytes in device.terms.items() if n_bytes)
        share = 100 * device.total_bytes / device.budget_bytes if device.budget_bytes else 0
        console.print(
            f" [dim]plan[/]      {device.device}, {size_text(device.budget_bytes)} for engines: {terms}"
            f"   = {device.total_bytes / MIB:.0f} MiB, {share:.0f} %"
        )
    if plan.variant is not None:
        console.print(f"           [dim]quantization {plan.variant.quantization}: {shown(plan.variant.reason)}[/]")
    for name, reason in plan.reasons.items():
        console.print(f"           [dim]{name} {getattr(plan.settings, name, '')}: {reason}[/]")
    ceiling = gateway.ceilings.words(endpoint.name)
    words = f"in {endpoint.mean_load_s:.1f} s{_measured(status)}" + (f"; {ceiling}" if ceiling else "")
    console.print(f" [dim]loaded[/]    {words}")
    if status.state == "degraded":
        console.print(f" [bold red]degraded[/]  {shown(status.error or '')}")


def _measured(status: ModelStatus) -> str:
    """What the engines hold of their plan, and how much of that is pages of files: those the ceiling does not count,
    since the kernel drops them before it stops an engine."""
    if not status.measured_bytes or status.plan is None:
        return ""
    mapped = max(0, status.measured_bytes - status.anonymous_bytes)
    planned = f"{status.measured_bytes / MIB:.0f} MiB of {status.plan.ram.total_bytes / MIB:.0f} planned"
    return f", measured {planned} ({mapped / MIB:.0f} of them mapped from files)"


def _say_ready(
    console: Console, gateway: Gateway, sock: socket.socket, lan_key: str | None, preload: list[str]
) -> None:
    host, port = sock.getsockname()[:2]
    url = _url(_lan_address() if host in ("0.0.0.0", "::") else host, port)
    model = preload[0] if preload else next((e.model_id for e in gateway.fleet.endpoints.values()), None)
    has_keys = not gateway.keys.is_open
    key = lan_key or ("one of `laya key list`" if has_keys else "none needed on this machine")
    console.print(f"\n [bold green]Laya {laya.__version__} is ready[/]   {url}")
    named = f"model {json.dumps(model)}   " if model else ""
    console.print(f" OpenAI base URL     {url}/v1      {named}key: {key}")
    if lan_key:
        host_name = "host.docker.internal"  # which Docker knows on Linux where it is told
        console.print(
            f" From a container    docker run --add-host={host_name}:host-gateway"
            f" -e OPENAI_BASE_URL=http://{host_name}:{port}/v1 -e OPENAI_API_KEY={lan_key}"
        )
    for failed, fault in gateway.fleet.roster.entries.faults.items():
        console.print(f" [bold red]not served[/]         models.{shown(failed)}: {shown(fault.message)}")
    if has_keys and not any(lasts(each.grant) for each in gateway.keys.keys):
        console.print(" [bold red]no admin key[/]       `laya key create me --role admin --here` makes one")
    if model is None:
        console.print(" No model is here yet: `laya pull smollm2` gets the default one, and it can be used at once.")
    if paste := _to_paste(host, port, lan_key, has_keys=has_keys):
        console.print(f" In another shell    {paste}")
    console.print(" Try                 laya chat      laya ps      laya list")


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _to_paste(host: str, port: int, lan_key: str | None, *, has_keys: bool) -> str | None:
    """What `laya chat` and the other verbs on this machine need to find this server; None where they do by default."""
    url = _url("127.0.0.1" if host in ("0.0.0.0", "::") else host, port)
    values = [] if url == DEFAULT_URL else [f"LAYA_URL={url}"]
    if has_keys:
        values.append(f"LAYA_API_KEY={lan_key or 'YOUR_KEY'}")
    return f"export {' '.join(values)}" if values else None


def _lan_address() -> str:
    """This machine's address on its network, as far as its routing table tells; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()


def run(
    context: typer.Context, model: Annotated[str, typer.Argument(help="Model to pull, serve and chat with.")]
) -> None:
    """Pull a model if it is not here, serve it, and chat with it; the server ends with the chat."""
    from laya.cli.chat import chat_with
    from laya.cli.client import ServerClient
    from laya.cli.models import ensure_pulled

    _check_words(context.args)
    ensure_pulled(model)
    command = [sys.executable, "-m", "laya.cli", "serve", model, "--port", "0", *context.args]
    # a session of its own: Ctrl-C stops an answer of the chat, not the server, which ends with us however we end
    server = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=die_with_parent
    )
    try:
        url = _wait_for_url(server)
        chat_with(ServerClient(url=url), model)
    finally:
        server.terminate()
        server.wait()


def _check_words(words: list[str]) -> None:
    """Raise what `laya serve` would refuse of these, the model's name aside, before anything is downloaded for it."""
    from laya.cli.verbs import app_for

    group = typer.main.get_command(app_for(["serve"]))
    assert isinstance(group, typer.core.TyperGroup)
    asked = group.commands["serve"].make_context("serve", list(words))
    ServedConfig(
        [*(asked.params["models"] or []), *asked.args],
        home=home_path(),
        beside=[name for option in asked.command.params for name in option.opts],
        file=asked.params["config_file"],
        memory_budget=asked.params["memory_budget"],
        ray_address=asked.params["ray"],
    ).read()


def _wait_for_url(server: subprocess.Popen[str]) -> str:
    """Read the server's own announcement. Raises what it said when it ended instead."""
    assert server.stderr is not None
    said: list[str] = []
    for line in server.stderr:
        said.append(line)
        if "is ready" in line:
            _drain(server.stderr)
            return line.split()[-1]
    server.wait()
    error: Any = LayaError("".join(said[-5:]).strip().removeprefix("laya: ") or "the server ended without a word")
    error.exit_code = server.returncode or 1
    raise error


def _drain(pipe: Any) -> None:
    """Nobody reads the server's words from here on, and a full pipe must not stop it."""
    import threading

    threading.Thread(target=pipe.read, daemon=True).start()
