"""What paired devices cost an agent that has nothing to do.

    python -m benchmarks.peers [--agents 2] [--seconds 60] [--json]

Starts one agent that is paired with nobody, and then `--agents` of them, all paired with each other, on ports of this
machine's loopback: each holds a connection to every other one. Watches resident memory, wake-ups and CPU time of
each, as `benchmarks.daemon` does, and prints the middle one and the worst. Discovery is off:
`benchmarks.daemon --discover` has its cost.
"""

import argparse
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.daemon import ROOT, SETTLE_S, cpu_s, status_kb, stop, wakeups
from benchmarks.tables import table_console
from port_agent.peers.fleet.paired import PairedDevices, device_of
from port_agent.peers.identity.keys import Identity, own_identity

MEET_S = 600.0
"""Seconds until all agents have met: 50 that start at the same time share two cores here, with all other work."""
_ASK_AGAIN_S = 1.0
_STATE, _INODE, _ESTABLISHED = 3, 9, "01"
"""Columns and a state of /proc/PID/net/tcp (proc_net_tcp.txt of the kernel), which is that of
the process's own network.
"""


@dataclass(frozen=True)
class Share:
    """The cost of one agent over a span of time."""

    connections: int
    rss_bytes: int
    pss_bytes: int
    wakeups_per_s: float
    cpu_percent: float


@dataclass(frozen=True)
class Place:
    """Where an agent runs: the address at which others reach it, and the command that starts a program there."""

    address: str
    port: int
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Device:
    """An agent that will be started."""

    root: Path
    own: Identity
    place: Place


def on_loopback(count: int) -> list[Place]:
    """Return free ports of this machine."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [Place("127.0.0.1", sock.getsockname()[1]) for sock in held]


def devices(root: Path, places: Sequence[Place], more: str = "") -> list[Device]:
    """Return agents that are all paired with each other, not yet started; `more` is added to `[peers]` of each."""
    made = []
    for number, place in enumerate(places):
        home = root / f"device{number}"
        (home / "state").mkdir(parents=True)
        (home / "config.toml").write_text(f'[peers]\nname = "device{number}"\nport = {place.port}\n{more}')
        made.append(Device(home, own_identity(home / "state"), place))
    for device in made:
        paired = PairedDevices(device.root / "state")
        for other in made:
            if other is not device:
                at = (other.place.address, other.place.port)
                paired.add(device_of(other.own.certificate, other.root.name, 0.0, at))
    return made


@contextlib.contextmanager
def running(started: list[Device]) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Run agents until the block ends."""
    processes = []
    try:
        for device in started:
            words = ["--state-dir", "state", "--runtime-dir", "run", "--config", "config.toml"]
            command = [*device.place.words, sys.executable, "-P", "-m", "port_agent.cli", "run", *words]
            environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "MALLOC_ARENA_MAX": "2"}
            processes.append(subprocess.Popen(command, cwd=device.root, env=environment))
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            stop(process)


def connections(process: "subprocess.Popen[bytes]") -> int:
    """Return the number of an agent's connections, as the kernel counts them: a question to
    the agent would cost memory.
    """
    own = set()
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(descriptor.readlink().name)
    rows = [
        row.split()
        for name in ("tcp", "tcp6")
        for row in Path(f"/proc/{process.pid}/net/{name}").read_text().splitlines()
    ]
    return sum(row[_STATE] == _ESTABLISHED and f"socket:[{row[_INODE]}]" in own for row in rows if len(row) > _INODE)


def meet(processes: list["subprocess.Popen[bytes]"]) -> None:
    """Wait until each agent is connected to all others; end the program if that does not happen."""
    end_s = time.monotonic() + MEET_S
    while any(connections(process) != len(processes) - 1 for process in processes):
        if time.monotonic() > end_s:
            raise SystemExit(f"within {MEET_S:.0f} s: {[connections(process) for process in processes]} connections")
        time.sleep(_ASK_AGAIN_S)


def measure(places: Sequence[Place], seconds: float, more: str = "") -> list[Share]:
    """Return the cost of the agent at each place, all paired with all; `more` is added to
    `[peers]` of their configuration.
    """
    with tempfile.TemporaryDirectory(prefix="port-agent-peers-") as directory:
        started = devices(Path(directory), places, more)
        with running(started) as processes:
            time.sleep(SETTLE_S)
            meet(processes)
            time.sleep(SETTLE_S)
            before = [(wakeups(process.pid), cpu_s(process.pid)) for process in processes]
            began_s = time.monotonic()
            time.sleep(seconds)
            span_s = time.monotonic() - began_s
            return [
                Share(
                    connections(process),
                    status_kb(process.pid, "status", "VmRSS"),
                    status_kb(process.pid, "smaps_rollup", "Pss"),
                    (wakeups(process.pid) - woken) / span_s,
                    100.0 * (cpu_s(process.pid) - used_s) / span_s,
                )
                for process, (woken, used_s) in zip(processes, before, strict=True)
            ]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    alone, together = (measure(on_loopback(count), arguments.seconds) for count in (1, arguments.agents))
    if arguments.json:
        print(json.dumps({"alone": asdict(alone[0]), "together": [asdict(share) for share in together]}, indent=2))
        return 0
    table = Table(title=f"Idle for {arguments.seconds:.0f} s, {arguments.agents} agents paired with each other")
    for column in ("", "connections", "RSS MB", "PSS MB", "wake-ups/s", "CPU %"):
        table.add_column(column, justify="right" if column else "left")
    rows = (
        ("paired with nobody", alone, max),
        ("the middle one", together, statistics.median),
        ("the worst", together, max),
    )
    for name, shares, choose in rows:
        figures = (
            f"{choose(share.connections for share in shares):.0f}",
            f"{choose(share.rss_bytes for share in shares) / 1e6:.1f}",
            f"{choose(share.pss_bytes for share in shares) / 1e6:.1f}",
            f"{choose(share.wakeups_per_s for share in shares):.2f}",
            f"{choose(share.cpu_percent for share in shares):.3f}",
        )
        table.add_row(name, *figures)
    table_console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
