"""A board's job as a file: paths beside it, defaults, and every wrong field named."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from port_agent.mcu.board.board_errors import BoardJobError
from port_agent.mcu.job import BoardJobSpec, load_data, make_link, read_job, with_settings
from port_agent.mcu.protocol.board_model import read_model
from port_agent.mcu.protocol.effects import Rule
from port_agent.mcu.trainer import TrainSettings
from tests.agent.mcu.small_model import make_samples, write_model


def written(folder: Path, **content: Any) -> Path:
    path = folder / "job.json"
    path.write_text(json.dumps({"v": 1, "model": "m", **content}))
    return path


def test_paths_are_beside_the_file_and_the_rest_keeps_its_default(tmp_path: Path) -> None:
    assert read_job(written(tmp_path)) == BoardJobSpec(model=tmp_path / "m")
    spec = read_job(written(tmp_path, data="d.npz", test="/elsewhere/t.npz", out="w.bin", board="posix", serial="A1"))
    assert (spec.data, spec.test, spec.out) == (tmp_path / "d.npz", Path("/elsewhere/t.npz"), tmp_path / "w.bin")
    assert (spec.board, spec.selector.serial, spec.selector.path) == ("posix", "A1", None)


def test_settings_are_those_of_the_trainer(tmp_path: Path) -> None:
    spec = read_job(written(tmp_path, settings={"epochs": 3, "learning_rate": 1, "rule": "q88", "steps": 40}))
    assert spec.settings == TrainSettings(epochs=3, learning_rate=1.0, rule=Rule.Q88, steps=40)
    assert with_settings(spec, epochs=None, seed=9).settings == TrainSettings(3, 1.0, Rule.Q88, seed=9, steps=40)


def test_a_directory_is_its_job_or_a_model_with_the_defaults(tmp_path: Path) -> None:
    assert read_job(tmp_path) == BoardJobSpec(model=tmp_path)
    written(tmp_path, simulate=True)
    assert read_job(tmp_path) == BoardJobSpec(model=tmp_path / "m", simulate=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"v": 2}, "has version 2, expected 1; write it again"),
        ({"v": 2, "new": True}, "has version 2, expected 1"),
        ({"v": "1"}, r"Expected `int`, got `str` - at `\$.v`"),
        ({"model": None}, r"Expected `str`, got `null` - at `\$.model`"),
        ({"sumulate": True}, "unknown field `sumulate`"),
        ({"simulate": "no"}, r"Expected `bool`, got `str` - at `\$.simulate`"),
        ({"held_out_every": "five"}, "Expected `int`"),
        ({"held_out_every": -2}, "Expected `int` >= 0"),
        ({"settings": {"epoch": 3}}, "unknown field `epoch`"),
        ({"settings": {"epochs": 2.5}}, r"Expected `int`, got `float` - at `\$.settings.epochs`"),
        ({"settings": {"scaling": "no"}}, "Expected `bool`"),
        (
            {"settings": {"rule": "random"}},
            "there is no rounding rule 'random'; use stochastic, nearest, truncate, q88",
        ),
        ({"settings": {"epochs": 0}}, "epochs is 0; give at least 1"),
        ({"settings": {"steps": -1}}, "steps is -1; give at least 1"),
        ({"settings": {"learning_rate": -0.1}}, "learning_rate is -0.1; give a number from 0"),
        ({"settings": {"seed": 1 << 32}}, "seed is 4294967296; give a number from 0 to 4294967295"),
    ],
)
def test_each_wrong_field_is_named(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    with pytest.raises(BoardJobError, match=message):
        read_job(written(tmp_path, **content))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"7", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "job.json").write_bytes(content)
    with pytest.raises(BoardJobError, match=r"cannot use the job .*job.json"):
        read_job(tmp_path / "job.json")
    with pytest.raises(BoardJobError, match="No such file"):
        read_job(tmp_path / "gone.json")


def test_samples_for_evaluation_are_given_or_held_out(tmp_path: Path) -> None:
    model = read_model(write_model(tmp_path / "m"))
    rows, labels = make_samples(20)
    for name, count in (("d.npz", 20), ("t.npz", 7)):
        np.savez(
            tmp_path / name, codes=np.frombuffer(b"".join(rows[:count]), np.int8).reshape(count, -1), y=labels[:count]
        )
    with pytest.raises(BoardJobError, match=r"the job has no data; give --data with a .npz file or an inbox directory"):
        load_data(BoardJobSpec(tmp_path / "m"), model)
    for changes, sizes in (
        ({"held_out_every": 5}, (16, 4)),
        ({"held_out_every": 0}, (20, 0)),
        ({"test": tmp_path / "t.npz"}, (20, 7)),
    ):
        found = load_data(BoardJobSpec(tmp_path / "m", tmp_path / "d.npz", **changes), model)
        assert (len(found[0]), len(found[1])) == sizes


def test_a_simulated_board_has_a_port_of_its_own(tmp_path: Path) -> None:
    model = read_model(write_model(tmp_path / "m"))
    spec = BoardJobSpec(tmp_path / "m", port="/dev/ttyACM7")
    assert "/dev/ttyACM7" in str(vars(make_link(spec, model, None)).values())
    assert "/dev/ttyACM7" not in str(vars(make_link(spec, model, tmp_path / "pty")).values())
