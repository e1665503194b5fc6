"""`laya service`: what stands in the unit, and that no file is lost or half-written by it."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from laya.cli.service import unit_here, unit_path, write_unit
from laya.cli.service_unit import GATEWAY_BYTES, SYSTEM_USER, ServiceUnit, memory_max, unit_text
from laya.config import Config, MemoryConfig
from laya.engines.ceiling_place import SCOPE_CPU_WEIGHT
from laya.errors import ConfigError, LayaError
from laya.memory.machine import MAX_SHARE

ROOT = Path(__file__).parents[2]
DEPLOYED = ROOT / "deploy" / "laya.service"
GIB = 1 << 30


def values(text: str) -> dict[str, str]:
    """Key -> value of a unit in which no key stands twice."""
    pairs = re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def laya(*args: str, home: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config"), "PYTHONPATH": str(ROOT)} | environ
    command = [sys.executable, "-m", "laya.cli", "service", *args]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=home, check=False)


def test_deployed_unit_is_the_default_of_what_install_writes() -> None:
    assert DEPLOYED.read_text() == unit_text(ServiceUnit()), (
        "run: python -m laya.cli.service_unit > deploy/laya.service"
    )


def test_unit_holds_the_service_as_the_guard_would() -> None:
    unit = values(unit_text(ServiceUnit()))
    assert unit["Delegate"] == "yes"
    assert unit["MemoryMax"] == f"{100 * MAX_SHARE:.0f}%"
    assert unit["MemorySwapMax"] == "0"
    assert unit["OOMPolicy"] == "continue"
    assert unit["CPUWeight"] == str(SCOPE_CPU_WEIGHT)


@pytest.mark.parametrize("is_user", [True, False])
def test_unit_hides_neither_cards_nor_models_nor_control_groups(is_user: bool) -> None:
    unit = values(unit_text(ServiceUnit(is_user=is_user)))
    cards = {"PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock", "MemoryDenyWriteExecute"}
    files = {"ProtectHome", "InaccessiblePaths", "ProtectControlGroups", "ProcSubset"}
    assert not (cards | files) & set(unit)
    assert unit["NoNewPrivileges"] == "yes"


@pytest.mark.parametrize(
    ("budget", "written"),
    [(None, "95%"), ("80%", "95%"), ("50%", "95%"), ("12GiB", "13447M"), (12 * GIB, "13447M")],
)
def test_memory_max_leaves_the_budget_within_reach(budget: str | int | None, written: str) -> None:
    assert memory_max(Config(memory=MemoryConfig(budget=budget))) == written
    if written.endswith("M"):
        limit_bytes = int(written[:-1]) << 20
        assert (limit_bytes - GATEWAY_BYTES) * MAX_SHARE >= 12 * GIB


@pytest.mark.parametrize(
    ("is_user", "edit"), [(True, "`systemctl --user edit laya`"), (False, "`systemctl edit laya`")]
)
def test_unit_says_how_its_reader_changes_it(is_user: bool, edit: str) -> None:
    first = unit_text(ServiceUnit(is_user=is_user)).splitlines()[0]
    assert edit in first
    assert first.startswith(unit_text(None))


def test_unit_of_a_user_asks_for_nothing_that_needs_root() -> None:
    unit = values(unit_text(ServiceUnit(is_user=True, run_as=None, laya_home=None, groups=())))
    assert not {"User", "CapabilityBoundingSet", "ProtectSystem", "PrivateTmp", "OOMScoreAdjust"} & set(unit)
    assert unit["WorkingDirectory"] == "%h"
    assert unit["EnvironmentFile"] == "-%E/laya/environment"
    assert unit["WantedBy"] == "default.target"


def test_unit_quotes_what_systemd_would_read_otherwise() -> None:
    odd = Path('/srv/my "models"/100%/c.yaml')
    unit = values(unit_text(ServiceUnit(program=("/opt/la ya/bin/laya",), config_file=odd)))
    assert unit["ExecStart"] == r'"/opt/la ya/bin/laya" serve --config "/srv/my \"models\"/100%%/c.yaml"'


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("kind", ["default", "modprobe", "user", "odd"])
def test_unit_is_right_to_systemd_itself(kind: str, tmp_path: Path) -> None:
    true = shutil.which("true") or "/bin/true"
    odd = tmp_path / "a b%c" / "laya"
    odd.parent.mkdir()
    odd.symlink_to(true)
    unit: dict[str, Any] = {
        "default": {"program": (true,)},
        "modprobe": {"program": (true,), "run_as": pwd.getpwuid(os.geteuid()).pw_name, "laya_home": None},
        "user": {"program": (true,), "is_user": True, "run_as": None, "laya_home": None, "groups": ()},
        "odd": {"program": (str(odd),), "config_file": tmp_path / 'my "own" $config;.yaml'},
    }[kind]
    path = tmp_path / "laya.service"
    path.write_text(unit_text(ServiceUnit(**unit)))
    mode = ["--user"] if kind == "user" else []
    env = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(
        ["systemd-analyze", *mode, "verify", "--man=no", str(path)],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if str(path) in line or path.name in line]
    assert said == []


def test_unit_here_finds_this_program_and_the_budget_of_its_config(tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text("memory: {budget: 12GiB}\n")
    unit = unit_here(user=True, run_as=None, config_file=config)
    assert unit.memory_max == "13447M"
    assert unit.config_file == config
    assert Path(unit.program[0]).parent == Path(sys.executable).parent
    with pytest.raises(ConfigError, match="no such file"):
        unit_here(user=True, run_as=None, config_file=tmp_path / "nope.yaml")


def test_unit_here_names_an_account_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"useradd --system .* no-such-account"):
        unit_here(user=False, run_as="no-such-account", config_file=None)
    with pytest.raises(ConfigError, match="--run-as is for a system service"):
        unit_here(user=True, run_as=SYSTEM_USER, config_file=None)
    me = pwd.getpwuid(os.geteuid()).pw_name
    monkeypatch.setenv("SUDO_USER", me)
    assert unit_here(user=False, run_as=None, config_file=None).run_as == me


def test_install_writes_once_never_over_a_changed_file_and_uninstall_takes_it_away(tmp_path: Path) -> None:
    path = tmp_path / ".config/systemd/user/laya.service"
    first = laya("install", "--user", home=tmp_path)
    assert first.returncode == 0, first.stderr
    assert path.read_text() == laya("show", "--user", home=tmp_path).stdout
    assert "systemctl --user enable --now laya" in first.stdout
    assert path.stat().st_mode & 0o777 == 0o644
    assert laya("install", "--user", home=tmp_path).stdout.startswith("already there")

    changed = path.read_text() + "# mine\n"
    path.write_text(changed)
    refused = laya("install", "--user", home=tmp_path)
    assert refused.returncode == 2
    assert "is there and differs" in refused.stderr
    assert path.read_text() == changed
    assert laya("install", "--user", "--force", home=tmp_path).returncode == 0
    assert "# mine" not in path.read_text()
    assert [file.name for file in path.parent.iterdir()] == [path.name]

    assert laya("uninstall", "--user", home=tmp_path).returncode == 0
    assert not path.exists()
    assert laya("uninstall", "--user", home=tmp_path).returncode == 2


def test_uninstall_keeps_a_unit_of_somebody_else(tmp_path: Path) -> None:
    path = tmp_path / ".config/systemd/user/laya.service"
    path.parent.mkdir(parents=True)
    path.write_text("[Service]\nExecStart=/bin/true\n")
    refused = laya("uninstall", "--user", home=tmp_path)
    assert (refused.returncode, path.exists()) == (2, True)
    assert laya("uninstall", "--user", "--force", home=tmp_path).returncode == 0
    assert not path.exists()


def test_write_unit_that_cannot_be_written_leaves_nothing_and_names_sudo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "laya.service"

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(LayaError, match=r"Permission denied\. With root: sudo .* service install; without: .* --user"):
        write_unit(path, "text", force=False)
    assert list(tmp_path.iterdir()) == []


def test_unit_path_is_where_systemd_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert unit_path(user=True) == tmp_path / "systemd/user/laya.service"
    assert unit_path(user=False) == Path("/etc/systemd/system/laya.service")
