"""Agents in processes of their own, paired, with the test worker: one has jobs, others take them."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import create_server
from typing import Any

from port_agent.control.client import ControlError
from port_agent.jobs.job import JobState
from tests.agent.federate.agents import Device, pair_all, running
from tests.agent.live_daemon import BUNDLE, CONFIG, ROOT, undisturbed
from tests.waiting import until

TAKES = "take_jobs = true\n"


class Mover(Device):
    """An agent with the test worker; `peers` is added to its configuration."""

    def allow(self, peers: str) -> None:
        """Set what it lets others do."""
        own = f'[peers]\nname = "{self.name}"\nport = {self.address[1]}\n{peers}'
        (self.root / "config.toml").write_text(CONFIG + own)

    def start(self) -> None:
        words = [str(self.root / part) for part in ("state", "run", "config.toml", "sys")]
        self.process = subprocess.Popen([*self.prefix, sys.executable, "-m", "tests.agent.live", *words], cwd=ROOT)
        until(self.answers)

    def restart(self) -> None:
        """Pull its plug and turn it on again."""
        self.kill()
        self.start()

    def give(self, bundle: dict[str, Any], name: str = "job", **fields: Any) -> None:
        """Submit a job."""
        path = self.root / "job.json"
        path.write_text(json.dumps(bundle))
        token = self.client.upload("/v1/uploads", path)["upload"]
        self.client.post("/v1/jobs", name=name, upload=token, **{"movable": "soonest", **fields})

    def own(self, name: str = "job") -> dict[str, Any]:
        """Return its job; nothing while it does not answer."""
        try:
            return dict(self.client.get(f"/v1/jobs/{name}"))
        except ControlError:
            return {"state": "?", "step": 0, "on": None, "history": [], "away": None}

    def all(self) -> list[dict[str, Any]]:
        """Return its jobs; none while it does not answer."""
        try:
            return list(self.client.get("/v1/jobs?all=1")["jobs"])
        except ControlError:
            return []

    def until(self, state: JobState, patience_s: float = 240.0) -> dict[str, Any]:
        """Wait until its job is in a state; returns it."""
        until(lambda: self.own()["state"] == state.name.lower(), self.own, patience_s=patience_s)
        return self.own()

    def result(self) -> Any:
        """Return the weights that it has."""
        target = self.root / "fetched"
        self.client.download("/v1/jobs/job/result", target)
        return json.loads(target.read_text())


class TorchMover(Mover):
    """The same with the real worker."""

    def start(self) -> None:
        Device.start(self)


@contextmanager
def two_movers(root: Path, kind: type[Mover] = Mover) -> Iterator[tuple[Mover, Mover]]:
    """Give an owner on battery, which therefore trains nothing, and a device that takes jobs; both run and have met."""
    with create_server(("", 0)) as one, create_server(("", 0)) as other:
        ports = [sock.getsockname()[1] for sock in (one, other)]
    attic, cellar = (
        kind(root / name, ("127.0.0.1", port)) for name, port in zip(("attic", "cellar"), ports, strict=True)
    )
    attic.allow("")
    cellar.allow(TAKES)
    attic.plug(online=False)
    pair_all([attic, cellar])
    with running([attic, cellar]):
        yield attic, cellar


def at_home(root: Path, bundle: dict[str, Any]) -> Any:
    """Return the weights of a job that never left."""
    return asyncio.run(undisturbed(root / "home", bundle))


def offer_all(attic: Mover) -> None:
    """Return once all jobs that may move were offered: another one, the last in order, is away or done."""
    attic.give(BUNDLE, "last", priority=-100)
    until(lambda: attic.own("last")["state"] in ("away", "finished"), lambda: attic.own("last"))


def settled(attic: Mover, cellar: Mover) -> bool:
    """Return whether the owner has its job and the other device has nothing of it."""
    left = (cellar.root / "state/moving").exists() and any((cellar.root / "state/moving").iterdir())
    return attic.own()["away"] is None and not cellar.all() and not left
