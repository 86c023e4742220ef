"""What a machine does to a daemon: another process eats its memory, it is suspended, and its clock is stepped."""

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from port_agent.control.client import ControlClient
from tests.agent.live_daemon import BUNDLE, CONFIG, daemon, process_state, start_agent
from tests.agent.worker_program import undisturbed_weights
from tests.attack.outcome import AttackOutcome

SOURCE = Path(__file__).with_name("stepped_clock.c")
LONG_ENOUGH: dict[str, Any] = {**BUNDLE, "steps": 2500, "checkpoint_every": 100}
OUTLASTS_EATER: dict[str, Any] = {**LONG_ENOUGH, "steps": 5000}
"""One for each round: forty seconds and more, of which the eater takes ten until the job must leave."""
PATIENCE_S = 120.0
HOUR_S, DAY_S = 3600, 86400
EATEN_SHARE, MIN_SHARE = 0.45, 0.7
"""Of what is available: how much is eaten at most, and how much must stay for training."""
_EAT = """
import sys, time
held = []
for _ in range(int(sys.argv[1]) >> 26):
    held.append(b"x" * (1 << 26))
    time.sleep(0.01)
time.sleep(1000)
"""


def available_bytes() -> int:
    """Return what the kernel says could be had without swapping."""
    (line,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) << 10


def attack_memory(scratch: Path, rounds: int) -> AttackOutcome:
    """Have another process take memory until less is available than must be; a job leaves, and goes on to the bit."""
    before = available_bytes()
    least = int(before * MIN_SHARE)
    config = CONFIG.replace("min_available = 0", f"min_available = '{least >> 20}M'")
    harmed, took_s = [], []
    with daemon(scratch, config) as client:
        for number in range(rounds):
            name = f"round-{number}"
            _submit(client, scratch, name, OUTLASTS_EATER)
            if not _until(partial(_trains, client, name)):
                harmed.append(f"{name}: does not train: {client.get('/v1/status')['reasons']}")
                break
            with subprocess.Popen([sys.executable, "-c", _EAT, str(int(before * EATEN_SHARE))]) as eater:
                try:
                    low = _until(lambda: available_bytes() < least)
                    began_s = time.monotonic()
                    left = _until(partial(_left, client, name))
                    took_s.append(time.monotonic() - began_s)
                    state = _job(client, name)["state"]
                    if not low or not left or state != "queued":
                        harmed.append(f"{name}: {available_bytes() >> 20} MiB are available, and it is {state}")
                finally:
                    eater.kill()
            _finish(client, scratch, name, OUTLASTS_EATER, harmed)
    seconds = f"{min(took_s, default=0):.2f} to {max(took_s, default=0):.2f} s"
    notes = f"left {seconds} after less than {least >> 20} of {before >> 20} MiB were available; same bits"
    return AttackOutcome("memory eaten by another process", rounds, rounds - len(harmed), tuple(harmed), notes)


SLEEPS = {
    "asleep for eight hours": (8 * HOUR_S, 8 * HOUR_S),
    "asleep, and the clock went back a year": (-365 * DAY_S, HOUR_S),
    "asleep for a week": (7 * DAY_S, 7 * DAY_S),
    "frozen": (0, 0),
    "frozen, and the clock went forward a day": (DAY_S, 0),
}
"""What each does to calendar and uptime, in seconds."""


def attack_sleep(scratch: Path, setenv: Callable[[str, str], None], stopped_s: float) -> AttackOutcome:
    """Stop daemon and worker by signal for some real seconds, step their clocks, and let them go on."""
    library, clock, said = scratch / "stepped_clock.so", scratch / "clock", scratch / "said"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    clock.write_bytes(bytes(16))
    setenv("LD_PRELOAD", str(library))
    setenv("STEPPED_CLOCK", str(clock))
    (scratch / "config.toml").write_text(CONFIG)
    wall = uptime = 0
    harmed = []
    with said.open("wb") as errors:
        process = start_agent(scratch, stderr=errors.fileno())
    client = ControlClient(scratch / "run")
    try:
        _submit(client, scratch, "trained", LONG_ENOUGH)
        client.post("/v1/jobs", name="held", bundle=str(scratch / "bundle.json"))
        client.post("/v1/jobs/held/pause")
        for name, (wall_s, uptime_s) in SLEEPS.items():
            if not _until(lambda: _trains(client, "trained")):
                harmed.append(f"before {name}: does not train")
                break
            wall, uptime = wall + wall_s, uptime + uptime_s
            stopped = [*_children(process.pid), process.pid]
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            with clock.open("r+b") as file:
                file.write(struct.pack("<qq", wall, uptime))
            time.sleep(stopped_s)
            for pid in reversed(stopped):
                os.kill(pid, signal.SIGCONT)
            if not _went_on(client, "trained"):
                harmed.append(f"{name}: does not go on: {_job(client, 'trained')}")
            if client.get("/v1/jobs/held")["state"] != "paused":
                harmed.append(f"{name}: the paused job is {client.get('/v1/jobs/held')['state']}")
        _finish(client, scratch, "trained", LONG_ENOUGH, harmed)
        shown = subprocess.run(
            [sys.executable, "-c", "import time; print(time.time())"], capture_output=True, check=True
        )
        if abs(float(shown.stdout) - time.time() - wall) > HOUR_S:
            harmed.append(f"the clock was not stepped: it shows {shown.stdout.decode()}")
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
    if "Traceback" in said.read_text():
        harmed.append(said.read_text()[-1500:])
    tried = len(SLEEPS)
    notes = f"each stopped for {stopped_s:g} s; went on, no job lost, same bits"
    return AttackOutcome("suspended, clock stepped", tried, max(0, tried - len(harmed)), tuple(harmed), notes)


def _submit(client: ControlClient, scratch: Path, name: str, job: dict[str, Any]) -> None:
    bundle = scratch / "bundle.json"
    bundle.write_text(json.dumps(job))
    client.post("/v1/jobs", name=name, bundle=str(bundle))


def _job(client: ControlClient, name: str) -> Any:
    return client.get(f"/v1/jobs/{name}")


def _left(client: ControlClient, name: str) -> bool:
    return bool(_job(client, name)["state"] != "running")


def _trains(client: ControlClient, name: str) -> bool:
    before = _job(client, name)
    time.sleep(0.2)
    return bool(_job(client, name)["step"] > before["step"])


def _went_on(client: ControlClient, name: str) -> bool:
    """Return whether a further step of a job was done, or all of them were, within the patience."""
    done = _job(client, name)["step"]
    return _until(lambda: (job := _job(client, name))["step"] > done or job["state"] == "finished")


def _finish(client: ControlClient, scratch: Path, name: str, job: dict[str, Any], harmed: list[str]) -> None:
    """Wait for the end of the job, and compare its weights with those of an undisturbed run."""
    while _job(client, name)["state"] != "finished":
        if not _went_on(client, name):
            harmed.append(f"{name}: does not end: {_job(client, name)}")
            return
    client.download(f"/v1/jobs/{name}/result", scratch / "out")
    if json.loads((scratch / "out").read_text())["weights"] != undisturbed_weights(job):
        harmed.append(f"{name}: other weights")


def _until(condition: Callable[[], bool]) -> bool:
    """Return whether something became true within the patience."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.005)
    return True


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [
        int(child) for task in tasks for child in task.read_text().split() if process_state(int(child)) not in ("", "Z")
    ]
