"""Train a script's job by a loop of this file's own: `python -m benchmarks.follow_zoo.plain_job SCRIPT STEPS OUT`.

Neither the planner nor the agent is called: the documented order of samples and of a step is implemented here a second
time. OUT receives the losses and the tensors of model and optimizer, as torch.save writes them.
"""

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from port_planner.job import TrainingJob


def main(script: str, steps: str, out: str) -> int:
    """Train and write the results; see the module's docstring."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(script).parent))
    job: TrainingJob = runpy.run_path(script)["port_job"]()
    losses = train(job, int(steps))
    torch.save({"losses": losses, "tensors": tensors_of(job), "names": [*job.model.state_dict()]}, out)
    return 0


def train(job: "TrainingJob", steps: int) -> list[str]:
    """Train for that many batches and return the losses, as hexadecimal floats."""
    if job.buckets:
        raise NotImplementedError("jobs with buckets")
    model, optimizer, scheduler = job.model, job.optimizer, job.scheduler
    plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    columns = [torch.as_tensor(column) for column in job.data]
    losses, in_epoch = list[str](), list[float]()
    torch.manual_seed(job.seed)
    for (ends_epoch, rows), step in zip(_batches(job, len(columns[0])), range(steps), strict=False):
        result = job.loss_fn(model, *(column[rows] for column in columns))
        loss = result[0] if isinstance(result, tuple) else result
        loss.backward()
        if (step + 1) % job.accumulate == 0:
            if job.clip_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_grad_norm)
            optimizer.step()
            if scheduler is not None and not plateau:
                scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item().hex())
        in_epoch.append(loss.item())
        if ends_epoch:
            if plateau:
                scheduler.step(sum(in_epoch) / len(in_epoch))
            in_epoch.clear()
    return losses


def _batches(job: "TrainingJob", samples: int) -> Iterator[tuple[bool, torch.Tensor]]:
    """Yield whether a batch is an epoch's last, and its rows, without end."""
    epoch = 0
    while True:
        generator = torch.Generator().manual_seed((job.seed * 1_000_003 + epoch) % 2**63)
        parts = list(torch.randperm(samples, generator=generator).split(job.batch_size))
        if job.drop_last and samples % job.batch_size:
            parts.pop()
        for i, rows in enumerate(parts):
            yield i == len(parts) - 1, rows
        epoch += 1


def tensors_of(job: "TrainingJob") -> dict[str, torch.Tensor]:
    """Return the tensors of model and optimizer by the names that a bundle gives them."""
    model = job.model
    named = {f"parameter/{name}": value.detach() for name, value in model.named_parameters(remove_duplicate=False)}
    named |= {f"buffer/{name}": value for name, value in model.named_buffers(remove_duplicate=False)}
    states: dict[Any, dict[str, Any]] = job.optimizer.state
    for name, parameter in model.named_parameters():
        for what, value in states.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                named[f"state/{name}/{what}"] = value.detach()
    return named


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
