"""Read the policy from TOML.

`config.toml`, then `config.d/*.toml` in order of name, later files winning.

A file that does not fit is refused as a whole with file, line and reason.
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from port_agent.facts.platform import SensorOptions
from port_agent.facts.readings import Power
from port_agent.policy.decide import DAYS, MIB, Policy, ResourceLimits, TimeWindow
from port_planner.base.errors import ExitCode, PortError
from port_planner.base.times import parse_hours
from port_planner.base.units import UnitError, parse_bytes, parse_duration

_Read = TypeVar("_Read")


class ConfigError(PortError):
    """A configuration is rejected; the one in force stays."""

    exit_code = ExitCode.CONFIG

    def __init__(self, file: Path, line: int | None, reason: str) -> None:
        self.file, self.line, self.reason = file, line, reason
        place = f"{file}:{line}" if line is not None else str(file)
        super().__init__(f"{place}: {reason}; correct it, and run `port-agent reload` if an agent is running")


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """Settings of the daemon itself, not of the decision."""

    keep_results_bytes: int = 2048 * MIB
    keep_jobs: int = 200
    job_log_bytes: int = MIB
    metrics_listen: tuple[str, int] | None = None
    control_group: str | None = None
    discover_peers: bool = False
    peer_name: str = ""
    """Name shown to other agents; if empty, it is made from the device id, which reveals nothing about its owner."""
    peer_port: int = 9478
    """Port for calls of paired devices; open only while a device is paired."""
    pairing_port: int = 9479
    """Port that is open only while a code is shown."""
    static_peers: tuple[tuple[str, int], ...] = ()
    """Addresses of paired devices that multicast does not reach."""
    share_with_peers: bool = False
    """Whether costs and plans made here are shared with paired devices, and theirs are requested."""
    solve_for_peers: bool = False
    """Whether plans are solved for paired devices, while the policy would allow training on this one."""
    take_jobs: bool = False
    """Whether jobs of paired devices are trained here, while the policy allows it and this
    device has no job of its own.
    """
    introducer: str = ""
    """The paired device that introduces others to this one, which then trusts them; empty: none."""
    introduces: bool = False
    """Whether paired devices that chose this one as their introducer are introduced to each other."""
    solve_on: str = ""
    """The paired device, or `any`, that solves when plans are made again while a job trains here; empty: this one."""
    sysfs_root: Path = Path("/sys")
    proc_root: Path = Path("/proc")
    dev_root: Path = Path("/dev")
    max_failures_without_progress: int = 6

    @property
    def sensor_roots(self) -> tuple[Path, Path, Path]:
        """Roots of the sensors' files: sysfs, proc, dev."""
        return self.sysfs_root, self.proc_root, self.dev_root


@dataclass(frozen=True, slots=True)
class Config:
    """The contents of the configuration files."""

    policy: Policy = field(default_factory=Policy)
    options: AgentOptions = field(default_factory=AgentOptions)
    energy: Mapping[str, object] = field(default_factory=dict)
    """The table [energy] as written; the meter checks it."""
    files: tuple[Path, ...] = ()


def sensor_options(state_dir: Path, policy: Policy) -> SensorOptions:
    """Return the policy's settings for the sensors."""
    return SensorOptions(state_dir, policy.busy_cpu_percent, policy.busy_cores, policy.busy_pressure_percent)


class _ValueError(Exception):
    """A value that is not valid; the caller knows file and line."""


def _typed(kind: Any, problem: str) -> Callable[[object], Any]:
    """Return a function that converts a value to this type, or rejects it with `problem`."""

    def parse(value: object) -> Any:
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            raise _ValueError(f"{value!r} is {problem}") from error

    return parse


def _within(low: float, high: float, unit: str) -> Callable[[object], float]:
    return _typed(Annotated[float, msgspec.Meta(ge=low, le=high)], f"not between {low:g} and {high:g} {unit}")


def _count(low: int, high: int) -> Callable[[object], int]:
    return _typed(Annotated[int, msgspec.Meta(ge=low, le=high)], f"not a whole number between {low} and {high}")


def _with_unit(kind: Any, problem: str, read: Callable[[Any], _Read]) -> Callable[[object], _Read]:
    """Return a function that reads a quantity with a unit, or rejects it with `problem` or
    because it cannot be read.
    """
    typed = _typed(kind, problem)

    def parse(value: object) -> _Read:
        try:
            return read(typed(value))
        except UnitError as error:
            raise _ValueError(str(error)) from error

    return parse


