"""Real agents with the real worker, paired with each other, each with a federated job of its own data."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from port_agent.control.client import ControlClient, ControlError
from port_agent.peers.fleet.paired import PairedDevices, device_of
from port_agent.peers.identity.keys import own_identity
from tests.agent.live_daemon import CONFIG, ROOT
from tests.agent.peers.ports import free_port
from tests.agent.trees import LAPTOP_BATTERY, MAINS, supply_tree
from tests.waiting import until

JOB, LEADER = "gestures", "attic"


@dataclass
class Device:
    """An agent; `process` is None while it is off, `prefix` begins the command that runs it."""

    root: Path
    address: tuple[str, int]
    prefix: Sequence[str] = ()
    process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)

    def __post_init__(self) -> None:
        (self.root / "state").mkdir(parents=True, mode=0o700, exist_ok=True)
        own = f'[peers]\nname = "{self.name}"\nport = {self.address[1]}\n'
        (self.root / "config.toml").write_text(CONFIG + own)
        self.plug(online=True)

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def client(self) -> ControlClient:
        return ControlClient(self.root / "run")

    def plug(self, *, online: bool) -> None:
        """Give it power, or take it away."""
        status = "Charging" if online else "Discharging"
        battery = LAPTOP_BATTERY.format(status=status, capacity=80)
        supply_tree(self.root / "sys", ACAD=MAINS.format(online=int(online)), BAT0=battery)

    def start(self) -> None:
        """Turn it on."""
        words = [f"--state-dir={self.root / 'state'}", f"--runtime-dir={self.root / 'run'}"]
        words += [f"--config={self.root / 'config.toml'}", f"--sysfs-root={self.root / 'sys'}"]
        command = [*self.prefix, sys.executable, "-m", "port_agent.cli", "run", *words]
        self.process = subprocess.Popen(command, cwd=ROOT)
        until(self.answers)

    def answers(self) -> bool:
        """Return whether it is on and ready."""
        try:
            return bool(self.client.get("/v1/status"))
        except ControlError:
            return False

    def kill(self) -> None:
        """Turn it off without a word."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def submit(self, bundle: Path, **fields: Any) -> None:
        """Give it its federated job."""
        token = self.client.upload("/v1/uploads", bundle)["upload"]
        terms = {"leader": "" if self.name == LEADER else LEADER}
        self.client.post("/v1/jobs", name=JOB, upload=token, federated=True, terms=terms, **fields)

    def lead(self, **settings: Any) -> None:
        """Begin a federation."""
        self.client.post("/v1/federations", job=JOB, settings=settings)

    def federation(self) -> dict[str, Any]:
        """Return how the federation that it leads stands."""
        found: dict[str, Any] = self.client.get("/v1/federations")["federations"][0]
        return found

    def job(self) -> dict[str, Any]:
        """Return its job."""
        return dict(self.client.get(f"/v1/jobs/{JOB}"))

    def met(self) -> int:
        """Return how many others it is connected to."""
        return sum(row["is_connected"] for row in self.client.get("/v1/peers")["paired"])


def pair_all(devices: Sequence[Device]) -> None:
    """Have each trust all others."""
    for device in devices:
        paired = PairedDevices(device.root / "state")
        for other in devices:
            if other is not device:
                certificate = own_identity(other.root / "state").certificate
                paired.add(device_of(certificate, other.name, 1.7e9, other.address))


@contextmanager
def running(devices: Sequence[Device]) -> Iterator[None]:
    """Turn them on and wait until they have met; off in the end."""
    try:
        for device in devices:
            device.start()
        until(lambda: all(device.met() == len(devices) - 1 for device in devices))
        yield
    finally:
        for device in devices:
            device.kill()


@contextmanager
def local_devices(root: Path, *names: str) -> Iterator[list[Device]]:
    """Give agents of this machine that run and have met."""
    made = [Device(root / name, ("127.0.0.1", free_port())) for name in names]
    pair_all(made)
    with running(made):
        yield made
