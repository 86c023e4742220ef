"""The whole meter: recorded boards replayed through a sensor tree into the ledger, dying sensors, restarts."""

import itertools
import re
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from port_agent.energy.ledger import Ledger, LedgerError
from port_agent.energy.meter import EnergyMeter, MeterSeams, open_meter
from port_agent.energy.report import ReportOptions, csv_rows, read_report, report_from_dict
from port_agent.energy.sources.estimated import CpuTime, EstimatedSource, LoadProbe, PowerModel
from port_agent.energy.sources.ina3221 import Ina3221Source
from port_agent.energy.sources.jetson_rails import BoardTotal
from port_agent.energy.sources.power_source import Kind, PowerSource, SensorReading
from port_agent.energy.sources.rapl import RaplSource
from port_agent.energy.sources.registry import EnergyConfig, SourceChoice
from port_agent.energy.sources.tegrastats import parse_line
from port_agent.energy.wear import DiskCounter
from port_agent.energy.wear_account import WearAccount
from port_agent.worker.protocol import StepDone, WorkerPaused, WorkerResumed
from tests.agent.energy.device_trees import RANGE_UJ, STAT, disk, hwmon, zone
from tests.agent.energy.recordings import ScriptedSource, local

MODEL = PowerModel("test board", 2.0, 6.0)
T0_UNIX = 1_760_000_000.0


class MeasurementWorker:
    """A meter with a clock of its own, its ledger, and the loop the supervisor would run."""

    def __init__(
        self,
        folder: Path,
        *sources: PowerSource,
        reopen: Callable[[], SourceChoice] | None = None,
        now_s: float = 1000.0,
        writer: Executor | None = None,
    ) -> None:
        self.now_s = now_s
        self.path = folder / "energy.sqlite"
        self.busy = self.slept_s = 0.0
        seams = MeterSeams(
            lambda: T0_UNIX + self.now_s + self.slept_s, lambda: self.busy, reopen, lambda: self.slept_s, writer
        )
        ledger = Ledger(self.path, T0_UNIX + self.now_s)
        self.meter = EnergyMeter(SourceChoice(sources, ()), ledger, EnergyConfig(), MODEL, seams=seams)

    def tick(self, seconds: float = 1.0) -> None:
        """Let time pass, then tick."""
        self.now_s += seconds
        self.meter.tick(self.now_s)

    def step(
        self,
        number: int,
        wall_s: float = 1.0,
        epoch: int = 0,
        planned_s: float | None = None,
        planned_joules: float | None = None,
    ) -> None:
        """Let a step end now."""
        phases_s = {"forward": 0.4 * wall_s, "backward": 0.5 * wall_s, "update": 0.1 * wall_s}
        event = StepDone(
            step=number,
            epoch=epoch,
            loss=1.0 / (number + 1),
            wall_s=wall_s,
            cpu_s=wall_s,
            phases_s=phases_s,
            planned_s=planned_s,
            planned_joules=planned_joules,
        )
        self.meter.on_event("job", event, self.now_s)

    def rows(self, query: str) -> list[sqlite3.Row]:
        """Return rows of the ledger as another process would read them."""
        database = sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)
        database.row_factory = sqlite3.Row
        rows = database.execute(query).fetchall()
        database.close()
        return rows


def trapezoid(watts: list[float]) -> float:
    """Return the joules of one-second samples."""
    return sum((a + b) / 2 for a, b in itertools.pairwise(watts))


def replay(bench: MeasurementWorker, lines: list[str], show: Callable[[Mapping[str, float]], None]) -> Iterator[int]:
    """Show each line's rails to the sensor tree, one per second, and give its number after the tick."""
    for number, line in enumerate(lines):
        show(parse_line(line).rails)
        bench.tick()
        yield number