_boolean = _typed(bool, "neither true nor false")
_list = _typed(list[Any], 'no list; write it like ["22:00-07:00"]')
_duration = _with_unit(int | float | str, 'no duration; write it like "5min", "90s" or "2h"', parse_duration)
_size = _with_unit(int | str, 'no size; write it like "512M"', parse_bytes)
_span = _with_unit(Any, "", lambda text: parse_hours(text if isinstance(text, str) else repr(text)))


def _power(value: object) -> Power | None:
    known = {"auto": None, "external": Power.EXTERNAL, "battery": Power.BATTERY}
    if not isinstance(value, str) or value not in known:
        raise _ValueError(f'{value!r} is not one of "auto", "external", "battery"')
    return known[value]


def _directory(value: object) -> Path:
    return Path(_typed(Annotated[str, msgspec.Meta(pattern="^/")], "not an absolute path")(value))


def _group(value: object) -> str | None:
    return _typed(str, "not a valid group name")(value) or None


def _peer_name(value: object) -> str:
    from port_agent.peers.announcement import NAME_LIMIT, clean  # few users set a name: not worth resident memory

    if not isinstance(value, str) or clean(value, NAME_LIMIT) != value:
        raise _ValueError(f"{value!r} is not a valid name of at most {NAME_LIMIT} printable characters")
    return value


def _addresses(value: object) -> tuple[tuple[str, int], ...]:
    parse = _typed(list[Any], 'no list; write it like ["192.168.2.7:9478", "[fd00::7]:9478"]')
    return tuple(_address(text) for text in parse(value))


def _address(value: object) -> tuple[str, int]:
    how = 'no address; write it like "192.168.2.7:9478" or "[fd00::7]:9478"'
    return _host_and_port(value, r"\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[\w.-]+", how)


def _listen(value: object) -> tuple[str, int] | None:
    how = 'no local address; write it like "127.0.0.1:9477"'
    return None if value == "" else _host_and_port(value, r"127\.\d+\.\d+\.\d+|localhost|\[::1\]", how)


def _host_and_port(value: object, hosts: str, problem: str) -> tuple[str, int]:
    match = re.fullmatch(rf"({hosts}):(\d{{1,5}})", value) if isinstance(value, str) else None
    if match is None or not 0 < int(match[2]) < 65536:
        raise _ValueError(f"{value!r} is {problem}")
    return match[1].strip("[]"), int(match[2])


@dataclass(frozen=True, slots=True)
class _Key:
    """The destination of a value: a field of Policy ("policy"), of AgentOptions ("options") or of
    one of the ResourceLimits.
    """

    target: str
    field: str
    parse: Callable[[Any], Any]


_PERCENT = _within(0, 100, "percent")

