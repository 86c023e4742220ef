"""The meter's metrics. Unknown values are left out."""

from collections.abc import Iterator, Mapping

from port_agent.energy.meter import EnergyMeter, MeterSnapshot
from port_agent.energy.totals import JobEnergy
from port_agent.system.prometheus import MetricFamily, gauge


def meter_families(meter: EnergyMeter) -> Iterator[MetricFamily]:
    """Yield all metrics of `meter`."""
    snapshot = meter.snapshot()
    yield from _snapshot_families(snapshot)
    yield from _job_families(meter.job_energy(), snapshot.kind)
    phases = ((phase.value, joules) for phase, joules in meter.phase_joules().items())
    yield MetricFamily(
        "phase_energy_joules_total",
        "counter",
        "Energy of a phase since the agent started.",
        tuple(({"phase": phase, "kind": snapshot.kind}, joules) for phase, joules in phases),
    )
    yield gauge("energy_issues", "Current problems of metering.", len(meter.health()))


def _snapshot_families(snapshot: MeterSnapshot) -> Iterator[MetricFamily]:
    where = {"source": snapshot.source, "kind": snapshot.kind}
    for name, meaning, value in (
        ("power_watts", "Mean power of the newest sample.", snapshot.watts),
        ("idle_power_watts", "Power of the idle machine.", snapshot.baseline_watts),
        ("last_step_energy_joules", "Energy of the newest training step.", snapshot.last_step_joules),
        ("last_step_planned_energy_joules", "Energy the plan gave that step.", snapshot.last_step_planned_joules),
        ("step_time_drift_ratio", "Measured over planned seconds per step.", snapshot.time_drift),
        ("step_energy_drift_ratio", "Measured over planned joules per step.", snapshot.energy_drift),
    ):
        yield gauge(name, meaning, value, where)
    for name, meaning, total in (
        ("energy_joules_total", "Energy since the agent started, without gaps.", snapshot.total_joules),
        ("energy_gap_seconds_total", "Time without a figure since the agent started.", snapshot.gap_seconds),
    ):
        yield MetricFamily(name, "counter", meaning, ((where, total),))


def _job_families(jobs: Mapping[str, JobEnergy], kind: str) -> Iterator[MetricFamily]:
    gross = tuple(({"job": job, "kind": kind}, energy.gross_joules) for job, energy in jobs.items())
    net = tuple(
        ({"job": job, "kind": kind}, energy.net_joules) for job, energy in jobs.items() if energy.net_joules is not None
    )
    steps = tuple(({"job": job}, float(energy.steps)) for job, energy in jobs.items())
    yield MetricFamily("job_energy_joules_total", "counter", "Energy of a job since the agent started.", gross)
    yield MetricFamily("job_net_energy_joules_total", "counter", "The same above the idle baseline.", net)
    yield MetricFamily("job_steps_total", "counter", "Steps a job finished since the agent started.", steps)
