"""Is the device left alone? Several signals on Linux, each yes, no or unknown.

No single source can be trusted: logind's hint is stuck under several desktops, there is no X server to ask on a
headless Pi, and pressure counts our own worker too. So: what others use of the CPU, pressure while we do not train,
input on terminals, and logind as a weak signal.
"""

import os
import re
from dataclasses import dataclass

from port_agent.facts.platform import OwnUse, SensorOptions
from port_agent.facts.readings import Answer, IdleSignal
from port_agent.facts.sysfs import Tree

MIN_SAMPLE_S = 0.5
"""Shorter windows of /proc/stat are a handful of ticks: noise."""


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Ticks since boot over all CPUs, from the first line of /proc/stat."""

    busy: int
    total: int


def parse_stat(text: str) -> CpuTimes | None:
    """Return the CPU times of /proc/stat, or None when its first line is not what the kernel writes."""
    words = text.partition("\n")[0].split()
    if len(words) < 6 or words[0] != "cpu" or not all(word.isdigit() for word in words[1:]):
        return None
    ticks = [int(word) for word in words[1:9]]  # guest time (9, 10) is already in user and nice
    resting = ticks[3] + ticks[4]  # idle + iowait
    return CpuTimes(busy=sum(ticks) - resting, total=sum(ticks))


def parse_pressure(text: str) -> float | None:
    """Return `some avg10` of a /proc/pressure file in percent."""
    match = re.search(r"^some avg10=(\d+(?:\.\d+)?)", text, re.MULTILINE)
    return float(match[1]) if match else None


class CpuLoad:
    """Share of the machine's CPUs that others used since the previous sample."""

    def __init__(self, ticks_per_s: float = float(os.sysconf("SC_CLK_TCK"))) -> None:
        self._ticks_per_s = ticks_per_s
        self._previous: tuple[float, CpuTimes, float] | None = None
        self.others_percent: float | None = None

    def sample(self, tree: Tree, own_cpu_s: float, now_s: float) -> float | None:
        """Return the share in percent, or None before the second sample."""
        if self._previous is not None and 0 <= now_s - self._previous[0] < MIN_SAMPLE_S:
            return self.others_percent
        text = tree.text(tree.proc / "stat", "cpu load", required=True)
        times = parse_stat(text) if text is not None else None
        if times is None:
            if text is not None:
                tree.fault("cpu load", f"{tree.proc / 'stat'}: unknown format {text[:40]!r}")
            self._previous, self.others_percent = None, None
            return None
        if self._previous is not None:
            self.others_percent = self._difference(self._previous, times, own_cpu_s)
        self._previous = (now_s, times, own_cpu_s)
        return self.others_percent

    def _difference(self, previous: tuple[float, CpuTimes, float], times: CpuTimes, own_s: float) -> float | None:
        total = times.total - previous[1].total
        own_ticks = (own_s - previous[2]) * self._ticks_per_s
        if total <= 0 or own_ticks < 0:  # counters restarted: a worker ended, or a CPU went offline
            return self.others_percent
        busy = times.busy - previous[1].busy - own_ticks
        return min(100.0, max(0.0, 100.0 * busy / total))


def cpu_signal(percent: float | None, options: SensorOptions) -> IdleSignal:
    """Return what the CPU use of others says."""
    if percent is None:
        return IdleSignal("load", Answer.UNKNOWN, "no CPU figure yet")
    idle = Answer.YES if percent <= options.busy_cpu_percent else Answer.NO
    return IdleSignal("load", idle, f"others use {percent:.0f} % CPU (limit {options.busy_cpu_percent:.0f} %)")


def pressure_signal(tree: Tree, options: SensorOptions, own: OwnUse) -> IdleSignal:
    """Return what CPU and IO pressure say; silent while our own worker causes some of it."""
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


def terminal_signal(tree: Tree, options: SensorOptions, wall_s: float) -> IdleSignal:
    """Return what terminals say: the kernel stamps a tty when input is read from it."""
    newest: float | None = None
    for entry in tree.children(tree.dev / "pts", "terminals"):
        if not entry.name.isdigit():
            continue
        try:
            stamp = entry.stat().st_atime
        except OSError:
            continue  # closed between listing and looking
        newest = stamp if newest is None else max(newest, stamp)
    if newest is None:
        return IdleSignal("terminals", Answer.UNKNOWN, "no terminal is open")
    age = wall_s - newest
    if age < 0:
        return IdleSignal("terminals", Answer.UNKNOWN, "last input lies in the future: the clock was set back")
    idle = Answer.YES if age >= options.input_quiet_s else Answer.NO
    return IdleSignal("terminals", idle, f"last input {age:.0f} s ago")


def parse_busctl(text: str) -> bool | int | None:
    """Return the value that `busctl get-property` printed: `b true`, `t 123`, `u 4`."""
    match = re.fullmatch(r"(b|[a-z]) (true|false|\d+)", text.strip())
    if match is None:
        return None
    return match[2] == "true" if match[1] == "b" else int(match[2])


def logind_signal(hint: bool | None) -> IdleSignal:
    """Return logind's opinion; "no" alone is weak, since many sessions never set the hint."""
    if hint is None:
        return IdleSignal("logind", Answer.UNKNOWN, "logind gives no hint", weak=True)
    return IdleSignal("logind", Answer.YES if hint else Answer.NO, f"IdleHint={'yes' if hint else 'no'}", weak=True)
