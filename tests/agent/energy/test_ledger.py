"""The ledger: sums, bounds, damage, full disks, readers."""

import sqlite3
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from port_agent.energy.attribution.one_job import Charge, EnergyPhase, MeteredStep, StepEnergy
from port_agent.energy.attribution.timeline import GpuShare
from port_agent.energy.ledger import (
    DAY_S,
    KEEP_ROWS,
    MINUTE_S,
    Ledger,
    LedgerError,
    MeterGap,
    open_for_reading,
    period_start,
)
from port_agent.energy.report import GpuAmount, ReportOptions, read_report
from port_agent.energy.sources.power_source import Kind
from tests.zones import clock_in

NOON = 1_760_011_200.0
"""A whole day plus twelve hours (UTC)."""


@pytest.fixture(autouse=True)
def clock_shows_utc() -> Iterator[None]:
    with clock_in("UTC"):
        yield


def charge(end_unix: float, joules: float = 2.0, net: float | None = 1.0, job: str = "a") -> Charge:
    """Return a second of forward."""
    return Charge(end_unix, job, EnergyPhase.FORWARD, Kind.MEASURED, 1.0, joules, net)


def step(
    number: int, wall_s: float = 1.0, epoch: int = 0, joules: float = 3.0, unmeasured_s: float = 0.0
) -> StepEnergy:
    """Return a finished step."""
    event = MeteredStep(number, epoch, wall_s, {}, planned_s=1.0, planned_joules=2.5, loss=0.5)
    return StepEnergy(
        "a", event, NOON + number, Kind.MEASURED, joules, 1.0, unmeasured_s, {EnergyPhase.FORWARD: joules}
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Give a place for a ledger."""
    return tmp_path / "state/energy.sqlite"


def test_sums_go_to_minute_hour_and_day(path: Path) -> None:
    ledger = Ledger(path, NOON)
    ledger.add_charges([charge(NOON + 30), charge(NOON + 60), charge(NOON + 61), charge(NOON + 3601, net=None)], 0.0)
    ledger.close(NOON + 3700)
    with open_for_reading(path) as database:
        rows = database.execute(
            "SELECT period_s, start_unix, gross_joules, net_joules, unsplit_joules FROM rollup ORDER BY 1, 2"
        ).fetchall()
    start = int(NOON)
    assert [tuple(row) for row in rows] == [
        (60, start, 4.0, 2.0, 0.0),  # the second that ends on the stroke belongs to the minute before
        (60, start + 60, 2.0, 1.0, 0.0),
        (60, start + 3600, 2.0, 0.0, 2.0),
        (3600, start, 6.0, 3.0, 0.0),
        (3600, start + 3600, 2.0, 0.0, 2.0),
        (86400, start - 43200, 8.0, 3.0, 2.0),
    ]


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Kolkata", "Pacific/Kiritimati"])
def test_days_are_those_of_the_local_clock(path: Path, zone: str) -> None:
    """Also after a day of 25 hours, and where hours begin in the middle of UTC's."""
    with clock_in(zone):
        ends = [datetime(2026, 10, 31, 23, 59, 30), datetime(2026, 11, 1, 0, 0, 30), datetime(2026, 11, 1, 23, 59, 30)]
        times = [end.timestamp() for end in ends]
        ledger = Ledger(path, times[0])
        ledger.add_charges([charge(end, joules) for end, joules in zip(times, (1.0, 2.0, 4.0), strict=True)], 0.0)
        ledger.close(times[-1])
        for since in (None, datetime(2026, 10, 1).timestamp(), datetime(2026, 10, 31, 23, 58).timestamp()):
            days = read_report(path, ReportOptions(since_unix=since), times[-1]).days
            assert {day.name: day.gross_joules for day in days} == {"2026-10-31": 1.0, "2026-11-01": 6.0}


@pytest.mark.parametrize("zone", ["America/Los_Angeles", "Asia/Tokyo"])
def test_a_day_that_an_older_agent_began_in_utc_keeps_its_name(path: Path, zone: str) -> None:
    with clock_in(zone):
        ledger = Ledger(path, NOON)
        ledger.add_charges([charge(NOON)], 0.0)
        ledger.close(NOON)
        with sqlite3.connect(path) as database:
            database.execute("UPDATE rollup SET start_unix = ? WHERE period_s = ?", (NOON - 43200, DAY_S))
            database.execute("DELETE FROM rollup WHERE period_s < ?", (DAY_S,))
        database.close()
        report = read_report(path, ReportOptions(), NOON)
        assert [day.name for day in report.days] == ["2025-10-09"]
        assert report.power.start_unix == (period_start(datetime(2025, 10, 9, 12).timestamp(), DAY_S),)


def test_a_curve_of_days_has_no_hole_where_clocks_are_set_back(path: Path) -> None:
    with clock_in("Europe/Berlin"):
        times = [datetime(2026, 10, day, 12).timestamp() for day in range(23, 29)]
        ledger = Ledger(path, times[0])
        ledger.add_charges([charge(end) for end in times], 0.0)
        ledger.close(times[-1])
        with sqlite3.connect(path) as database:
            database.execute("DELETE FROM rollup WHERE period_s < ?", (DAY_S,))
        database.close()
        curve = read_report(path, ReportOptions(), times[-1]).power
        assert curve.start_unix == tuple(datetime(2026, 10, day).timestamp() for day in range(23, 29))


def test_flushes_add_up(path: Path) -> None:
    ledger = Ledger(path, NOON)
    for _ in range(3):
        ledger.add_charges([charge(NOON + 5)], 0.0)
        ledger.flush(NOON + 10)
    ledger.flush(NOON + 11)
    ledger.close(NOON + 12)
    with open_for_reading(path) as database:
        assert database.execute("SELECT SUM(gross_joules) FROM rollup WHERE period_s = 60").fetchone()[0] == 6.0


def test_short_steps_share_a_row_and_long_ones_do_not(path: Path) -> None:
    ledger = Ledger(path, NOON)
    ledger.add_steps([step(number) for number in range(12)], 0.0)
    ledger.add_steps([step(12, wall_s=60.0), step(13, wall_s=60.0, epoch=1), step(14, unmeasured_s=0.5, epoch=1)], 0.0)
    ledger.close(NOON + 60)
    with open_for_reading(path) as database:
        rows = database.execute(
            "SELECT first_step, last_step, gross_joules, planned_joules, epoch FROM step"
        ).fetchall()
        epochs = database.execute("SELECT epoch, steps, gross_joules, planned_joules FROM epoch").fetchall()
    assert [tuple(row) for row in rows] == [
        (0, 4, 15.0, 12.5, 0),
        (5, 9, 15.0, 12.5, 0),
        (10, 12, 9.0, 7.5, 0),
        (13, 13, 3.0, 2.5, 1),
        (14, 14, None, 2.5, 1),
    ]
    # an unmeasured step's plan is left out too, so that planned and measured can be compared
    assert [tuple(row) for row in epochs] == [(0, 13, 39.0, 32.5), (1, 2, 6.0, 2.5)]


@pytest.mark.slow
def test_size_is_bounded(path: Path) -> None:
    ledger = Ledger(path, NOON)
    ledger.add_charges([charge(NOON), charge(NOON + 3 * DAY_S)], 0.0)
    ledger.add_steps([step(number, wall_s=6.0) for number in range(KEEP_ROWS["step"] + 500)], 0.0)
    for number in range(KEEP_ROWS["gap"] + 50):
        ledger.add_gap(MeterGap(number * 10.0, number * 10.0 + 5, "meter", "test"))
    ledger.close(NOON + 3 * DAY_S)
    with open_for_reading(path) as database:
        minutes = database.execute("SELECT COUNT(*) FROM rollup WHERE period_s = ?", (MINUTE_S,)).fetchone()[0]
        days = database.execute("SELECT COUNT(*) FROM rollup WHERE period_s = ?", (DAY_S,)).fetchone()[0]
        steps = database.execute("SELECT COUNT(*), MAX(last_step) FROM step").fetchone()
        gaps = database.execute("SELECT COUNT(*) FROM gap").fetchone()[0]
    assert (minutes, days, gaps) == (1, 2, KEEP_ROWS["gap"])
    assert tuple(steps) == (KEEP_ROWS["step"], KEEP_ROWS["step"] + 499)


def test_neighbouring_gaps_are_one(path: Path) -> None:
    ledger = Ledger(path, NOON)
    for second in range(5):
        ledger.add_gap(MeterGap(NOON + second, NOON + second + 1, "meter", "dead"))
    ledger.close(NOON + 10)
    with open_for_reading(path) as database:
        assert [tuple(row) for row in database.execute("SELECT start_unix, end_unix FROM gap")] == [(NOON, NOON + 5)]


def test_damaged_ledger_is_moved_aside_and_said(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"no database at all, just text " * 100)
    ledger = Ledger(path, NOON)
    ledger.add_charges([charge(NOON)], 0.0)
    ledger.close(NOON + 1)
    assert path.with_name(f"energy.sqlite.damaged-{int(NOON)}").read_bytes().startswith(b"no database")
    with open_for_reading(path) as database:
        assert "new ledger begins" in database.execute("SELECT text FROM event").fetchone()[0]


def test_full_disk_keeps_figures_for_the_next_try(path: Path) -> None:
    ledger = Ledger(path, NOON)
    ledger.flush(NOON)
    pages = ledger._database.execute("PRAGMA page_count").fetchone()[0]
    ledger._database.execute(f"PRAGMA max_page_count = {pages}")
    for minute in range(600):
        ledger.add_charges([charge(NOON + 60 * minute)], 0.0)
    with pytest.raises(LedgerError, match=r"full.*free some space"):
        ledger.flush(NOON + 10)
    ledger._database.execute("PRAGMA max_page_count = 100000")
    ledger.close(NOON + 36000)
    with open_for_reading(path) as database:
        assert database.execute("SELECT SUM(gross_joules) FROM rollup WHERE period_s = 3600").fetchone()[0] == 1200.0


def test_reader_sees_the_ledger_while_it_is_written(path: Path) -> None:
    ledger = Ledger(path, NOON)
    ledger.add_charges([charge(NOON)], 0.0)
    ledger.flush(NOON)
    with open_for_reading(path) as database:
        ledger.add_charges([charge(NOON)], 0.0)
        ledger.flush(NOON + 1)
        assert database.execute("SELECT SUM(gross_joules) FROM rollup WHERE period_s = 60").fetchone()[0] == 4.0
        with pytest.raises(sqlite3.OperationalError):
            database.execute("DELETE FROM rollup")
    ledger.close(NOON + 2)


def test_missing_foreign_and_newer_files_are_refused(path: Path) -> None:
    with pytest.raises(LedgerError, match="does not exist yet"), open_for_reading(path):
        pass
    path.parent.mkdir()
    path.write_bytes(b"x" * 5000)
    with pytest.raises(LedgerError), open_for_reading(path):
        pass
    path.unlink()
    Ledger(path, NOON).close(NOON)
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(LedgerError, match="format 99"), open_for_reading(path):
        pass
    with pytest.raises(LedgerError, match="format 99"):
        Ledger(path, NOON)


def test_order_of_closing_decides_about_a_gap(path: Path) -> None:
    Ledger(path, NOON).close(NOON + 5)
    second = Ledger(path, NOON + 100)
    second.flush(NOON + 110)
    del second
    third = Ledger(path, NOON + 500)
    third.close(NOON + 501)
    with open_for_reading(path) as database:
        rows = database.execute("SELECT start_unix, end_unix FROM gap").fetchall()
    assert [tuple(row) for row in rows] == [(NOON + 110, NOON + 500)]


def gpu_rows(path: Path) -> list[tuple[object, ...]]:
    with open_for_reading(path) as database:
        return [tuple(row) for row in database.execute("SELECT * FROM gpu ORDER BY 1, 2, 3")]


def test_what_the_gpu_took_goes_to_minute_hour_and_day_of_each_job(path: Path) -> None:
    ledger, share = Ledger(path, NOON), GpuShare(8.0, "rail")
    ledger.add_gpu(NOON + 30, 2.0, share, {"a": 0.75, "b": 0.25})
    ledger.flush(NOON + 31)
    ledger.add_gpu(NOON + 61, 2.0, share, {"a": 1.0})
    ledger.close(NOON + 62)
    start = int(NOON)
    assert gpu_rows(path) == [
        (60, start, "a", "rail", 2.0, 6.0),
        (60, start, "b", "rail", 2.0, 2.0),
        (60, start + 60, "a", "rail", 2.0, 8.0),
        (3600, start, "a", "rail", 4.0, 14.0),
        (3600, start, "b", "rail", 2.0, 2.0),
        (86400, start - 43200, "a", "rail", 4.0, 14.0),
        (86400, start - 43200, "b", "rail", 2.0, 2.0),
    ]
    late = Ledger(path, NOON + 3 * DAY_S)
    late.close(NOON + 3 * DAY_S)
    assert {row[0] for row in gpu_rows(path)} == {3600, 86400}, "minutes live for two days"


def test_a_ledger_from_before_the_gpu_was_counted_is_read_and_goes_on(path: Path) -> None:
    Ledger(path, NOON).close(NOON)
    database = sqlite3.connect(path)
    database.executescript("DROP TABLE gpu; PRAGMA user_version = 1;")
    database.close()
    assert read_report(path, ReportOptions()).gpu == ()
    ledger = Ledger(path, NOON + 1)
    ledger.add_gpu(NOON + 30, 2.0, GpuShare(8.0, "rail"), {"": 1.0})
    ledger.close(NOON + 31)
    assert read_report(path, ReportOptions()).gpu == (GpuAmount("", "rail", 2.0, 8.0),)
