"""Prometheus text of the meter, units in the names (https://prometheus.io/docs/practices/naming/)."""

from collections.abc import Iterable, Mapping

from agent.energy.meter import EnergyMeter, JobEnergy, MeterSnapshot

_PREFIX = "port_agent_"


def energy_metrics_text(meter: EnergyMeter) -> str:
    """Return all metrics of `meter` in the text format, newline at the end. What is not known is left out."""
    snapshot = meter.snapshot()
    lines = list(_gauges(snapshot))
    lines += _jobs(meter.job_energy(), snapshot.kind)
    phases = [({"phase": phase.value, "kind": snapshot.kind}, joules) for phase, joules in meter.phase_joules().items()]
    lines += _family("phase_energy_joules_total", "counter", "Energy of a phase since the agent started.", phases)
    lines += _family("energy_issues", "gauge", "Problems of metering at this moment.", [({}, len(meter.health()))])
    return "\n".join(lines) + "\n"


def _gauges(snapshot: MeterSnapshot) -> Iterable[str]:
    where = {"source": snapshot.source, "kind": snapshot.kind}
    single: tuple[tuple[str, str, str, float | None], ...] = (
        ("power_watts", "gauge", "Mean power of the newest sample.", snapshot.watts),
        ("idle_power_watts", "gauge", "Power of the idle machine.", snapshot.baseline_watts),
        ("energy_joules_total", "counter", "Energy since the agent started, gaps left out.", snapshot.total_joules),
        ("energy_gap_seconds_total", "counter", "Time without a figure since the agent started.", snapshot.gap_seconds),
        ("last_step_energy_joules", "gauge", "Energy of the newest training step.", snapshot.last_step_joules),
        (
            "last_step_planned_energy_joules",
            "gauge",
            "Energy the plan gave that step.",
            snapshot.last_step_planned_joules,
        ),
        ("step_time_drift_ratio", "gauge", "Measured over planned seconds per step.", snapshot.time_drift),
        ("step_energy_drift_ratio", "gauge", "Measured over planned joules per step.", snapshot.energy_drift),
    )
    for name, kind, meaning, value in single:
        if value is not None:
            yield from _family(name, kind, meaning, [(where, value)])


def _jobs(jobs: Mapping[str, JobEnergy], kind: str) -> list[str]:
    gross = [({"job": job, "kind": kind}, energy.gross_joules) for job, energy in jobs.items()]
    net = [
        ({"job": job, "kind": kind}, energy.net_joules) for job, energy in jobs.items() if energy.net_joules is not None
    ]
    steps = [({"job": job}, float(energy.steps)) for job, energy in jobs.items()]
    return [
        *_family("job_energy_joules_total", "counter", "Energy of a job since the agent started.", gross),
        *_family("job_net_energy_joules_total", "counter", "The same above the idle baseline.", net),
        *_family("job_steps_total", "counter", "Steps a job finished since the agent started.", steps),
    ]


def _family(name: str, kind: str, meaning: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> list[str]:
    rows = [f"{_PREFIX}{name}{_labels(labels)} {value!r}" for labels, value in samples]
    return [f"# HELP {_PREFIX}{name} {meaning}", f"# TYPE {_PREFIX}{name} {kind}", *rows] if rows else []


def _labels(labels: Mapping[str, str]) -> str:
    parts = ",".join(f'{key}="{_escape(value)}"' for key, value in labels.items())
    return f"{{{parts}}}" if parts else ""


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
