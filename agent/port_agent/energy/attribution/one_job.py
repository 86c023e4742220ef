"""Split the measured energy of one job among its steps and phases, so that the parts always add up to the whole.

Energy comes as intervals (from the source), activity as events (from the worker, a step after it is done). An interval
is split once the activity in it is known. Its static part is the idle baseline times its seconds. The rest belongs to
the phases of the step, by the joules that each is expected to take (seconds at compute power, bytes moved at joules per
byte). So a transfer hidden behind compute does not take half of the compute's energy.
"""

import enum
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from port_agent.energy.attribution.timeline import Interval
from port_agent.energy.sources.power_source import Kind
from port_agent.worker.protocol import StepDone


class EnergyPhase(enum.StrEnum):
    """Kinds of work that energy is attributed to. The values are stored in the ledger and must not change."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    RECOMPUTE = "recompute"
    PAGE_IN = "page_in"
    PAGE_OUT = "page_out"
    PACKING = "packing"
    STALL = "stall"
    STATIC = "static"  # idle power of the machine during a job's time
    OTHER = "other"  # a job's time outside the phases: loading, checkpoints, evaluation, unfinished steps
    IDLE = "idle"  # no job, or a paused one
    UNMEASURED = "unmeasured"  # a gap: seconds without joules


_BY_NAME = {phase.value: phase for phase in EnergyPhase} | {"pack": EnergyPhase.PACKING, "unpack": EnergyPhase.PACKING}
_TRANSFERS = (EnergyPhase.PAGE_IN, EnergyPhase.PAGE_OUT)
_TRANSFER_POWER_SHARE = 0.1
"""Power of a running transfer, as a share of compute power, if the board file gives no joules per byte: an SD card
takes about 0.1 W to 0.3 W, the four cores of a Pi 4 about 3.5 W.
"""
_MAX_PENDING = 1200
"""Largest number of intervals kept during a long step.

Beyond this, neighbours are merged, because one step gets all of them anyway.
"""


@dataclass(frozen=True, slots=True)
class MeteredStep:
    """A finished step as the meter needs it: the worker's figures, with phases by their names in the ledger."""

    step: int
    epoch: int
    wall_s: float
    phases_s: Mapping[EnergyPhase, float]
    paged_in_bytes: int = 0
    paged_out_bytes: int = 0
    loss: float | None = None
    planned_s: float | None = None
    planned_joules: float | None = None
    plan: int = 0

    @classmethod
    def of(cls, event: StepDone, plan: int) -> "MeteredStep":
        """Return the step that a worker reports while `plan` is in use; unknown phases count as `other`.

        A worker may count a wait both in its phase and as `stall`; waits are then subtracted from the computing phases.
        `page_in` and `page_out` are what its page thread measured; they run alongside the others.
        """
        phases: dict[EnergyPhase, float] = {}
        for name, seconds in event.phases_s.items():
            phase = _BY_NAME.get(name, EnergyPhase.OTHER)
            phases[phase] = phases.get(phase, 0.0) + seconds
        _take_out_waits(phases, event.wall_s)
        return cls(
            step=event.step,
            epoch=event.epoch,
            wall_s=event.wall_s,
            phases_s=phases,
            paged_in_bytes=event.paged_in_bytes,
            paged_out_bytes=event.paged_out_bytes,
            loss=event.loss,
            planned_s=event.planned_s,
            planned_joules=event.planned_joules,
            plan=plan,
        )


def _take_out_waits(phases: dict[EnergyPhase, float], wall_s: float) -> None:
    """Shorten the computing phases so that they and the waits fit into the step."""
    stall_s = phases.get(EnergyPhase.STALL, 0.0)
    computing = [phase for phase in phases if phase is not EnergyPhase.STALL and phase not in _TRANSFERS]
    compute_s = sum(phases[phase] for phase in computing)
    if stall_s > 0 and compute_s > 0 and compute_s + stall_s > wall_s:
        share = max(wall_s - stall_s, 0.0) / compute_s
        for phase in computing:
            phases[phase] *= share


