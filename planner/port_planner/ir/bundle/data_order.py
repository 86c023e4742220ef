"""The order in which a job uses its data.

It is the same in the worker, in plain PyTorch and after a resume.
"""

import itertools
from collections.abc import Iterator, Sequence

import torch

from port_planner.ir.bundle.manifest import BucketSize


def epoch_order(seed: int, epoch: int, samples: int) -> torch.Tensor:
    """Return the permutation of sample indices of one epoch.

    The default generator stays unchanged.
    """
    return torch.randperm(samples, generator=_generator(seed, epoch))


def _generator(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + epoch) % (1 << 63))


def batch_rows(
    seed: int, samples: int, batch_size: int, *, drop_last: bool, start: int = 0
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (epoch, sample indices) for batch `start`, `start + 1`, ..., endlessly."""
    full, rest = divmod(samples, batch_size)
    per_epoch = full + (1 if rest and not drop_last else 0)
    epoch, batch = divmod(start, per_epoch)
    while True:
        order = epoch_order(seed, epoch, samples)
        for i in range(batch, per_epoch):
            yield epoch, order[i * batch_size : (i + 1) * batch_size]
        epoch, batch = epoch + 1, 0


def bucket_batches(
    seed: int, sizes: Sequence[BucketSize], *, drop_last: Sequence[bool], start: int = 0
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield (epoch, bucket, sample indices in it) for batch `start`, `start + 1`, ..., endlessly.

    `drop_last`: for each bucket, whether its last, short batch is left out. Training begins with a batch of each
    bucket, so that the first steps, which are compared with plain PyTorch's, include all of them.
    """
    if len(sizes) == 1:
        (size,), (drop,) = sizes, drop_last
        for epoch, rows in batch_rows(seed, size.samples, size.batch_size, drop_last=drop, start=start):
            yield epoch, 0, rows
        return
    per_epoch = sum(size.batches(drop_last=drop) for size, drop in zip(sizes, drop_last, strict=True))
    first_epoch, first = divmod(start, per_epoch)
    for epoch in itertools.count(first_epoch):
        for bucket, rows in _mixed(seed, epoch, sizes, drop_last)[first:]:
            yield epoch, bucket, rows
        first = 0


def _mixed(
    seed: int, epoch: int, sizes: Sequence[BucketSize], drop_last: Sequence[bool]
) -> list[tuple[int, torch.Tensor]]:
    """Return the batches of all buckets in the order of an epoch."""
    generator = _generator(seed, epoch)
    leading, rest = list[tuple[int, torch.Tensor]](), list[tuple[int, torch.Tensor]]()
    for bucket, (size, drop) in enumerate(zip(sizes, drop_last, strict=True)):
        rows = torch.randperm(size.samples, generator=generator)
        parts = [(bucket, part) for part in rows.split(size.batch_size)[: size.batches(drop_last=drop)]]
        lead = 1 if epoch == 0 else 0
        leading += parts[:lead]
        rest += parts[lead:]
    return [*leading, *(rest[i] for i in torch.randperm(len(rest), generator=generator).tolist())]
