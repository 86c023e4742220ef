"""Hours of a daemon's life on a clock that is set: random facts, jobs, requests and faults, at its usual rate of looks.

A process of its own, so that its descriptors and memory are the daemon's:
`python -m tests.attack.day FOLDER HOURS SEED`.
"""

import asyncio
import json
import os
import random
import resource
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from port_agent.control.client import ControlError
from port_agent.jobs.job import JobState
from port_agent.supervisor.daemon import IDLE_LOOK_S
from port_agent.supervisor.job.worker_process import RequestedState, WorkerPhase
from tests.agent.live_daemon import Live, process_state, running
from tests.agent.set_clock import SetClock
from tests.agent.trees import LAPTOP_BATTERY, MAINS, supply_tree, write_tree
from tests.agent.worker_program import undisturbed_weights
from tests.attack.outcome import AttackOutcome

CONFIG = """[when]
idle_for = 0
min_pause = 0
[storage]
min_free = 0
keep_jobs = 20
[memory]
min_available = 0
pressure = 100
[jobs]
give_up_after = 1000
"""
BAD_CONFIG = "[when]\nidle_for = 'soon'\n"
HOUR_S, DAY_S = 3600.0, 86400.0
LOOKS_PER_HOUR = int(HOUR_S / IDLE_LOOK_S)
HOUSEKEEPING_LOOKS = 20
OPEN_JOBS = 4
STEADY_S = 1.0
"""How long real time waits for what a worker does within a look; nothing depends on it."""
GROWTH_BYTES, GROWTH_DESCRIPTORS, SAID_BYTES = 8 << 20, 4, 1 << 20
"""What may be more at the end than after the first hour, and what may be said on standard error in all."""
EVENTS = {
    "submit": 10, "on_a_job": 10, "pause_all": 2, "resume_all": 6, "reload": 2, "plug": 8, "heat": 4, "junk": 2,
    "kill_worker": 3, "full_disk": 1, "jump": 1, "suspend": 1, "nothing": 50,
}  # fmt: skip


class SleepingClock(SetClock):
    """A set clock of a machine that may sleep: only `uptime_s` and the wall go on meanwhile."""

    slept: float = 0.0

    def sleep(self, seconds: float) -> None:
        """Let the machine sleep."""
        self.slept += seconds
        self.wall += seconds

    def uptime_s(self) -> float:
        """Return the span with all sleep in it."""
        return self.now + self.slept


@dataclass(frozen=True, slots=True)
class Usage:
    """What the process holds while no worker runs."""

    descriptors: int
    resident_bytes: int
    said_bytes: int
    """Written to standard error, which is the log of a service."""
    state_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.descriptors} descriptors, RSS {self.resident_bytes / 2**20:.1f} MiB, log {self.said_bytes:,} B, "
            f"state {self.state_bytes / 2**20:.1f} MiB"
        )


