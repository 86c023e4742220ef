"""Examine the device: sensors, permissions, flash speed, control groups, clock.

Each finding comes with its remedy.
"""

import asyncio
import contextlib
import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from port_agent.facts import Answer, IdleSignal, OwnUse, Platform, Power, SensorOptions, this_platform
from port_agent.facts.cpu_clusters import clusters_text, read_clusters
from port_agent.facts.platform import NO_INHIBITOR, run_command
from port_agent.facts.sysfs import Tree
from port_agent.guard import GuardProbe, probe_guard
from port_agent.guard.guard_probe import MIN_MAPPINGS
from port_agent.health.conditions import remedy_of
from port_agent.policy.config import AgentOptions, Config, sensor_options
from port_agent.policy.decide import Policy
from port_agent.system.cgroup import CgroupError, cgroup2_mount, own_path
from port_agent.system.clock import CLOCK_SET_AFTER_S
from port_agent.system.helper_process import HelperCommand, HelperError, run_helper
from port_planner.base.direct_io import bypass_page_cache
from port_planner.base.errors import PortError
from port_planner.base.units import format_bytes
from port_planner.ir.arithmetic import FLOAT32_INSTEAD
from port_planner.ir.device_kinds import BACKEND_GROUP

FLASH_TEST_BYTES = 16 << 20
"""Bytes of the flash test.

They exceed an SD card's buffer with negligible wear: a 4 GB card survives the test a million times.
"""
SLOW_WRITE_BYTES_PER_S = 5 << 20
"""Bytes per second below which flash counts as slow: a checkpoint of 50 MB then takes ten seconds."""


PROBE_BYTES, PROBE_SHARE = 64 << 20, 0.5
"""Device memory that `port_agent.backend.examine` takes, and the share of it that must appear in a count."""
_EXAMINE_PATIENCE_S = 300.0
"""Longest duration of the examination in seconds. torch alone takes ten on a Pi, and the first use of a GPU longer; it
starts three times for each device.
"""
_TORCH_REPORT = "port_agent.health.torch_report"


