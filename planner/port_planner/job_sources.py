"""A script's `port_job()`, and what it may return instead of a `TrainingJob`.

It may return a `transformers.Trainer`, a LightningModule with its data, or model, loss, optimizer and any iterable of
batches. Libraries are recognised by class names: only libraries that the script itself imports are loaded.

A bundle shuffles its samples itself (by the job's seed, in each epoch) and stores every sample as the batches gave it
once. Data that changes with each read is rejected where that can be detected.
"""

import inspect
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from port_planner.base.errors import of_the_program
from port_planner.batches import JoinedBatches, as_columns
from port_planner.column_file import as_column, is_read_by_rows
from port_planner.ir.bundle.manifest import BucketSize
from port_planner.job import Bucket, JobError, TrainingJob, own_code, with_model
from port_planner.repeatable_data import check_repeatable, each_sample_once
from port_planner.script_loading import load_script

ENTRY = "port_job"
_PARTS = 4
"""Model, loss, optimizer, batches."""
_MODEL_AND_BATCH = 2
"""The number of arguments of a loss."""
_TRAINERS_OTHER_STEPS = ("fp16", "bf16", "torch_compile", "neftune_noise_alpha", "deepspeed", "label_smoothing_factor")
"""Settings of a Trainer that put more into its step than the model, the loss and the optimizer."""
_TRAINERS_STEP = ("train", "_inner_training_loop", "training_step", "_prepare_inputs", "get_batch_samples")
_TRAINERS_EVENTS = (
    "on_train_begin", "on_epoch_begin", "on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step",
    "on_step_end", "on_epoch_end",
)  # fmt: skip
_LIGHTNINGS_LOOP = (
    "configure_model", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start",
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "on_before_backward", "backward",
    "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step", "on_before_zero_grad",
    "optimizer_zero_grad", "lr_scheduler_step", "on_train_batch_end", "on_train_epoch_end",
)  # fmt: skip
"""Methods that a Lightning Trainer calls on a module before and between its training steps."""
_LIGHTNINGS_DATA = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_LIGHTNINGS_PROGRESS = ("current_epoch", "global_step")
_OF_ANY_OBJECT = frozenset(("__new__", "__repr__", "__getattribute__", "__getnewargs__", "__sizeof__", "__doc__"))
_ASKED = ("__str__", *(name for name in vars(int) if name.startswith("__") and name not in _OF_ANY_OBJECT))
"""Special methods of a number: without them, code can neither decide by the number nor compute with it."""
_EXEC = "or train with `port-agent exec`, which runs the program itself"


def load_job(script: Path, folder: Path | None = None) -> TrainingJob:
    """Return the job that `script` describes; its `port_job()` is called with no arguments. `folder`: as in `as_job`.

    Random generators are seeded again, so that another process that loads it gets the same job.

    Raises JobError where there is no such script, no `port_job()` in it, or it returns something else, and ScriptError
    where it raises.
    """
    if not script.is_file():
        raise JobError(f"{script} does not exist; write a script with a function {ENTRY}() that returns a TrainingJob")
    if script.suffix != ".py":
        raise JobError(f"{script} is not a Python file; give a script that ends in .py")
    _begin_generators()
    with _no_arguments(script):
        with own_code(f"the script {script}"):
            module = load_script(script)
        entry = getattr(module, ENTRY, None)
        if entry is None:
            raise JobError(
                f"{script} has no function {ENTRY}(); add one that returns port_planner.job.TrainingJob(model, loss_fn, optimizer, "
                "data, batch_size)"
            )
        with own_code(f"{ENTRY}() in {script}"):
            returned = entry()
    job = as_job(returned, folder)
    if job is None:
        raise JobError(
            f"{ENTRY}() in {script} returned {type(returned).__name__}; it must return a port_planner.job.TrainingJob, a "
            "transformers.Trainer, a LightningModule with its data, or model, loss, optimizer and batches"
        )
    if job.name == "job":
        job.name = script.stem
    return job


@contextmanager
def _no_arguments(script: Path) -> Iterator[None]:
    """Let a script that reads command-line arguments find none, not those of the command that loads it."""
    before, sys.argv = sys.argv, [str(script)]
    try:
        yield
    finally:
        sys.argv = before


