"""A daemon for tests: in the test's own event loop, or as a process, with real workers and a fake /sys."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from port_agent.control.client import ControlClient
from port_agent.jobs.job import Job, JobState
from port_agent.supervisor.context import DaemonSeams, Settings
from port_agent.supervisor.daemon import Daemon
from tests.agent.live import seams
from tests.agent.trees import LAPTOP_BATTERY, MAINS, supply_tree, write_tree
from tests.waiting import PATIENCE_S

CONFIG = "[when]\nidle_for = 0\nmin_pause = 0\n[storage]\nmin_free = 0\n[memory]\nmin_available = 0\npressure = 100\n"
BUNDLE: dict[str, Any] = {
    "dimension": 8,
    "steps": 30,
    "instructions": 4,
    "instruction_s": 0.002,
    "checkpoint_every": 10,
    "seed": 1,
    "plans": [
        {"peak_bytes": 200 << 20, "seconds": 0.01, "joules": 0.1},
        {"peak_bytes": 100 << 20, "seconds": 0.02, "joules": 0.2},
    ],
}
LONG = {**BUNDLE, "steps": 100_000}


async def until(condition: Callable[[], bool], explain: Callable[[], str] = lambda: "waited in vain") -> None:
    """Wait for something that other processes or tasks bring about."""
    end = time.monotonic() + 180.0
    while not condition():
        assert time.monotonic() < end, explain()
        await asyncio.sleep(0.005)


def process_state(pid: int) -> str:
    """Return the letter that the kernel gives a process, or nothing when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


class Live:
    """A daemon that runs in the test's own event loop."""

    def __init__(self, root: Path, changes: DaemonSeams) -> None:
        self.settings = Settings(root / "state", root / "run", root / "config.toml", root / "sys")
        self.daemon = Daemon(self.settings, changes)
        self.client = ControlClient(self.settings.runtime_dir)
        self.root = root

    def prepare(self, config: str) -> None:
        supply_tree(self.root / "sys")
        (self.root / "config.toml").write_text(config)

    def heat(self, celsius: float) -> None:
        zone = "sys/class/thermal/thermal_zone0"
        write_tree(self.root, {f"{zone}/type": "cpu", f"{zone}/temp": str(int(celsius * 1000))})

    @property
    def context(self) -> Any:
        return self.daemon.context

    async def ask(self, function: Callable[..., Any], *arguments: Any, **fields: Any) -> Any:
        """Call the client in a thread: it blocks, and the daemon shares this loop."""
        return await asyncio.to_thread(function, *arguments, **fields)

    async def submit(self, bundle: dict[str, Any], name: str = "job", **fields: Any) -> int:
        path = self.root / f"{name}.json"
        path.write_text(json.dumps(bundle))
        token = (await self.ask(self.client.upload, "/v1/uploads", path))["upload"]
        return int((await self.ask(self.client.post, "/v1/jobs", name=name, upload=token, **fields))["id"])

    def job(self, number: int) -> Job:
        return self.context.store.get(number)

    async def until(self, condition: Callable[[], bool], what: str = "") -> None:
        await until(condition, lambda: f"{what}: {self.context.admission.decision} {self.context.store.all()}")

    async def until_state(self, number: int, state: JobState) -> Job:
        await self.until(lambda: self.job(number).state is state, f"job {number} {state.name}")
        return self.job(number)

    async def until_step(self, number: int, step: int) -> None:
        await self.until(lambda: self.job(number).step >= step, f"job {number} at step {step}")

    def health_codes(self) -> set[str]:
        later = self.context.clock.monotonic_s() + 1000.0
        return {item.code for item in self.context.health.items(later)}

    def plug(self, online: bool, *, lags: bool = False) -> None:
        """Plug in or pull; where the battery's status `lags`, it goes on saying Charging."""
        status = "Charging" if online or lags else "Discharging"
        battery = LAPTOP_BATTERY.format(status=status, capacity=80)
        supply_tree(self.settings.sysfs_root or self.root, ACAD=MAINS.format(online=int(online)), BAT0=battery)

    def weights(self, number: int) -> Any:
        return json.loads((self.context.store.job_dir(number) / "out.safetensors").read_text())


@asynccontextmanager
async def running(root: Path, config: str = CONFIG, **changes: Any) -> AsyncIterator[Live]:
    """Start a daemon and stop it at the end."""
    live = Live(root, seams(**changes))
    live.prepare(config)
    task = asyncio.create_task(live.daemon.run())
    try:
        await until(lambda: task.done() or live.daemon.ready.is_set())
        if task.done():
            task.result()
        yield live
    finally:
        if not task.done():
            live.daemon.stop()
        await task


def go(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
    """Run an async test that takes tmp_path."""

    def run(tmp_path: Path) -> None:
        asyncio.run(asyncio.wait_for(test(tmp_path), 900.0))

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


_undisturbed: dict[str, Any] = {}


async def undisturbed(root: Path, bundle: dict[str, Any]) -> Any:
    """Return the weights that a run without any interruption gives."""
    key = json.dumps({**bundle, "instruction_s": 0.0})
    if key not in _undisturbed:
        async with running(root) as live:
            await live.until_state(await live.submit(json.loads(key)), JobState.FINISHED)
            _undisturbed[key] = live.weights(1)
    return _undisturbed[key]


ROOT = Path(__file__).resolve().parents[2]
READY_S = 60.0
"""An agent is ready within a second; a loaded machine needs the long end."""


def start_agent(root: Path, *command: str, stderr: int | None = None) -> "subprocess.Popen[bytes]":
    """Start an agent, by default with the test worker, and return its process once it says READY as to systemd."""
    supply_tree(root / "sys")
    words = command or ("tests.agent.live", *(str(root / name) for name in ("state", "run", "config.toml", "sys")))
    address = root / "notify"
    address.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(address))
        manager.settimeout(READY_S)
        environment = {**os.environ, "NOTIFY_SOCKET": str(address)}
        process = subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT, env=environment, stderr=stderr)
        try:
            while b"READY=1" not in manager.recv(4096):
                pass
        except TimeoutError:
            process.kill()
            process.wait()
            raise
    return process


@contextmanager
def daemon(root: Path, config: str = CONFIG) -> Iterator[ControlClient]:
    """Run a daemon with the test worker in a process of its own."""
    (root / "config.toml").write_text(config)
    process = start_agent(root)
    try:
        yield ControlClient(root / "run")
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
