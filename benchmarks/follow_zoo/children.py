"""Judge programs in child processes: a crash or a hang is a finding about one program, and the others go on."""

import gc
import json
import multiprocessing
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Protocol

import torch
import torch.utils.checkpoint

from benchmarks.follow_zoo.compare import Outcome, Program, Verdict, judge
from port_planner.base.process_memory import PAGE_BYTES

ADDRESS_SPACE = 12 << 30  # bytes a child may map; a tiny model that wants more is not tiny


class Judged(Protocol):
    """Something with a name that is judged in a child process."""

    @property
    def name(self) -> str:
        """Its name in the table."""

    def judged(self, at: Callable[[str], object]) -> Outcome:
        """Judge it; before each run, `at` receives the current stage."""


@dataclass(frozen=True, slots=True)
class Case:
    """A program with a name; it is called in the child. `settings` are those of `compare.judge`."""

    name: str
    program: Program
    settings: tuple[str, ...]

    def judged(self, at: Callable[[str], object]) -> Outcome:
        """Run it plainly and under budgets."""
        return judge(self.name, self.program, self.settings, at)


@dataclass(frozen=True, slots=True)
class _Running:
    case: Judged
    process: ForkProcess
    answer: Path
    deadline: float
    began: float


def run_in_children(
    cases: Iterable[Judged], jobs: int, timeout_s: float, *, on_device: bool = False
) -> Iterator[Outcome]:
    """Judge each case in a forked child, `jobs` at a time; yield outcomes as they arrive.

    `on_device`: each child is the first to use its device, because a driver does not survive a fork,
    and maps much address space.
    """
    if not on_device:
        warm_up()
    pending = iter(cases)
    running: list[_Running] = []
    with tempfile.TemporaryDirectory(prefix="zoo-answers-") as folder:
        more = True
        while more or running:
            while more and len(running) < jobs:
                case = next(pending, None)
                if case is None:
                    more = False
                else:
                    running.append(_start(case, Path(folder), timeout_s, None if on_device else ADDRESS_SPACE))
            if running:
                left_s = min(r.deadline for r in running) - time.monotonic()
                wait([r.process.sentinel for r in running], timeout=max(0.0, left_s))
            for one in [r for r in running if not r.process.is_alive() or time.monotonic() > r.deadline]:
                running.remove(one)
                yield _outcome(one)


def warm_up() -> None:
    """Load what every child would load for itself, and exclude it from garbage collection."""
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.AdamW([weight])
    torch.utils.checkpoint.checkpoint(torch.sin, weight, use_reentrant=False).sum().backward()
    optimizer.step()
    gc.collect()
    gc.freeze()


def _start(case: Judged, folder: Path, timeout_s: float, address_space: int | None) -> _Running:
    answer = folder / f"{abs(hash(case.name))}.json"
    process = multiprocessing.get_context("fork").Process(target=_child, args=(case, answer, address_space))
    process.start()
    now = time.monotonic()
    return _Running(case, process, answer, now + timeout_s, now)


def _child(case: Judged, answer: Path, address_space: int | None) -> None:
    """Judge one case in a session of its own, so that processes which it starts end with it."""
    os.setsid()
    if address_space is not None:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE_BYTES  # by an earlier budget: terabytes
        most = mapped + address_space
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    torch.set_num_threads(1)
    outcome = case.judged(lambda at: answer.write_text(json.dumps({"at": at})))
    answer.write_text(json.dumps(outcome.as_json()))


def _outcome(one: _Running) -> Outcome:
    """Return the child's message, or how it ended without one."""
    alive = one.process.is_alive()
    with suppress(ProcessLookupError):
        os.killpg(one.process.pid or 0, signal.SIGKILL)
    one.process.join()
    seconds = round(time.monotonic() - one.began, 1)
    said = json.loads(one.answer.read_text()) if one.answer.exists() else {"at": ""}
    if "verdict" in said:
        return replace(Outcome.from_json(said), seconds=seconds)
    at = said["at"]
    if at in {"", "plain"}:
        why = "takes longer than the limit" if alive else f"plain PyTorch ends with {_ending(one.process.exitcode)}"
        return Outcome(one.case.name, Verdict.NOT_ELIGIBLE, why, seconds=seconds)
    verdict = Verdict.TIMED_OUT if alive else Verdict.KILLED
    detail = "" if alive else _ending(one.process.exitcode)
    return Outcome(one.case.name, verdict, detail, at, seconds=seconds)


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"
