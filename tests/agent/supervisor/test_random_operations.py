"""Randomly timed operations against a real daemon process: no job lost, never two workers, weights bit-exact."""

import json
import os
import random
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from port_agent.control.client import ControlClient, ControlError
from port_agent.jobs.job import JobState
from tests.agent.live_daemon import start_agent
from tests.agent.trees import LAPTOP_BATTERY, MAINS, supply_tree
from tests.agent.worker_program import undisturbed_weights
from tests.attack.outcome import AttackOutcome, Survived
from tests.waiting import PATIENCE_S, until, wait_until_drawn_moment

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[3]
CONFIG = """[when]
idle_for = 0
min_pause = 0
keep_in_memory = "{keep}s"
[storage]
min_free = 0
[memory]
min_available = 0
pressure = 100
[jobs]
give_up_after = 1000
"""
OPERATIONS = {
    "submit": 12,
    "pause_job": 12,
    "resume_job": 14,
    "cancel_job": 1,
    "pause_all": 5,
    "resume_all": 12,
    "kill_worker": 10,
    "kill_daemon": 3,
    "restart_daemon": 2,
    "reload": 6,
    "plug": 8,
    "priority": 8,
}


@dataclass
class Chaos:
    """A daemon process and everything that was asked of it."""

    root: Path
    rng: random.Random
    bundles: dict[str, dict[str, Any]] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    open: list[str] = field(default_factory=list)
    """Jobs that were not over when last looked at."""
    kills: int = 0
    daemon: "subprocess.Popen[bytes] | None" = None

    def __post_init__(self) -> None:
        self.client = ControlClient(self.root / "run", timeout_s=20.0)
        self.write_config(0)
        self.plug(True)
        self.start()

    def write_config(self, keep_s: int) -> None:
        (self.root / "config.toml").write_text(CONFIG.format(keep=keep_s))

    def plug(self, online: bool) -> None:
        status = "Charging" if online else "Discharging"
        supply_tree(
            self.root / "sys",
            BAT0=LAPTOP_BATTERY.format(status=status, capacity=80),
            ACAD=MAINS.format(online=int(online)),
        )

    def start(self) -> None:
        """Start the daemon and wait until it is ready."""
        self.daemon = start_agent(self.root)

    def end(self, number: signal.Signals) -> None:
        """End the daemon with a signal and start it again."""
        if self.daemon is not None:
            self.daemon.send_signal(number)
            code = self.daemon.wait(PATIENCE_S)
            assert code == (-number if number is signal.SIGKILL else 0)

    def workers(self) -> list[int]:
        """Return the worker processes of this daemon, dead ones that wait to be reaped left out."""
        found = []
        mark = f"--state-dir\0{self.root}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                command = (entry / "cmdline").read_bytes()
                if mark in command and (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def living(self) -> str | None:
        """Return the name of some job, mostly one that is not over."""
        names = self.open if self.open and self.rng.random() < 0.9 else sorted(set(self.bundles) - self.cancelled)
        return self.rng.choice(names) if names else None

    # --- the operations

    def submit(self) -> None:
        if len(self.open) >= 6:
            return
        name = f"job{len(self.bundles)}"
        bundle = {
            "dimension": 8,
            "steps": self.rng.randrange(10, 120),
            "instructions": 4,
            "instruction_s": self.rng.choice([0.0, 0.001, 0.003]),
            "checkpoint_every": self.rng.choice([1, 5, 17]),
            "seed": self.rng.randrange(1 << 30),
        }
        path = self.root / f"{name}.json"
        path.write_text(json.dumps(bundle))
        token = self.client.upload("/v1/uploads", path)["upload"]
        self.client.post("/v1/jobs", name=name, upload=token, priority=self.rng.randrange(-3, 4))
        self.bundles[name] = bundle

    def on_job(self, verb: str, **fields: object) -> None:
        name = self.living()
        if name is None:
            return
        try:
            self.client.post(f"/v1/jobs/{name}/{verb}", **fields)
        except ControlError as error:
            assert error.status == 409, error  # it was over already
            return
        if verb == "cancel":
            self.cancelled.add(name)

    def pause_job(self) -> None:
        self.on_job("pause")

    def resume_job(self) -> None:
        self.on_job("resume")

    def cancel_job(self) -> None:
        self.on_job("cancel")

    def priority(self) -> None:
        self.on_job("change", priority=self.rng.randrange(-5, 6))

    def pause_all(self) -> None:
        self.client.post("/v1/pause", for_s=self.rng.choice([None, 0.05, 0.5]))

    def resume_all(self) -> None:
        self.client.post("/v1/resume")

    def kill_worker(self) -> None:
        for pid in self.workers():
            try:
                os.kill(pid, self.rng.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM]))
                self.kills += 1
            except ProcessLookupError:
                continue

    def kill_daemon(self) -> None:
        self.end(signal.SIGKILL)
        self.kills += 1
        self.start()

    def restart_daemon(self) -> None:
        self.end(signal.SIGTERM)
        assert not self.workers(), "a stopped daemon leaves no worker behind"
        self.start()

    def reload(self) -> None:
        if self.rng.random() < 0.3:
            (self.root / "config.toml").write_text("[when]\nidle_for = 'soon'\n")
            with pytest.raises(ControlError, match="idle_for"):
                self.client.post("/v1/reload")
        self.write_config(self.rng.choice([0, 1, 60]))
        self.client.post("/v1/reload")

    # --- what must hold

    def check(self) -> None:
        """No job is lost, and there are never two workers."""
        workers = self.workers()
        if len(workers) > 1:  # one may have ended while the list was read
            assert len([pid for pid in self.workers() if pid in workers]) <= 1, workers
        jobs = self._jobs()
        assert set(jobs) == set(self.bundles)
        self.open = sorted(name for name, job in jobs.items() if job["state_number"] < JobState.FINISHED)
        for name in self.cancelled:
            assert jobs[name]["state_number"] == JobState.CANCELLED

    def _jobs(self) -> dict[str, dict[str, Any]]:
        return {job["name"]: job for job in self.client.get("/v1/jobs?all=1")["jobs"]}

    def _all_closed(self) -> bool:
        """Return whether every job has ended; let those that wait go on."""
        jobs = self._jobs()
        self.open = sorted(name for name, job in jobs.items() if job["state_number"] < JobState.FINISHED)
        for name in self.open:
            if jobs[name]["state_number"] in (JobState.PAUSED, JobState.BACKOFF):
                self.client.post(f"/v1/jobs/{name}/resume")
        return not self.open

    def finish(self) -> None:
        """Let everything go on, wait for the end, and compare the weights."""
        self.plug(True)
        self.client.post("/v1/resume")
        until(self._all_closed, lambda: self.open, patience_s=240.0)
        jobs = self._jobs()
        for name, bundle in self.bundles.items():
            if name in self.cancelled:
                continue
            assert jobs[name]["state_number"] == JobState.FINISHED, jobs[name]
            target = self.root / "weights"
            self.client.download(f"/v1/jobs/{name}/result", target)
            result = json.loads(target.read_text())
            assert (result["step"], result["weights"]) == (bundle["steps"], undisturbed_weights(bundle)), name


