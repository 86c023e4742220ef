"""A project: one Python file that makes a model for a board, with its data.

A directory with project.py, which defines `make_project() -> Project`. `port-agent mcu compile DIRECTORY` runs it and
writes the compiled model and its data; `port-agent mcu simulate DIRECTORY` goes on and adapts the model on a
simulated board. Only these two import torch; everything after them works on the files they wrote.
"""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from agent.mcu.board.catalogue import find_board
from agent.mcu.errors import BoardJobError
from agent.mcu.model import InputFormat, write_manifest
from agent.mcu.trainer import TrainSettings
from agent.system.atomic_file import write_atomically

if TYPE_CHECKING:
    from planner.mcu.fates.choose import FittedMemory
    from planner.mcu.scheme_fit import FittedModel

SCRIPT = "project.py"
JOB = "job.json"


@dataclass(frozen=True, slots=True, eq=False)
class Project:
    """What project.py gives: a compiled model, data in real units, and settings.

    The model: planner.mcu.compile.CompiledModel.

    `train_x` and `test_x` are float [N, C, H, W] or [N, C, W]; labels are class numbers.
    """

    model: Any
    train_x: NDArray[np.float32]
    train_y: NDArray[np.int64]
    test_x: NDArray[np.float32]
    test_y: NDArray[np.int64]
    classes: tuple[str, ...] = ()
    board: str = "qemu-m4f"
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of agent.mcu.trainer.TrainSettings."""
    note: str = ""
    """One line that says what is learnt from what."""


def load_project(folder: Path) -> Project:
    """Run project.py of `folder` and return its project.

    Raises BoardJobError if it has none.
    """
    script = folder / SCRIPT
    if not script.is_file():
        raise BoardJobError(f"{folder} has no {SCRIPT}; see agent/mcu/project.py for what to put there")
    spec = importlib.util.spec_from_file_location("port_agent_project", script)
    if spec is None or spec.loader is None:
        raise BoardJobError(f"{script} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    project = module.make_project()
    if not isinstance(project, Project):
        raise BoardJobError(
            f"make_project() of {script} returned {type(project).__name__}, not agent.mcu.project.Project"
        )
    return project


def fit_project(
    project: Project, ram_bytes: int, progress: Callable[[int, int], None]
) -> tuple[Project, "FittedModel"]:
    """Return the project with what it trains chosen by contribution analysis.

    Within `ram_bytes` of model memory.

    The analysis trains on the project's own `train_x` with the job's epochs and learning rate.
    """
    from planner.mcu.host import UpdateOptions
    from planner.mcu.scheme import Limits
    from planner.mcu.scheme_fit import fit_scheme

    known = TrainSettings(**{k: v for k, v in project.settings.items() if k in ("epochs", "learning_rate")})
    fitted = fit_scheme(
        project.model, project.model.quantize_input(project.train_x), project.train_y, Limits(ram_bytes),
        epochs=known.epochs, options=UpdateOptions(known.learning_rate), progress=progress,
    )  # fmt: skip
    return replace(project, model=fitted.model), fitted


def hold_project(project: Project, ram_bytes: int, deadline_s: float | None) -> tuple[Project, "FittedMemory"]:
    """Return the project with its training step planned for `ram_bytes` of model memory and a time per sample.

    What is trained stays the same, and so does every bit of the result. Seconds and joules are those of the file that
    the project's board names.

    Raises ArenaBudgetError where the step does not fit, BoardDeadlineError where it is not fast enough.
    """
    from planner.mcu.compile import recompile
    from planner.mcu.fates.choose import FitOptions
    from planner.mcu.fates.core_costs import core_costs

    core = core_costs(find_board(project.board).figures)
    model, fitted = recompile(project.model, FitOptions(ram_bytes, core, deadline_s))
    return replace(project, model=model), fitted


def write_project(project: Project, out: Path) -> Path:
    """Write tables, manifest, data and job.json into `out`; return the job file."""
    project.model.write(out)
    shape, tensor = project.model.quantized.graph.input_shape, project.model.quantized.input
    form = InputFormat(shape.channels, shape.height, shape.width, float(tensor.scale), int(tensor.zero))
    write_manifest(out, form, project.classes)
    np.savez(out / "train.npz", x=project.model.quantize_input(project.train_x), y=project.train_y)
    np.savez(out / "test.npz", x=project.model.quantize_input(project.test_x), y=project.test_y)
    job = {
        "v": 1, "model": ".", "data": "train.npz", "test": "test.npz", "board": project.board, "held_out_every": 0,
        "settings": project.settings,
    }  # fmt: skip
    write_atomically(out / JOB, json.dumps(job, indent=1).encode() + b"\n")
    return out / JOB
