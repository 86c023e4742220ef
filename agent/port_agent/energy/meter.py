"""The meter of a running agent.

The supervisor feeds it ticks and worker events, and may ask for figures at any time.

It has no timer of its own. A tick reads the source in use and settles what became known. Every few minutes the
accumulated figures go to a thread that writes the ledger, because an SD card may take a second.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from port_agent.energy.attribution.jobs import CpuClock, JobsAttributor
from port_agent.energy.attribution.one_job import EnergyPhase, MeteredStep, PhaseCosts, StepEnergy
from port_agent.energy.attribution.timeline import Interval
from port_agent.energy.baseline import IDLE_LOAD, IdleBaseline, stored_baselines
from port_agent.energy.drift import Correction, DriftMonitor, Ratio
from port_agent.energy.issues import EnergyIssue, IssueList
from port_agent.energy.ledger import FILE_NAME, Ledger, MeterGap
from port_agent.energy.ledger_writer import LedgerWriter
from port_agent.energy.sampler import Sampler
from port_agent.energy.sources.estimated import EstimatedSource, LoadProbe, PowerModel
from port_agent.energy.sources.power_models import model_of
from port_agent.energy.sources.power_source import Kind, SourceInfo
from port_agent.energy.sources.registry import EnergyConfig, SourceChoice, configured_model, open_sources
from port_agent.energy.sources.timely import ReadThreads
from port_agent.energy.totals import JobEnergy, Totals
from port_agent.energy.wear import DiskCounter
from port_agent.energy.wear_account import WearAccount
from port_agent.system.clock import slept_s
from port_agent.worker.protocol import Event, PlanSwitched, StepDone, WorkerPaused, WorkerReady, WorkerResumed

IDLE_PERIOD_S = 30.0
"""Seconds between samples of an idle machine."""
_SLEPT_S = 1.0
"""Seconds of the shortest suspension that is noticed; shorter ones cannot be told apart from the time
between reading two clocks.
"""
_FIRST_FLUSH_S = 30.0
"""Seconds after a start until the ledger is first written, so that there is something to show."""
_MAX_EVENTS = 100
"""Number of events kept for `take_events`; the ledger has all of them."""
_OWN_WRITER = "agent"


@dataclass(frozen=True, slots=True)
class MeterEvent:
    """An event for the log; `correction` is set if the profile was found wrong."""

    code: str
    text: str
    correction: Correction | None = None


@dataclass(frozen=True, slots=True)
class MeterSnapshot:
    """The meter's current figures."""

    source: str
    kind: str
    covers: str
    watts: float | None
    """Mean power of the newest interval; None in a gap."""
    baseline_watts: float | None
    job: str
    """The job that has been running longest."""
    job_gross_joules: float | None
    job_net_joules: float | None
    last_step_joules: float | None
    last_step_planned_joules: float | None
    time_drift: float | None
    """Ratio of measured to planned seconds over the last steps; None without a plan."""
    energy_drift: float | None
    total_joules: float
    """Joules since the agent started, without gaps."""
    gap_seconds: float

    def as_dict(self) -> dict[str, object]:
        """Return the figures for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class MeterSeams:
    """What the meter uses besides its sensors, replaceable in tests."""

    unix_time: Callable[[], float] = time.time
    busy_fraction: Callable[[], float | None] | None = None
    """Busy share of the processors since the last call."""
    reopen: Callable[[], SourceChoice] | None = None
    """Looks for sources again after a failure."""
    slept_s: Callable[[], float] = lambda: 0.0
    """Seconds the machine has been suspended since it booted."""
    writer: Executor | None = None
    """Executor that writes the ledger, shut down when the meter is closed; None: the caller writes."""


def open_meter(
    state_dir: Path,
    table: Mapping[str, object],
    *,
    root: Path = Path("/"),
    model: PowerModel | None = None,
    wear: WearAccount | None = None,
) -> "EnergyMeter":
    """Return the meter of this machine with its ledger in `state_dir`.

    `table` is `[energy]` of the configuration. `model` is the board's power model, if it must not be looked up. `wear`
    counts what the agent writes. Never raises for a sensor; raises `EnergyConfigError` or `BoardError` for a bad
    setting and `LedgerError` when the ledger cannot be opened.
    """
    config = EnergyConfig.from_table(table)
    model = model or (model_of(config.board, root))
    threads = ReadThreads()
    choice = open_sources(config, model, root, threads)
    ledger = Ledger(state_dir / FILE_NAME, time.time())
    seams = MeterSeams(
        busy_fraction=LoadProbe().busy_fraction,
        reopen=lambda: open_sources(config, model, root, threads),
        slept_s=slept_s,
        writer=ThreadPoolExecutor(1, "energy-ledger"),
    )
    disk = DiskCounter(state_dir, root)
    return EnergyMeter(choice, ledger, config, configured_model(config, model), disk, seams, wear)


class EnergyMeter:
    """Counts the joules of a machine and what they were spent on."""

    def __init__(
        self,
        choice: SourceChoice,
        ledger: Ledger,
        config: EnergyConfig,
        model: PowerModel,
        disk: DiskCounter | None = None,
        seams: MeterSeams | None = None,
        wear: WearAccount | None = None,
    ) -> None:
        self._seams = seams or MeterSeams()
        self._ledger = ledger
        self._config = config
        self._issues = IssueList()
        self._sampler = Sampler(choice, self._issues, self._on_source, self._seams.reopen)
        wear = wear or WearAccount(self._seams.unix_time)
        self._writer = LedgerWriter(ledger, self._issues, wear, disk, self._seams.writer)
        wear.subscribe(lambda unix, count: ledger.add_wear(unix, _OWN_WRITER, count))
        self._baseline = IdleBaseline(stored_baselines(ledger.meta("baselines")))
        for source in choice.sources:
            if isinstance(source, EstimatedSource):
                self._baseline.set_watts(source.info.name, source.model.static_watts)
        costs = PhaseCosts(max(model.compute_watts, 1e-3), model.read_joules_per_byte, model.write_joules_per_byte)
        self._attributor = JobsAttributor(costs, self._baseline.watts)
        self._events: deque[MeterEvent] = deque(maxlen=_MAX_EVENTS)
        self._totals = Totals()
        self._drifts: dict[str, DriftMonitor] = {}
        self._plans: dict[str, int] = {}
        self._last_interval: Interval | None = None
        self._last_step: StepEnergy | None = None
        self._due_s = 0.0
        self._flush_s: float | None = None
        self._expected_s = IDLE_PERIOD_S
        self._slept_s = self._seams.slept_s()
        self._total_joules = self._gap_s = 0.0

    def tick(self, now_s: float, machine_idle: bool | None = None) -> float:
        """Take a sample if one is due and settle what is known; return the seconds until the next call.

        `machine_idle`: whether nobody else uses the machine; with None, the meter judges by processor load.
        """
        if now_s < self._due_s:
            return self._due_s - now_s
        before_s, self._slept_s = self._slept_s, self._seams.slept_s()
        slept_s = self._slept_s - before_s
        if slept_s > _SLEPT_S:
            self._sampler.interrupt(f"suspended for {slept_s:.0f} s")
        interval = self._sampler.sample(now_s, self._expected_s)
        if interval is not None:
            self._take(interval, now_s, machine_idle, slept_s)
        self._settle(now_s)
        self._expected_s = self._period_s()
        self._due_s = now_s + self._expected_s * 0.9  # a timer that fires a little early still counts
        self._writer.take_outcome()
        if self._flush_s is None:
            self._flush_s = now_s + min(self._config.flush_s, _FIRST_FLUSH_S)
        elif now_s >= self._flush_s:
            self.flush(now_s)
        return self._expected_s

    def _period_s(self) -> float:
        own = self._sampler.current.info.period_s if self._sampler.current else IDLE_PERIOD_S
        return own if self._attributor.busy else max(own, IDLE_PERIOD_S)

    def _take(self, interval: Interval, now_s: float, machine_idle: bool | None, slept_s: float = 0.0) -> None:
        self._last_interval = interval
        shares = self._attributor.add(interval)
        if interval.gpu is not None:
            self._ledger.add_gpu(
                self._seams.unix_time() - now_s + interval.end_s, interval.seconds, interval.gpu, shares
            )
        if interval.joules is None:
            self._gap_s += interval.seconds
            end_unix = self._seams.unix_time() - now_s + interval.end_s
            # a caller's clock that stops during sleep gives an interval shorter than the sleep
            length_s = max(interval.seconds, slept_s)
            self._ledger.add_gap(MeterGap(end_unix - length_s, end_unix, interval.source, interval.reason))
            return
        self._total_joules += interval.joules
        load = self._seams.busy_fraction() if self._seams.busy_fraction else None
        idle = bool(machine_idle) if load is None else machine_idle is not False and load < IDLE_LOAD
        if idle and not self._attributor.busy and interval.kind is Kind.MEASURED:
            self._baseline.add(interval)

    def _settle(self, now_s: float) -> None:
        charges, steps = self._attributor.settle(now_s)
        offset = self._seams.unix_time() - now_s
        self._ledger.add_charges(charges, offset)
        self._ledger.add_steps(steps, offset)
        self._totals.add(charges, steps)
        for step in steps:
            self._last_step = step
            self._watch_drift(step)

    def _watch_drift(self, step: StepEnergy) -> None:
        drift = self._drifts.setdefault(step.job, DriftMonitor(step.job))
        event = step.event
        measured = step.known_joules if step.kind is Kind.MEASURED else None
        correction = drift.add(event.plan, event.planned_s, event.wall_s, event.planned_joules, measured)
        if correction is not None:
            self._note("profile-corrected", correction.text, correction)

    def on_worker_start(self, job: str, now_s: float, label: str = "", cpu_s: CpuClock = float) -> None:
        """Record that the worker of `job` was started; reports show `label` if it is given.

        `cpu_s`: returns its CPU seconds so far, by which simultaneous jobs share the energy.
        """
        if label:
            self._ledger.set_meta(f"label:{job}", label)
        self._sample_edge(now_s)
        self._attributor.start_job(job, now_s, cpu_s)
        self._totals.begin(job)
        self._drifts[job], self._plans[job] = DriftMonitor(job), 0

    def on_worker_stop(self, job: str, now_s: float) -> None:
        """Record that the worker of `job` has ended, for whatever reason."""
        if job in self._attributor.jobs:
            self._sample_edge(now_s)
            self._attributor.stop_job(job, now_s)
            self._expected_s = IDLE_PERIOD_S
            self._settle(now_s)
            self._drifts.pop(job, None)
            self.flush(now_s)

    def _sample_edge(self, now_s: float) -> None:
        """Sample where the load changes, so that no trapezoid spans the change, and again at the next tick."""
        self._due_s = now_s
        self.tick(now_s, machine_idle=False)
        self._due_s = now_s

    def on_event(self, job: str, event: Event, now_s: float) -> None:
        """Record one event of the worker of `job`; kinds that do not matter to energy are ignored."""
        if job not in self._attributor.jobs:  # its start was before the meter's
            return
        match event:
            case StepDone():
                self._on_step(job, MeteredStep.of(event, self._plans[job]), now_s)
            case WorkerReady() | PlanSwitched():
                self._plans[job] = event.plan
            case WorkerPaused():
                self._sample_edge(now_s)
                self._attributor.pause(job, now_s)
                self._expected_s = IDLE_PERIOD_S  # the next tick may come at the pace of an idle machine
            case WorkerResumed():
                self._sample_edge(now_s)
                self._attributor.resume(job, now_s)

    def _on_step(self, job: str, step: MeteredStep, now_s: float) -> None:
        self._attributor.finish_step(job, step, now_s)
        if isinstance(self._sampler.current, EstimatedSource):
            self._sampler.current.note_transfer(step.paged_in_bytes, step.paged_out_bytes)

    def flush(self, now_s: float) -> Future[int]:
        """Begin to write the ledger and return a future that completes when it is written.

        While the last batch is still being written, its future is returned. A disk that rejects a
        batch becomes a health item.
        """
        self._flush_s = now_s + self._config.flush_s
        self._ledger.set_meta("baselines", json.dumps(self._baseline.known_watts()))
        return self._writer.begin(self._seams.unix_time())

    def health(self) -> tuple[EnergyIssue, ...]:
        """Return the current problems of metering."""
        return self._issues.all()

    def take_events(self) -> tuple[MeterEvent, ...]:
        """Return the events since the last call, for the log and the planner, and forget them."""
        events = tuple(self._events)
        self._events.clear()
        return events

    def snapshot(self) -> MeterSnapshot:
        """Return the current figures."""
        info = self._sampler.current.info if self._sampler.current else None
        shown = next(iter(self._attributor.jobs), "")
        job, drift = self._totals.jobs().get(shown), self._drifts.get(shown)
        step = self._last_step
        return MeterSnapshot(
            source=info.name if info else "",
            kind=info.kind.value if info else "",
            covers=info.covers if info else "",
            watts=self._last_interval.watts if self._last_interval else None,
            baseline_watts=self._baseline.watts(info.name) if info else None,
            job=shown,
            job_gross_joules=job.gross_joules if job else None,
            job_net_joules=job.net_joules if job else None,
            last_step_joules=step.known_joules if step else None,
            last_step_planned_joules=step.event.planned_joules if step else None,
            time_drift=_factor(drift.time if drift else None),
            energy_drift=_factor(drift.energy if drift else None),
            total_joules=self._total_joules,
            gap_seconds=self._gap_s,
        )

    def job_energy(self) -> Mapping[str, JobEnergy]:
        """Return what each job has used since the agent started."""
        return self._totals.jobs()

    def phase_joules(self) -> Mapping[EnergyPhase, float]:
        """Return the energy of each phase since the agent started, as far as it is settled."""
        return self._totals.phase_joules()

    def close(self, now_s: float) -> None:
        """Settle, write the ledger, and close the sensors. Raises `LedgerError` if the ledger cannot be written."""
        interval = self._sampler.sample(now_s, self._expected_s)
        if interval is not None:
            self._take(interval, now_s, machine_idle=False)
        for job in self._attributor.jobs:
            self._attributor.stop_job(job, now_s)
        self._settle(now_s)
        self._sampler.close()
        self._ledger.set_meta("baselines", json.dumps(self._baseline.known_watts()))
        self._writer.close(self._seams.unix_time())

    def _on_source(self, info: SourceInfo) -> None:
        self._note("source-changed", f"energy is now {info.title}: {info.covers}")
        self._ledger.set_meta(f"source:{info.name}", info.as_json())

    def _note(self, code: str, text: str, correction: Correction | None = None) -> None:
        self._events.append(MeterEvent(code, text, correction))
        self._ledger.add_event(self._seams.unix_time(), code, text)


def _factor(ratio: Ratio | None) -> float | None:
    return ratio.factor if ratio else None