def run_chaos(root: Path, count: int, seed: int) -> Chaos:
    """Do `count` random operations at random moments, checking after each."""
    rng = random.Random(seed)
    chaos = Chaos(root, rng)
    try:
        chaos.submit()
        for _ in range(count):
            if rng.random() < 0.6:
                wait_until_drawn_moment(rng, 0.06)
            name = rng.choices(list(OPERATIONS), list(OPERATIONS.values()))[0]
            if name == "plug":
                chaos.plug(rng.random() < 0.7)
            else:
                getattr(chaos, name)()
            chaos.check()
        chaos.finish()
    finally:
        if chaos.daemon is not None:
            chaos.daemon.terminate()
            chaos.daemon.wait(PATIENCE_S)
    return chaos


def outcome(chaos: Chaos) -> AttackOutcome:
    """Return the row for a run in which `check` and `finish` found all jobs: each of them fails the test otherwise."""
    notes = f"{len(chaos.bundles)} acknowledged jobs, 0 lost, all weights as without kills"
    return AttackOutcome("kills of daemon and workers", chaos.kills, chaos.kills, notes=notes)


def test_forty_random_operations(tmp_path: Path, survived: Survived) -> None:
    chaos = run_chaos(tmp_path, 40, seed=4)
    assert len(chaos.bundles) >= 3
    survived(outcome(chaos))


@pytest.mark.long
def test_a_thousand_random_operations(tmp_path: Path, survived: Survived) -> None:
    chaos = run_chaos(tmp_path, 1000, seed=int(os.environ.get("PORT_AGENT_SEED", "1")))
    assert len(chaos.bundles) - len(chaos.cancelled) >= 5
    survived(outcome(chaos))
