"""The meter's metrics: units in their names, every figure with its source and kind, the unknown left out."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from port_agent.energy.ledger import Ledger
from port_agent.energy.meter import EnergyMeter, MeterSeams
from port_agent.energy.metrics import meter_families
from port_agent.energy.sources.estimated import PowerModel
from port_agent.energy.sources.power_source import Kind
from port_agent.energy.sources.registry import EnergyConfig, SourceChoice
from port_agent.system.prometheus import exposition
from port_agent.worker.protocol import StepDone
from tests.agent.energy.recordings import ScriptedSource

UNIX = 1_760_000_000.0
STEP = StepDone(
    step=0, epoch=0, loss=1.0, wall_s=1.0, cpu_s=1.0, phases_s={"forward": 0.4, "backward": 0.5, "update": 0.1}
)


class MeasurementWorker:
    """A meter on a source whose watts a test writes, ticked once a second."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        self.now_s, self.source = 1000.0, ScriptedSource("scripted", kind)
        self.source.value = 5.0
        seams = MeterSeams(lambda: UNIX + self.now_s, lambda: 0.0, None, lambda: 0.0, None)
        ledger = Ledger(folder / "energy.sqlite", UNIX + self.now_s)
        choice = SourceChoice((self.source,), ())
        self.meter = EnergyMeter(choice, ledger, EnergyConfig(), PowerModel("test board", 2.0, 6.0), seams=seams)

    def tick(self, watts: float) -> None:
        """Let a second pass at this power."""
        self.source.value = watts
        self.now_s += 1.0
        self.meter.tick(self.now_s)

    def lines(self) -> list[str]:
        """Return the metrics, comments left out."""
        return [line for line in exposition(meter_families(self.meter)).splitlines() if not line.startswith("#")]


@pytest.fixture(params=Kind)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MeasurementWorker]:
    made = MeasurementWorker(tmp_path, request.param)
    yield made
    made.meter.close(made.now_s)


def test_metrics_have_units_and_parse(bench: MeasurementWorker) -> None:
    bench.meter.on_worker_start('odd "name"\n', bench.now_s)
    bench.tick(5.0)
    bench.meter.on_event('odd "name"\n', STEP, bench.now_s)
    bench.tick(5.0)
    sample = re.compile(r'port_agent_\w+(\{(\w+="(\\.|[^"\\\n])*",?)+\})? -?\d+(\.\d+)?(e[+-]?\d+)?$')
    kind = bench.source.info.kind.value
    lines = bench.lines()
    assert [line for line in lines if not sample.match(line)] == []
    assert f'port_agent_power_watts{{source="scripted",kind="{kind}"}} 5.0' in lines
    assert f'port_agent_phase_energy_joules_total{{phase="forward",kind="{kind}"}} 2.0' in lines
    names = {line.split("{")[0].split(" ")[0] for line in lines}
    units = ("_watts", "_joules", "_joules_total", "_seconds_total", "_bytes", "_ratio", "_steps_total", "_issues")
    assert [name for name in names if not name.endswith(units)] == []
    text = exposition(meter_families(bench.meter))
    assert all(f"# TYPE {name} " in text for name in names)


def test_what_is_not_known_is_left_out_and_not_zero(bench: MeasurementWorker) -> None:
    names = {line.split("{")[0] for line in bench.lines()}
    assert not names & {
        "port_agent_power_watts",
        "port_agent_step_time_drift_ratio",
        "port_agent_job_energy_joules_total",
    }
    bench.meter.on_worker_start("1", bench.now_s)
    bench.tick(0.0), bench.tick(0.0)
    assert any(line.startswith("port_agent_power_watts{") for line in bench.lines()), "nothing drawn is a figure"


def test_a_source_that_fails_is_counted_as_an_issue_and_a_gap(bench: MeasurementWorker) -> None:
    bench.meter.on_worker_start("1", bench.now_s)
    bench.tick(5.0), bench.tick(5.0)
    assert "port_agent_energy_issues 0.0" in bench.lines()
    bench.source.value = "torn off"
    bench.now_s += 1.0
    bench.meter.tick(bench.now_s)
    lines = bench.lines()
    assert "port_agent_energy_issues 1.0" in lines
    (gap,) = [line for line in lines if line.startswith("port_agent_energy_gap_seconds_total")]
    assert gap.endswith(" 1.0")