@dataclass
class Day:
    """A daemon, its clock, and what was asked of it."""

    live: Live
    clock: SleepingClock
    rng: random.Random
    bundles: dict[str, dict[str, Any]] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    over: set[str] = field(default_factory=set)
    harmed: list[str] = field(default_factory=list)
    done: int = 0

    # --- events

    async def submit(self) -> None:
        if len(set(self.bundles) - self.over - self.cancelled) >= OPEN_JOBS:
            return
        name = f"job{len(self.bundles)}"
        bundle = {
            "dimension": 8,
            "steps": self.rng.randrange(10, 200),
            "instructions": 4,
            "instruction_s": 0.0005,
            "checkpoint_every": self.rng.choice([1, 5, 17]),
            "seed": self.rng.randrange(1 << 30),
        }
        deadline = self.rng.choice([{}, {"deadline_at": max(1.0, self.clock.wall) + self.rng.uniform(60, DAY_S)}])
        await self.live.submit(bundle, name, priority=self.rng.randrange(-3, 4), **deadline)
        self.bundles[name] = bundle

    async def on_a_job(self) -> None:
        names = sorted(set(self.bundles) - self.over - self.cancelled)
        if not names:
            return
        name, verb = self.rng.choice(names), self.rng.choice(["pause", "resume", "resume", "resume", "cancel"])
        if verb == "cancel" and self.rng.random() < 0.7:
            return
        await self.post(f"/v1/jobs/{name}/{verb}")
        if verb == "cancel":
            self.cancelled.add(name)

    async def pause_all(self) -> None:
        await self.post("/v1/pause", for_s=self.rng.choice([60.0, 600.0, HOUR_S]))

    async def resume_all(self) -> None:
        await self.post("/v1/resume")

    async def reload(self) -> None:
        (self.live.root / "config.toml").write_text(self.rng.choice([CONFIG, BAD_CONFIG]))
        await self.post("/v1/reload")
        (self.live.root / "config.toml").write_text(CONFIG)

    async def plug(self) -> None:
        online = self.rng.random() < 0.7
        status, capacity = ("Charging" if online else "Discharging"), self.rng.randrange(1, 101)
        battery = LAPTOP_BATTERY.format(status=status, capacity=capacity)
        supply_tree(self.live.root / "sys", ACAD=MAINS.format(online=int(online)), BAT0=battery)

    async def heat(self) -> None:
        self.live.heat(self.rng.choice([20.0, 45.0, 60.0, 95.0]))

    async def junk(self) -> None:
        text = self.rng.choice(["", "\0\0", "hot", "9" * 400, "-1"])
        write_tree(
            self.live.root,
            {self.rng.choice(["sys/class/thermal/thermal_zone0/temp", "sys/class/power_supply/BAT0/uevent"]): text},
        )

    async def kill_worker(self) -> None:
        pid = self.live.context.runners.host.pid
        if pid is not None and process_state(pid):
            os.kill(pid, self.rng.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM]))

    async def full_disk(self) -> None:
        """No file can grow for two looks: by this process's own limit, which its workers inherit."""
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            for _ in range(2):
                await self.look()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    async def jump(self) -> None:
        """Backward a year, forward a day, or a clock that forgot everything; time service sets it right later."""
        right = self.clock.wall - self.clock.uptime_s()
        self.clock.wall = self.rng.choice([self.clock.wall - 365 * DAY_S, self.clock.wall + DAY_S, 60.0])
        for _ in range(5):
            await self.look()
        self.clock.wall = right + self.clock.uptime_s()

    async def suspend(self) -> None:
        self.clock.sleep(self.rng.uniform(60, 8 * HOUR_S))

    async def nothing(self) -> None:
        """Only time passes."""

    # --- around them

    async def post(self, path: str, **fields: object) -> None:
        """Ask; a refusal with a reason is an answer, an internal error is harm."""
        try:
            await self.live.ask(self.live.client.post, path, **fields)
        except ControlError as error:
            if error.status in (None, 500):
                self.harmed.append(f"{path}: {error.status} {error}")

    async def look(self) -> None:
        """Let the usual time between two looks pass, with what a worker does in it."""
        self.clock.pass_time(IDLE_LOOK_S)
        self.live.context.wake.set()
        loop = asyncio.get_running_loop()
        end_s, runner = loop.time() + STEADY_S, self.live.context.runners.host
        await asyncio.sleep(0.002)
        step = runner.job.step if runner.job is not None else None
        while runner.job is not None and loop.time() < end_s:
            if runner.phase is WorkerPhase.PAUSED and runner.requested is RequestedState.PAUSE:
                break
            if runner.phase is WorkerPhase.TRAINING and runner.job.step != step:
                break
            await asyncio.sleep(0.002)

    async def check(self) -> None:
        """Every acknowledged job is there, or was over and is beyond what the history keeps."""
        found = {job.spec.name: job for job in self.live.context.store.all()}
        for name, bundle in self.bundles.items():
            job = found.get(name)
            if job is None:
                if name not in self.over:
                    self.harmed.append(f"{name} is lost")
                    self.over.add(name)
            elif name in self.cancelled and job.state is not JobState.CANCELLED:
                self.harmed.append(f"{name} was cancelled and is {job.state.name}")
            elif job.state.is_over and name not in self.over:
                if job.state is JobState.FINISHED:
                    result = self.live.weights(job.id)
                    if (result["step"], result["weights"]) != (bundle["steps"], undisturbed_weights(bundle)):
                        self.harmed.append(f"{name} has other weights")
                elif job.state is not JobState.CANCELLED:
                    self.harmed.append(f"{name} is {job.state.name}: {job.reason}")
                self.over.add(name)

    async def usage(self, said: Path) -> Usage:
        """Let every job end, and return what is held then."""
        self.live.plug(True)
        self.live.heat(45.0)
        await self.post("/v1/resume")
        patience = LOOKS_PER_HOUR * 20
        while set(self.bundles) - self.over - self.cancelled and patience:
            patience -= 1
            for name in sorted(set(self.bundles) - self.over - self.cancelled):
                if self.live.context.store.get(self.number(name)).state in (JobState.PAUSED, JobState.BACKOFF):
                    await self.post(f"/v1/jobs/{name}/resume")
            await self.look()
            await self.check()
        left = set(self.bundles) - self.over - self.cancelled
        self.harmed.extend(f"{name} never ends: {self.live.job(self.number(name))}" for name in sorted(left))
        await self.live.until(lambda: self.live.context.runners.host.job is None, "no worker")
        return _held(self.live.root / "state", said)

    def number(self, name: str) -> int:
        """Return the id of a job."""
        return next(job.id for job in self.live.context.store.all() if job.spec.name == name)

    async def hour(self) -> None:
        """Live through an hour of looks."""
        for number in range(LOOKS_PER_HOUR):
            name = self.rng.choices(list(EVENTS), list(EVENTS.values()))[0]
            await getattr(self, name)()
            self.done += name != "nothing"
            await self.look()
            if number % HOUSEKEEPING_LOOKS == 0:
                await self.live.daemon.tidy()
            await self.check()