def rails_into(folder: Path, numbers: Mapping[str, int]) -> Callable[[Mapping[str, float]], None]:
    """Return what writes watts into a hwmon folder as millivolts and milliamperes, as the driver rounds them."""

    def show(watts: Mapping[str, float]) -> None:
        for rail, number in numbers.items():
            (folder / f"in{number}_input").write_text("5000\n")
            (folder / f"curr{number}_input").write_text(f"{round(watts[rail] * 1000 / 5)}\n")

    return show


XAVIER = {"VDD_IN": 1, "VDD_CPU_GPU_CV": 2, "VDD_SOC": 3}
AGX = {"VDD_GPU_SOC": 1, "VDD_CPU_CV": 2, "VIN_SYS_5V0": 3}


def check_replay(tmp_path: Path, text: str, rails: Mapping[str, int]) -> None:
    """Replay a recording while a job trains, and hold ledger and phases against the trapezoid over the log."""
    folder = hwmon(tmp_path, "1-0040", {number: (rail, 5000, 0) for rail, number in rails.items()})
    bench = MeasurementWorker(tmp_path, Ina3221Source(tmp_path))
    lines = text.splitlines(keepends=True)
    for number in replay(bench, lines, rails_into(folder, rails)):
        if number == 0:
            bench.meter.on_worker_start("job", bench.now_s)
        else:
            bench.step(number)
    bench.now_s += 0.001
    bench.meter.close(bench.now_s)
    expected = trapezoid([parse_line(line).total.watts for line in lines])
    total, measured_s = tuple(
        bench.rows(
            "SELECT SUM(gross_joules), SUM(seconds * (phase = 'static' OR job = '')) FROM rollup WHERE period_s = 86400"
        )[0]
    )
    assert total == pytest.approx(expected, rel=0.01)
    assert measured_s == pytest.approx(len(lines) - 1, abs=0.01)
    # the last phases, roll-ups of each length and steps agree with one another
    for period_s in (60, 3600, 86400):
        part = bench.rows(f"SELECT SUM(gross_joules) FROM rollup WHERE period_s = {period_s}")[0][0]
        assert part == pytest.approx(total)
    steps = bench.rows("SELECT SUM(gross_joules) FROM epoch")[0][0]
    assert steps == pytest.approx(total, rel=0.01)


def test_xavier_nx_excerpt(tmp_path: Path) -> None:
    check_replay(tmp_path, local("xavier_nx_burn_head.log"), XAVIER)


def test_agx_orin_excerpt(tmp_path: Path) -> None:
    check_replay(tmp_path, local("agx_orin_edge.log"), AGX)


@pytest.mark.slow
def test_xavier_nx_burn(tmp_path: Path, shared: Callable[[str], str]) -> None:
    check_replay(tmp_path, shared("tegrastats/xavier_nx_burn.log"), XAVIER)


def test_agx_orin_llm_then_idle(tmp_path: Path, shared: Callable[[str], str]) -> None:
    check_replay(tmp_path, shared("tegrastats/agx_orin_l4t35_36_llm_then_idle.log"), AGX)


def test_rapl_wrap_in_the_middle(tmp_path: Path) -> None:
    start_uj = RANGE_UJ - 95_000_000
    zone(tmp_path, "intel-rapl:0", "package-0", start_uj)
    bench = MeasurementWorker(tmp_path, RaplSource(tmp_path))
    for number in range(21):
        zone(tmp_path, "intel-rapl:0", "package-0", (start_uj + number * 10_000_000) % RANGE_UJ)
        bench.tick(30.0)
    bench.meter.close(bench.now_s)
    assert bench.rows("SELECT SUM(gross_joules) FROM rollup WHERE period_s = 60")[0][0] == pytest.approx(
        200.0, rel=1e-6
    )
    assert bench.rows("SELECT * FROM gap") == []


