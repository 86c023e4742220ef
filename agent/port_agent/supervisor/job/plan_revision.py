"""Plan again during training, if the proportion of compute to paging in a job's steps stays different from the plan."""

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
"""Bytes of memory for planning again: the planning model of 2,000 stages takes 300 MB."""
MIN_SOLVER_BYTES = 256 << 20
"""Smallest memory in bytes with which a new plan is searched."""
WATCHED_STEPS = 50
WATCHED_S = 60.0
"""Seconds of training that are observed first; in a shorter time, other work of the machine
would count as the job's pace.
"""
CHANGED_SHARE = 0.25
"""Relative change of the figures since the last planning that makes planning again worthwhile."""
WORTH_A_RESTART = 0.02
"""Share of energy and wear that a new plan must save to justify restarting the worker."""


class PeerSolving(msgspec.Struct, frozen=True):
    """The paired device that solves (its name or `any`), and the runtime directory of the
    local agent, which asks it.
    """

    peer: str
    runtime_dir: str


class RevisionRequest(msgspec.Struct, frozen=True):
    """Request to plan a bundle again whose `plan` is in use, and to write the plans to `out`.

    `solving`: None for this device.
    """

    bundle: str
    out: str
    plan: int = 0
    speeds: Speeds = Speeds()
    solving: PeerSolving | None = None


class RevisedPlans(msgspec.Struct, frozen=True):
    """The result of planning again: the costs of the current plan at the measured speeds, and of its successor."""

    old_joules: float
    new_joules: float
    old_written_bytes: int
    new_written_bytes: int
    peers: tuple[str, ...] = ()
    """Contributions of paired devices to the plan, and why there were no more."""

    @property
    def saved(self) -> float:
        """Share of energy and wear that is saved."""
        return 1 - self.new_joules / self.old_joules if self.old_joules > 0 else 0.0

    @property
    def text(self) -> str:
        """One line for the job's history."""
        peers = "".join(f"; {line}" for line in self.peers)
        if self.saved < WORTH_A_RESTART:
            return f"searched for a better plan for the measured steps: none saves {WORTH_A_RESTART:.0%}{peers}"
        return (
            f"planned again for the measured steps: {self.new_joules:.3g} J per step with wear instead of "
            f"{self.old_joules:.3g}, {format_bytes(self.new_written_bytes)} written instead of "
            f"{format_bytes(self.old_written_bytes)}{peers}"
        )


class StepPace:
    """Sums of the times of one run's steps, compute and paging separately."""

    def __init__(self, known: Speeds, *, one_thread: bool) -> None:
        """`known`: the speeds for which the plans of this run were made.

        The CPU time of a single thread is disturbed less than the wall clock.
        """
        self._known, self._one_thread = known, one_thread
        self._steps, self._wall_s = 0, 0.0
        self._compute_s = self._planned_s = 0.0
        self._read, self._written = [0.0, 0.0], [0.0, 0.0]

    def add(self, step: StepDone) -> None:
        """Add a step; one without figures from a plan is ignored."""
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
        """Return the measured speeds relative to the bundle's own costs; None until there are enough steps."""
        if self._steps < WATCHED_STEPS or self._wall_s < WATCHED_S:
            return None
        rates = [moved / taken if moved and taken else None for moved, taken in (self._read, self._written)]
        return Speeds(self._known.compute * self._compute_s / self._planned_s, *rates)


class PlanRevision:
    """Watches one run of a bundle, and once has it planned again by a parallel process."""

    def __init__(
        self, bundle: Path, known: Speeds | None, *, one_thread: bool, solving: PeerSolving | None = None
    ) -> None:
        """`known`: the speeds for which the plans were last made; None if these are the bundle's own.

        `solving`: None for this device.
        """
        self._bundle, self._known, self._solving = bundle, known, solving
        self._pace: StepPace | None = StepPace(known or Speeds(), one_thread=one_thread)
        self._process: subprocess.Popen[bytes] | None = None

    def take(self, step: StepDone) -> None:
        """Add a step."""
        if self._pace is not None:
            self._pace.add(step)

    def look(self, plan: int, free_bytes: int | None) -> RevisedPlans | None:
        """Continue while the worker may train: start when enough was measured, and return the result once it exists.

        `plan`: the one in use. `free_bytes`: memory available alongside the worker; None
        without a limit. Raises OSError.
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
        """Abandon planning in progress, because the policy no longer allows it or the worker has ended."""
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
