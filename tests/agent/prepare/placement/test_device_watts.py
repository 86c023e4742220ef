"""What a device draws is the difference that a meter shows between it at work and at rest; a meter that
does not see it is not asked.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from port_agent.backend.cpu import CpuBackend
from port_agent.energy.sources import nvidia
from port_agent.energy.sources.power_source import SensorReading
from port_agent.energy.sources.registry import EnergyConfig
from port_agent.prepare.placement import device_watts
from port_agent.prepare.placement.device_watts import DeviceWatts, measured_device_watts, meters_of, watts_of
from port_planner.ir.boards import op_work
from port_planner.ir.device_kinds import CUDA, MPS
from tests.agent.energy.device_trees import ORIN_NANO, hwmon, zone
from tests.agent.energy.recordings import ScriptedSource
from tests.agent.facts.machines import fake_program, on_path
from tests.agent.prepare.placement.placed_job import captured_job, tables
from tests.agent.trees import write_tree

REST, DENSE, MOVING = 3.0, 12.5, 7.25
PERIOD_S = 0.01


class Meter(ScriptedSource):
    """Shows what was computed last, as watts or as a counter; nothing computed: the machine at rest."""

    def __init__(self, *, counts: bool = False) -> None:
        super().__init__(period_s=PERIOD_S)
        self.watts, self._counts, self._joules, self._before_s = REST, counts, 0.0, 0.0

    def read(self, now_s: float) -> SensorReading | None:
        self._joules += self.watts * (now_s - self._before_s)
        self._before_s = now_s
        self.value = SensorReading(now_s, counter_joules=self._joules) if self._counts else self.watts
        found = super().read(now_s)
        return found


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Callable[[Meter], Meter]:
    """Let a meter see matrix products and sums."""
    monkeypatch.setattr(device_watts, "_MIN_S", 0.05)

    def watched(meter: Meter) -> Meter:
        def shows(name: str, watts: float) -> None:
            real: Any = getattr(torch if name == "mm" else torch.Tensor, name)

            def run(*operands: Any) -> Any:
                meter.watts = watts
                return real(*operands)

            monkeypatch.setattr(torch if name == "mm" else torch.Tensor, name, run)

        shows("mm", REST + DENSE)
        shows("add", REST + MOVING)
        return meter

    return watched


@pytest.mark.slow
@pytest.mark.parametrize("counts", [False, True], ids=["watts", "a counter"])
def test_the_difference_to_rest_by_what_computes(counts: bool, seen: Callable[[Meter], Meter]) -> None:
    found = watts_of(CpuBackend(), [seen(Meter(counts=counts))])
    assert found is not None and found.source == "measured by scripted"
    assert found.dense == pytest.approx(DENSE, rel=0.02) and found.moving == pytest.approx(MOVING, rel=0.02)


@pytest.mark.slow
def test_several_meters_are_added_and_one_that_fails_leaves_nothing(seen: Callable[[Meter], Meter]) -> None:
    beside = ScriptedSource("beside", period_s=PERIOD_S)
    beside.value = 40.0
    found = watts_of(CpuBackend(), [seen(Meter()), beside])
    assert found is not None and found.dense == pytest.approx(DENSE) and found.source.endswith("and measured by beside")
    for nothing in ("dead", SensorReading(0.0)):
        beside.value = None if isinstance(nothing, SensorReading) else nothing
        assert watts_of(CpuBackend(), [beside]) is None
    assert watts_of(CpuBackend(), []) is None


@pytest.mark.slow
def test_operators_take_the_joules_of_their_class() -> None:
    captured = captured_job()
    _, on_device = tables(captured)
    found = DeviceWatts(10.0, 4.0, "a test").applied(captured.graphs, on_device)
    for graph, before, after in zip(captured.graphs.values(), on_device.ops, found.ops, strict=True):
        for i, (old, new) in enumerate(zip(before, after, strict=True)):
            assert new == replace(old, joules=old.seconds * (10.0 if op_work(graph, i).dense else 4.0))
    assert len({cost.joules / cost.seconds for cost in found.ops[0]}) == 2


def on(kind: str, *, unified: bool) -> Any:
    return SimpleNamespace(kind=kind, unified=unified)


def names(backend: Any, root: Path, **settings: Any) -> list[str]:
    found = meters_of(backend, EnergyConfig(**settings), root)
    for source in found:
        source.close()
    return [source.info.name for source in found]


@pytest.mark.process
def test_meters_that_see_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(on(CUDA, unified=True), tmp_path) == [], "an estimate sees nothing"
    zone(tmp_path, "intel-rapl:0", "package-0", 5)
    assert names(on(CUDA, unified=True), tmp_path) == names(on(MPS, unified=True), tmp_path) == []
    programs = tmp_path / "bin"
    programs.mkdir()
    fake_program(programs, "nvidia-smi", "[ $2 = GPU-1a ] || exit 6; echo GPU-1a, 33.00")
    on_path(monkeypatch, programs)
    write_tree(tmp_path / "sys/bus/pci/drivers/nvidia", {"0000:01:00.0/power/runtime_status": "active\n"})
    monkeypatch.setattr(device_watts, "card_name", lambda: "GPU-1a")
    card = on(CUDA, unified=False)
    assert names(card, tmp_path) == ["rapl", nvidia.NAME]
    assert names(card, tmp_path, disable=(nvidia.NAME,)) == []
    hwmon(tmp_path, "1-0040", ORIN_NANO)
    assert names(on(CUDA, unified=True), tmp_path) == names(card, tmp_path) == ["ina3221"]


def test_nothing_is_measured_on_the_cpu_or_without_room(tmp_path: Path) -> None:
    assert measured_device_watts(CpuBackend(), EnergyConfig(), 1 << 40, tmp_path) is None
    assert measured_device_watts(on(CUDA, unified=True), EnergyConfig(), 1 << 20, tmp_path) is None
