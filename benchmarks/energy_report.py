"""Meter a real training run: energy by phase, what metering costs, and how others handle a dying sensor.

    python -m benchmarks.energy_report [--json] [--steps N] [--others PYTHON]

The run is planned, bundled and trained by the worker as the agent does it, with the plan of least memory, which
recomputes and pages. If this machine has a sensor, its figures are given next to the estimate; if not, the table says
so. `--others` names the interpreter of an environment with codecarbon and jetson-stats, to run their reading code
again; without it the recorded results are shown.
"""

import argparse
import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from port_agent.energy.attribution.one_job import EnergyPhase
from port_agent.energy.ledger import FILE_NAME, Ledger
from port_agent.energy.meter import EnergyMeter, MeterSeams
from port_agent.energy.report import ReportOptions, read_report
from port_agent.energy.sources.estimated import EstimatedSource
from port_agent.energy.sources.ina3221 import Ina3221Source
from port_agent.energy.sources.power_source import Kind, PowerSource, SourceError
from port_agent.energy.sources.rapl import RaplSource
from port_agent.energy.sources.registry import EnergyConfig, SourceChoice, configured_model, open_sources
from port_agent.energy.wear_account import WearAccount
from port_agent.system.clock import now_s
from port_agent.worker.protocol import Event, StepDone
from port_agent.worker.start import start_worker, torch_worker
from port_agent.worker.worker_options import TorchOptions
from port_planner.ir.bundle.bundle import read_manifest

BUDGET = "700M"
TRAINING = """
import torch
from torch import nn
from port_planner.job import TrainingJob

def port_job():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    x, y = torch.randn(640, 3, 32, 32), torch.randint(0, 10, (640,))
    loss = lambda m, a, b: nn.functional.cross_entropy(m(a), b)
    return TrainingJob(model, loss, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), (x, y), 64)
"""
RECORDED_OTHERS = {
    "codecarbon": "3.3.2",
    "jetson_stats": "7.2.2",
    "codecarbon_rapl": {"joules": 70.0, "watts_while_dead": 0},
    "jetson_stats_nano": {"milliwatts_before": 4761, "milliwatts_after": 1943},
    "jetson_stats_agx": {"milliwatts_before": 6841, "milliwatts_after": 4077},
}
"""Printed by energy_others.py on 2026-11-21."""


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """Energy of one phase, by each kind of source that ran."""

    phase: str
    estimated_joules: float
    measured_joules: float | None


@dataclass(frozen=True, slots=True)
class RunResult:
    """One metered training run."""

    steps: int
    seconds: float
    phases: tuple[PhaseRow, ...]
    estimated_total_joules: float
    estimated_source_joules: float
    """What the source itself counted: the phases must add up to it."""
    closing_error_percent: float
    measured_source: str | None
    measured_total_joules: float | None
    step_cpu_s: float
    meter_cpu_s: float
    meter_percent_of_step_cpu: float
    ledger_bytes: int


