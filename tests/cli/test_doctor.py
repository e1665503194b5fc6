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
from kept_rates import keep, some_rates

from laya.cli import doctor_machine, doctor_memory, doctor_power, doctor_setup
from laya.cli.doctor import examine, summary
from laya.cli.doctor_gpu import gpu, gpu_strain
from laya.cli.finding import Finding, must_fix, ok, warn
from laya.config import Config, MemoryConfig, ServerConfig
from laya.engines.builds import MISSING, RECORD, Build, builds_folder, bundled, use
from laya.engines.hardware import Hardware, NvidiaCard
from laya.errors import EngineFailed

GIB_IN_KIB = 1024 * 1024
SERVICE = "user.slice/user-1000.slice/user@1000.service/app.slice"
SCOPE = f"{SERVICE}/terminal.scope"
TREE = "sys/fs/cgroup"
CPU_BUILD = bundled()
CUDA_BUILD = Build(name="cuda12.8-1.2.3", kind="cuda", toolkit="12.8", version="1.2.3", folder=Path("/a/build"))


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
    finding = doctor_memory.memory(root, Config())
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
    finding = doctor_memory.memory(tree.write(files), config)
    assert finding.level == "FIX"
    assert f"bound by {bound}: too little for smollm2-135m" in finding.seen
    assert (finding.fix or "").startswith(fix) or fix in (finding.fix or "")


def test_swap_on_a_disk_with_an_eager_kernel_is_to_consider(tree: Tree) -> None:
    swaps = "Filename\tType\tSize\tUsed\tPriority\n/dev/nvme0n1p3\tpartition\t8388604\t0\t-2\n"
    root = tree.write({"proc/meminfo": meminfo(50, 8), "proc/swaps": swaps, "proc/sys/vm/swappiness": "60\n"})
    finding = doctor_memory.swap(root)
    assert finding == warn(
        "swap",
        "8.0 GiB swap (0 MiB used), swappiness 60, on /dev/nvme0n1p3",
        "echo vm.swappiness=10 | sudo tee /etc/sysctl.d/60-laya.conf && sudo sysctl -p /etc/sysctl.d/60-laya.conf",
    )
    assert doctor_memory.swap(tree.write({".dockerenv": ""})).level == "ok"


@pytest.mark.parametrize(
    "files",
    [
        {"proc/meminfo": meminfo(50)},
        {"proc/meminfo": meminfo(50, 8), "proc/sys/vm/swappiness": "10\n", "proc/swaps": "Filename\n/dev/sda2 x\n"},
        {"proc/meminfo": meminfo(50, 8), "proc/sys/vm/swappiness": "180\n", "proc/swaps": "Filename\n/dev/zram0 x\n"},
    ],
)
def test_swap_that_is_absent_rarely_used_or_in_memory_is_ok(tree: Tree, files: dict[str, str]) -> None:
    assert doctor_memory.swap(tree.write(files)).level == "ok"


def test_zram_is_seen_or_how_to_have_it(tree: Tree) -> None:
    root = tree.write({"usr/bin/apt": "", "proc/meminfo": meminfo(50)})
    assert doctor_memory.zram(root).fix == "sudo apt install zram-tools"
    root = tree.write({"proc/swaps": "Filename\n/dev/zram0 partition\n"})
    assert doctor_memory.zram(root) == ok("zram", "compressed swap in /dev/zram0")
    root = tree.write({"proc/swaps": "Filename\n", ".dockerenv": ""})
    assert doctor_memory.zram(root).fix is None


def test_ceiling_v2_group_of_our_own_holds_engines(tree: Tree) -> None:
    root = tree.write(cgroup_v2(SERVICE) | {f"{TREE}/{SERVICE}/cgroup.procs": f"{os.getpid()}\n"})
    finding = doctor_memory.ceiling(root, Config())
    assert finding == ok("ceiling", f"ceiling: cgroup v2 /{SERVICE}: hard limit, no swap for engines")


@pytest.mark.skipif(os.geteuid() == 0, reason="systemd of the machine serves root")
def test_ceiling_v2_without_a_systemd_of_the_user_says_how_to_have_one(tree: Tree) -> None:
    root = tree.write(cgroup_v2(SCOPE) | {"run/systemd/system/.keep": ""})
    assert "enable-linger" in (doctor_memory.ceiling(root, Config()).fix or "")


def test_ceiling_in_a_container_that_shares_its_group_names_the_containers_flag(tree: Tree) -> None:
    root = tree.write(cgroup_v2("box") | {".dockerenv": ""})
    finding = doctor_memory.ceiling(root, Config())
    assert finding.level == "warn"
    assert "engines are only watched: cgroup v2 group is shared with 1 other process" in finding.seen
    assert finding.fix == "start the container with --memory 40960m --memory-swap 40960m"


