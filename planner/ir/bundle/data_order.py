"""The order in which a job goes through its data.

It is the same in the worker, in plain PyTorch and after a resume.
"""

from collections.abc import Iterator

import torch


def epoch_order(seed: int, epoch: int, samples: int) -> torch.Tensor:
    """Return the permutation of sample indices of one epoch.

    It leaves the default generator alone.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % (1 << 63))
    return torch.randperm(samples, generator=generator)


def batch_rows(
    seed: int, samples: int, batch_size: int, *, drop_last: bool, start: int = 0
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (epoch, sample indices) for batch `start`, `start + 1`, ... without end."""
    full, rest = divmod(samples, batch_size)
    per_epoch = full + (1 if rest and not drop_last else 0)
    epoch, batch = divmod(start, per_epoch)
    while True:
        order = epoch_order(seed, epoch, samples)
        for i in range(batch, per_epoch):
            yield epoch, order[i * batch_size : (i + 1) * batch_size]
        epoch, batch = epoch + 1, 0
