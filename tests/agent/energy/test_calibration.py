"""What a machine draws, fitted to runs under its meter: a simulated board whose watts are known."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from port_agent.energy.calibration import Calibration, CalibrationError, MeteredRun, WorkClass, fit, meter_runs
from tests.agent.energy.recordings import ScriptedSource

STATIC_WATTS = 2.7
TRUE = {
    WorkClass.ACTIVE: 0.6,
    WorkClass.DENSE: 0.9,
    WorkClass.MOVING: 0.5,
    WorkClass.READ: 9e-9,
    WorkClass.WRITTEN: 30e-9,
}
"""Watts, and joules per byte, of a board like a Pi 4 with an SD card."""


@dataclass
class Board:
    """A clock, a meter with 5 % noise, and what the machine does at the moment."""

    noise: float = 0.05
    now_s: float = 0.0
    dies_at_s: float = float("inf")
    source: ScriptedSource = field(default_factory=lambda: ScriptedSource(period_s=0.1))
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    rates: Mapping[WorkClass, float] = field(default_factory=dict)

    def clock(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        watts = STATIC_WATTS + sum(TRUE[work] * rate for work, rate in self.rates.items())
        self.source.value = "no answer" if self.now_s >= self.dies_at_s else watts * self.rng.gauss(1.0, self.noise)


@dataclass
class SimulatedLoad:
    """A load that does so much of each class of work in a second."""

    name: str
    board: Board
    rates: Mapping[WorkClass, float]
    began_s: float = 0.0

    def start(self) -> None:
        self.began_s, self.board.rates = self.board.now_s, self.rates

    def stop(self) -> Mapping[WorkClass, float]:
        self.board.rates = {}
        return {work: rate * (self.board.now_s - self.began_s) for work, rate in self.rates.items()}


def loads(board: Board) -> list[SimulatedLoad]:
    return [
        SimulatedLoad("rest", board, {}),
        SimulatedLoad("one core", board, {WorkClass.ACTIVE: 1.0, WorkClass.DENSE: 1.0}),
        SimulatedLoad("all cores", board, {WorkClass.ACTIVE: 1.0, WorkClass.DENSE: 4.0}),
        SimulatedLoad("memory", board, {WorkClass.ACTIVE: 1.0, WorkClass.MOVING: 4.0}),
        SimulatedLoad("reading", board, {WorkClass.READ: 45e6}),
        SimulatedLoad("writing", board, {WorkClass.WRITTEN: 25e6}),
    ]


def calibrated(board: Board) -> Calibration:
    runs, gaps = meter_runs(board.source, loads(board), run_s=2.0, repeats=5, clock=board.clock, wait=board.wait)
    return fit(runs, gaps)


def test_known_watts_are_found_within_ten_percent_under_noise_of_five() -> None:
    found = calibrated(Board())
    assert found.runs == 30 and found.gaps == ()
    assert found.static_watts.value == pytest.approx(STATIC_WATTS, rel=0.1)
    assert set(found.figures) == set(WorkClass)
    for work, estimate in found.figures.items():
        assert estimate.value == pytest.approx(TRUE[work], rel=0.1), work
        assert estimate.error > 0.0 and abs(estimate.value - TRUE[work]) <= 3 * estimate.error, work


def test_without_noise_the_figures_are_exact() -> None:
    found = calibrated(Board(noise=0.0))
    assert {work: estimate.value for work, estimate in found.figures.items()} == pytest.approx(TRUE)


def test_a_meter_that_dies_in_the_middle_ends_in_a_gap() -> None:
    board = Board(dies_at_s=32.0)
    found = calibrated(board)
    assert 10 < found.runs < 30
    assert len(found.gaps) == 6 and all("no answer" in gap for gap in found.gaps)
    assert found.static_watts.value == pytest.approx(STATIC_WATTS, rel=0.1)


def test_a_meter_that_dies_at_once_says_nothing() -> None:
    with pytest.raises(CalibrationError, match=r"0 runs were metered.*no answer"):
        calibrated(Board(dies_at_s=0.0))


def test_one_core_draws_what_the_first_does() -> None:
    runs = [MeteredRun(4.0, 4 * 2.0)] * 3 + [
        MeteredRun(4.0, 4 * 3.5, {WorkClass.ACTIVE: 4.0, WorkClass.DENSE: 4.0})
    ] * 3
    found = fit(runs)
    assert set(found.figures) == {WorkClass.DENSE} and found.figures[WorkClass.DENSE].value == pytest.approx(1.5)


def test_a_figure_is_never_below_zero() -> None:
    runs = [
        MeteredRun(4.0, 8.0),
        MeteredRun(4.0, 8.1),
        MeteredRun(4.0, 7.9, {WorkClass.READ: 1e8}),
        MeteredRun(4.0, 7.8, {WorkClass.READ: 1e8}),
    ]
    assert fit(runs).figures[WorkClass.READ].value == 0.0


def test_too_few_runs_are_refused() -> None:
    with pytest.raises(CalibrationError, match="1 runs were metered"):
        fit([MeteredRun(4.0, 8.0)])
