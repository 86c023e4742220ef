"""Whether the device is idle: several signals on Linux, each yes, no or unknown.

No single source can be trusted: logind's hint is stuck under several desktops, a headless Pi has no X server, and
pressure includes our own worker. The signals are the CPU use of others, pressure while we do not train, and input on
terminals and consoles. Further ones are counters of input devices, desktops that are queried in their sessions, and
logind. Its "not idle" counts only after it has reported idle once.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from port_agent.facts.platform import OwnUse, SensorOptions
from port_agent.facts.readings import Answer, IdleSignal
from port_agent.facts.sysfs import Tree
from port_planner.base.units import format_seconds

SENSOR, LOAD, LOGIND = "terminals", "cpu load", "logind"
MIN_SAMPLE_S = 0.5
"""Shortest window of /proc/stat in seconds; shorter ones contain a handful of ticks, which is noise."""


_CPU_LINE = re.compile(r"^cpu\d+ ", re.MULTILINE)
_TERMINAL = re.compile(r"tty[1-9]\d*|console|\d+")
"""Virtual consoles below /dev, and pseudoterminals below /dev/pts."""
_LINE = re.compile(r"tty[^\d].*|(hvc|xvc|hvsi|sclp).+")
"""Serial lines and consoles of virtual machines, below /dev."""
_SECONDS_SHOWN_S = 120.0


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Ticks since boot over all CPUs, from the first line of /proc/stat."""

    busy: int
    total: int
    cpus: int = 1


def parse_stat(text: str) -> CpuTimes | None:
    """Parse the CPU times of /proc/stat; None if its first line is not in the kernel's format."""
    words = text.partition("\n")[0].split()
    if len(words) < 6 or words[0] != "cpu" or not all(word.isdigit() for word in words[1:]):
        return None
    ticks = [int(word) for word in words[1:9]]  # guest time (9, 10) is already in user and nice
    resting = ticks[3] + ticks[4]  # idle + iowait
    cpus = len(_CPU_LINE.findall(text))
    return CpuTimes(busy=sum(ticks) - resting, total=sum(ticks), cpus=max(1, cpus))


def parse_pressure(text: str) -> float | None:
    """Return `some avg10` of a /proc/pressure file, in percent."""
    match = re.search(r"^some avg10=(\d+(?:\.\d+)?)", text, re.MULTILINE)
    return float(match[1]) if match else None


class CpuLoad:
    """Share of the machine's CPUs that others used since the previous sample."""

    def __init__(self, ticks_per_s: float = float(os.sysconf("SC_CLK_TCK"))) -> None:
        self._ticks_per_s = ticks_per_s
        self._previous: tuple[float, CpuTimes, float] | None = None
        self.others_percent: float | None = None
        self.cpus = 1

    def sample(self, tree: Tree, own_cpu_s: float, now_s: float) -> float | None:
        """Return the share in percent, or None before the second sample."""
        if self._previous is not None and 0 <= now_s - self._previous[0] < MIN_SAMPLE_S:
            return self.others_percent
        text = tree.text(tree.proc / "stat", LOAD, required=True)
        times = parse_stat(text) if text is not None else None
        if times is None:
            if text is not None:
                tree.fault(LOAD, f"{tree.proc / 'stat'}: unknown format {text[:40]!r}")
            self._previous, self.others_percent = None, None
            return None
        if self._previous is not None:
            self.others_percent = self._difference(self._previous, times, own_cpu_s)
            if times == self._previous[1]:
                tree.fault(LOAD, f"{tree.proc / 'stat'}: its counters stand still")
                self.others_percent = None
        self._previous, self.cpus = (now_s, times, own_cpu_s), times.cpus
        return self.others_percent

    def _difference(self, previous: tuple[float, CpuTimes, float], times: CpuTimes, own_s: float) -> float | None:
        total = times.total - previous[1].total
        own_ticks = (own_s - previous[2]) * self._ticks_per_s
        if total <= 0 or own_ticks < 0:  # counters restarted: a worker ended, or a CPU went offline
            return self.others_percent
        busy = times.busy - previous[1].busy - own_ticks
        return min(100.0, max(0.0, 100.0 * busy / total))


def cpu_signal(percent: float | None, options: SensorOptions, cpus: int = 1) -> IdleSignal:
    """Return the signal of others' CPU use, by `percent` of all CPUs and by whole CPUs, of which a person needs few."""
    if percent is None:
        return IdleSignal("load", Answer.UNKNOWN, "no CPU figure yet")
    cores = percent * cpus / 100.0
    quiet = percent <= options.busy_cpu_percent and cores <= options.busy_cores
    limits = f"limits {options.busy_cpu_percent:.0f} %, {options.busy_cores:g}"
    detail = f"others use {percent:.0f} % CPU, {cores:.1f} of {cpus} cores ({limits})"
    return IdleSignal("load", Answer.YES if quiet else Answer.NO, detail)


