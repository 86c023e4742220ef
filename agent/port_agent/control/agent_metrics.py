"""The supervisor's metrics. Unknown values are left out, not reported as zero."""

from collections.abc import Iterable, Iterator, Sequence

from port_agent.control.http_answers import AgentStatus, DeviceState, RunStatus
from port_agent.jobs.job import Job, JobState
from port_agent.system.prometheus import MetricFamily, gauge

_STATES = ("idle", "waiting", "starting", "training", "paused", "leaving")
_SEVERITIES = ("info", "warning", "error")
_EXTERNAL_POWER = {"external": 1.0, "assumed external": 1.0, "battery": 0.0}


def agent_families(status: AgentStatus, jobs: Iterable[Job]) -> Iterator[MetricFamily]:
    """Yield the metrics of a status and of all jobs."""
    yield _shares("state", "1 for the state the agent is in.", "state", _STATES, [status.state])
    yield gauge("may_train", "1 while all conditions allow training.", status.may_train)
    yield gauge("uptime_seconds", "Time since the agent started.", status.uptime_s)
    yield from _device_families(status.facts)
    written = status.flash_written_today_bytes
    yield gauge("flash_written_today_bytes", "Written by the agent since local midnight.", written)
    severities = [item.severity.name.lower() for item in status.health]
    yield _shares("health_items", "Current problems, by severity.", "severity", _SEVERITIES, severities)
    states = [job.state.name.lower() for job in jobs]
    yield _shares("jobs", "Jobs by state.", "state", [state.name.lower() for state in JobState], states)
    yield from _run_families(status.running)


def _device_families(facts: DeviceState) -> Iterator[MetricFamily]:
    yield gauge("battery_percent", "Charge of the system battery.", facts.battery_percent)
    yield gauge("temperature_celsius", "Hottest processor zone.", facts.temperature_c)
    yield gauge("external_power", "1 on external power, 0 on battery.", _EXTERNAL_POWER.get(facts.power))
    yield gauge("disk_free_bytes", "Free space of the state directory.", facts.free_disk_bytes)
    yield gauge("memory_available_bytes", "Memory available.", facts.available_memory_bytes)


def _run_families(runs: Sequence[RunStatus]) -> Iterator[MetricFamily]:
    def of_each(name: str, meaning: str, values: Iterable[float | None]) -> MetricFamily:
        labelled = zip(({"job": str(run.id), "name": run.name} for run in runs), values, strict=True)
        return MetricFamily(
            name, "gauge", meaning, tuple((labels, float(value)) for labels, value in labelled if value is not None)
        )

    yield of_each("job_step", "Step of a running job.", [run.step for run in runs])
    yield of_each("job_total_steps", "Total steps of a running job.", [run.total_steps for run in runs])
    yield of_each("job_loss", "Loss of the newest step.", [run.loss for run in runs])
    yield of_each("job_step_seconds", "Smoothed time of a step.", [run.step_s for run in runs])
    yield of_each("job_memory_limit_bytes", "Memory limit of the worker.", [run.memory_limit_bytes for run in runs])


def _shares(name: str, meaning: str, label: str, values: Iterable[str], seen: list[str]) -> MetricFamily:
    """Return a gauge with the number of occurrences of each of `values` in `seen`."""
    return MetricFamily(name, "gauge", meaning, tuple(({label: value}, float(seen.count(value))) for value in values))
