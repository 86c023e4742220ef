"""All simultaneous training: a runner for this computer, and one for each board that a job uses."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from port_agent.control.http_answers import RunStatus
from port_agent.energy.drift import Correction
from port_agent.jobs.job import Job
from port_agent.jobs.store import JobStore
from port_agent.supervisor.job.board_places import THIS_COMPUTER, place_of
from port_agent.supervisor.job.run_state import Meter
from port_agent.supervisor.job.runner import Runner
from port_agent.supervisor.job.worker_kinds import bundle_path
from port_agent.supervisor.job.worker_process import RequestedState, WorkerPhase
from port_agent.system.cgroup import DelegatedTree
from port_agent.system.locks import LockFile

WORKER_LOCKS = "worker*.lock"
"""The locks of workers in the state directory."""


class Runners:
    """The runner of this computer, and those of boards while they have a job."""

    def __init__(self, store: JobStore, state_dir: Path, make: Callable[[Callable[[], LockFile]], Runner]) -> None:
        """`make` returns a runner whose workers hold the given lock, a file in `state_dir`."""
        self._store, self._state_dir, self._make = store, state_dir, make
        self._meter: Meter | None = None
        self._tree: DelegatedTree | None = None
        self._boards: dict[str, tuple[int, Runner]] = {}
        self._places: dict[int, str] = {}
        self._written_bytes = 0
        self.host = self._new(0)

    def __iter__(self) -> Iterator[Runner]:
        """Yield this computer's runner, then the boards'."""
        yield self.host
        yield from [runner for _, runner in self._boards.values()]

    # --- queries

    def place_of(self, job: Job) -> str:
        """Return the place where a job is trained."""
        place = self._places.get(job.id)
        if place is None:
            place = self._places[job.id] = place_of(job, bundle_path(job, self._store.job_dir(job.id)))
        return place

    def at(self, place: str) -> Runner:
        """Return the runner of a place."""
        if place == THIS_COMPUTER:
            return self.host
        if place not in self._boards:
            number = min(set(range(1, len(self._boards) + 2)) - {number for number, _ in self._boards.values()})
            self._boards[place] = (number, self._new(number))
        return self._boards[place][1]

    def busy(self) -> dict[str, tuple[Runner, Job]]:
        """Return the runners that have a worker and its job, by place."""
        places = {THIS_COMPUTER: self.host, **{place: runner for place, (_, runner) in self._boards.items()}}
        return {place: (runner, job) for place, runner in places.items() if (job := runner.job) is not None}

    def of_job(self, job_id: int) -> Runner | None:
        """Return the runner that has a worker of a job, or None."""
        return next((runner for runner, job in self.busy().values() if job.id == job_id), None)

    @property
    def shown(self) -> Runner:
        """The runner that represents the agent in a single line: this computer's, or, while that one
        rests, a board's that trains.
        """
        busy = [runner for runner, _ in self.busy().values()]
        return min(busy, key=lambda runner: (runner is not self.host, runner.waits_for is not None), default=self.host)

    @property
    def training(self) -> bool:
        """Whether any worker trains, and is allowed to."""
        return any(runner.phase is WorkerPhase.TRAINING and runner.requested is RequestedState.TRAIN for runner in self)

    def statuses(self) -> tuple[RunStatus, ...]:
        """Return the runs as `status` shows them, this computer's first."""
        return tuple(status for runner in self if (status := runner.status()) is not None)

    def own_cpu_s(self) -> float:
        """Return CPU seconds of this process and its workers, living and ended."""
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        return own + sum(runner.cpu_s() for runner in self)

    def take_written_bytes(self) -> int:
        """Return the flash writes that workers reported since the last call."""
        kept, self._written_bytes = self._written_bytes, 0
        return kept + sum(runner.take_written_bytes() for runner in self)

    # --- actions on all

    def set_meter(self, meter: Meter) -> None:
        """Report all running jobs to `meter` from now on."""
        self._meter = meter
        for runner in self:
            runner.meter = meter

    def set_tree(self, tree: DelegatedTree) -> None:
        """Put workers into cgroups below `tree` from now on."""
        self._tree = tree
        for runner in self:
            runner.tree = tree

    def leave(self, reason: str, within_s: float = 0.0) -> None:
        """Make every worker release its memory."""
        for runner in self:
            runner.leave(reason, within_s)

    def kill(self) -> None:
        """Kill every worker at once."""
        for runner in self:
            runner.kill()

    def correct(self, correction: Correction) -> None:
        """Adopt the measured times of a job's steps."""
        for runner in self:
            runner.correct(correction)

    def tidy(self) -> None:
        """Forget boards without a job, and where ended jobs were trained."""
        for place, (_, runner) in list(self._boards.items()):
            if runner.job is None:
                self._written_bytes += runner.take_written_bytes()
                del self._boards[place]
        alive = {job.id for job in self._store.all() if not job.state.is_over}
        self._places = {job_id: place for job_id, place in self._places.items() if job_id in alive}

    def _new(self, number: int) -> Runner:
        runner = self._make(lambda: LockFile(worker_lock(self._state_dir, number)))
        runner.meter, runner.tree = self._meter, self._tree
        return runner


def worker_lock(state_dir: Path, number: int) -> Path:
    """Return the lock file of a worker: number 0 is this computer's."""
    return state_dir / (f"worker-{number}.lock" if number else "worker.lock")
