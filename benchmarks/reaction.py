"""How fast training stops when the conditions no longer hold.

    python benchmarks/reaction.py [--events 200] [--lag SECONDS] [--bundle JOB.port | --program] [--json]

Starts a real daemon and a real worker process (pure Python, 200 MB resident, instructions of 5 ms that log when they
start); the plug of a fake battery below an injected /sys is pulled at random moments. Two figures for each event:

- stopped: when the last training instruction began after the plug was pulled (must be below 100 ms),
- returned: when the worker process was gone and its memory free (must be below 1 s).

With --lag the battery keeps reporting Charging for this long after the plug is pulled (`inf`: forever), as laptops do.

With --bundle the real training worker runs that bundle (give it many steps). It says when no instruction runs any
more; what it has finished is committed before the process ends, and the second figure says how long that took.
The limits are then not those of the fake worker: a step that has begun its update is finished first, and a commit
takes what the medium takes.

With --program an unchanged PyTorch program runs under `port-agent exec --opportunistic`: a matrix product, an update of
a tensor, and so on, on 200 MB. It says when each operator has ended, and its memory is back when no more is resident
than two seconds after a pause before, and 5 %. Its page file is in --page-dir, whose speed bounds the second figure.
"""

import argparse
import json
import math
import os
import random
import select
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.tables import table_console  # noqa: E402
from port_agent.control.client import ControlClient, ControlError  # noqa: E402
from port_agent.supervisor.job.runner import LAST_COMMIT_S  # noqa: E402
from port_planner.base.units import format_bytes  # noqa: E402

CONFIG = """[when]
idle_for = 0
min_pause = 0
keep_in_memory = "{keep}"
[storage]
min_free = 0
[memory]
min_available = 0
pressure = 100
"""
BUNDLE = {
    "dimension": 64,
    "steps": 100_000_000,
    "instructions": 16,
    "instruction_s": 0.005,
    "checkpoint_every": 50,
    "seed": 1,
    "trace": True,
    "ballast_bytes": 200 << 20,
    "plans": [{"peak_bytes": 300 << 20, "seconds": 0.1, "joules": 0.1}],
}
MAINS = "POWER_SUPPLY_NAME=ACAD\nPOWER_SUPPLY_TYPE=Mains\nPOWER_SUPPLY_ONLINE={online}\n"
BATTERY = "POWER_SUPPLY_NAME=BAT0\nPOWER_SUPPLY_TYPE=Battery\nPOWER_SUPPLY_STATUS={status}\nPOWER_SUPPLY_CAPACITY=80\n"
STOP_LIMIT_S, RETURN_LIMIT_S = 0.1, 1.0
REAL_LIMIT_S = LAST_COMMIT_S + 1.0
"""The limits of a real worker: ten seconds for step and commit, and one second to end."""
GONE_WITHIN_S = 2 * REAL_LIMIT_S
STOPPED = b"stopped after step"
"""Text in a job's log, from agent/port_agent/supervisor/job/progress.py."""


