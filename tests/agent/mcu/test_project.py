"""A project's script: what it must define, and the files that it becomes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from port_agent.mcu.board.board_errors import BoardJobError
from port_agent.mcu.job import read_job
from port_agent.mcu.project import JOB, Project, check_project, hold_project, load_project, refuse_wear, write_project
from port_planner.mcu.core_costs import core_costs
from port_planner.mcu.page_costs import PageMedium, page_costs
from port_planner.script_loading import imports_kept

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "imu_gestures"


@pytest.fixture(scope="module")
def example() -> Project:
    """The example's project, whose net is trained when it is loaded."""
    return load_project(EXAMPLE)


def test_a_folder_without_a_script_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BoardJobError, match=r"has no project\.py"):
        load_project(tmp_path)


@pytest.mark.process
def test_a_script_that_gives_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "project.py").write_text("def make_project():\n    return 7\n")
    with pytest.raises(BoardJobError, match=r"returned int, not port_agent\.mcu\.project\.Project"):
        load_project(tmp_path)


@pytest.mark.process
def test_a_script_finds_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "statistics.py").write_text("mean = 7\n")
    (tmp_path / "project.py").write_text("from statistics import mean\ndef make_project():\n    return mean\n")
    with imports_kept(), pytest.raises(BoardJobError, match="returned int"):
        load_project(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": {"epoch": 3}}, "unknown field `epoch`"),
        ({"settings": {"learning_rate": -1.0}}, "learning_rate is -1.0"),
        ({"board": "pdp-11"}, "there is no board 'pdp-11'"),
        ({"classes": ("one",)}, "1 names for 3 classes"),
        ({"train_x": np.zeros((88, 64, 6))}, r"train_x has shape \[88, 64, 6\] .* real values \[N, 6, 1, 64\]"),
        ({"test_x": np.full((2, 6, 64), np.nan)}, "test_x has values that are NaN"),
        ({"train_x": np.full((88, 6, 64), 200, np.uint8)}, "train_x: 100% of the values lie outside"),
        ({"train_x": np.zeros((0, 6, 64)), "train_y": np.zeros(0)}, "train_x has no samples"),
        ({"train_y": np.arange(3)}, "88 samples in train_x and 3 labels"),
        ({"train_y": np.full(88, 3)}, r"train_y has labels 3..3, but the model has 3 outputs"),
        ({"train_y": np.zeros((88, 192))}, r"labels of shape \[88, 192\] .* this model learns classes"),
    ],
)
def test_what_does_not_belong_to_the_model_is_refused(example: Project, changes: dict[str, Any], message: str) -> None:
    check_project(example)
    with pytest.raises(BoardJobError, match=message):
        check_project(replace(example, **changes))


@pytest.mark.slow
def test_a_project_becomes_a_job_that_names_its_files(example: Project, tmp_path: Path) -> None:
    project = replace(example, settings={"epochs": 3})
    out = tmp_path / "out"
    out.mkdir()
    job = json.loads(write_project(project, out).read_text())
    assert (job["board"], job["settings"], job["held_out_every"]) == (project.board, {"epochs": 3}, 0)
    assert all((out / job[name]).exists() for name in ("model", "data", "test")) and (out / JOB).is_file()
    trained = np.load(out / job["data"])
    assert trained["codes"].dtype == np.int8 and len(trained["codes"]) == len(project.train_x)
    assert trained["y"].tolist() == project.train_y.tolist()
    write_project(replace(project, test_x=project.test_x[:0], test_y=project.test_y[:0]), out)
    assert read_job(out).test is None


def test_a_job_that_would_wear_the_medium_out_is_refused(example: Project) -> None:
    project = replace(example, settings={"epochs": 1_000})
    _, kept = hold_project(project, 1_000_000, None, "nor")
    paged = replace(kept, page_costs=page_costs("nrf52840", PageMedium.NOR, core_costs("nrf52840")))
    refuse_wear(project, kept)
    refuse_wear(project, paged)
    longer = replace(project, settings={"epochs": 3_000})
    samples = 3_000 * len(project.train_x)
    with pytest.raises(BoardJobError, match=rf"trains {samples:,} samples.*blocks of nor, which endure 100,000 writes"):
        refuse_wear(longer, paged)
    refuse_wear(longer, replace(kept, page_costs=page_costs("nrf52840", PageMedium.SD, core_costs("nrf52840"))))
