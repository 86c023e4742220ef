"""A job's learning-rate schedule as a table, which a bundle repeats without the scheduler's code.

So a schedule may depend on the count of updates alone. Tabulating refuses a schedule that uses weights,
gradients or the optimizer's state. If it uses other things in the program, running the program's own steps
shows this (`difference`).
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.lr_scheduler import ReduceLROnPlateau

from port_planner.base.errors import CaptureError, of_the_program, place_of_function, program_line
from port_planner.capture.rerecord_check import other_generators_untouched
from port_planner.ir.lowering.optimizer_scalars import hyperparameters
from port_planner.ir.plateau import PlateauRule
from port_planner.ir.spelled_schedule import SpelledSchedule, spelled_numbers
from port_planner.job import JobError, ScriptError, TrainingJob, own_code
from port_planner.kept_parts import state_unread
from port_planner.torch_compat.contentless import has_contents
from port_planner.torch_compat.modes import OperatorMode, pytree
from port_planner.torch_compat.optimizers import note_step

Schedule = tuple[tuple[Mapping[str, Any], ...], ...]
"""Hyperparameters that change over the updates, for each update and each parameter group."""

_REPEATED = 3
"""Updates that are tabulated a second time."""

_REMEDY = (
    "a bundle's schedule is a table made before training: let it depend on the count of updates alone, or train with "
    "`port-agent exec`, which runs the program itself"
)


def plateau_of(job: TrainingJob) -> PlateauRule | None:
    """Return the rule by which the job's learning rates follow the losses of epochs, if its
    scheduler is a ReduceLROnPlateau.
    """
    one = job.scheduler
    if not isinstance(one, ReduceLROnPlateau):
        return None
    kind: Literal["min", "max"] = "max" if one.mode == "max" else "min"
    against: Literal["rel", "abs"] = "abs" if one.threshold_mode == "abs" else "rel"
    least = tuple(map(float, one.min_lrs))
    return PlateauRule(kind, one.factor, one.patience, one.threshold, against, one.cooldown, least, one.eps)


def spelled(optimizer: torch.optim.Optimizer, schedule: Schedule) -> SpelledSchedule:
    """Return the schedule of an optimizer that has made no step as text."""
    rates = tuple(spelled_numbers({"lr": hyperparameters(group)["lr"]}) for group in optimizer.param_groups)
    return SpelledSchedule(rates, tuple(tuple(map(spelled_numbers, row)) for row in schedule))


def difference(schedule: SpelledSchedule, optimizer: torch.optim.Optimizer, update: int) -> str:
    """Return how the optimizer's hyperparameters before this update, from 0 on, differ from the
    schedule; "" if they do not.
    """
    return schedule.difference([hyperparameters(group) for group in optimizer.param_groups], update)


def tabulated(job: TrainingJob, updates: int, further: int) -> Schedule:
    """Tabulate the hyperparameters that the job's scheduler changes, for this many `updates`.

    `further`: up to which update they are tabulated, as far as the scheduler goes. Optimizer and scheduler are put back
    afterwards. Raises CaptureError for a schedule that depends on more than the count of updates, JobError for one that
    adds parameter groups, and ScriptError for what the scheduler raises.
    """
    if job.scheduler is None or isinstance(job.scheduler, ReduceLROnPlateau):
        return ()
    rows = _steps(job, updates, further)
    again = _steps(job, min(_REPEATED, len(rows)), 0)
    if rows[: len(again)] != again:
        raise CaptureError(
            f"{_place_of(job.scheduler)}: the scheduler gives other numbers when its steps run again, as one that "
            f"counts its calls would: {_REMEDY}"
        )
    changing = [{k for row in rows for k in row[g] if row[g][k] != rows[0][g][k]} for g in range(len(rows[0]))]
    return tuple(tuple({k: row[g][k] for k in sorted(changing[g])} for g in range(len(rows[0]))) for row in rows)


def _steps(job: TrainingJob, updates: int, further: int) -> list[list[dict[str, Any]]]:
    """Return the groups' hyperparameters before each update, as `tabulated` does."""
    optimizer, scheduler = job.optimizer, job.scheduler
    before = [dict(g) for g in optimizer.param_groups]
    contents = [{k: v.clone() for k, v in g.items() if isinstance(v, torch.Tensor)} for g in before]
    state = copy.deepcopy(scheduler.state_dict())
    note_step(optimizer)
    rows = []
    try:
        with other_generators_untouched("the scheduler"):
            for update in range(max(1, updates, further)):
                row = [hyperparameters(g) for g in optimizer.param_groups]
                try:
                    with own_code(f"the scheduler's step {update + 1} of the {updates} that are planned (--epochs)"):
                        step_watched(job)
                except ScriptError:
                    if update < updates:
                        raise
                    break
                except CaptureError as error:
                    raise CaptureError(f"{error}: {_REMEDY}") from error
                if len(optimizer.param_groups) != len(before):
                    raise JobError(
                        f"the scheduler's step {update + 1} adds a parameter group, and a bundle's groups stay the "
                        "same: give the optimizer all groups at its start, with a learning rate of 0 until then"
                    )
                rows.append(row)
    finally:
        del optimizer.param_groups[len(before) :]
        for group, old, held in zip(optimizer.param_groups, before, contents, strict=True):
            group.update(old)
            for key, content in held.items():
                old[key].copy_(content)  # a scheduler writes into a learning rate that is a tensor
        scheduler.load_state_dict(state)
    return rows


def _place_of(scheduler: Any) -> str:
    """Return where the program's own code of a scheduler is: its functions, or its class's."""
    kind = type(scheduler)
    for function in (*getattr(scheduler, "lr_lambdas", ()), kind.get_lr, kind.step):
        code = getattr(function, "__code__", None)
        if code is not None and of_the_program(code.co_filename):
            return place_of_function(function)
    return str(kind.__name__)


def step_watched(job: TrainingJob) -> None:
    """Step the job's scheduler; one that follows losses lowers the rates, as if an epoch had ended without improvement.

    Raises CaptureError where it uses a tensor that training changes, or draws random numbers.
    """
    rule, groups = plateau_of(job), job.optimizer.param_groups
    if rule is not None:
        for group, rate in zip(groups, rule.lowered([float(group["lr"]) for group in groups]), strict=True):
            group["lr"] = rate
        return
    with state_unread(job.optimizer, "the scheduler"), _Watch(job.model):
        job.scheduler.step()


class _Watch(OperatorMode):
    """Refuses what a scheduler does with random numbers, or with tensors of the model or of a step."""

    def __init__(self, model: torch.nn.Module) -> None:
        initialise: Any = super().__init__
        initialise()
        held = [*model.parameters(), *model.buffers()]
        held += [p.grad for p in held if p.is_leaf and p.grad is not None]
        self._references = [StorageWeakRef(t.untyped_storage()) for t in held if t.layout is torch.strided]
        self._of_training = {reference.cdata for reference in self._references}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise CaptureError(f"{program_line()}: the scheduler draws random numbers ({func})")
        if any(isinstance(part, torch.Tensor) and self._changes(part) for part in pytree.tree_leaves((args, kwargs))):
            raise CaptureError(f"{program_line()}: the scheduler uses tensors that training changes ({func})")
        return func(*args, **(kwargs or {}))

    def _changes(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided or not has_contents(tensor):
            return True
        return StorageWeakRef(tensor.untyped_storage()).cdata in self._of_training