def _held(state_dir: Path, said: Path) -> Usage:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    state = sum(path.lstat().st_size for path in state_dir.rglob("*"))
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    return Usage(descriptors, pages * resource.getpagesize(), said.stat().st_size, state)


async def live_through(folder: Path, hours: int, seed: int) -> AttackOutcome:
    """Return what became of the jobs and of what the process holds, compared with the end of the first hour."""
    said = folder / "said"
    clock = SleepingClock(wall=60.0)  # no clock survived the power cut; time service comes with the first jump
    async with running(folder, CONFIG, clock=clock) as live:
        day = Day(live, clock, random.Random(seed))
        live.plug(True)
        await day.look()
        clock.wall = SetClock.wall
        await day.hour()
        before = await day.usage(said)
        for _ in range(1, hours):
            await day.hour()
        after = await day.usage(said)
    words = said.read_text()
    if "Traceback" in words:
        day.harmed.append(words[-2000:])
    if after.descriptors > before.descriptors + GROWTH_DESCRIPTORS:
        day.harmed.append("descriptors grow")
    if after.resident_bytes > before.resident_bytes + GROWTH_BYTES:
        day.harmed.append("memory grows")
    if after.said_bytes > SAID_BYTES:
        day.harmed.append("the log grows")
    jobs = f"{len(day.bundles)} jobs, {len(day.cancelled)} of them cancelled"
    notes = f"{jobs}; after an hour {before}; at the end {after}"
    if day.harmed:
        notes += f"; {len(day.harmed)} harmed"
    clean = max(0, day.done - len(day.harmed))
    return AttackOutcome(f"{hours} simulated hours, events", day.done, clean, tuple(day.harmed), notes)


def attack_hours(scratch: Path, hours: int, seed: int) -> AttackOutcome:
    """Simulate this number of hours in a separate process."""
    with (scratch / "said").open("w") as said:
        command = [sys.executable, "-m", __name__, str(scratch), str(hours), str(seed)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=said, text=True, check=False)
    if done.returncode:
        raise RuntimeError((scratch / "said").read_text()[-4000:])
    values = json.loads(done.stdout.splitlines()[-1])
    return AttackOutcome(**{**values, "harmed": tuple(values["harmed"])})


def main() -> None:
    """Live as the command line says, and print the outcome as JSON."""
    folder, hours, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    sys.stdout.write(json.dumps(asdict(asyncio.run(live_through(folder, hours, seed)))) + "\n")


if __name__ == "__main__":
    main()
