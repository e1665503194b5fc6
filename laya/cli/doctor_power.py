"""Owns: what `laya doctor` says of power and heat: the power profile, the clock governor, the battery, temperatures.

Decoding keeps every core and the memory bus busy for minutes: a machine told to save power, or one that has to slow
down because it is hot, gives a fraction of its speed. Reads the kernel's files below a root, changes nothing.
"""

from __future__ import annotations

from pathlib import Path

from laya.cli.doctor_machine import kernel_text
from laya.cli.finding import Finding, ok, warn

HOT_C = 90.0
NEAR_CRITICAL_C = 10.0  # below the temperature at which the processor says it stops
_CPU = "sys/devices/system/cpu"
_SLOW_GOVERNORS = frozenset({"powersave", "conservative"})
_OWN_SPEED_DRIVERS = ("intel_pstate", "amd-pstate-epp")  # their "powersave" is the normal choice, EPP decides
_SLOW_PROFILES = frozenset({"low-power", "quiet", "cool"})
_CPU_SENSORS = frozenset({"coretemp", "k10temp", "zenpower", "cpu_thermal", "soc_thermal"})
_CPU_ZONES = ("x86_pkg_temp", "cpu", "soc")


def power(root: Path) -> Finding:
    """Whether something holds the processor's clock down: a profile, a governor, a battery."""
    governor = kernel_text(root / _CPU / "cpu0/cpufreq/scaling_governor").strip()
    profile = kernel_text(root / "sys/firmware/acpi/platform_profile").strip()
    seen = ", ".join(
        part for part in (f"profile {profile}" if profile else "", f"governor {governor}" if governor else "") if part
    )
    if _is_on_battery(root):
        return warn("power", f"on battery{f', {seen}' if seen else ''}: slower, and soon empty", "plug in the charger")
    if profile in _SLOW_PROFILES or _is_held_down(root, governor):
        return warn("power", f"power: {seen}", _faster(root, has_profile=profile in _SLOW_PROFILES))
    return ok("power", f"power: {seen}" if seen else "power: the clock is not this system's to set")


def _is_held_down(root: Path, governor: str) -> bool:
    driver = kernel_text(root / _CPU / "cpu0/cpufreq/scaling_driver").strip()
    if driver in _OWN_SPEED_DRIVERS:
        return kernel_text(root / _CPU / "cpu0/cpufreq/energy_performance_preference").strip() == "power"
    return governor in _SLOW_GOVERNORS


def _faster(root: Path, *, has_profile: bool) -> str:
    if (root / "usr/bin/powerprofilesctl").exists():
        return "powerprofilesctl set performance"
    if any((root / folder / "tuned-adm").exists() for folder in ("usr/sbin", "usr/bin")):
        return "sudo tuned-adm profile throughput-performance"
    if has_profile:
        return "echo performance | sudo tee /sys/firmware/acpi/platform_profile"
    return f"echo performance | sudo tee /{_CPU}/cpu*/cpufreq/scaling_governor"


def _is_on_battery(root: Path) -> bool:
    supplies = sorted((root / "sys/class/power_supply").glob("*"))
    kinds = [(kernel_text(supply / "type").strip(), supply) for supply in supplies]
    mains = [kernel_text(supply / "online").strip() for kind, supply in kinds if kind in ("Mains", "USB")]
    own = [supply for kind, supply in kinds if kind == "Battery" and kernel_text(supply / "scope").strip() != "Device"]
    draining = any(kernel_text(supply / "status").strip() == "Discharging" for supply in own)
    return draining and "1" not in mains


def temperature(root: Path) -> Finding:
    """The hottest sensor of the processor, and how often it had to slow down for heat since the start."""
    hottest_c, critical_c = _hottest(root)
    counts = [
        int(text)
        for path in (root / _CPU).glob("cpu[0-9]*/thermal_throttle/package_throttle_count")
        if (text := kernel_text(path).strip()).isdigit()
    ]
    most = max(counts, default=0)
    slowed = f", slowed down for heat {most} times since the start" if most else ""
    if hottest_c is None:
        return ok("temperature", f"temperature: no sensor here{slowed}")
    seen = f"temperature {hottest_c:.0f} C{slowed}"
    if hottest_c >= min(HOT_C, (critical_c or HOT_C + NEAR_CRITICAL_C) - NEAR_CRITICAL_C):
        return warn("temperature", seen, "watch -n 1 sensors   # clean fan and filter; or fewer threads: n_threads: 4")
    return ok("temperature", seen)


def _hottest(root: Path) -> tuple[float | None, float | None]:
    """The processor's hottest temperature, and where it is critical, in degrees Celsius."""
    readings: list[tuple[float, float | None]] = []
    for sensor in (root / "sys/class/hwmon").glob("hwmon*"):
        if kernel_text(sensor / "name").strip() in _CPU_SENSORS:
            for path in sensor.glob("temp*_input"):
                reading = _celsius(path)
                if reading is not None:
                    readings.append((reading, _celsius(path.with_name(path.name.replace("_input", "_crit")))))
    if not readings:
        zones = (root / "sys/class/thermal").glob("thermal_zone*")
        named = [zone for zone in zones if kernel_text(zone / "type").strip().startswith(_CPU_ZONES)]
        readings = [(reading, None) for zone in named if (reading := _celsius(zone / "temp")) is not None]
    return max(readings, key=lambda reading: reading[0], default=(None, None))


def _celsius(path: Path) -> float | None:
    """The kernel writes thousandths of a degree; what no sensor gives is left out."""
    text = kernel_text(path).strip()
    value = int(text) / 1000 if text.lstrip("-").isdigit() else 0.0
    return value if 0 < value < 150 else None
