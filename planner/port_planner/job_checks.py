"""Checks of a training job before anything expensive: settings, hooks, and columns of samples."""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from port_planner.base.bounds import MAX_WHOLE
from port_planner.base.errors import of_the_program, place_of_function
from port_planner.column_file import Column, as_column
from port_planner.ir.allowed_operators import OPTIMIZERS
from port_planner.ir.bundle.manifest import BucketSize
from port_planner.ir.bundle.safetensors_io import STORED_DTYPES
from port_planner.ir.lowering.optimizer_scalars import is_supported
from port_planner.job import Bucket, JobError, TrainingJob
from port_planner.torch_compat.loading import is_compiled
from port_planner.torch_compat.optimizers import all_step_hooks, hooks_before_steps, is_scheduled_step

_SHOWN = 3
"""Maximum number of tensors named in a message."""


@dataclass(frozen=True, slots=True)
class JobSamples:
    """A bucket's columns, and the size of its batches."""

    columns: list[Column]
    batch_size: int

    @property
    def size(self) -> BucketSize:
        """How many there are, and in a batch."""
        return BucketSize(self.columns[0].shape[0], self.batch_size)


def checked_samples(job: TrainingJob) -> list[JobSamples]:
    """Return the columns of each of a job's buckets; raise JobError for settings or data that cannot be trained on."""
    _check_settings(job)
    found: list[JobSamples] = []
    for bucket in (Bucket(job.data, job.batch_size), *job.buckets):
        what = f"buckets[{len(found) - 1}]" if found else "data"
        columns = checked_columns(bucket.data, what)
        if not columns:
            raise JobError(f"{what} is missing in the job; give one tensor per argument of the batch")
        count = columns[0].shape[0]
        if not 1 <= bucket.batch_size <= count:
            remedy = f"choose between 1 and {count}" if count else "give at least one"
            raise JobError(f"batch_size is {bucket.batch_size}, but {what} has {count} rows; {remedy}")
        if found and len(columns) != len(found[0].columns):
            raise JobError(
                f"{what} has {len(columns)} columns, but data has {len(found[0].columns)}; give the same number"
            )
        found.append(JobSamples(columns, bucket.batch_size))
    if isinstance(job.scheduler, ReduceLROnPlateau):
        _check_plateau(job, sum(samples.size.batches(drop_last=job.drop_last) for samples in found))
    return found


def _check_plateau(job: TrainingJob, per_epoch: int) -> None:
    """Raise JobError for what does not go with learning rates that follow an epoch's mean loss; the
    epoch has this many batches.
    """
    rates = [group["lr"] for group in job.optimizer.param_groups]
    what = ""
    if type(job.scheduler) is not ReduceLROnPlateau or job.scheduler.last_epoch:
        what = "one that has made steps, or a class of its own: give a new ReduceLROnPlateau"
    elif job.scheduler.optimizer is not job.optimizer or len(job.scheduler.min_lrs) != len(rates):
        what = "one of another optimizer, or of fewer parameter groups: make it of the job's optimizer"
    elif job.eval_data:
        what = "one with eval_data, whose loss it does not follow: leave eval_data out"
    elif per_epoch % job.accumulate:
        what = f"epochs of {per_epoch} batches that end within an update of {job.accumulate}: choose a batch_size that makes whole updates"
    elif not is_supported(job.optimizer) or any(isinstance(rate, torch.Tensor) for rate in rates):
        what = f"the optimizer {type(job.optimizer).__name__}, or a learning rate that is a tensor: use one of {', '.join(OPTIMIZERS)}, and a number"
    if what:
        raise JobError(
            "a bundle lowers learning rates where the mean loss of an epoch's batches stops to improve "
            f"(ReduceLROnPlateau), but it cannot take {what}, or train with `port-agent exec`"
        )


def checked_columns(data: Sequence[Any], what: str) -> list[Column]:
    """Return `what` as columns with one row per sample, contiguous on the CPU or in files.

    Raises JobError for invalid data.
    """
    if isinstance(data, str) or not isinstance(data, Sequence):
        raise JobError(f"{what} is a {type(data).__name__}; give a list with one tensor per argument of the batch")
    columns = list[Column]()
    for i, column in enumerate(data):
        try:
            columns.append(as_column(column))
        except (TypeError, ValueError, RuntimeError) as error:
            raise JobError(
                f"column {i} of {what} is not an array of numbers ({error}); give a tensor or an array"
            ) from error
        kind = str(columns[-1].dtype).removeprefix("torch.")
        if kind not in STORED_DTYPES:
            raise JobError(f"column {i} of {what} is {kind}; give one of {', '.join(STORED_DTYPES)}")
        if not columns[-1].shape:
            raise JobError(f"column {i} of {what} is a single number; give a tensor with one row per sample")
    lengths = {c.shape[0] for c in columns}
    if len(lengths) > 1:
        raise JobError(
            f"the columns of {what} have different lengths {sorted(lengths)}; they must have one row per sample"
        )
    return [c.detach().cpu().contiguous() if isinstance(c, torch.Tensor) else c for c in columns]