def main() -> None:
    """Run, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--steps", type=int, default=400, help="training steps (default 400)")
    parser.add_argument("--others", metavar="PYTHON", help="interpreter that has codecarbon and jetson-stats")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run = metered_run(Path(name), arguments.steps)
        ours = dying_sensors(Path(name))
    cost = overhead()
    others = run_others(arguments.others) if arguments.others else RECORDED_OTHERS
    if arguments.json:
        print(json.dumps({"run": asdict(run), "overhead": cost, "dying_sensor": {"ours": ours, "others": others}}))
        return
    console = Console()
    console.print(_run_table(run))
    console.print(_overhead_table(cost))
    console.print(_comparison_table(ours, others))


# --- a metered run


def metered_run(folder: Path, steps: int) -> RunResult:
    """Return the figures of a training run of `steps` steps, planned and trained for real."""
    script, bundle = folder / "train.py", folder / "job.port"
    script.write_text(TRAINING)
    plan = [
        sys.executable,
        "-m",
        "port_agent.cli",
        "plan",
        str(script),
        "--ram",
        BUDGET,
        "--frontier",
        "-o",
        str(bundle),
    ]
    subprocess.run(plan, check=True, stdout=subprocess.DEVNULL)
    model = configured_model(EnergyConfig(), None)
    estimated = _meter(folder / "estimated", EstimatedSource(model))
    sensor = _measured_source()
    meters = [estimated] + ([_meter(folder / "measured", sensor)] if sensor else [])
    start_s = now_s()
    calls = _train(meters, bundle, folder / "work", steps)
    seconds = now_s() - start_s
    steps_seen = [event for _, event in calls if isinstance(event, StepDone)]
    step_cpu_s = sum(event.cpu_s for event in steps_seen)
    meter_cpu_s = _replay(_meter(folder / "replay", EstimatedSource(model)), calls)
    reports = [
        read_report(folder / kind / FILE_NAME, ReportOptions())
        for kind in ("estimated", "measured")
        if (folder / kind).exists()
    ]
    phases = _phase_rows([{row.name: row.gross_joules for row in report.phases} for report in reports])
    total = sum(row.estimated_joules for row in phases)
    counted = estimated.snapshot().total_joules
    return RunResult(
        len(steps_seen),
        seconds,
        phases,
        total,
        counted,
        100 * abs(total - counted) / counted,
        sensor.info.name if sensor else None,
        sum(row.measured_joules or 0 for row in phases) if sensor else None,
        step_cpu_s,
        meter_cpu_s,
        100 * meter_cpu_s / step_cpu_s,
        (folder / "estimated" / FILE_NAME).stat().st_size,
    )


def _measured_source() -> PowerSource | None:
    choice = open_sources(EnergyConfig(), None, Path("/"))
    best = choice.sources[0]
    for source in choice.sources[1:]:
        source.close()
    return best if best.info.kind is Kind.MEASURED else None


def _meter(folder: Path, source: PowerSource) -> EnergyMeter:
    config = EnergyConfig()
    ledger = Ledger(folder / FILE_NAME, time.time())
    return EnergyMeter(SourceChoice((source,), ()), ledger, config, configured_model(config, None), seams=MeterSeams())


Calls = list[tuple[float, Event | None]]
"""When the meter was called, and with which event; None is only a tick."""


def _train(meters: list[EnergyMeter], bundle: Path, state_dir: Path, steps: int) -> Calls:
    """Train under all meters; return the calls that each of them got."""
    state_dir.mkdir()
    plans = read_manifest(bundle).plans
    command = torch_worker(TorchOptions(bundle=bundle, state_dir=state_dir, steps=steps, plan=len(plans) - 1))
    worker = start_worker(command, limit_bytes=plans[-1].ram_bytes)
    events: queue.Queue[Event | None] = queue.Queue()
    """What the worker says; None once it is gone."""

    def listen() -> None:
        for event in worker.events():
            events.put(event)
        events.put(None)

    threading.Thread(target=listen, daemon=True).start()
    calls: Calls = [(now_s(), None)]
    for meter in meters:
        meter.on_worker_start("job", calls[0][0])
    gone = False
    while not gone:
        event = None
        with contextlib.suppress(queue.Empty):
            event = events.get(timeout=0.5)
            gone = event is None
        calls.append((now_s(), event))
        for meter in meters:
            _call(meter, *calls[-1])
    for meter in meters:
        meter.on_worker_stop("job", now_s())
        meter.close(now_s())
    if worker.process.returncode != 0:
        raise SystemExit(f"the worker ended with {worker.process.returncode}")
    return calls


def _call(meter: EnergyMeter, at_s: float, event: Event | None) -> None:
    if event is not None:
        meter.on_event("job", event, at_s)
    meter.tick(at_s)


def _replay(meter: EnergyMeter, calls: Calls) -> float:
    """Return the CPU seconds that metering takes for these calls.

    The calls are repeated without the run between them: a look at the thread's clock around each would cost
    more than the call itself.
    """
    start_s = time.thread_time()
    meter.on_worker_start("job", calls[0][0])
    for call in calls:
        _call(meter, *call)
    meter.on_worker_stop("job", calls[-1][0])
    meter.close(calls[-1][0])
    return time.thread_time() - start_s


def _phase_rows(sums: list[dict[str, float]]) -> tuple[PhaseRow, ...]:
    """Return every phase, including those that took nothing."""
    return tuple(
        PhaseRow(phase.value, sums[0].get(phase, 0.0), sums[1].get(phase, 0.0) if len(sums) > 1 else None)
        for phase in EnergyPhase
        if phase is not EnergyPhase.UNMEASURED
    )


# --- what metering costs


def overhead() -> dict[str, float]:
    """Return the CPU time and the ledger's writes of an hour at 20 steps a second, simulated in seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sys/class/powercap/intel-rapl:0").mkdir(parents=True)
        zone = folder / "sys/class/powercap/intel-rapl:0"
        for file, text in (("name", "package-0"), ("max_energy_range_uj", "262143328850")):
            (zone / file).write_text(f"{text}\n")
        counter = _CounterFile(zone / "energy_uj")
        counter.write(0)
        clock = _Hour()
        choice = SourceChoice((RaplSource(folder),), ())
        ledger = Ledger(folder / FILE_NAME, clock.unix())
        config = EnergyConfig()
        wear = WearAccount(clock.unix)
        meter = EnergyMeter(
            choice, ledger, config, configured_model(config, None), seams=MeterSeams(clock.unix), wear=wear
        )
        meter.on_worker_start("job", clock.now_s)
        start_s = time.thread_time()
        for second in range(3600):
            counter.write(second * 7_000_000)
            for number in range(20 * second, 20 * second + 20):
                clock.now_s += 0.05
                meter.on_event("job", msgspec.structs.replace(_STEP, step=number), clock.now_s)
            meter.tick(clock.now_s)
        all_s = time.thread_time() - start_s
        start_s = time.thread_time()
        for second in range(3600):
            counter.write(second * 7_000_000)
        cpu_s = all_s - (time.thread_time() - start_s)
        written = wear.today_bytes()
        meter.close(clock.now_s)
    return {
        "us_per_second_of_training": cpu_s / 3600 * 1e6,
        "cpu_percent_at_20_steps_per_s": 100 * cpu_s / 3600,
        "ledger_bytes_per_day": written * 24,
    }


