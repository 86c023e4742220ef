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


def test_train_a_part_of_the_samples(
    simulator: Simulator, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(model), "--data", str(data), "--port", str(simulator.port), "--epochs", "1"]
    for number, steps in ((1, 80), (3, 80)):
        state = str(tmp_path / f"state{number}")
        lines = run_json(capsys, *words, "--shard", f"{number}/3", "--state-dir", state)
        assert lines[-1]["steps"] == steps
    assert main(["mcu", *words, "--shard", "2/3", "--state-dir", state]) == 2
    assert "began with part 3/3" in capsys.readouterr().err


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
import torch

from agent.mcu.project import Project
from planner.mcu import compile_model
from planner.mcu.zoo import DigitsNet


def make_project():
    torch.manual_seed(0)
    x, y = np.random.default_rng(0).random((8, 1, 8, 8), np.float32), np.arange(8)
    return Project(compile_model(DigitsNet().eval(), x, name="digits", simd=False), x, y, x, y, board="qemu-m0")
"""


def test_compile_gives_weights_a_low_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "project.py").write_text(UNTRAINED)
    words = ["compile", str(tmp_path), "-o", str(tmp_path / "out")]
    (plain,) = run_json(capsys, *words)
    (wide,) = run_json(capsys, *words, "--q88")
    assert wide["parameter_bytes"] == plain["parameter_bytes"] + 2432  # weights of the digits net
    assert json.loads((tmp_path / "out" / "job.json").read_text())["settings"]["rule"] == "q88"
    (valued,) = run_json(capsys, *words, "--q88", "--ram", "9K", "--page", "psram", "--per-joule")
    assert valued["plan"]["ram_bytes"] <= 9216


def test_compile_gives_low_bytes_to_as_many_layers_as_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "project.py").write_text(UNTRAINED)
    words = ["compile", str(tmp_path), "-o", str(tmp_path / "out"), "--q88", "--ram"]
    (plain,) = run_json(capsys, *words[:4])
    needed = plain["arena_bytes"] + plain["parameter_bytes"]
    (whole,) = run_json(capsys, *words, str(needed + 2432))
    assert whole["without_low_bytes"] == []
    assert main(["mcu", *words, "6000", "--page", "psram"]) == 0
    said = capsys.readouterr().out
    assert "no low bytes, which do not fit: " in said and "6,000 B" not in said
    (some,) = run_json(capsys, *words, "6000", "--page", "psram")
    assert len(some["without_low_bytes"]) == said.split("no low bytes")[1].split(";")[0].count(",")
    assert some["plan"]["ram_bytes"] <= 6000


def test_compile_chooses_by_accuracy_per_joule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "project.py").write_text(UNTRAINED)
    words = ["compile", str(tmp_path), "-o", str(tmp_path / "out"), "--per-joule"]
    (found,) = run_json(capsys, *words, "--ram", "7000", "--page", "psram")
    chosen = found["per_joule"]
    assert chosen["chosen"] in [candidate["origin"] for candidate in chosen["candidates"]]
    assert found["plan"]["ram_bytes"] <= 7000
    assert main(["mcu", *words, "--ram", "7000", "--page", "psram"]) == 0
    assert "chosen: " + chosen["chosen"] in (shown := capsys.readouterr().out) and "one standard error" in shown
    assert main(["mcu", *words]) == 2 and "give --ram too" in capsys.readouterr().err
    assert main(["mcu", *words, "--ram", "9K", "--dynamic-update", "0.5"]) == 2
    assert "give one of them" in capsys.readouterr().err


def test_compile_chooses_channels_and_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "project.py").write_text(UNTRAINED)
    words = ["compile", str(tmp_path), "-o", str(tmp_path / "out"), "--dynamic-update", "0.25"]
    (chosen,) = run_json(capsys, *words)
    needed = chosen["arena_bytes"] + chosen["parameter_bytes"]
    (paged,) = run_json(capsys, *words, "--ram", str(needed - 2000), "--page", "psram")
    plan = paged["plan"]
    assert plan["ram_bytes"] <= needed - 2000 and plan["medium"] == "psram" and plan["paged"] > 0 == plan["banded"]
    assert plan["written_bytes"] > 0 and "largest gradients" in (tmp_path / "out" / "model.c").read_text()
    assert main(["mcu", *words[:4], "--dynamic-update", "2"]) == 1 and "up to 1" in capsys.readouterr().err
    assert main(["mcu", *words[:4], "--page", "sd"]) == 2 and "give --ram too" in capsys.readouterr().err
    assert main(["mcu", *words, "--ram", str(needed - 2000), "--page", "psram"]) == 0
    said = capsys.readouterr().out
    assert "pages read" in said and "two copies of what is trained" in said and "written per sample" in said


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
    assert main([*words, "--ram", "1K"]) == 2 and "the least that was found is" in capsys.readouterr().err