def _check_settings(job: TrainingJob) -> None:
    """Raise JobError for settings that no bundle can represent, before anything expensive starts."""
    for name, kind in (("model", torch.nn.Module), ("optimizer", torch.optim.Optimizer)):
        if not isinstance(getattr(job, name), kind):
            raise JobError(
                f"the {name} is a {type(getattr(job, name)).__name__}; give a {kind.__module__}.{kind.__name__}"
            )
    if not callable(job.loss_fn):
        raise JobError(f"loss_fn is a {type(job.loss_fn).__name__}; give a function of the model and a batch")
    _check_not_compiled(job)
    _check_trained(job)
    _check_no_gradients(job)
    _check_hooks(job.optimizer)
    _check_methods(job.optimizer)
    clip = job.clip_grad_norm
    if clip is not None and (isinstance(clip, bool) or not isinstance(clip, int | float) or not 0 < clip < math.inf):
        raise JobError(f"clip_grad_norm is {clip!r}; it must be a number above 0, or None")
    mu = job.proximal_mu
    if mu is not None and (isinstance(mu, bool) or not isinstance(mu, int | float) or not 0 < mu < math.inf):
        raise JobError(f"proximal_mu is {mu!r}; it must be a number above 0, or None")
    for name, least in (("batch_size", 1), ("accumulate", 1), ("epochs", 1), ("seed", 0)):
        value = getattr(job, name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < MAX_WHOLE:
            raise JobError(f"{name} is {value!r}; it must be a whole number, at least {least} and below 2**62")
    if clip is not None:
        _check_clipped(job)
    if job.scheduler is not None and not isinstance(job.scheduler, torch.optim.lr_scheduler.LRScheduler):
        raise JobError(
            f"the scheduler is a {type(job.scheduler).__name__}; give one of torch.optim.lr_scheduler, or None"
        )


def _check_not_compiled(job: TrainingJob) -> None:
    """Raise JobError if the model or loss was passed to torch.compile, whose kernels a bundle does not have."""
    found = [name or "the model" for name, module in job.model.named_modules() if is_compiled(module)]
    found += ["the loss function"] * is_compiled(job.loss_fn)
    if found:
        raise JobError(
            f"{found[0]} is compiled (torch.compile), and its kernels differ in the last digits from a bundle's "
            "operators: leave torch.compile out, or train with `port-agent exec --guard-only`, which follows no "
            "operators"
        )


def _check_trained(job: TrainingJob) -> None:
    """Raise JobError if the optimizer changes tensors outside the model, which the bundle's result would lack."""
    of_model = set(job.model.parameters())
    others = [p for group in job.optimizer.param_groups for p in group["params"] if p not in of_model]
    if others:
        shapes = [str(list(parameter.shape)) for parameter in others]
        shown = ", ".join(shapes[:_SHOWN] + ["..."] * (len(shapes) > _SHOWN))
        raise JobError(
            f"the optimizer trains tensors that the model does not have ({shown}): make them part of the model"
        )


def _check_no_gradients(job: TrainingJob) -> None:
    """Raise JobError if trained parameters already have gradients: those of the first step would be added to them."""
    left = [
        name
        for name, parameter in job.model.named_parameters()
        if parameter.grad is not None and (parameter.grad.is_sparse or bool(parameter.grad.any()))
    ]
    if left:
        shown = ", ".join(left[:_SHOWN] + ["..."] * (len(left) > _SHOWN))
        raise JobError(
            f"{shown} has a gradient before the first step, which that step's would be added to: call "
            "optimizer.zero_grad() before the job is returned"
        )


def _check_clipped(job: TrainingJob) -> None:
    """Raise JobError if the clipped norm includes gradients that no update uses."""
    trained = {p for group in job.optimizer.param_groups for p in group["params"]}
    others = [name for name, p in job.model.named_parameters() if p.requires_grad and p not in trained]
    if others:
        shown = ", ".join(others[:_SHOWN] + ["..."] * (len(others) > _SHOWN))
        raise JobError(
            f"clip_grad_norm uses the norm of all gradients of the model, but the optimizer does not train {shown}: "
            "pass them to the optimizer, or freeze them (requires_grad_(False))"
        )


def _check_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raise JobError if user code that is not recorded runs with each optimizer step: it may
    change the trained parameters.
    """
    for hook in hooks_before_steps(optimizer):
        raise JobError(
            f"{place_of_function(hook)} is a hook before the optimizer's steps, which a bundle does not run: change "
            "gradients in hooks on the parameters (register_hook), or train with `port-agent exec`, which runs the "
            "program itself"
        )
    for hook in (hook for hook in all_step_hooks() if not _of_a_library(hook)):
        raise JobError(
            f"{place_of_function(hook)} is a hook on the steps of all optimizers, which a bundle does not run: "
            "register what follows a step on the job's optimizer (register_step_post_hook), or train with "
            "`port-agent exec`, which runs the program itself"
        )


def _check_methods(optimizer: torch.optim.Optimizer) -> None:
    """Raise JobError if the program's own code replaces a method of the optimizer: no bundle runs that code."""
    step: Any = vars(optimizer).get("step")
    if is_scheduled_step(step):
        step = inspect.unwrap(step, stop=lambda function: not is_scheduled_step(function))
        step = None if step is type(optimizer).step else step
    own_class_zeroes = type(optimizer).zero_grad if type(optimizer).zero_grad is not Optimizer.zero_grad else None
    for name, method in (("step", step), ("zero_grad", vars(optimizer).get("zero_grad") or own_class_zeroes)):
        code = getattr(method, "__code__", None)
        if method is None or (code is not None and not of_the_program(code.co_filename)):
            continue
        remedy = (
            "define step() in a class of its own"
            if name == "step"
            else "let the loss or hooks on the parameters do what it does"
        )
        raise JobError(
            f"{place_of_function(method)} stands for {name}() of the optimizer {type(optimizer).__name__}, and a "
            f"bundle does not run it: {remedy}, or train with `port-agent exec`, which runs the program itself"
        )


def _of_a_library(hook: Any) -> bool:
    """Return whether a hook belongs to an installed library, or to the tools that follow a program during planning."""
    code = getattr(hook, "__code__", None)
    return code is not None and not (of_the_program(code.co_filename) or code.co_filename.startswith("<"))