def _begin_generators() -> None:
    """Seed the global generators so that a script draws the same numbers in each process that loads it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def as_job(returned: object, folder: Path | None = None) -> TrainingJob | None:
    """Return the result of `port_job()` as a job; None if its kind is not supported.

    The batches' contents are kept in files in `folder` while the job exists; None: the system's folder for temporary
    files.

    Raises JobError if it cannot be trained from a bundle, and ScriptError if its own code raises.
    """
    if isinstance(returned, TrainingJob):
        return _with_rows_kept(returned, folder)
    if _is_of(returned, "Trainer", "transformers"):
        return _of_trainer(returned, folder)
    if (
        isinstance(returned, tuple)
        and returned
        and _is_of(returned[0], "LightningModule", "lightning", "pytorch_lightning")
    ):
        return _of_lightning(*returned, folder=folder)
    if isinstance(returned, tuple) and len(returned) == _PARTS and isinstance(returned[0], torch.nn.Module):
        return _of_parts(*returned, folder=folder)
    return None


def _with_rows_kept(job: TrainingJob, folder: Path | None) -> TrainingJob:
    """Copy columns that are read row by row from elsewhere into files; the rest is left for `prepare` to check."""

    def kept(data: Any) -> Any:
        if not isinstance(data, list | tuple) or not any(map(is_read_by_rows, data)):
            return data
        return [as_column(column, folder) if is_read_by_rows(column) else column for column in data]

    with own_code("reading the rows of the data"):
        job.data, job.eval_data = kept(job.data), kept(job.eval_data)
        job.buckets = [replace(bucket, data=kept(bucket.data)) for bucket in job.buckets]
    return job


def _is_of(value: object, name: str, *packages: str) -> bool:
    return any(c.__name__ == name and c.__module__.partition(".")[0] in packages for c in type(value).__mro__)


def _of_parts(
    model: torch.nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Any],
    *,
    folder: Path | None,
) -> TrainingJob:
    """Return a job of model, loss, optimizer and batches."""
    check_repeatable(batches)
    of_model = with_model(loss_fn)
    batches, drop_last = each_sample_once(batches)

    def of_parts(model: torch.nn.Module, batch: Any) -> Any:
        return of_model(model, *(batch if isinstance(batch, list | tuple) else [batch]))

    loss = of_model if of_model is loss_fn and not _takes_parts(loss_fn) else of_parts
    return _job(model, loss, optimizer, as_columns(batches, folder), drop_last=drop_last)


def _takes_parts(loss_fn: Callable[..., Any]) -> bool:
    """Return whether a loss cannot be called with a model and one more argument."""
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):  # code that is not Python's
        return False
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [one for one in parameters if one.kind in by_place and one.default is inspect.Parameter.empty]
    return len(needed) > _MODEL_AND_BATCH


def _job(
    model: torch.nn.Module,
    loss: Callable[[Any, Any], Any],
    optimizer: torch.optim.Optimizer,
    kinds: Sequence[JoinedBatches],
    **settings: Any,
) -> TrainingJob:
    """Return a job with a bucket for each kind of batch; `loss(model, batch)` takes a batch in its own structure."""

    def on_rows(kind: JoinedBatches) -> Callable[..., Any]:
        return lambda model, *rows: loss(model, kind.rebuilt(*rows))

    first, *further = kinds
    return TrainingJob(
        model,
        on_rows(first),
        optimizer,
        first.columns,
        first.batch_size,
        buckets=[Bucket(kind.columns, kind.batch_size, on_rows(kind)) for kind in further],
        **settings,
    )


def _of_trainer(trainer: Any, folder: Path | None) -> TrainingJob:
    """Return a job with the Trainer's own loss, optimizer, schedule, clipping and accumulation.

    Its callbacks are not part of a bundle. Raises JobError for the program's own that run between steps.
    """
    arguments = trainer.args
    for part, names in (
        (trainer, _TRAINERS_STEP),
        *((one, _TRAINERS_EVENTS) for one in trainer.callback_handler.callbacks),
    ):
        own = next((name for name in names if _is_own(getattr(part, name, None))), None)
        if own is not None:
            raise JobError(
                f"{type(part).__name__}.{own} runs in each step of the Trainer, and a bundle does not run it: put what it does into the model or "
                f"compute_loss, leave it out if it only reports, {_EXEC}"
            )
    for name in _TRAINERS_OTHER_STEPS:
        if getattr(arguments, name, None):
            raise JobError(f"the Trainer's {name}={getattr(arguments, name)} changes its step; switch it off, {_EXEC}")
    accumulate = arguments.gradient_accumulation_steps
    counted = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    if accumulate > 1 and counted:
        raise JobError(
            f"the Trainer divides its loss by the labels of {accumulate} batches together (gradient_accumulation_steps), which "
            f"a bundle cannot do; set it to 1 with a larger per_device_train_batch_size, {_EXEC}"
        )
    with own_code("the Trainer's data"):
        loader = trainer.get_train_dataloader()
        each_sample_once(loader)
        plain = DataLoader(loader.dataset, trainer.args.train_batch_size, collate_fn=loader.collate_fn)
    check_repeatable(plain)
    kinds, drop_last = as_columns(plain, folder), arguments.dataloader_drop_last
    steps = sum(BucketSize(len(kind.columns[0]), kind.batch_size).batches(drop_last=drop_last) for kind in kinds)
    if steps % accumulate:
        raise JobError(
            f"the Trainer ends each epoch of {steps} batches with an update of {steps % accumulate} instead of {accumulate}, which a bundle "
            f"cannot do; choose a per_device_train_batch_size or a number of samples that makes whole updates, {_EXEC}"
        )
    updates = _trainers_updates(arguments, steps // accumulate)
    with own_code("the Trainer's optimizer"):
        trainer.create_optimizer_and_scheduler(updates)

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        (inputs,), items = trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))
        found: torch.Tensor = trainer.compute_loss(model, inputs, num_items_in_batch=items)
        return found if items is not None or accumulate == 1 else found / accumulate

    return _job(
        trainer.model.train(),
        loss,
        trainer.optimizer,
        kinds,
        scheduler=trainer.lr_scheduler,
        accumulate=accumulate,
        clip_grad_norm=arguments.max_grad_norm or None,
        seed=arguments.seed,
        drop_last=drop_last,
        epochs=math.ceil(updates * accumulate / steps),
    )


def _is_own(method: Any) -> bool:
    """Return whether a method is the program's, not a library's."""
    code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
    return code is not None and of_the_program(code.co_filename)


def _trainers_updates(arguments: Any, of_epoch: int) -> int:
    """Return how many updates a Trainer makes in total, given the number per epoch."""
    if arguments.max_steps > 0:
        return int(arguments.max_steps)
    return max(1, math.ceil(of_epoch * float(arguments.num_train_epochs)))


def _of_lightning(module: Any, data: Any, *, folder: Path | None) -> TrainingJob:
    """Return the job of a LightningModule with a DataModule, or with any iterable of batches; what a Lightning
    Trainer adds is not included.

    Raises JobError for a module that does something between its training steps, and its loss for one
    that asks which step it is.
    """
    _check_lightnings(module, "LightningModule", _LIGHTNINGS_LOOP)
    with own_code("the LightningModule's preparation"):
        module.prepare_data()
        module.setup("fit")
    if _is_of(data, "LightningDataModule", "lightning", "pytorch_lightning"):
        _check_lightnings(data, "LightningDataModule", _LIGHTNINGS_DATA)
        with own_code("the DataModule"):
            data.prepare_data()
            data.setup("fit")
            data = data.train_dataloader()
    if not module.automatic_optimization:
        raise JobError(
            f"the LightningModule optimizes by itself (automatic_optimization=False); return its parts, {_EXEC}"
        )
    with own_code("configure_optimizers()"):
        optimizer, scheduler = _configured(module.configure_optimizers())
    check_repeatable(data)
    data, drop_last = each_sample_once(data)

    number, kind = _BatchNumber(), _lightnings(module, "LightningModule")
    takes_number = len(inspect.signature(module.training_step).parameters) > 1

    def loss(module: Any, batch: Any) -> Any:
        with _progress_refused(kind):
            found = module.training_step(batch, *[number] * takes_number)
        return found["loss"] if isinstance(found, dict) else found

    return _job(module.train(), loss, optimizer, as_columns(data, folder), scheduler=scheduler, drop_last=drop_last)


def _lightnings(part: Any, name: str) -> type:
    """Return Lightning's own class that this is an instance of."""
    return next(
        c for c in type(part).__mro__ if c.__name__ == name and _is_of(part, name, c.__module__.partition(".")[0])
    )


