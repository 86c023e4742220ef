"""Facts about any board under Linux.

They come from files below /sys and /proc, and from logind, NetworkManager and vcgencmd where these exist.
"""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from port_agent.facts import gpu, idle, input_devices, power_supply, sessions, thermal
from port_agent.facts.jetson import read_tegrastats
from port_agent.facts.platform import OwnUse, SensorOptions, answer, run_command
from port_agent.facts.readings import Answer, Facts, Fault, IdleSignal, ThrottleReading
from port_agent.facts.sysfs import Tree

_LOGIN1 = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager")
_NETWORK_MANAGER = (
    "org.freedesktop.NetworkManager",
    "/org/freedesktop/NetworkManager",
    "org.freedesktop.NetworkManager",
)
_METERED = {1: Answer.YES, 2: Answer.NO, 3: Answer.YES, 4: Answer.NO}
"""Values of NMMetered: 1 and 3 mean yes (3 is a guess), 2 and 4 no (4 is a guess), 0 unknown."""


@dataclass(frozen=True, slots=True)
class _Files:
    """Readings from files; without them, slow commands are used."""

    throttle: ThrottleReading | None
    temperature_c: float | None
    gpu_percent: float | None
    awake_cards: tuple[str, ...] | None
    devices: frozenset[str]


def _read_files(tree: Tree, thermometers: thermal.TemperatureSensor) -> _Files:
    return _Files(
        thermal.read_throttled(tree),
        thermometers.read(tree),
        gpu.jetson_load_percent(tree),
        gpu.awake_cards(tree),
        gpu.present_kinds(tree),
    )