class Verdict(Enum):
    """Result of a check."""

    GOOD = "good"
    NOTE = "note"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding; `cure` is empty if there is nothing to do."""

    name: str
    verdict: Verdict
    finding: str
    cure: str = ""

    def as_json(self) -> dict[str, str]:
        """Return plain values."""
        return {"name": self.name, "verdict": self.verdict.value, "finding": self.finding, "cure": self.cure}


def examine(state_dir: Path, config: Config, *, flash_test: bool = True) -> list[Check]:
    """Return all findings. With the flash test, it takes and blocks for a few seconds."""
    options = config.options
    begun = not _missing(state_dir)
    checks = [
        *_sensors(_nearest(state_dir), config),
        check_sleep(this_platform(*options.sensor_roots), config.policy),
        *check_cores(options.sysfs_root),
        *check_energy(config),
        *check_power_mode(),
        *(_state_directory(state_dir) if begun else [_no_state_directory(state_dir)]),
    ]
    if flash_test and begun:
        checks.append(_flash(state_dir))
    checks += _devices(options)
    checks += [_control_groups(options), _clock(), _serial_ports(), check_discovery(config.options), *_worker()]
    return checks


def _sensors(state_dir: Path, config: Config) -> Iterator[Check]:
    from port_agent.energy.sources.registry import ups_amperes

    sysfs, proc, dev = config.options.sensor_roots
    platform = this_platform(sysfs, proc, dev, ups_amperes(config.energy, sysfs.parent))
    asked = sensor_options(state_dir, config.policy)
    asyncio.run(platform.refresh())  # this runs in a thread of the agent, or in a process without an event loop
    platform.read(asked, OwnUse(), time.monotonic())
    time.sleep(0.6)  # the share of the CPU is the difference of two readings
    facts = platform.read(asked, OwnUse(), time.monotonic())
    battery = "" if facts.battery_percent is None else f", battery {facts.battery_percent:.0f} %"
    if facts.power is Power.UNKNOWN:
        cure = 'set assume_power = "external" (or "battery") under [when] in config.toml'
        yield Check("power", Verdict.BAD, f"unknown: {facts.power_detail}", cure)
    else:
        yield Check("power", Verdict.GOOD, f"{facts.power.value} ({facts.power_detail}){battery}")
    yield from check_idle_signals(facts.idle_signals)
    if facts.temperature_c is None:
        yield Check(
            "temperature",
            Verdict.NOTE,
            "no sensor: training cannot stop for heat",
            remedy_of("no-temperature"),
        )
    else:
        yield Check("temperature", Verdict.GOOD, f"{facts.temperature_c:.1f} °C")
    if facts.throttle.now is Answer.UNKNOWN:
        cure = "not needed if the temperature is known; on a Pi add the agent's user to the group video, for vcgencmd"
        yield Check("throttling", Verdict.NOTE, "no sensor reports whether the clock is throttled", cure)
    else:
        yield Check("throttling", Verdict.GOOD, f"{facts.throttle.now.value} {facts.throttle.detail}".strip())
    for fault in facts.faults:
        cure = "give the agent's user read access to it, or ignore it if the device has no such sensor"
        yield Check(f"sensor {fault.sensor}", Verdict.BAD, fault.reason, cure)


def check_idle_signals(idle_signals: tuple[IdleSignal, ...]) -> Iterator[Check]:
    """Check each signal of whether the device is idle; one that answers is enough."""
    known = any(signal.idle is not Answer.UNKNOWN for signal in idle_signals)
    for signal in idle_signals:
        finding = f"{signal.idle.value} ({signal.detail})"
        if signal.idle is not Answer.UNKNOWN:
            yield Check(f"idle: {signal.name}", Verdict.GOOD, finding)
        elif known:
            yield Check(f"idle: {signal.name}", Verdict.NOTE, finding, "not needed: another signal answers")
    if not known:
        detail = "; ".join(f"{signal.name}: {signal.detail}" for signal in idle_signals) or "no sensor for it"
        cure = "set idle_for = 0 under [when] in config.toml to train without this check; a kernel with psi=1 has such a signal"
        yield Check("idle", Verdict.BAD, f"no signal shows whether the device is in use ({detail})", cure)


def check_sleep(platform: Platform, policy: Policy) -> Check:
    """Test whether the agent can inhibit sleep."""
    if not policy.keep_awake:
        return Check("sleep", Verdict.GOOD, "not inhibited (when.keep_awake = false)")
    command = platform.awake_command("sleep")
    if command is None:
        return Check("sleep", Verdict.NOTE, f"cannot be inhibited: {NO_INHIBITOR}")
    try:
        asyncio.run(run_command(*command, "true"))
    except OSError as error:
        cure = (
            "install polkitd, which reads /usr/share/polkit-1/rules.d/port-agent.rules; for a machine that never "
            "sleeps by itself set keep_awake = false under [when] in config.toml"
        )
        return Check("sleep", Verdict.NOTE, f"cannot be inhibited ({error})", cure)
    return Check("sleep", Verdict.GOOD, "can be inhibited while a job may run on external power")


def check_cores(sysfs_root: Path) -> Iterator[Check]:
    """Report the kinds of cores; nothing if the kernel does not list them."""
    clusters = read_clusters(Tree(sys=sysfs_root))
    if not clusters:
        return
    fastest = len(clusters[0].cores)
    unlike = f"; `plan` measures the {fastest} fastest alone, too" if len(clusters) > 1 else ""
    yield Check("cores", Verdict.GOOD, clusters_text(clusters) + unlike)


def check_power_mode(root: Path = Path("/")) -> Iterator[Check]:
    """Report the power mode of a Jetson; nothing on other machines."""
    from port_agent.energy.sources.jetson_power_mode import power_mode

    mode = power_mode(root)
    if mode is not None:
        yield Check(
            "power mode",
            Verdict.GOOD,
            f"{mode}; speed and watts in bundles and board files are those of the mode in which they were made",
        )


def check_energy(config: Config, root: Path = Path("/")) -> Iterator[Check]:
    """Test every power source; those that this machine lacks are left out."""
    from port_agent.energy.sources.power_models import model_of
    from port_agent.energy.sources.registry import EnergyConfig, diagnose

    try:
        energy = EnergyConfig.from_table(config.energy)
        model = model_of(energy.board)
        reports = diagnose(energy, model, root)
    except PortError as error:
        yield Check("energy", Verdict.BAD, str(error), "correct the table [energy] of config.toml")
        return
    for report in reports:
        if report.present:
            finding = f"{report.text}; {report.info.describe()}" if report.info else report.text
            yield Check(f"energy: {report.name}", Verdict.GOOD if report.ok else Verdict.BAD, finding, report.remedy)


def _nearest(path: Path) -> Path:
    """Return the path, or its nearest existing parent, which is on the same file system."""
    return next(folder for folder in (path, *path.absolute().parents) if not _missing(folder))


def _missing(path: Path) -> bool:
    """Return whether nothing exists at a path; a path that may not be examined is not missing."""
    try:
        path.stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def _no_state_directory(state_dir: Path) -> Check:
    cure = (
        "the agent creates it at its first start (deploy/install.sh, then `systemctl start port-agent`; or `port-agent "
        "run --foreground --state-dir DIR`); `port-agent doctor --state-dir DIR` examines another"
    )
    return Check("state directory", Verdict.NOTE, f"{state_dir} does not exist yet; flash is not measured", cure)


def _state_directory(state_dir: Path) -> Iterator[Check]:
    try:
        with _as_owner(state_dir), tempfile.TemporaryFile(dir=state_dir) as probe:
            probe.write(b"x")
    except OSError as error:
        cure = remedy_of("state-unwritable", path=state_dir)
        yield Check("state directory", Verdict.BAD, f"{state_dir}: {error.strerror}", cure)
        return
    usage = shutil.disk_usage(state_dir)
    yield Check("state directory", Verdict.GOOD, f"{state_dir} writable, {format_bytes(usage.free)} free")


def _flash(state_dir: Path) -> Check:
    try:
        with _as_owner(state_dir):
            written_s, read_s = _flash_seconds(state_dir)
    except OSError as error:
        return Check("flash speed", Verdict.BAD, f"{state_dir}: {error.strerror}", "free space or check the card")
    write, read = FLASH_TEST_BYTES / written_s, FLASH_TEST_BYTES / read_s
    finding = f"writes {format_bytes(write)}/s with fsync, reads {format_bytes(read)}/s"
    if write < SLOW_WRITE_BYTES_PER_S:
        cure = "use an A2 card, USB or NVMe storage for the state directory; until then plan without paging"
        return Check("flash speed", Verdict.BAD, finding, cure)
    return Check("flash speed", Verdict.GOOD, finding)


@contextlib.contextmanager
def _as_owner(directory: Path) -> Iterator[None]:
    """Let root create files in a directory as its owner would, in this thread alone: setfsuid(2).

    Raises OSError.
    """
    owner = directory.stat()
    if os.geteuid() != 0 or sys.platform != "linux":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.setfsgid(owner.st_gid)
    libc.setfsuid(owner.st_uid)
    try:
        yield
    finally:
        libc.setfsuid(0)
        libc.setfsgid(os.getegid())


def _flash_seconds(directory: Path) -> tuple[float, float]:
    """Return the seconds of writing (with fsync) and of reading `FLASH_TEST_BYTES`, bypassing the page cache.

    The file is unnamed, so that nobody can replace it. Raises OSError.
    """
    block = mmap.mmap(-1, 1 << 20)  # page-aligned, as O_DIRECT requires
    block.write(os.urandom(1 << 20))
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        descriptor = file.fileno()
        bypass_page_cache(descriptor)
        began = time.perf_counter()
        for _ in range(FLASH_TEST_BYTES >> 20):
            os.write(descriptor, block)
        os.fsync(descriptor)
        written = time.perf_counter()
        os.lseek(descriptor, 0, os.SEEK_SET)
        for _ in range(FLASH_TEST_BYTES >> 20):
            os.readv(descriptor, [block])
        return written - began, time.perf_counter() - written


def _control_groups(options: AgentOptions) -> Check:
    if sys.platform != "linux":
        return Check("memory limits", Verdict.NOTE, "no control groups on this system; RLIMIT_DATA is used")
    cure = remedy_of("no-memory-limit")
    try:
        own = cgroup2_mount(options.proc_root) / own_path(options.proc_root).lstrip("/")
    except CgroupError as error:
        return Check("memory limits", Verdict.BAD, error.reason, cure)
    base = own.parent if own.name == "supervisor" else own
    try:
        controllers = (base / "cgroup.controllers").read_text().split()
    except OSError as error:
        return Check("memory limits", Verdict.BAD, f"{base}: {error.strerror}", cure)
    if "memory" not in controllers:
        return Check("memory limits", Verdict.BAD, f"no memory controller in {base}", cure)
    if not os.access(base / "cgroup.subtree_control", os.W_OK):
        return Check("memory limits", Verdict.BAD, f"{base} is not delegated to this user", cure)
    return Check("memory limits", Verdict.GOOD, f"delegated: {base} ({' '.join(controllers)})")


def _clock() -> Check:
    if time.time() < CLOCK_SET_AFTER_S:
        return Check("clock", Verdict.BAD, f"shows {time.ctime()}", remedy_of("clock-unset"))
    program = shutil.which("timedatectl")
    if program is None:
        return Check("clock", Verdict.NOTE, f"{time.ctime()}; no timedatectl to ask whether it is synchronised")
    try:
        done = subprocess.run(
            [program, "show", "-p", "NTPSynchronized", "--value"], capture_output=True, text=True, timeout=5.0
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("clock", Verdict.NOTE, f"{time.ctime()}; timedatectl: {error}")
    if done.stdout.strip() == "yes":
        return Check("clock", Verdict.GOOD, f"{time.ctime()}, synchronised")
    cure = "timedatectl set-ntp true; without it windows and deadlines are only as accurate as the clock"
    return Check("clock", Verdict.NOTE, f"{time.ctime()}, not synchronised", cure)


def _serial_ports() -> Check:
    ports = sorted(path for pattern in ("ttyACM*", "ttyUSB*") for path in Path("/dev").glob(pattern))
    closed = [str(path) for path in ports if not os.access(path, os.R_OK | os.W_OK)]
    if closed:
        cure = "add the agent's user to the group dialout, or install the udev rule"
        return Check("microcontrollers", Verdict.BAD, f"no access to {', '.join(closed)}", cure)
    return Check("microcontrollers", Verdict.GOOD, ", ".join(map(str, ports)) or "no serial port plugged in")


def _devices(options: AgentOptions) -> Iterator[Check]:
    """Report what each GPU offers to a plan. Without any sign of one, nothing is reported and no process is started."""
    platform = this_platform(options.sysfs_root, options.proc_root, options.dev_root)
    facts = platform.read(SensorOptions(Path("/")), OwnUse(), time.monotonic())
    signs = {*(facts.devices or ()), *entry_points(group=BACKEND_GROUP).names}
    if not signs:
        return
    try:
        version, reports = _of_a_process_with_torch("port_agent.backend.examine")
    except (HelperError, ValueError) as error:
        yield Check(
            "GPU", Verdict.BAD, f"torch could not look for it ({error})", "see what `python -c 'import torch'` says"
        )
        return
    for sign in sorted(signs - {report["kind"] for report in reports}):
        cure = 'install the torch wheel for this GPU (deploy/README.md, "A GPU"), and give the agent\'s user access to its device nodes'
        yield Check(f"GPU: {sign}", Verdict.BAD, f"there is a GPU, but torch {version} cannot use it", cure)
    yield from (check_device(report) for report in reports)


def _of_a_process_with_torch(module: str) -> Any:
    """Return the output of one of our modules, which may import torch. Raises ValueError or HelperError."""
    return json.loads(run_helper(HelperCommand(module, directory=None), within_s=_EXAMINE_PATIENCE_S))


def check_device(report: Mapping[str, Any]) -> Check:
    """Report what `port_agent.backend.examine` found about a device: its kind of memory, what limits
    it, and which bits repeat.
    """
    memory = (
        "shares the host's memory (--ram covers both)" if report["unified"] else "has memory of its own (--gpu-ram)"
    )
    blind = [name for name, nbytes in report["seen_by"].items() if nbytes < PROBE_SHARE * PROBE_BYTES]
    counted = "the kernel counts its memory" if not blind else f"{' and '.join(blind)} do not count its memory"
    enforced = ", ".join(f"{bound} {outcome}" for bound, outcome in report["enforced"].items())
    exact = (
        f"{report['reordered']} operators do not repeat to the bit; `plan` names them"
        if report["reordered"]
        else ("operators repeat to the bit")
    )
    finding = (
        f"{report['name']}, {memory}; context and libraries take {format_bytes(report['outside_bytes'])}; {counted}, "
        f"plans limit it; tested: {enforced}; {exact}"
    )
    if not report["bounded"]:
        cure = "keep --ram and --gpu-ram well below the machine's memory: nothing stops a step there that takes more than planned"
        return Check(f"GPU: {report['kind']}", Verdict.BAD, finding, cure)
    return Check(f"GPU: {report['kind']}", Verdict.GOOD, finding)


def check_discovery(options: AgentOptions) -> Check:
    """Test whether a multicast DNS packet comes back to this machine, on each network interface."""
    name = "discovery of peers"
    if not options.discover_peers:
        return Check(name, Verdict.GOOD, "off (discover = true under [peers] turns it on)")
    from port_agent.peers.peer_probe import probe

    results = probe()
    if not results:
        return Check(name, Verdict.NOTE, "on, but no network interface with multicast is up", "connect a network")
    finding = "on; " + "; ".join(f"{result.interface.name}: {result.trouble or 'works'}" for result in results)
    if not any(result.trouble for result in results):
        return Check(name, Verdict.GOOD, finding)
    cure = (
        "let UDP port 5353 in (ufw allow 5353/udp; firewall-cmd --add-service=mdns --permanent); a port that another "
        "program holds alone: disallow-other-stacks=no in avahi-daemon.conf; a guest network may isolate its devices"
    )
    return Check(name, Verdict.BAD, finding, cure)


def _worker() -> Iterator[Check]:
    """Look for torch without importing it (the supervisor never imports it), and test the worker's allocator."""
    from importlib.metadata import PackageNotFoundError, version

    from port_agent.malloc import preload_mode, preload_trouble

    try:
        found = version("torch")
    except PackageNotFoundError:
        cure = "install a CPU build of torch for the agent's Python"
        yield Check("torch", Verdict.BAD, f"not installed for {sys.executable}", cure)
    else:
        yield Check("torch", Verdict.GOOD, found)
        yield from _torch_itself()
    trouble = preload_trouble()
    if trouble:
        yield Check("allocator", Verdict.NOTE, trouble, remedy_of("no-allocator"))
    else:
        yield Check("allocator", Verdict.GOOD, preload_mode().value)
    yield check_guard(probe_guard(Path(tempfile.gettempdir())))


