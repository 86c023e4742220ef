"""The report: figures that agree with the ledger, curves with holes, CSV; and the page that shows it."""

import json
from pathlib import Path

import pytest

from port_agent.dashboard.page import render_report
from port_agent.energy.report import EnergyReport, PowerCurve, ReportOptions, csv_rows, read_report
from tests.agent.energy.simulated import IDLE_WATTS, priced_report, write_afternoon


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """Give the ledger of a simulated afternoon and the time it ends."""
    path = tmp_path_factory.mktemp("state") / "energy.sqlite"
    return path, write_afternoon(path)


@pytest.fixture(scope="module")
def report(ledger: tuple[Path, float]) -> EnergyReport:
    """Give the report on that afternoon, with prices."""
    return priced_report(*ledger)


@pytest.mark.slow
def test_all_tables_add_up_to_the_total(report: EnergyReport) -> None:
    (total,) = report.total
    for amounts in (report.jobs, report.days, report.phases):
        assert sum(amount.gross_joules for amount in amounts) == pytest.approx(total.gross_joules)
    assert total.kind == "measured"
    (source,) = report.sources
    assert (source.name, source.kind, source.covers, source.period_s) == (
        "ina3221",
        "measured",
        "what the test says",
        1.0,
    )
    idle = next(amount for amount in report.jobs if amount.name == "")
    assert idle.gross_joules == pytest.approx(IDLE_WATTS * idle.seconds, rel=0.01)
    curve = report.power
    drawn = (
        sum(value or 0.0 for phase in curve.watts.values() for value in phase) * curve.period_s
    )  # a stretch seen in part is drawn at its mean power
    assert drawn == pytest.approx(total.gross_joules, rel=0.02)


def test_net_is_above_idle_and_job_time_is_clock_time(report: EnergyReport) -> None:
    job = next(amount for amount in report.jobs if amount.name == "1")
    assert job.net_joules == pytest.approx(job.gross_joules - IDLE_WATTS * (job.seconds - job.unmeasured_s), rel=1e-3)
    assert job.seconds == pytest.approx(1800, abs=15)
    assert job.unmeasured_s == pytest.approx(201, abs=2)
    assert job.steps == 900
    assert (report.label("1"), report.label("")) == ("1 (camera-net)", "(idle)")


def test_cost_and_co2(report: EnergyReport) -> None:
    (total,) = report.total
    assert total.cost == pytest.approx(total.gross_joules / 3.6e6 * 0.36)
    assert total.co2_grams == pytest.approx(total.gross_joules / 1e4)


def test_epochs_hold_planned_against_measured_over_the_same_steps(report: EnergyReport) -> None:
    epochs = [epoch for epoch in report.epochs if epoch.job == "1"]
    assert [epoch.epoch for epoch in epochs] == list(range(6))
    assert epochs[0].planned_joules == pytest.approx(150 * 9.7)
    assert epochs[4].unmeasured_s > 190
    assert epochs[4].planned_joules is not None and epochs[4].planned_joules < 55 * 9.7


def test_gap_is_a_hole_in_the_curve_and_one_line(report: EnergyReport) -> None:
    (gap,) = report.gaps
    assert gap.end_unix - gap.start_unix == pytest.approx(201, abs=2)
    middle = (gap.start_unix + gap.end_unix) / 2
    index = max(i for i, start in enumerate(report.power.start_unix) if start <= middle)
    assert all(values[index] is None for values in report.power.watts.values())


def test_since_and_job_limit_the_report(ledger: tuple[Path, float]) -> None:
    path, end = ledger
    late = read_report(path, ReportOptions(since_unix=end - 1500), end)
    assert {amount.name for amount in late.jobs} == {"", "2"} or {amount.name for amount in late.jobs} == {""}
    one = read_report(path, ReportOptions(job="2"), end)
    assert [amount.name for amount in one.jobs] == ["2"]
    assert {step.job for step in one.steps} == {"2"}


def test_wear(report: EnergyReport) -> None:
    (day,) = report.wear
    assert day.agent_bytes == pytest.approx(900 * 30_000_000 + 6 * 45_000_000, rel=0.01)
    assert day.machine_bytes is None
    assert report.wear_outlook.years_left is not None and 0 < report.wear_outlook.years_left < 2


def test_csv_and_json_round_trip(report: EnergyReport) -> None:
    rows = csv_rows(report)
    assert rows[0][:5] == ("table", "name", "kind", "seconds", "gross_joules")
    assert all(len(row) == len(rows[0]) for row in rows)
    plain = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert plain["total"][0]["gross_joules"] == report.total[0].gross_joules


def test_empty_ledger_gives_an_empty_report(tmp_path: Path) -> None:
    from port_agent.energy.ledger import Ledger

    Ledger(tmp_path / "energy.sqlite", 1e9).close(1e9)
    report = read_report(tmp_path / "energy.sqlite", ReportOptions(), 1e9 + 5)
    assert (report.total, report.power, report.wear) == ((), PowerCurve(86400, (), {}), ())
    assert "<!DOCTYPE html>" in render_report(report)