def _check_lightnings(part: Any, kind: str, names: Iterable[str]) -> None:
    """Raise JobError if a module or its data overrides one of these methods of Lightning."""
    base = _lightnings(part, kind)
    for name in names:
        if getattr(type(part), name, None) is not getattr(base, name, None):
            raise JobError(
                f"{type(part).__name__}.{name} runs between the training steps, and a bundle does not run it: put what it does into training_step, "
                f"leave it out if it only reports, {_EXEC}"
            )


def _refused(what: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise JobError(
            f"training_step asks for {what}, by which each step may be another, and a bundle repeats one: count in a buffer of the module, "
            f"{_EXEC}"
        )

    return refuse


_BatchNumber = type("_BatchNumber", (), {name: _refused("the number of the batch") for name in _ASKED})
"""Stands for the number of the batch, which a step may hand on and must not use."""


@contextmanager
def _progress_refused(kind: type) -> Iterator[None]:
    """Raise JobError if code in the block asks a LightningModule for its epoch or step, which no Trainer counts."""
    before = {name: vars(kind)[name] for name in _LIGHTNINGS_PROGRESS}
    try:
        for name in before:
            setattr(kind, name, property(_refused(name)))
        yield
    finally:
        for name, own in before.items():
            setattr(kind, name, own)


def _configured(found: Any) -> tuple[torch.optim.Optimizer, Any]:
    """Return the one optimizer and the scheduler that `configure_optimizers()` gave; raise JobError
    if it gave anything else.
    """
    if isinstance(found, torch.optim.Optimizer):
        return found, None
    if isinstance(found, dict) and isinstance(found.get("optimizer"), torch.optim.Optimizer):
        scheduler = found.get("lr_scheduler")
        if scheduler is None:
            return found["optimizer"], None
        if isinstance(scheduler, dict) and scheduler.get("interval") == "step" and scheduler.get("frequency", 1) == 1:
            return found["optimizer"], scheduler["scheduler"]
        raise JobError(
            'the scheduler is stepped once per epoch; a bundle steps it once per update: set "interval": "step"'
        )
    raise JobError(
        'configure_optimizers() must return one optimizer, or {"optimizer": ..., "lr_scheduler": {"scheduler": ..., '
        f'"interval": "step"}}}}, for a bundle; {_EXEC}'
    )
