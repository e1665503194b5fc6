"""Owns: `laya engines`: which builds of engines are here and for what hardware; installs, chooses and removes them.

Speaks to no server: a choice counts from the next load on, whoever loads.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from packaging.version import InvalidVersion, Version
from rich.console import Console
from rich.table import Table

from laya.cli.download_bar import download_bar
from laya.cli.output import print_json, print_table, printable, shown
from laya.config import Config, load_config
from laya.engines import builds
from laya.engines.build_install import FoundWheel, Installation, find_wheel, version_in
from laya.engines.builds import Build
from laya.engines.gpu_wheels import GPU_KINDS, GpuWheel, choose, named
from laya.engines.hardware import Hardware, look, version_text
from laya.engines.vllm_build import find_build
from laya.errors import ConfigError, InvalidRequest, nearest
from laya.memory import size_text
from laya.models import home_path

engines_app = typer.Typer(
    help="Builds of engines: list, install for a GPU, choose, remove.", no_args_is_help=True, add_completion=False
)
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Name = Annotated[str, typer.Argument(help="A build, as `laya engines list` names it; a beginning will do.")]


@engines_app.command("list")
def list_builds(as_json: Json = False) -> None:
    """Show the builds of engines that are here, what each computes on, and which one is used."""
    rows = _llamacpp_rows(home_path()) + _own_rows(load_config(None, os.environ)) + _vllm_rows(home_path())
    if as_json:
        print_json({"engines": rows})
        return
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("", "ENGINE", "BUILD", "VERSION", "COMPUTES ON", "SIZE", ""):
        table.add_column(column, justify="right" if column == "SIZE" else "left")
    for row in rows:
        size = size_text(row["bytes"]) if row["bytes"] else "-"
        words = [row["engine"], row["build"], row["version"] or "-", row["hardware"]]
        table.add_row("*" if row["is_used"] else "", *map(shown, words), size, shown(row["note"]))
    print_table(console, table)
    console.print("[dim]* runs the models that name no other: laya engines use BUILD[/]")


def _llamacpp_rows(home: Path) -> list[dict[str, Any]]:
    used, there, faults = builds.used_name(home), [builds.bundled(), *builds.installed(home)], builds.broken(home)
    rows = [
        _row("llama.cpp", build.name, build.version, build.hardware, build, is_used=build.name == used)
        for build in there
    ]
    if used not in {build.name for build in there}:
        gone = "broken" if used in faults else "gone"
        note = f"chosen, and {gone}: no model loads until another is used"
        rows.append(_row("llama.cpp", used, "", "-", None, is_used=True, note=note))
    return rows + [
        _row("llama.cpp", name, "", "-", note=f"broken: {fault}. {builds.mend_words(name)}")
        for name, fault in faults.items()
        if name != used
    ]


def _row(
    engine: str, name: str, version: str, hardware: str, build: Build | None = None, *, is_used: bool = False,
    note: str = "",
) -> dict[str, Any]:  # fmt: skip
    folder = str(build.folder) if build is not None and build.folder is not None else None
    devices = list(build.devices) if build is not None else []
    return {
        "engine": engine,
        "build": name,
        "version": version,
        "hardware": hardware,
        "is_used": is_used,
        "devices": devices,
        "bytes": build.n_bytes if build is not None else 0,
        "folder": folder,
        "note": note or ", ".join(devices) or ("came with Laya" if name == builds.BUNDLED else ""),
    }


def _own_rows(config: Config) -> list[dict[str, Any]]:
    """Programs that the configuration names."""
    own: dict[Path, list[str]] = {}
    for model_id in ("", *config.models):
        settings = config.for_model(model_id)
        if settings.engine_path is not None and settings.engine == "llamacpp":
            own.setdefault(settings.engine_path, []).append(f"models.{model_id}" if model_id else "all models")
    rows = []
    for path, users in own.items():
        rows.append(_row("llama.cpp", str(path), "", "as you built it", note=f"engine_path of {', '.join(users)}"))
    return rows


def _vllm_rows(home: Path) -> list[dict[str, Any]]:
    try:
        build = find_build(None, home)
    except ConfigError:
        return []
    hardware = "CPU" if build.is_cpu else "GPU"
    return [_row("vllm", str(build.python.parent.parent), build.version, hardware, note="models with engine: vllm")]


@engines_app.command()
def install(
    kind: Annotated[str, typer.Argument(help="cuda, rocm or vulkan; cpu with --wheel.")],
    toolkit: Annotated[str | None, typer.Option(help="Of CUDA or ROCm, such as 12.8; chosen by the driver.")] = None,
    version: Annotated[str | None, typer.Option(help="Of xllamacpp; the one that came with Laya.")] = None,
    wheel: Annotated[Path | None, typer.Option(help="A wheel's file, instead of the index.")] = None,
    index_url: Annotated[str | None, typer.Option(help="A mirror of the index of these wheels.")] = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="That it computes on a GPU here.")] = True,
    use_it: Annotated[bool, typer.Option("--use/--no-use", help="Run models by it from the next load on.")] = True,
    as_json: Json = False,
) -> None:
    """Install a build of llama.cpp for a GPU beside Laya, after a look at cards, driver and system; then use it."""
    home, console = home_path(), Console(stderr=True, highlight=False, soft_wrap=True)
    line = _line_of(kind, toolkit, wheel, console, check=check)
    wanted = _version_of(wheel, version, index_url)
    label = line.label if line is not None else "cpu"
    name = f"{label}-{wanted}"
    if any(build.name == name for build in builds.installed(home)):
        raise ConfigError(f"{name} is installed already: `laya engines use {name}`.")
    if fault := builds.broken(home).get(name):
        raise ConfigError(f"{name} is there, and broken: {fault}. {builds.mend_words(name)}")
    kind_of = line.kind if line is not None else "cpu"
    build = Build(name=name, kind=kind_of, toolkit=version_text(line.toolkit) if line else "", version=wanted)
    found = (
        None
        if wheel is not None or line is None
        else find_wheel(index_url if index_url is not None else line.index_url, wanted)
    )
    with Installation(home) as installation:
        installation.unpack(_fetched(installation, console, build, found, wheel))
        build = installation.finish(installation.prove(build, needs_gpu=check and line is not None))
    if build.kind in ("rocm", "vulkan"):
        console.print(
            " [yellow]note[/]     layers go to the card by `gpu_layers: all` or a number; its memory is not planned"
        )
    if line is not None and not build.devices:
        console.print(" [yellow]note[/]     no GPU was seen here; where models run, it and its driver have to be")
    for device in build.devices:
        console.print(f" [green]found[/]    {shown(device)}")
    if use_it:
        builds.use(home, build)
    if as_json:
        print_json(_row("llama.cpp", build.name, build.version, build.hardware, build, is_used=use_it))
        return
    then = "used from the next load on" if use_it else f"laya engines use {build.name}"
    print(f"{build.name}: installed, {size_text(build.n_bytes)}; {then}")


def _version_of(wheel: Path | None, version: str | None, index_url: str | None) -> str:
    """Of xllamacpp, as it is to be installed. Raises ConfigError for words that are none, or fight."""
    if index_url is not None and not index_url.startswith(("http://", "https://")):
        raise ConfigError(f"--index-url '{index_url}': expected an address that begins with https:// or http://")
    if wheel is not None and index_url is not None:
        raise ConfigError("--wheel is a file and --index-url an index: leave one out")
    try:
        said = str(Version(version)) if version is not None else None
    except InvalidVersion:
        like = f", such as {builds.bundled().version}"
        raise ConfigError(f"--version '{version}': expected a version of {builds.PACKAGE}{like}") from None
    if wheel is not None:
        found = version_in(wheel)
        if said not in (None, found):
            raise ConfigError(f"--version {version}: the wheel is of {found}; leave it out with --wheel")
        return found
    if said is None and builds.bundled().version == builds.MISSING:
        raise ConfigError(f"Laya came with no {builds.PACKAGE} here, so say which to install: --version")
    return said or builds.bundled().version


def _line_of(
    kind: str, toolkit: str | None, wheel: Path | None, console: Console, *, check: bool
) -> GpuWheel | None:  # fmt: skip
    """The line of wheels that suits this machine; None: a build for CPUs. Raises NotSupported, InvalidRequest."""
    if kind == "cpu":
        if wheel is None:
            raise InvalidRequest("A build for CPUs came with Laya; another one is installed by `--wheel FILE`.")
        if toolkit is not None:
            raise InvalidRequest(f"--toolkit {toolkit}: a build for CPUs needs none; leave it out.")
        return None
    if kind not in GPU_KINDS:
        close = nearest(kind, (*GPU_KINDS, "cpu"))
        mean = f" Did you mean {close}?" if close else ""
        raise InvalidRequest(f"'{kind}' is none of {', '.join(GPU_KINDS)}, cpu.{mean}")
    gpu_kind = next(each for each in GPU_KINDS if each == kind)
    if not check:
        if toolkit is None and gpu_kind != "vulkan":
            raise InvalidRequest(f"--no-check looks at nothing here, so say which: `--toolkit` of {kind}.")
        return named(gpu_kind, toolkit or "")
    hardware = look()
    line = choose(gpu_kind, hardware)
    console.print(f" hardware {shown(_hardware_words(gpu_kind, hardware))}")
    return line if toolkit is None else named(gpu_kind, toolkit)


def _hardware_words(kind: str, hardware: Hardware) -> str:
    if kind == "cuda":
        cards = ", ".join(f"{card.name} ({version_text(card.capability)})" for card in hardware.nvidia)
        return f"{cards}; driver {hardware.nvidia_driver}, CUDA {version_text(hardware.cuda)}"
    if kind == "rocm":
        return f"{', '.join(hardware.amd)}; ROCm {version_text(hardware.rocm)}"
    return f"Vulkan drivers: {', '.join(hardware.vulkan)}"


def _fetched(
    installation: Installation, console: Console, build: Build, found: FoundWheel | None, wheel: Path | None
) -> Path:
    """The file of the wheel; how large a download is stands there before it begins."""
    if found is None:
        assert wheel is not None, "without an index there is a file"
        return wheel.absolute()
    with download_bar(console) as bar:
        bar.begin(build.name)

        def progress(done_bytes: int, all_bytes: int | None) -> None:
            if not done_bytes:
                size = size_text(all_bytes) if all_bytes else "size not known"
                console.print(f" wheel    {shown(found.name)}   {size}   {shown(found.url)}")
            bar.update(done_bytes, all_bytes)

        return installation.fetch(found, progress)


@engines_app.command()
def use(name: Name) -> None:
    """Run models by this build from their next load on; `bundled` is the one that came with Laya."""
    home = home_path()
    build = builds.find(home, name)
    builds.use(home, build)
    print(f"{printable(build.name)}: {build.words}; used from the next load on")


@engines_app.command()
def rm(name: Name) -> None:
    """Remove a build that is not in use."""
    home = home_path()
    build = builds.find(home, name, to_remove=True)
    builds.remove(home, build)
    print(f"{printable(build.name)}: removed, {size_text(build.n_bytes)}")
