"""A project: one Python file that creates a model for a board, with its data.

A directory with project.py, which defines `make_project() -> Project`. `port-agent mcu compile DIRECTORY` runs it and
writes the compiled model and its data; `port-agent mcu simulate DIRECTORY` continues and adapts the model on a
simulated board. Only these two import torch; everything after them works on the files that they wrote.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from port_agent.mcu.board.board_errors import BoardJobError
from port_agent.mcu.board.catalogue import find_board
from port_agent.mcu.data import CODES, SCALE, ZERO, class_numbers
from port_agent.mcu.job import read_settings
from port_agent.mcu.project_weights import read_weights, take_weights, write_layers
from port_agent.mcu.protocol.board_model import InputFormat, write_manifest
from port_agent.mcu.trainer import TrainSettings
from port_agent.system.atomic_file import write_atomically
from port_planner.base.targets import with_targets
from port_planner.script_loading import load_script

if TYPE_CHECKING:
    from port_planner.mcu.choose_plan import FitOptions, FittedMemory
    from port_planner.mcu.compile import CompiledModel
    from port_planner.mcu.host import UpdateOptions
    from port_planner.mcu.report import LayerFigures
    from port_planner.mcu.schemes.fit import FittedModel
    from port_planner.mcu.schemes.rate import RateChoice
    from port_planner.mcu.schemes.value import Valuation

SCRIPT = "project.py"
JOB = "job.json"
REPORT_SAMPLES = 64
CALIBRATION_SAMPLES = 256
"""Number of samples of `train_x` from which the ranges of tensors are determined again."""
MAX_INT8_ERROR = 0.5
"""Largest error of the logits at which a model in int8 still counts as the same model."""
MIN_RATE_SAMPLES = 30
"""Least number of samples with which a learning rate is measured by default; a third of them is held out at a time."""
MAX_RATE_MACS = 2_000_000_000
"""Largest number of forward multiply-accumulates of such a job; twelve of these trainings take
about a minute on a host.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Project:
    """The result of project.py: a compiled model, data in real units, and settings.

    The model is a port_planner.mcu.compile.CompiledModel. `train_x` and `test_x` are float [N, C, H, W] or [N, C, W];
    labels are class numbers or, for a model compiled with Loss.MSE, targets [N, outputs].
    """

    model: Any
    train_x: NDArray[np.float32]
    train_y: NDArray[Any]
    test_x: NDArray[np.float32]
    test_y: NDArray[Any]
    classes: tuple[str, ...] = ()
    board: str = "qemu-m4f"
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of port_agent.mcu.trainer.TrainSettings."""
    note: str = ""
    """One line that describes what is learned from which data."""


def load_project(folder: Path) -> Project:
    """Run project.py of `folder` and return its project.

    Raises BoardJobError if it has none.
    """
    script = folder / SCRIPT
    if not script.is_file():
        raise BoardJobError(f"{folder} has no {SCRIPT}; see agent/port_agent/mcu/project.py for what to put there")
    project = load_script(script).make_project()
    if not isinstance(project, Project):
        raise BoardJobError(
            f"make_project() of {script} returned {type(project).__name__}, not port_agent.mcu.project.Project"
        )
    check_project(project)
    return project


def check_project(project: Project) -> None:
    """Raise BoardJobError if a project's settings, samples or labels do not match its model."""
    find_board(project.board)
    read_settings(project.settings)
    graph = project.model.quantized.graph
    if project.classes and len(project.classes) != graph.classes:
        raise BoardJobError(
            f"there are {len(project.classes)} names for {graph.classes} classes; name each class, or none"
        )
    form = input_format(project)
    if not len(project.train_x):
        raise BoardJobError("train_x has no samples; give those that the board is to learn from")
    for name in ("train", "test"):
        x, y = np.asarray(getattr(project, f"{name}_x")), np.asarray(getattr(project, f"{name}_y"))
        if x.shape[1:] not in form.shapes or x.dtype.kind not in "fiub":
            raise BoardJobError(
                f"{name}_x has shape {list(x.shape)} and type {x.dtype}; {graph.name} takes real values "
                f"[N, {form.channels}, {form.height}, {form.width}]"
            )
        if not np.isfinite(x).all():
            raise BoardJobError(f"{name}_x has values that are NaN or infinite; leave those samples out")
        form.refuse_clipped(form.clipped(x), x.size, f"{name}_x")
        if x.size:
            form.refuse_faint(float(np.abs(x.astype(np.float64)).max()), f"{name}_x")
        if graph.targets and len(x):
            with_targets(np.zeros((len(x), 0), np.int8), y, graph.targets)
        elif not graph.targets:
            _check_labels(y, name, len(x), graph.classes)