PROGRAM = """
import struct, sys, time, torch
torch.ones(64, 64) @ torch.ones(64, 64)
torch.set_num_threads(1)
trace = open(sys.argv[1], "ab", buffering=0)
held = [torch.randn(1000, 1000) for _ in range(50)]
weight = torch.randn(1000, 1000)
while True:
    for tensor in held:
        made = tensor[:200] @ weight
        trace.write(struct.pack("<d", time.monotonic()))
        tensor[:200].add_(made, alpha=1e-9)
        trace.write(struct.pack("<d", time.monotonic()))
"""
PROGRAM_RAM = "600M"
BASE_MARGIN = 1.05
SETTLED_S = 2.0
TRACED_STEP_S = 0.2
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Rig:
    """A daemon with a fake plug and one endless job."""

    def __init__(self, root: Path, sys_root: Path, real_bundle: Path | None, lag_s: float = 0.0) -> None:
        self.root, self.sys, self.lag_s = root, sys_root, lag_s
        self.late: threading.Timer | None = None
        self.traced = real_bundle is None
        self.trace = root / "state/jobs/1/state/trace"
        self.log = root / "state/jobs/1/job.log"
        self.start_daemon(real_bundle)
        self.start_job(real_bundle)

    def start_daemon(self, real_bundle: Path | None) -> None:
        """Start the daemon with the worker that the job needs."""
        root, sys_root = self.root, self.sys
        (root / "config.toml").write_text(CONFIG.format(keep="0s"))
        self.plug(True)
        places = [root / "state", root / "run", root / "config.toml", sys_root]
        if real_bundle is None:
            words = ["tests.agent.live", *map(str, places)]
        else:
            names = ("--state-dir", "--runtime-dir", "--config", "--sysfs-root")
            pairs = zip(names, places, strict=True)
            words = ["port_agent.cli", "run", *(str(word) for pair in pairs for word in pair)]
        self.daemon = subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT)
        self.client = ControlClient(root / "run")
        while not self.answers():
            if self.daemon.poll() is not None:
                raise SystemExit(f"the daemon ended with {self.daemon.returncode}")
            time.sleep(0.01)

    def answers(self) -> bool:
        """Return whether the daemon listens."""
        try:
            self.client.get("/v1/status")
        except ControlError:
            return False
        return True

    def start_job(self, real_bundle: Path | None) -> None:
        """Give the daemon its job."""
        bundle = real_bundle or self.root / "job.json"
        if real_bundle is None:
            bundle.write_text(json.dumps(BUNDLE))
        token = self.client.upload("/v1/uploads", bundle)["upload"]
        self.client.post("/v1/jobs", name="job", upload=token, steps=BUNDLE["steps"])

    def plug(self, online: bool) -> None:
        """Write the fake power supplies: the plug last, and the battery's status with its lag."""
        if self.late is not None:
            self.late.cancel()
            self.late = None
        if online or not self.lag_s:
            self.write("BAT0", BATTERY.format(status="Charging" if online else "Discharging"))
        elif math.isfinite(self.lag_s):
            self.late = threading.Timer(self.lag_s, self.write, ("BAT0", BATTERY.format(status="Discharging")))
            self.late.start()
        self.write("ACAD", MAINS.format(online=int(online)))

    def write(self, name: str, text: str) -> None:
        """Write one power supply."""
        supply = self.sys / "class/power_supply" / name
        supply.mkdir(parents=True, exist_ok=True)
        temporary = self.sys / f"{name}.new"
        temporary.write_text(text)
        temporary.rename(supply / "uevent")

    def training_pid(self) -> int:
        """Wait until the worker trains and return its process id."""
        while True:
            job = self.client.get("/v1/status")["job"]
            if job and job["phase"] == "training" and job["wish"] == "train":
                before = self.last_start_s()
                time.sleep(0.03)
                if not self.traced or self.last_start_s() > before:
                    return int(job["pid"])
            time.sleep(0.01)

    def step_s(self) -> float:
        """Return how long a step of a real worker takes, as the span of random moments; it is
        learned from the first steps.
        """
        if self.traced:
            return TRACED_STEP_S
        while not (step_s := (self.client.get("/v1/status")["job"] or {}).get("step_s")):
            time.sleep(0.01)
        return float(step_s)

    def last_start_s(self) -> float:
        """Return when the newest training instruction began (monotonic clock)."""
        try:
            with self.trace.open("rb") as file:
                file.seek(-8, os.SEEK_END)
                return float(struct.unpack("<d", file.read(8))[0])
        except OSError:
            return 0.0

    def pull_and_wait_for_end(self, pid: int) -> tuple[float, float]:
        """Pull the plug; return seconds to the last instruction and to the end of the process.

        The last instruction is known by its start if instructions are traced, else by the worker's
        message that none runs any more.
        """
        descriptor = os.pidfd_open(pid)
        position = self.log.stat().st_size
        stopped_s = None
        pulled_s = time.monotonic()
        self.plug(False)
        while not select.select([descriptor], [], [], 0.001)[0]:
            now_s = time.monotonic()
            if now_s > pulled_s + GONE_WITHIN_S:
                raise SystemExit(f"the worker did not leave within {GONE_WITHIN_S:.0f} s")
            if stopped_s is None and not self.traced and self.says_stopped(position):
                stopped_s = now_s
        gone_s = time.monotonic() - pulled_s
        os.close(descriptor)
        if self.traced:
            return max(0.0, self.last_start_s() - pulled_s), gone_s
        return (gone_s if stopped_s is None else stopped_s - pulled_s), gone_s

    def says_stopped(self, position: int) -> bool:
        """Return whether the job's log says, behind `position`, that no instruction runs any more."""
        with self.log.open("rb") as file:
            file.seek(position)
            return STOPPED in file.read()

    def close(self) -> None:
        """End the daemon."""
        if self.late is not None:
            self.late.cancel()
        self.daemon.terminate()
        self.daemon.wait(10.0)