@dataclass(frozen=True, slots=True)
class PhaseCosts:
    """The power that each phase is expected to draw above idle; only the proportions matter."""

    compute_watts: float = 1.0
    read_joules_per_byte: float = 0.0
    write_joules_per_byte: float = 0.0

    def shares(self, event: MeteredStep) -> dict[EnergyPhase, float]:
        """Return each phase's share of the energy above idle; they sum to one.

        Waiting (`stall`) takes none of it.
        """
        weights = {
            phase: seconds * self.compute_watts
            for phase, seconds in event.phases_s.items()
            if phase not in _TRANSFERS and phase is not EnergyPhase.STALL
        }
        weights[EnergyPhase.PAGE_IN] = self._transfer(
            event, EnergyPhase.PAGE_IN, event.paged_in_bytes, self.read_joules_per_byte
        )
        weights[EnergyPhase.PAGE_OUT] = self._transfer(
            event, EnergyPhase.PAGE_OUT, event.paged_out_bytes, self.write_joules_per_byte
        )
        reported_s = sum(seconds for phase, seconds in event.phases_s.items() if phase not in _TRANSFERS)
        rest_s = max(event.wall_s - reported_s, 0.0)
        weights[EnergyPhase.OTHER] = weights.get(EnergyPhase.OTHER, 0.0) + rest_s * self.compute_watts
        total = sum(weights.values())
        if total <= 0:
            return {EnergyPhase.OTHER: 1.0}
        return {phase: weight / total for phase, weight in weights.items() if weight > 0}

    def _transfer(self, event: MeteredStep, phase: EnergyPhase, moved_bytes: int, joules_per_byte: float) -> float:
        if joules_per_byte > 0:
            return moved_bytes * joules_per_byte
        return event.phases_s.get(phase, 0.0) * self.compute_watts * _TRANSFER_POWER_SHARE


@dataclass(frozen=True, slots=True)
class Charge:
    """Energy of one phase of one job within one interval of the source."""

    end_s: float
    """End of the interval."""
    job: str
    """Name of the job; empty while idle."""
    phase: EnergyPhase
    kind: Kind
    seconds: float
    gross_joules: float
    net_joules: float | None
    """Joules above the idle baseline; None while that is not known."""


@dataclass(slots=True)
class StepEnergy:
    """The energy of one step. Final once `Attributor.settle` has returned it."""

    job: str
    event: MeteredStep
    end_s: float
    kind: Kind = Kind.ESTIMATED
    gross_joules: float = 0.0
    net_joules: float | None = 0.0
    unmeasured_s: float = 0.0
    phases: dict[EnergyPhase, float] = field(default_factory=dict)
    shares: dict[EnergyPhase, float] = field(default_factory=dict)

    @property
    def known_joules(self) -> float | None:
        """Gross joules; None if any part of the step lies in a gap."""
        return None if self.unmeasured_s > 0 else self.gross_joules


@dataclass(slots=True)
class _Span:
    """A period of known activity."""

    start_s: float
    end_s: float
    job: str
    step: StepEnergy | None = None


