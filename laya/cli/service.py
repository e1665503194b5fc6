"""Owns: `laya service`: the unit of this machine shown, installed and taken away again.

What stands in a unit is `service_unit`'s. A file that somebody changed is never overwritten or removed without --force;
nothing is started or enabled: the commands that do are printed.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from laya.cli.output import printable
from laya.cli.service_unit import SYSTEM_HOME, SYSTEM_USER, ServiceUnit, gpu_groups, memory_max, unit_text
from laya.config import Config, load_config
from laya.errors import ConfigError, LayaError

service_app = typer.Typer(help="Run Laya as a service of systemd.", no_args_is_help=True)

UNIT_NAME = "laya.service"
SYSTEMCTL_TIMEOUT_S = 60
User = Annotated[bool, typer.Option("--user", help="A service of yours alone, without root.")]
RunAs = Annotated[str | None, typer.Option("--run-as", help="Account of a system service; default: who called sudo.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="The config.yaml that the service is to use.")]
Force = Annotated[bool, typer.Option("--force", help="Also where the file is there and differs.")]


@service_app.command()
def show(user: User = False, run_as: RunAs = None, config: ConfigFile = None) -> None:
    """Print the unit as `laya service install` would write it on this machine."""
    print(unit_text(unit_here(user=user, run_as=run_as, config_file=config)), end="")


@service_app.command()
def install(user: User = False, run_as: RunAs = None, config: ConfigFile = None, force: Force = False) -> None:
    """Write the unit and say what to do next; nothing is started."""
    unit = unit_here(user=user, run_as=run_as, config_file=config)
    path = unit_path(user=user)
    is_new = write_unit(path, unit_text(unit), force=force)
    print(f"{'wrote' if is_new else 'already there:'} {printable(str(path))}")
    print_reload(user)
    scope = " --user" if user else ""
    sudo = "" if user else "sudo "
    print(f"start it now and at every boot   {sudo}systemctl{scope} enable --now laya")
    if user:
        print("keep it when you log out         sudo loginctl enable-linger $USER")
    print(f"see how it does                  systemctl{scope} status laya; journalctl{scope} -u laya -f")
    print(f"change something                 {sudo}systemctl{scope} edit laya   (this file stays as it is)")


@service_app.command()
def uninstall(user: User = False, force: Force = False) -> None:
    """Stop the service and remove its unit; models, logs and config stay."""
    path = unit_path(user=user)
    if not path.exists():
        raise ConfigError(f"There is no {path}: nothing to uninstall{'' if user else ' (with --user?)'}.")
    if not force and not path.read_text(errors="replace").startswith(unit_text(None)):
        raise ConfigError(f"{path} is not one that Laya wrote: --force removes it.")
    if is_systemd_here():
        systemctl("disable", "--now", UNIT_NAME, user=user)
    try:
        path.unlink()
    except OSError as error:
        raise _cannot(path, error, "uninstall") from None
    print(f"removed {printable(str(path))}")
    print_reload(user)


def unit_here(*, user: bool, run_as: str | None, config_file: Path | None) -> ServiceUnit:
    """The unit that fits this machine and who asks. Raises ConfigError for an account or file that is not there."""
    if user and run_as is not None:
        raise ConfigError("--run-as is for a system service; one of --user runs as you.", param="--run-as")
    account = None if user else _account(run_as)
    home = Path(account.pw_dir) if account is not None else Path.home()
    is_own_account = account is not None and account.pw_name == SYSTEM_USER
    config = _config_of(config_file, SYSTEM_HOME if is_own_account else home)
    return ServiceUnit(
        is_user=user,
        program=_program(),
        config_file=config_file.absolute() if config_file is not None else None,
        run_as=account.pw_name if account is not None else None,
        laya_home=SYSTEM_HOME if is_own_account else _laya_home(),
        memory_max=memory_max(config),
        drain_timeout_s=config.server.drain_timeout_s,
        groups=() if user else gpu_groups(),
        modprobe=not user and Path("/usr/bin/nvidia-modprobe").exists(),
    )


def _account(run_as: str | None) -> pwd.struct_passwd:
    name = run_as or os.environ.get("SUDO_USER") or (SYSTEM_USER if os.geteuid() == 0 else _own_name())
    try:
        return pwd.getpwnam(name)
    except KeyError:
        raise ConfigError(
            f"There is no account '{name}' here: --run-as NAME takes another, or make it with: sudo useradd --system "
            f"--home-dir {SYSTEM_HOME} --shell /usr/sbin/nologin {name}",
            param="--run-as",
        ) from None


def _own_name() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name


def _laya_home() -> Path | None:
    """Where $LAYA_HOME points now; None: the default of the account that runs it."""
    value = os.environ.get("LAYA_HOME")
    return Path(value).expanduser().absolute() if value else None


def _config_of(config_file: Path | None, home: Path) -> Config:
    """The config that the service will read: it starts in `home`."""
    own = [home / "config.yaml", (_laya_home() or home / ".config" / "laya") / "config.yaml"]
    found = config_file or next((path for path in own if path.is_file()), None)
    return Config() if found is None else load_config(found, os.environ)


def _program() -> tuple[str, ...]:
    """The `laya` beside the interpreter that runs now, so that a virtual environment is found again."""
    script = Path(sys.executable).with_name("laya")
    return (str(script),) if os.access(script, os.X_OK) else (sys.executable, "-m", "laya.cli")


def unit_path(*, user: bool) -> Path:
    if not user:
        return Path("/etc/systemd/system") / UNIT_NAME
    config_home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(config_home) / "systemd" / "user" / UNIT_NAME


def write_unit(path: Path, text: str, *, force: bool) -> bool:
    """Put the unit there whole or not at all; False when just that is there. Raises ConfigError, LayaError."""
    try:
        there = path.read_text(errors="replace") if path.exists() else None
        if there == text:
            return False
        if there is not None and not force:
            raise ConfigError(
                f"{path} is there and differs. `laya service show | diff {path} -` shows how; --force overwrites it."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            with part.open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            part.chmod(0o644)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise _cannot(path, error, "install") from None
    return True


def _cannot(path: Path, error: OSError, verb: str) -> LayaError:
    hint = ""
    if isinstance(error, PermissionError):
        hint = f" With root: sudo {' '.join(_program())} service {verb}; without: laya service {verb} --user"
    return LayaError(f"{path}: {error.strerror}.{hint}")


def is_systemd_here() -> bool:
    """Whether systemd runs this machine; in most containers it does not."""
    return Path("/run/systemd/system").is_dir()


def print_reload(user: bool) -> None:
    """Have systemd read its units anew, or say why that was not done."""
    if not is_systemd_here():
        print("systemd does not run here: the file waits for one that does")
    elif fault := systemctl("daemon-reload", user=user):
        print(f"systemd was not told ({printable(fault)}): systemctl{' --user' if user else ''} daemon-reload")


def systemctl(*words: str, user: bool) -> str | None:
    """Run systemctl; None, or why it failed."""
    command = ["systemctl", *(["--user"] if user else []), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SYSTEMCTL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
