"""This machine as a board: what was measured, calibrated, given or assumed, each with its source."""

from pathlib import Path

import pytest

from port_agent.energy.calibration import Calibration, Estimate, WorkClass
from port_agent.energy.sources.power_source import Kind
from port_agent.prepare import loads, this_machine
from port_agent.prepare.this_machine import board_numbers, measure_board
from port_planner.ir.boards import REQUIRED, format_board, load_board
from port_planner.profiling.sustained_writes import WINDOW_BYTES
from tests.agent.energy.recordings import ScriptedSource
from tests.agent.facts.cores import RK3588, machine

FOUND = Calibration(
    Estimate(2.7, 0.05),
    {
        WorkClass.ACTIVE: Estimate(0.6, 0.1),
        WorkClass.DENSE: Estimate(0.9, 0.02),
        WorkClass.MOVING: Estimate(0.5, 0.02),
        WorkClass.READ: Estimate(9e-9, 1e-9),
        WorkClass.WRITTEN: Estimate(3e-8, 2e-9),
    },
    30,
)


def test_a_calibration_becomes_figures_of_a_board_with_their_errors() -> None:
    numbers = board_numbers(FOUND, 4, "ina219, the board's input")
    assert {key: number.value for key, number in numbers.items()} == pytest.approx(
        {
            "static_watts": 2.7,
            "compute_watts": 4.2,
            "one_core_watts": 1.5,
            "moving_watts": 2.6,
            "read_joules_per_byte": 9e-9,
            "write_joules_per_byte": 3e-8,
        }
    )
    assert all(number.kind == "measured" for number in numbers.values())
    assert numbers["static_watts"].source == "fitted to 30 runs under ina219, the board's input; standard error 2%"


def test_what_was_not_measured_is_missing() -> None:
    rest_alone = Calibration(Estimate(2.7, 0.05), {}, 8, ("all cores: no answer",))
    assert set(board_numbers(rest_alone, 4, "ina219")) == {"static_watts"}


def measured(tmp_path: Path, source: ScriptedSource | None, **given: float) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the kind of each figure of this machine's board file as it is read again, and what was not measured."""
    board, gaps = measure_board(
        tmp_path, 1, given=given, source=source, progress=lambda share: None, max_written_bytes=2 * WINDOW_BYTES
    )
    (tmp_path / "board.toml").write_text(format_board(board))
    numbers = load_board(str(tmp_path / "board.toml")).numbers
    assert set(REQUIRED) <= set(numbers)
    return {key: number.kind for key, number in numbers.items()}, gaps


@pytest.mark.slow
def test_without_a_meter_watts_are_assumed_or_given(tmp_path: Path) -> None:
    for source in (None, ScriptedSource("estimated", Kind.ESTIMATED)):
        kinds, gaps = measured(tmp_path, source, static_watts=3.0)
        assert (kinds["static_watts"], kinds["compute_watts"], kinds["read_joules_per_byte"]) == (
            "measured",
            "assumed",
            "derived",
        )
        assert kinds["write_bytes_per_s"] == kinds["burst_write_bytes_per_s"] == "measured"
        assert gaps == () and "one_core_watts" not in kinds


@pytest.mark.slow
def test_with_a_meter_they_are_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "_RUN_S", 0.02)
    source = ScriptedSource(period_s=0.01)
    source.value = 5.0
    kinds, gaps = measured(tmp_path, source)
    assert {kinds[key] for key in ("static_watts", "compute_watts", "one_core_watts", "moving_watts")} == {"measured"}
    assert kinds["write_joules_per_byte"] == "measured" and gaps == ()


@pytest.mark.slow
def test_a_meter_that_dies_leaves_the_figures_as_they_would_be_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "_RUN_S", 0.02)
    source = ScriptedSource(period_s=0.01)
    source.value = "no answer"
    kinds, gaps = measured(tmp_path, source)
    assert kinds["static_watts"] == "assumed" and kinds["read_joules_per_byte"] == "derived"
    assert len(gaps) == 1 and "no answer" in gaps[0]


@pytest.mark.slow
def test_rates_of_this_machine_are_plausible() -> None:
    assert this_machine._matrix_rate() > 1e8 and this_machine._copy_rate() > 1e8


@pytest.mark.slow
def test_a_boards_figures_name_the_power_mode_and_the_kinds_of_cores(tmp_path: Path) -> None:
    (tmp_path / "var/lib/nvpmodel").mkdir(parents=True)
    (tmp_path / "var/lib/nvpmodel/status").write_text("pmode:0002\n")
    machine(tmp_path / "sys", RK3588)
    board, _ = measure_board(
        tmp_path,
        1,
        given={},
        source=None,
        progress=lambda share: None,
        max_written_bytes=2 * WINDOW_BYTES,
        root=tmp_path,
    )
    assert board.title.endswith(", 4 x Cortex-A76 at 2.4 GHz + 4 x Cortex-A55 at 1.8 GHz, power mode 2")
    assert board.numbers["flops_per_s"].source.endswith("1 thread(s), power mode 2")