def test_dying_sensor_is_a_gap_and_a_health_item_and_never_a_zero(tmp_path: Path) -> None:
    folder = hwmon(tmp_path, "1-0040", {1: ("VDD_IN", 5000, 1000)})
    estimate = EstimatedSource(MODEL, LoadProbe(lambda: CpuTime(0.0, 0.0)))
    bench = MeasurementWorker(tmp_path, Ina3221Source(tmp_path), estimate)
    bench.meter.on_worker_start("job", bench.now_s)
    for number in range(5):
        bench.tick()
        bench.step(number)
    (folder / "curr1_input").rename(folder / "away")
    for number in range(5, 10):
        bench.tick()
        bench.step(number)
    (issue,) = bench.meter.health()
    assert (issue.code, issue.key) == ("energy-source", "ina3221")
    assert "cannot read" in issue.reason and "driver" in issue.remedy
    assert bench.meter.snapshot().watts is None
    (folder / "away").rename(folder / "curr1_input")
    for number in range(10, 15):
        bench.tick()
        bench.step(number)
    assert bench.meter.health() == ()
    bench.meter.close(bench.now_s)
    kinds = {row["kind"] for row in bench.rows("SELECT kind FROM rollup")}
    assert kinds == {"measured"}, "a dead sensor must not turn into an estimate"
    gaps = bench.rows("SELECT end_unix - start_unix AS seconds, reason FROM gap")
    assert sum(row["seconds"] for row in gaps) == pytest.approx(6.0)
    assert "cannot read" in gaps[0]["reason"]
    joules, seconds = tuple(
        bench.rows("SELECT SUM(gross_joules), SUM(seconds * (phase = 'unmeasured')) FROM rollup WHERE period_s = 60")[0]
    )
    assert joules == pytest.approx(5.0 * 9)  # 15 seconds since the start of the job, 6 of them unseen
    assert seconds == pytest.approx(6.0)


@pytest.mark.parametrize("clock_counts_sleep", [True, False])
def test_suspension_is_a_reported_gap(tmp_path: Path, clock_counts_sleep: bool) -> None:
    source = ScriptedSource()
    source.value = 5.0
    bench = MeasurementWorker(tmp_path, source)
    bench.tick(30)
    bench.tick(30)
    if clock_counts_sleep:
        bench.now_s += 3600
    else:
        bench.slept_s += 3600
    bench.tick(30)
    bench.tick(30)
    bench.meter.close(bench.now_s)
    (gap,) = bench.rows("SELECT * FROM gap")
    assert gap["end_unix"] - gap["start_unix"] == pytest.approx(3600, abs=30)
    assert re.search(r"(suspended for 3600|no reading for 3630) s", gap["reason"])
    assert bench.rows("SELECT SUM(gross_joules) FROM rollup WHERE period_s = 86400")[0][0] == pytest.approx(300.0)


def test_battery_that_charges_hands_over_to_the_next_source(tmp_path: Path) -> None:
    battery, package = ScriptedSource("battery"), ScriptedSource("rapl")
    battery.value, package.value = 20.0, 7.0
    bench = MeasurementWorker(tmp_path, battery, package)
    bench.tick(30)
    bench.tick(30)
    battery.value = None
    bench.tick(30)
    bench.tick(30)
    snapshot = bench.meter.snapshot()
    assert (snapshot.source, snapshot.watts) == ("rapl", 7.0)
    assert [event.code for event in bench.meter.take_events()] == ["source-changed", "source-changed"]


def test_idle_baseline_is_measured_kept_and_subtracted(tmp_path: Path) -> None:
    source = ScriptedSource()
    source.value = 3.0
    bench = MeasurementWorker(tmp_path, source)
    for _ in range(30):
        bench.tick(30)
    assert bench.meter.snapshot().baseline_watts == 3.0
    bench.busy = 0.9  # somebody else works: no baseline
    source.value = 9.0
    for _ in range(300):
        bench.tick(30)
    assert bench.meter.snapshot().baseline_watts == 3.0
    bench.meter.close(bench.now_s)

    again = ScriptedSource()
    again.value = 8.0
    second = MeasurementWorker(tmp_path, again, now_s=bench.now_s + 5)
    second.tick(1)
    assert second.meter.snapshot().baseline_watts == 3.0
    second.meter.on_worker_start("job", second.now_s)
    for number in range(10):
        second.tick()
        second.step(number)
    second.tick()
    energy = second.meter.job_energy()["job"]
    assert energy.gross_joules == pytest.approx(80.0)
    assert energy.net_joules == pytest.approx(50.0)
    assert energy.steps == 10
    second.meter.close(second.now_s)