class ProgramRig(Rig):
    """The same as `Rig`, with an attached program instead of a worker."""

    def __init__(self, root: Path, sys_root: Path, page_dir: Path, lag_s: float) -> None:
        self.page_dir = page_dir
        super().__init__(root, sys_root, None, lag_s)

    def start_job(self, real_bundle: Path | None) -> None:
        """Start the program, which attaches itself."""
        script, self.trace = self.root / "train.py", self.root / "trace"
        script.write_text(PROGRAM)
        options = ["--ram", PROGRAM_RAM, "--opportunistic", "--runtime-dir", str(self.root / "run")]
        command = [sys.executable, "-m", "port_agent.cli", "exec", *options, "--page-dir", str(self.page_dir)]
        self.program = subprocess.Popen(
            [*command, "--", str(script), str(self.trace)], cwd=ROOT, stderr=subprocess.DEVNULL
        )
        for _ in range(2):  # after the first, torch loads what following under pressure needs
            self.busy_pages = self.resident_pages(self.training_pid())
            self.plug(False)
            time.sleep(SETTLED_S)
            self.base_pages = self.resident_pages(self.program.pid)
            self.plug(True)

    def resident_pages(self, pid: int) -> int:
        """Return the resident memory of the program."""
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])

    def pull_and_wait_for_end(self, pid: int) -> tuple[float, float]:
        """Pull the plug; return seconds to the last operator's end and until its memory is back."""
        pulled_s = time.monotonic()
        self.plug(False)
        while (pages := self.resident_pages(pid)) > self.base_pages * BASE_MARGIN:
            self.busy_pages = max(self.busy_pages, pages)
            if time.monotonic() > pulled_s + 10.0:
                raise SystemExit(
                    f"10 s after the plug was pulled {pages} pages are resident, {self.base_pages} at first"
                )
            time.sleep(0.001)
        back_s = time.monotonic() - pulled_s
        return max(0.0, self.last_start_s() - pulled_s), back_s

    def close(self) -> None:
        """End the program and the daemon."""
        busy, base = (format_bytes(pages * PAGE_BYTES) for pages in (self.busy_pages, self.base_pages))
        sys.stderr.write(f"resident: {busy} at most, {base} while paused\n")
        self.program.kill()
        self.program.wait()
        super().close()


def measure(
    events: int, real_bundle: Path | None, seed: int = 1, page_dir: Path | None = None, lag_s: float = 0.0
) -> dict[str, list[float]]:
    """Return the reaction times of `events` pulled plugs, in seconds."""
    rng = random.Random(seed)
    stopped, returned = [], []
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # like the real /sys, it never waits for a disk
    with (
        tempfile.TemporaryDirectory(prefix="port-agent-reaction-") as directory,
        tempfile.TemporaryDirectory(prefix="port-agent-sys-", dir=memory) as sys_root,
    ):
        root, sysfs = Path(directory), Path(sys_root)
        rig = Rig(root, sysfs, real_bundle, lag_s) if page_dir is None else ProgramRig(root, sysfs, page_dir, lag_s)
        try:
            for _ in range(events):
                pid = rig.training_pid()
                time.sleep(rng.uniform(0.0, rig.step_s()))
                stop_s, gone_s = rig.pull_and_wait_for_end(pid)
                stopped.append(stop_s)
                returned.append(gone_s)
                rig.plug(True)
        finally:
            rig.close()
    return {"stopped_s": stopped, "returned_s": returned}


def percentile(values: list[float], share: float) -> float:
    """Return the value below which `share` of the values lie."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def report(times: dict[str, list[float]], limits: dict[str, float]) -> dict[str, Any]:
    """Return the figures of a run."""
    return {
        name: {
            "events": len(values),
            "median": percentile(values, 0.5),
            "p99": percentile(values, 0.99),
            "max": max(values),
            "limit": limits[name],
            "over_limit": sum(value > limits[name] for value in values),
        }
        for name, values in times.items()
    }


def main() -> int:
    """Measure and print; fail if the 99th percentile is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument(
        "--lag", type=float, default=0.0, metavar="SECONDS", help="of the battery's status; inf: forever"
    )
    parser.add_argument("--bundle", type=Path, metavar="JOB.port", help="use the real training worker")
    parser.add_argument("--program", action="store_true", help="use an attached program")
    parser.add_argument("--page-dir", type=Path, metavar="DIR", default=Path("/var/tmp"), help="its page file")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    page_dir = arguments.page_dir if arguments.program else None
    limits = {"stopped_s": STOP_LIMIT_S, "returned_s": RETURN_LIMIT_S}
    if arguments.bundle:
        limits = dict.fromkeys(limits, REAL_LIMIT_S)
    figures = report(measure(arguments.events, arguments.bundle, page_dir=page_dir, lag_s=arguments.lag), limits)
    if arguments.json:
        print(json.dumps(figures, indent=2))
    else:
        table = Table(title=f"Plug pulled {arguments.events} times while training (ms)")
        for column in ("until", "median", "p99", "max", "limit", "over"):
            table.add_column(column, justify="left" if column == "until" else "right")
        names = {"stopped_s": "last instruction started", "returned_s": "worker gone, RAM returned"}
        if arguments.program or arguments.bundle:
            names = {"stopped_s": "last operator ended", "returned_s": "RAM returned"}
        for name, row in figures.items():
            cells = [f"{row[key] * 1000:.0f}" for key in ("median", "p99", "max", "limit")]
            table.add_row(names[name], *cells, str(row["over_limit"]))
        table_console().print(table)
    return int(any(row["p99"] > row["limit"] for row in figures.values()))


if __name__ == "__main__":
    raise SystemExit(main())
