"""Reports to paired devices: what exists, energy by day, and nothing of the jobs' data."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytest

from port_agent.energy.meter import EnergyMeter, MeterSnapshot
from port_agent.facts.readings import Power
from port_agent.policy.decide import State
from port_agent.supervisor.dispatch import Dispatcher
from port_agent.supervisor.heartbeat import HeartbeatSource
from tests.agent.live_daemon import LONG, go
from tests.agent.supervisor.parts import TRAIN, parts

pytestmark = pytest.mark.process

DAY_S = 86400.0


@go
async def test_idle_training_and_power(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        source = HeartbeatSource(made.context, board="a board")
        said = source.heartbeat("attic\n")
        assert (said.name, said.board, said.state, said.job, said.progress) == ("attic", "a board", "idle", None, None)
        assert said.today_joules is None and not said.is_measured
        for power, charging in (
            (Power.EXTERNAL, True),
            (Power.ASSUMED, True),
            (Power.BATTERY, False),
            (Power.UNKNOWN, None),
        ):
            made.context.admission.facts = replace(made.context.admission.facts, power=power)
            assert source.heartbeat("attic").charging is charging
        made.add("birds", LONG)
        assert source.heartbeat("attic").state == "paused"
        Dispatcher(made.context).act(TRAIN)
        said = source.heartbeat("attic")
        assert (said.state, said.job) == ("training", "birds")


@go
async def test_what_keeps_this_device_from_solving_for_others(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        source, admission = HeartbeatSource(made.context, board="b"), made.context.admission
        assert source.objection() == "it has just started"
        admission.decision = replace(TRAIN, state=State.PAUSE, reasons=("on battery 64 %", "idle 2 of 10 min"))
        assert source.objection() == "on battery 64 %; idle 2 of 10 min"
        admission.decision = TRAIN
        admission.facts = replace(admission.facts, available_memory_bytes=300 << 20)
        assert source.objection() == "300.0 MiB of memory are free, but solving may take 768.0 MiB"
        for free in (None, 4 << 30):
            admission.facts = replace(admission.facts, available_memory_bytes=free)
            assert source.objection() == ""
        made.add("birds", LONG)
        Dispatcher(made.context).act(TRAIN)
        assert source.objection() == "it has work of its own"


@dataclass
class Meter:
    """Stands for the meter: what a heartbeat asks of one."""

    total_joules: float
    source: str = "rapl"
    kind: str = "measured"

    def snapshot(self) -> MeterSnapshot:
        return MeterSnapshot(
            self.source, self.kind, "", None, None, "", None, None, None, None, None, None, self.total_joules, 0.0
        )


@go
async def test_energy_of_the_day_begins_anew_at_midnight(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        source, meter = HeartbeatSource(made.context, board="b"), Meter(100.0)
        made.context.meter = cast(EnergyMeter, meter)
        assert (source.heartbeat("a").today_joules, source.heartbeat("a").is_measured) == (100.0, True)
        made.clock.wall += DAY_S
        assert source.heartbeat("a").today_joules == 0.0
        meter.total_joules = 130.0
        assert source.heartbeat("a").today_joules == 30.0
        meter.kind = "estimated"
        assert not source.heartbeat("a").is_measured
        meter.source = ""
        assert source.heartbeat("a").today_joules is None
        made.context.meter = None