def test_ceiling_above_is_one_where_engines_can_only_be_watched(tree: Tree) -> None:
    root = tree.write(cgroup_v2("box") | {f"{TREE}/box/memory.max": f"{8 << 30}\n"})
    finding = doctor_memory.ceiling(root, Config())
    assert finding.level == "ok"
    assert finding.seen.endswith("8.0 GiB for all at /box")


def test_ceiling_without_systemd_or_container_bounds_each_process(tree: Tree) -> None:
    fix = doctor_memory.ceiling(tree.write(cgroup_v2("box")), Config()).fix or ""
    assert fix.startswith("bash -c 'ulimit -d 41943040; exec laya serve'")


def test_ceiling_without_a_memory_controller_names_the_kernels_switch(tree: Tree) -> None:
    finding = doctor_memory.ceiling(tree.write({"proc/self/mountinfo": ""}), Config())
    assert finding.level == "warn"
    assert "cgroup_enable=memory" in (finding.fix or "")


@pytest.mark.parametrize(
    ("text", "level", "words"),
    [
        ("", "warn", "psi=1"),
        ("some avg10=0.00 avg60=0.00 avg300=0.00 total=30322\nfull avg10=0.00 avg60=99.0\n", "ok", ""),
        ("some avg10=40.10 avg60=14.50 avg300=3.00 total=30322\n", "warn", "close a program"),
    ],
)
def test_pressure_is_told_or_missed(tree: Tree, text: str, level: str, words: str) -> None:
    finding = doctor_memory.pressure(tree.write({"proc/pressure/memory": text}))
    assert finding.level == level
    assert words in (finding.fix or "")


def test_oom_daemon_of_systemd_that_is_there_is_only_started(tree: Tree) -> None:
    root = tree.write({"usr/lib/systemd/systemd-oomd": "", "usr/bin/apt": ""})
    assert doctor_memory.oom_daemon(root).fix == "sudo systemctl enable --now systemd-oomd"


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
    assert doctor_memory.oom_daemon(root) == warn("oom", "no earlyoom or systemd-oomd", fix)


def test_oom_daemon_is_seen_and_not_looked_for_in_a_container(tree: Tree) -> None:
    assert doctor_memory.oom_daemon(tree.write({"run/.containerenv": ""})).level == "ok"
    root = tree.write({"proc/77/comm": "systemd-oomd\n", "proc/78/comm": "earlyoom\n"})
    assert doctor_memory.oom_daemon(root) == ok("oom", "earlyoom and systemd-oomd running")


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


# power and heat

FREQ = "sys/devices/system/cpu/cpu0/cpufreq"
BATTERY = {"sys/class/power_supply/BAT0/type": "Battery\n", "sys/class/power_supply/BAT0/status": "Discharging\n"}


@pytest.mark.parametrize(
    ("files", "fix"),
    [
        ({}, None),
        ({f"{FREQ}/scaling_governor": "schedutil\n", f"{FREQ}/scaling_driver": "acpi-cpufreq\n"}, None),
        ({f"{FREQ}/scaling_governor": "powersave\n", f"{FREQ}/scaling_driver": "intel_pstate\n"}, None),
        (
            {f"{FREQ}/scaling_governor": "powersave\n", f"{FREQ}/scaling_driver": "acpi-cpufreq\n"},
            "echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
        ),
        (
            {
                f"{FREQ}/scaling_governor": "powersave\n",
                f"{FREQ}/scaling_driver": "amd-pstate-epp\n",
                f"{FREQ}/energy_performance_preference": "power\n",
                "usr/sbin/tuned-adm": "",
            },
            "sudo tuned-adm profile throughput-performance",
        ),
        (
            {"sys/firmware/acpi/platform_profile": "low-power\n"},
            "echo performance | sudo tee /sys/firmware/acpi/platform_profile",
        ),
        (
            {"sys/firmware/acpi/platform_profile": "quiet\n", "usr/bin/powerprofilesctl": ""},
            "powerprofilesctl set performance",
        ),
        (BATTERY, "plug in the charger"),
        (BATTERY | {"sys/class/power_supply/AC/type": "Mains\n", "sys/class/power_supply/AC/online": "1\n"}, None),
        (BATTERY | {"sys/class/power_supply/BAT0/scope": "Device\n"}, None),
    ],
)
def test_power_that_is_held_down_gets_the_command_of_what_is_installed(
    tree: Tree, files: dict[str, str], fix: str | None
) -> None:
    finding = doctor_power.power(tree.write(files))
    assert finding.fix == fix
    assert finding.level == ("ok" if fix is None else "warn")


