"""Prometheus text of the supervisor: names with units, absent values left out instead of zero."""

from collections.abc import Iterable, Mapping
from typing import Any

from agent.jobs.model import Job, JobState

_STATES = ("idle", "waiting", "starting", "training", "paused", "leaving")


def metrics_text(status: Mapping[str, Any], jobs: Iterable[Job]) -> str:
    """Return the metrics of a status as Prometheus text."""
    facts, lines = status["facts"], []
    lines += _family(
        "port_agent_state",
        "1 for the state the agent is in",
        [({"state": state}, float(status["state"] == state)) for state in _STATES],
    )
    lines += _family(
        "port_agent_may_train", "1 while all conditions allow training", [({}, float(status["may_train"]))]
    )
    lines += _gauge("port_agent_uptime_seconds", "Time since the agent started", status["uptime_s"])
    lines += _gauge("port_agent_battery_percent", "Charge of the system battery", facts["battery_percent"])
    lines += _gauge("port_agent_temperature_celsius", "Hottest processor zone", facts["temperature_c"])
    external = {"external": 1.0, "assumed external": 1.0, "battery": 0.0}.get(facts["power"])
    lines += _gauge("port_agent_external_power", "1 on external power, 0 on battery", external)
    lines += _gauge("port_agent_disk_free_bytes", "Free space of the state directory", facts["free_disk_bytes"])
    lines += _gauge("port_agent_memory_available_bytes", "Memory available", facts["available_memory_bytes"])
    lines += _gauge(
        "port_agent_flash_written_today_bytes", "Checkpoints and paging today", status["flash_written_today_bytes"]
    )
    lines += _family(
        "port_agent_health_items",
        "Problems that hold now, by severity",
        [
            ({"severity": severity}, float(sum(item["severity"] == severity for item in status["health"])))
            for severity in ("info", "warning", "error")
        ],
    )
    jobs = list(jobs)
    lines += _family(
        "port_agent_jobs",
        "Jobs by state",
        [({"state": state.name.lower()}, float(sum(job.state is state for job in jobs))) for state in JobState],
    )
    running = status["job"]
    if running is not None:
        label = {"job": str(running["id"]), "name": running["name"]}
        lines += _family("port_agent_job_step", "Step of the running job", [(label, float(running["step"]))])
        for name, meaning, key in (
            ("port_agent_job_total_steps", "Steps of the running job in all", "total_steps"),
            ("port_agent_job_loss", "Loss of the newest step", "loss"),
            ("port_agent_job_step_seconds", "Smoothed time of a step", "step_s"),
            ("port_agent_job_memory_limit_bytes", "Memory limit of the worker", "memory_limit_bytes"),
        ):
            if running[key] is not None:
                lines += _family(name, meaning, [(label, float(running[key]))])
    return "\n".join(lines) + "\n"


def _gauge(name: str, meaning: str, value: float | None) -> list[str]:
    return [] if value is None else _family(name, meaning, [({}, float(value))])


def _family(name: str, meaning: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> list[str]:
    lines = [f"# HELP {name} {meaning}.", f"# TYPE {name} gauge"]
    for labels, value in samples:
        shown = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
        lines.append(f"{name}{{{shown}}} {value!r}" if shown else f"{name} {value!r}")
    return lines


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
