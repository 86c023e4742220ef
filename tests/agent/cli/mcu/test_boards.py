"""Boards and firmware on the command line, on a simulated board."""

from pathlib import Path

import pytest

from port_agent.cli import main
from port_agent.mcu.board.simulate import Simulator
from tests.agent.cli.mcu.command import run_json
from tests.agent.mcu.simulated_board import require_board_tools
from tests.agent.mcu.small_model import write_model

pytestmark = pytest.mark.process


def test_list_asks_the_port(simulator: Simulator, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ((first, *_),) = run_json(capsys, "list", "--port", str(simulator.port))
    assert (first["board"], first["model"], first["problem"]) == ("posix", "small", None)
    main(["mcu", "list", "--port", str(simulator.port)])
    assert "posix" in capsys.readouterr().out


def test_list_shows_a_port_without_our_firmware(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ((first, *_),) = run_json(capsys, "list", "--port", str(tmp_path / "nothing"))
    assert first["board"] is None and "lost the connection" in first["problem"]


def test_too_large_a_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require_board_tools()
    large = str(write_model(tmp_path / "large", extra_arena_bytes=40_000))
    assert main(["mcu", "build", large, "--board", "qemu-m0"]) == 2
    assert "does not fit" in capsys.readouterr().err


def test_flash_prints_the_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require_board_tools()
    copy = write_model(tmp_path / "copy")
    assert main(["mcu", "flash", str(copy), "--board", "microbit", "--dry-run"]) == 0
    assert "pyocd flash -t nrf51822" in capsys.readouterr().out
