"""Training on the command line, on a simulated board."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from port_agent.cli import main
from port_agent.mcu.board.simulate import Simulator
from port_agent.mcu.protocol.board_model import InputFormat, write_manifest
from port_agent.mcu.snapshot import BEST_NAME, read_snapshot
from tests.agent.cli.mcu.command import run_json
from tests.agent.mcu.small_model import make_samples, write_model

pytestmark = pytest.mark.process

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "imu_gestures"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data file for the small model."""
    rows, labels = make_samples(300)
    np.savez(tmp_path / "d.npz", codes=np.frombuffer(b"".join(rows), np.int8).reshape(300, -1), y=np.array(labels))
    return tmp_path / "d.npz"


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
    lines = run_json(capsys, "train", *where, "--steps", "1000", "--epochs", "9", "--lr", "0.02", "--state-dir", state)
    (evaluation,) = run_json(capsys, "eval", *where)
    assert lines[-1]["steps"] == 1000  # ends inside an epoch, and says how good it is there
    assert lines[-1]["accuracy_after"] == evaluation["accuracy"]
    lines = run_json(capsys, "train", *where, "--steps", "1100", "--epochs", "9", "--lr", "0.02", "--state-dir", state)
    (evaluation,) = run_json(capsys, "eval", *where)
    assert (lines[-1]["accuracy_before"], lines[-1]["accuracy_after"]) == (None, evaluation["accuracy"])


def test_the_best_weights_are_the_best_on_the_same_samples(
    simulator: Simulator, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, labels = make_samples(60)
    other = np.frombuffer(b"".join(rows), np.int8).reshape(60, -1)
    np.savez(tmp_path / "wrong.npz", codes=other, y=(np.array(labels) + 1) % 4)
    words = [
        "train",
        str(model),
        "--data",
        str(data),
        "--test",
        str(data),
        "--port",
        str(simulator.port),
        "--lr",
        "0.02",
    ]
    words += ["--state-dir", str(tmp_path / "state")]
    run_json(capsys, *words)
    before = read_snapshot(tmp_path / "state" / BEST_NAME)
    run_json(capsys, *words, "--epochs", "2", "--test", str(tmp_path / "wrong.npz"))
    after = read_snapshot(tmp_path / "state" / BEST_NAME)
    assert before is not None and before.accuracy is not None and before.accuracy > 0.9
    assert after is not None and after.accuracy is not None and after.accuracy < 0.1


def test_values_that_are_clipped_are_said(
    simulator: Simulator, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(model, tmp_path / "model"))
    write_manifest(model, InputFormat(2, 3, 4, 0.5, 0), ())
    x = np.zeros((10, 2, 3, 4))
    x[:3, 0, 0, 0] = 1000
    np.savez(tmp_path / "x.npz", x=x, y=np.arange(10) % 4)
    where = (str(model), "--data", str(tmp_path / "x.npz"), "--port", str(simulator.port))
    for action in ("infer", "eval", "train"):
        assert main(["mcu", action, *where]) == 0
        assert "3 values lie outside the range" in capsys.readouterr().err


def test_a_position_belongs_to_data_seed_and_rate(
    simulator: Simulator, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, labels = make_samples(200, seed=1)
    other = tmp_path / "other.npz"
    np.savez(other, codes=np.frombuffer(b"".join(rows), np.int8).reshape(200, -1), y=np.array(labels))
    words = ["train", str(model), "--port", str(simulator.port), "--state-dir", str(tmp_path / "state"), "--lr", "0.02"]
    assert run_json(capsys, *words, "--data", str(data))[-1]["steps"] == 240
    for changed in (
        ["--data", str(other)],
        ["--data", str(data), "--seed", "2"],
        ["--data", str(data), "--lr", "0.01"],
    ):
        assert main(["mcu", *words, *changed]) == 2
        assert "give --keep-weights to continue from the learnt weights" in capsys.readouterr().err
    lines = run_json(capsys, *words, "--data", str(other), "--keep-weights")
    assert lines[-1]["steps"] == 160 and [line["step"] for line in lines if line["event"] == "step"][-1] == 160
    assert main(["mcu", *words, "--data", str(other)]) == 0
    assert "all 160 samples are already trained" in capsys.readouterr().out


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


@pytest.mark.long
@pytest.mark.parametrize("board", ["posix", "qemu-m4f"])
def test_example_adapts(board: str, built: Any, capsys: pytest.CaptureFixture[str]) -> None:
    built(board)
    lines = run_json(capsys, "simulate", str(EXAMPLE), "--board", board)
    assert lines[-1]["accuracy_after"] > lines[-1]["accuracy_before"] + 0.3
