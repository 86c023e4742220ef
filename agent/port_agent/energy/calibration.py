"""The power that this machine draws by what it does: watts and joules per byte, fitted to short metered runs.

    joules = static_watts * seconds + sum over classes of work: figure * amount

The figures are fitted by least squares over the runs, each weighted by 1 / its joules, because a meter's
error is proportional to its reading. The standard errors are those of the fit (Draper and Smith, Applied
Regression Analysis, section 5).
"""

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from port_agent.energy.issues import IssueList
from port_agent.energy.sampler import Sampler
from port_agent.energy.sources.power_source import PowerSource
from port_agent.energy.sources.registry import SourceChoice
from port_planner.base.errors import PortError


class CalibrationError(PortError):
    """The runs do not show the machine's power at rest."""


class WorkClass(enum.Enum):
    """Classes of work that draw power separately, and the unit of each."""

    ACTIVE = "active"
    """Seconds in which any core computes: the power of waking the first of them."""
    DENSE = "dense"
    """Core-seconds of matrix products."""
    MOVING = "moving"
    """Core-seconds of operators that are bound by memory."""
    READ = "read"
    """Bytes from flash."""
    WRITTEN = "written"
    """Bytes to flash."""


class MeteredLoad(Protocol):
    """Something that the machine does for a while."""

    @property
    def name(self) -> str:
        """What it is, for messages."""

    def start(self) -> None:
        """Start the work in the background."""

    def stop(self) -> Mapping[WorkClass, float]:
        """Stop the work, and return how much of each class was done."""


@dataclass(frozen=True, slots=True)
class MeteredRun:
    """One metered run of a load."""

    seconds: float
    joules: float
    work: Mapping[WorkClass, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A fitted figure, watts or joules per byte, and its standard error."""

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """The result of the runs; classes without a run are missing.

    `gaps`: loads from which nothing was learned, and why.
    """

    static_watts: Estimate
    figures: Mapping[WorkClass, Estimate]
    runs: int
    gaps: tuple[str, ...] = ()


def meter_runs(
    source: PowerSource,
    loads: Sequence[MeteredLoad],
    *,
    run_s: float,
    repeats: int,
    clock: Callable[[], float],
    wait: Callable[[float], None],
    progress: Callable[[float], None] = lambda share: None,
) -> tuple[list[MeteredRun], tuple[str, ...]]:
    """Run each load for about `run_s` seconds, all of them `repeats` times; return the metered runs, and
    the loads that gave none.

    The meter's first period is skipped, so that its figures cover this load alone. A run in which the meter failed or
    had no reading is discarded and named.
    """
    sampler = Sampler(SourceChoice((source,), ()), IssueList(), lambda info: None)
    period_s = min(source.info.period_s, run_s)
    samples = max(1, math.ceil(run_s / period_s))
    runs: list[MeteredRun] = []
    gaps: dict[str, str] = {}
    for done in range(repeats * len(loads)):
        load = loads[done % len(loads)]
        begin_s = clock()
        load.start()
        try:
            wait(period_s)
            sampler.interrupt(f"before {load.name}")
            sampler.sample(clock(), period_s)
            intervals = []
            for _ in range(samples):
                wait(period_s)
                intervals.append(sampler.sample(clock(), period_s))
        finally:
            work = load.stop()
            lasted_s = clock() - begin_s
        seconds = sum(interval.seconds for interval in intervals if interval is not None)
        joules = [interval.joules for interval in intervals if interval is not None and interval.joules is not None]
        if len(joules) == samples and sum(joules) > 0.0:
            share = min(1.0, seconds / lasted_s)
            runs.append(MeteredRun(seconds, sum(joules), {kind: amount * share for kind, amount in work.items()}))
        else:
            reasons = [interval.reason for interval in intervals if interval is not None and interval.reason]
            gaps[load.name] = reasons[0] if reasons else "the meter had nothing to measure"
        progress((done + 1) / (repeats * len(loads)))
    return runs, tuple(f"{name}: {reason}" for name, reason in gaps.items())


def fit(runs: Sequence[MeteredRun], gaps: tuple[str, ...] = ()) -> Calibration:
    """Return the figures that explain the runs best; none is below zero.

    If no two runs distinguish them, ACTIVE is counted with the cores. Raises CalibrationError if
    too few runs were metered.
    """
    done = [work for work in WorkClass if any(run.work.get(work) for run in runs)]
    while True:
        amounts = np.array([[run.seconds, *(run.work.get(work, 0.0) for work in done)] for run in runs])
        weighted = amounts / np.array([[run.joules] for run in runs]) if runs else amounts
        scale = np.abs(weighted).max(axis=0) if runs else np.ones(0)
        enough = len(runs) > len(done) + 1 and np.linalg.matrix_rank(weighted / scale) == len(done) + 1
        if enough or WorkClass.ACTIVE not in done:
            break
        done.remove(WorkClass.ACTIVE)
    if not enough:
        causes = "; ".join(gaps) or "the meter said nothing while it was at rest and at work"
        raise CalibrationError(f"{len(runs)} runs were metered, too few to separate the loads ({causes}); try again")
    scaled = weighted / scale
    found, _, _, _ = np.linalg.lstsq(scaled, np.ones(len(runs)), rcond=None)
    residual = scaled @ found - 1.0
    variance = float(residual @ residual) / (len(runs) - len(found))
    errors = np.sqrt(variance * np.diag(np.linalg.inv(scaled.T @ scaled)))
    static, *figures = (
        Estimate(max(0.0, float(value)), float(error))
        for value, error in zip(found / scale, errors / scale, strict=True)
    )
    return Calibration(static, dict(zip(done, figures, strict=True)), len(runs), gaps)
