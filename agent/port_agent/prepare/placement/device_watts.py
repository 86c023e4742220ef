"""The additional power of the machine while a device computes: the energy of operators there, by this machine's meter.

A matrix product and a sum of large tensors run in turn while the meter is read; they stand for compute-bound and
memory-bound operators. The host waits meanwhile, as in a step, so its power for that is also counted.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from port_agent.backend.base import Backend
from port_agent.backend.cuda import card_name
from port_agent.energy.sources import nvidia
from port_agent.energy.sources.power_models import model_of
from port_agent.energy.sources.power_source import Coverage, Kind, PowerSource, SensorReading, SourceError
from port_agent.energy.sources.registry import EnergyConfig, open_sources
from port_agent.system.clock import now_s
from port_planner.ir.boards import op_work
from port_planner.ir.device_kinds import CPU, CUDA
from port_planner.ir.graph import StepGraph
from port_planner.profiling.operator_profile import MeasuredCosts

_WHOLE = (Coverage.WALL, Coverage.BOARD, Coverage.RAIL_SUM, Coverage.BATTERY)
"""Coverages that include the whole machine, whichever part computes."""
_MIN_S, _MIN_READINGS = 2.0, 4
"""Least duration of a mean, and least readings of the slowest meter."""
_SENSOR_S = 1.0
"""Averaging time in seconds of a card's own sensor."""
_PRODUCT, _SUM_ITEMS = 1024, 8 << 20
"""Rows of the matrices and numbers of the tensors: 12 and 64 MiB."""


@dataclass(frozen=True, slots=True)
class DeviceWatts:
    """Watts above the machine at rest while a device computes, and while it waits for memory. `source`: the meter."""

    dense: float
    moving: float
    source: str

    def applied(self, graphs: Mapping[str, StepGraph], measured: MeasuredCosts) -> MeasuredCosts:
        """Return the costs of operators with joules computed from these watts."""
        tables = tuple(
            tuple(
                replace(cost, joules=cost.seconds * (self.dense if op_work(graph, i).dense else self.moving))
                for i, cost in enumerate(table)
            )
            for graph, table in zip(graphs.values(), measured.ops, strict=True)
        )
        return replace(measured, ops=tables)


def measured_device_watts(
    backend: Backend, energy: EnergyConfig, free_bytes: int, root: Path = Path("/")
) -> DeviceWatts | None:
    """Return the watts of a device; None on the CPU, and if no meter measures the device or it fails.

    `free_bytes`: free bytes of the device's memory; if the test load does not fit, nothing is measured.
    Raises EnergyConfigError.
    """
    if backend.kind == CPU or free_bytes < 4 * (3 * _PRODUCT**2 + 2 * _SUM_ITEMS):
        return None
    meters = meters_of(backend, energy, root)
    try:
        return watts_of(backend, meters)
    finally:
        for meter in meters:
            meter.close()


def meters_of(backend: Backend, energy: EnergyConfig, root: Path) -> tuple[PowerSource, ...]:
    """Return the open sources whose sum covers the device; none if there are no such sources."""
    without = replace(energy, disable=(*energy.disable, nvidia.NAME))
    opened = open_sources(without, model_of(energy.board, root), root).sources
    kept = [source for source in opened[:1] if source.info.kind is Kind.MEASURED]
    for other in opened[len(kept) :]:
        other.close()
    if kept and (kept[0].info.coverage in _WHOLE or _tells_of_gpu(kept[0])):
        return tuple(kept)
    if backend.kind == CUDA and not backend.unified and nvidia.NAME not in energy.disable:
        with contextlib.suppress(SourceError):  # the card does not report its power
            return (*kept, nvidia.NvidiaSource(root, card_name()))
    for source in kept:
        source.close()
    return ()


def _tells_of_gpu(source: PowerSource) -> bool:
    try:
        reading = source.read(now_s())
    except SourceError:
        return False
    return reading is not None and reading.gpu is not None


def watts_of(backend: Backend, meters: Sequence[PowerSource]) -> DeviceWatts | None:
    """Return the watts of the device by these meters together; None if one of them has no figure."""
    if not meters:
        return None
    kind = backend.kind
    a, b = (torch.ones(_PRODUCT, _PRODUCT, device=kind) for _ in range(2))
    x = torch.ones(_SUM_ITEMS, device=kind)

    def product() -> None:
        torch.mm(a, b)
        backend.synchronize()

    def total() -> None:
        x.add(1.0)
        backend.synchronize()

    period = max(_SENSOR_S if meter.info.coverage is Coverage.CARD else meter.info.period_s for meter in meters)
    try:
        rest, dense, moving = (_mean(meters, run, period) for run in (lambda: time.sleep(period / 10), product, total))
    except SourceError:
        return None
    if rest is None or dense is None or moving is None:
        return None
    return DeviceWatts(max(0.0, dense - rest), max(0.0, moving - rest), " and ".join(m.info.title for m in meters))


def _mean(meters: Sequence[PowerSource], run: Callable[[], None], period: float) -> float | None:
    """Return the mean watts of all meters while `run` repeats, after their delay; None if one has no figure."""
    _repeat(run, period)  # what the meters show now is from before
    first = last = now_s()
    readings: list[list[SensorReading]] = [[] for _ in meters]
    while len(readings[0]) < _MIN_READINGS or last - first < _MIN_S:
        for meter, known in zip(meters, readings, strict=True):
            reading = meter.read(now_s())
            if reading is None:
                return None
            known.append(reading)
        _repeat(run, period)
        last = now_s()
    return sum(map(_watts, readings))


def _repeat(run: Callable[[], None], seconds: float) -> None:
    begin = now_s()
    while now_s() - begin < seconds:
        run()


def _watts(readings: Sequence[SensorReading]) -> float:
    first, last = readings[0], readings[-1]
    if first.counter_joules is not None and last.counter_joules is not None:
        return (last.counter_joules - first.counter_joules) / (last.time_s - first.time_s)
    return sum(reading.watts or 0.0 for reading in readings) / len(readings)
