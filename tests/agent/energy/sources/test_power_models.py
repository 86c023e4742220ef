"""Which board this is, and the board file that says what it draws."""

from collections.abc import Callable
from pathlib import Path

import pytest

from port_agent.energy.sources.estimated import CpuTime, EstimatedSource, LoadProbe, generic_model
from port_agent.energy.sources.power_models import board_model, detect_board, model_of, power_with
from port_agent.energy.sources.power_source import Kind
from port_agent.energy.sources.tegrastats import parse_line
from port_planner.ir.boards import BOARDS, BoardError


@pytest.mark.parametrize(
    ("model", "board"),
    [
        ("Raspberry Pi 4 Model B Rev 1.4\0", "pi4b"),
        ("Raspberry Pi 5 Model B Rev 1.0\0", "pi5"),
        ("NVIDIA Jetson Orin Nano Developer Kit\0", "jetson-orin"),
        ("NVIDIA Jetson AGX Orin Developer Kit\0", "jetson-agx-orin"),
        ("Jetson AGX Orin Developer Kit\0", "jetson-agx-orin"),
        ("NVIDIA Orin NX Developer Kit\0", None),
        ("Raspberry Pi 3 Model B Plus Rev 1.3\0", None),
    ],
)
def test_device_tree_names_the_board(tmp_path: Path, model: str, board: str | None) -> None:
    path = tmp_path / "proc/device-tree/model"
    path.parent.mkdir(parents=True)
    path.write_text(model)
    assert detect_board(tmp_path) == board


def test_pi_4_is_estimated_from_its_board_file(tmp_path: Path) -> None:
    path = tmp_path / "proc/device-tree/model"
    path.parent.mkdir(parents=True)
    path.write_text("Raspberry Pi 4 Model B Rev 1.4\0")
    model = model_of(root=tmp_path)
    assert (model.static_watts, model.full_watts) == (3.0, 6.25)
    assert model.read_joules_per_byte == pytest.approx(3.3e-9)
    assert "board file pi4b" in EstimatedSource(model, LoadProbe(lambda: CpuTime(0, 0))).info.covers


def test_unknown_board_says_that_and_what_is_guessed(tmp_path: Path) -> None:
    path = tmp_path / "sys/class/dmi/id/product_name"
    path.parent.mkdir(parents=True)
    path.write_text("Toaster 3000\n")
    model = model_of(root=tmp_path)
    info = EstimatedSource(model, LoadProbe(lambda: CpuTime(0, 0))).info
    assert info.kind is Kind.ESTIMATED
    assert info.covers.startswith(f"unknown board (Toaster 3000): 1.5 W idle to {model.full_watts:g} W at full load")
    assert "a guess: 1.5 W, and 1 W for each of" in info.covers and "too low for desktops" in info.covers
    assert "nameless" in generic_model(4).name


def test_agx_orin_idles_as_recorded(shared: Callable[[str], str]) -> None:
    """The board file's idle power is that of the recorded kit, by our own parser."""
    lines = shared("tegrastats/agx_orin_l4t35_36_llm_then_idle.log").splitlines(keepends=True)
    idle = min(parse_line(line).total.watts for line in lines if "VDD_GPU_SOC" in line)
    assert board_model("jetson-agx-orin").static_watts == pytest.approx(idle, abs=0.05)


def test_unknown_board_file_is_refused() -> None:
    with pytest.raises(BoardError, match="choose one of"):
        board_model("pi9")


def test_the_first_core_may_draw_more_than_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    shipped = (BOARDS / "pi4b.toml").read_text()
    plain = power_with(1, board="pi4b")
    assert plain.compute_watts == pytest.approx(3.25 / 4)
    own = tmp_path / "mine.toml"
    own.write_text(
        shipped + '\n[one_core_watts]\nvalue = 1.5\nunit = "W"\nkind = "measured"\nsource = "here"\n'
        '[moving_watts]\nvalue = 2.6\nunit = "W"\nkind = "measured"\nsource = "here"\n'
    )
    watts = [power_with(threads, board=str(own)).compute_watts for threads in (1, 2, 4, 8)]
    assert watts == pytest.approx([1.5, 1.5 + 1.75 / 3, 3.25, 3.25])
    assert power_with(1, board=str(own)).moving_share == pytest.approx(0.8)
    assert power_with(2, 2.0, 6.0, board=str(own)).compute_watts == pytest.approx(2.0), (
        "the user's own figures come first"
    )
