"""macOS: pmset for power and thermal limits, IOHIDSystem for the last input, psutil for the rest."""

import platform
import re
from dataclasses import replace
from pathlib import Path

import psutil

from port_agent.facts.idle import cpu_signal
from port_agent.facts.linux import free_disk
from port_agent.facts.macos_power_events import PowerEvents
from port_agent.facts.platform import OwnUse, SensorOptions, answer, run_command
from port_agent.facts.readings import Answer, Facts, Fault, IdleSignal, Power, PowerReading, ThrottleReading
from port_agent.facts.sysfs import Tree
from port_planner.ir.device_kinds import MPS

_SOURCE = re.compile(r"Now drawing from '([^']*)'")
_BATTERY = re.compile(r"-InternalBattery-\d+\s*(?:\(id=\d+\))?\s*(\d+)%;")
_HID_IDLE = re.compile(r'"HIDIdleTime"\s*=\s*(\d+)')
_THERM_LIMIT = re.compile(r"(CPU_Speed_Limit|CPU_Scheduler_Limit|CPU_Available_CPUs)\s*=\s*(\d+)")

_REFRESH_WHILE_TRAINING_S = 5.0


def parse_pmset_batt(text: str) -> PowerReading:
    """Return power source and level from `pmset -g batt`; a desktop prints no battery line."""
    source = _SOURCE.search(text)
    battery = _BATTERY.search(text)
    level = float(battery[1]) if battery else None
    if source is None:
        return PowerReading(Power.UNKNOWN, level, "pmset names no power source")
    return replace(power_from(source[1]), battery_percent=level)


def power_from(source: str) -> PowerReading:
    """Return the power reading of a source, which pmset and IOKit name alike."""
    if source == "AC Power":
        return PowerReading(Power.EXTERNAL, None, source)
    if source in ("Battery Power", "UPS Power"):
        return PowerReading(Power.BATTERY, None, source)
    return PowerReading(Power.UNKNOWN, None, f"the power source is {source!r}")


def parse_hid_idle(text: str) -> float | None:
    """Return seconds since the last keyboard or mouse input from `ioreg -c IOHIDSystem`."""
    match = _HID_IDLE.search(text)
    return int(match[1]) / 1e9 if match else None


def parse_pmset_therm(text: str) -> ThrottleReading:
    """Return whether the system limits the processor now, from `pmset -g therm`."""
    limits = {name: int(value) for name, value in _THERM_LIMIT.findall(text)}
    speeds = {name: value for name, value in limits.items() if name != "CPU_Available_CPUs"}
    if speeds:
        low = {name: value for name, value in speeds.items() if value < 100}
        detail = ", ".join(f"{name} {value} %" for name, value in low.items())
        return ThrottleReading(Answer.YES if low else Answer.NO, detail)
    if "No thermal warning level has been recorded" in text:
        return ThrottleReading(Answer.NO)
    return ThrottleReading(Answer.UNKNOWN, "pmset -g therm prints nothing known")


class MacPlatform:
    """Sensors of a Mac. Power and input come from commands, so they are up to `refresh_every_s` old."""

    refresh_every_s = _REFRESH_WHILE_TRAINING_S
    hint_works = False

    def __init__(self, events: PowerEvents | None = None) -> None:
        """`events`: reports a changed power source at once; without it, a change is seen up
        to `refresh_every_s` later.
        """
        self.tree, self._events = Tree(), events
        self._power = PowerReading(Power.UNKNOWN, None, "pmset was not asked yet")
        self._throttle = ThrottleReading(Answer.UNKNOWN)
        self._hid_idle_s: float | None = None
        self._slow_faults: tuple[Fault, ...] = ()
        self._previous_cpu: tuple[float, float, float] | None = None
        self._others_percent: float | None = None

    async def refresh(self) -> None:
        """Query pmset and ioreg; each may fail alone."""
        faults: list[Fault] = []
        self._power = PowerReading(Power.UNKNOWN, None, "pmset failed")
        try:
            self._power = parse_pmset_batt(await run_command("pmset", "-g", "batt"))
        except OSError as error:
            faults.append(Fault("power", str(error)))
        self._throttle = ThrottleReading(Answer.UNKNOWN)
        try:
            self._throttle = parse_pmset_therm(await run_command("pmset", "-g", "therm"))
        except OSError as error:
            faults.append(Fault("throttling", str(error)))
        self._hid_idle_s = None
        try:
            self._hid_idle_s = parse_hid_idle(await run_command("ioreg", "-c", "IOHIDSystem", "-d", "4"))
        except OSError as error:
            faults.append(Fault("input", str(error)))
        self._slow_faults = tuple(faults)

    def read(self, options: SensorOptions, own: OwnUse, now_s: float) -> Facts:
        """Return the facts of this moment; power, input and throttling as of the last `refresh`."""
        memory = psutil.virtual_memory()
        free_bytes, free_inodes = free_disk(self.tree, Path(options.state_dir))
        power = self._present_power()
        interfaces = psutil.net_if_stats()
        return Facts(
            power=power.power,
            power_detail=power.detail,
            battery_percent=power.battery_percent,
            idle_signals=(self._cpu_signal(options, own, now_s), self._input_signal(options)),
            throttle=self._throttle,
            free_disk_bytes=free_bytes,
            free_inodes=free_inodes,
            available_memory_bytes=memory.available,
            total_memory_bytes=memory.total,
            devices=frozenset({MPS} if platform.machine() == "arm64" else ()),
            online=answer(any(stats.isup for name, stats in interfaces.items() if name != "lo0")),
            faults=self.tree.take_faults() + self._slow_faults,
        )

    def plug_monitor(self) -> tuple[str, ...]:
        """Return the power source of the last event, or else of the last `refresh`: pmset is too
        slow for 20 queries a second.
        """
        return (self._present_power().power.value,)

    def awake_command(self, what: str) -> tuple[str, ...]:
        """Return a caffeinate command, which keeps the Mac awake whatever `what` names."""
        return ("caffeinate", "-i")

    def _present_power(self) -> PowerReading:
        """Return the power source of the last event, with the level from pmset."""
        source = None if self._events is None else self._events.source
        if source is None:
            return self._power
        return replace(power_from(source), battery_percent=self._power.battery_percent)

    def _input_signal(self, options: SensorOptions) -> IdleSignal:
        if self._hid_idle_s is None:
            return IdleSignal("input", Answer.UNKNOWN, "no HIDIdleTime")
        idle_s = self._hid_idle_s
        return IdleSignal("input", answer(idle_s >= options.input_quiet_s), f"last input {idle_s:.0f} s ago")

    def _cpu_signal(self, options: SensorOptions, own: OwnUse, now_s: float) -> IdleSignal:
        times = psutil.cpu_times()
        busy, cpus = times.user + times.system, psutil.cpu_count() or 1
        if self._previous_cpu is None or now_s - self._previous_cpu[0] >= 0.5:
            if self._previous_cpu is not None:
                others_s = busy - self._previous_cpu[1] - max(0.0, own.cpu_s - self._previous_cpu[2])
                share = others_s / ((now_s - self._previous_cpu[0]) * cpus)
                self._others_percent = min(100.0, max(0.0, 100.0 * share))
            self._previous_cpu = (now_s, busy, own.cpu_s)
        percent = self._others_percent
        return cpu_signal(percent, options, cpus)