def _check_labels(y: NDArray[Any], name: str, samples: int, classes: int) -> None:
    labels = class_numbers(y, f"{name}_y")
    if len(labels) != samples:
        raise BoardJobError(f"{samples} samples in {name}_x and {len(labels)} labels in {name}_y; give as many of each")
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise BoardJobError(
            f"{name}_y has labels {labels.min()}..{labels.max()}, but the model has {classes} outputs; "
            "number the classes from 0"
        )


def count_clipped(project: Project) -> int:
    """Return how many values of `train_x` and `test_x` lie outside the range that the model was calibrated for."""
    form = input_format(project)
    return form.clipped(np.asarray(project.train_x)) + form.clipped(np.asarray(project.test_x))


def learning_rows(project: Project) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
    """Return the samples of `train_x` and their labels as the engine learns from them, with targets in the rows."""
    rows, targets = project.model.quantize_input(project.train_x), project.model.quantized.graph.targets
    if targets:
        return with_targets(rows, project.train_y, targets), np.zeros(len(rows), np.int64)
    return rows, class_numbers(project.train_y, "train_y")


def input_format(project: Project) -> InputFormat:
    """Return shape and scale of a project's model input."""
    shape, tensor = project.model.quantized.graph.input_shape, project.model.quantized.input
    return InputFormat(shape.channels, shape.height, shape.width, float(tensor.scale), int(tensor.zero))


def fit_project(
    project: Project, ram_bytes: int, progress: Callable[[int, int], None]
) -> tuple[Project, "FittedModel"]:
    """Return the project with its trained parameters chosen by contribution analysis, within `ram_bytes` of model
    memory.

    The analysis trains on the project's own `train_x` with the job's epochs and learning rate.
    """
    from port_planner.mcu.schemes.contributions import Limits
    from port_planner.mcu.schemes.fit import fit_scheme

    fitted = fit_scheme(
        project.model,
        *learning_rows(project),
        Limits(ram_bytes),
        epochs=_training(project).epochs,
        options=_update_options(project),
        progress=progress,
    )
    return _with_scheme(project, fitted.model), fitted


def weigh_project(project: Project, path: Path) -> Project:
    """Return the project with the weights of a file that `mcu export` wrote, or of a state_dict of its module.

    Raises BoardJobError where the file cannot be read, or does not fit.
    """
    return replace(project, model=take_weights(project.model, read_weights(path)))


def freeze_project(project: Project) -> Project:
    """Return the project compiled for inference only: nothing is trained, and no memory is reserved for it."""
    from port_planner.mcu.autodiff import SparseScheme
    from port_planner.mcu.compile import compile_quantized

    model = project.model
    frozen = compile_quantized(model.quantized, scheme=SparseScheme({}), simd=model.simd)
    return _with_scheme(project, frozen)


def grow_project(project: Project, growth: float) -> Project:
    """Return the project with ranges in which weights and activations may grow to `growth` times their
    largest value on `train_x`.

    Raises McuCompileError for less than 1.
    """
    from port_planner.mcu.compile import with_growth

    return replace(project, model=with_growth(project.model, project.train_x[:CALIBRATION_SAMPLES], growth))


def widen_project(project: Project) -> Project:
    """Return the project with a low byte for every trained weight, updated by the Q8.8 rule."""
    from port_planner.mcu.compile import with_low_bytes

    return replace(project, model=with_low_bytes(project.model), settings={**project.settings, "rule": "q88"})