KEYS: dict[str, _Key] = {
    "when.external_power": _Key("policy", "require_external_power", _boolean),
    "when.assume_power": _Key("policy", "assume_power", _power),
    "when.min_battery": _Key("policy", "min_battery_percent", _PERCENT),
    "when.idle_for": _Key("policy", "idle_for_s", _duration),
    "when.train_while_in_use": _Key("policy", "train_while_in_use", _boolean),
    "when.busy_cpu": _Key("policy", "busy_cpu_percent", _PERCENT),
    "when.busy_cores": _Key("policy", "busy_cores", _within(0.01, 1000, "cores")),
    "when.busy_pressure": _Key("policy", "busy_pressure_percent", _PERCENT),
    "when.max_temperature": _Key("policy", "max_temperature_c", _within(20, 120, "°C")),
    "when.resume_temperature": _Key("policy", "resume_temperature_c", _within(10, 120, "°C")),
    "when.stop_when_throttled": _Key("policy", "stop_when_throttled", _boolean),
    "when.min_pause": _Key("policy", "min_pause_s", _duration),
    "when.keep_in_memory": _Key("policy", "keep_in_memory_for_s", _duration),
    "when.keep_awake": _Key("policy", "keep_awake", _boolean),
    "memory.min_available": _Key("policy", "min_free_memory_bytes", _size),
    "memory.pressure": _Key("policy", "memory_pressure_percent", _PERCENT),
    "storage.min_free": _Key("policy", "min_free_disk_bytes", _size),
    "storage.flash_writes_per_day": _Key("policy", "flash_write_budget_bytes_per_day", _size),
    "storage.keep_results": _Key("options", "keep_results_bytes", _size),
    "storage.keep_jobs": _Key("options", "keep_jobs", _count(1, 100_000)),
    "storage.job_log": _Key("options", "job_log_bytes", _size),
    "limits.not_in_use.cpu": _Key("not_in_use", "cpu_percent", _within(1, 100, "percent")),
    "limits.not_in_use.memory": _Key("not_in_use", "memory", str),
    "limits.in_use.cpu": _Key("in_use", "cpu_percent", _within(1, 100, "percent")),
    "limits.in_use.memory": _Key("in_use", "memory", str),
    "jobs.give_up_after": _Key("options", "max_failures_without_progress", _count(1, 1000)),
    "metrics.listen": _Key("options", "metrics_listen", _listen),
    "control.group": _Key("options", "control_group", _group),
    "peers.discover": _Key("options", "discover_peers", _boolean),
    "peers.name": _Key("options", "peer_name", _peer_name),
    "peers.port": _Key("options", "peer_port", _count(1, 65535)),
    "peers.pairing_port": _Key("options", "pairing_port", _count(1, 65535)),
    "peers.static": _Key("options", "static_peers", _addresses),
    "peers.share": _Key("options", "share_with_peers", _boolean),
    "peers.solve": _Key("options", "solve_for_peers", _boolean),
    "peers.take_jobs": _Key("options", "take_jobs", _boolean),
    "peers.introducer": _Key("options", "introducer", _peer_name),
    "peers.introduces": _Key("options", "introduces", _boolean),
    "peers.solve_on": _Key("options", "solve_on", _peer_name),
    "sensors.sysfs_root": _Key("options", "sysfs_root", _directory),
    "sensors.proc_root": _Key("options", "proc_root", _directory),
    "sensors.dev_root": _Key("options", "dev_root", _directory),
}


def load_config(main: Path | None) -> Config:
    """Return the configuration of `main` and the drop-ins next to it; a missing `main` means the defaults.

    Raises ConfigError with file, line and reason.
    """
    if main is None:
        return Config()
    drop_ins = sorted((main.parent / "config.d").glob("*.toml"))
    files = [path for path in (main, *drop_ins) if path.is_file()]
    config = Config()
    for file in files:
        config = replace(read_file(file, config), files=(*config.files, file))
    return config


