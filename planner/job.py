"""What a user hands over: a model, how it is trained, and the data.

`train.py` defines `port_job()` returning one.
"""

import contextlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.ir.errors import ExitCode, PortError, of_the_program

if TYPE_CHECKING:
    import torch

ENTRY = "port_job"


class JobError(PortError):
    """A training script that does not say what to train."""

    exit_code = ExitCode.IMPOSSIBLE


class ScriptError(JobError):
    """The user's own code raised.

    The message has the lines of that code that led there, and none of anyone else's.
    """

    def __init__(self, what: str, error: Exception) -> None:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if of_the_program(f.filename)]
        lines = "".join((*traceback.format_list(frames), *traceback.format_exception_only(error)))
        super().__init__(f"{what} failed; mend it and run the command again:\n{lines.rstrip()}")


@contextlib.contextmanager
def own_code(what: str) -> Iterator[None]:
    """Run code of the user's: whatever it raises becomes a ScriptError that says `what` failed.

    A PortError passes.
    """
    try:
        yield
    except PortError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise ScriptError(what, error) from error


@dataclass
class TrainingJob:
    """A training job.

    `loss_fn(model, *batch)` returns a scalar, or (loss, aux) where a one-element aux is shown as the metric. `data`: one
    tensor or array per argument of the batch, all with the same first dimension; a batch is some of its rows.
    `eval_data`: the same for evaluation. `scheduler`: a torch LR scheduler on `optimizer`, stepped once per update.
    `accumulate`: batches whose gradients are summed before an update (divide the loss by it yourself, as in plain
    PyTorch). `clip_grad_norm`: clip the global norm of the gradients to this. `allow_nonfinite`: go on where the loss or
    the state becomes NaN or infinite; else training stops there and keeps the last good checkpoint.
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


def load_job(script: Path) -> TrainingJob:
    """Return the job that `script` describes; its `port_job()` is called with no arguments.

    Raises JobError where there is no such script, no `port_job()` in it, or it returns something else, and ScriptError
    where it raises.
    """
    if not script.is_file():
        raise JobError(f"{script} does not exist; write a script with a function {ENTRY}() that returns a TrainingJob")
    spec = importlib.util.spec_from_file_location(script.stem, script)
    if spec is None or spec.loader is None:
        raise JobError(f"{script} is not a Python file; give a script that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.stem] = module
    sys.path.insert(0, str(script.parent.resolve()))
    with own_code(f"the script {script}"):
        spec.loader.exec_module(module)
    entry = getattr(module, ENTRY, None)
    if entry is None:
        raise JobError(
            f"{script} has no function {ENTRY}(); add one that returns planner.job.TrainingJob(model, loss_fn, optimizer, "
            "data, batch_size)"
        )
    with own_code(f"{ENTRY}() in {script}"):
        job = entry()
    if not isinstance(job, TrainingJob):
        raise JobError(f"{ENTRY}() in {script} returned {type(job).__name__}; it must return a planner.job.TrainingJob")
    if job.name == "job":
        job.name = script.stem
    return job
