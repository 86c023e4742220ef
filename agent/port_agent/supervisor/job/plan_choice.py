"""Which plan of the bundle's frontier to run, and how often to make a checkpoint: pure rules over figures."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

MIB = 1 << 20
MEMORY_MARGIN = 1.05
MEMORY_MARGIN_BYTES = 16 * MIB
"""Bytes that the kernel charges to the group beyond the worker's resident set: page tables, sockets, page cache in
flight."""
DATA_MARGIN_BYTES = 640 * MIB
"""Bytes added to RLIMIT_DATA, which counts address space.

After `import torch` it is 35 MB above the resident anonymous memory, with CUDA's libraries 490 MiB (torch 2.14), and
each thread adds a stack of 8 MB. Used until the first step has shown how much is never touched.
"""
SMALLEST_WORKER_BYTES = 128 * MIB
"""Bytes of the smallest process with torch; a smaller plan does not describe the process."""

DEADLINE_MARGIN = 1.15
"""Share of time added to what a job needs; a job whose sum exceeds the time left is behind its deadline."""

CHECKPOINT_SHARE = 0.02
"""Largest share of the time that checkpoints may take."""
CHECKPOINT_WEAR_SHARE = 0.5
"""Largest share of the day's flash budget that checkpoints may write."""
CHECKPOINT_EVERY_S = 600.0
"""Seconds between checkpoints if both shares allow it: a power cut then costs at most ten minutes."""
CHECKPOINT_SOONEST_S = 10.0
"""Least seconds between checkpoints; less work than this does not justify one."""


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """One plan of a bundle: resident peak, and time and energy of one step. None is unknown.

    `device_bytes`: bytes of a device's own memory, besides the resident peak. `written_bytes`: bytes written to flash
    in a step. `wear_joules`: the cost of their wear, as joules of the same price.
    """

    index: int
    peak_bytes: int
    step_s: float | None = None
    step_joules: float | None = None
    written_bytes: int = 0
    wear_joules: float = 0.0
    device_bytes: int = 0

    @property
    def all_bytes(self) -> int:
        """Bytes of all memory, by which plans are compared after one ran out of memory."""
        return self.peak_bytes + self.device_bytes


@dataclass(frozen=True, slots=True)
class WriteAllowance:
    """Bytes that may still be written to flash on this day."""

    left_bytes: int
    left_s: float

    def lasts(self, plan: PlanFigures, steps_left: int | None) -> bool:
        """Return whether a plan could run until the end of the day, or of its job, within the allowance."""
        if not plan.step_s or not plan.written_bytes:
            return True
        steps = self.left_s / plan.step_s
        if steps_left is not None:
            steps = min(steps, steps_left)
        return steps * plan.written_bytes <= self.left_bytes


def fitting(plans: Sequence[PlanFigures], limit_bytes: int | None, ceiling_bytes: int | None) -> list[PlanFigures]:
    """Return the plans that may run: within the limit, and smaller than the size that was killed before."""
    return [
        plan
        for plan in plans
        if (limit_bytes is None or memory_max(plan.peak_bytes) <= limit_bytes)
        and (ceiling_bytes is None or plan.all_bytes < ceiling_bytes)
    ]


def at_measured_speed(
    plans: Sequence[PlanFigures], current: int | None, measured_step_s: float | None
) -> tuple[PlanFigures, ...]:
    """Return the plans with their times scaled by the measured speed of the current one on this device."""
    planned_s = next((plan.step_s for plan in plans if plan.index == current), None)
    if not planned_s or not measured_step_s:
        return tuple(plans)
    factor = measured_step_s / planned_s
    return tuple(replace(plan, step_s=None if plan.step_s is None else plan.step_s * factor) for plan in plans)


def choose_plan(
    plans: Sequence[PlanFigures],
    limit_bytes: int | None,
    ceiling_bytes: int | None = None,
    *,
    steps_left: int | None = None,
    time_left_s: float | None = None,
    allowance: WriteAllowance | None = None,
    warm: bool = False,
) -> PlanFigures | None:
    """Return the plan to run, or None when none fits.

    By default, the plan with the least energy and wear wins. If the job is late for its deadline, the fastest plan
    wins; if it would use up the day's write allowance, the plan that writes least; if the device is warm (`warm`), the
    plan with the least power.
    """
    candidates = fitting(plans, limit_bytes, ceiling_bytes)
    if not candidates:
        return None
    if time_left_s is not None and steps_left is not None:
        in_time = [p for p in candidates if p.step_s is None or steps_left * p.step_s * DEADLINE_MARGIN <= time_left_s]
        if not in_time:
            return min(candidates, key=_seconds)
        candidates = in_time
    if allowance is not None:
        lasting = [plan for plan in candidates if allowance.lasts(plan, steps_left)]
        candidates = lasting or [min(candidates, key=lambda plan: (plan.written_bytes, _cost(plan)))]
    if warm:
        return min(candidates, key=_watts)
    return min(candidates, key=lambda plan: (_cost(plan), _seconds(plan), plan.peak_bytes))


def smaller_plan(plans: Sequence[PlanFigures], than_bytes: int) -> PlanFigures | None:
    """Return the largest plan below `than_bytes` of all memory, the next to try after running out of
    memory; None if there is none.
    """
    below = [plan for plan in plans if plan.all_bytes < than_bytes]
    return max(below, key=lambda plan: plan.all_bytes, default=None)


def memory_max(peak_bytes: int) -> int:
    """Return the group's memory.max for a plan of this peak."""
    return int(peak_bytes * MEMORY_MARGIN) + MEMORY_MARGIN_BYTES


def data_limit(peak_bytes: int) -> int:
    """Return RLIMIT_DATA for a plan of this peak until its first step is done.

    It is a second limit, above that of the group.
    """
    return memory_max(peak_bytes) + DATA_MARGIN_BYTES


def resident_max(peak_bytes: int) -> int | None:
    """Return how many bytes may be resident after the first step if no group limits them.

    None if the plan does not specify it.
    """
    return int(peak_bytes * MEMORY_MARGIN) if peak_bytes >= SMALLEST_WORKER_BYTES else None


def checkpoint_interval_s(
    checkpoint_s: float | None, checkpoint_bytes: int | None, flash_budget_bytes_per_day: int
) -> float:
    """Return the time between checkpoints, from their cost in time and flash wear."""
    wanted = CHECKPOINT_EVERY_S if checkpoint_s is None else max(CHECKPOINT_SOONEST_S, checkpoint_s / CHECKPOINT_SHARE)
    wanted = min(wanted, CHECKPOINT_EVERY_S)
    if checkpoint_bytes:
        a_day = flash_budget_bytes_per_day * CHECKPOINT_WEAR_SHARE
        wanted = max(wanted, 86400.0 * checkpoint_bytes / max(a_day, 1.0))
    return wanted


def eta_s(step: int, total_steps: int | None, step_s: float | None) -> float | None:
    """Return the remaining training time, or None if unknown."""
    if total_steps is None or step_s is None:
        return None
    return max(0, total_steps - step) * step_s


def _seconds(plan: PlanFigures) -> float:
    return float("inf") if plan.step_s is None else plan.step_s


def _cost(plan: PlanFigures) -> float:
    return float("inf") if plan.step_joules is None else plan.step_joules + plan.wear_joules


def _watts(plan: PlanFigures) -> float:
    if plan.step_s is None or plan.step_joules is None or plan.step_s <= 0:
        return float("inf")
    return plan.step_joules / plan.step_s