def without_low_bytes(project: Project) -> list[str]:
    """Return the layers whose trained weights have no low bytes."""
    updates = project.model.scheme.updates
    return [name for name, update in updates.items() if update.rows and not update.q88]


def choose_project(project: Project, share: float) -> Project:
    """Return the project with only this share of each layer's channels trained in a step, those
    with the largest gradients.

    Raises McuCompileError for a share outside (0, 1].
    """
    from port_planner.mcu.compile import choose_channels

    return replace(project, model=choose_channels(project.model, share))


def hold_project(
    project: Project, ram_bytes: int, deadline_s: float | None, page: str | None = None
) -> tuple[Project, "FittedMemory"]:
    """Return the project with its training step planned for `ram_bytes` of model memory and a time per sample.

    `page`: psram, nor or sd, to which tensors may be paged; None: no paging.

    The trained set stays the same, and so does every bit of the result. Seconds and joules come from the file that
    the project's board names.

    Raises ArenaBudgetError if the step does not fit, and BoardDeadlineError if it is not fast enough. Raises
    MediumError if the board's file does not describe the medium, and BoardJobError if the job would wear it out.
    """
    from port_planner.mcu.compile import recompile

    model, fitted = recompile(project.model, _limits(project, ram_bytes, deadline_s, page))
    refuse_wear(project, fitted)
    return _with_scheme(project, model), fitted


def value_project(
    project: Project,
    ram_bytes: int,
    deadline_s: float | None,
    page: str | None,
    progress: Callable[[int, int], None],
) -> tuple[Project, "Valuation"]:
    """Return the project with its trained parameters chosen by accuracy per joule, planned as `hold_project` does.

    Candidates are the project's scheme, those of a few layers, and everything. Each is held to the same RAM by
    recomputation and pages, and trained on the project's own `train_x` with the job's epochs and learning rate. Raises
    what `hold_project` does if none fits.
    """
    from port_planner.mcu.schemes.value import value_candidates, value_schemes

    model = project.model
    found = value_schemes(
        model,
        *learning_rows(project),
        value_candidates(model.quantized.graph, {"as given": model.scheme}),
        _limits(project, ram_bytes, deadline_s, page),
        epochs=_training(project).epochs,
        options=_update_options(project),
        progress=progress,
    )
    refuse_wear(project, found.chosen.fitted)
    return _with_scheme(project, found.model), found


def measures_rate(project: Project) -> bool:
    """Return whether to measure a learning rate: the project sets none, and has enough samples for
    it, but not minutes' worth.
    """
    samples, graph = len(project.train_x), project.model.quantized.graph
    trains = project.model.memory.parameters.size_bytes > 0
    work = graph.macs * samples * _training(project).epochs
    return trains and "learning_rate" not in project.settings and samples >= MIN_RATE_SAMPLES and work <= MAX_RATE_MACS


def rate_project(project: Project, progress: Callable[[int, int], None]) -> tuple[Project, "RateChoice"]:
    """Return the project with the learning rate that recognises most held-out samples of its own.

    Raises BoardJobError for a model that trains nothing.
    """
    from port_planner.mcu.schemes.rate import choose_rate

    if not project.model.memory.parameters.size_bytes:
        raise BoardJobError("the model trains nothing, so it needs no learning rate; give it a scheme")
    found = choose_rate(
        project.model,
        *learning_rows(project),
        epochs=_training(project).epochs,
        options=_update_options(project),
        progress=progress,
    )
    return replace(project, settings=project.settings | {"learning_rate": found.best.rate}), found


def project_figures(project: Project) -> tuple["LayerFigures", ...]:
    """Return what each layer takes, on every core whose instructions were counted, and what it
    loses on `report_samples`.
    """
    from port_planner.mcu.core_costs import core_costs, counted_boards
    from port_planner.mcu.report import layer_figures

    return layer_figures(project.model, report_samples(project), [core_costs(name) for name in counted_boards()])


