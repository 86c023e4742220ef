"""What a user hands over: a model, how it is trained, and the data.

`train.py` defines `port_job()` which returns a job, or what `port_planner.job_sources` makes into a job.
"""

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from port_planner.base.errors import ExitCode, PortError, of_the_program
from port_planner.ir.bundle.pruning_schedule import Pruning

if TYPE_CHECKING:
    import torch


class JobError(PortError):
    """Raised when a training script does not define a valid job."""

    exit_code = ExitCode.IMPOSSIBLE


class ScriptError(JobError):
    """The user's own code raised an exception.

    The message shows the lines of that code alone that led to it.
    """

    def __init__(self, what: str, error: Exception) -> None:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if of_the_program(f.filename)]
        lines = "".join((*traceback.format_list(frames), *traceback.format_exception_only(error)))
        super().__init__(f"{what} failed; fix it and run the command again:\n{lines.rstrip()}")


@contextlib.contextmanager
def own_code(what: str) -> Iterator[None]:
    """Run the user's code: any exception becomes a ScriptError that says `what` failed.

    A PortError passes unchanged. Raises JobError where the code ends the process.
    """
    try:
        yield
    except PortError:
        raise
    except SystemExit as error:
        raise JobError(
            f"{what} ended the process (exit code {error.code}); it runs without command-line arguments: give each a default, and put what "
            'trains under `if __name__ == "__main__":`'
        ) from error
    except Exception as error:  # the user's code may raise anything
        raise ScriptError(what, error) from error


def with_model(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the loss as a function of the model and a batch.

    A module, or a function of torch.nn.functional, is one of the model's output and a target, the last of a batch,
    whose others are the model's arguments: `loss_fn(model(*inputs), target)`. Raises JobError, when it is called,
    for a batch without both.
    """
    import torch

    function = loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn
    if (
        not isinstance(function, torch.nn.Module)
        and getattr(function, "__module__", "") != torch.nn.functional.__name__
    ):
        return loss_fn

    def of_output(model: "torch.nn.Module", *batch: Any) -> Any:
        *inputs, target = batch
        if not inputs:
            name = getattr(function, "__name__", type(function).__name__)
            raise JobError(
                f"{name} as the loss takes the model's output and a target: a batch must be inputs and a target, not "
                f"one {type(target).__name__}; or give a function of the model and the batch that returns the loss"
            )
        return loss_fn(model(*inputs), target)

    return of_output


@dataclass(frozen=True, slots=True)
class Bucket:
    """Samples with their own step, because of their rows' shapes or a `loss_fn` other than the job's (a branch of it).

    `data`: one tensor or array (or `ColumnFile`) per argument of the batch.
    """

    data: Sequence[Any]
    batch_size: int
    loss_fn: Callable[..., Any] | None = None


@dataclass
class TrainingJob:
    """A training job.

    `loss_fn(model, *batch)` returns a scalar, or (loss, aux) where a one-element aux is shown as the metric;
    `nn.CrossEntropyLoss()` and its like, modules and functions of torch.nn.functional, are called with the model's
    output and the target (`with_model`). `data`: one tensor or array per argument of the batch, all with the same first
    dimension; a batch is some of its rows. `buckets`: further samples with rows of other shapes, such as longer texts,
    or of another branch; an epoch takes the batches of all in one order. `eval_data`: the same as `data` for
    evaluation. `scheduler`: a torch LR scheduler on `optimizer`, stepped once per update, or a ReduceLROnPlateau,
    stepped after each epoch with the mean loss of its batches. `accumulate`: batches whose gradients are summed before
    an update (divide the loss by it yourself, as in plain PyTorch). `clip_grad_norm`: clip the global norm of the
    gradients of `model.parameters()` to this. `allow_nonfinite`: go on where the loss or the state becomes NaN or
    infinite; else training stops there and keeps the last good checkpoint. `pruning`: weights of small magnitude are
    set to zero during training, which gives other results than plain PyTorch. `epochs`: passes over the data that it is
    meant for, where `plan --epochs` says nothing. `proximal_mu`: FedProx; mu / 2 times the squared distance from the
    weights that training, or a round of a federation, begins with is added to the loss of each update.
    """

    model: "torch.nn.Module"
    loss_fn: Callable[..., Any]
    optimizer: "torch.optim.Optimizer"
    data: Sequence[Any]
    batch_size: int
    eval_data: Sequence[Any] = ()
    scheduler: Any = None
    accumulate: int = 1
    clip_grad_norm: float | None = None
    seed: int = 0
    drop_last: bool = False
    allow_nonfinite: bool = False
    name: str = "job"
    pruning: Pruning | None = None
    buckets: Sequence[Bucket] = ()
    epochs: int = 1
    proximal_mu: float | None = None

    def __post_init__(self) -> None:
        self.loss_fn = with_model(self.loss_fn)
        self.buckets = [
            bucket if bucket.loss_fn is None else replace(bucket, loss_fn=with_model(bucket.loss_fn))
            for bucket in self.buckets
        ]
        if self.proximal_mu is not None:
            from port_planner.proximal import keep_start

            keep_start(self.model)

    def loss_of(self, bucket: int) -> Callable[..., Any]:
        """Return the loss function for training on batches of a bucket, 0 of `data`."""
        loss_fn = (self.buckets[bucket - 1].loss_fn if bucket else None) or self.loss_fn
        if self.proximal_mu is None:
            return loss_fn
        from port_planner.proximal import with_proximal_term

        return with_proximal_term(loss_fn, self.proximal_mu / self.accumulate)
