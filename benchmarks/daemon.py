"""What the daemon costs while it has nothing to do.

    python benchmarks/daemon.py [--seconds 600] [--discover] [--json]

Starts `port-agent run` with an empty state directory, waits for its READY message, and then watches the process:
resident memory, wake-ups (voluntary context switches of all its threads) and CPU time. boinc-client is measured the
same way alongside it when it is installed (Debian package boinc-client), attached to no project. With --discover the
daemon also looks for other agents on the network, which is off by default and costs more memory than the limit.
"""

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.tables import table_console

ROOT = Path(__file__).resolve().parents[1]
RSS_LIMIT_BYTES, WAKEUPS_LIMIT, CPU_LIMIT_PERCENT, READY_LIMIT_S = 35_000_000, 1.0, 0.1, 2.0
SETTLE_S = 5.0
"""Start-up work (imports, first readings) is not idling."""


@dataclass(frozen=True)
class Cost:
    """What a process cost over a span of time."""

    name: str
    ready_s: float | None
    rss_bytes: int
    pss_bytes: int
    wakeups_per_s: float
    cpu_percent: float
    seconds: float


def status_kb(pid: int, file: str, key: str) -> int:
    """Return a value in kB from a /proc file, in bytes."""
    for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


def wakeups(pid: int) -> int:
    """Return the voluntary context switches of all threads."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            for line in (task / "status").read_text().splitlines():
                if line.startswith("voluntary_ctxt_switches:"):
                    total += int(line.split()[1])
    return total


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def watch(name: str, pid: int, ready_s: float | None, seconds: float) -> Cost:
    """Return what process `pid` costs over `seconds`."""
    time.sleep(SETTLE_S)
    before_wakeups, before_cpu_s, began_s = wakeups(pid), cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    span_s = time.monotonic() - began_s
    return Cost(
        name,
        ready_s,
        status_kb(pid, "status", "VmRSS"),
        status_kb(pid, "smaps_rollup", "Pss"),
        (wakeups(pid) - before_wakeups) / span_s,
        100.0 * (cpu_s(pid) - before_cpu_s) / span_s,
        span_s,
    )


@contextlib.contextmanager
def running_agent(root: Path, *, discover: bool) -> Iterator[tuple[int, float]]:
    """Start the daemon; yields its process id and the seconds until it was ready."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(root / "notify"))
        notify.settimeout(60.0)
        environment = {**os.environ, "NOTIFY_SOCKET": str(root / "notify")}
        began_s = time.monotonic()
        words = ["run", "--foreground", "--state-dir", str(root / "state"), "--runtime-dir", str(root / "run")]
        if discover:
            (root / "config.toml").write_text("[peers]\ndiscover = true\n")
            words += ["--config", str(root / "config.toml")]
        process = subprocess.Popen([sys.executable, "-m", "port_agent.cli", *words], cwd=ROOT, env=environment)
        try:
            while b"READY=1" not in notify.recv(4096):
                pass
            yield process.pid, time.monotonic() - began_s
        finally:
            stop(process)


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End a process; one that does not end within a minute is killed and named, and the figures stay."""
    process.terminate()
    try:
        process.wait(60.0)
    except subprocess.TimeoutExpired:
        print(f"process {process.pid} did not stop within 60 s and was killed", file=sys.stderr)
        process.kill()
        process.wait()


@contextlib.contextmanager
def running_boinc(program: str, root: Path) -> Iterator[int]:
    """Start boinc-client in an empty directory, attached to nothing."""
    process = subprocess.Popen(
        [program, "--dir", str(root), "--no_gui_rpc"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process.pid
    finally:
        stop(process)


def measure(seconds: float, *, discover: bool) -> list[Cost]:
    """Return the costs of the daemon, and those of boinc-client if it is installed."""
    costs = []
    with tempfile.TemporaryDirectory(prefix="port-agent-idle-") as directory:
        with running_agent(Path(directory), discover=discover) as (pid, ready_s):
            costs.append(watch("port-agent, discovery on" if discover else "port-agent", pid, ready_s, seconds))
        boinc = shutil.which("boinc")
        if boinc:
            home = Path(directory) / "boinc"
            home.mkdir()
            with running_boinc(boinc, home) as pid:
                costs.append(watch("boinc-client", pid, None, seconds))
    return costs


def main() -> int:
    """Measure and print; fails when the daemon is over one of its limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--discover", action="store_true", help="with [peers] discover = true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    costs = measure(arguments.seconds, discover=arguments.discover)
    if arguments.json:
        print(json.dumps([asdict(cost) for cost in costs], indent=2))
    else:
        table = Table(title=f"Idle for {arguments.seconds:.0f} s")
        for column in ("", "ready s", "RSS MB", "PSS MB", "wake-ups/s", "CPU %"):
            table.add_column(column, justify="right" if column else "left")
        for cost in costs:
            ready = "" if cost.ready_s is None else f"{cost.ready_s:.2f}"
            memory = (f"{cost.rss_bytes / 1e6:.1f}", f"{cost.pss_bytes / 1e6:.1f}")
            table.add_row(cost.name, ready, *memory, f"{cost.wakeups_per_s:.2f}", f"{cost.cpu_percent:.3f}")
        table.add_row("limit", f"{READY_LIMIT_S:.0f}", f"{RSS_LIMIT_BYTES / 1e6:.1f}", "", "1.00", "0.100", style="dim")
        table_console().print(table)
        if len(costs) == 1:
            table_console().print("boinc-client is not installed (apt-get install boinc-client), so it is not shown.")
    agent = costs[0]
    over = (
        agent.rss_bytes > RSS_LIMIT_BYTES
        or agent.wakeups_per_s > WAKEUPS_LIMIT
        or agent.cpu_percent > CPU_LIMIT_PERCENT
        or (agent.ready_s or 0.0) > READY_LIMIT_S
    )
    return int(over)


if __name__ == "__main__":
    raise SystemExit(main())