@pytest.mark.parametrize(
    ("files", "level", "seen"),
    [
        ({}, "ok", "no sensor"),
        ({"sys/class/hwmon/hwmon2/name": "k10temp\n", "sys/class/hwmon/hwmon2/temp1_input": "61250\n"}, "ok", "61 C"),
        ({"sys/class/hwmon/hwmon2/name": "nvme\n", "sys/class/hwmon/hwmon2/temp1_input": "95000\n"}, "ok", "no sensor"),
        (
            {
                "sys/class/hwmon/hwmon0/name": "coretemp\n",
                "sys/class/hwmon/hwmon0/temp1_input": "72000\n",
                "sys/class/hwmon/hwmon0/temp2_input": "87000\n",
                "sys/class/hwmon/hwmon0/temp2_crit": "95000\n",
            },
            "warn",
            "87 C",
        ),
        ({"sys/class/thermal/thermal_zone1/type": "x86_pkg_temp\n", "sys/class/thermal/thermal_zone1/temp": "92000\n"},
         "warn", "92 C"),
        ({"sys/class/thermal/thermal_zone1/type": "acpitz\n", "sys/class/thermal/thermal_zone1/temp": "99000\n"},
         "ok", "no sensor"),
        ({"sys/devices/system/cpu/cpu1/thermal_throttle/package_throttle_count": "12\n"},
         "ok", "slowed down for heat 12 times"),
    ],
)  # fmt: skip
def test_temperature_is_of_the_processor(tree: Tree, files: dict[str, str], level: str, seen: str) -> None:
    finding = doctor_power.temperature(tree.write(files))
    assert finding.level == level
    assert seen in finding.seen


def test_gpu_strain_is_told_of_cards_that_are_in_use() -> None:
    cards = "NVIDIA GeForce RTX 3090, 24576, 570.86, 61, 350.00\nNVIDIA H200, 143771, 580.1, 88, 700.00\n"
    assert gpu_strain(Config(), lambda: cards, build=bundled()) == []
    assert len(gpu_strain(Config(), lambda: cards, build=CUDA_BUILD)) == 2
    desktop, server = gpu_strain(fully({"engine_path": "/opt/llama-server"}), lambda: cards, build=bundled())
    assert desktop.seen == "GPU 0 may draw 350 W and the processor its own: small supplies trip"
    assert desktop.fix == "sudo nvidia-smi -i 0 -pl 280"
    assert server == warn("gpu heat", "GPU 1 NVIDIA H200: 88 C", "sudo nvidia-smi -i 1 -pl 560")


# graphics cards


def test_gpu_that_nvidia_smi_lists_is_idle(tree: Tree) -> None:
    """And the build for it is named, or why there is none; once one is used, all is well."""
    card = NvidiaCard(name="NVIDIA GeForce RTX 3090", capability=(8, 6))
    here = Hardware(machine="x86_64", glibc=(2, 35), nvidia=(card,), nvidia_driver="570.86.15", cuda=(12, 8))

    def look_at_it(hardware: Hardware, build: Build | EngineFailed = CPU_BUILD) -> Finding:
        smi = "NVIDIA GeForce RTX 3090, 24576, 570.86.15\n"
        return gpu(tree.root, Config(), lambda: smi, home=tree.root, build=build, look_at=lambda root: hardware)

    finding = look_at_it(here)
    assert (finding.level, finding.fix) == ("FIX", "laya engines install cuda")
    seen = "GPU NVIDIA GeForce RTX 3090 24.0 GiB, driver 570.86.15"
    assert finding.seen == f"{seen}: idle, the engine is CPU only"
    assert look_at_it(here, EngineFailed("gone")).level == "FIX"
    old = look_at_it(msgspec.structs.replace(here, cuda=(11, 4)))
    assert "the builds need one for CUDA 12.8 (570 or newer). Then: laya engines install cuda" in (old.fix or "")
    amd = Hardware(machine="x86_64", glibc=(2, 35), amd=("gfx906",), rocm=(7, 1), vulkan=("radeon_icd",))
    assert look_at_it(amd).fix == "laya engines install vulkan"
    record = builds_folder(tree.root) / CUDA_BUILD.name / RECORD
    record.parent.mkdir(parents=True)
    record.write_bytes(msgspec.json.encode(msgspec.structs.replace(CUDA_BUILD, folder=None)))
    assert look_at_it(here).fix == f"laya engines use {CUDA_BUILD.name}"
    assert look_at_it(here, CUDA_BUILD) == ok("gpu", f"{seen}; the engine is built for CUDA 12.8")
    gone = gpu(tree.root, Config(), lambda: "", home=tree.root, build=CUDA_BUILD)
    assert (gone.level, gone.seen) == ("FIX", "no GPU is found, and the engine in use is built for CUDA 12.8")


