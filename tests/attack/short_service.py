"""A short life of the daemon: jobs are submitted, paused, cancelled and trained; afterwards none of them is lost."""

import asyncio
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from port_agent.control.client import ControlClient, ControlError
from port_agent.jobs.job import JobState
from port_agent.supervisor.context import Settings
from port_agent.supervisor.daemon import Daemon
from port_planner.base.errors import PortError
from tests.agent.live import seams
from tests.agent.live_daemon import BUNDLE, CONFIG
from tests.agent.worker_program import undisturbed_weights
from tests.attack.outcome import AttackOutcome

SHORT = {**BUNDLE, "steps": 12, "instruction_s": 0.0, "checkpoint_every": 4}
ASKED = {"held": "pause", "gone": "cancel", "trained": ""}
"""The jobs, and what is asked of each once it is submitted."""
PATIENCE_S = 60.0
GIVEN_UP_S = 3.0
"""A job whose daemon cannot write waits; the attack goes on after so long."""
_INTERNAL = 500


class RefusedError(PortError):
    """A request was refused with its reason."""


class _Service:
    """A daemon in this event loop on FOLDER/state; all else that it needs lies beside FOLDER."""

    def __init__(self, folder: Path) -> None:
        beside = folder.parent
        (beside / "sys/class/power_supply").mkdir(parents=True, exist_ok=True)
        (beside / "config.toml").write_text(CONFIG)
        self.daemon = Daemon(
            Settings(folder / "state", beside / "run", beside / "config.toml", beside / "sys"), seams()
        )
        self.client = ControlClient(beside / "run")

    async def start(self) -> bool:
        """Return whether the daemon is ready; it raises where it refused to start."""
        self._task = asyncio.create_task(self.daemon.run())
        ready = asyncio.create_task(self.daemon.ready.wait())
        await asyncio.wait({self._task, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._task.done():
            self._task.result()
        return not self._task.done()

    async def ask(self, *arguments: Any, **fields: Any) -> Any:
        """Return an answer, or None where it was refused with a reason; an internal error is none."""
        function, *rest = arguments
        try:
            return await asyncio.to_thread(function, *rest, **fields)
        except ControlError as error:
            if error.status == _INTERNAL or error.status is None:
                raise AssertionError(f"answered {error.status}: {error}") from error
            return None

    async def stop(self) -> None:
        self.daemon.stop()
        await self._task

    async def until_over(self, name: str, patience_s: float) -> dict[str, Any]:
        """Return what is said of a job once it is over, or after so long."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + patience_s
        while True:
            found = await self.job(name)
            if found.get("state_number", JobState.QUEUED) >= JobState.FINISHED or loop.time() > end_s:
                return found
            await asyncio.sleep(0.01)

    async def job(self, name: str) -> dict[str, Any]:
        """Return what is said of a job, or nothing."""
        said = await self.ask(self.client.get, "/v1/jobs?all=1")
        return next((job for job in said["jobs"] if job["name"] == name), {})


def serve_shortly(folder: Path) -> None:
    """Serve with FOLDER/state, and note beside it what was acknowledged.

    Raises RefusedError when some request was refused.
    """
    promised: dict[str, str] = {}
    try:
        asyncio.run(_serve(folder, promised))
    finally:
        folder.with_name("acknowledged").write_text(json.dumps(promised))
    if promised != ASKED:
        raise RefusedError(f"of {ASKED} only {promised}")


def _may_train(folder: Path) -> Path:
    """Return the file without which the job that is paused does no step: it cannot be over
    before it hears of its pause.
    """
    return folder.with_name("may-train")


async def _serve(folder: Path, promised: dict[str, str]) -> None:
    service = _Service(folder)
    await service.start()
    try:
        bundle = folder.with_name("bundle.json")
        may_train = _may_train(folder)
        may_train.unlink(missing_ok=True)
        for name, verb in ASKED.items():
            waits = {"faults": {"wait_for": str(may_train)}} if verb == "pause" else {}
            bundle.write_text(json.dumps({**SHORT, **waits}))
            token = await service.ask(service.client.upload, "/v1/uploads", bundle)
            if token is None or not await service.ask(
                service.client.post, "/v1/jobs", name=name, upload=token["upload"]
            ):
                continue
            promised[name] = ""
            if verb and await service.ask(service.client.post, f"/v1/jobs/{name}/{verb}") is not None:
                promised[name] = verb
            elif verb == "pause":
                may_train.touch()
        if "trained" in promised:
            await service.until_over("trained", GIVEN_UP_S)
    finally:
        await service.stop()


def _flip(file: Path, good: bytes, bit: int) -> None:
    content = bytearray(good)
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


async def flip_result(folder: Path, flips: Callable[[Path], Iterable[tuple[Path, int]]]) -> AttackOutcome:
    """Flip each bit that `flips` says of a finished job's result, and fetch it; then have it written again."""
    service = _Service(folder)
    await service.start()
    out = folder.with_name("out")
    harmed, tried = [], 0

    async def fetch() -> bytes | None:
        done = await service.ask(service.client.download, "/v1/jobs/trained/result", out)
        return None if done is None else out.read_bytes()

    try:
        bundle = folder.with_name("bundle.json")
        bundle.write_text(json.dumps(SHORT))
        token = await service.ask(service.client.upload, "/v1/uploads", bundle)
        await service.ask(service.client.post, "/v1/jobs", name="trained", upload=token["upload"])
        await service.until_over("trained", PATIENCE_S)
        result = Path((await service.ask(service.client.get, "/v1/jobs/trained"))["result"])
        good = await fetch() or b""
        for _, bit in flips(result):
            tried += 1
            _flip(result, good, bit)
            if await fetch() is not None:
                harmed.append(f"bit {bit}: handed out")
        await service.ask(service.client.post, "/v1/jobs/trained/resume")
        await service.until_over("trained", PATIENCE_S)
        if not good or await fetch() != good:
            harmed.append("not written again")
    finally:
        await service.stop()
    notes = f"{tried - len(harmed)} refused and said, then written again"
    return AttackOutcome("bit flips, result of a job", tried, tried - len(harmed), tuple(harmed), notes)


def serve_and_be_heard(folder: Path) -> None:
    """Do so in a process of its own, whose standard error goes to `said` beside FOLDER."""
    said = os.open(folder.with_name("said"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(said, 2)
    serve_shortly(folder)


def check_service(folder: Path) -> str:
    """Start a daemon on what was left; return which promise is broken, or an empty text."""
    said = folder.with_name("said").read_text()
    if "Traceback" in said:
        return f"it said {said[-1500:]}"
    return asyncio.run(_check(folder, json.loads(folder.with_name("acknowledged").read_text())))


def jobs_afterwards(folder: Path) -> str:
    """Start a daemon on what was left and stop it; return which job is not as `serve_shortly`
    left it, or an empty text.
    """
    return asyncio.run(_look(folder))


async def _look(folder: Path) -> str:
    service = _Service(folder)
    await service.start()
    try:
        expected = {"held": JobState.PAUSED, "gone": JobState.CANCELLED, "trained": JobState.FINISHED}
        states = {name: (await service.job(name)).get("state_number") for name in expected}
        return "" if states == expected else f"jobs are {states}"
    finally:
        await service.stop()


async def _check(folder: Path, promised: dict[str, str]) -> str:
    service = _Service(folder)
    await service.start()
    try:
        for name, verb in promised.items():
            found = await service.job(name)
            if not found:
                return f"job {name} is lost"
            state = found["state_number"]
            if verb == "cancel" and state != JobState.CANCELLED:
                return f"job {name} was cancelled and is {found['state']}"
            if verb == "pause" and state != JobState.PAUSED:
                return f"job {name} was paused and is {found['state']}"
        _may_train(folder).touch()
        for name in set(promised) - {"gone"}:
            await service.ask(service.client.post, f"/v1/jobs/{name}/resume")
            found = await service.until_over(name, PATIENCE_S)
            if found["state_number"] != JobState.FINISHED:
                return f"job {name} does not end: {found}"
            out = folder.with_name("result")
            await asyncio.to_thread(service.client.download, f"/v1/jobs/{name}/result", out)
            if json.loads(out.read_text())["weights"] != undisturbed_weights(SHORT):
                return f"job {name} has other weights"
        return ""
    finally:
        await service.stop()
