"""A project's script: what it must define, and the files that it becomes."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agent.mcu.errors import BoardJobError
from agent.mcu.project import JOB, load_project, write_project

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "imu_gestures"


def test_a_folder_without_a_script_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BoardJobError, match=r"has no project\.py"):
        load_project(tmp_path)


def test_a_script_that_gives_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "project.py").write_text("def make_project():\n    return 7\n")
    with pytest.raises(BoardJobError, match=r"returned int, not agent\.mcu\.project\.Project"):
        load_project(tmp_path)


def test_a_project_becomes_a_job_that_names_its_files(tmp_path: Path) -> None:
    project = replace(load_project(EXAMPLE), settings={"epochs": 3})
    out = tmp_path / "out"
    out.mkdir()
    job = json.loads(write_project(project, out).read_text())
    assert (job["board"], job["settings"], job["held_out_every"]) == (project.board, {"epochs": 3}, 0)
    assert all((out / job[name]).exists() for name in ("model", "data", "test")) and (out / JOB).is_file()
    trained = np.load(out / job["data"])
    assert trained["x"].dtype == np.int8 and len(trained["x"]) == len(project.train_x)
    assert trained["y"].tolist() == project.train_y.tolist()