class _CounterFile:
    """A RAPL counter that the benchmark moves."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)

    def write(self, microjoules: int) -> None:
        """Set the counter."""
        os.pwrite(self._handle, b"%012d\n" % microjoules, 0)


_STEP = StepDone(
    step=1,
    epoch=0,
    loss=0.5,
    wall_s=0.05,
    cpu_s=0.05,
    planned_s=0.05,
    planned_joules=0.3,
    phases_s={"forward": 0.015, "backward": 0.025, "update": 0.002, "recompute": 0.003, "stall": 0.001},
)


class _Hour:
    """A clock that the benchmark advances."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def unix(self) -> float:
        """Return the wall-clock time."""
        return 1_760_000_000 + self.now_s


# --- the same dying sensors for all


def dying_sensors(folder: Path) -> dict[str, Any]:
    """Return what our sources report about the trees that `energy_others.py` shows the others."""
    from benchmarks.energy_others import DEAD, SECONDS, WATTS

    tree = folder / "dying"
    zone = tree / "sys/class/powercap/intel-rapl:0"
    zone.mkdir(parents=True)
    (zone / "name").write_text("package-0\n")
    (zone / "max_energy_range_uj").write_text("262143328850\n")
    counter = zone / "energy_uj"
    counter.write_text("1000000000\n")
    clock = _Hour()
    config = EnergyConfig()
    meter = EnergyMeter(
        SourceChoice((RaplSource(tree),), ()),
        Ledger(tree / FILE_NAME, clock.unix()),
        config,
        configured_model(config, None),
        seams=MeterSeams(clock.unix),
    )
    meter.on_worker_start("job", clock.now_s)
    watts = health = None
    for second in range(1, SECONDS + 1):
        clock.now_s += 1
        if second in DEAD:
            counter.unlink(missing_ok=True)
        else:
            counter.write_text(f"{1000000000 + int(second * WATTS * 1e6)}\n")
        meter.tick(clock.now_s)
        if second == DEAD.start:
            watts, health = meter.snapshot().watts, [issue.code for issue in meter.health()]
    snapshot = meter.snapshot()
    meter.close(clock.now_s)
    return {
        "joules": snapshot.total_joules,
        "gap_s": snapshot.gap_seconds,
        "watts_while_dead": watts,
        "health_while_dead": health,
        "jetson_nano_after": _jetson_after(folder / "nano", {"VDD_IN": (4960, 960), "VDD_SOC": (4960, 288)}),
    }