class LinuxPlatform:
    """Sensors of a Linux machine below injectable roots."""

    refresh_every_s = 30.0

    def __init__(
        self,
        sys: Path = Path("/sys"),
        proc: Path = Path("/proc"),
        dev: Path = Path("/dev"),
        ups_amperes: Callable[[], float] | None = None,
    ) -> None:
        """`ups_amperes`: as in `PowerSensor`."""
        self.tree = Tree(sys, proc, dev)
        self._load, self._power = idle.CpuLoad(), power_supply.PowerSensor(ups_amperes)
        self._busctl = shutil.which("busctl") if sys == Path("/sys") else None
        self._systemd_inhibit = shutil.which("systemd-inhibit") if sys == Path("/sys") else None
        self._vcgencmd = shutil.which("vcgencmd")
        self._tegrastats = shutil.which("tegrastats")
        self._nvidia_smi = shutil.which("nvidia-smi")
        self._card_percent: float | None = None
        self._terminals, self._inputs, self._sessions = idle.InputMonitor(), idle.InputMonitor(), idle.InputMonitor()
        self._idle_hint: bool | None = None
        self.hint_works = False
        """Whether logind ever reported that the system is idle; under some desktops it never does."""
        self._metered = Answer.UNKNOWN
        self._throttle: ThrottleReading | None = None
        self._slow_temperature_c: float | None = None
        self._slow_faults: tuple[Fault, ...] = ()
        self._had_slow_temperature = False
        self._thermometers = thermal.TemperatureSensor()
        self._files: _Files | None = None

    def read(self, options: SensorOptions, own: OwnUse, now_s: float) -> Facts:
        """Return the facts of this moment from files and the last `refresh`."""
        tree = self.tree
        files = self._files = _read_files(tree, self._thermometers)
        power = self._power.read(tree, now_s)
        memory = read_meminfo(tree)
        pressure = tree.text(tree.proc / "pressure/memory", "memory pressure")
        free_bytes, free_inodes = free_disk(tree, options.state_dir)
        facts = Facts(
            power=power.power,
            power_detail=power.detail,
            battery_percent=power.battery_percent,
            battery=power.battery,
            idle_signals=self._idle_signals(files, options, own, now_s),
            temperature_c=self._temperature(files),
            throttle=files.throttle or self._throttle or ThrottleReading(Answer.UNKNOWN),
            free_disk_bytes=free_bytes,
            free_inodes=free_inodes,
            available_memory_bytes=memory.get("MemAvailable"),
            total_memory_bytes=memory.get("MemTotal"),
            memory_pressure_percent=idle.parse_pressure(pressure) if pressure is not None else None,
            online=read_online(tree),
            metered=self._metered,
            devices=files.devices,
        )
        return replace(facts, faults=tree.take_faults() + self._slow_faults)

    async def refresh(self) -> None:
        """Query logind, NetworkManager, the Pi firmware, tegrastats and nvidia-smi; each may fail alone."""
        faults: list[Fault] = []
        files = self._files or _read_files(self._quick_tree(), thermal.TemperatureSensor())
        if self._busctl:
            hint = await self._bus_property(*_LOGIN1, "IdleHint")
            self._idle_hint = bool(hint) if hint is not None else None
            if hint is None and self.hint_works:
                faults.append(Fault(idle.LOGIND, "it gives no IdleHint any longer"))
            self.hint_works |= bool(hint)
            metered = await self._bus_property(*_NETWORK_MANAGER, "Metered")
            self._metered = _METERED.get(int(metered or 0), Answer.UNKNOWN)
        if self._vcgencmd and files.throttle is None:
            try:
                self._throttle = thermal.parse_throttled(await run_command(self._vcgencmd, "get_throttled"))
            except OSError as error:
                self._throttle = None
                faults.append(Fault("throttling", f"{error} (vcgencmd needs /dev/vcio: group video)"))
        if self._tegrastats and files.temperature_c is None:
            try:
                self._slow_temperature_c = await read_tegrastats(self._tegrastats)
            except OSError as error:
                self._slow_temperature_c = None
                faults.append(Fault("temperature", str(error)))
        self._card_percent = None
        if files.awake_cards == ():
            self._card_percent = 0.0
        elif self._nvidia_smi and files.gpu_percent is None:
            try:
                self._card_percent = gpu.parse_utilization(await run_command(self._nvidia_smi, *gpu.QUERY))
            except OSError as error:
                if files.devices:
                    faults.append(Fault(gpu.SENSOR, str(error)))
        self._slow_faults = tuple(faults)

    def plug_monitor(self) -> tuple[str, ...]:
        """Return a signature of the power supplies; faults of this quick check are left to `read`."""
        quick = self._quick_tree()
        return (*power_supply.plug_monitor(quick), self._power.feeding(quick))

    def awake_command(self, what: str) -> tuple[str, ...] | None:
        """Return a systemd-inhibit command; None without systemd, or if the sensors belong to another machine."""
        if self._systemd_inhibit is None:
            return None
        why = "a training job may run while nobody uses the device"
        return (self._systemd_inhibit, f"--what={what}", "--mode=block", "--who=PORT agent", f"--why={why}")

    def _quick_tree(self) -> Tree:
        """Return a second tree over the same files, for reads in parallel with `read`."""
        return Tree(self.tree.sys, self.tree.proc, self.tree.dev)

    def _idle_signals(
        self, files: "_Files", options: SensorOptions, own: OwnUse, now_s: float
    ) -> tuple[IdleSignal, ...]:
        percent = self._load.sample(self.tree, own.cpu_s, now_s)
        wall_s = time.time()
        for monitor, stamps in (
            (self._terminals, idle.terminal_stamps(self.tree)),
            (self._sessions, sessions.session_stamps(self.tree, wall_s)),
        ):
            monitor.look(stamps, now_s, {name: wall_s - stamp for name, stamp in stamps.items()})
        self._inputs.look(input_devices.read_counters(self.tree), now_s)
        if own.training:
            self._card_percent = None  # load that our own worker caused must not be taken for a user's
        return (
            idle.cpu_signal(percent, options, self._load.cpus),
            idle.pressure_signal(self.tree, options, own),
            self._terminals.signal("terminals", options, now_s, "no terminal is open"),
            self._inputs.signal("input", options, now_s, "nothing counts an input device"),
            self._sessions.signal("session", options, now_s, "no session's helper reports (`port-agent session`)"),
            idle.logind_signal(self._idle_hint, works=self.hint_works),
            *gpu.gpu_signal(self._card_percent if files.gpu_percent is None else files.gpu_percent, options, own),
        )

    def _temperature(self, files: "_Files") -> float | None:
        if files.temperature_c is not None:
            return files.temperature_c
        if self._slow_temperature_c is not None:
            self._had_slow_temperature = True
        elif self._had_slow_temperature:
            self.tree.fault(thermal.SENSOR, "tegrastats no longer gives a value")
        return self._slow_temperature_c

    async def _bus_property(self, service: str, path: str, interface: str, name: str) -> bool | int | None:
        """Return a D-Bus property, or None: a machine without that service is normal, not a fault."""
        try:
            return idle.parse_busctl(
                await run_command(self._busctl or "busctl", "--system", "get-property", service, path, interface, name)
            )
        except OSError:
            return None


def read_meminfo(tree: Tree) -> dict[str, int]:
    """Return /proc/meminfo in bytes; empty, with a fault, when it cannot be read."""
    text = tree.text(tree.proc / "meminfo", "memory", required=True) or ""
    found = {}
    for line in text.splitlines():
        key, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[key] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    if text and "MemAvailable" not in found:
        tree.fault("memory", f"{tree.proc / 'meminfo'}: no MemAvailable in it")
    return found


def free_disk(tree: Tree, directory: Path) -> tuple[int | None, int | None]:
    """Return the bytes that an unprivileged process may still write below `directory`, and the number of
    files that it may create.
    """
    try:
        stats = tree.ask(directory, lambda: os.statvfs(directory))
    except OSError as error:
        tree.fault("disk", f"{directory}: {error.strerror}")
        return None, None
    return stats.f_bavail * stats.f_frsize, stats.f_favail if stats.f_files else None


def read_online(tree: Tree) -> Answer:
    """Return whether a network interface other than loopback is up."""
    interfaces = [entry for entry in tree.children(tree.sys / "class/net", "network") if entry.name != "lo"]
    if not interfaces:
        return Answer.UNKNOWN
    states = [tree.text(entry / "operstate", f"network/{entry.name}") for entry in interfaces]
    known = [state for state in states if state is not None]
    return answer("up" in known or "unknown" in known if known else None)