def test_gpu_is_not_idle_where_the_engine_is_the_users_own(tree: Tree) -> None:
    config = fully({"models": {"big": {"engine_path": "/opt/llama-server"}}})
    smi = "NVIDIA H200, 143771, 580.1, 41, 700.00\n"
    finding = gpu(tree.root, config, lambda: smi, home=tree.root, build=bundled())
    assert finding.level == "ok"
    assert finding.seen.startswith("GPU NVIDIA H200 140.4 GiB, driver 580.1, 41 C, 700 W limit;")


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
    root = tree.write(files | {"dev/dri/renderD128": ""})
    finding = gpu(root, Config(), lambda: "", home=root, build=bundled())
    assert finding.level == level
    assert seen in finding.seen


# Laya's set-up


def test_engine_is_loaded_for_real() -> None:
    finding = doctor_setup.engine(Config(), bundled())
    assert finding.level == "ok"
    assert importlib.metadata.version("xllamacpp") in finding.seen


def test_engine_that_is_missing_or_broken_is_to_fix() -> None:
    missing = msgspec.structs.replace(bundled(), version=MISSING)
    assert "not installed" in doctor_setup.engine(Config(), missing).seen
    assert "SIGILL" in doctor_setup.engine(Config(), bundled(), load=lambda packages: (-4, "")).seen
    words = "Traceback\nImportError: libgomp.so.1: cannot open\n"
    broken = doctor_setup.engine(Config(), bundled(), load=lambda packages: (1, words))
    assert broken.seen.endswith("ImportError: libgomp.so.1: cannot open")
    assert (broken.fix or "").startswith("pip install")
    broken = doctor_setup.engine(Config(), CUDA_BUILD, load=lambda packages: (1, words))
    assert (broken.fix or "").startswith(f"laya engines use bundled && laya engines rm {CUDA_BUILD.name}")


def test_build_that_was_chosen_and_is_gone_is_to_fix(tmp_path: Path) -> None:
    use(tmp_path, CUDA_BUILD)
    finding = doctor_setup.engine(Config(), doctor_setup.build(tmp_path))
    assert (finding.level, finding.fix) == ("FIX", "laya engines use bundled")
    assert f"'{CUDA_BUILD.name}', chosen by `laya engines use`, is not in" in finding.seen


def test_engine_of_the_users_own_is_named() -> None:
    assert doctor_setup.engine(fully({"engine_path": "/opt/llama-server"}), bundled()) == ok(
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
    named = doctor_setup.port(Config(), f"http://127.0.0.1:{answering}/v1")
    assert named == ok("port", f"port {answering}: Laya 9.9 is running there (LAYA_URL)")
    assert doctor_setup.port(Config(), "http://127.0.0.1:9").seen == "LAYA_URL names port 9, where no Laya answers"
    assert "another machine (not contacted)" in doctor_setup.port(Config(), "https://models.example/laya").seen
    assert doctor_setup.port(Config(), "ftp://here").fix == "unset LAYA_URL"
    assert set(_Laya.authorizations) == {None}


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
    shut = doctor_setup.port(Config(server=ServerConfig(host="0.0.0.0", port=0)))
    assert shut.fix == "laya key create me --role admin"


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
    home = tmp_path / "home"
    home.mkdir()
    if has_model:
        (home / "models").symlink_to(laya_home / "models")
    keep(home, some_rates())  # else it would be measured now, which takes its time
    environ = os.environ | {"LAYA_HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path), "HF_TOKEN": "hf_secret"}
    command = [sys.executable, "-m", "laya.cli", "doctor"]
    done = [
        subprocess.run([*command, *flags], capture_output=True, text=True, cwd=tmp_path, env=environ, check=False)
        for flags in ([], ["--json"])
    ]
    findings = msgspec.convert(json.loads(done[1].stdout), list[Finding])
    topics = [finding.topic for finding in findings if finding.topic != "found"]
    assert topics == [
        *("cpu", "memory", "ceiling", "swap", "zram", "pressure", "oom", "power", "temperature", "speed"),
        *("disk", "gpu", "python", "engine", "router", "config", "port", "models", "hub"),
    ]
    must = [finding.topic for finding in findings if finding.level == "FIX"]
    assert ("models" in must) is not has_model
    assert [each.returncode for each in done] == [1 if must else 0] * 2
    assert done[0].stdout.rstrip().endswith(summary(findings))
    assert "hf_secret" not in done[0].stdout + done[1].stdout
    assert [each.stderr for each in done] == ["", ""]
