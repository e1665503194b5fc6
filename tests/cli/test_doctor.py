"""`laya doctor`: each probe on recorded trees of machines, and all of them once on this one."""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import msgspec
import pytest

from laya.cli import doctor_machine, doctor_setup
from laya.cli.doctor import examine, summary
from laya.cli.doctor_gpu import gpu
from laya.cli.finding import Finding, must_fix, ok, warn
from laya.config import Config, MemoryConfig, ServerConfig

GIB_IN_KIB = 1024 * 1024
SERVICE = "user.slice/user-1000.slice/user@1000.service/app.slice"
SCOPE = f"{SERVICE}/terminal.scope"
TREE = "sys/fs/cgroup"


class Tree:
    """A recorded file system: text by path, below a folder of the test."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return self.root


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "root")


def meminfo(available_gib: float, swap_gib: float = 0) -> str:
    kib = {"MemTotal": 64, "MemAvailable": available_gib, "SwapTotal": swap_gib, "SwapFree": swap_gib}
    return "".join(f"{name}: {int(value * GIB_IN_KIB)} kB\n" for name, value in kib.items())


def cpuinfo(*flags: str) -> str:
    return f"processor\t: 0\nmodel name\t: 12th Gen Intel(R) Core(TM) i5-12600KF\nflags\t\t: fpu {' '.join(flags)}\n"


def cgroup_v2(group: str) -> dict[str, str]:
    """A machine whose one hierarchy is v2, our process in `group`."""
    folder = f"{TREE}/{group}".rstrip("/")
    return {
        "proc/self/mountinfo": "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n",
        "proc/self/cgroup": f"0::/{group}\n",
        f"{TREE}/cgroup.controllers": "cpuset cpu io memory pids\n",
        f"{folder}/cgroup.controllers": "cpu memory pids\n",
        f"{folder}/cgroup.procs": "1234\n",
        f"{folder}/cgroup.subtree_control": "",
        f"{folder}/cgroup.type": "domain\n",
        f"{folder}/memory.max": "max\n",
        "proc/meminfo": meminfo(50),
    }


def fully(config: dict[str, object]) -> Config:
    return msgspec.convert(config, Config)


# the machine


def test_cpu_with_avx2_is_ok(tree: Tree) -> None:
    root = tree.write({"proc/cpuinfo": cpuinfo("avx", "avx2", "bmi2", "f16c", "fma")})
    finding = doctor_machine.cpu(root, Config(), "x86_64")
    assert finding.level == "ok"
    assert "i5-12600KF" in finding.seen
    assert "cores for engines" in finding.seen


def test_cpu_without_avx2_is_to_fix_unless_the_engine_is_the_users_own(tree: Tree) -> None:
    root = tree.write({"proc/cpuinfo": cpuinfo("avx", "f16c")})
    finding = doctor_machine.cpu(root, Config(), "x86_64")
    assert finding.level == "FIX"
    assert "AVX2" in finding.seen
    assert (finding.fix or "").startswith("set engine_path in config.yaml")
    own = fully({"engine_path": "/usr/local/bin/llama-server"})
    assert doctor_machine.cpu(root, own, "x86_64").level == "ok"


def test_cpu_of_a_virtual_machine_names_the_hypervisors_setting(tree: Tree) -> None:
    root = tree.write({"proc/cpuinfo": cpuinfo("hypervisor")})
    assert "-cpu host" in (doctor_machine.cpu(root, Config(), "x86_64").fix or "")


def test_memory_names_what_bounds_the_budget(tree: Tree) -> None:
    root = tree.write({"proc/meminfo": meminfo(50)})
    finding = doctor_machine.memory(root, Config())
    assert finding == ok(
        "memory", "memory 64.0 GiB, 50.0 GiB available; engines may have 40.0 GiB, bound by memory available"
    )


@pytest.mark.parametrize(
    ("files", "config", "bound", "fix"),
    [
        ({"proc/meminfo": meminfo(0.2)}, Config(), "memory available", "close a program"),
        ({"proc/meminfo": meminfo(50)}, Config(memory=MemoryConfig(budget="100MiB")), "memory.budget", "raise memory"),
        (
            cgroup_v2("box") | {f"{TREE}/box/memory.max": "268435456\n"},
            Config(),
            "cgroup /box",
            "docker update --memory",
        ),
    ],
)
def test_memory_too_little_for_the_default_model_is_to_fix(
    tree: Tree, files: dict[str, str], config: Config, bound: str, fix: str
) -> None:
    finding = doctor_machine.memory(tree.write(files), config)
    assert finding.level == "FIX"
    assert f"bound by {bound}: too little for smollm2-135m" in finding.seen
    assert (finding.fix or "").startswith(fix) or fix in (finding.fix or "")


def test_swap_on_a_disk_with_an_eager_kernel_is_to_consider(tree: Tree) -> None:
    swaps = "Filename\tType\tSize\tUsed\tPriority\n/dev/nvme0n1p3\tpartition\t8388604\t0\t-2\n"
    root = tree.write({"proc/meminfo": meminfo(50, 8), "proc/swaps": swaps, "proc/sys/vm/swappiness": "60\n"})
    finding = doctor_machine.swap(root)
    assert finding == warn(
        "swap", "8.0 GiB swap (0 MiB used), swappiness 60, on /dev/nvme0n1p3", "sudo sysctl vm.swappiness=10"
    )


@pytest.mark.parametrize(
    "files",
    [
        {"proc/meminfo": meminfo(50)},
        {"proc/meminfo": meminfo(50, 8), "proc/sys/vm/swappiness": "10\n", "proc/swaps": "Filename\n/dev/sda2 x\n"},
        {"proc/meminfo": meminfo(50, 8), "proc/sys/vm/swappiness": "180\n", "proc/swaps": "Filename\n/dev/zram0 x\n"},
    ],
)
def test_swap_that_is_absent_rarely_used_or_in_memory_is_ok(tree: Tree, files: dict[str, str]) -> None:
    assert doctor_machine.swap(tree.write(files)).level == "ok"


def test_cgroup_v2_that_the_user_was_given_can_hold_children(tree: Tree) -> None:
    given = {f"{TREE}/{SERVICE}/cgroup.procs": "", f"{TREE}/{SERVICE}/cgroup.subtree_control": "cpu memory pids\n"}
    root = tree.write(cgroup_v2(SCOPE) | given)
    finding = doctor_machine.cgroup(root, Config(), lambda path: SERVICE in str(path))
    assert finding.level == "ok"
    assert finding.seen.endswith(f"groups with a hard limit can be made in v2 /{SERVICE}")


def test_cgroup_v2_of_somebody_else_gets_a_scope_with_the_budget_as_its_limit(tree: Tree) -> None:
    root = tree.write(cgroup_v2(SCOPE) | {"run/systemd/system/.keep": ""})
    finding = doctor_machine.cgroup(root, Config(), lambda path: False)
    assert finding.level == "warn"
    assert "no limit above Laya; no group can be made for children (its folder is not writable" in finding.seen
    assert finding.fix == "systemd-run --user --scope -p MemoryMax=40960M -p MemorySwapMax=0 laya serve"


def test_cgroup_v2_with_processes_in_it_cannot_hand_memory_on(tree: Tree) -> None:
    root = tree.write(cgroup_v2("box") | {".dockerenv": ""})
    finding = doctor_machine.cgroup(root, Config(), lambda path: "box" in str(path))
    assert "(/box holds processes itself)" in finding.seen
    assert finding.fix == "start the container with --memory 40960m --memory-swap 40960m"


def test_cgroup_limit_above_is_a_ceiling_already(tree: Tree) -> None:
    root = tree.write(cgroup_v2("box") | {f"{TREE}/box/memory.max": f"{8 << 30}\n"})
    finding = doctor_machine.cgroup(root, Config(), lambda path: False)
    assert finding.level == "ok"
    assert "8.0 GiB limit at /box" in finding.seen


def test_cgroup_v1_that_is_writable_can_hold_children(tree: Tree) -> None:
    files = {
        "proc/self/mountinfo": "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n",
        "proc/self/cgroup": "4:memory:/job\n0::/\n",
        f"{TREE}/memory/job/cgroup.procs": "1\n",
        "proc/meminfo": meminfo(50),
    }
    root = tree.write(files)
    assert doctor_machine.cgroup(root, Config()).seen.endswith("can be made in v1 /job")
    finding = doctor_machine.cgroup(root, Config(), lambda path: False)
    assert (finding.fix or "").startswith("bash -c 'ulimit -d 41943040; exec laya serve'")
    (root / "run/systemd/system").mkdir(parents=True)
    finding = doctor_machine.cgroup(root, Config(), lambda path: False)
    assert finding.fix == "sudo systemd-run --scope --uid=$USER -p MemoryMax=40960M laya serve"


def test_cgroup_without_a_memory_controller_names_the_kernels_switch(tree: Tree) -> None:
    finding = doctor_machine.cgroup(tree.write({"proc/self/mountinfo": ""}), Config())
    assert finding.level == "warn"
    assert "cgroup_enable=memory" in (finding.fix or "")


def test_pressure_is_seen_or_missed(tree: Tree) -> None:
    assert "psi=1" in (doctor_machine.pressure(tree.root).fix or "")
    assert doctor_machine.pressure(tree.write({"proc/pressure/memory": "some avg10=0.00"})).level == "ok"


@pytest.mark.parametrize(
    ("tool", "fix"),
    [
        ("apt", "sudo apt install earlyoom"),
        ("dnf", "sudo dnf install earlyoom && sudo systemctl enable --now earlyoom"),
        ("pacman", "sudo pacman -S earlyoom && sudo systemctl enable --now earlyoom"),
    ],
)
def test_oom_daemon_that_is_missing_is_installed_by_the_systems_own_tool(tree: Tree, tool: str, fix: str) -> None:
    root = tree.write({"proc/1/comm": "systemd\n", f"usr/bin/{tool}": ""})
    assert doctor_machine.oom_daemon(root) == warn("oom", "no earlyoom or systemd-oomd", fix)


def test_oom_daemon_is_seen_and_not_looked_for_in_a_container(tree: Tree) -> None:
    assert doctor_machine.oom_daemon(tree.write({"run/.containerenv": ""})).level == "ok"
    root = tree.write({"proc/77/comm": "systemd-oomd\n", "proc/78/comm": "earlyoom\n"})
    assert doctor_machine.oom_daemon(root) == ok("oom", "earlyoom and systemd-oomd running")


@pytest.mark.parametrize(("free_gib", "level"), [(212, "ok"), (3, "warn"), (0.1, "FIX")])
def test_disk_is_judged_by_what_models_need(tmp_path: Path, free_gib: float, level: str) -> None:
    home = tmp_path / "not" / "there" / "yet"
    finding = doctor_machine.disk(home, lambda folder: int(free_gib * 2**30))
    assert finding.level == level
    assert str(home) in finding.seen


def test_disk_that_cannot_be_written_is_to_fix(tmp_path: Path) -> None:
    assert doctor_machine.disk(tmp_path, is_writable=lambda path: False).level == "FIX"
    (tmp_path / "file").write_text("")
    assert doctor_machine.disk(tmp_path / "file" / "home").level == "FIX"


# graphics cards


def test_gpu_that_nvidia_smi_lists_is_idle(tree: Tree) -> None:
    finding = gpu(tree.root, Config(), lambda: "NVIDIA GeForce RTX 3090, 24576, 570.86.15\n")
    assert finding.level == "FIX"
    assert finding.seen.startswith("GPU NVIDIA GeForce RTX 3090 24.0 GiB, driver 570.86.15: idle")
    assert "engine_path" in (finding.fix or "")


def test_gpu_is_not_idle_where_the_engine_is_the_users_own(tree: Tree) -> None:
    config = fully({"models": {"big": {"engine_path": "/opt/llama-server"}}})
    assert gpu(tree.root, config, lambda: "NVIDIA H200, 143771, 580.1\n").level == "ok"


@pytest.mark.parametrize(
    ("files", "level", "seen"),
    [
        ({"proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t NVIDIA A2\nIRQ: 1\n"}, "FIX", "NVIDIA A2"),
        ({"sys/class/drm/renderD128/device/vendor": "0x10de\n"}, "FIX", "NVIDIA, without its driver"),
        (
            {
                "sys/class/drm/renderD128/device/vendor": "0x1002\n",
                "sys/class/drm/renderD128/device/mem_info_vram_total": str(24 << 30),
            },
            "FIX",
            "AMD 24.0 GiB",
        ),
        ({"sys/class/drm/renderD128/device/vendor": "0x8086\n"}, "ok", "processor's own graphics"),
        ({"sys/class/drm/renderD128/device/vendor": "0x1af4\n"}, "ok", "no GPU"),
    ],
)
def test_gpu_is_found_without_nvidia_smi(tree: Tree, files: dict[str, str], level: str, seen: str) -> None:
    finding = gpu(tree.write(files | {"dev/dri/renderD128": ""}), Config(), lambda: "")
    assert finding.level == level
    assert seen in finding.seen


# Laya's set-up


def test_engine_is_loaded_for_real() -> None:
    finding = doctor_setup.engine(Config())
    assert finding.level == "ok"
    assert importlib.metadata.version("xllamacpp") in finding.seen


def test_engine_that_is_missing_or_broken_is_to_fix() -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    assert "not installed" in doctor_setup.engine(Config(), version=missing).seen
    assert "SIGILL" in doctor_setup.engine(Config(), load=lambda: (-4, "")).seen
    broken = doctor_setup.engine(Config(), load=lambda: (1, "Traceback\nImportError: libgomp.so.1: cannot open\n"))
    assert broken.seen.endswith("ImportError: libgomp.so.1: cannot open")
    assert (broken.fix or "").startswith("pip install")


def test_engine_of_the_users_own_is_named() -> None:
    assert doctor_setup.engine(fully({"engine_path": "/opt/llama-server"})) == ok(
        "engine", "engine /opt/llama-server (engine_path)"
    )


def test_router_says_why_it_is_plain_python() -> None:
    assert doctor_setup.router(True, "").level == "ok"
    finding = doctor_setup.router(False, "No module named 'laya._core'")
    assert finding.level == "warn"
    assert "No module named 'laya._core'" in finding.seen


def test_config_that_is_wrong_is_told_and_the_defaults_stand_in(tmp_path: Path) -> None:
    environ = {"LAYA_HOME": str(tmp_path)}
    assert doctor_setup.config(environ) == (
        ok("config", "no config.yaml: every value is the default"),
        Config(),
    )
    (tmp_path / "config.yaml").write_text("models: {a: {}, b: {}}\n")
    assert doctor_setup.config(environ)[0].seen.endswith("config.yaml is right, 2 models in it")
    (tmp_path / "config.yaml").write_text("max_seq_length: 10\n")
    finding, config = doctor_setup.config(environ)
    assert finding.level == "FIX"
    assert "max_seq_len" in finding.seen
    assert config == Config()


class _Laya(BaseHTTPRequestHandler):
    answer = b'{"name": "laya", "version": "9.9"}'
    authorizations: list[str | None] = []

    def do_GET(self) -> None:
        self.authorizations.append(self.headers.get("authorization"))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def answering() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), _Laya)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def test_port_of_a_running_laya_is_ok_and_gets_no_key(answering: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYA_API_KEY", "sk-secret")
    finding = doctor_setup.port(Config(server=ServerConfig(port=answering)))
    assert finding == ok("port", f"port {answering}: Laya 9.9 is running there")
    assert _Laya.authorizations == [None]


def test_port_of_another_program_is_to_fix() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        taken.settimeout(0)
        number = taken.getsockname()[1]
        finding = doctor_setup.port(Config(server=ServerConfig(port=number)))
    assert finding.level == "FIX"
    assert f"Port {number} is in use" in finding.seen
    assert finding.fix == f"laya serve --port {number + 1}"


def test_port_is_free_or_open_without_a_key() -> None:
    assert doctor_setup.port(Config(server=ServerConfig(port=0))).seen.endswith("free, loopback only")
    assert doctor_setup.port(Config(server=ServerConfig(host="0.0.0.0", port=0))).fix == "laya config hash-key"


def test_models_without_any_names_the_pull(tmp_path: Path) -> None:
    config = Config(models_dir=str(tmp_path / "models"))
    assert doctor_setup.models(config, tmp_path / "home") == must_fix(
        "models", "no model here, smollm2 neither", "laya pull smollm2"
    )
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.gguf").write_bytes(b"GGUF")
    assert doctor_setup.models(config, tmp_path / "home").level == "warn"


def test_models_with_the_default_one_are_ok(laya_home: Path, tmp_path: Path) -> None:
    finding = doctor_setup.models(Config(models_dir=str(tmp_path)), laya_home)
    assert finding.level == "ok"
    assert "smollm2 among them" in finding.seen


def test_models_of_other_programs_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE", "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert doctor_setup.found(tmp_path / "home") == []
    for name in (".cache/llama.cpp/a.gguf", ".lmstudio/models/org/repo/b.gguf"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"GGUF")
    assert doctor_setup.found(tmp_path / "home") == [
        ok("found", "2 models elsewhere (LM Studio 1, llama.cpp 1)", "laya list --found")
    ]


def test_hub_shows_no_secret(tmp_path: Path) -> None:
    environ = {"HF_TOKEN": "hf_secret", "HF_ENDPOINT": "https://me:secret@hub.example/x", "HOME": str(tmp_path)}
    finding = doctor_setup.hub(environ)
    assert finding.seen == "hub: HF_ENDPOINT https://hub.example, HF_TOKEN set (not contacted)"
    assert doctor_setup.hub(environ | {"HF_ENDPOINT": "hub.example"}).level == "FIX"
    assert doctor_setup.hub(environ | {"HF_HUB_OFFLINE": "1"}).level == "warn"


def test_hub_sees_a_login_that_is_kept(tmp_path: Path) -> None:
    assert "HF_TOKEN not set (" in doctor_setup.hub({"HOME": str(tmp_path)}).seen
    (tmp_path / "token").write_text("hf_secret")
    finding = doctor_setup.hub({"HF_HOME": str(tmp_path)})
    assert "a login is kept" in finding.seen
    assert "secret" not in finding.seen


# all of it


def test_summary_counts() -> None:
    findings = [ok("a", "b"), must_fix("c", "d", "e"), warn("f", "g", "h"), warn("i", "j", "k")]
    assert summary(findings) == "1 to fix, 2 to consider."


def test_examine_finds_something_to_say_of_an_empty_tree(tmp_path: Path) -> None:
    findings = examine(tmp_path, {"LAYA_HOME": str(tmp_path / "home")})
    assert all(finding.fix for finding in findings if finding.level != "ok")


@pytest.mark.parametrize("has_model", [True, False])
def test_doctor_of_this_machine(has_model: bool, laya_home: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("server: {port: 0}\n")
    home = laya_home if has_model else tmp_path / "home"
    environ = os.environ | {"LAYA_HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path), "HF_TOKEN": "hf_secret"}
    command = [sys.executable, "-m", "laya.cli", "doctor"]
    done = [
        subprocess.run([*command, *flags], capture_output=True, text=True, cwd=tmp_path, env=environ, check=False)
        for flags in ([], ["--json"])
    ]
    findings = msgspec.convert(json.loads(done[1].stdout), list[Finding])
    topics = [finding.topic for finding in findings if finding.topic != "found"]
    assert topics == [
        *("cpu", "memory", "swap", "cgroup", "pressure", "oom", "disk", "gpu"),
        *("python", "engine", "router", "config", "port", "models", "hub"),
    ]
    must = [finding.topic for finding in findings if finding.level == "FIX"]
    assert ("models" in must) is not has_model
    assert [each.returncode for each in done] == [1 if must else 0] * 2
    assert done[0].stdout.rstrip().endswith(summary(findings))
    assert "hf_secret" not in done[0].stdout + done[1].stdout
    assert done[0].stderr == ""
