"""`laya engines`: what is here, installed from an index or a file, chosen, removed; and what doctor makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_wheels import A_GPU, NAMES_DEVICES, NO_GPU, index, list_wheels, repack, write_wheel

from laya.cli.main import main
from laya.engines import builds
from laya.engines.hardware import Hardware, NvidiaCard
from tests.conftest import RunningServer

HERE = Hardware(
    machine="x86_64",
    glibc=(2, 36),
    nvidia=(NvidiaCard(name="NVIDIA GeForce RTX 4090", capability=(8, 9)),),
    nvidia_driver="570.86.15",
    cuda=(12, 8),
)
BUILD = "cuda12.8-1.2.3"
Laya = Callable[..., tuple[int, str, str]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of Laya, with nothing in it; the current folder has no configuration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAYA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "home"


@pytest.fixture
def laya(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Laya:
    """On a machine with a card of NVIDIA."""
    monkeypatch.setattr("laya.cli.engines.look", lambda: HERE)

    def run(*argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["engines", *argv])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


@pytest.fixture
def index_url(tmp_path: Path) -> Iterator[str]:
    """An index with the wheel 1.2.3, which finds a GPU."""
    wheel = write_wheel(tmp_path / "index/files", "1.2.3", NAMES_DEVICES.format(devices=A_GPU))
    list_wheels(tmp_path / "index", {wheel.name: ""})
    with index(tmp_path / "index") as url:
        yield url


def test_build_is_installed_shown_used_and_removed(laya: Laya, home: Path, index_url: str) -> None:
    code, out, err = laya("install", "cuda", "--version", "1.2.3", "--index-url", index_url)
    assert code == 0, err
    assert "hardware NVIDIA GeForce RTX 4090 (8.9); driver 570.86.15, CUDA 12.8" in err
    assert f"wheel    xllamacpp-1.2.3-py3-none-any.whl   0 MiB   {index_url}/files/" in err
    assert "found    CUDA0 NVIDIA GeForce RTX 4090" in err
    assert out == f"{BUILD}: installed, 0 MiB; used from the next load on\n"
    _, out, _ = laya("list")
    bundled, build = (line.split() for line in out.splitlines()[1:3])
    assert bundled[:2] == ["llama.cpp", "bundled"]
    assert build[:6] == ["*", "llama.cpp", BUILD, "1.2.3", "CUDA", "12.8"]
    code, _, err = laya("install", "cuda", "--version", "1.2.3", "--index-url", index_url)
    assert (code, f"{BUILD} is installed already: `laya engines use {BUILD}`" in err) == (2, True)
    code, _, err = laya("rm", BUILD)
    assert (code, "is in use" in err) == (2, True)
    assert laya("use", "bundled")[:2] == (0, f"bundled: {builds.bundled().words}; used from the next load on\n")
    assert laya("rm", "cuda") == (0, f"{BUILD}: removed, 0 MiB\n", "")
    assert builds.installed(home) == []


def test_file_is_installed_where_no_index_can_be_reached(laya: Laya, home: Path, tmp_path: Path) -> None:
    code, _, err = laya("install", "cuda", "--index-url", "http://127.0.0.1:9/whl")
    assert (code, "http://127.0.0.1:9/whl/xllamacpp/, cannot be reached" in err) == (1, True)
    assert not builds.builds_folder(home).exists()
    wheel = write_wheel(tmp_path, "1.2.3", NAMES_DEVICES.format(devices=A_GPU))
    code, out, _ = laya("install", "cuda", "--wheel", str(wheel), "--no-use", "--json")
    row = json.loads(out)
    assert (code, row["build"], row["is_used"], row["devices"]) == (0, BUILD, False, ["CUDA0 NVIDIA GeForce RTX 4090"])
    assert builds.used(home).name == "bundled"


def test_build_that_finds_no_gpu_leaves_nothing(laya: Laya, home: Path, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "1.2.3", NAMES_DEVICES.format(devices=NO_GPU))
    code, _, err = laya("install", "cuda", "--wheel", str(wheel))
    assert (code, "models would run on the CPU" in err) == (1, True)
    assert builds.installed(home) == []
    assert builds.used(home).name == "bundled"
    code, _, err = laya("install", "cuda", "--wheel", str(wheel), "--no-check", "--toolkit", "12.8", "--no-use")
    assert "no GPU was seen here" in err
    assert (code, [build.name for build in builds.installed(home)]) == (0, [BUILD])


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("install", "cud"), 2, "'cud' is none of cuda, rocm, vulkan, cpu. Did you mean cuda?"),
        (("install", "cpu"), 2, "A build for CPUs came with Laya; another one is installed by `--wheel FILE`."),
        (("install", "cuda", "--no-check"), 2, "say which: `--toolkit` of cuda"),
        (("install", "cuda", "--toolkit", "11.8"), 2, "There are no wheels for cuda 11.8"),
        (("install", "CUDA"), 2, "Did you mean cuda?"),
        (("install", "cuda", "--version", "new"), 2, "--version 'new': expected a version of xllamacpp, such as 20"),
        (("install", "cuda", "--index-url", "mirror"), 2, "--index-url 'mirror': expected an address"),
        (("install", "cuda", "--index-url", ""), 2, "--index-url '': expected an address"),
        (("install", "cuda", "--index-url", "http://[::1/"), 1, "cannot be reached (Invalid port"),
        (("install", "cuda", "--wheel", "x.whl", "--index-url", "http://a"), 2, "leave one out"),
        (("install", "cpu", "--wheel", "x.whl"), 2, "--wheel x.whl: there is no such file."),
        (("install", "cpu", "--wheel", "x.whl", "--toolkit", "12.8"), 2, "--toolkit 12.8: a build for CPUs needs none"),
        (("install", "vulkan", "--no-check", "--toolkit", "1.2"), 2, "--toolkit 1.2: the builds for vulkan need none"),
        (("use", ""), 2, "There is no engine build ''. There are: bundled."),
        (("use", "cuda"), 2, "There is no engine build 'cuda'; `laya engines install cuda` installs one. There are"),
        (("install", "rocm"), 1, "The kernel shows no AMD GPU that computes"),
        (("use", "bundle-d"), 2, "There is no engine build 'bundle-d'; did you mean bundled? There are: bundled."),
    ],
)
def test_what_is_wrong_is_told(laya: Laya, words: tuple[str, ...], code: int, said: str) -> None:
    ended, _, err = laya(*words)
    assert (ended, said in err) == (code, True), err


def test_programs_of_ones_own_and_a_choice_that_is_gone_are_listed(laya: Laya, home: Path, tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text("")
    program.chmod(0o755)
    (tmp_path / "config.yaml").write_text(f"models: {{a: {{engine_path: {program}}}, b: {{engine_path: {program}}}}}")
    builds.use(home, builds.Build(name=BUILD, kind="cuda", version="1.2.3"))
    _, out, _ = laya("list", "--json")
    rows: dict[str, Any] = {row["build"]: row for row in json.loads(out)["engines"]}
    assert rows[BUILD]["is_used"] and rows[BUILD]["note"] == "chosen, and gone: no model loads until another is used"
    assert rows[str(program)]["note"] == "engine_path of models.a, models.b"


@pytest.mark.engine
@pytest.mark.parametrize(
    ("kind", "words", "error"),
    [
        (("cuda", "--toolkit", "12.8"), (), "No layer is on a GPU, though the engine is built for one: "),
        (("vulkan",), (), "one: what a card holds is not known to a build for Vulkan; gpu_layers: all puts them there"),
        (("vulkan",), ("--gpu-layers", "all"), "None of the layers planned for a GPU is on one"),
    ],
)
def test_model_that_a_gpu_build_runs_without_a_gpu_is_degraded(
    laya: Laya,
    home: Path,
    tmp_path: Path,
    laya_home: Path,
    kind: tuple[str, ...],
    words: tuple[str, ...],
    error: str,
) -> None:
    """The real engine under the name of a build for a card: as after an update that took the driver away."""
    home.mkdir()
    (home / "models").symlink_to(laya_home / "models")
    wheel = repack(tmp_path)
    code, _, err = laya("install", *kind, "--wheel", str(wheel), "--no-check")
    assert code == 0, err
    server = RunningServer(home, ("smollm2", "--max-seq-len", "256", "--max-num-seqs", "1", *words), tmp_path)
    try:
        server.wait_ready()
        model = next(each for each in server.state()["models"] if each["state"] != "unloaded")
        assert model["state"] == "degraded"
        assert error in model["error"]
        said = "".join(server.said)
        assert f", {builds.used(home).hardware};  request router" in said
    finally:
        assert server.stop() == 0
