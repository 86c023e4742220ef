"""The command line, on a simulated board."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.cli import main
from agent.mcu.board.simulate import Simulator
from tests.agent.mcu.small_model import make_samples, write_model

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "imu_gestures"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data file for the small model."""
    rows, labels = make_samples(300)
    np.savez(tmp_path / "d.npz", x=np.frombuffer(b"".join(rows), np.int8).reshape(300, -1), y=np.array(labels))
    return tmp_path / "d.npz"


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> list[Any]:
    assert main(["mcu", *words, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_list_asks_the_port(simulator: Simulator, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ((first, *_),) = run_json(capsys, "list", "--port", str(simulator.port))
    assert (first["board"], first["model"], first["problem"]) == ("posix", "small", None)
    main(["mcu", "list", "--port", str(simulator.port)])
    assert "posix" in capsys.readouterr().out


def test_list_shows_a_port_without_our_firmware(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ((first, *_),) = run_json(capsys, "list", "--port", str(tmp_path / "nothing"))
    assert first["board"] is None and "lost the connection" in first["problem"]


def test_train_eval_logs(
    simulator: Simulator, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = (str(model), "--data", str(data), "--port", str(simulator.port))
    state = str(tmp_path / "state")
    lines = run_json(capsys, "train", *where, "--epochs", "2", "--lr", "0.02", "--state-dir", state)
    assert lines[-1]["event"] == "finished" and lines[-1]["steps"] == 480
    assert lines[-1]["accuracy_after"] > 0.9 > lines[-1]["accuracy_before"]
    (evaluation,) = run_json(capsys, "eval", *where)
    assert evaluation == {
        "accuracy": lines[-1]["accuracy_after"],
        "loss": pytest.approx(evaluation["loss"]),
        "samples": 60,
    }
    (log,) = run_json(capsys, "logs", "--port", str(simulator.port))
    assert log["trained"] == 480 and log["frame_errors"] == 0
    lines = run_json(capsys, "train", *where, "--epochs", "3", "--lr", "0.02", "--state-dir", state)
    assert [line["step"] for line in lines if line["event"] == "step"][-1] == 720  # went on where it was
    assert lines[-1]["steps"] == 720


def test_tables_for_people(
    simulator: Simulator, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = str(tmp_path / "state")
    assert (
        main(["mcu", "train", str(model), "--data", str(data), "--port", str(simulator.port), "--state-dir", state])
        == 0
    )
    shown = capsys.readouterr()
    assert "accuracy" in shown.out and "240 training steps on posix" in shown.out
    main(["mcu", "logs", "--port", str(simulator.port)])
    assert "240 trained" in capsys.readouterr().out
    main(["mcu", "list", "--boards"])
    assert "micro:bit" in capsys.readouterr().out


def test_wrong_model_is_refused(
    simulator: Simulator, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = str(write_model(tmp_path / "other", "other"))
    assert main(["mcu", "train", other, "--data", str(data), "--port", str(simulator.port)]) == 2
    assert "reflash with: port-agent mcu flash --board posix" in capsys.readouterr().err


def test_too_large_a_model_is_refused(tmp_path: Path, built: Any, capsys: pytest.CaptureFixture[str]) -> None:
    built("qemu-m0")
    large = str(write_model(tmp_path / "large", extra_arena_bytes=40_000))
    assert main(["mcu", "build", large, "--board", "qemu-m0"]) == 2
    assert "does not fit" in capsys.readouterr().err


def test_flash_prints_the_command(model: Path, tmp_path: Path, built: Any, capsys: pytest.CaptureFixture[str]) -> None:
    built("qemu-m0")
    copy = write_model(tmp_path / "copy")
    assert main(["mcu", "flash", str(copy), "--board", "microbit", "--dry-run"]) == 0
    assert "pyocd flash -t nrf51822" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("board", ["posix", "qemu-m4f"])
def test_example_adapts(board: str, built: Any, capsys: pytest.CaptureFixture[str]) -> None:
    built(board)
    lines = run_json(capsys, "simulate", str(EXAMPLE), "--board", board)
    assert lines[-1]["accuracy_after"] > lines[-1]["accuracy_before"] + 0.3


@pytest.mark.long
def test_compile_finds_what_to_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = run_json(capsys, "compile", str(EXAMPLE), "--sparse-update", "4K", "-o", str(tmp_path / "model"))
    scheme = found["scheme"]
    assert scheme["ram_bytes"] == found["arena_bytes"] + found["parameter_bytes"] <= 4096
    assert scheme["proven"] and scheme["measured"] > scheme["untrained"]
    assert (tmp_path / "model" / "model.c").is_file()
    assert main(["mcu", "compile", str(EXAMPLE), "--sparse-update", "500", "-o", str(tmp_path / "none")]) == 2
    assert "500" in capsys.readouterr().err


UNTRAINED = """
import numpy as np

from agent.mcu.project import Project
from planner.mcu import compile_model
from planner.mcu.zoo import DigitsNet


def make_project():
    x, y = np.random.default_rng(0).random((8, 1, 8, 8), np.float32), np.arange(8)
    return Project(compile_model(DigitsNet().eval(), x, name="digits", simd=False), x, y, x, y, board="qemu-m0")
"""


def test_compile_plans_for_less_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "project.py").write_text(UNTRAINED)
    (kept,) = run_json(capsys, "compile", str(tmp_path), "-o", str(tmp_path / "kept"))
    needed = kept["arena_bytes"] + kept["parameter_bytes"]
    words = ["mcu", "compile", str(tmp_path), "-o", str(tmp_path / "less")]
    (less,) = run_json(capsys, *words[1:], "--ram", str(needed - 1600))
    assert less["plan"]["ram_bytes"] <= needed - 1600 and less["plan"]["banded"] > 0 and less["plan"]["overhead"] > 0
    assert main([*words, "--ram", str(needed), "--deadline", "1ms"]) == 2
    assert "the deadline is 0.001 s" in capsys.readouterr().err
    assert main([*words, "--deadline", "50ms"]) == 2 and "give --ram too" in capsys.readouterr().err
    assert (
        main([*words, "--ram", "1K"]) == 2
        and "recomputation was found to bring that down to" in capsys.readouterr().err
    )
