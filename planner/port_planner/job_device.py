"""The device of a job's model, and moving the job to another one."""

from collections.abc import Iterable

import torch

from port_planner.ir.device_kinds import CPU, accelerator_of
from port_planner.ir.torch_device import kinds_of, known_kinds
from port_planner.job import JobError, TrainingJob


def kind_of_job(job: TrainingJob) -> str:
    """Return the kind of device that the job's model lies on.

    Raises CaptureError for a device that no plan can name, and JobError for a model on two of them.
    """
    try:
        return accelerator_of(kinds_of((*job.model.parameters(), *job.model.buffers())))
    except ValueError as error:
        raise JobError(
            f"the model is on two devices ({error}); move it to one, such as model.to('cpu'), before the job is returned"
        ) from error


def move(job: TrainingJob, kind: str) -> None:
    """Move the job's model and optimizer to a kind of device, unless they are already there.

    The weights keep the initial values that they got on the original device. Raises JobError if the device is absent
    or cannot hold the model.
    """
    if kind_of_job(job) == kind:
        return
    before: list[torch.Tensor] = list(job.model.parameters())
    try:
        if kind not in known_kinds():
            raise JobError(f"unknown device {kind!r}; give one of {', '.join(known_kinds())}")
        job.model.to(kind)
    except (RuntimeError, AssertionError, TypeError) as error:
        # without the device torch asserts; Apple's has no float64
        raise JobError(
            f"the model cannot be moved to {kind} ({str(error).partition(chr(10))[0]}); give a --device that this machine and "
            f"its torch {torch.__version__} have, see `port-agent doctor`"
        ) from error
    optimizer = job.optimizer
    new: dict[torch.Tensor, torch.Tensor] = dict(zip(before, job.model.parameters(), strict=True))
    state = {new.get(p, p): values for p, values in optimizer.state.items()}
    optimizer.state.clear()
    optimizer.state.update(state)
    for group in optimizer.param_groups:
        group["params"] = [new.get(p, p) for p in group["params"]]
    optimizer.load_state_dict(optimizer.state_dict())  # its per-parameter state moves to the parameter's device


def on_device(batch: Iterable[torch.Tensor], kind: str) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a batch on the model's device."""
    return tuple(batch) if kind == CPU else tuple(t.to(kind) for t in batch)