def check_guard(found: GuardProbe) -> Check:
    """Report the result of testing guarded memory, and what it works with."""
    name = "guarded memory"
    if found.trouble:
        cure = "`port-agent exec` without --guard-only intercepts operators and does not need it; a container's seccomp profile may forbid it"
        return Check(name, Verdict.NOTE, f"does not work: {found.trouble}", cure)
    pages = "pages move" if found.moves_pages else "pages are taken fresh (Linux 5.7 moves them)"
    parts = [f"works; {pages}, of {found.page_bytes >> 10} KiB"]
    if found.seccomp:
        parts.append("system calls are filtered (seccomp), but those that it needs are allowed")
    uffd = "may be opened but is not used" if found.userfaultfd else "may not be opened"
    parts.append(f"/dev/userfaultfd {uffd}: buffers of io_uring and libaio must not be tensors")
    finding = "; ".join(parts)
    if found.max_mappings is not None and found.max_mappings < MIN_MAPPINGS:
        cure = f"sysctl vm.max_map_count={MIN_MAPPINGS}"
        return Check(
            name, Verdict.NOTE, f"{finding}; vm.max_map_count is {found.max_mappings}: few tensors at a time", cure
        )
    return Check(name, Verdict.GOOD, finding)


def _torch_itself() -> Iterator[Check]:
    try:
        found = _of_a_process_with_torch(_TORCH_REPORT)
    except (HelperError, ValueError) as error:
        cure = "see what `python -c 'import torch'` says"
        yield Check("torch's private parts", Verdict.BAD, f"torch could not look for them ({error})", cure)
    else:
        yield from check_torch(found)


def check_torch(found: Mapping[str, Any]) -> Iterator[Check]:
    """Report the findings of `port_agent.health.torch_report`: private parts, and the cost of bfloat16 if
    it is computed in software.
    """
    yield check_torch_parts(found)
    if found["bfloat16"] is not None:
        yield Check("bfloat16", Verdict.NOTE, found["bfloat16"], FLOAT32_INSTEAD)


def check_torch_parts(found: Mapping[str, Any]) -> Check:
    """Report which private parts this torch lacks, and what that breaks."""
    name, missing = "torch's private parts", found["missing"]
    if not missing:
        return Check(name, Verdict.GOOD, f"all {found['parts']} that are used are unchanged")
    lacks = "; ".join(f"{part['name']} ({part['trouble']}), without it: {part['breaks']}" for part in missing)
    cure = "install a torch that this version was tested with (torch>=2.13,<2.16), or a later port-agent"
    return Check(name, Verdict.BAD, f"torch {found['version']} lacks {lacks}", cure)