class Attributor:
    """Matches intervals of energy with spans of activity of one job at a time."""

    def __init__(self, costs: PhaseCosts, baseline_watts: Callable[[str], float | None]) -> None:
        """`baseline_watts` returns the idle power by the name of the source; None while it is unknown."""
        self._costs = costs
        self._baseline_watts = baseline_watts
        self._intervals: deque[Interval] = deque()
        self._spans: deque[_Span] = deque()
        self._known_s: float | None = None
        self._job = ""
        self._paused = False

    @property
    def busy(self) -> bool:
        """Whether a job is running and not paused."""
        return bool(self._job) and not self._paused

    @property
    def job(self) -> str:
        """The job with a worker, paused or not; empty if there is none."""
        return self._job

    def start_job(self, job: str, now_s: float) -> None:
        """Record that the worker of `job` exists from now on."""
        self._extend(now_s)
        self._job, self._paused = job, False

    def stop_job(self, now_s: float) -> None:
        """Record that the worker is gone; what it did since its last step counts as `other`."""
        self._extend(now_s)
        self._job, self._paused = "", False

    def pause(self, now_s: float) -> None:
        """Record that the worker is paused from now on."""
        self._extend(now_s)
        self._paused = True

    def resume(self, now_s: float) -> None:
        """Record that the worker computes again."""
        self._extend(now_s)
        self._paused = False

    def finish_step(self, event: MeteredStep, now_s: float) -> None:
        """Record that a step of the running job ended now and took `event.wall_s`."""
        if self._known_s is None:
            self._known_s = now_s - event.wall_s
        start_s = min(max(now_s - event.wall_s, self._known_s), now_s)
        self._extend(start_s)
        step = StepEnergy(self._job, event, now_s, shares=self._costs.shares(event))
        self._append(_Span(start_s, now_s, self._job, step))

    def _extend(self, until_s: float) -> None:
        """Fill the time up to `until_s` with idling, or with the job's work outside steps."""
        start_s = until_s if self._known_s is None else self._known_s
        owner = self._job if self.busy else ""
        last = self._spans[-1] if self._spans else None
        if until_s > start_s and last is not None and last.step is None and last.job == owner:
            last.end_s = self._known_s = until_s
        else:
            self._append(_Span(start_s, until_s, owner))

    def _append(self, span: _Span) -> None:
        if span.end_s > span.start_s or span.step is not None:
            self._spans.append(span)
        self._known_s = span.end_s if self._known_s is None else max(self._known_s, span.end_s)

    def add(self, interval: Interval) -> None:
        """Add the energy of an interval that begins where the last one ended."""
        if not self._spans and self._known_s is None:
            self._known_s = interval.start_s
        self._intervals.append(interval)
        if len(self._intervals) > _MAX_PENDING:
            self._intervals = _merge_neighbours(self._intervals)

    def settle(self, now_s: float) -> tuple[list[Charge], list[StepEnergy]]:
        """Return the charges and steps that became final by `now_s`."""
        if not self.busy:
            self._extend(now_s)
        charges: list[Charge] = []
        done: list[StepEnergy] = []
        sums = _Sums()
        while self._intervals and self._spans:
            interval, span = self._intervals[0], self._spans[0]
            if span.start_s < interval.start_s:  # before the first reading: unmeasured
                unseen_s = min(span.end_s, interval.start_s) - span.start_s
                if span.step is not None:
                    span.step.kind = interval.kind
                    span.step.unmeasured_s += unseen_s
                self._drop_span_until(span.start_s + unseen_s, done)
            elif interval.start_s < span.start_s:  # before the first event: unattributed
                end_s = min(interval.end_s, span.start_s)
                self._charge(sums, interval, _Span(interval.start_s, end_s, ""), end_s)
                self._drop_interval_until(end_s)
                charges += sums.take(interval)
            else:
                end_s = min(interval.end_s, span.end_s)
                if end_s > span.start_s:
                    self._charge(sums, interval, span, end_s)
                self._drop_span_until(end_s, done)
                self._drop_interval_until(end_s)
                if end_s >= interval.end_s or not self._spans:
                    charges += sums.take(interval)
        return charges, done

    def _drop_span_until(self, end_s: float, done: list[StepEnergy]) -> None:
        span = self._spans[0]
        span.start_s = end_s
        if span.end_s <= end_s:
            self._spans.popleft()
            if span.step is not None:
                done.append(span.step)

    def _drop_interval_until(self, end_s: float) -> None:
        interval = self._intervals.popleft()
        if interval.end_s > end_s:
            self._intervals.appendleft(_rest_of(interval, end_s))

    def _charge(self, sums: "_Sums", interval: Interval, span: _Span, end_s: float) -> None:
        """Attribute to `span` the energy of `interval` from the start of the span up to `end_s`."""
        seconds = end_s - span.start_s
        if interval.joules is None:
            if span.step is not None:
                span.step.kind = interval.kind
                span.step.unmeasured_s += seconds
            sums.add(span.job, EnergyPhase.UNMEASURED, seconds, 0.0, 0.0)
            return
        joules = interval.joules * seconds / interval.seconds
        if not span.job:
            sums.add("", EnergyPhase.IDLE, seconds, joules, 0.0)
            return
        baseline = self._baseline_watts(interval.source)
        static = 0.0 if baseline is None else min(baseline * interval.share * seconds, joules)
        sums.add(span.job, EnergyPhase.STATIC, seconds, static, None if baseline is None else 0.0)
        if span.step is None:
            above = joules - static
            sums.add(span.job, EnergyPhase.OTHER, seconds, above, None if baseline is None else above)
        else:
            self._charge_step(sums, span.step, interval.kind, seconds, static, joules - static, baseline is not None)

    def _charge_step(
        self, sums: "_Sums", step: StepEnergy, kind: Kind, seconds: float, static: float, above: float, split: bool
    ) -> None:
        """Divide a step's energy above idle among its phases. `split`: whether the idle power is known."""
        part = seconds / max(step.event.wall_s, seconds)
        for phase in {**step.event.phases_s, **step.shares}:  # a stall has seconds and no joules of its own
            joules = above * step.shares.get(phase, 0.0)
            phase_s = _phase_seconds(step.event, phase) * part
            if joules or phase_s:
                sums.add(step.job, phase, phase_s, joules, joules if split else None)
                step.phases[phase] = step.phases.get(phase, 0.0) + joules
        step.phases[EnergyPhase.STATIC] = step.phases.get(EnergyPhase.STATIC, 0.0) + static
        step.kind = kind
        step.gross_joules += static + above
        step.net_joules = step.net_joules + above if split and step.net_joules is not None else None


