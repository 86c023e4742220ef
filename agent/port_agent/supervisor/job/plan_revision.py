"""Plans made again while a job trains, where its steps keep taking other proportions of compute and paging than planned."""

import subprocess
from pathlib import Path

import msgspec

from port_agent.system.helper_process import HelperCommand
from port_agent.system.python_process import one_thread_environment
from port_agent.worker.protocol import StepDone
from port_planner.base.units import format_bytes
from port_planner.ir.costs import Speeds

SOLVER_MODULE = "port_agent.planning.revise"
SOLVER_BYTES = 768 << 20
"""Of data that making plans may hold: the planning model of 2,000 stages takes 300 MB."""
MIN_SOLVER_BYTES = 256 << 20
"""In less it is not begun."""
WATCHED_STEPS = 50
WATCHED_S = 60.0
"""So much of training is looked at first: shorter, and what else the machine does counts for the job's own pace."""
CHANGED_SHARE = 0.25
"""How far the figures must be from those of the last time before plans are made again."""
WORTH_A_RESTART = 0.02
"""Of energy and wear: less, and what the new plan saves is not worth starting the worker again."""


class PeerSolving(msgspec.Struct, frozen=True):
    """The paired device (its name or `any`) that solves, and the runtime directory of the agent here, which asks it."""

    peer: str
    runtime_dir: str


class RevisionRequest(msgspec.Struct, frozen=True):
    """Make the plans of a bundle again, of which `plan` is in use, and write them to `out`. `solving`: None: on this device."""

    bundle: str
    out: str
    plan: int = 0
    speeds: Speeds = Speeds()
    solving: PeerSolving | None = None


class RevisedPlans(msgspec.Struct, frozen=True):
    """Plans were made again: what the one in use costs at the measured speeds, and what its successor does."""

    old_joules: float
    new_joules: float
    old_written_bytes: int
    new_written_bytes: int
    peers: tuple[str, ...] = ()
    """What paired devices did for it, and why they did no more."""

    @property
    def saved(self) -> float:
        """Share of energy and wear."""
        return 1 - self.new_joules / self.old_joules if self.old_joules > 0 else 0.0

    @property
    def text(self) -> str:
        """One line for the job's history."""
        peers = "".join(f"; {line}" for line in self.peers)
        if self.saved < WORTH_A_RESTART:
            return f"looked for a better plan for what its steps really take: none saves {WORTH_A_RESTART:.0%}{peers}"
        return (
            f"planned again for what its steps really take: {self.new_joules:.3g} J a step with wear instead of "
            f"{self.old_joules:.3g}, {format_bytes(self.new_written_bytes)} written instead of "
            f"{format_bytes(self.old_written_bytes)}{peers}"
        )


class StepPace:
    """Sums up what steps of one run take, compute and paging apart."""

    def __init__(self, known: Speeds, *, one_thread: bool) -> None:
        """`known`: the speeds for which the plans of this run were made. One thread's CPU time is less disturbed than the clock."""
        self._known, self._one_thread = known, one_thread
        self._steps, self._wall_s = 0, 0.0
        self._compute_s = self._planned_s = 0.0
        self._read, self._written = [0.0, 0.0], [0.0, 0.0]

    def add(self, step: StepDone) -> None:
        """Take in a step; one without a plan's figures says nothing."""
        if not step.planned_compute_s:
            return
        taken_s = step.wall_s - step.phases_s.get("stall", 0.0)
        self._compute_s += min(taken_s, step.cpu_s) if self._one_thread else taken_s
        self._planned_s += step.planned_compute_s
        self._read[0] += step.paged_in_bytes
        self._read[1] += step.phases_s.get("page_in", 0.0)
        self._written[0] += step.paged_out_bytes
        self._written[1] += step.phases_s.get("page_out", 0.0)
        self._steps += 1
        self._wall_s += step.wall_s

    def speeds(self) -> Speeds | None:
        """Return what was seen, over the bundle's own costs; None until enough was."""
        if self._steps < WATCHED_STEPS or self._wall_s < WATCHED_S:
            return None
        rates = [moved / taken if moved and taken else None for moved, taken in (self._read, self._written)]
        return Speeds(self._known.compute * self._compute_s / self._planned_s, *rates)


class PlanRevision:
    """Watches one run of a bundle, and has its plans made again once by a process beside it."""

    def __init__(
        self, bundle: Path, known: Speeds | None, *, one_thread: bool, solving: PeerSolving | None = None
    ) -> None:
        """`known`: what the plans were last made for; None where they are the bundle's own. `solving`: None: on this device."""
        self._bundle, self._known, self._solving = bundle, known, solving
        self._pace: StepPace | None = StepPace(known or Speeds(), one_thread=one_thread)
        self._process: subprocess.Popen[bytes] | None = None

    def take(self, step: StepDone) -> None:
        """Take in a step."""
        if self._pace is not None:
            self._pace.add(step)

    def look(self, plan: int, free_bytes: int | None) -> RevisedPlans | None:
        """Go on while the worker may train: begin when enough was seen, and return what came of it once it is there.

        `plan`: the one in use. `free_bytes`: memory that it may take beside the worker; None without a limit. Raises OSError.
        """
        if self._process is not None:
            return None if self._process.poll() is None else self._ended(self._process)
        speeds = None if self._pace is None else self._pace.speeds()
        if speeds is None:
            return None
        self._pace = None
        limit = SOLVER_BYTES if free_bytes is None else min(SOLVER_BYTES, free_bytes)
        if limit >= MIN_SOLVER_BYTES and (self._known is None or speeds.differ_from(self._known, CHANGED_SHARE)):
            self._process = self._begun(plan, speeds, limit)
        return None

    def stop(self) -> None:
        """Give up what is under way: the policy allows no more, or the worker has ended."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _begun(self, plan: int, speeds: Speeds, limit_bytes: int) -> "subprocess.Popen[bytes]":
        from port_planner.ir.bundle.revision import revision_path

        request = RevisionRequest(str(self._bundle), str(revision_path(self._bundle)), plan, speeds, self._solving)
        command = HelperCommand(SOLVER_MODULE, (), one_thread_environment(), limit_bytes)
        process = command.start(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        if process.stdin is not None:
            process.stdin.write(msgspec.json.encode(request) + b"\n")
            process.stdin.flush()
        return process

    def _ended(self, process: "subprocess.Popen[bytes]") -> RevisedPlans | None:
        output, _ = process.communicate()
        self._process = None
        return None if process.returncode else msgspec.json.decode(output, type=RevisedPlans)