def _jetson_after(root: Path, rails: dict[str, tuple[int, int]]) -> str:
    hwmon = root / "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon2"
    hwmon.mkdir(parents=True)
    for number, (label, (millivolts, milliamperes)) in enumerate(rails.items(), start=1):
        (hwmon / f"in{number}_label").write_text(f"{label}\n")
        (hwmon / f"in{number}_input").write_text(f"{millivolts}\n")
        (hwmon / f"curr{number}_input").write_text(f"{milliamperes}\n")
    source = Ina3221Source(root)
    (hwmon / "curr1_input").unlink()
    try:
        return f"{source.read(0.0).watts} W"
    except SourceError as error:
        return f"no figure; health item: {error.problem.partition(' (')[0].replace(str(root), '')}"


def run_others(python: str) -> dict[str, Any]:
    """Return what `energy_others.py` prints under another interpreter."""
    script = Path(__file__).with_name("energy_others.py")
    done = subprocess.run([python, str(script)], check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


# --- tables


def _run_table(run: RunResult) -> Table:
    table = Table(title=f"{run.steps} training steps in {run.seconds:.1f} s, joules by phase", title_justify="left")
    table.add_column("phase")
    table.add_column("estimated", justify="right")
    table.add_column(f"measured ({run.measured_source or 'no sensor here'})", justify="right")
    for row in run.phases:
        table.add_row(
            row.phase.replace("_", " "), f"{row.estimated_joules:.3f}", _number(row.measured_joules), end_section=False
        )
    table.add_section()
    table.add_row("sum of phases", f"{run.estimated_total_joules:.3f}", _number(run.measured_total_joules))
    table.add_row("counted by the source", f"{run.estimated_source_joules:.3f}", "")
    table.add_row("difference", f"{run.closing_error_percent:.4f} %", "")
    table.add_row("metering CPU / step CPU", f"{run.meter_cpu_s:.3f} s / {run.step_cpu_s:.1f} s", "")
    table.add_row("", f"= {run.meter_percent_of_step_cpu:.2f} %", "")
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _overhead_table(cost: dict[str, float]) -> Table:
    table = Table("metering, an hour at 20 steps a second from one counter", "", title_justify="left")
    table.add_row("CPU per second (1 sample, 20 step events)", f"{cost['us_per_second_of_training']:.0f} us")
    table.add_row("of one core", f"{cost['cpu_percent_at_20_steps_per_s']:.3f} %")
    table.add_row("ledger writes to flash", f"{cost['ledger_bytes_per_day'] / 1e6:.1f} MB a day")
    return table


def _comparison_table(ours: dict[str, Any], others: dict[str, Any]) -> Table:
    rapl, nano, agx = others["codecarbon_rapl"], others["jetson_stats_nano"], others["jetson_stats_agx"]
    table = Table("", "PORT agent", f"codecarbon {others['codecarbon']}", f"jetson-stats {others['jetson_stats']}")
    table.title, table.title_justify = "what each reports", "left"
    rows = (
        ("figure", "joules by job, step, phase; watts", "kWh and CO2 per run; watts", "watts per rail, now; no energy"),
        ("measured or estimated", "named at every figure", "falls back to TDP x load", "measured only"),
        ("sampling", "1 s in training, 30 s idle", "15 s by default", "1 s by default"),
        ("resolution kept", "joules as float64 per step", "kWh as float per run", "whole milliwatts"),
        ("idle power", "measured, subtracted, both kept", "part of the figure", "part of the figure"),
        ("AGX Orin total", "three rails that feed the board", "-", "all labelled rails added"),
        (
            "counter gone 4 of 12 s at 10 W (120 J)",
            f"{ours['joules']:.0f} J and a gap of {ours['gap_s']:.0f} s; watts: {_said(ours['watts_while_dead'])}; "
            f"{', '.join(ours['health_while_dead'])}",
            f"{rapl['joules']:.0f} J, watts: {rapl['watts_while_dead']}; a debug log line",
            "-",
        ),
        (
            "input rail gone on a Nano (4.76 W)",
            ours["jetson_nano_after"],
            "-",
            f"{nano['milliwatts_after'] / 1000} W: adds what is left; nothing said",
        ),
        (
            "one rail gone on an AGX Orin (6.84 W)",
            "no figure; health item",
            "-",
            f"{agx['milliwatts_after'] / 1000} W: adds what is left; nothing said",
        ),
    )
    for row in rows:
        table.add_row(*row)
    return table


def _said(watts: float | None) -> str:
    return "none" if watts is None else f"{watts}"


if __name__ == "__main__":
    main()
