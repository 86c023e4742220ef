"""Train a job with plain PyTorch on the batches of its bundle, in their order: this is the reference for bundles."""

from collections.abc import Callable, Iterator, Sequence

import torch

from port_planner.column_file import Column
from port_planner.ir.bundle.data_order import bucket_batches
from port_planner.ir.bundle.manifest import BucketSize
from port_planner.ir.graph import Role, storage_key
from port_planner.job import TrainingJob
from port_planner.job_device import kind_of_job, on_device
from port_planner.schedules import plateau_of

Pass = Callable[[TrainingJob, tuple[torch.Tensor, ...], int, int], torch.Tensor]
"""Forward and backward pass of a job on the batch with this number, of a bucket; returns the loss."""


def plain_pass(job: TrainingJob, batch: tuple[torch.Tensor, ...], number: int, bucket: int) -> torch.Tensor:
    """Run the forward and backward pass as in the program."""
    result = job.loss_of(bucket)(job.model, *batch)
    loss: torch.Tensor = result[0] if isinstance(result, tuple) else result
    loss.backward()
    return loss.detach()


def model_state(job: TrainingJob) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers by the key of their storage in a bundle."""
    for name, parameter in job.model.named_parameters():
        yield storage_key(Role.PARAMETER, name), parameter
    for name, buffer in job.model.named_buffers():
        yield storage_key(Role.BUFFER, name), buffer


def dropped_optimizer_state(job: TrainingJob) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the optimizer's tensors for the model's parameters, by their key in a bundle, and drop them.

    They are dropped one by one, so that within a budget none of them goes to a page after it was read.
    """
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in job.model.named_parameters()}
    for parameter, state in job.optimizer.state.items():
        for what in [*state]:
            value = state.pop(what)
            if isinstance(value, torch.Tensor) and parameter in names:
                yield storage_key(Role.STATE, f"{names[parameter]}/{what}"), value


def plain_losses(
    job: TrainingJob,
    data: Sequence[Column],
    steps: int,
    run: Pass = plain_pass,
    buckets: Sequence[Sequence[Column]] = (),
) -> Iterator[float]:
    """Train with plain PyTorch exactly as a bundle of this job would, yielding the loss of each batch.

    `data`, `buckets`: the columns of the job's samples, as tensors or in files.
    """
    torch.manual_seed(job.seed)
    kind = kind_of_job(job)
    columns = (data, *buckets)
    rows_to_batch = (job.batch_size, *(bucket.batch_size for bucket in job.buckets))
    sizes = [BucketSize(c[0].shape[0], size) for c, size in zip(columns, rows_to_batch, strict=True)]
    batches = bucket_batches(job.seed, sizes, drop_last=[job.drop_last] * len(sizes))
    plateau, total = plateau_of(job) is not None, 0.0
    per_epoch = sum(size.batches(drop_last=job.drop_last) for size in sizes)
    for step, (_, bucket, rows) in zip(range(steps), batches, strict=False):
        loss = run(job, on_device((c[rows] for c in columns[bucket]), kind), step, bucket)
        if (step + 1) % job.accumulate == 0:
            if job.clip_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(job.model.parameters(), job.clip_grad_norm, foreach=False)
            job.optimizer.step()
            if job.scheduler is not None and not plateau:
                job.scheduler.step()
            job.optimizer.zero_grad()
        total += float(loss)
        if plateau and (step + 1) % per_epoch == 0:
            job.scheduler.step(total / per_epoch)
            total = 0.0
        yield float(loss)
