"""Builds of the engine beside Laya: installed whole or not at all, proven, chosen, and really run by."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import uvloop
from engine_wheels import A_GPU, NAMES_DEVICES, NO_GPU, index, list_wheels, repack, write_wheel

from laya.engines import builds
from laya.engines.build_install import FoundWheel, Installation, find_wheel, version_in
from laya.engines.builds import Build
from laya.engines.log import EngineLog
from laya.engines.process import EngineProcess
from laya.engines.settings import EngineSettings
from laya.errors import ConfigError, DownloadError, EngineFailed

CUDA = Build(name="cuda12.8-1.2.3", kind="cuda", toolkit="12.8", version="1.2.3")
CPU = Build(name="cpu-1.2.3", kind="cpu", version="1.2.3")


def install(home: Path, wheel: Path, build: Build = CUDA) -> Build:
    with Installation(home) as installation:
        installation.unpack(wheel)
        return installation.finish(installation.prove(build, needs_gpu=build.kind != "cpu"))


@pytest.fixture
def with_gpu(tmp_path: Path) -> Path:
    return write_wheel(tmp_path / "wheels", "1.2.3", NAMES_DEVICES.format(devices=A_GPU))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    with index(tmp_path / "index") as url:
        yield url


def left(home: Path) -> list[str]:
    return sorted(path.name for path in builds.builds_folder(home).iterdir())


def test_build_is_there_once_it_has_named_its_gpu(tmp_path: Path, with_gpu: Path) -> None:
    build = install(tmp_path, with_gpu)
    assert build.devices == ("CUDA0 NVIDIA GeForce RTX 4090",)
    assert build.n_bytes > 0
    assert builds.installed(tmp_path) == [build]
    assert left(tmp_path) == [build.name]
    assert (build.hardware, build.words) == ("CUDA 12.8", "llama.cpp (xllamacpp 1.2.3), CUDA 12.8")
    with pytest.raises(EngineFailed, match=r"another installation put cuda12\.8-1\.2\.3 there meanwhile"):
        install(tmp_path, with_gpu)
    assert left(tmp_path) == [build.name]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (NAMES_DEVICES.format(devices=NO_GPU), "found no GPU, so it was not installed: models would run on the CPU"),
        ("raise ImportError('libcudart.so.12: cannot open shared object file')", "libcudart.so.12: cannot open"),
        ("import os; os.kill(os.getpid(), 4)", "it ended with -4"),
        ("import os; os._exit(0)", "names no devices that it computes on"),
    ],
)
def test_build_that_does_not_compute_here_is_not_installed(tmp_path: Path, code: str, words: str) -> None:
    with pytest.raises(EngineFailed) as refused:
        install(tmp_path, write_wheel(tmp_path, "1.2.3", code))
    assert words in refused.value.message
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("library", "build", "is_taken"),
    [("libcuda.so.1", CUDA, True), ("libcuda.so.1", CPU, False), ("libcudart.so.12", CUDA, False)],
)
def test_only_the_driver_of_a_card_may_be_missing_where_an_image_is_built(
    tmp_path: Path, library: str, build: Build, is_taken: bool
) -> None:
    code = f"raise ImportError('{library}: cannot open shared object file: No such file or directory')"
    with Installation(tmp_path) as installation:
        installation.unpack(write_wheel(tmp_path, "1.2.3", code))
        if is_taken:
            taken = installation.finish(installation.prove(build, needs_gpu=False))
            assert (taken.devices, taken.n_bytes > 0) == ((), True)
        else:
            with pytest.raises(EngineFailed, match=f"was not installed: .*{library}"):
                installation.prove(build, needs_gpu=False)
    assert left(tmp_path) == ([build.name] if is_taken else [])


def test_build_for_cpus_needs_no_gpu(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "1.2.3", NAMES_DEVICES.format(devices=NO_GPU))
    assert install(tmp_path, wheel, CPU).devices == ()


def test_what_was_cut_off_never_counts_and_is_cleared_away(tmp_path: Path, with_gpu: Path) -> None:
    folder = builds.builds_folder(tmp_path)
    killed = "from laya.engines.build_install import Installation; import os, pathlib, signal, sys; "
    killed += "home, wheel = map(pathlib.Path, sys.argv[1:]); Installation(home).unpack(wheel); os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", killed, str(tmp_path), str(with_gpu)], check=False)
    assert done.returncode == -signal.SIGKILL
    (torn,) = left(tmp_path)
    assert (folder / torn / "build" / "xllamacpp").is_dir()
    assert builds.installed(tmp_path) == []
    assert left(tmp_path) == [torn]
    build = install(tmp_path, with_gpu)
    assert left(tmp_path) == [build.name]


def test_wheel_is_found_in_the_index_by_version_and_system(tmp_path: Path, served: str) -> None:
    root = tmp_path / "index"
    list_wheels(
        root,
        {
            "xllamacpp-1.2.3-cp310-abi3-win_amd64.whl": "",
            "xllamacpp-1.2.3-py3-none-any.whl": "#sha256=abc",
            "xllamacpp-1.3.0-py3-none-any.whl": "",
            "xllamacpp-2.0.0-cp310-abi3-win_amd64.whl": "",
            "other-1.2.3-py3-none-any.whl": "",
            "xllamacpp-1.2.3.tar.gz": "",
            "//[x/xllamacpp-1.2.3-py3-none-any.whl": "",
        },
    )
    found = find_wheel(f"{served}/", "1.2.3")
    assert found == FoundWheel(
        url=f"{served}/files/xllamacpp-1.2.3-py3-none-any.whl",
        name="xllamacpp-1.2.3-py3-none-any.whl",
        version="1.2.3",
        sha256="abc",
    )
    with pytest.raises(DownloadError, match=r"has no xllamacpp 9\.9\. It has 1\.3\.0, 1\.2\.3: --version\."):
        find_wheel(served, "9.9")
    with pytest.raises(DownloadError, match=r"has xllamacpp 2\.0\.0, but no wheel of it for Python 3\.\d+ on this"):
        find_wheel(served, "2.0.0")


def test_index_that_cannot_be_reached_is_told_with_what_helps(served: str) -> None:
    with pytest.raises(DownloadError) as refused:
        find_wheel(f"{served}/nowhere", "1.2.3")
    assert f"{served}/nowhere/xllamacpp/, cannot be reached (HTTP 404)" in refused.value.message
    assert "--wheel FILE; or name a mirror of the index: --index-url URL" in refused.value.message
    with pytest.raises(DownloadError, match=r"cannot be reached \(.*refused"):
        find_wheel("http://127.0.0.1:9/whl", "1.2.3")


def test_download_is_measured_and_a_damaged_one_refused(tmp_path: Path, served: str, with_gpu: Path) -> None:
    files = tmp_path / "index" / "files"
    files.mkdir(parents=True)
    content = with_gpu.read_bytes()
    (files / with_gpu.name).write_bytes(content)
    wheel = FoundWheel(url=f"{served}/files/{with_gpu.name}", name=with_gpu.name, version="1.2.3")
    seen: list[tuple[int, int | None]] = []
    digest = hashlib.sha256(content).hexdigest()
    with Installation(tmp_path) as installation:
        file = installation.fetch(FoundWheel(**{**_fields(wheel), "sha256": digest}), lambda *at: seen.append(at))
        assert file.read_bytes() == content
        assert (seen[0], seen[-1]) == ((0, len(content)), (len(content), len(content)))
        with pytest.raises(DownloadError, match="is damaged: its SHA-256"):
            installation.fetch(FoundWheel(**{**_fields(wheel), "sha256": "0" * 64}), lambda *at: None)
        (tmp_path / "xllamacpp-1.2.3-py3-none-any.whl").write_bytes(content[: len(content) // 2])
        with pytest.raises(DownloadError, match="cannot be unpacked"):
            installation.unpack(tmp_path / "xllamacpp-1.2.3-py3-none-any.whl")
    assert left(tmp_path) == []


def _fields(wheel: FoundWheel) -> dict[str, str]:
    return {"url": wheel.url, "name": wheel.name, "version": wheel.version}


def test_file_that_is_no_wheel_for_here_is_told(tmp_path: Path, with_gpu: Path) -> None:
    assert version_in(with_gpu) == "1.2.3"
    for name, words in {
        "numpy-1.0-py3-none-any.whl": "is a wheel of numpy",
        "xllamacpp.whl": "keeps the name it was published by",
    }.items():
        (tmp_path / name).touch()
        with pytest.raises(ConfigError, match=words):
            version_in(tmp_path / name)
    with pytest.raises(ConfigError, match=r"--wheel .*/nope\.whl: there is no such file"):
        version_in(tmp_path / "nope.whl")
    foreign = write_wheel(tmp_path, "1.0", "", tag="cp310-abi3-win_amd64")
    with pytest.raises(ConfigError, match="is for another system"):
        version_in(foreign)


def test_choice_is_kept_and_a_build_that_is_gone_is_never_replaced_by_another(tmp_path: Path, with_gpu: Path) -> None:
    assert builds.used(tmp_path) == builds.bundled()
    build = install(tmp_path, with_gpu)
    builds.use(tmp_path, builds.find(tmp_path, "cuda"))
    assert builds.used(tmp_path) == build
    with pytest.raises(ConfigError, match="is in use"):
        builds.remove(tmp_path, build)
    assert build.folder is not None
    build.folder.rename(tmp_path / "away")
    with pytest.raises(EngineFailed, match=r"'cuda12\.8-1\.2\.3', chosen by `laya engines use`, is not in"):
        builds.used(tmp_path)
    builds.use(tmp_path, builds.bundled())
    assert builds.used(tmp_path) == builds.bundled()


@pytest.mark.parametrize("record", [None, b"", b'{"name":', b"\xff\xfe", b'{"name":"a","kind":"zzz","version":"1"}'])
def test_broken_build_costs_no_other_and_can_be_removed(tmp_path: Path, with_gpu: Path, record: bytes | None) -> None:
    build = install(tmp_path, with_gpu)
    builds.use(tmp_path, build)
    assert build.folder is not None
    file = build.folder / builds.RECORD
    file.unlink()
    if record is not None:
        file.write_bytes(record)
    assert (builds.installed(tmp_path), list(builds.broken(tmp_path))) == ([], [build.name])
    with pytest.raises(EngineFailed, match=r"chosen by `laya engines use`, is broken: its build\.json"):
        builds.used(tmp_path)
    with pytest.raises(
        ConfigError, match=r"is broken: its build\.json .*`laya engines rm cuda12\.8-1\.2\.3` removes it"
    ):
        builds.find(tmp_path, "cuda")
    builds.use(tmp_path, builds.find(tmp_path, "bundled"))
    builds.remove(tmp_path, builds.find(tmp_path, "cuda", to_remove=True))
    assert left(tmp_path) == ["used"]


@pytest.mark.parametrize("content", [b"\0\xff../..", b"../../../etc", b"/etc"])
def test_choice_that_names_no_build_is_told(tmp_path: Path, content: bytes) -> None:
    builds.use(tmp_path, builds.bundled())
    (builds.builds_folder(tmp_path) / "used").write_bytes(content)
    with pytest.raises(EngineFailed, match=r"is not in .* any more") as gone:
        builds.used(tmp_path)
    assert gone.value.exit_code == 2  # a choice to be made anew, as with a wrong setting


def test_folder_that_takes_nothing_is_told_and_left_as_it_was(tmp_path: Path) -> None:
    home = tmp_path / "file"
    home.touch()
    assert builds.used(home) == builds.bundled()
    for attempt in (lambda: builds.use(home, builds.bundled()), lambda: Installation(home)):
        with pytest.raises(EngineFailed, match=r"cannot be written: Not a directory\. LAYA_HOME names another folder"):
            attempt()
    folder = builds.builds_folder(tmp_path)
    (folder / "used").mkdir(parents=True)
    with pytest.raises(EngineFailed, match="Is a directory"):
        builds.use(tmp_path, builds.bundled())
    with pytest.raises(EngineFailed, match="which names the engine build in use, cannot be read"):
        builds.used(tmp_path)
    assert left(tmp_path) == ["used"]


def test_unused_build_can_be_removed(tmp_path: Path, with_gpu: Path) -> None:
    builds.remove(tmp_path, install(tmp_path, with_gpu))
    assert left(tmp_path) == []
    with pytest.raises(ConfigError, match="came with Laya"):
        builds.remove(tmp_path, builds.bundled())
    with pytest.raises(
        ConfigError, match=r"There is no engine build 'cuda'; `laya engines install cuda` installs one\."
    ):
        builds.find(tmp_path, "cuda")


@pytest.mark.engine
def test_build_whose_driver_is_not_here_says_how_a_container_gets_it(
    tmp_path: Path, make_settings: Callable[..., EngineSettings], smollm2_path: Path, log: EngineLog
) -> None:
    (tmp_path / "xllamacpp").mkdir()
    code = "raise ImportError('libcuda.so.1: cannot open shared object file: No such file or directory')"
    (tmp_path / "xllamacpp" / "__init__.py").write_text(code)
    with pytest.raises(EngineFailed, match=r"docker run --gpus all`; `laya engines use bundled"):
        uvloop.run(EngineProcess(make_settings(smollm2_path, packages=tmp_path), log).start())


@pytest.mark.engine
def test_model_runs_by_the_build_that_is_installed(
    tmp_path: Path, make_settings: Callable[..., EngineSettings], smollm2_path: Path, log: EngineLog
) -> None:
    """The real package, out of the folder of a build instead of this environment."""
    wheel = repack(tmp_path)
    version = version_in(wheel)
    build = install(tmp_path, wheel, Build(name=f"cpu-{version}", kind="cpu", version=version))

    with pytest.raises(EngineFailed, match="is not on this machine"):
        make_settings(smollm2_path, packages=tmp_path / "gone").check()

    async def scenario() -> None:
        process = EngineProcess(make_settings(smollm2_path, packages=build.folder), log)
        address = await process.start()
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert f"{build.folder}/xllamacpp/" in maps
        async with httpx.AsyncClient(base_url=f"http://{address.host}:{address.port}", trust_env=False) as http:
            headers = {"authorization": f"Bearer {address.api_key}"}
            answer = await http.post("/v1/completions", headers=headers, json={"prompt": "1 2 3", "max_tokens": 2})
        assert answer.json()["usage"]["completion_tokens"] == 2
        await process.stop()

    uvloop.run(scenario())