def pressure_signal(tree: Tree, options: SensorOptions, own: OwnUse) -> IdleSignal:
    """Return the signal of CPU and IO pressure; unknown while our own worker causes some of it."""
    if own.training:
        return IdleSignal("pressure", Answer.UNKNOWN, "not judged while the worker runs")
    levels = {}
    for resource in ("cpu", "io"):
        text = tree.text(tree.proc / "pressure" / resource, f"pressure/{resource}")
        level = parse_pressure(text) if text is not None else None
        if level is not None:
            levels[resource] = level
    if not levels:
        return IdleSignal("pressure", Answer.UNKNOWN, "no PSI in this kernel")
    worst = max(levels, key=lambda resource: levels[resource])
    idle = Answer.YES if levels[worst] <= options.busy_pressure_percent else Answer.NO
    return IdleSignal("pressure", idle, f"{worst} {levels[worst]:.0f} % (limit {options.busy_pressure_percent:.0f} %)")


class InputMonitor:
    """When a timestamp or counter last changed, which shows that somebody is present. Needs no wall clock."""

    def __init__(self) -> None:
        self._marks: dict[str, float] = {}
        self._last: tuple[float, str] | None = None

    def look(self, marks: Mapping[str, float], now_s: float, known_s: Mapping[str, float] | None = None) -> None:
        """Record the current marks.

        `known_s`: seconds since the last change of those marks that report it themselves.
        """
        for name, mark in marks.items():
            if name not in self._marks:
                self._note(now_s - max(0.0, (known_s or {}).get(name, 0.0)), name)
            elif mark != self._marks[name]:
                self._note(now_s, name)
        self._marks = dict(marks)

    def signal(self, name: str, options: SensorOptions, now_s: float, nothing: str) -> IdleSignal:
        """Return the signal of the marks under this name; `nothing`: its text if there are no marks."""
        if self._last is None or not self._marks:
            return IdleSignal(name, Answer.UNKNOWN, nothing)
        age_s, where = now_s - self._last[0], self._last[1]
        idle = Answer.YES if age_s >= options.input_quiet_s else Answer.NO
        age = f"{age_s:.0f} s" if age_s < _SECONDS_SHOWN_S else format_seconds(age_s)
        return IdleSignal(name, idle, f"last input {age} ago ({where})")

    def _note(self, at_s: float, name: str) -> None:
        if self._last is None or at_s >= self._last[0]:
            self._last = (at_s, name)


def terminal_stamps(tree: Tree) -> dict[str, float]:
    """Return when input was last read from each terminal, in Unix time: the kernel stamps them (every 8 s).

    People use consoles, pseudoterminals, and those other lines that the kernel calls consoles or that login gave to the
    group of /dev/tty. The rest belong to devices.
    """
    active = (tree.text(tree.sys / "class/tty/console/active", SENSOR) or "").split()
    login = tree.stat(tree.dev / "tty", SENSOR)
    stamps = {}
    for place in (*tree.children(tree.dev, SENSOR, required=True), *tree.children(tree.dev / "pts", SENSOR)):
        is_line = _LINE.fullmatch(place.name) is not None
        found = tree.stat(place, SENSOR) if is_line or _TERMINAL.fullmatch(place.name) else None
        if found is None:
            continue
        if not is_line or place.name in active or (login is not None and found.st_gid == login.st_gid):
            stamps[f"pts/{place.name}" if place.name.isdigit() else place.name] = found.st_atime
    return stamps


def parse_busctl(text: str) -> bool | int | None:
    """Parse the value printed by `busctl get-property`: `b true`, `t 123`, `u 4`."""
    match = re.fullmatch(r"(b|[a-z]) (true|false|\d+)", text.strip())
    if match is None:
        return None
    return match[2] == "true" if match[1] == "b" else int(match[2])


def logind_signal(hint: bool | None, *, works: bool = False) -> IdleSignal:
    """Return logind's opinion. Without `works`, a "no" is weak, because many sessions never set the hint."""
    if hint is None:
        return IdleSignal("logind", Answer.UNKNOWN, "logind gives no hint", weak=True)
    doubt = "" if hint or works else ", which counts once it has said yes"
    detail = f"IdleHint={'yes' if hint else 'no'}{doubt}"
    return IdleSignal("logind", Answer.YES if hint else Answer.NO, detail, weak=not works)