def read_file(file: Path, base: Config = Config()) -> Config:
    """Return `base` with the settings of one file applied to it.

    Raises ConfigError with file, line and reason.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(file, None, f"cannot be read: {error}") from error
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(file, _toml_line(error), str(error).partition(" (at ")[0]) from error
    except ValueError as error:  # an integer of more digits than Python reads
        raise ConfigError(file, None, "contains a number with thousands of digits") from error
    flat, windows = _flatten(document), document.get("windows", {})
    energy = document.get("energy", {})
    config = replace(base, energy={**base.energy, **energy}) if isinstance(energy, Mapping) else base
    for key, value in flat.items():
        try:
            config = _apply(config, key, value)
        except _ValueError as error:
            raise ConfigError(file, locate(text, key), f"{key}: {error}") from error
    if windows:
        config = replace(config, policy=replace(config.policy, windows=_windows(file, text, windows)))
    _check_together(file, text, config.policy)
    _check_energy(file, text, config.energy)
    return config


def locate(text: str, key: str) -> int | None:
    """Return the line number of dotted `key` in a TOML text, or of its table, or None."""
    table, found = "", None
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*\[+\s*([^\]]+?)\s*\]+", line)
        if header:
            table = re.sub(r"\s*\.\s*", ".", header[1]).replace('"', "")
            if key == table or key.startswith(f"{table}."):
                found = number
            continue
        name = re.match(r"""\s*(["']?[\w.-]+["']?)\s*=""", line)
        if name:
            full = f"{table}.{name[1].strip(chr(34))}" if table else name[1]
            if full == key or key.startswith(f"{full}."):
                return number
    return found


def _toml_line(error: tomllib.TOMLDecodeError) -> int | None:
    match = re.search(r"at line (\d+)", str(error))
    return int(match[1]) if match else None


def _flatten(document: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in document.items():
        key = f"{prefix}{name}"
        if key in ("windows", "energy") and isinstance(value, Mapping):
            continue
        if isinstance(value, Mapping) and key not in KEYS:
            flat |= _flatten(value, f"{key}.")
        else:
            flat[key] = value
    return flat


def _apply(config: Config, key: str, value: object) -> Config:
    entry = KEYS.get(key)
    if entry is None:
        import difflib  # not for a daemon with correct settings: it stays in memory

        close = difflib.get_close_matches(key, KEYS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise _ValueError(f"no such setting{hint}")
    if entry.target == "options":
        return replace(config, options=replace(config.options, **{entry.field: entry.parse(value)}))
    if entry.target == "policy":
        return replace(config, policy=replace(config.policy, **{entry.field: entry.parse(value)}))
    limits: ResourceLimits = getattr(config.policy, entry.target)
    changed = _memory(limits, value) if entry.field == "memory" else replace(limits, cpu_percent=entry.parse(value))
    limited: dict[str, Any] = {entry.target: changed}
    return replace(config, policy=replace(config.policy, **limited))


def _memory(limits: ResourceLimits, value: object) -> ResourceLimits:
    """Return `limits` with a memory limit written as "70%" or "400M"."""
    percent = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", value) if isinstance(value, str) else None
    if percent is None:
        return replace(limits, memory_percent=100.0, memory_bytes=_size(value))
    if not 0 < float(percent[1]) <= 100:
        raise _ValueError(f"{value!r} is not between 0 and 100 percent")
    return replace(limits, memory_percent=float(percent[1]), memory_bytes=None)


def _windows(file: Path, text: str, table: object) -> tuple[TimeWindow, ...]:
    if not isinstance(table, Mapping):
        raise ConfigError(
            file, locate(text, "windows"), 'windows: write it as a table, [windows] every = ["22:00-07:00"]'
        )
    found: list[TimeWindow] = []
    for day, value in table.items():
        key = f"windows.{day}"
        if day not in (*DAYS, "every"):
            raise ConfigError(file, locate(text, key), f"{key}: not a day; use every, {', '.join(DAYS)}")
        try:
            spans = [_span(text) for text in _list(value)]
        except _ValueError as error:
            raise ConfigError(file, locate(text, key), f"{key}: {error}") from error
        days = range(7) if day == "every" else [DAYS.index(day)]
        found += [TimeWindow(weekday, start, end) for weekday in days for start, end in spans]
    return tuple(found)


def _check_together(file: Path, text: str, policy: Policy) -> None:
    if policy.resume_temperature_c >= policy.max_temperature_c:
        keys = ("when.resume_temperature", "when.max_temperature")
        line = max((number for key in keys if (number := locate(text, key)) is not None), default=None)
        numbers = f"{policy.resume_temperature_c:g} against {policy.max_temperature_c:g} °C"
        raise ConfigError(file, line, f"when.resume_temperature must be below when.max_temperature ({numbers})")


def _check_energy(file: Path, text: str, table: Mapping[str, object]) -> None:
    """Let the meter check its own table, so that an error in it is also reported with its line."""
    if not table:
        return
    from port_agent.energy.sources.registry import EnergyConfig, EnergyConfigError

    try:
        EnergyConfig.from_table(table)
    except EnergyConfigError as error:
        raise ConfigError(file, locate(text, f"energy.{error.key}"), str(error)) from error


def restart_needed(old: Config, new: Config) -> list[str]:
    """Return the settings in `new` that differ and that a daemon reads only at its start."""
    fields_ = ("control_group", "metrics_listen")
    names = {entry.field: key for key, entry in KEYS.items() if entry.target == "options"}
    changed = [names[name] for name in fields_ if getattr(old.options, name) != getattr(new.options, name)]
    return changed + (["energy"] if dict(old.energy) != dict(new.energy) else [])


def describe_config(config: Config) -> dict[str, object]:
    """Return the settings in force as plain values, for `status --json` and `doctor`."""
    policy = config.policy
    plain = {item.name: getattr(policy, item.name) for item in fields(policy)}
    plain["assume_power"] = policy.assume_power.value if policy.assume_power else "auto"
    plain["windows"] = [f"{DAYS[w.weekday]} {w.start:%H:%M}-{w.end:%H:%M}" for w in policy.windows]
    for name in ("not_in_use", "in_use"):
        limits = getattr(policy, name)
        plain[name] = {item.name: getattr(limits, item.name) for item in fields(limits)}
    return plain | {"files": [str(file) for file in config.files]}
