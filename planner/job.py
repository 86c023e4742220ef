"""What a user hands over: a model, how it is trained, and the data. `train.py` defines `port_job()` returning one."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.ir.errors import ExitCode, PortError

if TYPE_CHECKING:
    import torch

ENTRY = "port_job"


class JobError(PortError):
    """A training script that does not say what to train."""

    exit_code = ExitCode.IMPOSSIBLE


@dataclass
class TrainingJob:
    """A training job.

    `loss_fn(model, *batch)` returns a scalar, or (loss, aux) where a one-element aux is shown as the metric. `data`: one
    tensor or array per argument of the batch, all with the same first dimension; a batch is some of its rows.
    `eval_data`: the same for evaluation. `scheduler`: a torch LR scheduler on `optimizer`, stepped once per update.
    `accumulate`: batches whose gradients are summed before an update (divide the loss by it yourself, as in plain
    PyTorch). `clip_grad_norm`: clip the global norm of the gradients to this.
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
    name: str = "job"


def load_job(script: Path) -> TrainingJob:
    """Return the job that `script` describes; its `port_job()` is called with no arguments.

    Raises JobError where there is no such script, no `port_job()` in it, or it returns something else.
    """
    if not script.is_file():
        raise JobError(f"{script} does not exist; write a script with a function {ENTRY}() that returns a TrainingJob")
    spec = importlib.util.spec_from_file_location(script.stem, script)
    if spec is None or spec.loader is None:
        raise JobError(f"{script} is not a Python file; give a script that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.stem] = module
    sys.path.insert(0, str(script.parent.resolve()))
    spec.loader.exec_module(module)
    entry = getattr(module, ENTRY, None)
    if entry is None:
        raise JobError(
            f"{script} has no function {ENTRY}(); add one that returns planner.job.TrainingJob(model, loss_fn, optimizer, "
            "data, batch_size)"
        )
    job = entry()
    if not isinstance(job, TrainingJob):
        raise JobError(f"{ENTRY}() in {script} returned {type(job).__name__}; it must return a planner.job.TrainingJob")
    if job.name == "job":
        job.name = script.stem
    return job