class _Sums:
    """Charges of one interval, summed by job and phase, so that many short steps give few charges."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, EnergyPhase], list[float]] = {}
        self._split = True

    def add(self, job: str, phase: EnergyPhase, seconds: float, gross: float, net: float | None) -> None:
        """Add to one phase.

        The baseline is the same for a whole interval, so the net figure is known for all of it or for none.
        """
        if net is None:
            self._split, net = False, 0.0
        total = self._sums.get((job, phase))
        if total is None:
            self._sums[job, phase] = [seconds, gross, net]
        else:
            total[0] += seconds
            total[1] += gross
            total[2] += net

    def take(self, interval: Interval) -> list[Charge]:
        """Return the charges and reset."""
        charges = []
        for (job, phase), (seconds, gross, net) in self._sums.items():
            known = net if self._split or not job else None
            charges.append(Charge(interval.end_s, job, phase, interval.kind, seconds, gross, known))
        self._sums, self._split = {}, True
        return charges


def _phase_seconds(event: MeteredStep, phase: EnergyPhase) -> float:
    if phase is EnergyPhase.OTHER:
        reported_s = sum(seconds for name, seconds in event.phases_s.items() if name not in _TRANSFERS)
        return max(event.wall_s - reported_s, 0.0) + event.phases_s.get(EnergyPhase.OTHER, 0.0)
    return event.phases_s.get(phase, 0.0)


def _rest_of(interval: Interval, from_s: float) -> Interval:
    """Return the part of `interval` after `from_s`, at the same power."""
    left = None if interval.joules is None else interval.joules * (interval.end_s - from_s) / interval.seconds
    return replace(interval, start_s=from_s, joules=left)


def _merge_neighbours(intervals: deque[Interval]) -> deque[Interval]:
    """Return the intervals merged in pairs, where source and gaps allow it."""
    merged: deque[Interval] = deque()
    left: Interval | None = None
    for right in intervals:
        if left is None:
            left = right
            continue
        same = (left.source, left.kind, left.joules is None) == (right.source, right.kind, right.joules is None)
        if same:
            joules = None if left.joules is None or right.joules is None else left.joules + right.joules
            share = (left.share * left.seconds + right.share * right.seconds) / (left.seconds + right.seconds)
            merged.append(replace(left, end_s=right.end_s, joules=joules, share=share))
            left = None
        else:
            merged.append(left)
            left = right
    if left is not None:
        merged.append(left)
    return merged
