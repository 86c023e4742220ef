"""How fast does training stop when the conditions are gone?

    python benchmarks/reaction.py [--events 200] [--bundle JOB.port] [--json]

A real daemon and a real worker process (pure Python, 200 MB resident, instructions of 5 ms that log when they start);
the plug of a fake battery below an injected /sys is pulled at random moments. Two figures for each event:

- stopped: when the last training instruction began after the plug was pulled (must be below 100 ms),
- returned: when the worker process was gone and its memory free (must be below 1 s).

With --bundle the real training worker runs that bundle (give it many steps); then only the second figure is measured.
"""

import argparse
import json
import os
import random
import select
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from agent.control.client import ControlClient  # noqa: E402

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


class Rig:
    """A daemon with a fake plug and one job without end."""

    def __init__(self, root: Path, sys_root: Path, real_bundle: Path | None) -> None:
        self.root, self.sys = root, sys_root
        (root / "config.toml").write_text(CONFIG.format(keep="0s"))
        self.plug(True)
        places = [root / "state", root / "run", root / "config.toml", sys_root]
        if real_bundle is None:
            words = ["tests.agent.live", *map(str, places)]
        else:
            names = ("--state-dir", "--runtime-dir", "--config", "--sysfs-root")
            pairs = zip(names, places, strict=True)
            words = ["agent.cli", "run", *(str(word) for pair in pairs for word in pair)]
        self.daemon = subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT)
        self.client = ControlClient(root / "run")
        while not self.client.path.exists():
            time.sleep(0.01)
        bundle = real_bundle or root / "job.json"
        if real_bundle is None:
            bundle.write_text(json.dumps(BUNDLE))
        token = self.client.upload("/v1/uploads", bundle)["upload"]
        self.client.post("/v1/jobs", name="job", upload=token, steps=BUNDLE["steps"])
        self.traced = real_bundle is None
        self.trace = root / "state/jobs/1/state/trace"

    def plug(self, online: bool) -> None:
        """Write the fake power supplies, the plug last."""
        supplies = self.sys / "class/power_supply"
        texts = {
            "BAT0": BATTERY.format(status="Charging" if online else "Discharging"),
            "ACAD": MAINS.format(online=int(online)),
        }
        for name, text in texts.items():
            (supplies / name).mkdir(parents=True, exist_ok=True)
            temporary = self.sys / f"{name}.new"
            temporary.write_text(text)
            temporary.rename(supplies / name / "uevent")

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

    def last_start_s(self) -> float:
        """Return when the newest training instruction began (monotonic clock)."""
        try:
            with self.trace.open("rb") as file:
                file.seek(-8, os.SEEK_END)
                return float(struct.unpack("<d", file.read(8))[0])
        except OSError:
            return 0.0

    def pull_and_wait_for_end(self, pid: int) -> tuple[float, float]:
        """Pull the plug; return seconds to the last instruction's start and to the end of the process."""
        descriptor = os.pidfd_open(pid)
        pulled_s = time.monotonic()
        self.plug(False)
        if not select.select([descriptor], [], [], 10.0)[0]:
            raise SystemExit("the worker did not leave within 10 s")
        gone_s = time.monotonic() - pulled_s
        os.close(descriptor)
        return max(0.0, self.last_start_s() - pulled_s), gone_s

    def close(self) -> None:
        """End the daemon."""
        self.daemon.terminate()
        self.daemon.wait(10.0)


def measure(events: int, real_bundle: Path | None, seed: int = 1) -> dict[str, list[float]]:
    """Return the reaction times of `events` pulled plugs, in seconds."""
    rng = random.Random(seed)
    stopped, returned = [], []
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # like the real /sys, it never waits for a disk
    with (
        tempfile.TemporaryDirectory(prefix="port-agent-reaction-") as directory,
        tempfile.TemporaryDirectory(prefix="port-agent-sys-", dir=memory) as sys_root,
    ):
        rig = Rig(Path(directory), Path(sys_root), real_bundle)
        try:
            for _ in range(events):
                pid = rig.training_pid()
                time.sleep(rng.uniform(0.0, 0.2))
                stop_s, gone_s = rig.pull_and_wait_for_end(pid)
                stopped.append(stop_s)
                returned.append(gone_s)
                rig.plug(True)
        finally:
            rig.close()
    return {"returned_s": returned} if real_bundle else {"stopped_s": stopped, "returned_s": returned}


def percentile(values: list[float], share: float) -> float:
    """Return the value below which `share` of the values lie."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def report(times: dict[str, list[float]]) -> dict[str, Any]:
    """Return the figures of a run."""
    limits = {"stopped_s": STOP_LIMIT_S, "returned_s": RETURN_LIMIT_S}
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
    """Measure and print; fails when the 99th percentile is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--bundle", type=Path, metavar="JOB.port", help="use the real training worker")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = report(measure(arguments.events, arguments.bundle))
    if arguments.json:
        print(json.dumps(figures, indent=2))
    else:
        table = Table(title=f"Plug pulled {arguments.events} times while training (ms)")
        for column in ("until", "median", "p99", "max", "limit", "over"):
            table.add_column(column, justify="left" if column == "until" else "right")
        names = {"stopped_s": "last instruction started", "returned_s": "worker gone, RAM returned"}
        for name, row in figures.items():
            cells = [f"{row[key] * 1000:.0f}" for key in ("median", "p99", "max", "limit")]
            table.add_row(names[name], *cells, str(row["over_limit"]))
        Console().print(table)
    return int(any(row["p99"] > row["limit"] for row in figures.values()))


if __name__ == "__main__":
    raise SystemExit(main())