def int8_error(project: Project) -> float:
    """Return how far the logits of int8 are from those of float on the project's test samples, of what
    these differ among samples.

    The larger one of two measures: of all samples, and of a typical one. Without test samples, `train_x` is taken.
    """
    import torch

    from port_planner.mcu.quantize import logits_error, rounded_logits, run_float, typical_error

    quantized = project.model.quantized
    samples = np.ascontiguousarray(report_samples(project), np.float32)
    with torch.no_grad():
        exact = run_float(quantized.graph, torch.from_numpy(samples))[quantized.graph.ops[-1].name].flatten(1).numpy()
    found = rounded_logits(quantized, samples)
    return max(logits_error(found, exact), typical_error(found, exact))


def report_samples(project: Project) -> NDArray[np.float32]:
    """Return the samples that reports measure: the first of `test_x`, or of `train_x` if there are no test samples."""
    return (project.test_x if len(project.test_x) else project.train_x)[:REPORT_SAMPLES]


def refuse_wear(project: Project, fitted: "FittedMemory") -> None:
    """Raise BoardJobError if the job would wear out the page medium, because each sample
    writes the same blocks once.
    """
    costs, samples = fitted.page_costs, _training(project).epochs * len(project.train_x)
    if costs is not None and costs.endurance_cycles is not None and samples > costs.endurance_cycles:
        raise BoardJobError(
            f"the job trains {samples:,} samples, each of which writes the same blocks of {costs.medium.value}, which "
            f"endure {costs.endurance_cycles:,.0f} writes; train fewer samples, allow more RAM, or page to psram or sd"
        )


def _training(project: Project) -> TrainSettings:
    """Return the settings of the project's job for a test on the host."""
    return TrainSettings(**{k: v for k, v in project.settings.items() if k in ("epochs", "learning_rate")})


def _with_scheme(project: Project, model: "CompiledModel") -> Project:
    """Return the project with a model of another scheme: one without weights has no low bytes for the Q8.8 rule."""
    rule = {"rule": "stochastic"} if project.settings.get("rule") == "q88" and not model.q88 else {}
    return replace(project, model=model, settings=project.settings | rule)


def _update_options(project: Project) -> "UpdateOptions":
    from port_planner.mcu.host import UpdateOptions, UpdateRounding

    rule = str(project.settings.get("rule", "stochastic")).upper()
    if rule not in UpdateRounding.__members__:
        known = ", ".join(name.lower() for name in UpdateRounding.__members__)
        raise BoardJobError(f"there is no rounding rule {rule.lower()!r}; use {known}")
    return UpdateOptions(_training(project).learning_rate, UpdateRounding[rule], project.settings.get("scaling", True))


def _limits(project: Project, ram_bytes: int, deadline_s: float | None, page: str | None) -> "FitOptions":
    from port_planner.mcu.choose_plan import FitOptions
    from port_planner.mcu.core_costs import core_costs
    from port_planner.mcu.page_costs import PageMedium

    medium = None if page is None else PageMedium(page)
    return FitOptions(ram_bytes, core_costs(find_board(project.board).figures), deadline_s, page=medium)


def write_project(project: Project, out: Path) -> Path:
    """Write tables, manifest, data and job.json into `out`; return the job file."""
    form = input_format(project)
    project.model.write(out)
    write_manifest(out, form, project.classes)
    write_layers(out, project.model)
    for name, x, y in (("train", project.train_x, project.train_y), ("test", project.test_x, project.test_y)):
        codes = {CODES: project.model.quantize_input(x), SCALE: np.float32(form.scale), ZERO: np.int64(form.zero)}
        np.savez(out / f"{name}.npz", y=y, **codes)
    job = {
        "v": 1,
        "model": ".",
        "data": "train.npz",
        "test": "test.npz" if len(project.test_x) else None,
        "board": project.board,
        "held_out_every": 0,
        "settings": project.settings,
    }
    write_atomically(out / JOB, json.dumps(job, indent=1).encode() + b"\n")
    return out / JOB
