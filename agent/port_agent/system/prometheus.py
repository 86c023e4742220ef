"""Metrics in Prometheus' text format, units in the names.

https://prometheus.io/docs/practices/naming/
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "port_agent_"


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One metric with its samples: labels and value. Without samples it is left out."""

    name: str
    """Name without the program's prefix."""
    kind: Literal["gauge", "counter"]
    meaning: str
    """A sentence."""
    samples: tuple[tuple[Mapping[str, str], float], ...]


def gauge(name: str, meaning: str, value: float | None, labels: Mapping[str, str] | None = None) -> MetricFamily:
    """Return a gauge with one sample, or with none if the value is not known."""
    return MetricFamily(name, "gauge", meaning, () if value is None else ((labels or {}, float(value)),))


def exposition(families: Iterable[MetricFamily]) -> str:
    """Return the text of all families, with a newline at the end."""
    return "".join(f"{line}\n" for family in families for line in _lines(family))


def _lines(family: MetricFamily) -> list[str]:
    if not family.samples:
        return []
    name = _PREFIX + family.name
    rows = [f"{name}{_labels(labels)} {value!r}" for labels, value in family.samples]
    return [f"# HELP {name} {family.meaning}", f"# TYPE {name} {family.kind}", *rows]


def _labels(labels: Mapping[str, str]) -> str:
    parts = ",".join(f'{key}="{_escape(value)}"' for key, value in labels.items())
    return f"{{{parts}}}" if parts else ""


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