LOADS = st.lists(
    st.tuples(
        st.sampled_from(["idle", "step", "pause", "dead", "stop"]),
        st.floats(0.1, 40.0),
        st.integers(1, 12),
        st.floats(0.1, 3.0),
    ),
    min_size=1,
    max_size=25,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(loads=LOADS)
def test_ledger_closes_on_random_days(tmp_path: Path, loads: list[tuple[str, float, int, float]]) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    source = ScriptedSource()
    source.value = 3.0
    bench = MeasurementWorker(folder, source)
    for action, watts, count, wall_s in loads:
        source.value = "dead" if action == "dead" else watts
        if action in ("step", "pause", "dead") and not bench.meter.snapshot().job:
            bench.meter.on_worker_start("job", bench.now_s)
        if action == "pause":
            bench.meter.on_event("job", WorkerPaused(step=0), bench.now_s)
        for number in range(count):
            bench.tick(wall_s if action in ("step", "dead") else 10.0)
            if action in ("step", "dead"):
                bench.step(number, wall_s)
        if action == "pause":
            bench.meter.on_event("job", WorkerResumed(step=0), bench.now_s)
        if action == "stop":
            bench.meter.on_worker_stop("job", bench.now_s)
    bench.now_s += 1.0
    bench.meter.close(bench.now_s)
    snapshot = bench.meter.snapshot()
    for period_s in (60, 86400):
        row = bench.rows(
            "SELECT SUM(gross_joules), SUM(seconds * (phase = 'unmeasured')), MIN(gross_joules) FROM rollup"
            f" WHERE period_s = {period_s}"
        )[0]
        assert (row[0] or 0.0) == pytest.approx(snapshot.total_joules, rel=0.01, abs=1e-6)
        assert (row[1] or 0.0) == pytest.approx(snapshot.gap_seconds, rel=0.01, abs=1e-6)
        assert row[2] is None or row[2] >= 0


def test_drift_raises_one_event_with_factors(tmp_path: Path) -> None:
    source = ScriptedSource()
    source.value = 6.0
    bench = MeasurementWorker(tmp_path, source)
    bench.meter.on_worker_start("job", bench.now_s)
    for number in range(150):
        bench.tick()
        bench.step(number, planned_s=0.8, planned_joules=6.1)
    corrections = [event for event in bench.meter.take_events() if event.correction]
    assert len(corrections) == 1
    (event,) = corrections
    assert event.correction is not None
    assert event.correction.time_factor == pytest.approx(1.25)
    assert event.correction.energy_factor is None  # 1.6 % off
    assert "profile corrected (time x1.25)" in event.text and "plans are compared again" in event.text
    bench.meter.close(bench.now_s)
    assert bench.rows("SELECT code FROM event WHERE code = 'profile-corrected'")


def test_what_the_account_counts_is_in_the_ledger_and_the_ledgers_own_writes_in_the_account(tmp_path: Path) -> None:
    path = tmp_path / "energy.sqlite"
    wear = WearAccount(lambda: T0_UNIX)
    meter = EnergyMeter(
        SourceChoice((ScriptedSource(),), ()),
        Ledger(path, T0_UNIX),
        EnergyConfig(),
        MODEL,
        seams=MeterSeams(lambda: T0_UNIX),
        wear=wear,
    )
    wear.add(1334)
    meter.tick(0.0)
    written = meter.flush(1.0).result()
    assert written > 0 and wear.today_bytes() == 1334 + written
    meter.close(2.0)
    (day,) = read_report(path, ReportOptions(), T0_UNIX).wear
    assert day.agent_bytes == 1334 + written
    assert time.gmtime(day.day_unix)[:3] == time.localtime(T0_UNIX)[:3]


def test_killed_agent_leaves_a_whole_ledger_and_a_gap(tmp_path: Path) -> None:
    source = ScriptedSource()
    source.value = 5.0
    bench = MeasurementWorker(tmp_path, source)
    for _ in range(23):
        bench.tick(30)  # flushes after 30 s, 330 s and 630 s
    flushed = bench.rows("SELECT SUM(gross_joules) FROM rollup WHERE period_s = 60")[0][0]
    assert 2500 < flushed < 22 * 150
    del bench.meter  # as SIGKILL would: no close
    second = MeasurementWorker(tmp_path, ScriptedSource(), now_s=bench.now_s + 60)
    second.meter.close(second.now_s + 1)
    (gap,) = [row for row in second.rows("SELECT * FROM gap") if row["source"] == "agent"]
    assert "without closing" in gap["reason"]


def test_writes_of_the_whole_disk_are_counted_and_its_life_is_assumed(tmp_path: Path) -> None:
    real, path = disk(tmp_path / "root", tmp_path), tmp_path / "energy.sqlite"
    (real / "queue").mkdir()
    (real / "queue/rotational").write_text("0\n")
    (real / "size").write_text("62500000\n")
    meter = EnergyMeter(
        SourceChoice((ScriptedSource(),), ()),
        Ledger(path, T0_UNIX),
        EnergyConfig(),
        MODEL,
        DiskCounter(tmp_path, tmp_path / "root"),
        MeterSeams(lambda: T0_UNIX),
    )
    meter.tick(0.0)
    meter.flush(1.0)
    (real / "stat").write_text(STAT.replace("432176", "2432176"))
    meter.flush(2.0)
    meter.close(3.0)
    report = read_report(path, ReportOptions(), T0_UNIX)
    assert [day.machine_bytes for day in report.wear] == [2_000_000 * 512]
    assert report.wear_outlook.endurance_bytes == 62_500_000 * 512 * 600 and report.wear_outlook.assumed
    own = read_report(path, ReportOptions(flash_endurance_bytes=10**12), T0_UNIX)
    assert own.wear_outlook.endurance_bytes == 10**12 and not own.wear_outlook.assumed


class SlowCard(ThreadPoolExecutor):
    """A thread whose disk takes as long as the test wants."""

    def __init__(self) -> None:
        super().__init__(1)
        self.answers = threading.Event()
        self.submit(self.answers.wait, 30.0)


def test_a_slow_card_holds_up_neither_ticks_nor_figures(tmp_path: Path) -> None:
    source, card = ScriptedSource(), SlowCard()
    source.value = 5.0
    bench = MeasurementWorker(tmp_path, source, writer=card)
    for _ in range(40):
        bench.tick(30)  # asks for three flushes while the first one hangs
    assert bench.rows("SELECT COUNT(*) FROM rollup")[0][0] == 0
    written = bench.meter.flush(bench.now_s)
    assert not written.done() and bench.meter.flush(bench.now_s) is written
    card.answers.set()
    written.result(30.0)
    first = bench.rows("SELECT SUM(gross_joules) FROM rollup WHERE period_s = 60")[0][0]
    assert 0 < first < 39 * 150
    bench.meter.close(bench.now_s)
    assert bench.rows("SELECT SUM(gross_joules) FROM rollup WHERE period_s = 60")[0][0] == pytest.approx(39 * 150)


def test_a_card_that_refuses_is_a_health_item_and_loses_nothing(tmp_path: Path) -> None:
    source, card = ScriptedSource(), SlowCard()
    source.value = 5.0
    bench = MeasurementWorker(tmp_path, source, writer=card)
    database = bench.meter._ledger._database
    database.execute(f"PRAGMA max_page_count = {database.execute('PRAGMA page_count').fetchone()[0]}")
    card.answers.set()
    bench.meter.on_worker_start("job", bench.now_s)
    for number in range(400):  # more rows than the file's free pages hold
        bench.tick(60)
        bench.step(number, wall_s=60.0)
    with pytest.raises(LedgerError, match="full"):
        for _ in range(2):  # the first may be one under way, whose few rows fit
            bench.meter.flush(bench.now_s).result(30.0)
    bench.tick(60)
    (issue,) = bench.meter.health()
    assert issue.code == "energy-ledger" and "free some space" in issue.remedy
    database.execute("PRAGMA max_page_count = 100000")
    bench.meter.flush(bench.now_s).result(30.0)
    bench.tick(60)
    assert bench.meter.health() == ()
    bench.meter.close(bench.now_s)
    assert bench.rows("SELECT SUM(steps) FROM epoch")[0][0] == 400
    total = bench.meter.snapshot().total_joules
    assert bench.rows("SELECT SUM(gross_joules) FROM rollup WHERE period_s = 86400")[0][0] == pytest.approx(total)


def test_looks_for_sensors_again_after_a_minute(tmp_path: Path) -> None:
    dead, revived = ScriptedSource(), ScriptedSource("revived")
    dead.value, revived.value = "gone", 4.0
    bench = MeasurementWorker(tmp_path, dead, reopen=lambda: SourceChoice((revived,), ()))
    for _ in range(5):
        bench.tick(30)
    assert dead.closed
    assert bench.meter.snapshot().source == "revived"


def test_estimate_never_replaces_a_measured_source_that_died(tmp_path: Path) -> None:
    dead = ScriptedSource()
    dead.value = "gone"
    estimate = ScriptedSource("estimated", Kind.ESTIMATED)
    bench = MeasurementWorker(tmp_path, dead, reopen=lambda: SourceChoice((estimate,), ()))
    for _ in range(20):
        bench.tick(10)
    assert bench.meter.snapshot().watts is None
    assert bench.meter.health()


def test_opens_on_this_machine_with_some_source(tmp_path: Path) -> None:
    meter = open_meter(tmp_path, {"source": "estimated", "static_watts": 5, "full_watts": 9})
    meter.on_worker_start("job", 0.0)
    for second in range(4):
        meter.tick(float(second))
    snapshot = meter.snapshot()
    assert (snapshot.source, snapshot.kind, snapshot.baseline_watts) == ("estimated", "estimated", 5.0)
    assert snapshot.watts is not None and 5.0 <= snapshot.watts <= 9.0
    meter.close(4.0)


def test_what_a_recorded_jetsons_gpu_took_is_charged_to_the_job_at_work(tmp_path: Path) -> None:
    totals = [parse_line(line).total for line in local("agx_orin_edge.log").splitlines(keepends=True)]
    source = ScriptedSource("tegrastats")
    bench = MeasurementWorker(tmp_path, source)
    half = len(totals) // 2

    def draw(total: BoardTotal) -> None:
        bench.now_s += 1.0
        source.value = SensorReading(bench.now_s, watts=total.watts, gpu=total.gpu_reading)
        bench.meter.tick(bench.now_s)

    bench.meter.on_worker_start("7", bench.now_s)
    for total in totals[:half]:
        draw(total)
    bench.meter.on_worker_stop("7", bench.now_s)
    bench.meter.close(bench.now_s)
    report = read_report(bench.path, ReportOptions(), T0_UNIX + bench.now_s)
    (found,) = report.gpu
    watts = [total.gpu_watts or 0.0 for total in totals[:half]]
    assert (found.job, found.covers) == ("7", "VDD_GPU_SOC, which feeds the GPU with the rest of the chip's core")
    assert found.joules == pytest.approx(sum((a + b) / 2 for a, b in itertools.pairwise(watts)))
    (job,) = (amount for amount in report.jobs if amount.name == "7")
    assert 0 < found.joules < job.gross_joules and found.seconds == pytest.approx(half - 1)
    assert report_from_dict(report.as_dict()) == report
    assert ("gpu", "7", found.covers, found.seconds, found.joules, "", "", "", "", "") in csv_rows(report)
